"""The work of `omniq spark enqueue`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import omniq.spark
from omniq.cli.modules import import_modules
from omniq.cli.parsing import names, seconds
from omniq.cli.spark.options import RowOptions, SessionOptions
from omniq.cli.stores import settings_and_url
from omniq.spark.causes import reported
from omniq.spark.writing.files import read_rows
from omniq.spark.writing.writing import arguments

if TYPE_CHECKING:
    from omniq.spark import EnqueueReport


def enqueue_file(rows: RowOptions, session: SessionOptions, store: str | None) -> EnqueueReport:
    """Enqueue a task per row."""
    import_modules(rows.imports or ())
    given: dict[str, Any] = {
        "queue": rows.queue,
        "group": rows.group,
        "eta": rows.eta,
        "max_retries": rows.retries,
        "timeout": None if rows.timeout is None else seconds(rows.timeout),
        "run_id": rows.run_id,
        "on_conflict": "error" if rows.strict else "skip",
    }
    # What was not given is up to the function.
    given = {name: value for name, value in given.items() if value is not None}
    args = arguments(rows.args, "--args")
    _, url = settings_and_url(store)
    with reported():
        frame = read_rows(session.start(), rows.file, rows.schema)
        key = names(rows.key) or ""
        return omniq.spark.enqueue(
            frame, url, rows.func, key=key, args=args, group_limit=rows.group_limit, dedupe=rows.dedupe, **given
        )
