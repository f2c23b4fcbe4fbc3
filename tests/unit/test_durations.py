"""Durations as text: what is understood, what is refused, and that both ways agree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniq.durations import MAX_NS, format_duration, parse_duration
from omniq.errors import Invalid

S = 10**9


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("45s", 45 * S),
        ("200ms", S // 5),
        ("1m30s", 90 * S),
        ("1.5s", 3 * S // 2),
        ("1.5h", 5400 * S),
        ("10us", 10_000),
        ("10µs", 10_000),
        ("3ns", 3),
        ("49.99ms", 49_990_000),
        (".5s", S // 2),
        ("1.s", S),
        ("0", 0),
        ("0s", 0),
        ("-1s", -S),
        ("+2s", 2 * S),
        ("1h2m3s4ms", 3723 * S + 4_000_000),
    ],
)
def test_a_duration_is_read(text: str, ns: int) -> None:
    assert parse_duration(text) == ns


@pytest.mark.parametrize(
    "text", ["", "1", "s", ".s", "1 s", "1s ", "abc", "1d", "1.5", "--1s", "1e3s", "9" * 30 + "h", "1s" * 60]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="write numbers with units"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (45 * S, "45s"),
        (90 * S, "1m30s"),
        (60 * S, "1m0s"),
        (3600 * S, "1h0m0s"),
        (S // 5, "200ms"),
        (3 * S // 2, "1.5s"),
        (1500, "1.5µs"),
        (7, "7ns"),
        (0, "0s"),
        (-S, "-1s"),
    ],
)
def test_a_duration_is_written(ns: int, text: str) -> None:
    assert format_duration(ns) == text


@given(st.integers(-MAX_NS, MAX_NS))
def test_what_is_written_is_read_back(ns: int) -> None:
    assert parse_duration(format_duration(ns)) == ns
