"""How a command ends: exit codes, and one sentence on stderr instead of a traceback."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any

import typer
from typer.core import TyperGroup

from omniq.cli.escapes import escape
from omniq.errors import Invalid, OmniQError

DONE = 0
FAILED = 1  # the store failed, or there is no such task, queue or group
USAGE = 2  # wrong usage, or input that cannot be read
TASK_FAILED = 3  # the task that was waited for FAILED or was CANCELLED
NOT_ENDED = 4
# 128 and the number of SIGINT, as a shell has it.
INTERRUPTED = 130


class Missing(OmniQError):
    """There is no such store, queue or group."""


class Quiet(TyperGroup):
    """A group of commands whose reader may leave early: `omniq tasks list | head` ends without a word."""

    def invoke(self, ctx: Any) -> Any:
        # A program that runs commands in itself keeps its own: `worker` and others put the working folder in front.
        path = sys.path[:]
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            # Python flushes stdout once more when it ends, and would complain then.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(DONE) from None
        finally:
            sys.path[:] = path


def run_app(app: typer.Typer) -> int:
    """Run the command line. Returns the exit code; a mistake or a failing store is a sentence on stderr, never a traceback."""
    for name in ("stdout", "stderr"):
        # It was closed before we began: nobody wants to hear, and writing to None would be an error.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the program runs
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character is no reason to fail.
            stream.reconfigure(errors="backslashreplace")
    # Python takes bytes that are no UTF-8 for surrogates, which no store can keep and no terminal show.
    if any(_is_undecoded(word) for word in sys.argv):
        say("the command line is not UTF-8 text")
        return USAGE
    try:
        code = app(prog_name="omniq", standalone_mode=False)
        return code if isinstance(code, int) else DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except OmniQError as exc:
        say(str(exc))
        return USAGE if isinstance(exc, Invalid) else FAILED
    except OSError as exc:
        say(f"{exc.filename or 'the system'}: {exc.strerror or exc}")
        return FAILED
    except Exception as exc:
        # What the parser of the command line raises has it; its classes have moved between versions of typer.
        if not hasattr(exc, "format_message"):
            raise
        return _usage_error(exc)


def _is_undecoded(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return True
    return False


def _usage_error(exc: Any) -> int:
    message = exc.format_message()
    context = getattr(exc, "ctx", None)
    # A group without a command shows its help, as it is.
    if context is not None and message == context.get_help():
        print(message, file=sys.stderr)
        return USAGE
    path = context.command_path if context is not None else "omniq"
    say(f"{message.replace(': Value error, ', ': ').rstrip('.')} (see {path} --help)")
    return exc.exit_code


def say(sentence: str) -> None:
    """A message to the person, on stderr."""
    text = escape(" ".join(line.strip() for line in sentence.splitlines()))
    # Nobody listens.
    with suppress(OSError):
        print(f"omniq: {text}", file=sys.stderr, flush=True)
