"""`omniq worker`: draining, several processes, replacing them, reloading, and the live line."""

import importlib.util
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.shell import JOBS, Shell, alive
from support.waiting import wait_for

NEW_JOBS = """

def resize(n):
    return n * 10


@omniq.task(name="shrink")
def shrink(n):
    return n * 100
"""


def results(shell: Shell, ids: list[str]) -> list[object]:
    with shell.queue() as oq:
        found = [oq.get_result(id) for id in ids]
    assert all(found)
    return [r.result for r in found if r is not None]


def test_draining_ends_with_0_although_tasks_failed_and_says_how_many(each: Shell) -> None:
    each.enqueue("jobs:add", "[1]")
    each.enqueue("jobs:boom", "--retries", "1", "--queue", "mail")
    later = each.enqueue("jobs:add", "[1]", "--eta", "1h")
    done = each.ok("worker", "jobs", "--drain-and-exit", OMNIQ_LOG_LEVEL="INFO")
    assert done.out == ""
    assert f"store {each.url}; modules jobs; tasks send-mail" in done.err
    assert "worker ended: 1 done, 1 failed, 1 retried" in done.err
    assert each("result", later).code == 4


def test_only_named_queues_are_served(sh: Shell) -> None:
    mine, other = sh.enqueue("jobs:add", "[1]", "--queue", "a"), sh.enqueue("jobs:add", "[1]", "--queue", "b")
    sh.work("--queues", "a, c")
    assert sh("result", mine).code == 0
    assert sh("result", other).code == 4


def test_passwords_are_masked_and_a_network_store_that_is_unknown_is_refused(sh: Shell) -> None:
    done = sh("worker", "jobs", "--store", "amqp://user:secret@host/0")
    assert done.code == 2
    assert "secret" not in done.err
    assert "unknown scheme 'amqp'" in done.sentence()


def test_several_processes_share_the_work(each: Shell) -> None:
    ids = [each.enqueue("jobs:pid", "[0.3]") for _ in range(8)]
    done = each.ok("worker", "jobs", "--processes", "2", "--concurrency", "1", "--drain-and-exit")
    assert len(set(results(each, ids))) == 2
    assert "all workers ended: 8 done, 0 failed, 0 retried" in done.err
    assert done.err.count("modules jobs") == 1


def test_a_process_that_dies_is_replaced_and_its_task_ends(sh: Shell) -> None:
    killer = sh.enqueue("jobs:die", "--retries", "1")
    good = [sh.enqueue("jobs:add", f"[{n}]") for n in range(5)]
    done = sh.ok("worker", "jobs", "--processes", "2", "--concurrency", "1", "--drain-and-exit")
    assert done.err.count("was killed by SIGKILL; starting another") == 2
    assert results(sh, good) == [0, 1, 2, 3, 4]
    shown = sh("result", killer, "--json")
    assert (shown.code, shown.json()["error"]["type"], shown.json()["attempts"]) == (3, "WorkerLost", 2)


def test_a_process_is_replaced_after_so_many_tasks(sh: Shell) -> None:
    ids = [sh.enqueue("jobs:pid") for _ in range(6)]
    done = sh.ok("worker", "jobs", "--max-tasks", "2", "--concurrency", "1", "--drain-and-exit")
    pids = results(sh, ids)
    assert len(set(pids)) == 3
    assert all(pids.count(pid) == 2 for pid in pids)
    assert "this process is replaced: it has begun 2 tasks" in done.err


def test_a_process_that_has_grown_is_replaced(sh: Shell) -> None:
    first = sh.enqueue("jobs:grow")
    worker = sh.start("worker", "jobs", "--max-memory", "250MB")
    sh.until_said("this process is replaced: it takes")
    second = sh.enqueue("jobs:pid")
    assert sh.ok("result", second, "--wait", "--wait-timeout", "30s").code == 0
    one, two = results(sh, [first, second])
    assert one != two
    assert sh.interrupt(worker, signal.SIGTERM) == 0


@pytest.mark.usefixtures("redis_server")
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_rolling_deploy_spends_no_attempt_of_the_tasks_that_only_the_new_workers_have(
    shells: Callable[[str], Shell], kind: str
) -> None:
    sh = shells(kind)
    old = sh.start("worker", "jobs", "--grace", "5s")
    with sh.queue() as oq:
        once = oq.options(max_retries=0)
        known = [once.enqueue("jobs:add", n) for n in range(5)]
        new = [once.enqueue(name, n) for n in range(4) for name in ("jobs:resize", "shrink", "new_jobs:f")]
        allowed = [id for id, n in zip(new, range(12), strict=True) if n % 3 < 2]
        wait_for(lambda: all(oq.get_task(id).last_error is not None for id in allowed), within=30)
        assert {(oq.get_task(id).status, oq.get_task(id).attempts) for id in allowed} == {("PENDING", 0)}
        (sh.folder / "jobs.py").write_text(JOBS + NEW_JOBS)
        fresh = sh.start("worker", "jobs", "--grace", "5s")
        wait_for(lambda: any(oq.get_result(id) for id in allowed), within=30)
        assert sh.interrupt(old, signal.SIGTERM) == 0
        ended = [oq.get_result(id, wait=True, timeout=30) for id in [*known, *allowed]]
        assert {(r.status, r.attempts) for r in ended if r is not None} == {("SUCCESS", 1)}
        assert [r.result for r in ended if r is not None][5:] == [n * f for n in range(4) for f in (10, 100)]
        # A module that the old worker was not started for is one that it may not import.
        assert {r.error.type for id in set(new) - set(allowed) if (r := oq.get_result(id)) and r.error} == {"NotRunnable"}
    assert sh.interrupt(fresh, signal.SIGTERM) == 0


def test_draining_gives_up_what_no_worker_has(sh: Shell) -> None:
    missing, good = sh.enqueue("jobs:nothing_of_the_kind"), sh.enqueue("jobs:add", "[1]")
    done = sh.ok("worker", "jobs", "--drain-and-exit")
    assert "worker ended: 1 done, 1 failed, 0 retried" in done.err
    assert results(sh, [good]) == [1]
    shown = sh("result", missing, "--json")
    assert (shown.code, shown.json()["error"]["type"]) == (3, "NotRunnable")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_all_processes_in_good_order(sh: Shell, number: int) -> None:
    gate = str(sh.folder / "gate")
    id = sh.enqueue("jobs:wait_for", f'["{gate}"]')
    worker = sh.start("worker", "jobs", "--processes", "2")
    wait_for(lambda: Path(gate + ".runs").exists(), within=30)
    worker.send_signal(number)
    sh.until_said("stopping 2 worker processes")
    Path(gate).touch()
    assert worker.wait(30) == 0
    assert results(sh, [id]) == ["through"]


def test_workers_whose_supervisor_was_killed_end_by_themselves(sh: Shell) -> None:
    ids = [sh.enqueue("jobs:pid", "[0.2]") for _ in range(6)]
    worker = sh.start("worker", "jobs", "--processes", "2", "--concurrency", "1")
    sh.ok("result", ids[-1], "--wait", "--wait-timeout", "30s")
    pids = {int(str(pid)) for pid in results(sh, ids)}
    assert worker.pid not in pids
    sh.interrupt(worker, signal.SIGKILL)
    wait_for(lambda: not any(alive(pid) for pid in pids), within=20)
    assert "the supervising process is gone: stopping" in sh.said


@pytest.mark.parametrize("options", [[], ["--processes", "2"]])
def test_a_module_that_cannot_be_imported_ends_with_2(sh: Shell, options: list[str]) -> None:
    (sh.folder / "broken.py").write_text("1 / 0\n")
    missing = sh("worker", "no_such_module", *options)
    assert missing.code == 2
    assert "no module 'no_such_module'" in missing.err
    broken = sh("worker", "broken", *options)
    assert broken.code == 2
    assert "module 'broken' cannot be imported: ZeroDivisionError: division by zero" in broken.err
    for file, name in (("./tools/slow.py", "tools.slow"), ("jobs.py", "jobs"), ("typo.py", "typo")):
        mistaken = sh("worker", file, *options)
        assert mistaken.code == 2
        assert f"{file!r} names a file: give its module, like {name}" in mistaken.err
    function = sh("worker", "jobs:add", *options)
    assert function.code == 2
    assert "'jobs:add' names a function: give its module, jobs" in function.err
    (sh.folder / "script.py").write_text("raise SystemExit(0)\n")
    script = sh("worker", "script", *options)
    assert script.code == 2
    assert "module 'script' cannot be imported: SystemExit: 0" in script.err
    assert "Traceback" not in missing.err + broken.err + script.err


@pytest.mark.skipif(importlib.util.find_spec("watchfiles") is None, reason="needs watchfiles, from the extra reload")
def test_a_change_of_the_code_restarts_the_workers(sh: Shell) -> None:
    code = sh.folder / "changing.py"
    code.write_text("def answer():\n    return 'old'\n")
    worker = sh.start("worker", "changing", "--reload")
    sh.until_said("runs up to")
    first = sh.ok("enqueue", "changing:answer", "--wait", "--wait-timeout", "30s")
    assert first.out.splitlines()[0] == '"old"'
    code.write_text("def answer(:\n")
    sh.until_said("waiting for a change of the code")
    assert "changing.py changed: restarting the workers" in sh.said
    code.write_text("def answer():\n    return 'new answer'\n")
    second = sh.ok("enqueue", "changing:answer", "--wait", "--wait-timeout", "30s")
    assert second.out.splitlines()[0] == '"new answer"'
    assert sh.interrupt(worker) == 0


def test_options_that_do_not_go_together_or_make_no_sense(sh: Shell) -> None:
    for words in (
        ["--reload", "--drain-and-exit"],
        ["--concurrency", "0"],
        ["--concurrency", "9" * 20],
        ["--grace", "9" * 20 + "d"],
        ["--processes", "0"],
        ["--grace", "soon"],
        ["--queues", " , "],
        ["--max-memory", "lots"],
        ["--queues", "no/such"],
    ):
        done = sh("worker", "jobs", *words)
        assert done.code == 2, words
        assert "Traceback" not in done.err
    assert sh("worker").code == 2


def test_the_live_line_of_a_terminal(sh: Shell) -> None:
    gate = str(sh.folder / "gate")
    sh.enqueue("jobs:add", "[1]")
    sh.enqueue("jobs:boom", "--retries", "0")
    sh.enqueue("jobs:wait_for", f'["{gate}"]')
    with sh.terminal("worker", "jobs") as terminal:
        shown = terminal.until("1 running · 1 done · 1 failed")
        assert "failed for good: RuntimeError: no luck" in shown
        assert shown.count("running ·") == 1
        Path(gate).touch()
        terminal.until("0 running · 2 done")
        terminal.type("\x03")
        assert terminal.ended() == 0
        assert "worker ended: 2 done, 1 failed, 0 retried" in terminal.screen()
        assert "running ·" not in terminal.screen()


def test_the_live_line_of_several_processes(sh: Shell) -> None:
    for n in range(4):
        sh.enqueue("jobs:add", f"[{n}]")
    with sh.terminal("worker", "jobs", "--processes", "2") as terminal:
        terminal.until("0 running · 4 done")
        terminal.type("\x03")
        assert terminal.ended() == 0
        assert "all workers ended: 4 done, 0 failed, 0 retried" in terminal.screen()


def test_a_very_long_line_of_a_process_stops_neither_it_nor_what_it_shows(sh: Shell) -> None:
    """Such as the traceback of an error whose text is long."""
    (sh.folder / "wordy.py").write_text("def explain(n):\n    raise ValueError('x' * n)\n")
    for n in (200_000, 1_100_000, 1):
        sh.enqueue("wordy:explain", f"[{n}]", "--retries", "0")
    with sh.terminal("worker", "wordy", "--processes", "2", "--concurrency", "1", "--drain-and-exit") as terminal:
        assert terminal.ended() == 0
        assert "all workers ended: 0 done, 3 failed, 0 retried" in terminal.screen()


def test_json_log_lines(sh: Shell) -> None:
    import json

    sh.enqueue("jobs:add", "[1]")
    done = sh.ok("worker", "jobs", "--drain-and-exit", OMNIQ_LOG_FORMAT="json")
    lines = [json.loads(line) for line in done.err.splitlines()]
    assert lines[-1]["msg"] == "worker ended: 1 done, 0 failed, 0 retried"


def test_the_second_signal_ends_a_supervisor_at_once(sh: Shell) -> None:
    gate = str(sh.folder / "gate")
    sh.enqueue("jobs:wait_for", f'["{gate}"]')
    worker = sh.start("worker", "jobs", "--processes", "2", "--grace", "60s")
    wait_for(lambda: Path(gate + ".runs").exists(), within=30)
    worker.send_signal(signal.SIGTERM)
    sh.until_said("stopping 2 worker processes")
    begun = time.monotonic()
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(20) == 128 + signal.SIGTERM
    assert time.monotonic() - begun < 15
    assert not os.path.exists(gate)
