"""`omniq enqueue` and `omniq result`: one task in, its result out, and the exit codes between."""

import signal
from datetime import UTC, datetime, timedelta

from support.shell import Shell

from omniq import OmniQ, TaskStatus


def task_of(shell: Shell, id: str):
    with OmniQ.from_url(shell.url) as oq:
        task = oq.get_task(id)
    assert task is not None
    return task


def test_a_task_goes_in_and_its_result_comes_out(each: Shell) -> None:
    done = each.ok("enqueue", "jobs:add", "[2, 3]")
    assert done.out == done.last + "\n"
    assert done.err == ""
    id = done.last
    waiting = each("result", id)
    assert (waiting.code, waiting.out) == (4, "")
    assert waiting.sentence() == f"task {id} has not ended: it is PENDING"
    each.work()
    assert each.ok("result", id).out == "5\n"
    result = each.ok("result", id, "--json").json()
    assert {k: result[k] for k in ("task_id", "status", "result", "error", "attempts")} == {
        "task_id": id,
        "status": "SUCCESS",
        "result": 5,
        "error": None,
        "attempts": 1,
    }
    assert result["finished_at"].endswith("Z")


def test_options_reach_the_task(sh: Shell) -> None:
    id = sh.enqueue(
        "jobs:add",
        *("--kwargs", '{"a": 1, "b": 2}', "--queue", "math", "--group", "g", "--retries", "9"),
        *("--timeout", "2m", "--idempotency-key", "k", "--eta", "10m"),
    )
    task = task_of(sh, id)
    assert (task.kwargs, task.queue, task.group, task.max_retries) == ({"a": 1, "b": 2}, "math", "g", 9)
    assert (task.timeout, task.idempotency_key) == (120.0, "k")
    assert task.eta is not None
    assert timedelta(minutes=9) < task.eta - datetime.now(UTC) < timedelta(minutes=11)
    again = sh.enqueue("jobs:add", "--kwargs", '{"a": 1, "b": 2}', "--queue", "math", "--group", "g", "--retries", "9",
                       "--timeout", "2m", "--idempotency-key", "k", "--eta", "10m")  # fmt: skip
    assert again == id


def test_an_eta_may_be_a_moment(sh: Shell) -> None:
    id = sh.enqueue("jobs:add", "[1]", "--eta", "2031-05-06T07:08:09+02:00")
    assert task_of(sh, id).eta == datetime(2031, 5, 6, 5, 8, 9, tzinfo=UTC)


def test_an_imported_module_brings_the_options_of_its_tasks_and_checks_arguments(sh: Shell) -> None:
    id = sh.enqueue("send-mail", '["ada"]', "--import", "jobs")
    assert (task_of(sh, id).queue, task_of(sh, id).max_retries) == ("mail", 7)
    wrong = sh("enqueue", "send-mail", "[]", "--import", "jobs")
    assert (wrong.code, wrong.out) == (2, "")
    assert "send-mail: missing a required argument: 'to'" in wrong.sentence()
    by_path = task_of(sh, sh.enqueue("jobs:send_mail", '["ada"]', "--import", "jobs"))
    assert (by_path.queue, by_path.func_path) == ("mail", "send-mail")
    for words, told in (
        (("jobs:add", "[1, 2, 3]"), "jobs:add: too many positional arguments; it takes a, b=0"),
        (("jobs:ad", "[1]"), "module 'jobs' has no 'ad': check the name 'jobs:ad'"),
        (("jobs.py:add", "[1]"), "'jobs.py:add' names a file: write its module, jobs:add"),
    ):
        wrong = sh("enqueue", *words, "--import", "jobs")
        assert (wrong.code, wrong.out, wrong.sentence()) == (2, "", told)


def test_a_name_that_nobody_imported_is_stored_with_a_note_that_its_options_are_unknown(sh: Shell) -> None:
    done = sh.ok("enqueue", "send-mail", '["ada"]')
    assert "'send-mail' is not registered here" in done.sentence()
    assert "--import MODULE" in done.err
    assert sh.ok("enqueue", "jobs.add", "[1]").sentence().endswith("; a function of a module is written jobs:add")
    assert sh.ok("enqueue", "jobs.py", "[1]").sentence().endswith("; a function of a module is written jobs:FUNCTION")
    assert (task_of(sh, done.last).queue, task_of(sh, done.last).max_retries) == ("default", 3)


def test_the_environment_names_the_store_and_the_option_wins(sh: Shell) -> None:
    inside = sh.folder / "inside.db"
    sh.ok("enqueue", "jobs:add", "[1]", store=False, OMNIQ_DB_URL=f"sqlite:///{inside}")
    assert inside.exists()
    sh.ok("enqueue", "jobs:add", "[1]", OMNIQ_DB_URL=f"sqlite:///{sh.folder / 'other.db'}")
    assert not (sh.folder / "other.db").exists()


def test_waiting_gives_the_result_and_then_the_id(each: Shell) -> None:
    worker = each.start("worker", "jobs")
    each.until_said("runs up to")
    done = each.ok("enqueue", "jobs:add", "[20, 22]", "--wait", "--wait-timeout", "30s")
    assert done.out.splitlines()[0] == "42"
    assert each.ok("result", done.last, "--wait").out == "42\n"
    failed = each("enqueue", "jobs:boom", "--retries", "0", "--wait")
    assert failed.code == 3
    assert failed.out.splitlines() == [failed.last]
    assert failed.sentence() == f"task {failed.last} FAILED: RuntimeError: no luck"
    shown = each("result", failed.last, "--json")
    assert shown.code == 3
    assert (shown.json()["status"], shown.json()["error"]["message"]) == ("FAILED", "no luck")
    assert each.interrupt(worker, signal.SIGTERM) == 0


def test_a_wait_that_takes_too_long_ends_with_4(sh: Shell) -> None:
    done = sh("enqueue", "jobs:add", "[1]", "--wait", "--wait-timeout", "200ms")
    assert done.code == 4
    assert "has not ended: it is PENDING" in done.sentence()
    shown = sh("result", done.last, "--wait", "--wait-timeout", "0.1s", "--json")
    assert (shown.code, shown.json()["status"], shown.json()["result"]) == (4, "PENDING", None)


def test_a_cancelled_task_ends_with_3(sh: Shell) -> None:
    id = sh.put()
    sh.ok("tasks", "cancel", id)
    done = sh("result", id)
    assert (done.code, done.sentence()) == (3, f"task {id} was CANCELLED")


def test_ctrl_c_while_waiting_leaves_the_task_and_prints_its_id(sh: Shell) -> None:
    sh.put()
    waiting = sh.start("enqueue", "jobs:add", "[2]", "--wait")
    with sh.queue() as oq:
        while sum(c.ready for c in oq.counts()) < 2:
            assert waiting.poll() is None
    sh.ok("queues")  # longer than it takes from the commit, which others see first, to waiting
    assert sh.interrupt(waiting) == 130
    id = (sh.folder / "out").read_text().splitlines()[-1]
    assert task_of(sh, id).status is TaskStatus.PENDING
    assert sh.said == ""


def test_ctrl_c_while_waiting_for_a_result(sh: Shell) -> None:
    id = sh.put()
    waiting = sh.start("result", id, "--wait")
    sh.ok("queues")  # about as long as the other command needs to begin
    assert sh.interrupt(waiting) == 130
    assert "Traceback" not in sh.said
