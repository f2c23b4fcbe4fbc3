"""The axes of a report: whole tasks, times in fitting units, moments in UTC, and nothing beyond the last mark."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniq.spark.lake.report import units
from omniq.spark.lake.report.scales import counts, durations, moments

NOON = datetime(2026, 11, 19, 12, 0, tzinfo=UTC)
POSITIVE = st.floats(min_value=1e-3, max_value=1e10)


@pytest.fixture(params=["UTC", "America/New_York", "Asia/Kolkata"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("most", "words"),
    [
        (0, ("0", "1")),
        (1, ("0", "1")),
        (8, ("0", "2", "4", "6", "8")),
        (9000, ("0", "2,000", "4,000", "6,000", "8,000", "10,000")),
    ],
)
def test_counts_are_whole_and_end_at_a_mark(most: int, words: tuple[str, ...]) -> None:
    assert counts(most).words == words


@pytest.mark.parametrize(
    ("least", "most", "words"),
    [
        (1, 8, ("0", "2 ms", "4 ms", "6 ms", "8 ms")),
        (300, 2320, ("0", "500 ms", "1 s", "1.5 s", "2 s", "2.5 s")),
        (0, 7_200_000, ("0", "30 min", "1 h", "90 min", "2 h")),
        (0.2, 42_400, ("0.1 ms", "1 ms", "10 ms", "100 ms", "1 s", "10 s", "1 min")),
        (0, 0, ("0", "0.01 ms")),
    ],
)
def test_durations_have_units_that_fit(least: float, most: float, words: tuple[str, ...]) -> None:
    assert durations(least, most).words == words


@given(least=POSITIVE, most=POSITIVE)
def test_nothing_stands_beyond_an_axis(least: float, most: float) -> None:
    least, most = min(least, most), max(least, most)
    for scale in (counts(most), durations(least, most)):
        assert scale.high >= most * (1 - 1e-9)
        assert scale.marks[-1] == scale.high
        assert len(scale.marks) <= 16
        assert len(set(scale.words)) == len(scale.words)
    if durations(least, most).log:
        assert durations(least, most).low <= least


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize(
    ("span", "words", "caption"),
    [
        (timedelta(seconds=1), "12:00:00.0|12:00:00.2|12:00:00.4|12:00:00.6|12:00:00.8|12:00:01.0", "19 Nov 2026, UTC"),
        (timedelta(minutes=1), "12:00:00|12:00:10|12:00:20|12:00:30|12:00:40|12:00:50|12:01:00", "19 Nov 2026, UTC"),
        (timedelta(hours=3), "12:00|12:30|13:00|13:30|14:00|14:30|15:00", "19 Nov 2026, UTC"),
        (timedelta(hours=18), "12:00\n19 Nov|15:00|18:00|21:00|00:00\n20 Nov|03:00|06:00", "UTC"),
        (timedelta(days=2), "12:00\n19 Nov|18:00|00:00\n20 Nov|06:00|12:00|18:00|00:00\n21 Nov|06:00|12:00", "UTC"),
        (timedelta(days=7), "20 Nov|21 Nov|22 Nov|23 Nov|24 Nov|25 Nov|26 Nov", "2026, UTC"),
        (timedelta(days=45), "20 Nov|27 Nov|4 Dec|11 Dec|18 Dec|25 Dec|1 Jan", "2026 to 2027, UTC"),
        (timedelta(days=150), "Dec 2026|Jan 2027|Feb 2027|Mar 2027|Apr 2027", "UTC"),
    ],
)
def test_marks_of_time_fit_the_span_in_any_zone(span: timedelta, words: str, caption: str) -> None:
    scale = moments(NOON, NOON + span)
    assert ("|".join(scale.words), scale.caption) == (words, caption)
    assert scale.low == NOON.timestamp()
    assert all(scale.low <= mark <= scale.high for mark in scale.marks)


@given(
    at=st.datetimes(datetime(2000, 1, 1), datetime(2050, 1, 1), timezones=st.just(UTC)),
    span=st.timedeltas(timedelta(milliseconds=100), timedelta(days=4000)),
)
def test_every_span_has_a_few_marks(at: datetime, span: timedelta) -> None:
    scale = moments(at, at + span)
    assert 1 <= len(scale.marks) <= 10
    assert len(scale.words) == len(scale.marks)


@pytest.mark.parametrize(
    ("milliseconds", "word"),
    [
        (None, "–"),
        (0, "0 ms"),
        (0.2, "0.2 ms"),
        (4.6, "4.6 ms"),
        (451, "451 ms"),
        (999.7, "1 s"),
        (42_400, "42.4 s"),
        (119_990, "120 s"),
        (60_000, "1 min"),
        (150_000, "2.5 min"),
        (8_000_000, "2.22 h"),
        (86_400_000 * 9, "9 days"),
        (86_400_000 * 1200, "1,200 days"),
    ],
)
def test_a_duration_is_said_as_people_say_it(milliseconds: float | None, word: str) -> None:
    assert units.duration(milliseconds) == word
