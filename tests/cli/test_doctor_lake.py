"""`omniq doctor --lake` and `omniq lake status`: a lake that falls behind says so before its store purges. No Spark here."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.redis_server import Server
from support.shell import Shell
from typer.testing import CliRunner

from omniq import OmniQ, SQLiteStorage
from omniq.cli.app import app
from omniq.cli.check_results import Finding
from omniq.cli.store.checks import examine
from omniq.models import now_us
from omniq.operations import Retention
from omniq.spark.lake.layout import Gap, Lake, StoreEntry
from omniq.storage.bulk import open_bulk

NO_EXTRA = "import sys\nfor name in ('pyspark', 'pandas', 'pyarrow', 'numpy'):\n    sys.modules[name] = None\n"


def job(n: int) -> int:
    return n


def stored(url: str, count: int, queue: str = "default", ago: timedelta = timedelta(0)) -> None:
    """Tasks that nobody runs, each of which is one event."""
    at = now_us() - ago // timedelta(microseconds=1)
    storage = SQLiteStorage(url.removeprefix("sqlite:///"), clock=lambda: at) if ago else SQLiteStorage.from_url(url)
    with OmniQ(storage) as oq:
        oq.options(queue=queue).enqueue_many(job, [(n,) for n in range(count)])


def purged(url: str, keep: int) -> None:
    with open_bulk(url) as bulk:
        bulk.call(bulk.storage.purge(Retention(dead_us=None, events_us=None, events_max=keep), limit=1000))


def kept_up(url: str, lake: Lake) -> None:
    """Note in the lake that it has all that the store has, as ingest does after its last batch."""
    with open_bulk(url) as bulk, lake.change() as draft:
        info = bulk.info()
        draft.about.stores.setdefault(info.store_id, StoreEntry(url=info.url, since=datetime.now(UTC)))
        manifest = draft.manifest("events")
        manifest.seen[info.store_id] = {shard.name: [(1, shard.last)] for shard in bulk.event_shards()}
        draft.put(manifest)


def found(url: str, *lakes: str | Path) -> list[Finding]:
    every = asyncio.run(examine(url, False, [str(lake) for lake in lakes]))
    return [finding for finding in every if finding.check == "lake"]


@pytest.fixture
def lake(tmp_path: Path, store: str) -> Lake:
    """One that has the first event of the store, which is all there is."""
    lake = Lake.init(tmp_path / "lake")
    stored(store, 1)
    kept_up(store, lake)
    return lake


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'q.db'}"


def test_a_lake_is_warned_of_when_little_is_left_of_the_number_that_the_store_keeps(
    store: str, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNIQ_EVENTS_MAX_COUNT", "10")
    assert [(f.status, f.message) for f in found(store, lake.path)] == [("ok", f"the lake {lake.path} is 0 events behind")]
    stored(store, 6)
    assert [f.status for f in found(store, lake.path)] == ["ok"]
    stored(store, 1)
    (finding,) = found(store, lake.path)
    assert finding.status == "warning"
    assert finding.message.startswith(f"the lake {lake.path} is 7 events behind, and 30% is left of ")
    assert finding.remedy.startswith(f"omniq lake ingest --lake {lake.path} --store {store} now")


def test_a_lake_is_warned_of_when_little_is_left_of_the_time_that_the_store_keeps(
    store: str, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(store, 1, ago=timedelta(days=4))
    stored(store, 1)
    assert [f.status for f in found(store, lake.path)] == ["ok"]
    monkeypatch.setenv("OMNIQ_EVENTS_MAX_AGE", str(5 * 86_400))
    (finding,) = found(store, lake.path)
    assert (finding.status, "20% is left" in finding.message) == ("warning", True)
    kept_up(store, lake)
    assert [f.status for f in found(store, lake.path)] == ["ok"]


def test_each_queue_of_redis_is_counted_for_itself(
    redis_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis_server.client() as client:
        client.flushall()
    url, lake = redis_server.url, Lake.init(tmp_path / "lake")
    with OmniQ.from_url(url) as oq:
        oq.enqueue(job, 1)
    kept_up(url, lake)
    monkeypatch.setenv("OMNIQ_EVENTS_MAX_COUNT", "10")
    for queue in ("default", "mail"):
        with OmniQ.from_url(url) as oq:
            oq.options(queue=queue).enqueue_many(job, [(n,) for n in range(6)])
    assert [(f.status, f.message) for f in found(url, lake.path)] == [("ok", f"the lake {lake.path} is 12 events behind")]


def test_lost_events_are_a_fault_until_they_are_accepted(store: str, lake: Lake) -> None:
    stored(store, 4)
    purged(store, 2)
    (finding,) = found(store, lake.path)
    assert finding.status == "wrong"
    assert finding.message.startswith("events 2 to 3 of store ")
    assert finding.remedy.startswith(f"omniq lake ingest --lake {lake.path} --store {store} --accept-gap goes on")
    now = datetime.now(UTC)
    with lake.change() as draft:
        (entry,) = draft.about.stores.values()
        entry.gaps.append(Gap(shard="", first=2, last=3, since=now, until=now, accepted_at=now))
    assert [f.status for f in found(store, lake.path)] == ["ok"]


def test_a_lake_of_other_stores_and_a_folder_that_is_none_are_named(store: str, lake: Lake, tmp_path: Path) -> None:
    other = f"sqlite:///{tmp_path / 'other.db'}"
    stored(other, 1)
    strange, none, file = found(other, lake.path, tmp_path / "nowhere", tmp_path / "other.db")
    assert strange.status == "warning"
    assert strange.message.startswith(f"the lake {lake.path} never took in anything of the store ")
    assert (none.status, none.message) == ("wrong", f"no lake at {tmp_path / 'nowhere'}")
    assert none.remedy == f"make one with omniq lake init --lake {tmp_path / 'nowhere'}"
    assert (file.status, file.message) == ("wrong", f"no lake at {tmp_path / 'other.db'}")


def test_the_commands_say_it_without_the_extra(shells: Callable[[str], Shell], tmp_path: Path) -> None:
    sh = shells("sqlite")
    lake = Lake.init(tmp_path / "a lake")
    (sh.folder / "sitecustomize.py").write_text(NO_EXTRA)
    sh.put()
    words = ("doctor", "--lake", str(lake.path), "--lake", str(lake.path), "--json")
    lean = {"PYTHONPATH": str(sh.folder), "OMNIQ_EVENTS_MAX_COUNT": "3"}
    done = sh(*words, **lean)
    assert (done.code, [f["status"] for f in done.json() if f["check"] == "lake"]) == (0, ["warning"] * 2)
    assert sh(*words, "--fail-on", "warning", **lean).code == 1
    kept_up(sh.url, lake)
    for _ in range(3):
        sh.put()
    shown = sh("lake", "status", "--lake", str(lake.path), **lean).out
    assert "3 events behind" in shown
    assert "and 0% is left of the time or number for which the store keeps them: omniq lake ingest" in shown


def test_the_status_shows_the_gaps(store: str, lake: Lake) -> None:
    at = datetime(2026, 3, 1, 10, tzinfo=UTC)
    with lake.change() as draft:
        (entry,) = draft.about.stores.values()
        entry.gaps.append(Gap(shard="", first=2, last=3, since=at, until=at + timedelta(hours=2), accepted_at=at))
    shown = CliRunner().invoke(app, ["lake", "status", "--lake", str(lake.path)], catch_exceptions=False).stdout
    assert "gap: events 2 to 3 of store" in shown
    assert "2026-03-01 10:00:00 to 2026-03-01 12:00:00 UTC, accepted 2026-03-01" in shown
