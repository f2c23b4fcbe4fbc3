"""A standalone cluster of Spark on the loopback: a master and workers of one core each, ended by their process ids."""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from support.redis_server import free_port
from support.spark_server import environment
from support.waiting import wait_for

START_S = 180.0
HOST = "127.0.0.1"


class Daemon:
    """One process of Java."""

    def __init__(self, folder: Path, main: str, host: str, *arguments: str) -> None:
        import pyspark

        folder.mkdir(parents=True)
        self._log = folder / "log"
        home = Path(pyspark.__file__).parent
        variables = {
            **environment(),
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": host,  # also what its web page is bound to
            "SPARK_LOCAL_DIRS": str(folder / "local"),
            "SPARK_DAEMON_MEMORY": "256m",
        }
        command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{main}", "--host", host, *arguments]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log)

    def until_said(self, text: str) -> None:
        wait_for(lambda: text in self.said or self.process.poll() is not None, within=START_S)
        assert text in self.said, self.said

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def executors(self) -> list[int]:
        """The ids of the executors that this worker has started and that are there."""
        return [pid for pid in _children(self.process.pid) if "CoarseGrainedExecutorBackend" in _command(pid)]

    def kill(self) -> list[int]:
        """As if its machine had gone: the worker, its executors and their Python processes, whose ids are returned."""
        below = _below(self.process.pid)
        self.process.kill()  # first, so that it starts no other executor
        self.process.wait()
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return below

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


def _children(pid: int) -> list[int]:
    listings = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for listing in listings for word in listing.read_text().split()]


def _below(pid: int) -> list[int]:
    children = _children(pid)
    return children + [pid for child in children for pid in _below(child)]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


class Cluster:
    def __init__(self, master: str, workers: list[Daemon]) -> None:
        self.master, self.workers = master, workers


@contextmanager
def cluster(folder: Path, hosts: Sequence[str] = (HOST, HOST)) -> Iterator[Cluster]:
    """A worker per host; only those of different addresses count as different machines for Spark."""
    port = free_port()
    url = f"spark://{HOST}:{port}"
    started: list[Daemon] = []
    try:
        master = Daemon(folder / "master", "master.Master", HOST, "--port", str(port), "--webui-port", "0")
        started.append(master)
        master.until_said("I have been elected leader")
        for n, host in enumerate(hosts):
            place = folder / f"worker{n}"
            options = ["-c", "1", "-m", "1g", "--webui-port", "0", "-d", str(place / "work"), url]
            started.append(Daemon(place, "worker.Worker", host, *options))
        for worker in started[1:]:
            worker.until_said("Successfully registered with master")
        yield Cluster(url, started[1:])
    finally:
        for daemon in reversed(started):
            daemon.stop()
