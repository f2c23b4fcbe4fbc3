"""`omniq enqueue --from`: a task per line of a file, so that a run that was cut short can go on.

Ids are made from a number that belongs to this run and the number of the line. Beside the file, `FILE.progress` keeps that
number and the lines that are done; it is gone when all are. If the run dies between storing lines and noting it, the same
lines get the same ids again, and the store says that they are there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from omniq.cli.exits import DONE, USAGE, say
from omniq.cli.stores import opened, run
from omniq.errors import Invalid, Refused
from omniq.models import new_id
from omniq.tasks import Options, callee

if TYPE_CHECKING:
    from omniq.core import AsyncOmniQ
    from omniq.operations import Enqueue

CHUNK = 1000
MAX_LINE = 64 * 1024 * 1024
MAX_SHOWN = 100
_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """What a line of the file may say."""

    func: str | UnsetType = UNSET
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    queue: str | UnsetType = UNSET
    key: str | UnsetType | None = UNSET


class Progress(msgspec.Struct):
    """What a run remembers beside its file."""

    store_id: str
    run: str
    size: int
    lines: int = 0
    bytes: int = 0
    stored: int = 0
    there: int = 0
    refused: int = 0


_decode = msgspec.json.Decoder(Line).decode


def enqueue_file(file: str, func: str | None, options: Options, skip: int, store: str | None) -> int:
    """Enqueue every line; the exit code."""

    async def work() -> Progress:
        with _input(file) as lines:
            async with opened(store, create=True) as oq:
                bulk = Bulk(oq, file, func, options, (await oq.storage.info()).store_id)
                return await bulk.enqueue(lines, skip)

    done = run(work)
    return USAGE if done.refused else DONE


def _input(file: str) -> Any:
    if file == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        return open(file, "rb")
    except OSError as exc:
        raise Invalid(f"cannot read {file}: {exc.strerror}") from None


class Bulk:
    """One run over one file."""

    def __init__(self, oq: AsyncOmniQ, file: str, func: str | None, options: Options, store_id: str) -> None:
        self._oq, self._func, self._options = oq, func, options
        self._file = None if file == "-" else Path(file)
        self._note = None if self._file is None else Path(f"{file}.progress")
        size = 0 if self._file is None else self._file.stat().st_size
        self.done = Progress(store_id=store_id, run=new_id()[:18], size=size)
        self._shown = 0

    async def enqueue(self, lines: IO[bytes], skip: int) -> Progress:
        resumed = self._resume(lines)
        for _ in range(0 if resumed else skip):
            self.done.bytes += len(lines.readline())
            self.done.lines += 1
        try:
            await self._enqueue_all(lines)
        except BaseException:
            self._say_how_to_go_on()
            raise
        if self._note is not None:
            self._note.unlink(missing_ok=True)
        there = f", {self.done.there} were there already" if self.done.there else ""
        say(f"enqueued {self.done.stored} of {self.done.lines} lines{there}, {self.done.refused} refused")
        return self.done

    async def _enqueue_all(self, lines: IO[bytes]) -> None:
        from omniq.cli.progress import bar

        with bar("enqueueing", self.done.size or None, self.done.bytes) as advance:
            for chunk, read in _chunks(lines):
                await self._enqueue_chunk(chunk)
                self.done.lines += len(chunk)
                self.done.bytes += read
                self._remember()
                advance(read)

    async def _enqueue_chunk(self, chunk: list[bytes]) -> None:
        made: list[tuple[int, Enqueue]] = []
        for number, text in enumerate(chunk, self.done.lines + 1):
            if not text.strip():
                continue
            try:
                made.append((number, self._operation(number, text)))
            except (Invalid, TypeError, msgspec.MsgspecError) as exc:
                self._refuse(number, exc)
        answers = await self._oq.storage.apply([(op,) for _, op in made])
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
            words = "not valid JSON" if isinstance(exc, msgspec.DecodeError) and not _is_about_fields(exc) else "refused"
            print(f"line {number}: {words}: {exc}", file=sys.stderr)
        elif self._shown == MAX_SHOWN + 1:
            print(f"more than {MAX_SHOWN} lines were refused; the others are only counted", file=sys.stderr)

    # -- going on ----------------------------------------------------------------------------------

    def _resume(self, lines: IO[bytes]) -> bool:
        """Go on where the last run over this file stopped, if one did."""
        if self._note is None or not self._note.exists():
            return False
        try:
            last = msgspec.json.decode(self._note.read_bytes(), type=Progress)
        except (OSError, msgspec.MsgspecError) as exc:
            raise Invalid(f"{self._note} cannot be read ({exc}): delete it to begin anew") from None
        if last.store_id != self.done.store_id or last.size != self.done.size:
            raise Invalid(f"{self._note} belongs to another store or to another version of the file: delete it to begin anew")
        self.done = last
        lines.seek(last.bytes)
        say(f"going on after line {last.lines}; delete {self._note} to begin anew")
        return True

    def _remember(self) -> None:
        if self._note is None:
            return
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


def _is_about_fields(exc: Exception) -> bool:
    return isinstance(exc, msgspec.ValidationError)


def _chunks(lines: IO[bytes]) -> Iterator[tuple[list[bytes], int]]:
    chunk: list[bytes] = []
    read = 0
    while line := lines.readline(MAX_LINE):
        chunk.append(line)
        read += len(line)
        if len(chunk) == CHUNK:
            yield chunk, read
            chunk, read = [], 0
    if chunk:
        yield chunk, read


def _digits(number: int) -> str:
    """Eight characters that sort like the number: with the run's eighteen they look like any id."""
    text = ""
    for _ in range(8):
        number, digit = divmod(number, 32)
        text = _DIGITS[digit] + text
    return text
