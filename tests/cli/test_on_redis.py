"""The commands on Redis, whose server may be away, frozen, or in need of a password."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.redis_server import Server, running
from support.shell import JOBS, Shell
from support.waiting import wait_for


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    users = tmp_path / "users.acl"
    users.write_text("user default on nopass ~* &* +@all\nuser omniq on >secret ~* &* +@all\n")
    with running(tmp_path / "server", aclfile=str(users), appendonly="yes", appendfsync="always") as started:
        yield started


@pytest.fixture
def sh(tmp_path: Path, server: Server) -> Iterator[Shell]:
    (tmp_path / "jobs.py").write_text(JOBS)
    shell = Shell(tmp_path, f"redis://omniq:secret@127.0.0.1:{server.port}/0")
    yield shell
    shell.close()


def test_an_operator_s_day(sh: Shell) -> None:
    done = sh.enqueue("jobs:add", "[2, 3]", "--group", "g")
    failed = sh.enqueue("jobs:boom", '["out of paper"]', "--retries", "0", "--queue", "print")
    worked = sh.work()
    assert "store redis://omniq:***@" in worked.err
    assert "1 done, 1 failed, 0 retried" in worked.err
    assert sh.ok("result", done).out == "5\n"
    assert sh("result", failed).code == 3
    assert [task["id"] for task in sh.ok("tasks", "list", "--error-contains", "paper", "--json").json()] == [failed]
    assert "out of paper" in sh.ok("tasks", "show", failed).out
    found = {q["queue"]: q for q in sh.ok("queues", "--json").json()}
    assert (found["default"]["done"], found["print"]["dead"]) == (1, 1)
    sh.ok("pause", "print")
    assert sh.ok("dlq", "requeue", "--all", "--reset-attempts").out == "requeued 1 task\n"
    sh.work()
    assert sh("result", failed).code == 4
    sh.ok("resume", "print")
    sh.work()
    assert sh.ok("dlq", "purge", "--queue", "print").out == "deleted 1 task\n"
    assert sh.ok("groups", "set-limit", "default", "g", "3").code == 0
    assert sh.ok("groups", "--json").json()[0]["limit"] == 3
    assert {finding["status"] for finding in sh.ok("doctor", "--json").json()} == {"ok"}
    assert sh.ok("purge", "--older-than", "0s").out == "deleted 1 result with its ended task\n"
    assert len(sh.ok("bench", "--tasks", "20", "--json").json()) == 5


def test_a_lost_worker_is_found_and_its_task_taken_back(sh: Shell) -> None:
    gate = sh.folder / "gate"
    id = sh.enqueue("jobs:wait_for", json.dumps([str(gate)]))
    worker = sh.start("worker", "jobs")
    wait_for(Path(f"{gate}.runs").exists, within=30)
    sh.interrupt(worker, signal.SIGKILL)
    assert id in sh("doctor").out
    repaired = sh("doctor", "--repair")
    assert (repaired.code, "took back 1 task" in repaired.out) == (0, True)
    assert sh.ok("tasks", "show", id, "--json").json()["status"] == "RETRYING"


def test_a_wrong_password_is_not_shown(sh: Shell) -> None:
    sh.put()
    wrong = sh.url.replace("secret", "hushhush")
    for words in (["queues"], ["doctor"], ["enqueue", "jobs:add"], ["worker", "jobs"], ["serve", "--port", "0"]):
        done = sh(*words, "--store", wrong)
        assert done.code == 1
        assert "redis://omniq:***@" in done.out + done.err
        assert "hushhush" not in done.out + done.err


def test_top_survives_a_server_that_dies_and_comes_back(sh: Shell, server: Server) -> None:
    sh.enqueue("jobs:add", "[1]", "--queue", "first")
    with sh.terminal("top", "--every", "100ms") as terminal:
        assert "***" in terminal.until("first")
        server.kill()
        terminal.until("the store is away: cannot reach redis://omniq:***@")
        server.start()
        terminal.until("1 ready")
        terminal.type("q")
        assert terminal.ended() == 0
    assert b"secret" not in terminal.raw


@pytest.mark.parametrize(("key", "code"), [("q", 0), ("\x03", 130)])
def test_top_is_left_at_once_while_the_server_is_frozen(sh: Shell, server: Server, key: str, code: int) -> None:
    sh.put()
    with sh.terminal("top", "--every", "100ms") as terminal:
        terminal.until("q quits")
        os.kill(server.pid, signal.SIGSTOP)
        try:
            wait_for(lambda: terminal.is_silent(0.5))
            terminal.type(key)
            assert terminal.ended(5) == code
        finally:
            os.kill(server.pid, signal.SIGCONT)


@pytest.mark.parametrize("options", [(), ("--processes", "2")], ids=["alone", "supervised"])
def test_a_worker_waits_for_a_server_that_is_away_when_it_starts(sh: Shell, server: Server, options: tuple[str, ...]) -> None:
    id = sh.put()
    server.kill()
    worker = sh.start("worker", "jobs", "--drain-and-exit", *options)
    sh.until_said("no work yet: cannot reach redis://omniq:***@")
    server.start()
    assert worker.wait(30) == 0
    assert sh.ok("result", id).out == "1\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_that_waits_for_its_server_is_stopped_at_once(sh: Shell, server: Server, number: int) -> None:
    server.kill()
    worker = sh.start("worker", "jobs")
    sh.until_said("no work yet")
    assert sh.interrupt(worker, number) == 0


def test_a_full_server_is_looked_at_and_worked_off(sh: Shell, server: Server) -> None:
    id = sh.put()
    with server.client() as client:
        client.config_set("maxmemory", "1")
    refused = sh("enqueue", "jobs:add", "[1]")
    assert refused.code == 1
    assert "is out of memory: raise maxmemory" in refused.sentence()
    assert sh.ok("queues", "--json").json()[0]["ready"] == 1
    sh.work()
    assert sh.ok("result", id).out == "1\n"
    assert sh.ok("doctor").code == 0
