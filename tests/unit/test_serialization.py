"""Arguments and results as bytes."""

import dataclasses
import datetime as dt
import enum
import logging
import threading
import uuid
from decimal import Decimal

import msgspec
import pytest

from omniq import CloudpickleSerializer, ConfigError, MsgspecSerializer, SerializationError, Serializer
from omniq.serialization import decode, make_serializer

NAN = float("nan")


@dataclasses.dataclass
class Measure:
    value: float
    unit: str = "m"


class Tagged(msgspec.Struct):
    value: float


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -5, 2**53, 1.5, "", "tekst ✓", [1, [2, []]], {"a": {"b": None}}, [None], {"null": "null"}, "null"],
)
def test_plain_values_come_back_as_they_went(value: object) -> None:
    serializer = MsgspecSerializer()
    assert serializer.decode(serializer.encode(value)) == value


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (dt.date(2024, 2, 29), "2024-02-29"),
        (dt.datetime(2024, 1, 1, tzinfo=dt.UTC), "2024-01-01T00:00:00Z"),
        (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
        (Decimal("1.50"), "1.50"),
        (Colour.RED, "red"),
        (Measure(2.0), {"value": 2.0, "unit": "m"}),
        (Tagged(1.0), {"value": 1.0}),
        ((1, 2), [1, 2]),
        (b"\x00\xff", "AP8="),
        (Measure(1.0, "null"), {"value": 1.0, "unit": "null"}),
    ],
)
def test_richer_values_arrive_in_their_json_form(value: object, shown: object) -> None:
    serializer = MsgspecSerializer()
    assert serializer.decode(serializer.encode(value)) == shown


def test_both_serializers_fit_the_protocol_and_write_json() -> None:
    for serializer in (MsgspecSerializer(), CloudpickleSerializer()):
        assert isinstance(serializer, Serializer)
        msgspec.json.decode(serializer.encode({"a": 1}))


@pytest.mark.parametrize("value", [object(), threading.Lock(), {"deep": [1, {object()}]}, 1j, "\udc80", {(1, 2): 3}])
def test_what_json_cannot_hold_is_an_error_that_says_what_to_do(value: object) -> None:
    with pytest.raises(SerializationError, match="cloudpickle") as caught:
        MsgspecSerializer().encode(value)
    assert isinstance(caught.value, TypeError | ValueError)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(SerializationError):
        MsgspecSerializer().encode(loop)


@pytest.mark.parametrize(
    "value",
    [
        NAN,
        float("inf"),
        -float("inf"),
        [1.0, NAN],
        {"a": {"b": (1, NAN)}},
        {"args": [NAN], "kwargs": {}},
        Measure(NAN),
        [Tagged(NAN)],
    ],
    ids=repr,
)
def test_numbers_without_a_json_form_are_refused(value: object) -> None:
    with pytest.raises(SerializationError, match=r"nan|inf"):
        MsgspecSerializer().encode(value)


def test_a_none_beside_numbers_is_fine() -> None:
    assert MsgspecSerializer().encode([None, 1.0]) == b"[null,1.0]"


def test_an_error_text_never_shows_the_value() -> None:
    class Secretive:
        def __repr__(self) -> str:
            return "s3cret"

    with pytest.raises(SerializationError) as caught:
        MsgspecSerializer().encode({"password": Secretive()})
    assert "s3cret" not in str(caught.value)


def test_bytes_that_are_no_json_are_a_serialization_error() -> None:
    with pytest.raises(SerializationError, match="JSON"):
        MsgspecSerializer().decode(b"{")
    with pytest.raises(SerializationError, match="JSON"):
        decode(b"{", "json", MsgspecSerializer())


def test_cloudpickle_carries_any_object() -> None:
    serializer = CloudpickleSerializer()
    back = serializer.decode(serializer.encode({"f": lambda x: x + 1, "m": Measure(NAN), "s": {1, 2}}))
    assert back["f"](1) == 2
    assert back["s"] == {1, 2}
    assert isinstance(back["m"], Measure)


def test_cloudpickle_says_what_it_cannot_pickle_and_what_it_cannot_read() -> None:
    serializer = CloudpickleSerializer()
    with pytest.raises(SerializationError, match="pickled"):
        serializer.encode(threading.Lock())
    for junk in (b"{", b'"AAAA"', b"5"):
        with pytest.raises(SerializationError, match="unpickled"):
            serializer.decode(junk)


def test_choosing_cloudpickle_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="omniq"):
        make_serializer("cloudpickle")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "run code" in caplog.text
    caplog.clear()
    make_serializer("msgspec")
    assert not caplog.records


def test_a_reader_that_did_not_ask_for_cloudpickle_refuses_it() -> None:
    data = CloudpickleSerializer().encode([1])
    with pytest.raises(SerializationError, match="OMNIQ_SERIALIZER=cloudpickle"):
        decode(data, "cloudpickle", MsgspecSerializer())


def test_a_reader_that_asked_for_cloudpickle_reads_both() -> None:
    serializer = CloudpickleSerializer()
    assert decode(serializer.encode({1}), "cloudpickle", serializer) == {1}
    assert decode(b"[1]", "json", serializer) == [1]


def test_broken_json_is_a_serialization_error_for_a_cloudpickle_reader_too() -> None:
    with pytest.raises(SerializationError):
        decode(b"{", "json", CloudpickleSerializer())


def test_an_unknown_serializer_is_named() -> None:
    with pytest.raises(ConfigError, match="dill"):
        make_serializer("dill")
