"""The replies of one connection on their way out, and which fetched tasks the client can have seen."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from omniq.server.metrics import Tally

SENT_S = 0.005  # an event loop may send what it was given a moment later


class Sink(Protocol):
    """The part of a connection that an outbox needs."""

    def send(self, data: bytes) -> None: ...
    def unsent(self) -> int | None:
        """How many bytes have not left this process. None when that cannot be known any more."""
        ...


class Outbox:
    """Gathers replies, so that those of one turn leave in one call of the system."""

    def __init__(self, sink: Sink, tally: Tally) -> None:
        self._sink, self._tally = sink, tally
        self._replies: list[bytes] = []
        self._said = 0  # bytes of all replies so far
        # Where the reply of a fetched task ends, counted as in `_said`, and the number of the task. When the connection is
        # lost, a task whose reply never left this process has not failed: its client cannot have begun it.
        self._unseen: deque[tuple[int, int]] = deque()
        # A look at what has left is due. One is enough: what it finds unsent makes the next one.
        self._watching = False
        # The connection is gone. What had not left by then never will, so what is unseen stays so.
        self._closed = False

    @property
    def unseen(self) -> set[int]:
        """Numbers of the tasks that the client cannot have seen."""
        return {number for _, number in self._unseen}

    def say(self, lines: bytes) -> None:
        self._replies.append(lines)
        self._said += len(lines)

    def say_all_at_once(self, reply: bytes, numbers: Iterable[int]) -> None:
        """Send tasks in one reply: they are seen when the whole of it has left."""
        self.say(reply)
        self._unseen.extend((self._said, number) for number in numbers)

    def say_one_by_one(self, replies: list[bytes], numbers: Iterable[int]) -> None:
        """Send a task per reply."""
        said = self._said
        for reply, number in zip(replies, numbers, strict=True):
            said += len(reply)
            self._unseen.append((said, number))
        self._said = said
        self._replies += replies

    def flush(self) -> None:
        replies = self._replies
        if replies and not self._closed:
            data = replies[0] if len(replies) == 1 else b"".join(replies)
            replies.clear()
            self._tally.count_replies(data)
            self._sink.send(data)
            if self._unseen:
                self.note_sent()

    def note_sent(self) -> None:
        """Find out which fetched tasks the client can have seen, as long as that can be found out."""
        waiting = self._unseen
        if not waiting or self._replies:
            return
        left = None if self._closed else self._sink.unsent()
        if left is None:
            return
        while waiting and waiting[0][0] <= self._said - left:
            waiting.popleft()
        if waiting and not self._watching:
            self._watching = True
            asyncio.get_running_loop().call_later(SENT_S, self._watch)

    def _watch(self) -> None:
        self._watching = False
        self.note_sent()

    def close(self) -> None:
        self._closed = True
