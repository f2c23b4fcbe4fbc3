"""`omniq worker` with several processes: starts them, replaces those that die or have done enough, stops them together.

A child is the same command with `--link`: one pipe on which it reports its numbers, and one whose end tells it that this
process is gone. Children have a session of their own, so that a Ctrl-C in the terminal reaches only this process.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from omniq.cli.commands import run
from omniq.cli.exits import DONE, USAGE
from omniq.cli.logs import log_lines
from omniq.cli.stopping import leave
from omniq.cli.stores import settings_and_url
from omniq.cli.worker.options import WorkerOptions
from omniq.cli.worker.process import ProcessReport
from omniq.cli.worker.status_line import WorkerNumbers, live_line
from omniq.errors import ConfigError, Invalid
from omniq.signals import caught_on_loop

log = logging.getLogger("omniq.cli")

# Between two starts of processes that die at once, so that a mistake in the code costs no whole processor.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
LAST_WORDS_S = 1.0
# Bytes; a longer line is cut into several.
CHUNK, MAX_LINE = 1 << 16, 1 << 20
# A process that lived so long did not die of its start: the pauses begin anew.
LIVED_S = 10.0
_decode = msgspec.json.Decoder(ProcessReport).decode


def supervise(options: WorkerOptions) -> int:
    """Run tasks in several processes. Returns the exit code."""
    # Windows has neither this signal nor pipes that a child inherits by number.
    if not hasattr(signal, "SIGKILL"):
        words = "--processes, --reload, --max-tasks and --max-memory"
        raise Invalid(f"{words} need Linux or macOS: start omniq worker as often as you need it")
    if options.reload and importlib.util.find_spec("watchfiles") is None:
        raise ConfigError("--reload needs the package watchfiles: pip install watchfiles")
    settings, _ = settings_and_url(options.store)
    with log_lines(settings.log_level):
        return run(Supervisor(options, settings.log_level).run())


class Child:
    """One worker process."""

    def __init__(self, process: asyncio.subprocess.Process, life: int, reports: asyncio.StreamReader) -> None:
        self.process, self._life, self._reports = process, life, reports
        self.report = ProcessReport()
        self.started = asyncio.get_running_loop().time()
        self._reading = asyncio.gather(self._read(), _relay(process.stderr))

    async def _read(self) -> None:
        async for line in self._reports:
            with suppress(msgspec.MsgspecError):
                self.report = _decode(line)

    async def ended(self) -> int:
        code = await self.process.wait()
        # Not for ever: a program that it left behind may hold its pipes open.
        await asyncio.wait([self._reading], timeout=LAST_WORDS_S)
        self._reading.cancel()
        os.close(self._life)
        return code

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)


class Supervisor:
    """Keeps a number of worker processes running."""

    def __init__(self, options: WorkerOptions, log_level: str | None) -> None:
        self._options, self._log_level = options, log_level
        self._children: dict[int, Child] = {}
        self._keeping: list[asyncio.Future[None]] = []
        # Of the processes that have ended: what all have done never becomes less.
        self._past = WorkerNumbers()
        self._stopping = asyncio.Event()
        # The code has changed, or the workers stop: with --reload a process that cannot start waits for either.
        self._changed = asyncio.Event()
        # Changes of the code so far: a process that ends after one is replaced though it ended well.
        self._changes = 0
        # That of the first process that could not begin.
        self._code = DONE
        # The first process has said what it works on; those beside it and after it need not.
        self._said_what = False

    async def run(self) -> int:
        watching = [asyncio.ensure_future(self._watch())] if self._options.reload else []
        with caught_on_loop(self._on_signal), live_line(self.numbers, self._log_level):
            self._keeping = [asyncio.ensure_future(self._keep(number)) for number in range(self._options.processes)]
            await asyncio.gather(*self._keeping)
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        total = self.numbers()
        log.info("all workers ended: %d done, %d failed, %d retried", total.done, total.failed, total.retried)
        return self._code

    def numbers(self) -> WorkerNumbers:
        """The numbers of all processes, those that have ended included."""
        return _sum([self._past, *(child.report for child in self._children.values())])

    def _on_signal(self, number: int) -> None:
        if self._stopping.is_set():
            for child in self._children.values():
                child.send(signal.SIGKILL)
            leave(number)
        # Not the children: on a busy machine a process may work before its start has returned here.
        log.info("stopping %d worker processes", sum(not keeping.done() for keeping in self._keeping))
        self._stop()

    def _stop(self) -> None:
        self._stopping.set()
        self._changed.set()
        for child in self._children.values():
            child.send(signal.SIGTERM)

    # -- one place for a process -------------------------------------------------------------------

    async def _keep(self, number: int) -> None:
        # Once a process has begun to work, its successors are started again and again; a first one that cannot ends all.
        pause, proven = FIRST_PAUSE_S, False
        while not self._stopping.is_set():
            changes = self._changes
            child = self._children[number] = await self._start(number)
            if self._stopping.is_set():
                child.send(signal.SIGTERM)
            code = await child.ended()
            del self._children[number]
            self._past = _sum([self._past, msgspec.structs.replace(child.report, running=0)])
            proven = proven or child.report.ready
            if self._stopping.is_set() or (code == DONE and not child.report.recycled and self._changes == changes):
                return
            # It has done enough, or the code has changed: the next one is no second try, and waits for nothing.
            if code == DONE:
                pause = FIRST_PAUSE_S
                continue
            if not child.report.ready and code == USAGE and self._options.reload:
                log.warning("waiting for a change of the code")
                await self._change_after(changes)
                continue
            if not proven and code > 0:
                self._code = self._code or code
                self._stop()
                return
            log.warning("worker process %d %s; starting another", child.process.pid, _how(code))
            if asyncio.get_running_loop().time() - child.started > LIVED_S:
                pause = FIRST_PAUSE_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
            pause = min(pause * 2, MAX_PAUSE_S)

    async def _start(self, number: int) -> Child:
        report_read, report_write = os.pipe()
        life_read, life_write = os.pipe()
        shown = 1 if self._said_what or number > 0 else 0
        self._said_what = self._said_what or number == 0
        relayed = asyncio.subprocess.PIPE if sys.stderr.isatty() else None
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "omniq", "worker"),
            *("--link", f"{shown},{report_write},{life_read}"),
            *self._options.for_process(),
            pass_fds=(report_write, life_read),
            start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=relayed,
        )
        os.close(report_write)
        os.close(life_read)
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(report_read, "rb"))
        return Child(process, life_write, reader)

    # -- changes of the code -----------------------------------------------------------------------

    async def _watch(self) -> None:
        from watchfiles import PythonFilter, awatch  # pyright: ignore[reportUnknownVariableType]

        async for found in awatch(os.getcwd(), watch_filter=PythonFilter(), stop_event=self._stopping):
            log.info("%s changed: restarting the workers", _few(path for _, path in found))
            self._changes += 1
            self._changed.set()
            for child in self._children.values():
                child.send(signal.SIGTERM)

    async def _change_after(self, changes: int) -> None:
        while self._changes == changes and not self._stopping.is_set():
            self._changed.clear()
            await self._changed.wait()


def _sum(several: Sequence[WorkerNumbers]) -> WorkerNumbers:
    return WorkerNumbers(
        running=sum(n.running for n in several),
        done=sum(n.done for n in several),
        failed=sum(n.failed for n in several),
        retried=sum(n.retried or 0 for n in several),
    )


async def _relay(lines: asyncio.StreamReader | None) -> None:
    """Lines of a child, above the live line."""
    if lines is None:
        return
    held = b""
    # Not line by line: a very long one would be an error here, and the pipe, which nobody reads then, stop the child.
    while chunk := await lines.read(CHUNK):
        held += chunk
        whole, newline, held = (held + b"\n" if len(held) > MAX_LINE else held).rpartition(b"\n")
        if newline:
            _show(whole)
    if held:
        _show(held)


def _show(text: bytes) -> None:
    """Pass on whole lines: a part of a line would be shown again with each part that follows."""
    sys.stderr.write(text.decode(errors="replace") + "\n")
    sys.stderr.flush()


def _few(paths: Iterable[str]) -> str:
    names = sorted({os.path.relpath(path) for path in paths})
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
