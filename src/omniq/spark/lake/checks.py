"""Checks: whether bronze has every event once, and whether silver and gold add up to it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from omniq.errors import CheckFailed
from omniq.spark.causes import unwrapped
from omniq.spark.lake.days import check_days
from omniq.spark.lake.gaps import missing, told
from omniq.spark.lake.manifest import Manifest
from omniq.spark.lake.models import VERSION
from omniq.spark.lake.tables import GOLD, SILVER
from omniq.spark.lake.totals import SHOWN, CheckResult, check_gold, check_silver, silver_days, some

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from omniq.spark.lake.layout import About, Lake

# Clocks of servers that are kept in step differ by far less; a note, since an event ahead of time is still counted.
AHEAD_S = 300


def check(spark: SparkSession, lake: Lake, *, fail: bool = True) -> list[CheckResult]:
    """Check everything that the lake holds. Raises `CheckFailed` with the first fault, unless `fail` is False."""
    current = lake.current()
    manifests = {name: lake.manifest(name, current) for name in ("events", *SILVER, *GOLD)}
    about = lake.about()
    results = [*check_gaps(manifests["events"], about, lake.path), _files(lake, manifests)]
    with unwrapped():
        # With a file missing every later query would end in an error of Spark's.
        if results[-1].ok:
            every = (*manifests.values(), lake.manifest("payloads", current))
            results += check_days(lake, [(manifest, None) for manifest in every])
            results += _bronze(spark, lake, manifests["events"])
        if results[-1].ok and manifests["tasks"].parts:
            fresh = [
                date.fromisoformat(day) for day, part in manifests["tasks"].parts.items() if _fresh(day, part.stamp, manifests)
            ]
            results += check_silver(manifests["events"], fresh, silver_days(spark, lake, manifests, fresh))
            # A table that builds left out has sums of an older state, or none: that is no fault.
            whole = [name for name in GOLD if manifests[name].model == VERSION]
            results += check_gold(spark, lake, manifests, dict.fromkeys(whole))
            if behind := [name for name in GOLD if name not in whole]:
                detail = f"{', '.join(behind)} {'waits' if len(behind) == 1 else 'wait'} for the next build without --tables"
                results.append(CheckResult(name="note", ok=True, detail=detail, note=True))
    failed = [result for result in results if not result.ok]
    if failed and fail:
        raise CheckFailed(f"the lake {lake.path} fails {len(failed)} of {len(results)} checks: {failed[0].detail}")
    return results


def _fresh(day: str, stamp: str, manifests: Mapping[str, Manifest]) -> bool:
    """Whether silver was built from what bronze holds now."""
    part = manifests["events"].parts.get(day)
    return part is not None and stamp.rpartition("/")[0] == part.stamp


# -- bronze --------------------------------------------------------------------------------------------


def check_gaps(events: Manifest, about: About, lake: str | Path = "DIR") -> list[CheckResult]:
    """Find numbers that are missing between the first and the last of a shard; accepted gaps are notes."""
    found: list[str] = []
    notes: list[CheckResult] = []
    shards = 0
    for store, seen in sorted(events.seen.items()):
        entry = about.stores.get(store)
        shards += len(seen)
        lost = [f"{told(store, one)} are missing" for one in missing(seen, entry)]
        if lost:
            url = entry.url if entry else "URL"
            found.append(f"{some(lost)}; omniq lake ingest --accept-gap --lake {lake} --store {url} goes on without them")
    for store, entry in sorted(about.stores.items()):
        if entry.gaps:
            lost = [
                f"{told(store, gap)}, {gap.since:%Y-%m-%d %H:%M:%S} to {gap.until:%Y-%m-%d %H:%M:%S} UTC" for gap in entry.gaps
            ]
            notes.append(CheckResult(name="note", ok=True, detail=f"purged before they came in: {some(lost)}", note=True))
    accepted = " that nobody accepted" if notes else ""
    detail = some(found) or f"no gap{accepted} in the numbers of {shards} {'shard' if shards == 1 else 'shards'}"
    return [CheckResult(name="gaps", ok=not found, detail=detail), *notes]


def _files(lake: Lake, manifests: Mapping[str, Manifest]) -> CheckResult:
    missing = [file.path for m in manifests.values() for file in m.files if not lake.folder.exists(file.path)]
    detail = (
        f"files are missing: {some(missing)}" if missing else f"{sum(len(m.files) for m in manifests.values())} files are there"
    )
    return CheckResult(name="files", ok=not missing, detail=detail)


def _bronze(spark: SparkSession, lake: Lake, events: Manifest) -> list[CheckResult]:
    from pyspark.sql import functions as F

    rows = lake.frame(spark, events)
    twice = rows.groupBy("store", "shard", "seq").count().where("count > 1").orderBy("store", "shard", "seq")
    found = [f"event {r['seq']} of store {r['store']} is there {r['count']} times" for r in twice.limit(SHOWN).collect()]
    results = [CheckResult(name="duplicates", ok=not found, detail=some(found) if found else "every event is there once")]
    strange = rows.agg(
        F.count(F.lit(1)).alias("rows"),
        F.count(F.when(F.col("ts") > F.current_timestamp() + F.expr(f"interval {AHEAD_S} seconds"), 1)).alias("ahead"),
    ).collect()[0]
    same = strange["rows"] == events.rows
    results.append(
        CheckResult(name="bronze rows", ok=same, detail=f"{strange['rows']} rows in the files, {events.rows} in the manifest")
    )
    notes = [
        (strange["ahead"], f"{strange['ahead']} events are more than {AHEAD_S // 60} minutes ahead of this machine's clock"),
        (events.quarantined, f"{events.quarantined} rows are in quarantine"),
    ]
    results += [CheckResult(name="note", ok=True, detail=text, note=True) for count, text in notes if count]
    return results
