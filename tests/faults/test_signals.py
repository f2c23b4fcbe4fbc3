"""SIGTERM and SIGINT to `omniq worker`: stop taking, finish in the grace time, hand the rest back; twice: leave now."""

import signal
import time
from collections.abc import Iterator

import fault_jobs
import pytest
from fault_processes import Fleet, Process, on_each_store, until

from omniq import OmniQ, TaskStatus


@pytest.fixture
def oq(fleet: Fleet) -> Iterator[OmniQ]:
    with OmniQ.from_url(fleet.url) as made:
        yield made


def start_command(fleet: Fleet, *options: str) -> Process:
    return fleet.start("command", "-m", "omniq", "worker", "fault_jobs", "--store", fleet.url, *options)


@on_each_store
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_tasks_finish_and_hands_the_others_back(fleet: Fleet, oq: OmniQ, number: int) -> None:
    gate = fleet.folder / "gate"
    command = start_command(fleet, "--concurrency", "2", "--grace", "20")
    running = [oq.enqueue(fault_jobs.wait_for_file_at_first, str(fleet.side), str(gate)) for _ in range(2)]
    until(lambda: len(fleet.noted()) == 2, "two runs")
    waiting = [oq.enqueue(fault_jobs.nothing) for _ in range(5)]
    command.send(number)
    until(lambda: "stopping" in command.errors, "the command to hear the signal")
    gate.touch()
    assert command.popen.wait(20) == 0, command.errors
    results = [oq.get_result(i) for i in running]
    assert [(r.status, r.attempts) for r in results if r] == [(TaskStatus.SUCCESS, 1)] * 2
    tasks = [oq.get_task(i) for i in waiting]
    assert [(t.status, t.attempts) for t in tasks if t] == [(TaskStatus.PENDING, 0)] * 5
    assert fleet.worker_locks() == []


@pytest.mark.parametrize("function", [fault_jobs.hang_at_first, fault_jobs.wait_for_file_at_first])
def test_what_does_not_finish_in_the_grace_time_is_handed_back_without_spending_its_attempt(
    fleet: Fleet, oq: OmniQ, function: object
) -> None:
    command = start_command(fleet, "--concurrency", "50", "--grace", "1")
    gate = [str(fleet.folder / "gate")] if function is fault_jobs.wait_for_file_at_first else []
    ids = oq.enqueue_many(function, [(str(fleet.side), *gate)] * 50)
    until(lambda: len(fleet.noted()) == 50, "fifty runs")
    begun = time.monotonic()
    command.send(signal.SIGTERM)
    assert command.popen.wait(20) == 0, command.errors
    assert time.monotonic() - begun < 8, "the grace time is 1 s"
    tasks = [oq.get_task(i) for i in ids]
    assert [(t.status, t.attempts) for t in tasks if t] == [(TaskStatus.PENDING, 0)] * 50
    assert [e.event for e in oq.history(ids[0])] == ["enqueued", "started", "released"]


@on_each_store
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_leaves_at_once_and_the_task_comes_back(fleet: Fleet, oq: OmniQ, number: int) -> None:
    command = start_command(fleet, "--grace", "60")
    task_id = oq.enqueue(fault_jobs.hang_at_first, str(fleet.side))
    until(lambda: len(fleet.noted()) == 1, "the first run")
    command.send(number)
    until(lambda: "stopping" in command.errors, "the command to hear the signal")
    command.send(number)
    assert command.popen.wait(5) == 128 + number
    other = fleet.worker().ready()
    result = oq.get_result(task_id, wait=True, timeout=10)
    assert result is not None
    assert (result.result, result.attempts) == (f"2-{other.pid}", 2)


def test_a_signal_to_an_idle_worker_ends_it_at_once(fleet: Fleet, oq: OmniQ) -> None:
    command = start_command(fleet)
    task_id = oq.enqueue(fault_jobs.nothing)
    assert oq.get_result(task_id, wait=True, timeout=20) is not None
    begun = time.monotonic()
    command.send(signal.SIGTERM)
    assert command.popen.wait(10) == 0, command.errors
    assert time.monotonic() - begun < 3


@on_each_store
def test_a_signal_during_a_flood_of_short_tasks_loses_and_doubles_nothing(fleet: Fleet, oq: OmniQ) -> None:
    ids = oq.enqueue_many(fault_jobs.work, [(str(fleet.side), 0.0)] * 20_000)
    command = start_command(fleet, "--concurrency", "10")
    until(lambda: len(fleet.noted()) > 500, "some runs")
    command.send(signal.SIGTERM)
    assert command.popen.wait(20) == 0, command.errors
    (counts,) = oq.counts()
    assert counts.running == 0
    assert counts.done + counts.ready == len(ids)
    assert counts.done == len(fleet.noted()), "what ran is done, what did not run is ready"
    assert counts.ready > 0
    assert all(event.attempt <= 1 for event in oq.events(limit=1_000_000))
