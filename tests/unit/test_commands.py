"""Commands as functions, and what they leave behind in the program that runs them."""

import logging
import signal
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from omniq import OmniQ
from omniq.cli.app import app
from omniq.cli.commands import command


class Where(msgspec.Struct):
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="An address.")]
    port: Annotated[int, typer.Option(metavar="N")] = 1


@command
async def visit(*, name: str = "Ada", where: Where, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
    said = f"{name} visits {where.host}:{where.port}"
    typer.echo(said.upper() if loud else said)


def shown(*words: str) -> str:
    commands = typer.Typer()
    commands.command()(visit)
    return CliRunner().invoke(commands, list(words), catch_exceptions=False).output


def test_the_fields_of_a_struct_are_options_and_a_coroutine_is_run() -> None:
    assert shown("--host", "a.example", "--port", "2") == "Ada visits a.example:2\n"
    assert shown("--name", "Bob", "--host", "b", "--loud") == "BOB VISITS B:1\n"
    assert "--host" in shown("--port", "2")  # it must be given


def test_the_help_shows_the_options_in_the_order_in_which_they_were_written() -> None:
    text = shown("--help")
    places = [text.index(option) for option in ("--name", "--host", "--port", "--loud")]
    assert places == sorted(places)
    assert "An address." in text


def test_a_command_leaves_the_program_as_it_found_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "left_behind.py").write_text("def add(a, b):\n    return a + b\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    logger = logging.getLogger("omniq")

    def state() -> object:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        return list(sys.path), logger.handlers[:], logger.level, logger.propagate, handlers

    before = state()
    url = f"sqlite:///{tmp_path}/queue.db?durability=process"
    with OmniQ.from_url(url) as oq:
        id = oq.enqueue("left_behind:add", 2, 3)
    done = CliRunner().invoke(app, ["worker", "left_behind", "--drain-and-exit", "--store", url], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert CliRunner().invoke(app, ["result", id, "--store", url], catch_exceptions=False).stdout == "5\n"
    assert state() == before
