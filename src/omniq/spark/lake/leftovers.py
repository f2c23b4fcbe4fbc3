"""The files that no longer count, and those that killed processes left behind."""

from __future__ import annotations

from datetime import timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING

import msgspec

from omniq.spark.lake.layout import LEFTOVER_S
from omniq.spark.lake.manifest import Manifest
from omniq.spark.lake.tables import TABLES

if TYPE_CHECKING:
    from omniq.spark.lake.layout import Lake


def collect(lake: Lake, grace: timedelta, *, thorough: bool = False) -> int:
    """Delete versions that were replaced longer than `grace` ago and leftovers of killed processes; returns their number.

    With `thorough` it spares no file that no manifest names, even if ingest has just written it: ingest notices and writes
    the batch again.
    """
    # With the lock of publishing: a batch that is published meanwhile would be named by a manifest that was not read here.
    with lake.folder.lock("publish", "deleting", wait=True):
        return _collect(lake, grace.total_seconds(), thorough)


def _collect(lake: Lake, grace_s: float, thorough: bool) -> int:
    folder = lake.folder
    current = lake.current()
    named: set[str] = set()
    old_manifests: list[str] = []
    for table in TABLES:
        counts = current.tables.get(table)
        numbers = sorted(int(path.stem) for path in (lake.path / "_manifest" / table).glob("*.json"))
        for number, following in zip_longest(numbers, numbers[1:]):
            name = f"_manifest/{table}/{number}.json"
            # A version counts until the next one is published.
            # Its own age says nothing: a version may count for weeks, and readers may have opened it until it was replaced.
            replaced_s = 0.0 if following is None else folder.age_s(f"_manifest/{table}/{following}.json")
            if number != counts and (replaced_s > grace_s or number > current.number):
                old_manifests.append(name)
                continue
            data = folder.read(name)
            if data is not None:
                manifest = msgspec.json.decode(data, type=Manifest)
                named |= {file.path for file in (*manifest.files, *manifest.quarantine)}
    doomed: list[str] = []
    for root in ("bronze", "silver", "gold", "quarantine"):
        unnamed = [path for path in folder.parquet(root) if path not in named]
        # Ingest goes on beside all others, and may just have moved a batch into place that it is about to publish.
        keep_s = grace_s if thorough or root in ("silver", "gold") else max(grace_s, 3600.0)
        doomed += [path for path in unnamed if folder.age_s(path) >= keep_s]
    folder.remove(old_manifests)
    folder.remove(doomed)
    for name in folder.folders("_staging"):
        if folder.age_s(f"_staging/{name}") > LEFTOVER_S:
            folder.remove_tree(f"_staging/{name}")
    return len(doomed)
