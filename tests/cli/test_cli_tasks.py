"""`omniq tasks` and `omniq dlq`: filters, pages, one task in full, and actions on many."""

import json
import signal
from pathlib import Path

import pytest
from support.shell import Shell
from support.waiting import wait_for


@pytest.fixture
def some(each: Shell) -> dict[str, str]:
    """Tasks in several states, by what they are."""
    ids = {
        "failed": each.enqueue("jobs:boom", '["out of paper"]', "--retries", "0", "--queue", "print", "--group", "g"),
        "lost": each.enqueue("jobs:boom", '["Timeout after 3 s"]', "--retries", "0"),
        "done": each.enqueue("jobs:add", "[1]"),
    }
    each.work()
    ids["waiting"] = each.enqueue("jobs:add", "[2]", "--queue", "print")
    ids["later"] = each.enqueue("jobs:add", "[3]", "--eta", "1h")
    return ids


def ids_of(shell: Shell, *words: str) -> set[str]:
    return {task["id"] for task in shell.ok(*words, "--json").json()}


def test_every_filter_of_the_list(each: Shell, some: dict[str, str]) -> None:
    def found(*words: str) -> set[str]:
        names = {id: name for name, id in some.items()}
        return {names[id] for id in ids_of(each, "tasks", "list", *words)}

    assert found() == set(some)
    assert found("--status", "failed") == {"failed", "lost"}
    assert found("--status", "PENDING", "--status", "SUCCESS") == {"done", "waiting", "later"}
    assert found("--queue", "print") == {"failed", "waiting"}
    assert found("--name", "jobs:boom") == {"failed", "lost"}
    assert found("--group", "g") == {"failed"}
    assert found("--error-contains", "paper") == {"failed"}
    assert found("--since", "1h") == set(some)
    assert found("--since", "2035-01-01T00:00:00Z") == set()
    assert found("--queue", "print", "--status", "PENDING") == {"waiting"}
    assert found("--queue", "nothing") == set()


def test_the_list_for_people(each: Shell, some: dict[str, str]) -> None:
    lines = each.ok("tasks", "list").out.splitlines()
    assert lines[0].split() == ["ID", "STATUS", "QUEUE", "NAME", "TRIES", "AGE", "ERROR"]
    assert lines[1].split()[:4] == [some["later"], "PENDING", "default", "jobs:add"]
    assert any(some["failed"] in line and "RuntimeError: out of paper" in line for line in lines)
    assert "\x1b" not in "".join(lines)
    assert each.ok("tasks", "list", "--queue", "nothing").out == "no tasks\n"


def test_pages_cover_everything_once(each: Shell) -> None:
    with each.queue() as oq:
        made = oq.enqueue_many("jobs:add", [(n,) for n in range(123)])
    seen: list[str] = []
    after: list[str] = []
    for expected in (50, 50, 23):
        page = each.ok("tasks", "list", "--json", *after)
        assert len(page.json()) == expected
        seen += [task["id"] for task in page.json()]
        if expected == 50:
            assert page.err.startswith("there is more: go on with --after ")
            after = ["--after", page.err.split()[-1]]
        else:
            assert page.err == ""
    assert seen == list(reversed(made))
    assert len(each.ok("tasks", "list", "--limit", "123", "--json").json()) == 123


def test_one_task_in_full(each: Shell, some: dict[str, str]) -> None:
    text = each.ok("tasks", "show", some["failed"]).out
    for words in (some["failed"], "jobs:boom", "FAILED", '["out of paper"]', "1 of 1", "enqueued", "started", "failed"):
        assert words in text
    assert "Traceback (most recent call last)" in text
    assert "raise RuntimeError(text)" in text
    shown = each.ok("tasks", "show", some["failed"], "--json").json()
    assert (shown["id"], shown["status"], shown["queue"]) == (some["failed"], "FAILED", "print")
    assert shown["error"]["type"] == "RuntimeError"
    assert [event["event"] for event in shown["events"]] == ["enqueued", "started", "failed"]
    assert each.ok("tasks", "show", some["done"], "--json").json()["result"] == 1


def test_what_a_task_says_cannot_steer_the_terminal(sh: Shell) -> None:
    """ESC, BEL, a C1 control, a mark that turns the line around, and line ends of all kinds."""
    said = "red \x1b[31m [bold]bell\x07 \x9b31m \u202egnp.exe\rover\nnext\u2028last"
    id = sh.enqueue("jobs:boom", json.dumps([said]), "--retries", "0")
    logged = sh.work().err
    plain = [sh.ok(*words).out for words in (["tasks", "list"], ["tasks", "show", id], ["dlq", "list"])]
    as_json = [sh(*words, "--json") for words in (["tasks", "list"], ["tasks", "show", id], ["result", id])]
    for shown in [logged, *plain, *(done.out for done in as_json)]:
        assert "[bold]" in shown
        assert not any(char in shown for char in "\x1b\x07\x9b\u202e\r\u2028")
    assert as_json[1].json()["args"] == [said]
    assert as_json[1].json()["error"]["message"] == said
    for line in logged.splitlines():
        assert line[:4] == "    " or line[2] == line[5] == ":", line
    assert "    Traceback (most recent call last):" in logged.splitlines()


def test_a_name_with_newlines_makes_no_row_of_its_own(sh: Shell) -> None:
    """The id, the group and the key of a task are what its client says, and so is the text of its error."""
    odd = "x\x1b\nstatus      SUCCESS\r\t\u202ey"
    shown = "x\\x1b\\nstatus      SUCCESS\\r\\t\\u202ey"
    with sh.queue() as oq:
        oq.options(max_retries=0, task_id=odd, group=odd, idempotency_key=odd).enqueue("jobs:boom", odd)
        oq.options(group="other").enqueue("jobs:add", 1)
    sh.work()
    for words in (("tasks", "list", "--status", "FAILED"), ("dlq", "list"), ("dlq", "requeue", "--all", "--dry-run")):
        row = sh.ok(*words).out.splitlines()[1]
        assert row.startswith(f"{shown}  FAILED"), row
    assert shown in sh.ok("groups").out
    lines = sh.ok("tasks", "show", odd).out.splitlines()
    assert lines[0] == f"jobs:boom  {shown}"
    assert [line for line in lines if line.startswith("status")] == ["status      FAILED"]
    assert f"group       {shown}" in lines
    assert f"last error: RuntimeError: {shown}" in lines
    after = lines.index("    Traceback (most recent call last):")
    assert all(line.startswith("    ") for line in lines[after:])


def test_json_log_lines_carry_the_traceback_and_say_what_was_said(sh: Shell) -> None:
    said = "red \x1b[31m \u202egnp.exe\nnext"
    id = sh.enqueue("jobs:boom", json.dumps([said]), "--retries", "0")
    lines = [json.loads(line) for line in sh("worker", "jobs", "--drain-and-exit", OMNIQ_LOG_FORMAT="json").err.splitlines()]
    (failed,) = [line for line in lines if line.get("task_id") == id]
    assert failed["msg"] == f"task jobs:boom failed for good: RuntimeError: {said}"
    assert failed["exc"].endswith(f"RuntimeError: {said}")
    assert "raise RuntimeError(text)" in failed["exc"]


def test_cancel_by_id_and_by_filter(each: Shell, some: dict[str, str]) -> None:
    assert each.ok("tasks", "cancel", some["waiting"]).out == "cancelled 1 task\n"
    again = each("tasks", "cancel", some["waiting"], "no-such-id")
    assert again.code == 1
    assert again.out == "cancelled 0 tasks\n"
    assert "has ended already: it is CANCELLED" in again.err
    assert "no task 'no-such-id' in this store" in again.err
    dry = each.ok("tasks", "cancel", "--all", "--dry-run")
    assert dry.out.splitlines()[-1] == "would cancel 1 task"
    assert some["later"] in dry.out
    assert each.ok("tasks", "cancel", "--status", "PENDING").out == "cancelled 1 task\n"
    assert ids_of(each, "tasks", "list", "--status", "CANCELLED") == {some["waiting"], some["later"]}


def test_a_running_task_is_asked_to_end(sh: Shell) -> None:
    gate = str(sh.folder / "gate")
    id = sh.enqueue("jobs:wait_for", f'["{gate}"]')
    worker = sh.start("worker", "jobs")
    wait_for(lambda: Path(gate + ".runs").exists(), within=30)
    assert sh.ok("tasks", "cancel", id).out == "cancelled 1 task; 1 running one is asked to end\n"
    assert "RUNNING, asked to end" in sh.ok("tasks", "show", id).out
    Path(gate).touch()
    assert sh.interrupt(worker, signal.SIGTERM) == 0


def test_retry_of_a_failed_task(each: Shell, some: dict[str, str]) -> None:
    assert each.ok("tasks", "retry", some["failed"], "--reset-attempts").out == "requeued 1 task\n"
    done = each("tasks", "retry", some["done"])
    assert done.code == 1
    assert "only a FAILED task can be requeued" in done.err
    shown = each.ok("tasks", "show", some["failed"], "--json").json()
    assert (shown["status"], shown["attempts"]) == ("PENDING", 0)


def test_dead_letters_are_listed_requeued_and_purged(each: Shell, some: dict[str, str]) -> None:
    letters = each.ok("dlq", "list", "--json").json()
    assert {(letter["id"], letter["error"]["message"]) for letter in letters} == {
        (some["failed"], "out of paper"),
        (some["lost"], "Timeout after 3 s"),
    }
    assert ids_of(each, "dlq", "list", "--error-contains", "Timeout") == {some["lost"]}
    dry = each.ok("dlq", "requeue", "--all", "--dry-run")
    assert dry.out.splitlines()[-1] == "would requeue 2 tasks"
    assert each.ok("dlq", "requeue", "--error-contains", "Timeout").out == "requeued 1 task\n"
    shown = each.ok("tasks", "show", some["lost"], "--json").json()
    assert (shown["status"], shown["attempts"]) == ("RETRYING", 1)
    assert each("dlq", "purge", some["done"]).code == 1
    assert each.ok("dlq", "purge", some["failed"], "--dry-run").out.splitlines()[-1] == "would delete 1 task"
    assert each.ok("dlq", "purge", "--queue", "print").out == "deleted 1 task\n"
    assert each("tasks", "show", some["failed"]).code == 1
    assert each.ok("dlq", "list").out == "no tasks\n"
    assert each.ok("dlq", "list", "--json").json() == []


@pytest.mark.parametrize("words", [["tasks", "cancel"], ["tasks", "retry"], ["dlq", "requeue"], ["dlq", "purge"]])
def test_nothing_happens_to_everything_by_leaving_something_out(sh: Shell, words: list[str]) -> None:
    sh.enqueue("jobs:add", "[1]")
    nothing = sh(*words)
    assert (nothing.code, nothing.sentence()) == (2, "name the tasks: ids, filters such as --queue, or --all")
    both = sh(*words, "some-id", "--all")
    assert (both.code, both.sentence()) == (2, "give ids, or filters, or --all, not several of them")
    empty = sh(*words, "--error-contains", "")  # as "$UNSET" is
    assert (empty.code, empty.out) == (2, "")
    assert empty.sentence().startswith("--error-contains is empty, which every task contains: give some text")


def test_what_cannot_be_undone_is_not_done_to_everything_without_a_yes(sh: Shell) -> None:
    with sh.queue() as oq:
        oq.options(max_retries=0).enqueue_many("jobs:boom", [()] * 2)
        sh.work()
        oq.options(queue="mail").enqueue_many("jobs:add", [(n,) for n in range(3)])

        def left() -> list[tuple[int, int]]:
            return [(c.dead, c.ready) for c in oq.counts()]

        for words, all_of_it in ((("dlq", "purge"), "delete all 2 dead letters"), (("tasks", "cancel"), "cancel all 3 tasks")):
            refused = sh(*words, "--all")
            assert (refused.code, refused.out) == (2, "")
            assert refused.sentence() == f"--all would {all_of_it}: add --yes if you are sure, or --dry-run to look first"
        for keys, code in (("\n", 1), ("\x03", 130), ("y\n", 0)):
            assert left() == [(2, 0), (0, 3)]
            with sh.terminal("dlq", "purge", "--all") as terminal:
                terminal.until("delete all 2 dead letters? [y/N]")
                terminal.type(keys)
                assert terminal.ended() == code
        assert left() == [(0, 0), (0, 3)]
        assert sh.ok("tasks", "cancel", "--all", "--yes").out == "cancelled 3 tasks\n"


def test_many_dead_letters_are_requeued_in_pages(sh: Shell) -> None:
    with sh.queue() as oq:
        oq.options(max_retries=0).enqueue_many("jobs:boom", [()] * 1203)
    sh.work("--concurrency", "20")
    assert sh.ok("dlq", "requeue", "--all", "--reset-attempts").out == "requeued 1203 tasks\n"
    assert sh.ok("queues", "--json").json()[0]["ready"] == 1203


def test_a_narrow_terminal_cuts_errors_and_nothing_else(sh: Shell) -> None:
    id = sh.enqueue("jobs:boom", json.dumps(["a long story " * 20]), "--retries", "0")
    sh.work()
    with sh.terminal("tasks", "list", columns=80) as terminal:
        assert terminal.ended() == 0
        header, line = terminal.screen().rstrip().splitlines()
    assert header.split() == ["ID", "STATUS", "QUEUE", "NAME", "TRIES", "AGE", "ERROR"]
    assert line.startswith(f"{id}  FAILED  default  jobs:boom")
    assert line.endswith("…")
