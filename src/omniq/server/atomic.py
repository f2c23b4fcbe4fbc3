"""A transaction between ATOMIC and DONE: lines are only kept, within limits, and judged when DONE has come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from omniq.models import Record
from omniq.operations import Ack
from omniq.policy import next_run
from omniq.server import protocol
from omniq.server.options import ServeOptions
from omniq.server.protocol import ProtocolError, PushCommand


class Atomic:
    """The lines of an open transaction. Lines beyond a limit are not kept, and DONE answers with the limit's name."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._lines: list[bytes] = []
        self._bytes = 0
        # The first limit that was exceeded. Lines after it are forgotten, up to DONE, so that the client stays in step.
        self._error: str | None = None
        # PUSH commands before the first error: their ids are used up.
        self.pushes = 0
        self.commands: list[PushCommand | Ack] = []
        self.acks: dict[int, Record] = {}

    def add(self, line: bytes | None) -> None:
        options = self._options
        if self._error is not None:
            return
        if line is None:
            self._refuse(f"line is longer than max-line, {options.max_line} bytes")
        elif len(self._lines) >= options.max_transaction:
            self._refuse(f"transaction is longer than max-transaction, {options.max_transaction} commands")
        elif self._bytes + len(line) > options.max_transaction_bytes:
            self._refuse(f"transaction is longer than max-transaction-bytes, {options.max_transaction_bytes} bytes")
        else:
            self._bytes += len(line)
            self._lines.append(line)

    def _refuse(self, error: str) -> None:
        self._error = error
        self._lines.clear()

    def read(self, held: Mapping[int, Record], now_us: int) -> None:
        """Fill `commands` and `acks`. Raises `ProtocolError` for the first command that is wrong."""
        if self._error is not None:
            raise ProtocolError(self._error)
        too_big = False
        for place, line in enumerate(self._lines):
            command = protocol.parse_in_transaction(place, line, self.pushes)
            if isinstance(command, PushCommand):
                self.pushes += 1
                too_big = too_big or is_too_big(command, self._options)
                self.commands.append(command)
                continue
            number = cast(int, command.id)
            task = held.get(number)
            if task is None or number in self.acks:
                raise ProtocolError(f"task {number} not acquired")
            self.acks[number] = task
            self.commands.append(ack_of(task, command, now_us))
        if too_big:
            raise ProtocolError(protocol.TOO_BIG_IN_TRANSACTION)


def ack_of(task: Record, ack: protocol.AckCommand, now_us: int) -> Ack:
    """A task of Python that repeats is scheduled again, as a worker would do."""
    again = next_run(task, now_us) if task.interval_us else None
    token, result = cast(str, task.token), ack.result_bytes
    return Ack(queue=task.queue, id=task.id, token=token, late=True, result=result, again_us=again)


def is_too_big(push: PushCommand, options: ServeOptions) -> bool:
    payload = push.payload_bytes
    return payload is not None and len(payload) > options.max_payload
