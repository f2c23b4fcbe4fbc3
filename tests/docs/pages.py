"""Finds the code blocks of a Markdown page, and runs them.

A page's blocks run in order in one folder and one process:

- `python` blocks run one after another in one namespace. A block whose first line is a comment like `# tasks.py` is
  written to that file instead, where other blocks and commands find it.
- `sh` and `console` blocks run line by line. In `console` blocks commands begin with `$`, and other lines are the
  output that must come. Commands of `make`, `pip`, `git`, `cd` and `source` are for the reader and do not run. Those of
  `LOOK` go through the shell; where one is not installed it does not run.
- A command that ends with `&` is a server: it runs on until the page ends, and the next one waits until it listens. A
  command with a pipe goes through the shell. An `sh` block may be a file too. Port 12345 becomes one that is free.
- A `text title="Output"` block is what the block before it must have printed. `…` stands for anything.
- A block after `<!-- no-test: reason -->` does not run.
- A page that uses Spark runs in tests/spark: with the session of the tests when it has only `python` blocks, else by itself
  and with the slow tests, since each command starts Spark.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

FOR_READERS = ("make", "pip", "git", "cd", "source")
RUN = ("omniq", "python", "export", "printf", "bash", "node")
LOOK = ("ls", "cat", "cp", "grep", "jq")
PORT = "12345"
REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,})(?P<info>[^`\n]*)$")
_SPARK = re.compile(r"omniq\.spark|pyspark|\bomniq (?:lake|spark)\b")
_NO_TEST = re.compile(r"<!--\s*no-test:\s*(?P<reason>.*?)\s*-->")
_FILE = re.compile(r"# (?P<name>[\w./-]+\.(?:py|toml|ini|sql|sh))$")


class Block(msgspec.Struct):
    language: str
    code: str
    line: int
    output: bool = False
    no_test: str | None = None

    @property
    def file(self) -> str | None:
        found = _FILE.match(self.code.partition("\n")[0])
        return found["name"] if found and self.language in ("python", "sh") else None


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order; `line` is where the code begins."""
    found: list[Block] = []
    lines = page.read_text().splitlines()
    number, reason = 0, None
    while number < len(lines):
        text = lines[number]
        if mark := _NO_TEST.search(text):
            reason = mark["reason"]
        elif opening := _FENCE.match(text):
            indent = len(opening["indent"])
            end = next(i for i in range(number + 1, len(lines)) if lines[i].strip() == opening["fence"])
            code = "\n".join(row[indent:] for row in lines[number + 1 : end])
            info = opening["info"].strip()
            language = info.split(" ")[0]
            found.append(Block(language, code + "\n", number + 2, 'title="Output"' in info, reason))
            number, reason = end, None
        elif text.strip():
            reason = None
        number += 1
    return found


def to_run(page: Path) -> list[Block]:
    """The blocks of a page that run, or that files and outputs are in."""
    found = [block for block in blocks(page) if block.no_test is None]
    return found if any(block.language in ("python", "sh", "console") for block in found) else []


def on_spark(found: list[Block], *languages: str) -> bool:
    """Whether one of these blocks, of these languages if some are named, uses Spark."""
    return any(_SPARK.search(block.code) for block in found if not languages or block.language in languages)


def run_page(page: Path, folder: Path, timeout: float) -> None:
    """Run a page in a folder and a process of its own."""
    from support import forks  # not for that process, which imports this module too

    environment = {key: value for key, value in os.environ.items() if not key.startswith("OMNIQ_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    if not has_netcat():  # then a stand-in of our own: what the pages show is the protocol, not netcat
        environment["PATH"] = f"{Path(__file__).with_name('stand-ins')}{os.pathsep}{environment['PATH']}"
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, __file__, name(page), msgspec.json.encode(to_run(page)).decode()]
    done = forks.run(command, cwd=folder, env=environment, timeout=timeout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@functools.cache
def has_netcat() -> bool:
    """Whether `nc` is one that knows `-N`; there are several programs of that name."""
    if shutil.which("nc") is None:
        return False
    told = subprocess.run(["nc", "-h"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=10)
    return bool(re.search(r"^\s+-N\b", told.stdout + told.stderr, re.MULTILINE))


def name(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


class Runner:
    """Runs the blocks of a page in the working folder, with the names of a module."""

    def __init__(self, module: ModuleType) -> None:
        self.namespace: dict[str, Any] = vars(module)
        self.printed = ""
        self.servers: list[subprocess.Popen[str]] = []

    def run(self, page: str, block: Block) -> None:
        if block.output:
            compare(block.code, self.printed)
        elif block.file is not None:
            self._write(block.file, block.code)
        elif block.language == "python":
            self._python(page, block)
        elif block.language in ("sh", "bash", "console"):
            self._shell(block)

    @staticmethod
    def _write(name: str, code: str) -> None:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
        importlib.invalidate_caches()
        sys.modules.pop(".".join(path.with_suffix("").parts), None)

    def _python(self, page: str, block: Block) -> None:
        heard = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.code, page, "exec")
        with contextlib.redirect_stdout(heard):
            exec(code, self.namespace)  # noqa: S102 - that is what it is for
        self.printed = heard.getvalue()

    def _shell(self, block: Block) -> None:
        self.printed = ""
        for command, expected in commands(block):
            words = shlex.split(command, comments=True)
            if not words or words[0] in FOR_READERS or (words[0] in LOOK and shutil.which(words[0]) is None):
                continue
            variables = dict(w.split("=", 1) for w in words if re.match(r"[A-Z_]+=", w))
            if words[0] == "export":
                os.environ.update(variables)
                continue
            words = [w for w in words if not re.match(r"[A-Z_]+=", w)]
            if words[-1] == "&":
                self._serve(words[:-1], os.environ | variables)
                continue
            if "|" in words or words[0] in LOOK:
                words = ["sh", "-c", command]
            done = subprocess.run(words, env=os.environ | variables, capture_output=True, text=True, timeout=300)
            if done.returncode != 0:
                raise AssertionError(f"{command!r} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
            self.printed += done.stdout
            if expected:
                compare(expected, done.stdout + done.stderr)

    def _serve(self, words: list[str], environment: dict[str, str]) -> None:
        server = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
        self.servers.append(server)
        assert server.stderr is not None
        line = server.stderr.readline()
        assert "listening" in line, line

    def close(self) -> None:
        for server in self.servers:
            server.terminate()
        for server in self.servers:
            server.communicate(timeout=30)


def commands(block: Block) -> list[tuple[str, str]]:
    """Each command with the output that must follow it, if any is shown."""
    joined = block.code.replace("\\\n", " ")
    if block.language != "console":
        return [(line, "") for line in joined.splitlines()]
    parts = re.split(r"^\$ ", joined, flags=re.MULTILINE)[1:]
    return [(part.partition("\n")[0], part.partition("\n")[2]) for part in parts]


def compare(expected: str, printed: str) -> None:
    pattern = r".*?".join(re.escape(part) for part in expected.strip().split("…"))
    pattern = re.sub(r"(\\ ){2,}", r" {2,}", pattern)  # columns are as wide as what is in them, ages too
    trimmed = "\n".join(line.rstrip() for line in printed.splitlines())
    if not re.fullmatch(pattern, trimmed.strip(), re.DOTALL):
        raise AssertionError(f"the page shows\n{expected}\nand this was printed:\n{printed}")


def main(page: str, listed: str) -> None:
    """Run in a process of its own: `python pages.py PAGE BLOCKS`, the blocks as JSON."""
    sys.path[0] = os.getcwd()  # as for a script that lies there; the folder of the tests is not for pages
    runner = Runner(sys.modules["__main__"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    try:
        for item in json.loads(listed):
            block = msgspec.convert(item, Block)
            block.code = block.code.replace(PORT, port)
            try:
                runner.run(page, block)
            except BaseException:
                print(f"\n{page}, the block at line {block.line}:\n{block.code}", file=sys.stderr)
                raise
    finally:
        runner.close()


if __name__ == "__main__":
    import pages  # under its own name, so that no block can overwrite what runs it

    pages.main(*sys.argv[1:])
