"""A proxy for one TCP port of the loopback that breaks connections when told to."""

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable


class Proxy:
    """Forwards to a port. `drop` breaks every connection, `swallow_reply` the next one after its request went through.

    `before_request` is called before anything that a client sent goes on, or a part of it.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.before_request: Callable[[], object] = lambda: None
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._servers: set[socket.socket] = set()
        self._swallow = self._stay_away = self._away = False
        self._pass = 0
        self._ending = False
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="test-proxy")
        self._thread.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def drop(self) -> int:
        """Break all connections; how many there were."""
        with self._lock:
            clients = [c for c in self._pairs if c not in self._servers]
            for client in clients:
                self._break(client)
            return len(clients)

    def swallow_reply(self, *, stay_away: bool = False, after: int = 0) -> None:
        """With `stay_away` there is nobody from then on; `after` replies go through before."""
        with self._lock:
            self._swallow, self._stay_away, self._pass = True, stay_away, after

    def swallow_none(self) -> None:
        with self._lock:
            self._swallow = False

    def close(self) -> None:
        self._ending = True
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            pass
        self._thread.join()

    def _run(self) -> None:
        while not self._ending:
            for key, _ in self._selector.select(0.2):
                end = key.fileobj
                assert isinstance(end, socket.socket)
                if end is self._listener:
                    self._accept()
                else:
                    self._forward(end)
        self.drop()
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if self._away:
            client.close()
            return
        try:
            server = socket.create_connection(("127.0.0.1", self._target), 1)
        except OSError:
            client.close()
            return
        with self._lock:
            self._pairs[client], self._pairs[server] = server, client
            self._servers.add(server)
            for end in (client, server):
                self._selector.register(end, selectors.EVENT_READ)

    def _forward(self, end: socket.socket) -> None:
        with self._lock:
            other = self._pairs.get(end)
            if other is None:
                return
            try:
                data = end.recv(65536)
                if data and self._swallow and end in self._servers:
                    if self._pass:
                        self._pass -= 1
                    else:
                        self._swallow, data = False, b""
                        self._away = self._stay_away
                if data and end not in self._servers:
                    self.before_request()
                if data:
                    other.sendall(data)
                    return
            except OSError:
                pass
            self._break(end)

    def _break(self, end: socket.socket) -> None:
        other = self._pairs.pop(end)
        del self._pairs[other]
        for one in (end, other):
            self._servers.discard(one)
            self._selector.unregister(one)
            one.close()
