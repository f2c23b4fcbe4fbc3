"""The options of format `omniq` for reading, as a query gives them and as its readers use them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from omniq.errors import ConfigError, Invalid
from omniq.spark.reading.filters import conditions, moment
from omniq.spark.reading.plan import offset_of
from omniq.spark.reading.schema import names_of
from omniq.storage.scanning import BATCH
from omniq.storage.tables import Condition

READ = (
    "url",
    "path",
    "table",
    "columns",
    "where",
    "pushFilters",
    "numPartitions",
    "batchRows",
    "startingOffsets",
    "endingOffsets",
    "maxRowsPerTrigger",
    "failOnDataLoss",
)
MAX_ROWS = 100_000


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The checked options of a read; `start` and `end` are `earliest`, `latest`, the JSON of an offset, or an ISO time."""

    url: str
    table: str = "tasks"
    columns: tuple[str, ...] | None = None
    where: tuple[Condition, ...] = ()
    push_filters: bool = False
    parts: int | None = None
    batch_rows: int = BATCH
    start: str = "earliest"
    end: str = "latest"
    max_rows: int = MAX_ROWS
    fail_on_data_loss: bool = True


def read_options(given: Mapping[str, str], *, streaming: bool = False) -> ReadOptions:
    """Check the options of a read; raises `ConfigError` or `Invalid`, which name the option and its possible values."""
    options = known_options(given, READ, "reading")
    url = url_of(options)
    table = options.get("table", "tasks")
    columns = names_of(table, options.get("columns"))
    if streaming:
        if table != "events":
            raise ConfigError(f'table {table!r} is no stream; add .option("table", "events"), or use spark.read')
        if "endingOffsets" in options:
            raise ConfigError("endingOffsets is for spark.read; a stream ends with the trigger availableNow=True")
    elif table != "events":
        for name in ("startingOffsets", "endingOffsets"):
            if name in options:
                raise ConfigError(f"{name} is for the table events, not for {table!r}")
    return ReadOptions(
        url=url,
        table=table,
        columns=columns,
        where=conditions(table, options["where"]) if options.get("where", "").strip() else (),
        push_filters=choice(options, "pushFilters", ("false", "true")) == "true",
        parts=count(options, "numPartitions") if "numPartitions" in options else None,
        batch_rows=count(options, "batchRows", BATCH),
        start=_position(options, "startingOffsets", "earliest"),
        end=_position(options, "endingOffsets", "latest"),
        max_rows=count(options, "maxRowsPerTrigger", MAX_ROWS),
        fail_on_data_loss=choice(options, "failOnDataLoss", ("true", "false")) == "true",
    )


def known_options(given: Mapping[str, str], names: Sequence[str], what: str) -> dict[str, str]:
    """The options under the names in `names`, since Spark takes them in any case. Raises `ConfigError` for an unknown one."""
    known = {name.lower(): name for name in names}
    for key in given:
        if key.lower() not in known:
            near = difflib.get_close_matches(key.lower(), known, 1)
            hint = f"did you mean {known[near[0]]!r}? It has" if near else "it has"
            raise ConfigError(f"format omniq has no option {key!r} for {what}; {hint} {', '.join(names)}")
    return {known[key.lower()]: value for key, value in given.items()}


def url_of(options: Mapping[str, str]) -> str:
    # `path` is where Spark puts the argument of `load(…)`.
    url = options.get("url") or options.get("path")
    if not url:
        raise ConfigError('format omniq needs the option url, such as .option("url", "redis://127.0.0.1:6379/0")')
    return url


def count(options: Mapping[str, str], name: str, default: int = 0, *, least: int = 1) -> int:
    text = options.get(name, str(default))
    if not text.strip().isdecimal() or int(text) < least:
        raise ConfigError(f"{name} {text!r}: give a whole number of at least {least}")
    return int(text)


def choice(options: Mapping[str, str], name: str, words: Sequence[str]) -> Any:
    """The value of an option that is one of some words; the first word is the default."""
    text = options.get(name, words[0]).lower()
    if text not in words:
        raise ConfigError(f"{name} {text!r}: give {' or '.join(words)}")
    return text


def _position(options: Mapping[str, str], name: str, default: str) -> str:
    text = options.get(name, default).strip()
    if text in ("earliest", "latest"):
        return text
    # Only checked here: the offset that a time or a word stands for is looked up in the store, when the query starts.
    try:
        if text.startswith("{"):
            offset_of(text)
        else:
            moment(text)
    except Invalid as exc:
        raise ConfigError(f"{name}: {exc}") from exc
    except ValueError as exc:
        raise ConfigError(
            f"{name} {text!r}: give earliest, latest, a time such as 2026-11-16T08:00:00Z, or the JSON of an offset"
        ) from exc
    return text
