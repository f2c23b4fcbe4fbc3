"""The check of `omniq doctor --lake`: whether a lake keeps up with a store. Starts no Spark, and needs none of the extra."""

from __future__ import annotations

from collections.abc import Iterable

from omniq.cli.check_results import Finding, fault
from omniq.cli.output import count
from omniq.errors import LakeError
from omniq.operations import Retention
from omniq.spark.lake.gaps import told
from omniq.spark.lake.lag import Lag, lag_of
from omniq.spark.lake.layout import Lake
from omniq.storage.base import BaseStorage
from omniq.storage.url import mask


async def examine_lakes(folders: Iterable[str], storage: BaseStorage, retention: Retention, url: str) -> list[Finding]:
    """One finding for each lake, about the store that is open."""
    found: list[Finding] = []
    for folder in folders:
        try:
            lake = Lake(folder)
            found.append(finding_of(lake, await lag_of(lake, storage, retention), url))
        except LakeError as exc:
            found.append(fault("lake", exc))
    return found


def finding_of(lake: Lake, lag: Lag, url: str) -> Finding:
    """What to say of a lake that stands so to the store at this URL."""
    ingest = f"omniq lake ingest --lake {lake.path} --store {mask(url)}"
    if not lag.known:
        message = f"the lake {lake.path} never took in anything of the store {lag.store}"
        return Finding(check="lake", status="warning", message=message, remedy=f"{ingest} takes it in")
    if lag.lost:
        more = f", and {count(len(lag.lost) - 1, 'more stretch', 'more stretches')}," if len(lag.lost) > 1 else ""
        message = f"{told(lag.store, lag.lost[0])}{more} were purged before they came into the lake {lake.path}"
        remedy = f"{ingest} --accept-gap goes on without them and marks their time in the tables"
        return Finding(check="lake", status="wrong", message=message, remedy=remedy)
    message = f"the lake {lake.path} is {count(lag.behind, 'event')} behind"
    if lag.late:
        message += f", and {lag.left:.0%} is left of the time or number for which the store keeps them"
        remedy = f"{ingest} now, and more often; or let the workers keep more: OMNIQ_EVENTS_MAX_AGE, OMNIQ_EVENTS_MAX_COUNT"
        return Finding(check="lake", status="warning", message=message, remedy=remedy)
    return Finding(check="lake", status="ok", message=message)
