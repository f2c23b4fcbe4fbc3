"""SIGTERM and SIGINT to a consumer in a process of its own, as the table of the contract says."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.forks import Python
from support.waiting import wait_for

from omniq import State
from omniq.contract import ContractClient, Job

MODES = ["caller", "threads", "async"]


class Consumer:
    """A consumer to be signalled."""

    def __init__(self, url: str, folder: Path, mode: str, drain: bool) -> None:
        self.folder = folder
        arguments = [sys.executable, "-m", "support.contract_consumer", url, str(folder), mode, "drain" if drain else "leave"]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        self.popen = Python(arguments, cwd=folder, env=environment, stderr=(folder / "errors").open("ab"))

    @property
    def notes(self) -> list[str]:
        path = self.folder / "notes"
        return path.read_text().splitlines() if path.exists() else []

    def begun(self, n: int = 1) -> None:
        wait_for(lambda: sum(note.startswith("begin") for note in self.notes) == n, within=20)

    def heard(self) -> None:
        """It takes no more jobs."""
        wait_for(lambda: "stopping: " in (self.folder / "errors").read_text(), within=20)

    def go(self) -> None:
        (self.folder / "go").touch()

    def ended(self) -> int:
        return self.popen.wait(20)


Start = Callable[[str, bool], Consumer]


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path, redis_url: str) -> str:
    return redis_url if request.param == "redis" else f"sqlite:///{tmp_path}/q.db?durability=process"


@pytest.fixture
def client(url: str) -> Iterator[ContractClient]:
    with ContractClient.from_url(url) as made:
        yield made


@pytest.fixture
def start(url: str, tmp_path: Path, client: ContractClient) -> Iterator[Start]:
    made: list[Consumer] = []

    def begin(mode: str, drain: bool) -> Consumer:
        made.append(Consumer(url, tmp_path, mode, drain))
        return made[-1]

    yield begin
    for consumer in made:
        if consumer.popen.poll() is None:
            consumer.popen.kill()
            consumer.popen.wait()


def states(client: ContractClient, *ids: str) -> list[tuple[State, int]]:
    found = [asyncio.run(client.storage.get(i)) for i in ids]
    return [(task.state, task.attempts) for task in found if task is not None]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("number", "drain"), [(signal.SIGTERM, True), (signal.SIGTERM, False), (signal.SIGINT, True)])
def test_the_job_in_hand_is_finished_and_acked(
    client: ContractClient, start: Start, mode: str, number: int, drain: bool
) -> None:
    ids = [client.publish("q", {}) for _ in range(4)]
    consumer = start(mode, drain)
    at_once = 1 if mode == "caller" else 2
    consumer.begun(at_once)
    consumer.popen.send_signal(number)
    consumer.heard()
    consumer.go()
    assert consumer.ended() == 0
    assert consumer.notes[-1] == "returned"
    assert states(client, *ids) == [(State.DONE, 1)] * at_once + [(State.READY, 0)] * (4 - at_once)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("times", "drain"), [(1, False), (2, True)])
def test_the_job_in_hand_is_handed_back_at_once(
    client: ContractClient, start: Start, tmp_path: Path, mode: str, times: int, drain: bool
) -> None:
    """Once such a job stayed leased for a minute, and had spent an attempt."""
    job_id = client.publish("q", {}, max_attempts=1)
    consumer = start(mode, drain)
    consumer.begun()
    consumer.popen.send_signal(signal.SIGINT)
    if times > 1:
        wait_for(lambda: "stopping" in (tmp_path / "errors").read_text())
        consumer.popen.send_signal(signal.SIGINT)
    assert consumer.ended() == 0
    assert "returned" in consumer.notes
    if mode == "caller":
        assert f"end {job_id}" not in consumer.notes, "the handler itself was ended"
    assert states(client, job_id) == [(State.READY, 0)]
    again = client.reserve("q")
    assert isinstance(again, Job)
    assert again.attempt == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_consumer_leaves_at_once(client: ContractClient, start: Start, mode: str, number: int) -> None:
    consumer = start(mode, True)
    wait_for(lambda: asyncio.run(client.storage.workers()), within=20)
    consumer.popen.send_signal(number)
    assert consumer.ended() == 0
    assert consumer.notes == ["ready", "returned"]
    assert asyncio.run(client.storage.workers()) == []


def test_the_job_of_a_killed_consumer_runs_again(client: ContractClient, start: Start) -> None:
    job_id = client.publish("q", {}, backoff_ms=1, timeout_ms=600)
    first = start("caller", True)
    first.begun()
    first.popen.kill()
    first.popen.wait()
    second = start("caller", True)
    second.begun(2)
    second.go()
    wait_for(lambda: states(client, job_id) == [(State.DONE, 2)])
    second.popen.send_signal(signal.SIGTERM)
    assert second.ended() == 0


@pytest.mark.parametrize("mode", MODES)
def test_consumers_come_and_go_and_every_job_runs_once(client: ContractClient, start: Start, tmp_path: Path, mode: str) -> None:
    (tmp_path / "go").touch()
    ids = client.publish_many("q", [{}] * 2000, max_attempts=1)
    ended = 0
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        consumer = start(mode, True)
        wait_for(lambda c=consumer, n=ended: sum(note.startswith("end") for note in c.notes) > n + 20, within=20)
        consumer.popen.send_signal(number)
        assert consumer.ended() == 0
        ended = sum(note.startswith("end") for note in consumer.notes)
        (counts,) = asyncio.run(client.storage.counts())
        assert (counts.running, counts.scheduled, counts.dead) == (0, 0, 0)
        assert counts.ready == len(ids) - ended
    begun = [note for note in consumer.notes if note.startswith("begin")]
    assert len(set(begun)) == len(begun) == ended < len(ids)
