"""The numbers of a report: small tables that Spark makes from gold and silver. No query depends on the session's time zone."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from omniq.errors import LakeError
from omniq.spark.lake.layout import Gap, Lake
from omniq.spark.lake.report.facts import (
    DayFailures,
    FailureKind,
    Figures,
    Flow,
    FunctionTimes,
    GroupWait,
    HourLoad,
    Percentiles,
    Retries,
    SlotHour,
    StormWindow,
    Totals,
    is_made_up,
)
from omniq.spark.lake.report.incidents import WINDOW
from omniq.spark.lake.report.samples import FORECAST, LIMIT, P95, PERCENTILES, WEEK

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOP = 10
LINES = 5  # functions in one picture
QUEUES = 3  # of which slots are shown
# Each divides the minute, hour or day above it, so that steps begin where those do.
_STEPS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 900, 3600, 21_600, 86_400, 604_800)
_POINTS = 240  # more have no room on a page
_MINUTE_S, _HOUR_S = 60, 3600


def gather(spark: SparkSession, lake: Lake, since: date | None = None) -> list[Figures]:
    """The chapters of a report, from the tables of one build: one of measured tasks, one of made up tasks if there are any.

    Raises `LakeError` when the lake has neither.
    """
    current = lake.current()
    frames = {name: lake.frame(spark, lake.manifest(name, current)) for name in _TABLES}
    stores = sorted(lake.manifest("events", current).seen)
    chapters = [[store for store in stores if is_made_up(store) is made_up] for made_up in (False, True)]
    # With one chapter every row belongs to it, and no query needs a condition on the store.
    both = all(chapters)
    # Small queries keep Spark waiting for its driver: two chapters are asked for at a time.
    with ThreadPoolExecutor(len(chapters)) as beside:
        found = [
            beside.submit(
                _chapter, _Asked(spark, frames, chapter if both else None, since), chapter, _gaps(lake, chapter, since)
            )
            for chapter in chapters
            if chapter
        ]
    figures = [chapter for each in found if (chapter := each.result()) is not None]
    if not figures:
        raise LakeError(f"the lake {lake.path} has nothing to report on: run omniq lake ingest and omniq lake build first")
    return figures


_Row = TypeVar("_Row")


class _Asked:
    """The tables, with the rows of some stores and from some day on."""

    def __init__(self, spark: SparkSession, frames: dict[str, DataFrame], stores: list[str] | None, since: date | None) -> None:
        from pyspark.sql import functions as F

        self._spark, self.since = spark, since
        self._whole = frames if stores is None else {n: frame.where(F.col("store").isin(stores)) for n, frame in frames.items()}
        self._frames = self._whole
        if since is not None:
            self._frames = {name: frame.where(f"{_day(name)} >= '{since}'") for name, frame in self._whole.items()}

    def rows(self, query: str, whole: bool = False) -> list[dict[str, Any]]:
        """The rows of a query with tables as `{table}`; with `whole` also rows from before `since`."""
        frames = self._whole if whole else self._frames
        named: dict[str, Any] = {name: frame for name, frame in frames.items() if f"{{{name}}}" in query}
        return [_dated(row) for row in self._spark.sql(query, **named).toArrow().to_pylist()]

    def of(self, kind: type[_Row], query: str, whole: bool = False) -> list[_Row]:
        return [msgspec.convert(row, kind) for row in self.rows(query, whole)]


_TABLES = ("tasks", "attempts", "queue_minute", "func_hour", "group_hour", "failure_day", "retry_storm", "capacity_hour")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _dated(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its microseconds as moments: moments leave Spark as numbers, which no zone can shift."""
    return {name.removesuffix("_us"): _moment(value) if name.endswith("_us") else value for name, value in row.items()}


def _moment(us: int | None) -> datetime | None:
    return None if us is None else _EPOCH + timedelta(microseconds=us)


def _day(table: str) -> str:
    return "task_date" if table in ("tasks", "attempts", "events") else "day"


def _gaps(lake: Lake, stores: Sequence[str], since: date | None) -> list[Gap]:
    known = lake.about().stores
    gaps = [gap for store in stores if store in known for gap in known[store].gaps]
    return [gap for gap in gaps if since is None or gap.until.date() >= since]


def _chapter(ask: _Asked, stores: Sequence[str], gaps: list[Gap]) -> Figures | None:
    (span,) = ask.rows(_SPAN)
    if span["first"] is None:
        return None
    first, last = span["first"], span["last"]
    # Gold has minutes. A short history is shown by its single runs, which are all there unless `since` cuts some off.
    if ask.since is None and span["first_task"] is not None and (last - first).total_seconds() <= _POINTS * 30:
        first, last = max(first, span["first_task"]), min(last, max(span["last_task"], span["first_task"]))
    seconds = max((last - first).total_seconds(), 1.0)
    step = next((step for step in _STEPS_S if seconds / step <= _POINTS), _STEPS_S[-1])
    retries_step = max(step, WINDOW.total_seconds())
    # Queries for a part that would be left out for lack of data are saved. With `since` there may be more data than is shown.
    days = 1e9 if ask.since is not None else (last - first).total_seconds() / 86_400
    return Figures(
        stores=tuple(stores),
        made_up=is_made_up(stores[0]),
        gaps=gaps,
        first=first,
        last=max(last, first + timedelta(seconds=1)),
        step_s=step,
        totals=ask.of(Totals, _TOTALS)[0],
        throughput=flows(ask.rows(flow_of_minutes(step) if step >= _MINUTE_S else flow_of_runs(step)), step),
        percentiles=[_claimed(row) for row in ask.rows(_fine(step) if step < _HOUR_S else _merged(step))],
        hours=ask.of(HourLoad, _HOURS) if WEEK.enough(days) else [],
        failures=ask.of(FailureKind, _FAILURES),
        failures_by_day=ask.of(DayFailures, _FAILURES_BY_DAY) if first.date() != last.date() else [],
        storms=ask.of(StormWindow, _storms(ask.since), whole=True),
        retries=ask.of(Retries, _retries(retries_step)),
        retries_step_s=retries_step,
        slowest=[_claimed_run(row) for row in ask.rows(_SLOWEST)],
        groups=ask.of(GroupWait, _GROUPS),
        capacity=ask.of(SlotHour, _capacity(ask.since), whole=True) if FORECAST.enough(days) else [],
    )


def flows(rows: Sequence[dict[str, Any]], step_s: float) -> list[Flow]:
    """One flow per step without a gap, from rows that have a `delta` of the backlog."""
    known = {row["at"]: row for row in rows}
    if not known:
        return []
    at, step, backlog = min(known), timedelta(seconds=step_s), 0
    found: list[Flow] = []
    while at <= max(known):
        row = known.get(at, {})
        # Never below 0, which a history that begins in the middle would come to: tasks end that it never saw arrive.
        backlog = max(0, backlog + (row.get("delta") or 0))
        ended = {name: row.get(name) or 0 for name in ("succeeded", "retried", "failed", "expired")}
        found.append(Flow(at=at, backlog=backlog, **ended))
        at += step
    return found


def _claimed(row: dict[str, Any]) -> Percentiles:
    return msgspec.convert(_enough(row, ("wait", "run")), Percentiles)


def _claimed_run(row: dict[str, Any]) -> FunctionTimes:
    return msgspec.convert(_enough(row, ("run",)), FunctionTimes)


def _enough(row: dict[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """The row without the percentiles of too few runs."""
    hidden = {f"{kind}_{share}" for kind in kinds for share, sample in PERCENTILES.items() if not sample.enough(row["runs"])}
    return {name: None if name in hidden else value for name, value in row.items()}


# -- the queries ---------------------------------------------------------------------------------


def _bucket(step_s: float, moment: str) -> str:
    step_us = round(step_s * 1e6)
    return f"unix_micros({moment}) div {step_us} * {step_us} AS at_us"


_SPAN = """SELECT unix_micros(m.first) AS first_us, unix_micros(m.last) + 60000000 AS last_us,
    unix_micros(t.first) AS first_task_us, unix_micros(t.last) AS last_task_us
    FROM (SELECT min(minute) AS first, max(minute) AS last FROM {queue_minute}) m,
    (SELECT min(created_at) AS first, max(last_event_at) AS last FROM {tasks}) t"""

# An error of a thousandth in rank is enough for a tile, and a fifth cheaper than Spark's own 10,000.
_TOTALS = """SELECT t.*, a.*, f.* FROM
    (SELECT count(*) AS tasks, count_if(status = 'SUCCESS') AS succeeded, count_if(status = 'FAILED') AS failed,
        count_if(finished_at IS NULL) AS unfinished FROM {tasks}) t,
    (SELECT count(started_at) AS started, count_if(outcome = 'retried') AS retried, count_if(outcome = 'expired') AS expired,
        percentile_approx(wait_ms, 0.95, 1000) AS wait_p95, percentile_approx(run_ms, 0.95, 1000) AS run_p95,
        count(DISTINCT worker) AS workers FROM {attempts}) a,
    (SELECT coalesce(sum(failures), 0) AS failed_runs FROM {failure_day}) f"""

_HOURS = """SELECT int(pmod(floor(unix_seconds(minute) / 86400) + 3, 7)) AS weekday,
    int(pmod(floor(unix_seconds(minute) / 3600), 24)) AS hour, sum(started) AS started FROM {queue_minute} GROUP BY 1, 2"""

_FAILURES = f"""SELECT fingerprint, name, first(error_type) AS error_type, sum(failures) AS failures, sum(final) AS final,
    unix_micros(max(last_seen)) AS last_seen_us, max_by(sample_error, last_seen) AS sample_error,
    max_by(sample_ids, last_seen) AS sample_ids
    FROM {{failure_day}} GROUP BY fingerprint, name ORDER BY failures DESC, fingerprint, name LIMIT {TOP}"""

_FAILURES_BY_DAY = "SELECT day, fingerprint, name, sum(failures) AS failures FROM {failure_day} GROUP BY ALL ORDER BY day"

# Hours without a run that has a time are left out, because Spark raises for a quantile of an empty sketch.
_SLOWEST = f"""SELECT name, queue, sum(runs) AS runs, sum(failed) AS failed,
    kll_sketch_get_quantile_double(kll_merge_agg_double(run_sketch), 0.5D) AS run_p50,
    kll_sketch_get_quantile_double(kll_merge_agg_double(run_sketch), 0.95D) AS run_p95,
    kll_sketch_get_quantile_double(kll_merge_agg_double(run_sketch), 0.99D) AS run_p99
    FROM {{func_hour}} WHERE run_p50_ms IS NOT NULL GROUP BY name, queue
    ORDER BY runs >= {P95.least} DESC, run_p95 DESC, name LIMIT {TOP}"""

_GROUPS = f"""SELECT queue, group_id, sum(started) AS started, sum(blocked_ms) AS blocked_ms, sum(waiting_ms) AS waiting_ms,
    max(max_wait_ms) AS max_wait_ms
    FROM {{group_hour}} GROUP BY queue, group_id HAVING sum(waiting_ms) > 0
    ORDER BY started >= {LIMIT.least} DESC, blocked_ms DESC, waiting_ms DESC, queue, group_id LIMIT {TOP}"""


def flow_of_minutes(step_s: float) -> str:
    """Returns the query of what came and ended in each step of whole minutes, from `queue_minute`."""
    return f"""SELECT {_bucket(step_s, "minute")}, sum(succeeded) AS succeeded, sum(retried) AS retried, sum(failed) AS failed,
        sum(expired) AS expired, sum(backlog_delta) AS delta FROM {{queue_minute}} GROUP BY 1 ORDER BY 1"""


def flow_of_runs(step_s: float) -> str:
    """Returns the query of the same from the single runs and tasks, counted by the rules of `queue_minute`."""
    outcomes = ("succeeded", "retried", "failed", "expired")
    ended = ", ".join(f"count_if(what = '{outcome}') AS {outcome}" for outcome in outcomes)
    return f"""SELECT {_bucket(step_s, "moment")}, {ended},
        count_if(what IN ('enqueued', 'again')) - count_if(what IN ('succeeded', 'failed', 'cancelled')) AS delta
        FROM (SELECT finished_at AS moment, outcome AS what FROM {{attempts}} WHERE outcome IN {outcomes}
            UNION ALL SELECT ready_at, 'again' FROM {{attempts}} WHERE again
            UNION ALL SELECT created_at, 'enqueued' FROM {{tasks}}
            UNION ALL SELECT finished_at, 'cancelled' FROM {{tasks}} WHERE status = 'CANCELLED'
            UNION ALL SELECT finished_at, 'failed' FROM {{tasks}} WHERE status = 'FAILED' AND runs = 0)
        WHERE moment IS NOT NULL GROUP BY 1 ORDER BY 1"""


def _fine(step_s: float) -> str:
    """Percentiles of the single runs of a short span."""
    columns = ", ".join(
        f"percentile_approx({kind}_ms, {share}, 1000) AS {kind}_p{round(share * 100)}"
        for kind in ("wait", "run")
        for share in (0.5, 0.95, 0.99)
    )
    moment = _bucket(step_s, "coalesce(finished_at, started_at)")
    return f"""SELECT {moment}, count(*) AS runs, {columns} FROM {{attempts}} WHERE started_at IS NOT NULL
        GROUP BY 1 ORDER BY 1"""


def _merged(step_s: float) -> str:
    """Percentiles of a long span, from the sketches of its hours."""
    columns = ", ".join(
        f"kll_sketch_get_quantile_double(kll_merge_agg_double({kind}_sketch), {share}D) AS {kind}_p{round(share * 100)}"
        for kind in ("wait", "run")
        for share in (0.5, 0.95, 0.99)
    )
    wanted = "wait_p50_ms IS NOT NULL AND run_p50_ms IS NOT NULL"
    return f"""SELECT {_bucket(step_s, "hour")}, sum(runs) AS runs, {columns} FROM {{func_hour}} WHERE {wanted}
        GROUP BY 1 ORDER BY 1"""


def _storms(since: date | None) -> str:
    """Windows that are storms and their neighbours, with the tasks of the day before and the time of their retries."""
    width = round(WINDOW.total_seconds())
    own = "OVER (PARTITION BY store, name ORDER BY unix_seconds(window_start) RANGE BETWEEN"
    wanted = "near" if since is None else f"near AND day >= '{since}'"
    return f"""SELECT w.store, w.name, unix_micros(window_start) AS start_us, attempts, retries, ratio, storm, known, retry_ms
        FROM (SELECT *, coalesce(sum(tasks) {own} 86400 PRECEDING AND 1 PRECEDING), 0) AS known,
                max(storm) {own} {width} PRECEDING AND {width} FOLLOWING) AS near FROM {{retry_storm}}) w
        LEFT JOIN (SELECT store, name, floor(unix_seconds(started_at) / {width}) * {width} AS slot, sum(run_ms) AS retry_ms
            FROM {{attempts}} WHERE attempt > 1 AND started_at IS NOT NULL GROUP BY ALL) r
        ON w.store = r.store AND w.name = r.name AND unix_seconds(window_start) = slot
        WHERE {wanted}"""


def _retries(step_s: float) -> str:
    return f"""SELECT {_bucket(step_s, "window_start")}, name, sum(retries) AS retries FROM {{retry_storm}}
        WHERE name IN (SELECT name FROM (SELECT name, sum(retries) AS n FROM {{retry_storm}} GROUP BY name)
            WHERE n > 0 ORDER BY n DESC, name LIMIT {LINES})
        GROUP BY ALL ORDER BY 1, 2"""


def _capacity(since: date | None) -> str:
    wanted = "true" if since is None else f"day >= '{since}'"
    return f"""SELECT * EXCEPT (day) FROM (
        SELECT store, queue, unix_micros(hour) AS hour_us, slots_needed, slots_seen, is_forecast, short, day,
            count_if(NOT is_forecast) OVER (PARTITION BY store, queue) AS known_hours FROM {{capacity_hour}}
        WHERE (store, queue) IN (SELECT store, queue
            FROM (SELECT store, queue, sum(busy_s) AS busy FROM {{capacity_hour}} GROUP BY store, queue)
            ORDER BY busy DESC NULLS LAST, store, queue LIMIT {QUEUES}))
        WHERE {wanted} ORDER BY store, queue, hour_us"""
