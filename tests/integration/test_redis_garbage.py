"""Jobs of other clients with nonsense in them: none stops its queue, and what cannot be read is put aside with a reason."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from support.redis_server import Server, running

from omniq import AsyncOmniQ, TaskStatus, handler
from omniq.errors import DuplicateId, Refused
from omniq.models import Blocker, Record, State, TaskError, new_token
from omniq.operations import (
    Ack,
    Cancel,
    CommitRun,
    Enqueue,
    Extend,
    Fail,
    Filter,
    OpenRun,
    Release,
    Remove,
    Requeue,
    Reserve,
    Retention,
    Retry,
    Saved,
    Stage,
)
from omniq.serialization import MsgspecSerializer
from omniq.storage.redis import RedisStorage
from omniq.translate import task_of

Q, BASE = "mail", "{mail}:"
GOOD = [f"good-{n}" for n in range(10)]
HOUR_US = 3_600_000_000
NUMBERS = (b"-1", b"abc", b"", b"nan", b"inf", b"-inf", b"1e400", b"9" * 400, b"1.5", b"0x10", b"\xff\xfe", b"12 34", b"-9" * 9)
NUMERIC = (
    "created_ms", "attempt", "timeout_ms", "max_attempts", "backoff_ms", "due_ms", "lock_until_ms", "last_started_ms",
    "first_started_ms", "updated_ms", "queued_ms", "completed_ms", "failed_ms", "last_error_ms", "eta_us", "interval_us",
    "finished_ms", "left",
)  # fmt: skip
TEXTS = (b"", b"\xff\xfe", b"{", b"[[1]]", b'{"a":{}}', b"\x00", b"}{", b"x" * 5000, b"[" * 3000, b'["a",1]', b'"\\ud800"')
TEXTUAL = (
    "id", "payload", "gid", "state", "lease_token", "o", "worker", "cancel", "ended_by", "deps", "dead_queue", "edges",
    "idempotency_key", "last_error", "headers", "blocked_by", "error", "progress", "foreign", "more",
)  # fmt: skip
ORIGINS = (
    b"%s 1 - 3 2 jobab{", b"%s 1 - 3 2 jobab", b"%s 1 - 99 99 job{}", b"%s 1 - 2 0 \xff\xfe{}", b"%s x - 3 2 jobab{}",
    b"%s " + b"9" * 400 + b" - 3 0 job{}", b"%s 5 abc 3 0 job{}", b"%s 5 -7 3 0 job{}", b"%s 5 nan 3 0 job{}", b"%s",
    b'%s 5 - 3 0 job{"backoff":"banana"}', b'%s 5 - 3 0 job{"timeout_us":"x"}', b"%s 5 - 3 0 job[]",
    b'%s 5 - 3 0 job{"encoding":5}',
)  # fmt: skip
STATES = ("wait", "group", "delayed", "active", "blocked")
CREATED = b"1700000000000"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def raw(server: Server) -> Iterator[Any]:
    with server.client() as client:
        client.flushall()
        yield client


def job(id: str, **fields: Any) -> dict[str, Any]:
    now = str(int(time.time() * 1000) - 5)
    made: dict[str, Any] = {"id": id, "payload": b'{"func":"app:job"}', "state": "wait", "attempt": "0", "max_attempts": "2"}
    made |= {"timeout_ms": "30000", "backoff_ms": "0", "created_ms": now, "queued_ms": now, "updated_ms": now}
    return made | fields


def publish(raw: Any, id: str | bytes, place_in: str = "wait", odd: dict[str, Any] | None = None) -> None:
    """As another client does it."""
    state, fields = place_in, odd or {}
    now = int(time.time() * 1000) - 5
    name = id if isinstance(id, str) else "odd"
    key = b"{mail}:job:" + (id.encode() if isinstance(id, str) else id)
    given: dict[str, Any] = {"state": "wait" if state == "group" else state, "gid": "g" if state in ("group", "active") else ""}
    if state == "active":
        given |= {"lease_token": "t" * 24, "lock_until_ms": now, "attempt": "1"}
    raw.hset(key, mapping=job(name) | given | fields)
    raw.hset(f"{BASE}stats", "last_enqueue_ms", now)
    place(raw, state, id, fields.get("gid", "g"), now)


def place(pipe: Any, state: str, id: str | bytes, gid: bytes | str, now: int) -> None:
    if state == "delayed":
        pipe.zadd(f"{BASE}delayed", {id: now})
        pipe.zadd(f"{BASE}idx:delayed", {id: now})
    elif state == "active":
        pipe.zadd(f"{BASE}active", {id: now})
        pipe.zadd(f"{BASE}idx:active", {id: now})
    elif state in ("failed", "completed"):
        pipe.lpush(f"{BASE}{state}", id)
        pipe.zadd(f"{BASE}idx:{state}", {id: now})
    elif state == "blocked":
        pipe.zadd(f"{BASE}o:blocked", {id: 1})
    elif state == "group":
        lane = gid if isinstance(gid, bytes) else gid.encode()
        pipe.set(f"{BASE}has_groups", "1")
        pipe.rpush(b"{mail}:g:" + lane + b":wait", id)
        pipe.zadd(f"{BASE}groups:ready", {gid: now}, nx=True)
        pipe.zadd(f"{BASE}idx:wait", {id: now})
    else:
        pipe.rpush(f"{BASE}wait", id)
        pipe.zadd(f"{BASE}idx:wait", {id: now})


def surround(raw: Any, odd: Callable[[], None]) -> None:
    for id in GOOD[:5]:
        publish(raw, id)
    odd()
    for id in GOOD[5:]:
        publish(raw, id)


async def reserve(storage: RedisStorage, at: int | None = None) -> list[Record]:
    (answer,) = await storage.apply([(Reserve(queues=(Q,), limit=60, token=new_token(), worker="w"),)], at)
    assert isinstance(answer, list), answer
    return answer[0].tasks  # type: ignore[union-attr]


def held(task: Record) -> dict[str, Any]:
    return {"queue": Q, "id": task.id, "token": task.token, "late": True}


async def end_all(storage: RedisStorage) -> None:
    """As a worker would: the good ones are acked, any other is extended, released, retried and failed in turn."""
    turn = idle = 0
    while idle < 2:
        assert turn < 40
        at = storage.clock() + turn * HOUR_US
        tasks = await reserve(storage, at)
        ops: list[Any] = []
        for task in tasks:
            if task.id in GOOD:
                ops.append((Ack(**held(task), result=b"1"),))
                continue
            error = TaskError("ValueError", "no", "")
            ends = [Release(**held(task)), Retry(**held(task), error=error, delay_us=0), Fail(**held(task), error=error)]
            ops += [(Extend(**held(task)),), (ends[turn % 3],)]
        answers = await storage.apply(ops, at)
        assert not [a for a in answers if isinstance(a, Refused)]
        moved = await storage.reclaim(at) + await storage.sweep(at)
        turn, idle = turn + 1, 0 if tasks or moved else idle + 1


async def look(storage: RedisStorage) -> None:
    """Everything that reads, reads."""
    await storage.get("odd", Q)
    await storage.get("odd")
    await storage.results(["odd", *GOOD])
    for states in ((), *((state,) for state in State)):
        cursor = None
        while True:
            page = await storage.find(Filter(states=states), cursor, limit=20)
            assert all(task_of(task, MsgspecSerializer()).id == task.id for task in page.tasks)
            cursor = page.cursor
            if cursor is None:
                break
    await storage.counts()
    await storage.groups(Q)
    await storage.check()
    for shard in await storage.event_shards():
        await storage.events(shard.name, shard.first - 1)
    await storage.events_of("odd")
    for shard in await storage.task_shards():
        await storage.task_page(shard.name, 0, shard.last, 100)


async def whole_life(storage: RedisStorage) -> None:
    await look(storage)
    await storage.sweep()
    await look(storage)
    await storage.set_group_limit(Q, "g", 100)
    await end_all(storage)
    await look(storage)
    for id in GOOD:
        done = await storage.get(id, Q)
        assert done is not None
        assert done.state is State.DONE
    (counts,) = await storage.counts()
    assert (counts.ready, counts.running, counts.blocked) == (0, 0, 0)
    for op in (Requeue(queue=Q, id="odd"), Cancel(queue=Q, id="odd"), Remove(queue=Q, id="odd")):
        await storage.apply([(op,)])
    await storage.apply([(Enqueue(id="odd", name="job", queue=Q, payload=b"[]", on_conflict="replace_finished"),)])
    at = storage.clock() + 1000 * HOUR_US
    await storage.purge(Retention(), at)
    await storage.check(repair=True)
    await look(storage)


def values_of(field: str) -> tuple[bytes, ...]:
    if field == "o":
        return tuple(value.replace(b"%s", CREATED) for value in ORIGINS) + TEXTS
    return NUMBERS if field in NUMERIC else TEXTS


@contextlib.asynccontextmanager
async def opened(server: Server) -> AsyncIterator[RedisStorage]:
    async with RedisStorage(server.url) as storage:
        yield storage


@pytest.mark.parametrize("field", [*NUMERIC, *TEXTUAL])
async def test_jobs_with_nonsense_in_a_field_stop_nobody(server: Server, raw: Any, field: str) -> None:
    def odd() -> None:
        for state in STATES:
            for n, value in enumerate(values_of(field)):
                created = {"created_ms": CREATED} if field == "o" else {}
                publish(raw, f"odd-{state}-{n}", state, {**created, field: value})

    surround(raw, odd)
    async with opened(server) as storage:
        await whole_life(storage)


async def enqueue(storage: RedisStorage, id: str, state: str, **more: Any) -> None:
    more |= {"group": "g"} if state == "group" else {"delay_us": 1000} if state == "delayed" else {}
    if state == "blocked":
        more["blocked_by"] = (Blocker(GOOD[0], Q),)
    await storage.apply([(Enqueue(id=id, name="job", queue=Q, payload=b"[]", **more),)])
    if state == "active":
        await storage.apply([(Reserve(queues=(Q,), limit=1, token=new_token(), lease_us=1000),)])


@pytest.mark.parametrize("field", [*NUMERIC, *TEXTUAL])
async def test_tasks_of_ours_that_others_damaged_stop_nobody(server: Server, raw: Any, field: str) -> None:
    async with opened(server) as storage:
        await storage.set_group_limit(Q, "g", 100)
        for state in sorted(STATES):  # what is leased first, then what waits
            for n, value in enumerate(values_of(field)):
                await enqueue(storage, f"odd-{state}-{n}", state)
                raw.hset(f"{BASE}job:odd-{state}-{n}", field, value)
            if state == "active":
                for id in GOOD:
                    await enqueue(storage, id, "wait")
        await whole_life(storage)


@pytest.mark.parametrize("state", STATES)
async def test_tasks_of_ours_that_lost_a_field_stop_nobody(server: Server, raw: Any, state: str) -> None:
    async with opened(server) as storage:
        await storage.set_group_limit(Q, "g", 100)
        for n, field in enumerate([*NUMERIC, *TEXTUAL]):
            id = f"odd-{n}"
            await enqueue(storage, id, state, lease_us=30_000_000, max_attempts=2)
            raw.hdel(f"{BASE}job:{id}", field)
        for id in GOOD:
            await enqueue(storage, id, "wait")
        await whole_life(storage)


# -- what is put aside -------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [b"banana\xff", b"staged", b"moving"])
@pytest.mark.parametrize("where", STATES)
async def test_a_job_in_an_unknown_state_is_a_dead_letter_that_says_so(
    server: Server, raw: Any, where: str, word: bytes
) -> None:
    surround(raw, lambda: publish(raw, "odd", where, {"state": word}))
    said = 'its state is "' + word.decode("ascii", "ignore")
    async with opened(server) as storage:
        await storage.sweep()
        await end_all(storage)
        odd = await storage.get("odd")
        assert odd is not None
        assert odd.last_error is not None
        assert (odd.state, odd.last_error.type) == (State.DEAD, "Unreadable")
        assert said in odd.last_error.message
        assert [t.id for t in (await storage.find(Filter(states=(State.DEAD,)))).tasks] == ["odd"]
        (line,) = await storage.check()
        assert line.startswith(f"queue 'mail': job odd was put aside: {said}")
        (answer,) = await storage.apply([(Requeue(queue=Q, id="odd", reset_attempts=True),)])
        assert not isinstance(answer, Refused)
        assert await storage.check() == []
        (task,) = await reserve(storage)
        await storage.apply([(Ack(**held(task)),)])
        assert await storage.check() == []


@pytest.mark.parametrize("word", ["active", "delayed", "completed", "failed", "blocked", "cancelled"])
@pytest.mark.parametrize("where", ["wait", "group"])
async def test_a_job_that_waits_in_a_lane_and_says_otherwise_is_not_ready_for_ever(
    server: Server, raw: Any, where: str, word: str
) -> None:
    publish(raw, "odd", where, {"state": word})
    publish(raw, "good")
    async with opened(server) as storage:
        await storage.sweep()
        assert [task.id for task in await reserve(storage)] == ["good"]
        (counts,) = await storage.counts()
        assert counts.ready == 0
        assert await reserve(storage) == []


@pytest.mark.parametrize("where", ["wait", "group", "delayed", "active"])
@pytest.mark.parametrize("id", [b"odd\xff", b"odd\x00", b""], ids=["no-utf8", "nul", "empty"])
async def test_a_job_whose_id_nobody_can_say_is_put_aside_and_named(server: Server, raw: Any, where: str, id: bytes) -> None:
    surround(raw, lambda: publish(raw, id, where))
    async with opened(server) as storage:
        await whole_life_without_removal(storage)
        (line,) = await storage.check()
        assert line.endswith("was put aside: its id is no text in UTF-8 without NUL; delete its key when you have read it")
        raw.delete(b"{mail}:job:" + id)
        assert await storage.check() == []


async def whole_life_without_removal(storage: RedisStorage) -> None:
    await look(storage)
    await storage.sweep()
    await end_all(storage)
    await look(storage)
    (counts,) = await storage.counts()
    assert (counts.ready, counts.running, counts.scheduled, counts.done) == (0, 0, 0, len(GOOD))


async def test_an_id_whose_key_holds_no_hash_is_refused_like_any_that_is_there(server: Server, raw: Any) -> None:
    raw.set(f"{BASE}job:odd", "a text")
    async with opened(server) as storage:
        odd, good = Enqueue(id="odd", name="job", queue=Q), Enqueue(id="good", name="job", queue=Q)
        for calls in ([(odd,)], [(odd,), (good,)], [(odd, good)], [(Enqueue(id="odd", name="job", queue=Q, group="g"),)]):
            first, *rest = await storage.apply(calls)
            assert isinstance(first, DuplicateId)
            assert not [a for a in rest if isinstance(a, Refused)]
        (answer,) = storage.apply_blocking([(odd,)])
        assert isinstance(answer, DuplicateId)
        assert await storage.restore([Saved(record=Record(id="odd", queue=Q, name="job", created_at_us=HOUR_US))]) == 0
        stage = Stage(queue=Q, run_id="r", tasks=(odd, Enqueue(id="staged", name="job", queue=Q)))
        twin = Enqueue(id="odd", name="job", queue="other")
        for op in (twin, Cancel(queue="other", id="odd")):
            await storage.apply([(op,)])
        (answer,) = await storage.apply([(Enqueue(id="odd", name="job", queue=Q, on_conflict="replace_finished"),)])
        assert isinstance(answer, DuplicateId)
        for op in (OpenRun(queue=Q, run_id="r"), stage, CommitRun(queue=Q, run_id="r")):
            (answer,) = await storage.apply([(op,)])
            assert not isinstance(answer, Refused)
        assert sorted(t.id for t in await reserve(storage)) == ["good", "staged"]
        assert raw.get(f"{BASE}job:odd") == b"a text"


@pytest.mark.parametrize("where", ["wait", "group", "delayed", "active"])
async def test_a_key_that_holds_no_hash_is_put_aside_and_named(server: Server, raw: Any, where: str) -> None:
    def odd() -> None:
        publish(raw, "odd", where)
        raw.set(f"{BASE}job:odd", "surprise")

    surround(raw, odd)
    async with opened(server) as storage:
        await whole_life_without_removal(storage)
        (line,) = await storage.check()
        assert "job odd was put aside: its key holds no hash" in line
        assert await storage.get("odd") is None
        await storage.purge(Retention(), storage.clock() + 1000 * HOUR_US)
        assert await storage.check() == []
        assert raw.exists(f"{BASE}job:odd") == 0


ERRORS = (b"5", b'"x"', b"null", b"{", b"\xff", b'{"message":5}', b'{"message":null,"type":{}}', b'{"message":"\\ud800"}')


@pytest.mark.parametrize("error", ERRORS)
async def test_a_task_is_cancelled_whatever_another_client_wrote_into_its_error(server: Server, raw: Any, error: bytes) -> None:
    async with opened(server) as storage:
        await enqueue(storage, "odd", "wait")
        await enqueue(storage, "odd-2", "wait")
        (task, _) = await reserve(storage)
        await storage.apply([(Cancel(queue=Q, id="odd"),)])
        for id in ("odd", "odd-2"):
            raw.hset(f"{BASE}job:{id}", "error", error)
        second = await storage.get("odd-2")
        assert second is not None
        stopped = Cancel(queue=Q, id="odd-2", token=second.token)
        for answer in await storage.apply([(Release(**held(task)),), (stopped,)]):
            assert isinstance(answer, list)
            assert answer[0].state is State.CANCELLED  # type: ignore[union-attr, attr-defined]
        await look(storage)


async def test_the_end_of_a_task_whose_key_holds_no_hash_any_more_stops_no_other_end(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        for id in ("odd", *GOOD):
            await enqueue(storage, id, "wait")
        tasks = await reserve(storage)
        raw.set(f"{BASE}job:odd", "surprise")
        answers = await storage.apply([(Ack(**held(task), result=b"1"),) for task in tasks])
        assert [task.id for task, answer in zip(tasks, answers, strict=True) if isinstance(answer, Refused)] == ["odd"]
        await storage.reclaim(storage.clock() + HOUR_US)
        (line,) = await storage.check()
        assert "job odd was put aside" in line


async def test_what_waits_for_its_time_and_cannot_be_read_keeps_nothing_from_being_purged(server: Server, raw: Any) -> None:
    raw.set(f"{BASE}job:odd", "surprise")
    raw.zadd(f"{BASE}delayed", {"odd": time.time() * 1000 + 10**8})
    async with opened(server) as storage:
        await enqueue(storage, "good", "group", group_limit=2)
        (task,) = await reserve(storage)
        await storage.apply([(Ack(**held(task)),)])
        await storage.purge(Retention(limits_us=0), storage.clock() + 1000)
        assert await storage.purge(Retention(limits_us=0), storage.clock() + HOUR_US) == 1
        assert await storage.groups(Q) == ([], None)


async def test_a_lease_whose_token_nobody_can_say_ends_and_frees_its_group(server: Server, raw: Any) -> None:
    publish(raw, "odd", "active", {"lease_token": b"\xff\xfe"})
    raw.set(f"{BASE}g:g:inflight", 1)
    publish(raw, "next", "group")
    async with opened(server) as storage:
        assert await reserve(storage) == []
        await storage.reclaim()
        assert [task.id for task in await reserve(storage)] == ["next"]
        odd = await storage.get("odd")
        assert odd is not None
        assert odd.last_error is not None
        assert "its lease_token is no text" in odd.last_error.message


async def test_a_lost_lease_without_a_token_ends_also_when_its_task_shall_be_cancelled(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        await enqueue(storage, "odd", "group")
        await reserve(storage)
        await storage.apply([(Cancel(queue=Q, id="odd"),)])
        raw.hdel(f"{BASE}job:odd", "lease_token")
        at = storage.clock() + HOUR_US
        assert [await storage.reclaim(at), await storage.reclaim(at)] == [1, 0]
        odd = await storage.get("odd")
        assert odd is not None
        assert odd.state is State.CANCELLED
        assert await storage.check() == []


async def test_a_lease_is_over_when_its_score_says_so_whatever_the_job_says(server: Server, raw: Any) -> None:
    publish(raw, "odd", "active", {"lock_until_ms": "9999999999999999"})
    async with opened(server) as storage:
        await reserve(storage)
        assert await storage.reclaim() == 1
        odd = await storage.get("odd")
        assert odd is not None
        assert odd.state is State.READY or odd.state is State.SCHEDULED


async def test_what_a_blocked_task_waits_for_must_be_readable_or_it_dies(server: Server, raw: Any) -> None:
    async with opened(server) as storage:
        await enqueue(storage, GOOD[0], "wait")
        await enqueue(storage, "odd", "blocked")
        raw.hset(f"{BASE}job:odd", "edges", "[[1]]")
        await storage.sweep()
        odd = await storage.get("odd")
        assert odd is not None
        assert odd.last_error is not None
        assert (odd.state, odd.last_error.type) == (State.DEAD, "Unreadable")
        assert len(await storage.check()) == 1


async def test_a_worker_ends_every_job_whatever_its_payload(server: Server, raw: Any) -> None:
    payloads = [b"", b"{", b"\xff\xfe", b"\x00", b"[" * 5000, b'{"func":5}', b'{"func":"\xff"}', b"12", b'{"func":"","args":3}']

    def odd() -> None:
        for n, payload in enumerate(payloads):
            publish(raw, f"odd-{n}", "wait", {"payload": payload})

    surround(raw, odd)

    @handler(Q)
    def echo(payload: object) -> object:
        return "seen"

    async with AsyncOmniQ.from_url(server.url) as oq, await oq.worker(4, queues=[Q], allow=[__name__]):
        for n in range(len(payloads)):
            result = await oq.get_result(f"odd-{n}", wait=True, timeout=30)
            assert result is not None
            task = await oq.get_task(f"odd-{n}")
            assert task is not None
            assert task.status in (TaskStatus.SUCCESS, TaskStatus.FAILED)
        for id in GOOD:
            result = await oq.get_result(id, wait=True, timeout=30)
            assert result is not None
