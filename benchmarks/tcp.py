"""The TCP server, one command at a time, pipelined 100 deep and in transactions, beside beanstalkd in the same minutes."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.figures import Figure, Series
from benchmarks.resting import cpu_s
from benchmarks.tcp_load import Beanstalk, Dialect, LineProtocol, Script, fetch_and_ack, play, push_all

DEPTH = 100
CONNECTIONS = (1, 4, 64)


class Subject:
    """A server that is measured. It is started anew for each number of connections."""

    def __init__(self, name: str, dialect: Dialect, command: Callable[[Path, int], list[str]]) -> None:
        self.name, self.dialect, self._command = name, dialect, command

    @contextmanager
    def running(self, bench: Bench) -> Iterator[tuple[subprocess.Popen[bytes], tuple[str, int]]]:
        store, port = bench.fresh(), _free_port()
        store.with_suffix(".binlog").mkdir()
        process = subprocess.Popen(self._command(store, port), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            _wait_for(port, process)
            yield process, ("127.0.0.1", port)
        finally:
            process.terminate()
            process.wait()
            shutil.rmtree(store.with_suffix(".binlog"), ignore_errors=True)
            bench.drop(store)


def _serve(url: str, port: int) -> list[str]:
    return [sys.executable, "-m", "omniq", "serve", "--store", url, "--port", str(port)]


def _beanstalkd(store: Path, port: int, *options: str) -> list[str]:
    found = shutil.which("beanstalkd") or "/usr/bin/beanstalkd"
    return [found, "-l", "127.0.0.1", "-p", str(port), "-b", str(store.with_suffix(".binlog")), *options]


OMNIQ = [
    Subject("SQLite, durable", LineProtocol(), lambda store, port: _serve(f"sqlite:///{store}", port)),
    Subject("memory", LineProtocol(), lambda store, port: _serve("memory://", port)),
]
BEANSTALKD = [
    Subject("beanstalkd with fsync", Beanstalk(), lambda store, port: _beanstalkd(store, port, "-f", "0")),
    Subject("beanstalkd without fsync", Beanstalk(), lambda store, port: _beanstalkd(store, port, "-F")),
]


def run(bench: Bench) -> Iterator[Figure]:
    there = shutil.which("beanstalkd") or Path("/usr/bin/beanstalkd").exists()
    if not there:
        print("beanstalkd is not installed (Debian: apt-get install beanstalkd): measuring omniq alone", file=sys.stderr)
    subjects = [*OMNIQ, *(BEANSTALKD if there else [])]
    for connections in CONNECTIONS:
        rates = _measure(bench, subjects, connections)
        for work in WORK:
            fsync = rates.get((work, BEANSTALKD[0].name))
            for subject in subjects:
                if (measured := rates.get((work, subject.name))) is None:
                    continue
                yield Figure(
                    name=f"{work}, {connections} connections: {subject.name}",
                    unit="tasks/s",
                    measured=measured,
                    baseline=fsync if subject in OMNIQ else None,
                    baseline_name=BEANSTALKD[0].name if fsync and subject in OMNIQ else "",
                    above=AIMS.get((work, subject.name)) if connections == CONNECTIONS[-1] else None,
                )


PUSH_DEEP, FETCH_DEEP = f"PUSH, {DEPTH} deep", f"FETCH+ACK, {DEPTH} deep"
AIMS = {(PUSH_DEEP, OMNIQ[0].name): 30_000.0, (FETCH_DEEP, OMNIQ[0].name): 15_000.0}


def _push(dialect: Dialect, rounds: int) -> Script:
    return push_all(dialect.push, rounds * DEPTH, 1)


def _fetch(dialect: Dialect, rounds: int) -> Script:
    return fetch_and_ack(dialect, rounds * DEPTH, 1)


def _push_deep(dialect: Dialect, rounds: int) -> Script:
    return push_all(dialect.push, rounds, DEPTH)


def _fetch_deep(dialect: Dialect, rounds: int) -> Script:
    return fetch_and_ack(dialect, rounds, DEPTH)


def _push_atomic(dialect: Dialect, rounds: int) -> Script | None:
    return push_all(dialect.push_atomic, rounds, DEPTH) if isinstance(dialect, LineProtocol) else None


# In this order: what fetches finds what the one before it pushed.
WORK: dict[str, Callable[[Dialect, int], Script | None]] = {
    "PUSH": _push,
    "FETCH+ACK": _fetch,
    PUSH_DEEP: _push_deep,
    FETCH_DEEP: _fetch_deep,
    f"PUSH in ATOMIC×{DEPTH}": _push_atomic,
}


def _measure(bench: Bench, subjects: list[Subject], connections: int) -> dict[tuple[str, str], Series]:
    values: dict[tuple[str, str], list[float]] = {}
    cpu: dict[tuple[str, str], list[float]] = {}
    for _ in bench.steps(f"TCP, {connections} connections", bench.runs):
        for subject in subjects:
            with subject.running(bench) as (process, address):
                for work, script in WORK.items():
                    deep = "deep" in work or "ATOMIC" in work
                    total = bench.size(20_000, 6_400) if deep else bench.size(2_000, 400) * min(connections, 8)
                    rounds = max(total // DEPTH // connections, 1)
                    scripts = [made for _ in range(connections) if (made := script(subject.dialect, rounds)) is not None]
                    if not scripts:
                        continue
                    before = cpu_s(process)
                    took = play(address, scripts)
                    tasks = rounds * DEPTH * connections
                    values.setdefault((work, subject.name), []).append(tasks / took)
                    cpu.setdefault((work, subject.name), []).append((cpu_s(process) - before) / tasks * 1e6)
    return {key: Series(runs, cpu[key]) for key, runs in values.items()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.02)
