"""Sending a call of many: what cannot be sent costs only itself, and what was carried out is not done twice."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from support.choking import ChokingStorage

from omniq.errors import Invalid, NotDead, OutcomeUnknown, Refused, StoreError, StoreFull, StoreUnavailable
from omniq.models import State, new_token
from omniq.operations import Ack, Enqueue, Enqueued, Extend, Operation, Remove, Requeue, Reserve, Reserved, Retry
from omniq.storage import sending as sending_module
from omniq.storage.base import BaseStorage
from omniq.storage.memory import MemoryStorage
from omniq.storage.sending import Repeats, Sending, Unsendable
from omniq.testing import FaultyStorage


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending_module, "PAUSES_S", (0.001,) * 3)


def new(*ids: str) -> list[tuple[Operation, ...]]:
    return [(Enqueue(id=id, name="job"),) for id in ids]


def named(*ids: str):
    return lambda op: getattr(op, "id", "") in ids


def ready(storage: MemoryStorage) -> int:
    return sum(c.ready for c in asyncio.run(storage.counts()))


@pytest.mark.parametrize("error", [RuntimeError("odd"), StoreError("the script failed")])
@pytest.mark.parametrize("bad", [["t0"], ["t9"], ["t4", "t5"], ["t0", "t3", "t9"]])
def test_only_what_cannot_be_sent_is_left_out(error: Exception, bad: list[str]) -> None:
    inner = MemoryStorage()
    answers = asyncio.run(Sending(new(*[f"t{n}" for n in range(10)])).send(ChokingStorage(inner, named(*bad), error)))
    for n, answer in enumerate(answers):
        if f"t{n}" in bad:
            assert isinstance(answer, Unsendable)
            assert answer.__cause__ is error
        else:
            assert isinstance(answer, list)
            assert answer[0].state is State.READY  # type: ignore[attr-defined]
    assert ready(inner) == 10 - len(bad)


def test_the_blocking_way_is_the_same() -> None:
    inner = MemoryStorage()
    storage = ChokingStorage(inner, named("t3"), RuntimeError("odd"))
    answers = Sending(new("t1", "t2", "t3", "t4")).send_blocking(storage)
    assert [isinstance(a, Unsendable) for a in answers] == [False, False, True, False]
    assert ready(inner) == 3


async def test_what_is_invalid_is_known_before_anything_is_sent() -> None:
    storage = MemoryStorage()
    answers = await Sending(new("a", "half \udcff", "b")).send(storage)
    assert isinstance(answers[1], Unsendable)
    assert isinstance(answers[1].__cause__, Invalid)
    assert [a[0].existed for a in (answers[0], answers[2]) if isinstance(a, list)] == [False, False]  # type: ignore[attr-defined]


def test_leases_and_acks_that_were_carried_out_are_recognised() -> None:
    inner = MemoryStorage()
    token, taken = new_token(), new_token()
    asyncio.run(inner.apply(new("a", "b", "c")))
    asyncio.run(inner.apply([(Reserve(queues=("default",), limit=2, token=token),)]))
    call = [
        (Ack(queue="default", id="a", token=token), Enqueue(id="child", name="job")),
        (Reserve(queues=("default",), limit=5, token=taken),),
        (Ack(queue="default", id="b", token=token),),
        *new("odd"),
    ]
    answers = asyncio.run(Sending(call).send(ChokingStorage(inner, named("odd"), RuntimeError("odd"))))
    assert not any(isinstance(answer, Refused) for answer in answers[:3])
    assert isinstance(answers[1], list)
    assert isinstance(answers[1][0], Reserved)
    assert {t.id: t.attempts for t in answers[1][0].tasks} == {"c": 1, "child": 1}
    counts = asyncio.run(inner.counts())[0]
    assert (counts.done, counts.running, counts.ready) == (2, 2, 0)


def test_a_store_that_fails_with_everything_is_not_blamed_on_a_transaction() -> None:
    inner = MemoryStorage()
    storage = ChokingStorage(inner, lambda op: True, StoreError("no permission"))
    sending = Sending(new("a", "b"))
    for _ in range(3):
        with pytest.raises(StoreError, match="no permission"):
            asyncio.run(sending.send(storage))
    assert storage.calls == 6, "once for the call, once to see whether it is the store"
    storage.on = lambda op: False
    assert len(asyncio.run(sending.send(storage))) == 2
    assert ready(inner) == 2


def test_a_store_that_goes_away_in_the_middle_is_asked_for_the_rest() -> None:
    inner = MemoryStorage()
    storage = ChokingStorage(inner, named("t3"), RuntimeError("odd"))
    sending = Sending(new("t0", "t1", "t2", "t3"))
    storage.strike("ok", "unavailable")
    with pytest.raises(StoreUnavailable):
        asyncio.run(sending.send(storage))
    storage.strike("unknown")
    with pytest.raises(OutcomeUnknown):
        asyncio.run(sending.send(storage))
    answers = asyncio.run(sending.send(storage))
    assert [isinstance(a, Unsendable) for a in answers] == [False, False, False, True]
    assert ready(inner) == 3
    assert len(asyncio.run(inner.events())) == 3


CLOSED = OutcomeUnknown("the connection was closed")


def remote(inner: MemoryStorage, on: Callable[[Operation], bool], error: Exception = CLOSED) -> ChokingStorage:
    storage = ChokingStorage(inner, on, error)
    storage.capabilities = msgspec.structs.replace(inner.capabilities, local=False)
    return storage


def try_often(sending: Sending, storage: BaseStorage) -> int:
    """How often it was tried, at most 30 times, until each transaction had its answer."""
    for tries in range(1, 31):
        try:
            asyncio.run(sending.send(storage))
        except OutcomeUnknown:
            continue
        return tries
    return 31


@pytest.mark.parametrize("bad", ["t0", "t4", "t9"])
def test_a_call_that_breaks_its_connection_each_time_is_parted_while_small_ones_are_answered(bad: str) -> None:
    inner = MemoryStorage()
    sending = Sending(new(*[f"t{n}" for n in range(10)]))
    assert 5 < try_often(sending, remote(inner, named(bad))) < 31, "a transaction alone is not given up lightly"
    answers = asyncio.run(sending.send(inner))
    assert [n for n, answer in enumerate(answers) if isinstance(answer, Unsendable)] == [int(bad[1])]
    assert ready(inner) == 9


def test_a_store_that_answers_nobody_gives_nothing_up() -> None:
    sending = Sending(new("a", "b"))
    assert try_often(sending, remote(MemoryStorage(), lambda op: True)) == 31
    assert not any(isinstance(answer, Refused) for answer in asyncio.run(sending.send(MemoryStorage())))


@pytest.mark.parametrize("cause", [TimeoutError(), StoreUnavailable("a node is away")])
def test_a_store_that_is_slow_or_away_in_part_is_waited_for(cause: Exception) -> None:
    error = OutcomeUnknown("not answered")
    error.__cause__ = cause
    storage = remote(MemoryStorage(), named("a"), error)
    assert try_often(Sending(new("a")), storage) == 31
    assert storage.calls == 30, "and not asked twice as long"


def test_a_disk_that_fails_is_waited_for() -> None:
    assert try_often(Sending(new("a")), ChokingStorage(MemoryStorage(), named("a"), CLOSED)) == 31


def test_a_reserve_without_an_answer_is_repeated_until_there_is_one() -> None:
    """Nobody else knows what it leased."""
    inner = MemoryStorage()
    asyncio.run(inner.apply(new("a")))
    sending = Sending([(Reserve(queues=("default",), token=new_token()),)])
    assert try_often(sending, remote(inner, lambda op: isinstance(op, Reserve))) == 31
    (answer,) = asyncio.run(sending.send(inner))
    assert not isinstance(answer, Refused)


def test_what_was_interrupted_may_have_been_carried_out() -> None:
    class Interrupted(FaultyStorage):
        async def _apply(self, *args: object) -> list:  # type: ignore[override, type-arg]
            await super()._apply(*args)  # type: ignore[arg-type]
            raise asyncio.CancelledError

    inner = MemoryStorage()
    asyncio.run(inner.apply(new("a", "b")))
    sending = Sending([(Reserve(queues=("default",), token=new_token()),)])
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(sending.send(Interrupted(inner)))
    (answer,) = asyncio.run(sending.send(inner))
    assert isinstance(answer, list)
    assert [t.id for t in answer[0].tasks] == ["a"]  # type: ignore[attr-defined]
    assert ready(inner) == 1


def test_the_end_of_a_run_that_cannot_be_sent_becomes_a_failure() -> None:
    held = {"queue": "default", "id": "a", "token": "t" * 32}
    refusal = Unsendable(ValueError("too odd"))
    for op in (Ack(**held), Retry(**held)):
        instead = refusal.instead(op)
        assert instead is not None
        assert instead.error is not None
        assert (instead.id, instead.token, instead.error.type, instead.error.message) == (
            "a",
            "t" * 32,
            "ValueError",
            "too odd",
        )
        assert refusal.instead(instead) is None
    assert refusal.instead(Extend(**held)) is None


# -- one call that somebody waits for --------------------------------------------------------------


@pytest.fixture
def faulty() -> FaultyStorage:
    return FaultyStorage(MemoryStorage())


@pytest.mark.parametrize("blocking", [False, True])
def test_a_call_whose_answer_got_lost_is_sent_again(faulty: FaultyStorage, blocking: bool) -> None:
    faulty.strike("unknown", "unavailable", "unknown")
    (answer,) = faulty.send_blocking(new("a")) if blocking else asyncio.run(faulty.send(new("a")))
    assert answer == [Enqueued(id="a", existed=True, state=State.READY)]
    assert ready(faulty) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("blocking", [False, True])
def test_a_store_that_is_away_is_not_asked_again(faulty: FaultyStorage, blocking: bool) -> None:
    faulty.strike("unavailable")
    with pytest.raises(StoreUnavailable):
        faulty.send_blocking(new("a")) if blocking else asyncio.run(faulty.send(new("a")))
    assert faulty.done["unavailable"] == 1


@pytest.mark.parametrize("last", ["unknown", "unavailable"])
def test_when_the_repeats_fail_too_the_error_says_what_is_known(faulty: FaultyStorage, last: str) -> None:
    faulty.strike("unknown", last, last, last)  # type: ignore[arg-type]
    with pytest.raises(OutcomeUnknown) as raised:
        faulty.send_blocking(new("a"))
    text = str(raised.value)
    assert "sent 4 times" in text
    assert "may have been carried out or not" in text
    assert "'a'" in text
    assert "repeat=True" not in text
    assert faulty.script == []


def test_what_may_be_enqueued_again_is_said_so(faulty: FaultyStorage) -> None:
    faulty.strike(*["unknown"] * 4)
    with pytest.raises(OutcomeUnknown, match="the same enqueue again stores it once"):
        faulty.send_blocking([(Enqueue(id="a", name="job", fingerprint="f00d"),)])


def test_a_full_store_after_a_lost_answer_leaves_the_outcome_open() -> None:
    repeats = Repeats(new("a"))
    for exc in (OutcomeUnknown("lost"), StoreFull("full"), StoreFull("full")):
        assert repeats.after(exc) > 0
    with pytest.raises(OutcomeUnknown, match="full"):
        repeats.after(StoreFull("full"))


def test_repeats_end_in_time() -> None:
    with pytest.raises(OutcomeUnknown):
        Repeats(new("a"), for_s=0.0005).after(OutcomeUnknown("lost"))


def test_a_removal_and_a_requeue_whose_answers_got_lost_are_done(faulty: FaultyStorage) -> None:
    asyncio.run(faulty.apply(new("a")))
    faulty.strike("unknown")
    (answer,) = faulty.send_blocking([(Remove(queue="default", id="a"),)])
    assert not isinstance(answer, Refused)
    asyncio.run(faulty.apply(new("b")))
    (refusal,) = faulty.send_blocking([(Requeue(queue="default", id="b"),)])
    assert isinstance(refusal, NotDead), "nothing got lost: it was not dead"


def test_a_lease_that_was_lost_is_not_read_as_extended(faulty: FaultyStorage) -> None:
    asyncio.run(faulty.apply(new("a")))
    faulty.strike("unknown")
    (answer,) = faulty.send_blocking([(Extend(queue="default", id="a", token=new_token()),)])
    assert isinstance(answer, Refused)
