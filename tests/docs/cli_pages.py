"""Makes the pages of the commands from their own help: `python tests/docs/cli_pages.py` writes docs/reference/cli/."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from omniq.cli.app import app

NOTE = "<!-- Made from the help of the command by tests/docs/cli_pages.py. -->"


def pages() -> dict[str, str]:
    """The name of each page's file, and its text."""
    root: Any = get_command(app)
    return {f"{name}.md": page(f"omniq {name}", command) for name, command in root.commands.items()}


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that can be run, with its words."""
    root: Any = get_command(app)
    return _runnable("omniq", root.commands)


def _runnable(path: str, named: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, command in named.items():
        if not hasattr(command, "commands") or command.invoke_without_command:
            yield f"{path} {name}", command
        yield from _runnable(f"{path} {name}", getattr(command, "commands", {}))


def page(path: str, command: Any) -> str:
    return "\n\n".join([f"# `{path}`", NOTE, *section(path, command), *_below(path, command, "##")]) + "\n"


def _below(path: str, command: Any, level: str) -> Iterator[str]:
    for name, inner in getattr(command, "commands", {}).items():
        yield f"{level} `{path} {name}`"
        yield from section(f"{path} {name}", inner)
        yield from _below(f"{path} {name}", inner, level + "#")


def section(path: str, command: Any) -> Iterator[str]:
    examples: list[str] = []
    for paragraph in re.split(r"\n\s*\n", command.help or ""):
        text = " ".join(paragraph.split())
        if text.startswith("Example: "):
            examples.append(text.removeprefix("Example: "))
        elif text:
            yield escaped(text)
    parameters = [p for p in command.params if not getattr(p, "hidden", False) and p.name not in OF_EVERY_COMMAND]
    runs = not hasattr(command, "commands") or command.invoke_without_command
    if runs:
        yield f"```text\n{usage(path, parameters)}\n```"
    if parameters and runs:
        rows = [f"| `{spelled(p)}` | {escaped(meaning(p))} |" for p in parameters]
        yield "\n".join(["| argument or option | meaning |", "|---|---|", *rows])
    if examples:
        yield "```text\n" + "\n".join(examples) + "\n```"


OF_EVERY_COMMAND = {"help", "install_completion", "show_completion", "context"}


def usage(path: str, parameters: list[Any]) -> str:
    words = [path]
    words += [metavar(p) if p.required else f"[{metavar(p)}]" for p in parameters if is_argument(p)]
    return " ".join([*words, "[OPTIONS]"])


def is_argument(parameter: Any) -> bool:
    return parameter.param_type_name == "argument"


def metavar(parameter: Any) -> str:
    return parameter.metavar or parameter.name.upper()


def spelled(parameter: Any) -> str:
    if is_argument(parameter):
        return metavar(parameter)
    name = next(word for word in parameter.opts if word.startswith("--"))
    if parameter.is_flag:
        return name
    return f"{name} {parameter.metavar or name.rpartition('-')[2].upper()}"


def meaning(parameter: Any) -> str:
    text = parameter.help or ""
    default = parameter.default
    if is_argument(parameter) or default in (None, False, ()) or callable(default) or "Default" in text:
        return text
    return f"{text} Default: {default}."


def escaped(text: str) -> str:
    """Text that Markdown shows as it is: what looks like code becomes code."""
    text = re.sub(r"(?<![\w`-])(--[a-z][a-z-]*)", r"`\1`", text)
    return text.replace("|", "\\|").replace("<", "&lt;").replace("…]", "…\\]").replace("[…", "\\[…")


def main() -> None:
    folder = Path(__file__).resolve().parents[2] / "docs" / "reference" / "cli"
    folder.mkdir(exist_ok=True)
    made = pages()
    for path in folder.glob("*.md"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        (folder / name).write_text(text)
    print(f"wrote {len(made)} pages", file=sys.stderr)


if __name__ == "__main__":
    main()
