"""The layout of a lake's folder, and the version of each table that counts. No Spark is started here.

    lake.json                                  format, id, the stores that were ingested, what was erased, expired or lost
    _manifest/CURRENT                          number of the manifest of each table; replaced at once
    _manifest/<table>/<n>.json                 files of each day
    _checkpoints/<stream>/                     positions of the streams, Spark's own
    bronze/events/task_date=<day>/_batch=<stream>-<n>/*.parquet
    silver/<table>/task_date=<day>/_v=<build>/*.parquet
    gold/<table>/day=<day>/_v=<build>/*.parquet
    quarantine/events/task_date=<day>/_batch=…/*.parquet    rows that are no proper events, with the reason
    _staging/, _locks/                         work in progress

A file that no manifest names does not exist for a reader: leftovers of a killed process do no harm, and are deleted later.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from omniq.errors import Invalid, LakeError
from omniq.spark.lake.folder import LakeFolder
from omniq.spark.lake.manifest import Current, File, Manifest, TableDay
from omniq.spark.lake.tables import TABLES, LakeTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMAT = 1
# No job writes for a day, so an older folder of work in progress belongs to a process that is dead.
LEFTOVER_S = 86_400


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """Events of one shard that never came in, by their numbers."""

    shard: str
    first: int
    last: int


class Gap(Lost, frozen=True, kw_only=True):
    """Lost events that somebody has accepted; they happened between two moments, by the clocks that wrote the log."""

    since: datetime
    until: datetime
    accepted_at: datetime


class StoreEntry(msgspec.Struct, kw_only=True):
    """A store that was ingested."""

    url: str
    events_gapless: bool = True
    since: datetime
    checkpoint: str = ""
    gaps: list[Gap] = msgspec.field(default_factory=list[Gap])


class Erasure(msgspec.Struct, kw_only=True):
    """A task or group that must never come back, as the SHA-256 of its id; of a group the tasks up to a moment."""

    kind: str  # task or group
    digest: str
    at: datetime


class About(msgspec.Struct, kw_only=True):
    """The content of lake.json."""

    format: int = FORMAT
    id: str
    created_at: datetime
    stores: dict[str, StoreEntry] = msgspec.field(default_factory=dict[str, StoreEntry])
    expired_before: date | None = None
    erased: list[Erasure] = msgspec.field(default_factory=list[Erasure])


class Lake:
    """A folder with the history of one or more stores.

    Opening starts nothing and writes nothing. Raises `LakeError` where there is no lake, or one too new for this release.
    """

    def __init__(self, path: str | Path) -> None:
        if "://" in str(path) and not str(path).startswith("file://"):
            raise Invalid(f"a lake lives in a folder of this machine or a mounted one, not at {path}")
        self.path = Path(str(path).removeprefix("file://")).absolute()
        self.folder = LakeFolder(self.path)
        self.about()

    @classmethod
    def init(cls, path: str | Path) -> Lake:
        """Make a lake, or open the one that is there."""
        folder = Path(str(path).removeprefix("file://")).absolute()
        if not (folder / "lake.json").exists():
            if folder.exists() and any(folder.iterdir()):
                raise LakeError(f"{folder} is neither empty nor a lake: name an empty folder or a new one")
            folder.mkdir(parents=True, exist_ok=True)
            about = About(id=uuid.uuid4().hex, created_at=datetime.now(UTC))
            LakeFolder(folder).write("lake.json", msgspec.json.format(msgspec.json.encode(about)))
        return cls(folder)

    def about(self) -> About:
        data = self.folder.read("lake.json")
        if data is None:
            raise LakeError(f"no lake at {self.path}: make one with omniq lake init --lake {self.path}")
        # The number first: a later format may not even decode as this class.
        try:
            known = msgspec.json.decode(data)["format"]
            if known > FORMAT:
                raise LakeError(
                    f"the lake {self.path} has format {known}; this release reads up to {FORMAT}: use a newer omniq"
                )
            return msgspec.json.decode(data, type=About)
        except (msgspec.DecodeError, KeyError, TypeError) as exc:
            raise LakeError(f"{self.path / 'lake.json'} cannot be read ({exc}): restore it from a backup") from exc

    def current(self) -> Current:
        data = self.folder.read("_manifest/CURRENT")
        return Current() if data is None else self._decode("_manifest/CURRENT", data, Current)

    def manifest(self, name: str, current: Current | None = None) -> Manifest:
        """The version of a table that counts, now or by a `current` that was read before; empty before the first."""
        _known(name)
        number = (current or self.current()).tables.get(name)
        if number is None:
            return Manifest(table=name)
        path = f"_manifest/{name}/{number}.json"
        data = self.folder.read(path)
        if data is None:
            raise LakeError(f"{self.path / path} is missing: restore it, or run omniq lake build --full")
        return self._decode(path, data, Manifest)

    def _decode(self, path: str, data: bytes, kind: Any) -> Any:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as exc:
            raise LakeError(f"{self.path / path} cannot be read ({exc}): restore it from a backup") from exc

    # -- reading -----------------------------------------------------------------------------------

    def files(self, name: str, days: Iterable[date] | None = None) -> list[str]:
        """Absolute paths of a table's Parquet files, for DuckDB, Polars and pandas; the day is in the path, as in Hive."""
        return [self.folder.path(file.path) for file in _chosen(self.manifest(name), days)]

    def table(self, spark: SparkSession, name: str, days: Iterable[date] | None = None) -> DataFrame:
        """A table as a DataFrame; `days` are days of its folders: `task_date` for events and silver, `day` for gold."""
        return self.frame(spark, self.manifest(name), days)

    def frame(self, spark: SparkSession, manifest: Manifest, days: Iterable[date] | None = None) -> DataFrame:
        """The rows of one version of a table, published or not."""
        return self.read_files(spark, manifest.table, _chosen(manifest, days))

    def read_files(self, spark: SparkSession, name: str, files: Iterable[File]) -> DataFrame:
        table = _known(name)
        paths = [self.folder.address(file.path) for file in files]
        if not paths:
            return spark.createDataFrame([], table.ddl)
        root = self.folder.address(f"{table.layer}/{name}")
        rows = spark.read.schema(table.ddl).option("basePath", root).parquet(*paths)
        # Files from before gaps could be accepted do not have it, and days whose silver has expired keep such files.
        if "incomplete" in table.names:
            rows = rows.fillna(value=False, subset=["incomplete"])
        return rows.select(*table.names)

    def views(self, spark: SparkSession) -> None:
        """Every table as a temporary view of its plain name, all of one moment."""
        # Read once: with a `CURRENT` for each table, a build in between would give views that do not fit together.
        current = self.current()
        for name in TABLES:
            self.frame(spark, self.manifest(name, current)).createOrReplaceTempView(name)

    # -- changing ----------------------------------------------------------------------------------

    def writer(self, what: str) -> AbstractContextManager[None]:
        """Build, compact, expire, erase and repair exclude each other; ingest goes on beside them."""
        return self.folder.lock("writer", what)

    @contextmanager
    def change(self) -> Generator[Draft]:
        """A short change of the versions that count: everything in the draft is published at once, or nothing."""
        with self.folder.lock("publish", "publishing", wait=True):
            draft = Draft(self)
            yield draft
            draft.publish()


class Draft:
    """The next state of a lake, while the lock of `change` is held."""

    def __init__(self, lake: Lake) -> None:
        self.lake = lake
        self.about = lake.about()
        # As it was, so that lake.json is written only when somebody changed it.
        self._about = msgspec.json.encode(self.about)
        self.current = lake.current()
        self._changed: list[Manifest] = []

    def manifest(self, name: str) -> Manifest:
        return self.lake.manifest(name, self.current)

    def put(self, manifest: Manifest) -> None:
        self._changed.append(manifest)

    @property
    def next_number(self) -> int:
        return self.current.number + 1

    def publish(self) -> None:
        folder = self.lake.folder
        # Before the tables: after a kill in between, `expired_before` only keeps old gold as it is. The other way round a full
        # build would make gold anew from silver that is gone.
        about = msgspec.json.encode(self.about)
        if about != self._about:
            folder.write("lake.json", msgspec.json.format(about))
        if not self._changed:
            return
        number = self.next_number
        tables = dict(self.current.tables)
        for manifest in self._changed:
            manifest.number = number
            folder.write(f"_manifest/{manifest.table}/{number}.json", msgspec.json.encode(manifest))
            tables[manifest.table] = number
        # The one write that counts: until then no reader looks at the manifests above.
        folder.write("_manifest/CURRENT", msgspec.json.encode(Current(number=number, at=datetime.now(UTC), tables=tables)))


def swap(lake: Lake, name: str, day: str, old: list[File], new: list[File], stamp: bool = False) -> None:
    """Replace some files of a day and keep those that came meanwhile; with `stamp` the next build makes the day anew."""
    with lake.change() as draft:
        manifest = draft.manifest(name)
        part = manifest.parts.setdefault(day, TableDay())
        gone = {file.path for file in old}
        part.files = [*new, *(file for file in part.files if file.path not in gone)]
        if stamp:
            part.stamp = str(draft.next_number)
        if not part.files:
            del manifest.parts[day]
        draft.put(manifest)


def _known(name: str) -> LakeTable:
    if name not in TABLES:
        raise Invalid(f"a lake has no table {name!r}; it has {', '.join(TABLES)}")
    return TABLES[name]


def _chosen(manifest: Manifest, days: Iterable[date] | None) -> list[File]:
    if days is None:
        return manifest.files
    wanted = sorted({day.isoformat() for day in days})
    return [file for day in wanted if day in manifest.parts for file in manifest.parts[day].files]
