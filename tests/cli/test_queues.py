"""`omniq queues`, `pause`, `resume`, `groups`."""

import asyncio
import string

from support.shell import Shell

from omniq import BaseStorage
from omniq.models import new_token
from omniq.operations import Beat, Reserve, WorkerInfo

NAME = "a-queue-whose-name-has-fifty-seven-characters-in-it-xxxxx"


def queues(shell: Shell) -> dict[str, dict[str, object]]:
    return {q["queue"]: q for q in shell.ok("queues", "--json").json()}


def test_counts_rates_and_the_oldest(each: Shell) -> None:
    for n in range(3):
        each.enqueue("jobs:add", f"[{n}]")
    each.enqueue("jobs:boom", "--retries", "0")
    each.work()
    each.enqueue("jobs:add", "[1]", "--queue", "mail")
    each.enqueue("jobs:add", "[1]", "--queue", "mail", "--eta", "1h")
    found = queues(each)
    default, mail = found["default"], found["mail"]
    assert (default["done"], default["dead"], default["ready"], default["oldest_ready"]) == (3, 1, 0, None)
    assert (mail["ready"], mail["scheduled"], mail["paused"]) == (1, 1, False)
    assert str(mail["oldest_ready"]).endswith("Z")
    assert default["rate_in"] == default["rate_out"] > 0
    assert mail["rate_out"] == 0
    lines = each.ok("queues").out.splitlines()
    assert lines[0].split()[:3] == ["QUEUE", "READY", "SCHED"]
    assert lines[2].split()[:3] == ["mail", "1", "1"]


def hold(shell: Shell, queue: str, n: int, *said: WorkerInfo) -> None:
    """Lease tasks, as workers that say this of themselves."""

    async def lease() -> None:
        async with BaseStorage.from_url(shell.url) as storage:
            reserve = Reserve(queues=(queue,), limit=n, token=new_token(), lease_us=60_000_000, worker=said[0].worker)
            await storage.apply([(reserve,), *((Beat(info=info),) for info in said)])

    asyncio.run(lease())


def test_what_runs_is_told_apart_from_what_was_leased_ahead(each: Shell) -> None:
    with each.queue() as oq:
        oq.options(queue="mail").enqueue_many("jobs:add", [(n,) for n in range(60)])
    one = WorkerInfo(worker="one", queues=("mail",), running=4, busy={"mail": 4}, concurrency=4)
    hold(each, "mail", 50, one, WorkerInfo(worker="two", queues=("mail", "x"), running=1, busy={"x": 1}))
    mail = queues(each)["mail"]
    assert (mail["running"], mail["busy"]) == (50, 4)
    titles, line = each.ok("queues").out.splitlines()
    found = dict(zip(titles.split(), line.split(), strict=True))
    assert (found["RUN"], found["LEASED"], found["READY"]) == ("4", "50", "10")


def test_a_worker_of_an_older_version_does_not_say_what_runs(sh: Shell) -> None:
    with sh.queue() as oq:
        oq.options(queue="mail").enqueue_many("jobs:add", [(n,) for n in range(60)])
    hold(sh, "mail", 50, WorkerInfo(worker="old", queues=("mail", "x"), running=5, concurrency=5))
    assert queues(sh)["mail"]["busy"] is None
    hold(sh, "mail", 1, WorkerInfo(worker="old", queues=("mail",), running=5, concurrency=5))
    assert queues(sh)["mail"]["busy"] == 5


def test_a_narrow_terminal_cuts_names_of_queues_and_no_number(sh: Shell) -> None:
    with sh.queue() as oq:
        for n in range(3):
            oq.options(queue=NAME, group=f"customer-{n}" * 5).enqueue("jobs:add", n)
    sh.ok("pause", NAME)
    with sh.terminal("queues", columns=80) as terminal:
        assert terminal.ended() == 0
        titles, line = terminal.screen().rstrip().splitlines()
    assert titles.split()[1:] == ["READY", "SCHED", "BLOCK", "RUN", "LEASED", "DONE", "FAIL", "CANC", "IN/S", "OUT/S", "OLDEST"]
    name, *numbers = line.split()
    assert name.endswith("…")
    assert numbers[:8] == ["3", "0", "0", "0", "0", "0", "0", "0"]
    assert numbers[-1] == "paused"
    with sh.terminal("groups", columns=60) as terminal:
        assert terminal.ended() == 0
        assert all(line.split()[2:] == ["1", "0", "1"] for line in terminal.screen().rstrip().splitlines()[1:])
    with sh.terminal("tasks", "list", columns=80) as terminal:
        assert terminal.ended() == 0
        titles, line, *_ = terminal.screen().rstrip().splitlines()
    assert titles.split() == ["ID", "STATUS", "QUEUE", "NAME", "TRIES", "AGE", "ERROR"]
    assert "PENDING  a-" in line
    with sh.terminal("top", columns=80, lines=24) as terminal:
        screen = terminal.until("a-queue")
        (line,) = [line for line in screen.splitlines() if "a-queue" in line]
        assert line.strip("│ ").split()[1:8] == ["3", "0", "0", "0", "0", "0", "0"]
        terminal.type("q")
        assert terminal.ended() == 0


def test_pages_of_queues(sh: Shell) -> None:
    names = [f"q{n:02}" for n in range(53)]
    with sh.queue() as oq:
        for name in reversed(names):
            oq.options(queue=name).enqueue("jobs:add", 1)
    first = sh.ok("queues", "--json")
    assert [q["queue"] for q in first.json()] == names[:50]
    assert first.err == "there is more: go on with --after q49\n"
    rest = sh.ok("queues", "--json", "--after", "q49")
    assert [q["queue"] for q in rest.json()] == names[50:]
    assert rest.err == ""
    assert len(sh.ok("queues", "--limit", "53").out.splitlines()) == 54
    assert sh.ok("queues", "--after", "q52").out == "no more queues\n"


def test_an_empty_store(each: Shell) -> None:
    each.work()
    assert each.ok("queues").out == "no queues yet\n"
    assert each.ok("queues", "--json").json() == []


def test_a_paused_queue_rests_until_it_is_resumed(each: Shell) -> None:
    id = each.put()
    assert each.ok("pause", "default").out == "paused queue default\n"
    assert each.ok("pause", "default").out == "queue default was paused already\n"
    each.work()
    assert each("result", id).code == 4
    assert queues(each)["default"]["paused"] is True
    assert "paused" in each.ok("queues").out
    assert each.ok("resume", "default").out == "resumed queue default\n"
    assert each.ok("resume", "default").out == "queue default was not paused\n"
    each.work()
    assert each("result", id).code == 0


def test_a_queue_is_paused_before_its_first_task(each: Shell) -> None:
    each.work()
    each.put()
    done = each.ok("pause", "later")
    assert done.out == "paused queue later\n"
    assert done.sentence().startswith("no queue 'later' is known yet")
    assert each.ok("resume", "nosuch").sentence() == "no queue 'nosuch' is known yet; omniq queues shows the others"
    assert each.ok("pause", "later").err == each.ok("pause", "default").err == ""
    each.ok("resume", "default")
    assert queues(each)["later"]["paused"] is True
    id = each.enqueue("jobs:add", "[1]", "--queue", "later")
    each.work()
    assert each("result", id).code == 4


def test_groups_and_their_limits(each: Shell) -> None:
    for group in ("ada", "ben"):
        each.enqueue("jobs:add", "[1]", "--queue", "mail", "--group", group)
    each.enqueue("jobs:add", "[1]", "--group", "cleo")
    found = each.ok("groups", "--json").json()
    assert [(g["queue"], g["group"], g["limit"], g["inflight"], g["ready"]) for g in found] == [
        ("default", "cleo", 1, 0, 1),
        ("mail", "ada", 1, 0, 1),
        ("mail", "ben", 1, 0, 1),
    ]
    assert each.ok("groups", "set-limit", "mail", "ada", "3").out == "group ada of queue mail runs up to 3 at once\n"
    shown = each.ok("groups", "--queue", "mail", "--json").json()
    assert [(g["group"], g["limit"]) for g in shown] == [("ada", 3), ("ben", 1)]
    assert each.ok("groups").out.splitlines()[0].split() == ["QUEUE", "GROUP", "LIMIT", "RUNNING", "READY"]


def test_pages_of_groups_cover_all_queues(each: Shell) -> None:
    with each.queue() as oq:
        for queue in ("a", "b", "b-2", "c"):
            for n in range(3):
                oq.options(queue=queue, group=f"g{n}").enqueue("jobs:add", 1)
    seen: list[tuple[str, str]] = []
    after: list[str] = []
    while True:
        page = each.ok("groups", "--json", "--limit", "2", *after)
        seen += [(g["queue"], g["group"]) for g in page.json()]
        if not page.err:
            break
        after = ["--after", page.err.split()[-1]]
    assert seen == [(queue, f"g{n}") for queue in ("a", "b", "b-2", "c") for n in range(3)]


def test_the_cursor_of_a_page_of_groups_is_one_word_whatever_they_are_called(each: Shell) -> None:
    names = sorted(["a b", "c\x1b]0;x\x07\nd", "e/%2F é", "$(f)", "\u202eg"], key=str.encode)
    with each.queue() as oq:
        for name in names:
            oq.options(group=name).enqueue("jobs:add", 1)
    seen: list[str] = []
    after: list[str] = []
    for _ in names:
        page = each.ok("groups", "--json", "--limit", "1", *after)
        seen += [g["group"] for g in page.json()]
        if page.err:
            (line,) = page.err.splitlines()
            after = ["--after", line.split()[-1]]
            assert line == f"there is more: go on with {' '.join(after)}"
            assert set(after[1]) <= set(f"{string.ascii_letters}{string.digits}/%_.-~")
    assert seen == names


def test_a_queue_or_group_that_is_not_there(each: Shell) -> None:
    each.put()
    missing = each("groups", "--queue", "nope")
    assert (missing.code, missing.sentence()) == (1, "no queue 'nope' in this store")
    unknown = each("groups", "set-limit", "default", "nobody", "3")
    assert unknown.code == 1
    assert unknown.sentence().startswith("no group 'nobody' in queue 'default'")
    each.ok("groups", "set-limit", "default", "nobody", "3", "--new")
    assert each.ok("groups", "--json").json()[0]["limit"] == 3
