"""`omniq doctor`, `purge`, `backup`, `migrate` and `bench`."""

import json
import re
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from support.shell import Shell, url_of
from support.waiting import wait_for

from omniq import OmniQ


def findings(shell: Shell, *words: str, code: int = 0) -> dict[str, dict[str, str]]:
    done = shell("doctor", "--json", *words)
    assert done.code == code, done.out + done.err
    return {finding["check"]: finding for finding in done.json()}


def test_a_healthy_store(each: Shell) -> None:
    each.put()
    each.work()
    found = findings(each)
    assert {f["status"] for f in found.values()} == {"ok"}
    assert set(found) >= {"version", "integrity", "clock", "leases", "orphans", "groups", "queues", "dlq", "disk", "filesystem"}
    assert each.ok("doctor").out.startswith("ok       version")


def test_a_lost_worker_is_found_and_its_tasks_taken_back(each: Shell) -> None:
    gate = str(each.folder / "gate")
    id = each.enqueue("jobs:wait_for", f'["{gate}"]')
    worker = each.start("worker", "jobs", "--concurrency", "1", "--queues", "default,mail")
    wait_for(lambda: Path(gate + ".runs").exists(), within=30)
    each.enqueue("jobs:add", "[1]", "--queue", "mail")
    each.interrupt(worker, signal.SIGKILL)
    every = findings(each, code=1)
    found, waits = every["leases"], every["queues"]
    assert (waits["status"], waits["message"]) == ("warning", "queue 'mail' has 1 task ready, and no worker serves it")
    assert found["status"] == "wrong"
    assert id in found["message"]
    assert "--repair" in found["remedy"]
    assert findings(each, "--repair")["leases"]["status"] == "repaired"
    assert findings(each)["leases"]["status"] == "ok"
    assert each.ok("tasks", "show", id, "--json").json()["status"] == "RETRYING"


def test_wrong_counters_are_found_and_repaired(sh: Shell) -> None:
    sh.enqueue("jobs:add", "[1]", "--group", "g")
    path = sh.folder / "queue.db"
    with sqlite3.connect(path) as db:
        db.execute("UPDATE queues SET ready = 7")
        db.execute("UPDATE lanes SET inflight = 1")
    db.close()
    done = sh("doctor")
    assert done.code == 1
    assert "queue 'default' counts 7 ready tasks and has 1" in done.out
    assert "group 'g' of queue 'default'" in done.out
    repaired = sh("doctor", "--repair")
    assert repaired.out.count("repaired ") == 2
    sh.ok("doctor")


def test_a_task_that_waits_for_one_that_is_gone_is_found(sh: Shell) -> None:
    with sh.queue() as oq:
        first = oq.enqueue("jobs:add", 1)
        second = oq.options(blocked_by=[first]).enqueue("jobs:add", 2)
    assert findings(sh)["orphans"]["status"] == "ok"
    with sqlite3.connect(sh.folder / "queue.db") as db:
        db.execute("DELETE FROM tasks WHERE id = ?", (first,))
        db.execute("UPDATE queues SET ready = 0")
    db.close()
    found = findings(sh, code=1)["orphans"]
    assert found["message"] == f"1 task waits for tasks that have ended or are gone: {second}"
    assert "--repair" in found["remedy"]
    left = findings(sh, "--repair", code=1)["orphans"]
    assert left["remedy"] == "cancel them with omniq tasks cancel and enqueue them anew"
    sh.ok("tasks", "cancel", second)
    sh.ok("doctor")


def test_what_is_no_fault_of_the_store_is_a_warning(each: Shell) -> None:
    each.enqueue("jobs:boom", "--retries", "0", "--queue", "mail")
    each.work()
    assert findings(each, "--fail-on", "wrong")["dlq"] == {
        "check": "dlq",
        "status": "warning",
        "message": "queue 'mail' has 1 dead letter",
        "remedy": "omniq dlq list --queue mail says why; then omniq dlq requeue or omniq dlq purge",
    }
    each.ok("dlq", "purge", "--queue", "mail")
    findings(each, "--fail-on", "warning")
    each.put()
    waits = findings(each)["queues"]
    assert (waits["status"], waits["message"]) == ("warning", "queue 'default' has 1 task ready, and no worker serves it")
    findings(each, "--fail-on", "warning", code=1)
    each.ok("pause", "default")
    paused = each("doctor", "--fail-on", "warning")
    assert paused.code == 1
    assert "warning  queues      queue 'default' is paused with 1 task ready\n" in paused.out


def test_tasks_that_somebody_works_on_are_no_warning(sh: Shell) -> None:
    gate = str(sh.folder / "gate")
    sh.enqueue("jobs:wait_for", f'["{gate}"]')
    worker = sh.start("worker", "jobs", "--concurrency", "1")
    wait_for(lambda: Path(gate + ".runs").exists(), within=30)
    sh.put()
    findings(sh, "--fail-on", "warning")
    Path(gate).touch()
    assert sh.interrupt(worker, signal.SIGTERM) == 0


def test_a_clock_that_went_back_is_found(sh: Shell) -> None:
    sh.put()
    with sqlite3.connect(sh.folder / "queue.db") as db:
        db.execute("UPDATE events SET ts = ts + 3600000000")
    db.close()
    found = findings(sh, code=1)["clock"]
    assert found["status"] == "wrong"
    assert "ahead of this clock" in found["message"]


def test_a_store_that_is_no_database(sh: Shell) -> None:
    (sh.folder / "queue.db").write_text("this is not a database, whatever its name says\n" * 100)
    found = findings(sh, code=1)["open"]
    assert found["status"] == "wrong"
    assert "file is not a database" in found["message"]


# -- purge -----------------------------------------------------------------------------------------


def test_old_tasks_results_and_events_go(each: Shell) -> None:
    done, failed = each.enqueue("jobs:add", "[1]"), each.enqueue("jobs:boom", "--retries", "0")
    each.work()
    waiting = each.enqueue("jobs:add", "[2]", "--eta", "1h")
    assert each.ok("purge", "--older-than", "1h", "--events").out == "deleted 0 results with their ended tasks, and 0 events\n"
    dry = each.ok("purge", "--older-than", "0s", "--events", "--dry-run").out
    assert dry == "would delete 2 results with their ended tasks, and 7 events\n"
    assert each.ok("purge", "--older-than", "0s").out == "deleted 2 results with their ended tasks\n"
    assert [each("tasks", "show", id).code for id in (done, failed, waiting)] == [1, 1, 0]
    assert len(each.ok("tasks", "show", waiting, "--json").json()["events"]) == 1
    assert each.ok("purge", "--older-than", "0s", "--events").out.endswith("and 7 events\n")
    assert each.ok("tasks", "show", waiting, "--json").json()["events"] == []


def test_purge_needs_an_age(sh: Shell) -> None:
    sh.put()
    assert sh("purge").code == 2
    assert sh("purge", "--older-than", "a while").sentence().startswith("'a while' is not a duration")


# -- backup ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sqlite", "file"])
def test_a_backup_is_a_store_of_its_moment(shells: Callable[..., Shell], kind: str) -> None:
    sh, copy = shells(kind), shells(kind, "copy")
    place = copy.folder / ("copy.db" if kind == "sqlite" else "copy")
    kept = sh.enqueue("jobs:add", "[2, 3]")
    assert sh.ok("backup", str(place)).out == f"written to {place}\n"
    sh.enqueue("jobs:add", "[4, 5]")
    assert [task["id"] for task in copy.ok("tasks", "list", "--json").json()] == [kept]
    copy.ok("doctor")
    copy.work()
    assert copy.ok("result", kept).out == "5\n"
    again = sh("backup", str(place))
    assert again.code == 2
    assert "is there already" in again.sentence()


def test_a_backup_that_fails_leaves_nothing(sh: Shell) -> None:
    sh.enqueue("jobs:add", "[2, 3]")
    (sh.folder / "full").write_text("a file, not a folder")
    assert sh("backup", str(sh.folder / "full" / "copy.db")).code == 1
    assert not list(sh.folder.glob("*.part"))


@pytest.mark.usefixtures("redis_server")
def test_redis_is_backed_up_by_its_own_means(shells: Callable[..., Shell]) -> None:
    sh = shells("redis")
    sh.enqueue("jobs:add", "[2, 3]")
    refused = sh("backup", "copy")
    assert refused.code == 2
    assert "by its own means" in refused.sentence()


def test_a_folder_is_not_copied_into_itself(shells: Callable[..., Shell]) -> None:
    sh = shells("file")
    sh.enqueue("jobs:add", "[2, 3]")
    inside = Path(sh.url.removeprefix("file://").partition("?")[0]) / "copy"
    assert "is inside the store" in sh("backup", str(inside)).sentence()
    sh.ok("doctor")


# -- migrate ---------------------------------------------------------------------------------------


_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")


def assert_alike(ours: object, theirs: object, finest_us: int) -> None:
    """The same but for times, which may differ by less than the store that they came to keeps."""
    texts = [json.dumps(one) for one in (ours, theirs)]
    assert json.loads(_MOMENT.sub("", texts[0])) == json.loads(_MOMENT.sub("", texts[1]))
    moments = [[datetime.fromisoformat(found) for found in _MOMENT.findall(text)] for text in texts]
    assert all(abs(a - b) < timedelta(microseconds=finest_us) for a, b in zip(*moments, strict=True))


@pytest.mark.usefixtures("redis_server")
@pytest.mark.parametrize(("source", "destination"), [("sqlite", "redis"), ("redis", "file"), ("file", "sqlite")])
def test_a_store_moves_to_another_kind(shells: Callable[..., Shell], source: str, destination: str) -> None:
    sh = shells(source)
    done, failed = sh.enqueue("jobs:add", "[2, 3]"), sh.enqueue("jobs:boom", "--retries", "0")
    sh.work()
    waiting = sh.enqueue("jobs:add", "[7]", "--group", "g", "--idempotency-key", "k")
    later = sh.enqueue("jobs:add", "[8]", "--eta", "1h", "--queue", "other")
    sh.ok("groups", "set-limit", "default", "g", "4")
    sh.ok("pause", "other")
    new = shells(destination, "new")
    moved = sh.ok("migrate", sh.url, new.url, store=False)
    assert moved.out.splitlines() == ["copied 4 tasks, 2 results and 8 events (0 tasks there before)", "the counts agree"]
    for id in (done, failed, waiting, later):
        ours, theirs = sh.ok("tasks", "show", id, "--json").json(), new.ok("tasks", "show", id, "--json").json()
        for event in ours["events"] + theirs["events"]:
            del event["seq"]
        assert_alike(ours, theirs, finest_us=1000 if destination == "redis" else 1)
    assert new.ok("groups", "--json").json()[0]["limit"] == 4
    assert new.enqueue("jobs:add", "[7]", "--group", "g", "--idempotency-key", "k") == waiting
    again = sh.ok("migrate", sh.url, new.url, store=False)
    assert again.out.splitlines()[0] == "copied 4 tasks, 2 results and 8 events (4 tasks there before)"
    new.ok("doctor")
    new.work()
    assert new.ok("result", waiting).out == "7\n"
    assert new("result", later).code == 4


def fill(shell: Shell, tasks: int) -> None:
    with shell.queue() as oq:
        oq.enqueue_many("jobs:add", [(n,) for n in range(tasks)])


def test_a_copy_that_was_cut_short_goes_on(shells: Callable[..., Shell]) -> None:
    sh, new = shells("sqlite"), shells("file", "new")
    fill(sh, 20_000)
    running = sh.start("migrate", sh.url, new.url, store=False)

    def some_are_there() -> bool:
        if not (sh.folder / "new" / "queue" / "pending").exists():
            return False
        with OmniQ.from_url(new.url) as oq:
            return sum(c.ready for c in oq.counts()) > 0

    wait_for(some_are_there, within=30)
    assert sh.interrupt(running) == 130
    assert "cut short after" in sh.said
    assert "Traceback" not in sh.said
    done = sh.ok("migrate", sh.url, new.url, store=False)
    assert "copied 20000 tasks, 0 results and 20000 events" in done.out
    assert "the counts agree" in done.out


def test_a_copy_goes_on_within_the_events(shells: Callable[..., Shell]) -> None:
    sh, new = shells("sqlite"), shells("sqlite", "new")
    fill(sh, 1200)
    sh.ok("migrate", sh.url, new.url, store=False)
    with sqlite3.connect(sh.folder / "new.db") as db:
        db.execute("DELETE FROM events WHERE seq > 700")
        db.execute("UPDATE store SET next_event = 701")
    db.close()
    done = sh.ok("migrate", sh.url, new.url, store=False)
    assert "1200 events (1200 tasks there before)" in done.out
    assert "the counts agree" in done.out


def test_what_must_not_be_copied(shells: Callable[..., Shell]) -> None:
    sh, new = shells("sqlite"), shells("sqlite", "new")
    sh.put()
    same = sh("migrate", sh.url, sh.url, store=False)
    assert (same.code, same.sentence()) == (2, "SRC and DST are the same store")
    missing = sh("migrate", url_of("sqlite", sh.folder / "missing"), new.url, store=False)
    assert missing.code == 1
    assert not (sh.folder / "new.db").exists()
    new.enqueue("jobs:add", "[1]")
    used = sh("migrate", sh.url, new.url, store=False)
    assert used.code == 1
    assert "DST has tasks of its own" in used.err
    worker = sh.start("worker", "jobs", "--queues", "nothing")
    sh.until_said("runs up to")
    busy = sh("migrate", sh.url, url_of("sqlite", sh.folder / "third"), store=False)
    assert busy.code == 1
    assert "stop them first" in busy.err
    assert sh.interrupt(worker) == 0


# -- bench -----------------------------------------------------------------------------------------


def test_the_benchmark_measures_and_cleans_up(each: Shell) -> None:
    id = each.put()
    figures = each.ok("bench", "--tasks", "200", "--json").json()
    assert len(figures) == 5
    assert all(f["per_second"] > 0 for f in figures)
    found = {q["queue"]: q for q in each.ok("queues", "--json").json()}
    bench = found.pop("omniq.bench")
    assert not any(bench[state] for state in ("ready", "scheduled", "running", "done", "dead", "cancelled"))
    assert found["default"]["ready"] == 1
    assert each("result", id).code == 4
    assert each.ok("bench", "--tasks", "20").out.splitlines()[0].split()[:2] == ["WHAT", "TASKS"]


def test_the_benchmark_cleans_up_after_ctrl_c(sh: Shell) -> None:
    sh.put()
    running = sh.start("bench", "--tasks", "200000", stdout=subprocess.DEVNULL)
    with sh.queue() as oq:
        wait_for(lambda: any(c.queue == "omniq.bench" and c.ready for c in oq.counts()), within=30)
        assert sh.interrupt(running) == 130
        assert [c.ready for c in oq.counts() if c.queue == "omniq.bench"] == [0]
    assert "Traceback" not in sh.said


def test_the_benchmark_refuses_to_run_beside_workers(sh: Shell) -> None:
    worker = sh.start("worker", "jobs")
    sh.until_said("runs up to")
    done = sh("bench")
    assert (done.code, done.out) == (1, "")
    assert "would take part" in done.sentence()
    assert sh.interrupt(worker) == 0
