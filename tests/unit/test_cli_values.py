"""Words of the command line: durations, moments, sizes, JSON."""

from datetime import UTC, datetime, timedelta

import pytest

from omniq.cli.parsing import json_array, json_object, moment_or_delay, names, past, seconds, short, size
from omniq.errors import Invalid


@pytest.mark.parametrize(
    ("text", "value"),
    [("30s", 30), ("10m", 600), ("2h", 7200), ("30d", 2_592_000), ("500ms", 0.5), ("1.5h", 5400), ("25", 25), ("0s", 0)],
)
def test_durations(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "s", "-1s", "1 s", "1w", "1e3s", "10m30s", "nan", "inf", "１s"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(Invalid, match="is not a duration"):
        seconds(text)


@pytest.mark.parametrize("text", ["36501d", "99999999999d", "9" * 400 + "s"])
def test_a_duration_beyond_a_hundred_years_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="write at most 36500d"):
        seconds(text)
    with pytest.raises(Invalid):
        past(text)
    assert past("36500d", datetime(2030, 1, 1, tzinfo=UTC)).year == 1930


def test_moments_and_delays() -> None:
    assert moment_or_delay("10m") == timedelta(minutes=10)
    assert moment_or_delay("2030-01-31T08:00:00Z") == datetime(2030, 1, 31, 8, tzinfo=UTC)
    assert moment_or_delay("2030-01-31 08:00:00.5+01:00") == datetime(2030, 1, 31, 7, 0, 0, 500_000, tzinfo=UTC)
    now = datetime(2030, 1, 1, tzinfo=UTC)
    assert past("1d", now) == datetime(2029, 12, 31, tzinfo=UTC)
    assert past("2029-01-01T00:00:00Z", now) == datetime(2029, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("text", ["tomorrow", "2030-01-31", "2030-01-31T08:00:00", "2030-02-31T08:00:00Z", ""])
def test_what_is_no_moment(text: str) -> None:
    with pytest.raises(Invalid):
        moment_or_delay(text)


def test_sizes() -> None:
    assert [size(text) for text in ("500MB", "2GiB", "1.5k", "1000", "7 mb")] == [
        500 * 1024**2,
        2 * 1024**3,
        1536,
        1000,
        7 * 1024**2,
    ]
    for text in ("lots", "0", "-1MB", "5TB", ""):
        with pytest.raises(Invalid, match="is not a size"):
            size(text)


def test_json_arguments() -> None:
    assert json_array('[1, "a", null]') == [1, "a", None]
    assert json_object('{"a": [1]}') == {"a": [1]}
    for text in ("[1", "{}", "null", "", "[1] [2]", "\udc80"):
        with pytest.raises(Invalid):
            json_array(text)


def test_names() -> None:
    assert names("a, b,,c") == ["a", "b", "c"]
    assert names(None) is None
    with pytest.raises(Invalid):
        names(" , ")


@pytest.mark.parametrize(
    ("duration", "text"),
    [(-1, "0s"), (0.0123, "12ms"), (3.21, "3.2s"), (252, "4m12s"), (7500, "2h05m"), (273_600, "3d04h")],
)
def test_durations_for_people(duration: float, text: str) -> None:
    assert short(duration) == text
