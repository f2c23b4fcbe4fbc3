"""`omniq lake`, from an empty folder to a page: on the tests' session, and once as a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner, Result

import omniq
from omniq import OmniQ, SQLiteStorage
from omniq.cli.app import app
from omniq.cli.exits import run_app

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def job(n: int) -> int:
    if n == 8:
        raise omniq.Unrecoverable(f"no such order: {n}")
    return n * n


@pytest.fixture(scope="module")
def room(spark: "SparkSession", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with ten tasks, and a lake that took them in."""
    room = tmp_path_factory.mktemp("lake")
    with OmniQ(SQLiteStorage(room / "shop.db")) as oq:
        ids = oq.enqueue_many(job, [(n,) for n in range(9)])
        oq.cancel(oq.options(group="customer-17").enqueue(job, 99))
        with oq.worker() as pool:
            pool.drain()
        assert len(ids) == 9
    lake = str(room / "lake")
    assert asked("init", "--lake", lake).stdout == f"lake {lake}\n"
    return room


def asked(*words: str, code: int = 0) -> Result:
    done = CliRunner().invoke(app, ["lake", *words], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


def told(*words: str, code: int = 0) -> object:
    return json.loads(asked(*words, "--json", code=code).stdout)


def refused(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """The sentence on stderr of a command that ends with 1 or 2."""
    monkeypatch.setattr(sys, "argv", ["omniq", "lake", *words])
    assert run_app(app) in (1, 2)
    out, err = capfd.readouterr()
    assert out == ""
    return err


def test_a_lake_is_taken_in_built_checked_and_asked(room: Path) -> None:
    lake, store = str(room / "lake"), f"sqlite:///{room / 'shop.db'}"
    behind = told("status", "--lake", lake, "--store", store)
    assert behind["stores"][0]["behind"] == 29
    assert told("ingest", "--lake", lake, "--store", store)["rows"] == 29
    assert told("ingest", "--lake", lake, "--store", store)["rows"] == 0
    assert told("status", "--lake", lake, "--store", store)["stores"][0]["behind"] == 0
    assert told("build", "--lake", lake, "--tables", "func_hour,failure_day")["rows"]["tasks"] == 10
    assert asked("build", "--lake", lake, "--tables", "func_hour,failure_day").stdout == "nothing has changed\n"
    assert all(result["ok"] for result in told("check", "--lake", lake))
    assert asked("repair", "--lake", lake).stdout == "nothing to repair\n"
    query = "SELECT status, count(*) AS n FROM tasks GROUP BY status ORDER BY status"
    assert told("query", "--lake", lake, query) == [
        {"status": "CANCELLED", "n": 1},
        {"status": "FAILED", "n": 1},
        {"status": "SUCCESS", "n": 8},
    ]
    assert told("query", "--lake", lake, "SELECT * FROM tasks WHERE false") == []
    shown = asked("query", "--lake", lake, query).stdout
    assert shown.split() == ["status", "n", "CANCELLED", "1", "FAILED", "1", "SUCCESS", "8"]
    cut = asked("query", "--lake", lake, query, "--limit", "1")
    assert "only the first 1 rows" in cut.stderr


@pytest.mark.slow
def test_one_group_is_erased_and_old_days_go(room: Path) -> None:
    lake, store = str(room / "lake"), f"sqlite:///{room / 'shop.db'}"
    asked("ingest", "--lake", lake, "--store", store)
    ((id,),) = [row.values() for row in told("query", "--lake", lake, "SELECT task_id FROM events WHERE event = 'failed'")]
    assert told("erase", "--lake", lake, "--task", id)["rows"] == 3
    assert told("erase", "--lake", lake, "--group", "customer-17")["rows"] == 2
    assert told("query", "--lake", lake, "SELECT sample_ids FROM failure_day") == []
    assert told("ingest", "--lake", lake, "--store", store)["rows"] == 0
    assert told("query", "--lake", lake, "SELECT count(*) AS n FROM events WHERE group_id = 'customer-17'") == [{"n": 0}]
    asked("compact", "--lake", lake)
    asked("expire", "--lake", lake, "--keep-days", "30")
    assert all(result["ok"] for result in told("check", "--lake", lake))


def test_a_check_that_fails_ends_with_1(room: Path, tmp_path: Path) -> None:
    import shutil

    from omniq.spark import Lake

    broken = tmp_path / "broken"
    asked("ingest", "--lake", str(room / "lake"), "--store", f"sqlite:///{room / 'shop.db'}")
    shutil.copytree(room / "lake", broken)
    Path(Lake(broken).files("events")[0]).unlink()
    results = told("check", "--lake", str(broken), code=1)
    assert not all(result["ok"] for result in results)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("query", "--lake", "nowhere", "select 1"), "omniq lake init"),
        (("build", "--lake", "nowhere"), "omniq lake init"),
        (("repair", "--lake", "nowhere"), "omniq lake init"),
        (("ingest", "--lake", "{lake}", "--store", "sqlite:////no/such/store.db"), "no/such/store.db"),
        (("query", "--lake", "{lake}", "select nope from tasks"), "nope"),
        (("query", "--lake", "{lake}", "select"), "yntax"),
        (("report", "--lake", "{lake}", "--since", "yesterday"), "2026-11-01"),
        (("build", "--lake", "{lake}", "--tables", "nope"), "nope"),
        (("erase", "--lake", "{lake}"), "one task or one group"),
        (("expire", "--lake", "{lake}", "--keep-days", "0"), "--keep-days"),
        (("ingest", "--lake", "{lake}", "--every", "soon"), "soon"),
    ],
)
def test_bad_input_gets_a_sentence(
    room: Path, words: tuple[str, ...], says: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [word.replace("{lake}", str(room / "lake")) for word in words]
    if given[0] == "ingest" and "--store" not in given:
        given += ["--store", f"sqlite:///{room / 'shop.db'}"]
    said = refused(capfd, monkeypatch, *given)
    assert says in said
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 6


@pytest.mark.slow
@pytest.mark.costly
def test_a_process_of_its_own_prints_the_rows_and_nothing_else(room: Path, tmp_path: Path) -> None:
    store, lake = f"sqlite:///{room / 'shop.db'}", asked("init", "--lake", str(tmp_path / "lake")).stdout.split()[-1]
    command = [sys.executable, "-m", "omniq", "lake"]
    elsewhere = {**os.environ, "TZ": "Asia/Kolkata"}
    for words in (["ingest", "--store", store], ["build"]):
        subprocess.run([*command, *words, "--lake", lake], check=True, capture_output=True, timeout=300, env=elsewhere)
    query = """SELECT sum(runs) AS n, max(run_p95_ms) > 0 AS slow, max(minute(hour)) AS past, timestamp_seconds(0) AS epoch
        FROM func_hour"""
    words = ["query", "--lake", lake, query, "--json"]
    done = subprocess.run([*command, *words], check=True, capture_output=True, text=True, timeout=300, env=elsewhere)
    assert json.loads(done.stdout) == [{"n": 9, "slow": True, "past": 0, "epoch": "1970-01-01T00:00:00Z"}]
    assert done.stderr == ""
