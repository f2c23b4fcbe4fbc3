"""Bad input of every kind, a closed pipe, and Ctrl-C: one sentence or nothing, the right exit code, never a traceback."""

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.redis_server import Server
from support.shell import Shell
from support.waiting import wait_for

from omniq.storage.file.folder import sealed_file

READING = [
    ["queues"],
    ["tasks", "list"],
    ["tasks", "show", "some-id"],
    ["tasks", "cancel", "some-id"],
    ["tasks", "retry", "--all"],
    ["result", "some-id"],
    ["result", "some-id", "--wait"],
    ["dlq", "list"],
    ["dlq", "requeue", "--all"],
    ["dlq", "purge", "--all"],
    ["pause", "mail"],
    ["resume", "mail"],
    ["groups"],
    ["groups", "set-limit", "mail", "g", "1"],
    ["doctor"],
    ["purge", "--older-than", "1d"],
    ["bench"],
]


def named(words: list[str]) -> str:
    return " ".join(words)


@pytest.mark.parametrize("words", READING, ids=named)
def test_a_store_that_is_not_there_is_an_error_and_is_not_made(shells: Callable[..., Shell], words: list[str]) -> None:
    for kind in ("sqlite", "file"):
        sh = shells(kind)
        done = sh(*words)
        assert (done.code, done.out) == (1, "")
        assert "no store at" in done.sentence()
    assert sorted(path.name for path in sh.folder.iterdir()) == ["jobs.py"]


def test_a_redis_database_without_a_store_stays_empty(shells: Callable[..., Shell], redis_server: Server) -> None:
    sh = shells("redis")
    for words in (["queues", "--json"], ["doctor"], ["pause", "mail"]):
        done = sh(*words)
        assert (done.code, done.out) == (1, "")
        assert "no store at redis://" in done.sentence()
    with redis_server.client() as client:
        assert client.dbsize() == 0
    sh.work()
    sh.ok("queues")


def test_a_server_that_is_away_is_a_finding_of_the_doctor(sh: Shell) -> None:
    away = "redis://:secret@127.0.0.1:1/0"
    done = sh("doctor", "--store", away)
    assert done.code == 1
    assert done.out.startswith("wrong    open ")
    assert "check that the server runs" in done.out
    for words in (["queues"], ["enqueue", "jobs:add"], ["serve", "--port", "0"]):  # a worker waits for it
        other = sh(*words, "--store", away)
        assert other.code == 1
        assert "cannot reach redis://:***@127.0.0.1:1/0" in other.err
        assert "secret" not in other.out + other.err + done.out


@pytest.mark.parametrize("url", ["memory://", "sqlite://"])
def test_a_store_in_memory_is_no_use_to_commands(sh: Shell, url: str) -> None:
    for words in (["queues"], ["enqueue", "jobs:add"], ["worker", "jobs"]):
        done = sh(*words, "--store", url)
        assert done.code == 1
        assert "lives inside one process" in done.sentence()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nonsense", "unknown scheme 'nonsense'"),
        ("ftp://host/x", "unknown scheme 'ftp'"),
        ("sqlite://host/x.db", "names a host"),
        ("sqlite:///x.db?colour=red", "unknown option 'colour'"),
        ("file://", "names no folder"),
        ("redis://[", "Invalid IPv6 URL"),
        ("redis://host:port/0", "write a host as name:6379"),
        ("sqlite:///a%00b.db", "NUL"),
        ("", "unknown scheme"),
    ],
)
def test_a_store_url_that_makes_no_sense(sh: Shell, url: str, says: str) -> None:
    done = sh("queues", "--store", url)
    assert done.code == 2
    assert says in done.sentence()


def test_a_variable_that_makes_no_sense(sh: Shell) -> None:
    done = sh("queues", store=False, OMNIQ_RESULT_TTL="soon")
    assert done.code == 2
    assert "OMNIQ_RESULT_TTL='soon'" in done.sentence()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["enqueue", "jobs:add", "[1, 2"], "ARGS is not valid JSON"),
        (["enqueue", "jobs:add", "1"], "ARGS is one JSON array"),
        (["enqueue", "jobs:add", "--kwargs", "{a: 1}"], "--kwargs is not valid JSON"),
        (["enqueue", "jobs:add", "--kwargs", "[1]"], "--kwargs is one JSON object"),
        (["enqueue"], "name the task"),
        (["enqueue", "jobs:add", "--eta", "tomorrow"], "'tomorrow' is not a time"),
        (["enqueue", "jobs:add", "--eta", "2030-01-01T00:00:00"], "has no time zone"),
        (["enqueue", "jobs:add", "--eta", "2030-13-01T00:00:00Z"], "is not an RFC 3339 moment"),
        (["enqueue", "jobs:add", "--timeout", "0s"], "timeout must be more than zero"),
        (["enqueue", "jobs:add", "--timeout", "-3s"], "is not a duration"),
        (["enqueue", "jobs:add", "--retries", "-1"], "'--retries'"),
        (["enqueue", "jobs:add", "--retries", "many"], "'--retries'"),
        (["enqueue", "jobs:add", "--retries", "9" * 20], "'--retries'"),
        (["enqueue", "jobs:add", "--eta", "9" * 20 + "d"], "is not a time"),
        (["enqueue", "jobs:add", "--queue", "a/b"], "queue name 'a/b'"),
        (["enqueue", "jobs:add", "--wait-timeout", "3s"], "--wait-timeout needs --wait"),
        (["enqueue", "jobs:add", "--import", "no_such_module"], "no module 'no_such_module'"),
        (["tasks", "list", "--status", "SLEEPING"], "Invalid value for '--status': 'SLEEPING' is not one of"),
        (["tasks", "list", "--limit", "0"], "'--limit'"),
        (["tasks", "list", "--limit", "ten"], "'--limit'"),
        (["tasks", "list", "--since", "last week"], "'last week' is not a time"),
        (["tasks", "list", "--after", "rubbish"], "cursor"),
        (["tasks", "list", "--after", "czk5OTk5OTk5OTk5OTk5OTk5OTk5"], "cursor"),
        (["groups", "--after", "rubbish"], "is not a cursor"),
        (["groups", "set-limit", "mail", "g", "0"], "'N'"),
        (["groups", "set-limit", "mail", "g", "x"], "'N'"),
        (["groups", "set-limit", "mail", "g", "9" * 20], "'N'"),
        (["tasks", "frobnicate"], "No such command 'frobnicate'"),
        (["frobnicate"], "No such command 'frobnicate'"),
        (["queues", "--frobnicate"], "--frobnicate"),
        (["tasks", "show"], "ID"),
        (["result", "a", "b"], "unexpected extra argument"),
        (["migrate", "sqlite:///a.db"], "DST"),
        (["bench", "--tasks", "1"], "'--tasks'"),
    ],
    ids=lambda value: named(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_sentence_and_2(sh: Shell, words: list[str], says: str) -> None:
    sh.put()
    done = sh(*words, store=words[0] != "migrate")
    assert (done.code, done.out) == (2, ""), done.err
    assert says in done.sentence()


def test_a_command_line_that_is_no_text(sh: Shell) -> None:
    sh.put()
    done = sh("tasks", "show", os.fsdecode(b"\xff"))
    assert (done.code, done.sentence()) == (2, "the command line is not UTF-8 text")
    deep = sh("enqueue", "jobs:add", "[" * 5000)
    assert deep.code == 2
    assert "ARGS is not valid JSON" in deep.sentence()


def test_a_group_without_a_command_shows_its_help(sh: Shell) -> None:
    for words in ([], ["tasks"], ["dlq"]):
        done = sh(*words, store=False)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("Usage: omniq")
        assert "Commands:\n" in done.err


def test_an_option_that_was_mistyped_says_where_to_look(sh: Shell) -> None:
    assert sh("tasks", "lst").sentence().startswith("No such command 'lst'. Did you mean 'list'")
    assert "(see omniq tasks list --help)" in sh("tasks", "list", "--lmit", "3").sentence()


@pytest.mark.parametrize("words", [["tasks", "show"], ["tasks", "cancel"], ["tasks", "retry"], ["dlq", "requeue"], ["result"]])
def test_an_unknown_id_is_1(each: Shell, words: list[str]) -> None:
    each.put()
    done = each(*words, "01JAB3Y8Z0000000000000000")
    assert done.code == 1
    assert done.sentence() == "no task '01JAB3Y8Z0000000000000000' in this store"


def test_an_unknown_id_in_json_prints_nothing_on_stdout(sh: Shell) -> None:
    sh.put()
    for words in (["tasks", "show", "nope", "--json"], ["result", "nope", "--json", "--wait"]):
        done = sh(*words)
        assert (done.code, done.out) == (1, "")


def without_powers(command: list[str]) -> list[str]:
    """The same command without the right to read and write everything, which root has."""
    if os.geteuid() != 0:
        return command
    if shutil.which("setpriv") is None:
        pytest.skip("root may do everything, and setpriv is not here")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]


@pytest.mark.parametrize("words", [["queues"], ["enqueue", "jobs:add"], ["doctor"], ["worker", "jobs", "--drain-and-exit"]])
def test_a_store_without_permission(each: Shell, words: list[str]) -> None:
    each.put()
    shut = each.folder / ("queue" if each.url.startswith("file") else "queue.db")
    shut.chmod(0)
    try:
        done = subprocess.run(
            without_powers(each.command(*words)),
            cwd=each.folder,
            env=each.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        shut.chmod(0o700)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr or "wrong" in done.stdout


def test_a_store_of_a_newer_version(shells: Callable[..., Shell]) -> None:
    sh, folder = shells("sqlite"), shells("file", "folder")
    for shell in (sh, folder):
        shell.put()
    with sqlite3.connect(sh.folder / "queue.db") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    mark = folder.folder / "folder" / "format.json"
    mark.write_bytes(sealed_file({**json.loads(mark.read_text().partition("#")[0]), "format": 99}))
    for shell in (sh, folder):
        for words in (["queues"], ["enqueue", "jobs:add"], ["worker", "jobs"]):
            done = shell(*words)
            assert done.code == 1, (shell.url, done.err)
            assert "upgrade omniq" in done.err or "install a newer omniq" in done.err
            assert "Traceback" not in done.err
        done = shell("doctor")
        assert done.code == 1
        assert "upgrade omniq on this machine" in done.out


@pytest.mark.parametrize("words", [["tasks", "list", "--limit", "5000"], ["tasks", "list", "--limit", "5000", "--json"]])
def test_a_reader_that_leaves_early_is_no_fault(sh: Shell, words: list[str]) -> None:
    with sh.queue() as oq:
        oq.enqueue_many("jobs:add", [("x" * 100,)] * 3000)
    running = sh.start(*words, stdout=subprocess.PIPE)
    assert running.stdout is not None
    running.stdout.readline()
    running.stdout.close()
    assert running.wait(30) == 0
    assert sh.said == ""


def test_output_that_nobody_reads_at_all(sh: Shell) -> None:
    sh.put()
    for words in (["--help"], ["queues"], ["queues", "--json"], ["tasks", "list"]):
        reader, writer = os.pipe()
        os.close(reader)
        running = sh.start(*words, store=words != ["--help"], stdout=writer)
        os.close(writer)
        assert running.wait(30) in (0, 1)
    assert sh.said == ""


@pytest.mark.parametrize("closing", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_streams_that_were_closed_before_it_began(sh: Shell, closing: str) -> None:
    for words, code in ((["enqueue", "jobs:add"], 0), (["queues", "--json"], 0), (["tasks", "show", "nope"], 1)):
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {closing}', "sh", *sh.command(*words)],
            cwd=sh.folder,
            env=sh.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
    assert len(sh.ok("tasks", "list", "--json").json()) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["dlq", "requeue", "--all"],
        ["dlq", "purge", "--all", "--yes"],
        ["tasks", "cancel", "--all", "--yes"],
        ["backup", "copy.db"],
        ["doctor"],
        ["purge", "--older-than", "0s", "--events"],
        ["tasks", "list", "--limit", "10000", "--json", "--error-contains", "nothing"],
    ],
    ids=named,
)
def test_ctrl_c_in_the_middle_of_a_long_command(sh: Shell, words: list[str]) -> None:
    with sh.queue() as oq:
        oq.enqueue_many("jobs:add", [(n,) for n in range(20_000)])
    if words[0] == "dlq":
        with sqlite3.connect(sh.folder / "queue.db") as db:
            db.execute("UPDATE tasks SET state = 6, status = 'FAILED'")
            db.execute("UPDATE queues SET ready = 0, dead = 20000")
        db.close()
    running = sh.start(*words)
    maps = f"/proc/{running.pid}/maps"
    with contextlib.suppress(FileNotFoundError):  # it has ended
        wait_for(lambda: "queue.db-shm" in Path(maps).read_text(), within=30)  # SQLite maps the index of its log
    code = sh.interrupt(running)
    assert code in (0, 130)
    assert "Traceback" not in sh.said
    sh.ok("queues")


def test_help_and_version(sh: Shell) -> None:
    shown = sh.ok("--help", store=False).out
    for command in ("worker", "enqueue", "result", "tasks", "dlq", "queues", "top", "doctor", "migrate", "bench"):
        assert f"  {command} " in shown
    assert "130 cut short by Ctrl-C" in " ".join(shown.split())
    assert sh.ok("-h", store=False).out == shown
    assert "Example: omniq tasks list" in " ".join(sh.ok("tasks", "list", "--help", store=False).out.split())
    assert sh("tasks", store=False).code == 2
    assert sh.ok("--version", store=False).out.startswith("omniq ")


@pytest.mark.parametrize(("typed", "completed"), [("omniq que", "queues"), ("omniq tasks list --sta", "--status")])
def test_the_shell_completes_commands_and_options(sh: Shell, typed: str, completed: str) -> None:
    asked = {"_OMNIQ_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = sh(store=False, **asked)
    assert completed in done.out.split()
    assert done.err == ""


def test_json_is_all_there_is_on_stdout(each: Shell) -> None:
    each.enqueue("jobs:add", "[1]", "--group", "g")
    for words in (["queues"], ["tasks", "list", "--limit", "1"], ["groups"], ["dlq", "list"], ["doctor"]):
        assert isinstance(json.loads(each.ok(*words, "--json").out), list)


@pytest.mark.parametrize(
    "words",
    [
        ("queues",),
        ("enqueue", "jobs:add", "[1]"),
        ("worker", "jobs", "--drain-and-exit"),
        ("serve", "--port", "0"),
        ("doctor",),
        ("tasks", "list"),
        ("purge", "--older-than", "1d"),
        ("backup", "copy.db"),
    ],
    ids=lambda words: words[0],
)
def test_a_database_of_another_program_is_refused_and_left_alone(sh: Shell, words: tuple[str, ...]) -> None:
    path = sh.folder / "app.db"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE users (name TEXT)")
    connection.commit()
    connection.close()
    before = path.read_bytes(), path.stat().st_mtime_ns
    ended = sh(*words, "--store", f"sqlite:///{path}")
    assert ended.code == 1
    assert "is a database of another program (with the table 'users')" in ended.out + ended.err
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert [p.name for p in sh.folder.iterdir() if p.name.startswith("app.db")] == ["app.db"]
