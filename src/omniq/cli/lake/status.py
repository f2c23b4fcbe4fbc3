"""`omniq lake status`: what a lake holds, and how far it is behind a store; read from its manifests, without Spark."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from omniq.cli.lake.opening import LakeOption
from omniq.cli.output import JsonOption, count, print_json, print_line, print_table
from omniq.cli.stores import StoreOption, settings_and_url

if TYPE_CHECKING:
    from omniq.operations import Retention
    from omniq.spark.lake.layout import Gap, Lake, Lost

# Gaps that are shown of each store, the newest ones; --json has all.
MAX_TOLD = 5


class TableStatus(msgspec.Struct, kw_only=True):
    name: str
    layer: str
    days: int
    files: int
    rows: int
    bytes: int


class StoreStatus(msgspec.Struct, kw_only=True):
    """A store that was ingested. What only the store knows is None, or empty, if nobody asked it.

    `behind` counts the events that it has and the lake does not, `left` is the part left of what it keeps, `lost` is what it
    has no more; `gaps` is what somebody accepted of that. `advice` is what to do.
    """

    store: str
    url: str
    events: int
    behind: int | None = None
    left: float | None = None
    lost: list[Lost] = []
    gaps: list[Gap] = []
    advice: str = ""


class LakeStatus(msgspec.Struct, kw_only=True):
    path: str
    built_at: datetime | None
    stores: list[StoreStatus]
    tables: list[TableStatus]


def status_command(lake: LakeOption, json: JsonOption = False, store: StoreOption = None) -> None:
    """Say what the lake holds, which gaps were accepted, and with --store how far it is behind that store. Starts no Spark.

    It says so when less than a third is left of the time or the number of events for which the store keeps what is not in the
    lake yet, and when some of it was purged.

    Example: omniq lake status --lake history --store sqlite:///omniq.db
    """
    from omniq.spark import Lake

    found = status_of(Lake(lake), store, settings_and_url(store)[0].retention)
    if json:
        print_json(found)
    else:
        show_status(found)


def status_of(lake: Lake, store: str | None, retention: Retention) -> LakeStatus:
    from omniq.spark.lake.tables import TABLES

    current, about = lake.current(), lake.about()
    seen = lake.manifest("events", current).seen
    stores = {
        name: StoreStatus(
            store=name, url=entry.url, events=sum(_length(ranges) for ranges in seen.get(name, {}).values()), gaps=entry.gaps
        )
        for name, entry in about.stores.items()
    }
    if store is not None:
        _ask(lake, store, retention, stores)
    tables: list[TableStatus] = []
    for name, table in TABLES.items():
        manifest = lake.manifest(name, current)
        files = manifest.files
        tables.append(
            TableStatus(
                name=name,
                layer=table.layer,
                days=len(manifest.parts),
                files=len(files),
                rows=sum(file.rows for file in files),
                bytes=sum(file.bytes for file in files),
            )
        )
    return LakeStatus(path=str(lake.path), built_at=current.at, stores=list(stores.values()), tables=tables)


def _ask(lake: Lake, url: str, retention: Retention, stores: dict[str, StoreStatus]) -> None:
    """Say how far the lake is behind a store, and what to do about it."""
    from omniq.cli.lake.checks import finding_of
    from omniq.spark.address import existing
    from omniq.spark.lake.lag import lag_of
    from omniq.storage.url import mask

    with existing(url) as bulk:
        lag = bulk.call(lag_of(lake, bulk.storage, retention))
    entry = stores.setdefault(lag.store, StoreStatus(store=lag.store, url=mask(url), events=0))
    entry.behind, entry.left, entry.lost = lag.behind, lag.left, lag.lost
    found = finding_of(lake, lag, url)
    entry.advice = "" if found.status == "ok" else f"{found.message}: {found.remedy}"


def _length(ranges: list[tuple[int, int]]) -> int:
    return sum(high - low + 1 for low, high in ranges)


def show_status(found: LakeStatus) -> None:
    from omniq.spark.lake.gaps import told

    when = "never" if found.built_at is None else f"{found.built_at:%Y-%m-%d %H:%M:%S} UTC"
    print_line(f"lake {found.path}, last changed: {when}")
    for store in found.stores:
        behind = "" if store.behind is None else f", {count(store.behind, 'event')} behind"
        print_line(f"store {store.store} ({store.url}): {count(store.events, 'event')}{behind}")
        for gap in store.gaps[-MAX_TOLD:]:
            lost = f"{told(store.store, gap)}, {gap.since:%Y-%m-%d %H:%M:%S} to {gap.until:%Y-%m-%d %H:%M:%S} UTC"
            print_line(f"gap: {lost}, accepted {gap.accepted_at:%Y-%m-%d}")
        if store.advice:
            print_line(store.advice)
    rows = [(t.name, t.layer, t.days, t.files, t.rows, f"{t.bytes / 1_000_000:.1f} MB") for t in found.tables]
    print_table(["TABLE", "LAYER", ">DAYS", ">FILES", ">ROWS", ">SIZE"], rows)
