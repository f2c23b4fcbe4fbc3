"""A worker killed at each point of a task's life: the task ends well, and is counted as often as it was leased."""

import signal

import fault_jobs
import pytest
from fault_processes import HERE, Fleet, on_each_store

from omniq import OmniQ, TaskStatus


@on_each_store
@pytest.mark.parametrize(
    ("moment", "what", "attempts", "runs"),
    [("before", "Reserve", 1, 1), ("after", "Reserve", 2, 1), ("before", "Ack", 2, 2), ("after", "Ack", 1, 1)],
)
def test_a_worker_killed_around_a_lease_or_an_end_neither_loses_nor_doubles_the_task(
    fleet: Fleet, moment: str, what: str, attempts: int, runs: int
) -> None:
    with OmniQ.from_url(fleet.url) as oq:
        task_id = oq.enqueue(fault_jobs.work, str(fleet.side), 0.0)
        crashing = fleet.start("crashing", str(HERE / "fault_crashing_worker.py"), fleet.url, moment, what)
        assert crashing.popen.wait(20) == -signal.SIGKILL, crashing.errors
        fleet.worker().ready()
        result = oq.get_result(task_id, wait=True, timeout=10)
        assert result is not None
        assert (result.status, result.attempts) == (TaskStatus.SUCCESS, attempts)
        assert len(fleet.noted()) == runs
        assert [e.event for e in oq.history(task_id)].count("succeeded") == 1
