"""What a report says and draws of plain numbers: incidents, sentences, no claim out of too little, no point at the edge."""

from datetime import UTC, date, datetime, timedelta
from typing import Any

import msgspec
import pytest

from omniq.spark.lake.report.facts import (
    DayFailures,
    FailureKind,
    Figures,
    Flow,
    FunctionTimes,
    GroupWait,
    HourLoad,
    Percentiles,
    SlotHour,
    StormWindow,
    Totals,
)
from omniq.spark.lake.report.highlights import findings
from omniq.spark.lake.report.incidents import incidents, unproven
from omniq.spark.lake.report.samples import ALL, BASELINE, FORECAST, KIND, LIMIT, P95, WEEK

START = datetime(2026, 11, 19, 14, 0, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


# Whoever draws imports matplotlib, which takes longer than most choices of tests.


@pytest.fixture
def plots() -> Any:
    from omniq.spark.lake.report import plots

    return plots


def page(figures: list[Figures], title: str) -> str:
    from omniq.spark.lake.report.page import page

    return page(figures, title)


def window(minute: int, storm: bool = True, **more: Any) -> StormWindow:
    fields: dict[str, Any] = {
        "store": "s",
        "name": "pay",
        "attempts": 30,
        "retries": 20,
        "ratio": 9.0,
        "known": 500,
        "retry_ms": 100.0,
    }
    return StormWindow(start=START + minute * MINUTE, storm=storm, **(fields | more))


def minute_of_demo(**more: Any) -> Figures:
    """A history of sixty seconds, as a first look at omniq makes it."""
    totals = Totals(
        tasks=9, succeeded=5, failed=4, unfinished=0, started=9, retried=1, expired=0, workers=1, failed_runs=KIND.least - 1,
        wait_p95=3.0, run_p95=5.0,
    )  # fmt: skip
    kind = FailureKind(
        fingerprint="f", name="pay", error_type="ValueError", failures=9, final=4, last_seen=START, sample_error="<b>no</b>",
        sample_ids=["<i>"],
    )  # fmt: skip
    fields: dict[str, Any] = {
        "stores": ("s",),
        "made_up": False,
        "first": START,
        "last": START + MINUTE,
        "step_s": 0.5,
        "totals": totals,
        "throughput": [Flow(at=START + timedelta(seconds=n / 2), succeeded=n % 3, backlog=n) for n in range(3)],
        "percentiles": [Percentiles(at=START, runs=9, wait_p50=1.0, run_p50=2.0)],
        "hours": [HourLoad(weekday=3, hour=14, started=9)],
        "failures": [kind],
        "failures_by_day": [DayFailures(day=START.date(), fingerprint="f", name="pay", failures=9)],
        "storms": [window(0, known=0)],
        "retries": [],
        "retries_step_s": 300,
        "slowest": [FunctionTimes(name="pay", queue="q", runs=9, failed=4, run_p50=2.0, run_p95=None, run_p99=None)],
        "groups": [GroupWait(queue="q", group_id="g", started=9, waiting_ms=100_000, blocked_ms=77_000, max_wait_ms=1.0)],
        "capacity": [],
    }
    return Figures(**(fields | more))


def slots(known: int, ahead: int = 3, queue: str = "q") -> list[SlotHour]:
    return [
        SlotHour(
            store="s",
            queue=queue,
            hour=START + n * HOUR,
            slots_needed=2 if n < known else 4,
            slots_seen=3,
            is_forecast=n >= known,
            short=n >= known,
            known_hours=known,
        )
        for n in range(known + ahead)
    ]


# -- incidents -----------------------------------------------------------------------------------


def test_neighbouring_storms_are_one_incident_with_what_it_cost() -> None:
    (found,) = incidents([window(n * 5, ratio=float(n)) for n in (2, 0, 1)])
    assert (found.begins, found.ends) == (START, START + 15 * MINUTE)
    assert (found.windows, found.runs, found.retries, found.retry_ms, found.ratio) == (3, 90, 60, 300.0, 2.0)


@pytest.mark.parametrize("quiet", [[], [window(5, storm=False, attempts=4, retries=1)]])
def test_one_quiet_window_does_not_end_an_incident_and_counts_with_it(quiet: list[StormWindow]) -> None:
    (found,) = incidents([window(0), *quiet, window(10)])
    assert (found.begins, found.ends, found.windows) == (START, START + 15 * MINUTE, 2)
    assert found.retries == 40 + sum(each.retries for each in quiet)


def test_quiet_windows_around_an_incident_do_not_count() -> None:
    quiet = [window(minute, storm=False) for minute in (-5, 5)]
    (found,) = incidents([*quiet, window(0)])
    assert (found.begins, found.ends, found.retries) == (START, START + 5 * MINUTE, 20)


def test_two_quiet_windows_functions_and_stores_make_incidents_of_their_own() -> None:
    windows = [
        window(0),
        window(5, storm=False),
        window(10, storm=False),
        window(15),
        window(5, name="ship"),
        window(5, store="t"),
    ]
    assert [(one.store, one.name, one.begins) for one in incidents(windows)] == [
        ("s", "pay", START),
        ("s", "ship", START + 5 * MINUTE),
        ("t", "pay", START + 5 * MINUTE),
        ("s", "pay", START + 15 * MINUTE),
    ]


def test_a_storm_without_a_day_before_it_is_none() -> None:
    young = window(0, known=BASELINE.least - 1)
    assert incidents([young]) == []
    assert unproven([young, window(5)]) == young


def test_what_retries_took_is_unknown_where_no_run_is_kept() -> None:
    assert incidents([window(0, retry_ms=None)])[0].retry_ms is None


# -- sentences -----------------------------------------------------------------------------------


def test_of_a_minute_nothing_is_claimed() -> None:
    assert findings(minute_of_demo()) == ["Nothing stands out; too little data to say: 9 of at least 20 tasks that ended."]
    text = page([minute_of_demo()], "t")
    for sample, there in ((WEEK, "1 min"), (FORECAST, "1 min"), (BASELINE, "0"), (P95, "9")):
        assert f"oo little data to say: {there} of at least {sample.least} {sample.of}." in text
    assert "5 of 9" in text, "a share of nine is no percentage"
    assert "77 s" not in text, "a group of nine runs has no limit that is known"


def test_26_storms_of_two_incidents_are_two() -> None:
    windows = [window(5 * n) for n in range(14)] + [window(5 * n, retries=5) for n in range(40, 52)]
    (told,) = (sentence for sentence in findings(minute_of_demo(storms=windows)) if "storm" in sentence)
    assert told == (
        "2 retry storms; most retries: pay, 2026-11-19 14:00 to 15:10 UTC. 280 of 420 runs were retries, which took 1.4 s: "
        "at worst 9 times as many per task as usual."
    )


@pytest.mark.parametrize(
    ("mine", "words"), [(10, "Most failures are of one kind: 10 of 19"), (9, "The most frequent failure: 9 of 19")]
)
def test_most_failures_are_more_than_half(mine: int, words: str) -> None:
    made = minute_of_demo()
    kind = msgspec.structs.replace(made.failures[0], failures=mine)
    totals = msgspec.structs.replace(made.totals, failed_runs=19)
    assert findings(minute_of_demo(totals=totals, failures=[kind]))[0].startswith(words)


def test_a_forecast_needs_a_week() -> None:
    enough = FORECAST.least * 24
    assert not any("likely" in sentence for sentence in findings(minute_of_demo(capacity=slots(enough - 1))))
    (told,) = (sentence for sentence in findings(minute_of_demo(capacity=slots(enough))) if "likely" in sentence)
    assert told == (
        "Queue q is likely to need 4 runs at a time; at most 3 were seen: too few for 3 of the hours ahead, "
        "the first 2026-11-26 14:00 UTC."
    )


def test_a_group_is_held_up_by_its_limit_when_enough_of_it_ran() -> None:
    group = msgspec.structs.replace(minute_of_demo().groups[0], started=LIMIT.least)
    assert "Group g of queue q waited 77 s at its limit" in findings(minute_of_demo(groups=[group]))[0]


def test_what_was_made_up_is_a_chapter_of_its_own() -> None:
    made_up = minute_of_demo(made_up=True, stores=("synthetic",))
    both, alone = page([minute_of_demo(), made_up], "t"), page([made_up], "t")
    assert both.index("Not all was measured") < both.index('<article id="measured">') < both.index('<article id="made-up">')
    assert "made up 9 tasks (store synthetic); no worker ran them" in both
    assert "Nothing on this page was measured." in alone
    assert "banner" not in page([minute_of_demo()], "t").partition("</style>")[2]


def test_text_from_outside_is_escaped() -> None:
    evil = "</text><script>x</script>"
    hit = minute_of_demo(
        slowest=[FunctionTimes(name=evil, queue=evil, runs=99, failed=0, run_p50=1.0, run_p95=2.0, run_p99=None)],
        groups=[GroupWait(queue=evil, group_id=evil, started=99, waiting_ms=9e9, blocked_ms=9e9, max_wait_ms=1.0)],
        capacity=slots(200, queue=evil),
        storms=[window(0, name=evil)],
        stores=(evil,),
        made_up=True,
    )
    text = page([hit, hit], evil)
    assert "<script" not in text
    assert "<b>no" not in text
    assert "<i>" not in text


def test_every_sample_says_what_it_is_for() -> None:
    assert len({sample.needed_for for sample in ALL}) == len(ALL)
    assert all(not sample.enough(sample.least - 0.01) and sample.enough(sample.least) for sample in ALL)


# -- pictures ------------------------------------------------------------------------------------


def words(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def test_a_minute_is_drawn_on_an_axis_of_a_minute_with_whole_tasks(plots: Any) -> None:
    flows = [Flow(at=START + timedelta(seconds=n), succeeded=n % 4, backlog=n % 2) for n in range(60)]
    axes, backlog = plots.throughput(flows, 1, START, START + MINUTE).axes
    assert words(axes.xaxis)[0] == "14:00:00"
    assert words(axes.xaxis)[-1] == "14:01:00"
    assert axes.get_xlabel() == "19 Nov 2026, UTC"
    assert axes.get_xlim()[1] - axes.get_xlim()[0] == pytest.approx(60, rel=0.05)
    assert words(axes.yaxis) == ["0", "1", "2", "3"]
    assert words(backlog.yaxis) == ["0", "1"]
    assert axes.get_ylabel() == "runs per second"


def test_times_of_eight_milliseconds_end_beyond_them(plots: Any) -> None:
    rows = [
        FunctionTimes(name=name, queue="q", runs=99, failed=0, run_p50=2, run_p95=most, run_p99=None)
        for name, most in (("a", 8), ("b", 5))
    ]
    (axes,) = plots.slowest(rows).axes
    assert words(axes.xaxis) == ["0", "2 ms", "4 ms", "6 ms", "8 ms"]
    assert axes.get_xlim()[1] > 8
    assert words(axes.yaxis) == ["a", "b"]
    assert axes.get_ylim()[1] > 1, "the first row is not cut"


def test_a_percentile_without_enough_runs_has_no_line(plots: Any) -> None:
    rows = [
        Percentiles(
            at=START + n * MINUTE,
            runs=9,
            wait_p50=float(n + 1),
            wait_p95=None if n == 1 else 90.0,
            wait_p99=95.0 if n > 1 else None,
        )
        for n in range(4)
    ]
    (axes,) = plots.percentiles(rows, "wait", 60, START, START + 4 * MINUTE).axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert set(drawn) == {"p50", "p95"}, "two points are no line"
    text = page([minute_of_demo(percentiles=rows)], "t")
    assert "P99: too little data to say: 2 of at least 3 points with enough runs." in text
    assert drawn["p95"][1] != drawn["p95"][1], "the gap stays a gap"
    low, high = axes.get_xlim()
    assert all(low < x < high for line in axes.lines for x in line.get_xdata())
    assert axes.get_ylim()[1] >= 90


def test_a_line_at_the_top_of_its_axis_is_not_cut_and_hides_no_other(plots: Any) -> None:
    flows = [Flow(at=START + timedelta(seconds=n), succeeded=1, backlog=5) for n in range(9)]
    _, backlog = plots.throughput(flows, 1, START, START + MINUTE).axes
    alike = [msgspec.structs.replace(row, slots_needed=5, slots_seen=5) for row in slots(168)]
    (axes,) = plots.capacity({"q": alike}).axes
    for line in (*backlog.lines, *axes.lines):
        assert max(line.get_ydata()) == line.axes.get_ylim()[1]
        assert not line.get_clip_on()
    seen, *needed = axes.lines
    assert seen.get_label() == "slots seen"
    assert all(seen.get_linewidth() > line.get_linewidth() for line in needed), "wide, and drawn before"


def test_hours_of_the_week_are_the_mean_of_the_weeks(plots: Any) -> None:
    monday = datetime(2026, 11, 16, 0, 0, tzinfo=UTC)
    hours = [HourLoad(weekday=0, hour=9, started=20), HourLoad(weekday=2, hour=9, started=10)]
    axes = plots.heat_map(hours, monday, monday + 9 * DAY).axes[0]
    grid = axes.collections[0].get_array().reshape(7, 24)
    assert (grid[0, 9], grid[2, 9], grid[4, 0]) == (10, 10, 0), "two Mondays, one Wednesday"
    short = plots.heat_map(hours[:1], monday, monday + DAY).axes[0].collections[0].get_array().reshape(7, 24)
    assert short.mask[1:].all(), "days that were not seen"


def test_a_day_without_failures_has_its_place(plots: Any) -> None:
    days = [DayFailures(day=date(2026, 11, day), fingerprint="f", name="pay", failures=day) for day in (17, 19)]
    (axes,) = plots.failures(minute_of_demo().failures, days).axes
    assert words(axes.xaxis) == ["17 Nov", "18 Nov", "19 Nov"]
    assert [bar.get_height() for bar in axes.patches] == [17, 0, 19]


def test_storms_of_an_incident_are_marked_from_its_beginning_to_its_end(plots: Any) -> None:
    rows = [plots.Retries(at=START + 5 * n * MINUTE, name="pay", retries=20) for n in range(3)]
    (axes,) = plots.retries(rows, incidents([window(5), window(10)]), 300, START, START + 15 * MINUTE).axes
    band = axes.patches[-1].get_extents().transformed(axes.transData.inverted())
    assert (band.x0, band.x1) == pytest.approx(((START + 5 * MINUTE).timestamp(), (START + 15 * MINUTE).timestamp()))
    assert words(axes.yaxis) == ["0", "5", "10", "15", "20"]


def test_groups_wait_in_units_that_fit(plots: Any) -> None:
    (axes,) = plots.groups(
        [GroupWait(queue="q", group_id="g", started=99, waiting_ms=2320, blocked_ms=1500, max_wait_ms=1.0)]
    ).axes
    assert words(axes.xaxis) == ["0", "500 ms", "1 s", "1.5 s", "2 s", "2.5 s"]


def test_slots_are_whole_and_the_forecast_is_shaded_to_its_end(plots: Any) -> None:
    rows = slots(168, ahead=168)
    (axes,) = plots.capacity({"q": rows}).axes
    assert words(axes.yaxis) == ["0", "1", "2", "3", "4"]
    assert axes.get_xlim()[1] >= (rows[-1].hour + HOUR).timestamp()
