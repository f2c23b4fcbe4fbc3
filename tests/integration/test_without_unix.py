"""What works where there is no fcntl, no fork and no signal of Unix: stores in memory and behind a network."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.redis_server import Server, free_port, running
from support.terminal import Terminal

WINDOWS = Path(__file__).parents[1] / "support" / "windows.py"

TESTS = """
from omniq import AsyncOmniQ, OmniQ


def add(a: int, b: int) -> int:
    return a + b


def test_a_task_runs(oq: OmniQ) -> None:
    with oq.worker():
        assert oq.get_result(oq.enqueue(add, 2, 3), wait=True, timeout=20).result == 5
"""

ON_REDIS = """
import asyncio
import sys

from omniq import AsyncOmniQ, OmniQ
from omniq.contract import ContractClient


def add(a: int, b: int) -> int:
    return a + b


async def main(url: str) -> None:
    async with AsyncOmniQ.from_url(url) as oq:
        id = await oq.enqueue(add, 4, 5)
        async with await oq.worker(allow=["__main__"]):
            print((await oq.get_result(id, wait=True, timeout=20)).result)


with OmniQ.from_url(sys.argv[1]) as oq:
    id = oq.enqueue(add, 2, 3)
    with oq.worker(allow=["__main__"]):
        print(oq.get_result(id, wait=True, timeout=20).result)
asyncio.run(main(sys.argv[1]))
with ContractClient.from_url(sys.argv[1]) as client:
    client.publish("pdf", {"page": 7})
    print(client.reserve("pdf").payload)
"""


def on_windows(folder: Path, *words: str, input: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(WINDOWS), *words]
    told = os.environ | environment
    return subprocess.run(command, cwd=folder, env=told, input=input, capture_output=True, text=True, timeout=90, check=False)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


def test_a_users_tests_run_in_memory(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(TESTS)
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "omniq.testing.plugin", "test_mine.py")
    done = on_windows(tmp_path, *words, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")  # other plugins ask for what only Unix has
    assert done.returncode == 0, done.stdout + done.stderr


def test_tasks_go_over_redis(tmp_path: Path, redis: Server) -> None:
    (tmp_path / "program.py").write_text(ON_REDIS)
    done = on_windows(tmp_path, "program.py", f"redis://127.0.0.1:{redis.port}/0")
    assert done.stdout.split() == ["5", "9", '{"page":7}'], done.stderr


def test_commands_work_on_redis(tmp_path: Path, redis: Server) -> None:
    (tmp_path / "jobs.py").write_text("def add(a, b):\n    return a + b\n")
    store = ("--store", f"redis://127.0.0.1:{redis.port}/1")
    stored = on_windows(tmp_path, "-m", "omniq", "enqueue", "jobs:add", "[2, 3]", *store)
    assert stored.returncode == 0, stored.stderr
    (tmp_path / "calls.jsonl").write_text('{"args": [1, 2]}\n{"args": [3, 4]}\n')
    many = on_windows(tmp_path, "-m", "omniq", "enqueue", "jobs:add", "--from", "calls.jsonl", *store)
    assert "enqueued 2 of 2 lines" in many.stderr
    worked = on_windows(tmp_path, "-m", "omniq", "worker", "jobs", "--drain-and-exit", *store)
    assert worked.returncode == 0, worked.stderr
    for command in (("result", stored.stdout.strip()), ("queues",), ("tasks", "list"), ("doctor",)):
        done = on_windows(tmp_path, "-m", "omniq", *command, *store)
        assert done.returncode == 0, done.stderr


ON_TCP = """
import sys

from omniq.client import Client

with Client("127.0.0.1", int(sys.argv[1])) as client:
    print(client.push("jobs:add", payload=[1, 2]))
"""


def test_the_server_serves_redis_and_its_clients_reach_it(tmp_path: Path, redis: Server) -> None:
    (tmp_path / "program.py").write_text(ON_TCP)
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)
    port = str(free_port())
    words = ("serve", "--store", f"redis://127.0.0.1:{redis.port}/2", "--port", port)
    server = subprocess.Popen([sys.executable, str(WINDOWS), "-m", "omniq", *words], cwd=tmp_path)
    try:
        token = ("--token-file", "token")
        sent = on_windows(tmp_path, "-m", "omniq", "send", "--port", port, *token, input='PUSH {"name": "jobs:add"}\n')
        assert (sent.stdout, sent.stderr) == ('OK {"id":1}\n', "")
        assert on_windows(tmp_path, "program.py", port).stdout == "2\n"
    finally:
        server.terminate()
        assert server.wait(30) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("worker", "os", "--processes", "2"), "need Linux or macOS: start omniq worker as often as you need it"),
        (("worker", "os", "--max-tasks", "2"), "need Linux or macOS"),
    ],
)
def test_what_needs_unix_says_so(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    done = on_windows(tmp_path, "-m", "omniq", *words)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert says in line


def test_top_says_that_it_needs_unix(tmp_path: Path) -> None:
    command = [sys.executable, "-B", str(WINDOWS), "-m", "omniq", "top"]  # a fork would have imported what is not there
    with Terminal(command, tmp_path, os.environ) as terminal:
        assert terminal.ended() == 2
        assert "omniq top needs Linux or macOS; everywhere there is omniq queues" in terminal.screen()


@pytest.mark.parametrize("url", ["sqlite:///queue.db", "file:queue"])
def test_a_store_of_files_says_that_it_cannot_be_had(tmp_path: Path, url: str) -> None:
    done = on_windows(tmp_path, "-m", "omniq", "enqueue", "jobs:add", "--store", url)
    assert done.returncode == 1
    assert "no file locks that omniq can use: keep tasks in Redis" in done.stderr
    assert list(tmp_path.iterdir()) == []
