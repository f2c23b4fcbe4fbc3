"""The wake-up channel: scripts ring it when tasks become ready or end, a thread listens while anybody waits.

A hint only. Clients of other makes never ring, so every wait is short and followed by a look.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from omniq.storage.waiting import Waiters

if TYPE_CHECKING:
    from omniq.storage.redis.client import RedisClient

CHANNEL = "{omniq.store}:wake"
AGAIN_S = 0.2  # before another try to subscribe, while the server is away

_decode = msgspec.msgpack.Decoder(tuple[list[str], list[str], bool]).decode
_encode = msgspec.msgpack.Encoder().encode


class Listener:
    """One subscriber per storage object, started by the first who waits."""

    def __init__(self, client: RedisClient, waiters: Waiters) -> None:
        self._client, self._waiters = client, waiters
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()  # a forked child has this object, and not its thread
        self._ending = threading.Event()
        self._subscription: Any = None

    def start(self) -> None:
        if self._thread is not None and self._pid == os.getpid():
            return
        with self._lock:
            if self._ending.is_set() or (self._thread is not None and self._pid == os.getpid()):
                return
            self._pid = os.getpid()
            self._thread = threading.Thread(target=self._listen, name="omniq-redis-wake", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        with self._lock:
            thread = self._thread if self._pid == os.getpid() else None
        if thread is not None:
            self._hang_up()
            thread.join(5)

    def _hang_up(self) -> None:
        """Shut the socket under the listener, which is blocked in a read that redis-py cannot end."""
        with contextlib.suppress(Exception):
            self._subscription.connection._sock.shutdown(socket.SHUT_RDWR)

    async def ring(self, queue: str) -> None:
        await self._client.command("PUBLISH", CHANNEL, _encode(([queue], [], False)))

    def _listen(self) -> None:
        while not self._ending.is_set():
            client = None
            try:
                # No timeout: a channel may be silent for hours.
                client = self._client.make_blocking(socket_timeout=None)
                with client.pubsub() as subscription:
                    self._subscription = subscription
                    subscription.subscribe(CHANNEL)
                    if self._ending.is_set():
                        return
                    for message in subscription.listen():
                        self._heard(message)
                        if self._ending.is_set():
                            return
            except Exception:
                self._waiters.notify_all()  # what was rung meanwhile is lost: let everybody look
                self._ending.wait(AGAIN_S)
            finally:
                self._subscription = None
                if client is not None:
                    with contextlib.suppress(Exception):
                        client.close()

    def _heard(self, message: dict[str, Any]) -> None:
        if message["type"] != "message":
            self._waiters.notify_all()  # just subscribed: something may have happened before
            return
        try:
            queues, tasks, many = _decode(message["data"])
        except (msgspec.DecodeError, msgspec.ValidationError):
            # Anybody may publish there. What cannot be read still says that something happened.
            queues, tasks, many = [], [], True
        if many:
            self._waiters.notify_all()
        else:
            self._waiters.notify(queues, tasks)
