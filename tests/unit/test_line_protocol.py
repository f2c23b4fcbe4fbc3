"""The pure parser: any bytes give a command or an error that can be told, and what is kept stays within its bounds."""

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.garbage import corpus, mutated

from omniq.server import protocol
from omniq.server.lines import LineBuffer
from omniq.server.protocol import Command, ProtocolError

VERBS = [
    "PING",
    "PUSH",
    "FETCH",
    "ACK",
    "NACK",
    "INFO",
    "QUIT",
    "ATOMIC",
    "EXTEND",
    "CANCEL",
    "RESULT",
    "AUTH",
    "DONE",
    "X",
    "",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ATTRIBUTES = ["name", "queue", "deadqueue", "payload", "retry", "execute_at", "blocked_by", "idempotency_key", "group"]
ATTRIBUTES += ["group_limit", "queues", "timeout", "count", "id", "result", "error", "token", "Name", "PAYLOAD", "other"]
ATTRIBUTES += ["interval"]


def parsed(line: bytes) -> Command | str:
    """A command, or the text of the error, which must fit into one line of JSON."""
    try:
        return protocol.parse(line)
    except ProtocolError as exc:
        text = str(exc)
    reply = protocol.err(text)
    assert reply.count(b"\n") == 1
    assert json.loads(reply[4:])["msg"] == text
    return text


@given(st.binary(max_size=200))
def test_any_bytes_are_a_command_or_an_error(line: bytes) -> None:
    parsed(line)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(VERBS), st.dictionaries(st.sampled_from(ATTRIBUTES), JSON, max_size=6))
def test_any_object_is_a_command_or_an_error(verb: str, body: dict[str, Any]) -> None:
    parsed(f"{verb} {json.dumps(body)}".encode())
    parsed(f"{verb} {json.dumps(body, ensure_ascii=False)}".encode("utf-8", "replace"))


@given(JSON)
def test_a_payload_means_the_same_after_parsing(payload: Any) -> None:
    text = json.dumps(payload, ensure_ascii=False)
    try:
        line = f'PUSH {{"name":"x","payload":{text}}}'.encode()
    except UnicodeEncodeError:
        return
    push = parsed(line)
    assert isinstance(push, protocol.PushCommand)
    assert json.loads(push.payload_bytes or b"") == payload


@given(st.text(alphabet="0123456789abcXYZ_-.:", min_size=1, max_size=64))
def test_every_good_name_is_taken(name: str) -> None:
    push = parsed(f'PUSH {{"name":"{name}"}}'.encode())
    assert isinstance(push, protocol.PushCommand)
    assert (push.name, push.queue, push.retry) == (name, "default", 20)


@pytest.mark.parametrize(
    "body",
    [
        b'{"name":"x","payload":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"name":"x","payload":"\xff\xfe"}',
        b'{"name":"x","payload":"\xed\xa0\x80"}',
        b'{"name":"x","payload":nul}',
        b'{"name":"x","payload":01}',
        b'{"name":"x","retry":99999999999999999999}',
        b'{"name":"x","blocked_by":[1.5]}',
        b'{"name":"x",}',
        b"{",
        b"",
    ],
)
def test_a_body_that_is_no_good_is_told_so(body: bytes) -> None:
    assert parsed(b"PUSH " + body) == "cannot unmarshal payload"


def test_the_last_of_two_equal_attributes_wins() -> None:
    push = parsed(b'PUSH {"name":"a","Name":"b","extra":0}')
    assert isinstance(push, protocol.PushCommand)
    assert push.name == "b"


def test_mutated_lines_are_commands_or_errors() -> None:
    lines = corpus()
    assert len(lines) > 100
    chance = random.Random(4)
    for _ in range(20_000):
        parsed(mutated(lines, chance).replace(b"\n", b" "))


# -- lines -------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=30).filter(lambda b: b"\n" not in b and not b.endswith(b"\r")), max_size=8), st.data())
def test_lines_come_out_however_they_are_cut(lines: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(line + data.draw(st.sampled_from([b"\n", b"\r\n"])) for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    cutter = LineBuffer(limit=100)
    found: list[bytes | None] = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += cutter.feed(stream[begin:end])
    assert found == lines


def test_a_line_that_is_too_long_is_skipped_and_not_kept() -> None:
    cutter = LineBuffer(limit=1000)
    for _ in range(1000):
        assert cutter.feed(b"x" * 1000) == []
        assert cutter.partial <= 1001
    assert cutter.feed(b"x\nPING\n") == [None, b"PING"]
    assert cutter.feed(b"y" * 1001 + b"\n" + b"z" * 1000 + b"\r\n") == [None, b"z" * 1000]


@given(st.lists(st.binary(max_size=64), max_size=40))
def test_whatever_comes_no_more_than_one_line_is_kept(pieces: list[bytes]) -> None:
    cutter = LineBuffer(limit=50)
    for piece in pieces:
        assert all(line is None or len(line) <= 50 for line in cutter.feed(piece))
        assert cutter.partial <= 51
