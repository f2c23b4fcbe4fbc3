"""The commands that bring rows of files and of the lake into a store."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import row_jobs
import typer
from typer.testing import CliRunner

from omniq import Invalid, OmniQ, TaskStatus
from omniq.cli.app import app
from omniq.cli.lake.replay import replay_command
from omniq.models import new_id
from omniq.operations import Filter
from omniq.spark import Lake, build, read
from omniq.spark.lake.bronze import take_in
from omniq.spark.writing.files import read_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CSV = 'order,name,price\n1,"Ada, the first",2.5\n2,"say ""hello""",3\n3,"two\nlines",\n'
ROWS = [(1, "Ada, the first", 2.5), (2, 'say "hello"', 3.0), (3, "two\nlines", None)]


def invoked(*words: str, on: Any = app) -> str:
    done = CliRunner().invoke(on, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_file_of_rows_is_enqueued(spark: "SparkSession", store: str, tmp_path: Path) -> None:
    (tmp_path / "orders.csv").write_text(CSV)
    words = ["spark", "enqueue", "--from", str(tmp_path / "orders.csv"), "--func", "row_jobs:price", "--key", "order"]
    words += ["--args", "n=order,scale=price", "--queue", "shop", "--retries", "1", "--timeout", "2m", "--store", store]
    assert invoked(*words).startswith("enqueued 3 tasks of 3 rows in queue shop\nrun ")
    report = json.loads(invoked(*words, "--json"))
    assert (report["rows"], report["inserted"], report["already_there"]) == (3, 0, 3)
    with OmniQ.from_url(store) as oq:
        tasks = oq.find()[0]
    assert sorted((task.kwargs["n"], task.kwargs["scale"]) for task in tasks) == [(1, 2.5), (2, 3.0), (3, None)]
    assert {(task.func_path, task.max_retries, task.timeout) for task in tasks} == {("row_jobs:price", 1, 120.0)}


def test_files_of_each_kind_have_the_same_rows(spark: "SparkSession", tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(CSV)
    lines = [{"order": order, "name": name, "price": price} for order, name, price in ROWS]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "a.json").write_text(json.dumps(lines, indent=1))
    read_rows(spark, str(tmp_path / "a.csv")).write.parquet(str(tmp_path / "a"))
    for name in ("a.csv", "a.jsonl", "a.json", "a"):
        found = read_rows(spark, str(tmp_path / name)).select("order", "name", "price").collect()
        assert sorted(map(tuple, found)) == ROWS, name
    with pytest.raises(Invalid, match="there is no file"):
        read_rows(spark, str(tmp_path / "b.csv"))
    (tmp_path / "a.txt").touch()
    with pytest.raises(Invalid, match=r"neither \.csv nor \.json nor \.parquet"):
        read_rows(spark, str(tmp_path / "a.txt"))


def test_failed_tasks_of_the_lake_are_replayed_after_a_look(spark: "SparkSession", store: str, tmp_path: Path) -> None:
    mark = new_id()
    with OmniQ.from_url(store) as oq:
        for n in range(5):
            oq.options(max_retries=0).enqueue(row_jobs.count_good, mark, n)
        with oq.worker(allow=["row_jobs"]) as worker:
            worker.drain()
        (gone, *_) = oq.find(Filter(statuses=(TaskStatus.FAILED,)))[0]
        lake = Lake.init(tmp_path / "lake")
        take_in(lake, read(spark, store, "events"), stream="test", batch=0)
        build(spark, lake, tables=())  # tasks and attempts are always built
        oq.remove(gone.id)
    commands = typer.Typer()
    commands.command("replay")(replay_command)
    commands.command("other")(lambda: None)
    words = ["replay", "--lake", str(tmp_path / "lake"), "--store", store, "--label", "fix", "--where"]
    shown = invoked(*words, "status = 'FAILED' and error like '%odd'", on=commands)
    assert f"missing  1  –  –  {gone.id}" in " ".join(shown.split()).replace(" ", "  ")
    assert shown.endswith("would replay 1 task under label fix\n")
    done = json.loads(invoked(*words, "status = 'FAILED'", "--yes", "--json", on=commands))
    assert (done["rows"], done["replayed"], done["missing"]) == (2, 1, 1)
    with OmniQ.from_url(store) as oq:
        assert len(oq.find(Filter(statuses=(TaskStatus.PENDING,)))[0]) == 1
