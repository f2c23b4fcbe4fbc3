"""`omniq worker` with several processes: starts them, replaces those that die or have done enough, stops them together.

A child is the same command with `--link`: one pipe on which it reports its numbers, and one whose end tells it that this
process is gone. Children have a session of their own, so that a Ctrl-C in the terminal reaches only this process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress

import msgspec

from omniq.cli.exits import DONE, USAGE
from omniq.cli.logs import set_up_logging
from omniq.cli.stores import settings_and_url
from omniq.cli.worker.process import Plan, Report, catch_signals
from omniq.cli.worker.status_line import LiveLine, show_cursor
from omniq.errors import ConfigError, Invalid

log = logging.getLogger("omniq.cli")

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
LAST_WORDS_S = 1.0
CHUNK, MAX_LINE = 1 << 16, 1 << 20  # bytes; a longer line is cut into several
LIVED_S = 10.0  # a process that lived so long did not die of its start
_decode = msgspec.json.Decoder(Report).decode


def supervise(plan: Plan, processes: int, reload: bool) -> int:
    if not hasattr(signal, "SIGKILL"):  # Windows
        options = "--processes, --reload, --max-tasks and --max-memory"
        raise Invalid(f"{options} need Linux or macOS: start omniq worker as often as you need it")
    settings, _ = settings_and_url(plan.store)
    set_up_logging(settings.log_level)
    if reload:
        _must_have_watchfiles()
    return asyncio.run(Supervisor(plan, processes, reload, settings.log_level).run())


def _must_have_watchfiles() -> None:
    import importlib.util

    if importlib.util.find_spec("watchfiles") is None:
        raise ConfigError("--reload needs the package watchfiles: pip install watchfiles")


class Child:
    """One worker process."""

    def __init__(self, process: asyncio.subprocess.Process, life: int, reports: asyncio.StreamReader) -> None:
        self.process, self._life, self._reports = process, life, reports
        self.report = Report()
        self.started = asyncio.get_running_loop().time()
        self._reading = asyncio.gather(self._read(), _relay(process.stderr))

    async def _read(self) -> None:
        async for line in self._reports:
            with suppress(msgspec.MsgspecError):
                self.report = _decode(line)

    async def ended(self) -> int:
        code = await self.process.wait()
        await asyncio.wait([self._reading], timeout=LAST_WORDS_S)  # a program that it left behind may hold its pipes open
        self._reading.cancel()
        os.close(self._life)
        return code

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)


class Supervisor:
    """Keeps a number of worker processes running."""

    def __init__(self, plan: Plan, processes: int, reload: bool, log_level: str | None) -> None:
        self._plan, self._processes, self._reload, self._log_level = plan, processes, reload, log_level
        self._children: dict[int, Child] = {}
        self._past = Report()
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        self._changes = 0
        self._code = DONE
        self._said_what = False

    async def run(self) -> int:
        catch_signals(self._on_signal)
        watching = [asyncio.ensure_future(self._watch())] if self._reload else []
        with self._live():
            await asyncio.gather(*(self._keep(number) for number in range(self._processes)))
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        total = self.numbers()
        log.info("all workers ended: %d done, %d failed, %d retried", total.done, total.failed, total.retried)
        return self._code

    def numbers(self) -> Report:
        """Of all processes that there are and were."""
        reports = [self._past, *(child.report for child in self._children.values())]
        return Report(
            running=sum(r.running for r in reports),
            done=sum(r.done for r in reports),
            failed=sum(r.failed for r in reports),
            retried=sum(r.retried for r in reports),
        )

    def _live(self) -> AbstractContextManager[object]:
        return LiveLine(self.numbers, self._log_level) if sys.stderr.isatty() else nullcontext()

    def _on_signal(self, number: int) -> None:
        if self._stopping.is_set():
            log.warning("second signal: leaving now; unfinished tasks come back by themselves")
            for child in self._children.values():
                child.send(signal.SIGKILL)
            show_cursor()
            os._exit(128 + number)
        log.info("stopping %d worker processes", len(self._children))
        self._stop()

    def _stop(self) -> None:
        self._stopping.set()
        self._changed.set()
        for child in self._children.values():
            child.send(signal.SIGTERM)

    # -- one place for a process -------------------------------------------------------------------

    async def _keep(self, number: int) -> None:
        pause, proven = FIRST_PAUSE_S, False
        while not self._stopping.is_set():
            changes = self._changes
            child = self._children[number] = await self._start(number)
            if self._stopping.is_set():
                child.send(signal.SIGTERM)
            code = await child.ended()
            del self._children[number]
            self._add(child.report)
            proven = proven or child.report.ready
            if self._stopping.is_set() or (code == DONE and not child.report.recycled and self._changes == changes):
                return
            if code == DONE:  # it has done enough, or the code has changed
                pause = FIRST_PAUSE_S
                continue
            if not child.report.ready and code == USAGE and self._reload:
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

    def _add(self, report: Report) -> None:
        self._past.done += report.done
        self._past.failed += report.failed
        self._past.retried += report.retried

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
            *self._arguments(),
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

    def _arguments(self) -> list[str]:
        plan = self._plan
        given = {
            "--store": plan.store,
            "--queues": None if plan.queues is None else ",".join(plan.queues),
            "--concurrency": plan.concurrency,
            "--grace": None if plan.grace is None else f"{plan.grace}s",
            "--max-tasks": plan.max_tasks,
            "--max-memory": plan.max_memory,
        }
        words = [word for name, value in given.items() if value is not None for word in (name, str(value))]
        return [*words, *(["--drain-and-exit"] if plan.drain else []), "--", *plan.modules]

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
    """Whole lines: what shows them would show a part of one again with each that follows."""
    sys.stderr.write(text.decode(errors="replace") + "\n")
    sys.stderr.flush()


def _few(paths: Iterable[str]) -> str:
    names = sorted({os.path.relpath(path) for path in paths})
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
