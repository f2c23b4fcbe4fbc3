"""The contract's words: names, payloads, numbers, codes, and two clients that mirror each other."""

import collections
import datetime as dt
import inspect
import math
import pickle
import signal
import types
from typing import Any

import pytest

from omniq import OmniQError
from omniq.backoff import parse_backoff
from omniq.contract import AsyncContractClient, ContractClient, ContractError, Job, LeaseLost, Paused, now_ms, queue_base, ulid
from omniq.contract.signals import Decision
from omniq.contract.words import MAX_MS, encode_payload, enqueue_of, text_of
from omniq.errors import QueueRequired
from omniq.models import Record

DEFAULTS: dict[str, Any] = {
    "job_id": None,
    "timeout_ms": 300_000,
    "max_attempts": 5,
    "backoff_ms": 30_000,
    "due_ms": 0,
    "gid": None,
    "group_limit": 0,
}


def test_a_queue_and_its_base_are_the_same_queue() -> None:
    assert queue_base("pdf") == queue_base("{pdf}") == "{pdf}"
    assert enqueue_of("{pdf}", {}, **DEFAULTS).queue == "pdf"
    assert ContractClient.queue_base("a.b-c_d") == "{a.b-c_d}"


@pytest.mark.parametrize("queue", ["", "{}", "a b", "{a", "a:b", "{{a}}", "omniq.store", "{omniq.store}", "x" * 129, None, 3])
def test_other_names_are_refused(queue: Any) -> None:
    with pytest.raises(QueueRequired):
        queue_base(queue)


def test_ids_and_times_are_what_other_clients_make() -> None:
    assert len(ulid()) == 26
    assert ulid() < ulid()
    assert abs(now_ms() - dt.datetime.now(dt.UTC).timestamp() * 1000) < 60_000
    assert AsyncContractClient.ulid is ContractClient.ulid


def test_a_payload_is_compact_json_with_its_characters_as_they_are() -> None:
    assert encode_payload({"a": [1, 2.5, None, True], "ä": "日本"}) == '{"a":[1,2.5,null,true],"ä":"日本"}'.encode()
    assert encode_payload([1]) == b"[1]"
    assert encode_payload(types.MappingProxyType({"a": 1})) == b'{"a":1}'
    assert encode_payload(collections.OrderedDict(b=1, a=2)) == b'{"b":1,"a":2}'


@pytest.mark.parametrize("payload", ["text", b"bytes", "{}", 1, 1.5, None, True, (1, 2), {1}, object()])
def test_what_is_no_object_or_array_is_a_type_error(payload: Any) -> None:
    with pytest.raises(TypeError):
        encode_payload(payload)


@pytest.mark.parametrize("payload", [{"a": math.nan}, [math.inf], {"a": [{"b": -math.inf}]}, [[math.nan, None]]])
def test_what_json_has_not_is_a_value_error(payload: Any) -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode_payload(payload)


def test_something_inside_that_json_has_not_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        encode_payload({"a": object()})


def test_a_job_carries_the_defaults_of_the_contract() -> None:
    op = enqueue_of("q", {}, **DEFAULTS)
    assert (op.lease_us, op.max_attempts, op.timeout_us) == (300_000_000, 5, None)
    policy = parse_backoff(op.backoff)
    assert [policy.delay_us(n, 0.9) for n in (1, 2, 9)] == [30_000_000] * 3
    assert policy.loss == "backoff"
    assert (op.eta_us, op.group, op.group_limit) == (None, None, 0)


def test_a_long_backoff_is_not_cut() -> None:
    op = enqueue_of("q", {}, **DEFAULTS | {"backoff_ms": 86_400_000})
    assert parse_backoff(op.backoff).delay_us(1, 0.5) == 86_400_000_000


def test_a_group_is_text_without_outer_blanks() -> None:
    assert enqueue_of("q", {}, **DEFAULTS | {"gid": "  acme co ", "group_limit": 2}).group == "acme co"
    blank = enqueue_of("q", {}, **DEFAULTS | {"gid": "   ", "group_limit": 2})
    assert (blank.group, blank.group_limit) == (None, 0)
    assert enqueue_of("q", {}, **DEFAULTS | {"gid": "g", "group_limit": -1}).group_limit == 0
    with pytest.raises(TypeError, match="gid"):
        enqueue_of("q", {}, **DEFAULTS | {"gid": 7})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timeout_ms", 0),
        ("timeout_ms", 10**15),
        ("max_attempts", 0),
        ("backoff_ms", -1),
        ("backoff_ms", MAX_MS + 1),
        ("due_ms", -1),
        ("due_ms", 10**14),
        ("group_limit", 10**14),
    ],
)
def test_numbers_that_other_clients_could_not_read_are_refused(field: str, value: int) -> None:
    """Once a timeout of 10**15 was leased first, and then could not be read."""
    with pytest.raises(ValueError, match=field):
        enqueue_of("q", {}, **DEFAULTS | {"gid": "g", field: value})


@pytest.mark.parametrize("value", [1.5, "1", None, True])
@pytest.mark.parametrize("field", ["timeout_ms", "max_attempts", "backoff_ms", "due_ms", "group_limit"])
def test_a_number_is_a_whole_number(field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=field):
        enqueue_of("q", {}, **DEFAULTS | {"gid": "g", field: value})


def test_a_payload_is_handed_out_as_it_was_stored() -> None:
    assert text_of(Record(id="a", queue="q", name="*", payload=b'{ "a" : 1 }')) == '{ "a" : 1 }'
    assert text_of(Record(id="a", queue="q", name="*")) == "null"
    odd = text_of(Record(id="a", queue="q", name="*", payload=b"\xff{"))
    assert odd.encode("utf-8", "surrogateescape") == b"\xff{"


def test_an_error_carries_its_code_and_ends_in_it() -> None:
    lost = LeaseLost("TOKEN_MISMATCH", "job 'a' is held under another token")
    assert isinstance(lost, ContractError | OmniQError | RuntimeError)
    assert lost.code == "TOKEN_MISMATCH"
    assert str(lost) == "job 'a' is held under another token: TOKEN_MISMATCH"
    copy = pickle.loads(pickle.dumps(lost))
    assert (type(copy), copy.code, str(copy)) == (LeaseLost, lost.code, str(lost))


def test_a_reserve_says_what_it_gave() -> None:
    assert Paused().status == "PAUSED"
    given = {"job_id": "a", "payload": "{}", "lock_until_ms": 1, "attempt": 1, "gid": "", "lease_token": "t"}
    job = Job(**given, max_attempts=5, timeout_ms=1000)
    assert job.status == "JOB"
    assert {name: getattr(job, name) for name in given} == given


def test_each_call_of_the_async_client_is_awaited() -> None:
    calls = {n: f for n, f in vars(AsyncContractClient).items() if inspect.isfunction(f) and not n.startswith("_")}
    for name, call in calls.items():
        assert inspect.iscoroutinefunction(call), name


@pytest.mark.parametrize(
    ("drain", "sent", "answer"),
    [
        (True, [signal.SIGTERM], ["stop"]),
        (False, [signal.SIGTERM], ["stop"]),
        (True, [signal.SIGINT], ["stop"]),
        (False, [signal.SIGINT], ["abandon"]),
        (True, [signal.SIGINT, signal.SIGINT], ["stop", "abandon"]),
        (False, [signal.SIGINT, signal.SIGINT], ["abandon", "abandon"]),
        (True, [signal.SIGTERM, signal.SIGTERM], ["stop", "stop"]),
        (True, [signal.SIGTERM, signal.SIGINT], ["stop", "abandon"]),
    ],
)
def test_signals_end_a_consumer_as_the_table_says(drain: bool, sent: list[int], answer: list[str]) -> None:
    heard: list[str] = []
    decide = Decision(drain, lambda: heard.append("stop"), lambda: heard.append("abandon"))
    for number in sent:
        decide(number)
    assert heard == answer


def test_a_job_id_is_a_task_id() -> None:
    assert enqueue_of("q", {}, **DEFAULTS | {"job_id": "mine"}).id == "mine"
    assert len(enqueue_of("q", {}, **DEFAULTS | {"job_id": ""}).id) == 26
