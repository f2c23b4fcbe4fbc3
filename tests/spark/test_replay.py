"""What a query found is run again: copies that know their originals, once per label."""

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
import row_jobs

from omniq import Invalid, OmniQ, TaskStatus
from omniq.models import new_id
from omniq.operations import Filter
from omniq.spark import ReplayReport, replay
from omniq.spark.address import address_of
from omniq.spark.rows import task_id
from omniq.spark.writing.replaying import Copying, copy
from omniq.storage.bulk import open_bulk

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@contextlib.contextmanager
def opened(url: str) -> Generator[OmniQ, None, None]:
    with OmniQ.from_url(url) as oq:
        yield oq


def work(oq: OmniQ) -> None:
    with oq.worker(concurrency=4, allow=["row_jobs"], queues=["odd", "even"]) as worker:
        worker.drain()


def failed_ids(url: str) -> list[str]:
    """Five tasks that failed for good, in two queues, and some that did not."""
    mark = new_id()
    with opened(url) as oq:
        for n in range(10):
            one = oq.options(queue="odd" if n < 6 else "even", max_retries=0, group="g", headers={"trace": f"t{n}"})
            one.enqueue(row_jobs.count_good, mark, n)
        work(oq)
        row_jobs.gates[mark].set()
        return sorted(task.id for task in oq.find(Filter(statuses=(TaskStatus.FAILED,)))[0])


def table(spark: "SparkSession", ids: list[str]) -> "DataFrame":
    return spark.createDataFrame([(id,) for id in ids], "id string")


def counts(report: ReplayReport) -> tuple[int, ...]:
    return report.rows, report.replayed, report.already_there, report.unended, report.missing


def test_failed_tasks_run_again_once_per_label_and_name_their_originals(spark: "SparkSession", each_store: str) -> None:
    ids = failed_ids(each_store)
    with opened(each_store) as oq:
        waiting = oq.options(queue="later").enqueue(row_jobs.text, 1)
    asked = table(spark, [*ids, *ids, waiting, "never-was"])
    first = replay(asked, each_store, label="fix-1")
    assert (first.dry_run, counts(first)) == (True, (7, 5, 0, 1, 1))
    assert {(f.what, f.queue, f.tasks) for f in first.found} == {
        ("copied", "odd", 3),
        ("copied", "even", 2),
        ("unended", "later", 1),
        ("missing", "", 1),
    }
    assert [f.sample for f in first.found if f.what == "missing"] == [["never-was"]]
    with opened(each_store) as oq:
        assert oq.get_task(task_id("replay/fix-1", ids[0])) is None
    assert counts(replay(asked, each_store, label="fix-1", dry_run=False)) == (7, 5, 0, 1, 1)
    assert counts(replay(asked, each_store, label="fix-1", dry_run=False)) == (7, 0, 5, 1, 1)
    assert counts(replay(asked, each_store, label="fix-1")) == (7, 0, 5, 1, 1)
    with opened(each_store) as oq:
        work(oq)
        for id in ids:
            original, again = oq.get_task(id), oq.get_task(task_id("replay/fix-1", id))
            assert original is not None
            assert again is not None
            assert (original.status, again.status) == (TaskStatus.FAILED, TaskStatus.SUCCESS)
            assert (again.args, again.queue, again.group) == (original.args, original.queue, "g")
            assert again.headers == {**(original.headers or {}), "replay_of": id, "replay": "fix-1"}
    assert counts(replay(asked, each_store, label="fix-2", dry_run=False, queue="even")) == (7, 5, 0, 1, 1)
    with opened(each_store) as oq:
        assert {c.queue: c.ready for c in oq.counts()}["even"] == 5


def test_what_cannot_be_is_said_first(spark: "SparkSession", store: str) -> None:
    failed_ids(store)
    with pytest.raises(Invalid, match="replay needs a column id of the tasks' ids; the DataFrame has task"):
        replay(table(spark, ["a"]).withColumnRenamed("id", "task"), store, label="x")
    with pytest.raises(Invalid, match="label"):
        replay(table(spark, ["a"]), store, label="")
    with pytest.raises(Invalid, match="at most 100 characters"):
        replay(table(spark, ["a"]), store, label="x" * 101)


def test_a_part_that_is_copied_again_adds_nothing(store: str) -> None:
    ids = failed_ids(store)
    batch = pa.RecordBatch.from_pydict({"id": [task_id("replay/l", id) for id in ids], "key": ids})
    with open_bulk(store) as bulk:
        copying = Copying(address_of(store, bulk.info().store_id), "l", None, "r")
        for _ in range(2):
            (found,) = copy(iter([batch]), copying)
            assert sum(row["tasks"] for row in found.to_pylist()) == 5
        assert sum(bulk.commit_run(f"r-{queue}").released for queue in ("odd", "even")) == 5
