"""The work of `omniq spark enqueue`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import omniq.spark
from omniq.cli.modules import import_modules
from omniq.cli.parsing import names, seconds
from omniq.cli.stores import settings_and_url
from omniq.spark.causes import reported
from omniq.spark.writing.files import read_rows
from omniq.spark.writing.writing import arguments

if TYPE_CHECKING:
    from omniq.spark import EnqueueReport


def enqueue_file(
    file: str,
    func: str,
    *,
    key: str,
    args: str,
    schema: str | None,
    imports: Sequence[str],
    store: str | None,
    session: Mapping[str, Any],
    options: Mapping[str, Any],
) -> EnqueueReport:
    """Enqueue a task per row in a session with these settings; options that are None are left out."""
    import_modules(imports)
    given = {name: value for name, value in options.items() if value is not None}
    if "timeout" in given:
        given["timeout"] = seconds(given["timeout"])
    columns = arguments(args, "--args")
    _, url = settings_and_url(store)
    with reported():
        spark = omniq.spark.session(fast_start=True, **session)
        return omniq.spark.enqueue(read_rows(spark, file, schema), url, func, key=names(key) or "", args=columns, **given)
