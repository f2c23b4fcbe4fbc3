"""Real servers of the line protocol in processes of their own, on each store, and plain sockets to speak to them."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import struct
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from support.forks import Python, run
from support.redis_server import Server, running

WAIT_S = 30.0
TOKEN = "open sesame"


class Store(msgspec.Struct, frozen=True):
    """A kind of store that servers run on. `url` makes a fresh one in a folder; `durable`: it outlives its server."""

    url: Callable[[Path], str]
    durable: bool
    tear: Callable[[Path], None] = lambda folder: None  # leave what a write that was cut off leaves
    by_time: bool = True  # what is due earlier goes first; else what came earlier
    place: str | None = None  # what `omniq backup` copies, in the folder of the server


def _tear_sqlite(folder: Path) -> None:
    with (folder / "queue.db-wal").open("ab") as log:
        log.write(os.urandom(5000))


def _tear_files(folder: Path) -> None:
    for journal in (folder / "queue" / "journal").iterdir():
        with journal.open("ab") as log:
            log.write(os.urandom(5000))


_redis_servers: list[Server] = []
_databases = itertools.count()


@contextlib.contextmanager
def redis_for_all(folder: Path) -> Iterator[None]:
    """One Redis server for the servers of a module, with a database for each."""
    with running(folder, databases="500") as server:
        _redis_servers.append(server)
        yield
        _redis_servers.remove(server)


def _redis_url(_: Path) -> str:
    return f"redis://127.0.0.1:{_redis_servers[-1].port}/{next(_databases) % 500}"


# Whoever adds a driver adds a line here, and all cases run on it.
STORES = {
    "memory": Store(lambda folder: "memory://", durable=False),
    "sqlite": Store(lambda folder: f"sqlite:///{folder}/queue.db?durability=process", True, _tear_sqlite, place="queue.db"),
    "file": Store(lambda folder: f"file://{folder}/queue?durability=process", True, _tear_files, place="queue"),
    "redis": Store(_redis_url, True, by_time=False),
}


class ServerProcess:
    """`omniq serve` on a free port; without a URL on its default store.

    Its output goes to a file, so that it never blocks on a pipe that nobody reads.
    """

    def __init__(self, url: str | None, folder: Path, options: Sequence[str] = (), port: int = 0) -> None:
        self.url, self.folder, self.options = url, folder, list(options)
        self.port = port
        self._runs = 0
        (folder / "token").write_text(f"{TOKEN}\n")
        self.start()

    def start(self) -> None:
        self._runs += 1
        self.err_path = self.folder / f"serve-{self._runs}.err"
        command = [sys.executable, "-m", "omniq", "serve", *self._store, "--port", str(self.port), *self.options]
        with self.err_path.open("wb") as err:
            self.popen = Python(command, stdout=err, stderr=err, cwd=self.folder, env=environment())

    def ready(self) -> ServerProcess:
        """Wait until it says where it listens."""
        deadline = time.monotonic() + 90
        while True:
            found = re.search(r"listening on (\S+):(\d+)", self.errors)
            if found:
                self.port = int(found[2])
                return self
            assert self.popen.poll() is None, f"the server ended:\n{self.errors}"
            assert time.monotonic() < deadline, f"the server does not listen:\n{self.errors}"
            time.sleep(0.01)

    @property
    def errors(self) -> str:
        return self.err_path.read_text()

    @property
    def metrics_port(self) -> int:
        return int(re.findall(r"metrics on \S+:(\d+)", self.errors)[0])

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/", timeout=30) as page:
            return next(float(line.split()[1]) for line in page.read().decode().splitlines() if line.startswith(f"{name} "))

    def cpu_s(self) -> float:
        """Processor time that it has used so far."""
        threads = Path(f"/proc/{self.popen.pid}/task").glob("*/schedstat")
        return sum(int(path.read_text().split()[0]) for path in threads) / 1e9

    def command(self, *arguments: str) -> None:
        """Run another `omniq` command on the same store."""
        done = run([sys.executable, "-m", "omniq", *arguments, *self._store], cwd=self.folder, env=environment())
        assert done.returncode == 0, done.stderr

    @property
    def _store(self) -> list[str]:
        return [] if self.url is None else ["--store", self.url]

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def restart(self) -> None:
        self.start()
        self.ready()

    def stop(self) -> int:
        """Its exit code after SIGTERM."""
        if self.popen.poll() is None:
            self.signal(signal.SIGTERM)
        return self.popen.wait(30)

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("OMNIQ_")} | {"PYTHONUNBUFFERED": "1"}


class Peer:
    """A client as bare as netcat."""

    def __init__(self, address: tuple[str, int], timeout_s: float = WAIT_S, deaf: bool = False) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(timeout_s)
        if deaf:  # the system takes little for a client that does not read
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self.ended = False

    def send(self, *lines: str) -> None:
        self.write("".join(line + "\n" for line in lines).encode())

    def write(self, data: bytes) -> None:
        self.socket.sendall(data)

    def recv(self, within_s: float = WAIT_S) -> str:
        """The next line; "CLOSED" at the end of the stream."""
        deadline = time.monotonic() + within_s
        while b"\n" not in self._received:
            if not self._more(deadline - time.monotonic()):
                assert not self._received, f"half a line at the end: {self._received!r}"
                return "CLOSED"
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    def _more(self, within_s: float) -> bool:
        self.socket.settimeout(max(within_s, 0.001))
        try:
            data = self.socket.recv(1 << 20)
        except TimeoutError:
            raise AssertionError("no reply came in time") from None
        except ConnectionError:
            data = b""
        self._received += data
        return bool(data)

    def silent_for(self, seconds: float) -> bool:
        if self._received:
            return False
        self.socket.settimeout(seconds)
        try:
            self._received += self.socket.recv(1 << 16)
        except TimeoutError:
            return True
        return False

    def ask(self, *lines: str, within_s: float = WAIT_S) -> str:
        self.send(*lines)
        return self.recv(within_s)

    def shut(self) -> None:
        """Stop sending; go on receiving."""
        self.socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Break the connection without a farewell."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
