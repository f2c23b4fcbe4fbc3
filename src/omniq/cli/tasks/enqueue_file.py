"""`omniq enqueue --from`: a task per line of a file, so that a run that was cut short can go on.

Ids are made from a number that belongs to this run and the number of the line. Beside the file, `FILE.progress` keeps that
number and the lines that are done; it is gone when all are. If the run dies between storing lines and noting it, the same
lines get the same ids again, and the store says that they are there.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from omniq.cli.commands import run
from omniq.cli.escapes import escape
from omniq.cli.exits import DONE, USAGE, say
from omniq.cli.output import bar
from omniq.cli.stores import opened
from omniq.errors import Invalid, Refused
from omniq.models import new_id
from omniq.tasks import Options, callee

if TYPE_CHECKING:
    from omniq.core import AsyncOmniQ
    from omniq.operations import Enqueue

# Lines that are stored together, and after which the note is written. Ctrl-C waits for the ones under way.
CHUNK = 1000
PIECE = 1024 * 1024
# A file of the wrong kind has a refusal per line: the first ones tell what is wrong with all of them.
MAX_SHOWN = 100
# Windows would change the ends of lines, and with them the places of lines.
_AS_IT_IS: int = getattr(os, "O_BINARY", 0)
# Those of ids, in their order: tasks of one run are listed in the order of their lines.
_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


class FileLine(msgspec.Struct, forbid_unknown_fields=True):
    """The fields that a line of the file may have."""

    func: str | UnsetType = UNSET
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    queue: str | UnsetType = UNSET
    key: str | UnsetType | None = UNSET


class FileProgress(msgspec.Struct):
    """The note that a run keeps beside its file."""

    store_id: str
    run: str
    size: int
    lines: int = 0
    bytes: int = 0
    stored: int = 0
    there: int = 0
    refused: int = 0


_decode = msgspec.json.Decoder(FileLine).decode


def enqueue_file(file: str, func: str | None, options: Options, skip: int, store: str | None) -> int:
    """Enqueue a task per line. Returns the exit code."""

    async def work() -> FileProgress:
        source = Source(file)
        try:
            async with opened(store, create=True) as oq:
                bulk = FileRun(oq, source, func, options, (await oq.storage.info()).store_id)
                return await bulk.enqueue(skip)
        finally:
            source.close()

    done = run(work())
    return USAGE if done.refused else DONE


class Source:
    """Where the lines come from. Only a run over a regular file can be resumed; a pipe is read as its lines arrive."""

    def __init__(self, file: str) -> None:
        self.name = file
        try:
            self._fd = 0 if file == "-" else os.open(file, os.O_RDONLY | _AS_IT_IS)
            found = os.fstat(self._fd)
        except OSError as exc:
            raise Invalid(f"cannot read {file}: {exc.strerror}") from None
        if stat.S_ISDIR(found.st_mode):
            raise Invalid(f"cannot read {file}: it is a folder")
        self.regular = file != "-" and stat.S_ISREG(found.st_mode)
        self.size = found.st_size if self.regular else 0

    def close(self) -> None:
        if self._fd > 0:
            os.close(self._fd)

    async def chunks(self, start: int) -> AsyncIterator[list[bytes]]:
        """Whole lines, up to `CHUNK` at a time."""
        if self.regular:
            os.lseek(self._fd, start, os.SEEK_SET)
        waiting = b""
        async for data in self._pieces():
            *lines, waiting = (waiting + data).split(b"\n")
            for at in range(0, len(lines), CHUNK):
                yield [line + b"\n" for line in lines[at : at + CHUNK]]
        if waiting:
            yield [waiting]

    async def _pieces(self) -> AsyncIterator[bytes]:
        if self.regular:
            while data := os.read(self._fd, PIECE):
                yield data
            return
        # A read from a pipe may wait for ever. In a thread that nobody waits for, it cannot keep the program from ending.
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[bytes] = asyncio.Queue(maxsize=4)

        def read() -> None:
            # The loop is closed when the program ends while this waits for a pipe.
            with suppress(RuntimeError, OSError):
                while True:
                    data = os.read(self._fd, PIECE)
                    asyncio.run_coroutine_threadsafe(pieces.put(data), loop).result()
                    if not data:
                        return

        threading.Thread(target=read, daemon=True).start()
        while data := await pieces.get():
            yield data


class FileRun:
    """One run over one file."""

    def __init__(self, oq: AsyncOmniQ, source: Source, func: str | None, options: Options, store_id: str) -> None:
        self._oq, self._source, self._func, self._options = oq, source, func, options
        self._note = Path(f"{source.name}.progress") if source.regular else None
        self.done = FileProgress(store_id=store_id, run=new_id()[:18], size=source.size)
        self._shown = 0

    async def enqueue(self, skip: int) -> FileProgress:
        resumed = self._resume()
        try:
            await self._enqueue_all(0 if resumed else skip)
        except BaseException:
            self._say_how_to_go_on()
            raise
        if self._note is not None:
            self._note.unlink(missing_ok=True)
        there = f", {self.done.there} were there already" if self.done.there else ""
        say(f"enqueued {self.done.stored} of {self.done.lines} lines{there}, {self.done.refused} refused")
        return self.done

    async def _enqueue_all(self, skip: int) -> None:
        with bar("enqueueing", self.done.size or None, self.done.bytes) as advance:
            async for chunk in self._source.chunks(self.done.bytes):
                await _whole(self._take(chunk, skip))
                advance(sum(map(len, chunk)))

    async def _take(self, chunk: list[bytes], skip: int) -> None:
        await self._enqueue_chunk(chunk, skip)
        self.done.lines += len(chunk)
        self.done.bytes += sum(map(len, chunk))
        self._remember()

    async def _enqueue_chunk(self, chunk: list[bytes], skip: int) -> None:
        made: list[tuple[int, Enqueue]] = []
        for number, text in enumerate(chunk, self.done.lines + 1):
            if number <= skip or not text.strip():
                continue
            # A line is checked alone, so that one that no store takes is refused with its number and holds up no other.
            try:
                made.append((number, self._operation(number, text)))
            except (Invalid, TypeError, RecursionError, msgspec.MsgspecError) as exc:
                self._refuse(number, exc)
        answers = await self._oq.storage.send([(op,) for _, op in made])
        for (number, _), answer in zip(made, answers, strict=True):
            if isinstance(answer, Refused):
                self._refuse(number, answer)
            elif answer[0].existed:  # type: ignore[attr-defined]
                self.done.there += 1
            else:
                self.done.stored += 1

    def _operation(self, number: int, text: bytes) -> Enqueue:
        line = _decode(text)
        name = self._func if line.func is UNSET else line.func
        if name is None:
            raise Invalid('no "func", and none on the command line')
        own = Options(
            task_id=self.done.run + _digits(number),
            queue=line.queue,
            idempotency_key=line.key,
        )
        op = self._oq.queue.template(callee(name), own.over(self._options))(line.args, line.kwargs)
        self._oq.storage.check_call([(op,)])
        return op

    def _refuse(self, number: int, exc: Exception) -> None:
        self.done.refused += 1
        self._shown += 1
        if self._shown <= MAX_SHOWN:
            unreadable = isinstance(exc, msgspec.DecodeError) and not isinstance(exc, msgspec.ValidationError)
            words = "not valid JSON" if unreadable else "refused"
            _tell(f"line {number}: {words}: {exc}")
        elif self._shown == MAX_SHOWN + 1:
            _tell(f"more than {MAX_SHOWN} lines were refused; the others are only counted")

    # -- going on ----------------------------------------------------------------------------------

    def _resume(self) -> bool:
        """Go on where the last run over this file stopped, if one did."""
        if self._note is None or not self._note.exists():
            return False
        try:
            last = msgspec.json.decode(self._note.read_bytes(), type=FileProgress)
        except (OSError, msgspec.MsgspecError) as exc:
            raise Invalid(f"{self._note} cannot be read ({exc}): delete it to begin anew") from None
        # Ids are made from the numbers of lines: in another version of the file they would belong to other tasks.
        if last.store_id != self.done.store_id or last.size != self.done.size:
            raise Invalid(f"{self._note} belongs to another store or to another version of the file: delete it to begin anew")
        self.done = last
        say(f"going on after line {last.lines}; delete {self._note} to begin anew")
        return True

    def _remember(self) -> None:
        if self._note is None:
            return
        # Written beside and moved: a run that dies while it writes leaves the note of the chunk before.
        new = self._note.with_name(self._note.name + ".new")
        try:
            new.write_bytes(msgspec.json.encode(self.done))
            os.replace(new, self._note)
        except OSError as exc:
            say(f"this run cannot be resumed: {self._note} cannot be written ({exc.strerror})")
            self._note = None

    def _say_how_to_go_on(self) -> None:
        same = "the same command" if self._note is not None else f"--skip {self.done.lines}"
        say(f"cut short after line {self.done.lines}: {self.done.stored} enqueued; {same} goes on")


def _tell(text: str) -> None:
    # Whoever stops listening to refusals still wants the other lines enqueued.
    with suppress(OSError):
        print(escape(text), file=sys.stderr)


async def _whole(step: Coroutine[Any, Any, None]) -> None:
    """Carry a step through: a Ctrl-C takes effect after it, so that what was stored is counted."""
    task = asyncio.ensure_future(step)
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(_: object) -> None:
        # Not `asyncio.shield`, which prints a traceback if the Ctrl-C cancels in the middle of its callback.
        with suppress(asyncio.InvalidStateError):
            ended.set_result(None)

    task.add_done_callback(end)
    try:
        await ended
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and (failed := task.exception()) is not None:
            raise failed from None
        raise
    task.result()


def _digits(number: int) -> str:
    """Eight characters that sort like the number: with the run's eighteen they look like any id."""
    text = ""
    for _ in range(8):
        number, digit = divmod(number, 32)
        text = _DIGITS[digit] + text
    return text
