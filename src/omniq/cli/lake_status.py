"""What a lake holds, and how far it is behind a store; read from its manifests, without Spark."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from omniq.cli.output import count, print_line, print_table

if TYPE_CHECKING:
    from omniq.spark.lake.layout import Lake


class TableStatus(msgspec.Struct, kw_only=True):
    name: str
    layer: str
    days: int
    files: int
    rows: int
    bytes: int


class StoreStatus(msgspec.Struct, kw_only=True):
    """A store that was ingested. `behind` counts the events that it has and the lake does not; None if nobody asked it."""

    store: str
    url: str
    events: int
    behind: int | None = None


class LakeStatus(msgspec.Struct, kw_only=True):
    path: str
    built_at: datetime | None
    stores: list[StoreStatus]
    tables: list[TableStatus]


def status_of(lake: Lake, store: str | None) -> LakeStatus:
    from omniq.spark.lake.tables import TABLES

    current, about = lake.current(), lake.about()
    seen = lake.manifest("events", current).seen
    stores = {
        name: StoreStatus(store=name, url=entry.url, events=sum(_length(ranges) for ranges in seen.get(name, {}).values()))
        for name, entry in about.stores.items()
    }
    if store is not None:
        _ask(store, seen, stores)
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


def _ask(url: str, seen: dict[str, dict[str, list[tuple[int, int]]]], stores: dict[str, StoreStatus]) -> None:
    """How many events a store has that the lake does not."""
    from omniq.spark.address import existing
    from omniq.storage.url import mask

    with existing(url) as bulk:
        name, shards = bulk.info().store_id, bulk.event_shards()
    last = {shard: ranges[-1][1] for shard, ranges in seen.get(name, {}).items() if ranges}
    behind = sum(max(shard.last - max(last.get(shard.name, 0), shard.first - 1), 0) for shard in shards)
    entry = stores.setdefault(name, StoreStatus(store=name, url=mask(url), events=0))
    entry.behind = behind


def _length(ranges: list[tuple[int, int]]) -> int:
    return sum(high - low + 1 for low, high in ranges)


def show_status(found: LakeStatus) -> None:
    when = "never" if found.built_at is None else f"{found.built_at:%Y-%m-%d %H:%M:%S} UTC"
    print_line(f"lake {found.path}, last changed: {when}")
    for store in found.stores:
        behind = "" if store.behind is None else f", {count(store.behind, 'event')} behind"
        print_line(f"store {store.store} ({store.url}): {count(store.events, 'event')}{behind}")
    rows = [(t.name, t.layer, t.days, t.files, t.rows, f"{t.bytes / 1_000_000:.1f} MB") for t in found.tables]
    print_table(["TABLE", "LAYER", ">DAYS", ">FILES", ">ROWS", ">SIZE"], rows)
