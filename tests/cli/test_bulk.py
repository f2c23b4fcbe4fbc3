"""`omniq enqueue --from`: many tasks, refused lines, and going on after a cut."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from support.shell import Shell
from support.waiting import wait_for


def write(shell: Shell, *lines: object, name: str = "tasks.jsonl") -> str:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (shell.folder / name).write_text(text)
    return name


def test_a_file_of_tasks(each: Shell) -> None:
    file = write(
        each,
        {"func": "jobs:add", "args": [1, 2]},
        {"func": "jobs:add", "kwargs": {"a": 3}, "queue": "other"},
        {"args": [5]},
        "",
        {"func": "jobs:add", "args": [1], "key": "k"},
        {"func": "jobs:add", "args": [1], "key": "k"},
    )
    done = each.ok("enqueue", "jobs:pid", "--from", file, "--queue", "math")
    assert done.out == ""
    assert done.sentence() == "enqueued 4 of 6 lines, 1 were there already, 0 refused"
    assert not (each.folder / f"{file}.progress").exists()
    tasks = each.ok("tasks", "list", "--json").json()
    assert sorted((t["func_path"], t["queue"]) for t in tasks) == [
        ("jobs:add", "math"),
        ("jobs:add", "math"),
        ("jobs:add", "other"),
        ("jobs:pid", "math"),
    ]
    assert len({t["id"] for t in tasks}) == 4


def test_refused_lines_are_named_and_the_others_stored(each: Shell) -> None:
    file = write(
        each,
        {"func": "jobs:add", "args": [1], "key": "k"},
        "{not json",
        {"func": "jobs:add", "args": 3},
        {"func": "jobs:add", "colour": "red"},
        {"args": []},
        {"func": "jobs:add", "queue": "no such/queue"},
        {"func": "jobs:add", "args": [2], "key": "k"},
        {"func": "jobs:add", "args": [9]},
    )
    done = each("enqueue", "--from", file)
    assert done.code == 2
    lines = done.err.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == ["line 2", "line 3", "line 4", "line 5", "line 6", "line 7"]
    assert "not valid JSON" in lines[0]
    assert "colour" in lines[2]
    assert "idempotency key 'k'" in lines[5]
    assert lines[-1] == "omniq: enqueued 2 of 8 lines, 6 refused"
    assert sum(q["ready"] for q in each.ok("queues", "--json").json()) == 2


def test_lines_are_stored_also_when_nobody_reads_which_were_refused(sh: Shell) -> None:
    file = write(sh, "{not json", {"func": "jobs:add", "args": [1]}, "{not json", {"func": "jobs:add", "args": [2]})
    reader, writer = os.pipe()
    os.close(reader)
    running = sh.start("enqueue", "--from", file, stderr=writer)
    os.close(writer)
    assert running.wait(30) == 2
    assert sh.ok("queues", "--json").json()[0]["ready"] == 2


def test_a_terminal_shows_how_far_it_is(shells: Callable[..., Shell]) -> None:
    sh, new = shells("sqlite"), shells("file", "new")
    file = write(sh, *[{"func": "jobs:add", "args": [n]} for n in range(20_000)])
    with sh.terminal("enqueue", "--from", file) as terminal:
        assert terminal.ended(60) == 0
        assert re.search(rb"enqueueing .*%", terminal.raw)
        assert terminal.screen().strip() == "omniq: enqueued 20000 of 20000 lines, 0 refused"
    with sh.terminal("migrate", sh.url, new.url, store=False) as terminal:
        assert terminal.ended(60) == 0
        bars = terminal.raw.partition(b"copied")[0]
        assert re.search(rb"tasks .*%", bars)
        assert re.search(rb"events .*%", bars)
        assert terminal.screen().split("\n")[1].strip() == "the counts agree"


def test_standard_input(sh: Shell) -> None:
    done = sh.ok("enqueue", "--from", "-", input='{"func": "jobs:add", "args": [1]}\n' * 3)
    assert done.sentence() == "enqueued 3 of 3 lines, 0 refused"
    done = sh.ok("enqueue", "--from", "-", "--skip", "2", input='{"func": "jobs:add", "args": [1]}\n' * 3)
    assert done.sentence() == "enqueued 1 of 3 lines, 0 refused"


def test_a_run_that_was_cut_short_goes_on_and_doubles_nothing(each: Shell) -> None:
    file = write(each, *[{"func": "jobs:add", "args": [n]} for n in range(30_000)])
    running = each.start("enqueue", "--from", file)
    note = each.folder / f"{file}.progress"
    wait_for(note.exists, within=30)
    assert each.interrupt(running) == 130
    assert "cut short after line" in each.said
    assert "Traceback" not in each.said
    before = json.loads(note.read_text())
    assert 0 < before["lines"] < 30_000
    done = each.ok("enqueue", "--from", file)
    assert f"going on after line {before['lines']}" in done.err
    assert "enqueued 30000 of 30000 lines" in done.err or "were there already" in done.err
    assert sum(q["ready"] for q in each.ok("queues", "--json").json()) == 30_000
    assert not note.exists()


def test_a_run_that_was_killed_goes_on_and_doubles_nothing(sh: Shell) -> None:
    file = write(sh, *[{"func": "jobs:add", "args": [n]} for n in range(30_000)])
    running = sh.start("enqueue", "--from", file)
    note = sh.folder / f"{file}.progress"
    wait_for(note.exists, within=30)
    assert sh.interrupt(running, signal.SIGKILL) == -9
    sh.ok("enqueue", "--from", file)
    assert sum(q["ready"] for q in sh.ok("queues", "--json").json()) == 30_000


def test_a_note_of_another_file_or_store_is_refused(sh: Shell) -> None:
    file = write(sh, {"func": "jobs:add"})
    (sh.folder / f"{file}.progress").write_text('{"store_id": "other", "run": "R", "size": 1}')
    done = sh("enqueue", "--from", file)
    assert done.code == 2
    assert "delete it to begin anew" in done.sentence()
    (sh.folder / f"{file}.progress").write_text("{}")
    assert sh("enqueue", "--from", file).code == 2


def test_what_does_not_go_with_a_file(sh: Shell) -> None:
    file = write(sh, {"func": "jobs:add"})
    for words in (["--wait"], ["--kwargs", "{}"], ["--idempotency-key", "k"]):
        assert sh("enqueue", "--from", file, *words).code == 2
    assert sh("enqueue", "jobs:add", "--skip", "1").code == 2
    missing = sh("enqueue", "--from", "missing.jsonl")
    assert (missing.code, missing.sentence()) == (2, "cannot read missing.jsonl: No such file or directory")


def at_rest(pid: int) -> bool:
    """Whether a process has used no processor time for a moment."""

    def used() -> list[str]:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]

    before = used()
    time.sleep(0.3)
    return used() == before


def test_lines_of_a_pipe_are_stored_as_they_arrive_and_ctrl_c_ends_it(sh: Shell) -> None:
    running = sh.start("enqueue", "--from", "-", stdin=subprocess.PIPE)
    assert running.stdin is not None
    running.stdin.write('{"func": "jobs:add", "args": [1]}\n{"func": "jobs:add", "args"')
    running.stdin.flush()
    with sh.queue() as oq:
        wait_for(lambda: sum(c.ready for c in oq.counts()) == 1, within=30)
    wait_for(lambda: at_rest(running.pid), within=30)  # the line is stored before the command hears of it
    assert sh.interrupt(running) == 130
    assert sh.said == "omniq: cut short after line 1: 1 enqueued; --skip 1 goes on\n"


def test_a_folder_or_a_line_too_deep_is_refused(sh: Shell) -> None:
    assert sh("enqueue", "--from", ".").sentence() == "cannot read .: it is a folder"
    done = sh("enqueue", "--from", "-", input='{"func": "jobs:add", "args": ' + "[" * 5000 + "\n")
    assert done.code == 2
    assert "Traceback" not in done.err
