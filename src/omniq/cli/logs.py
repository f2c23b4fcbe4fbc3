"""Log lines of the commands: plain, or one JSON object per line. The library itself adds no handler.

A record is one line, whatever names and messages it carries; only a traceback follows it, in lines that are indented.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from omniq.cli.escapes import escape, escape_json, indented

_FIELDS = {"task_id": "task_id", "queue": "queue", "task_name": "name", "attempt": "attempt", "worker": "worker"}


class JsonFormatter(logging.Formatter):
    """ts (RFC 3339, UTC), level, logger, msg, and task_id, queue, name, attempt, worker where there are any."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "msg": record.getMessage(),
        }
        for attribute, name in _FIELDS.items():
            value = getattr(record, attribute, None)
            if value is not None:
                line[name] = value
        if record.exc_info:
            line["exc"] = self.formatException(record.exc_info)
        return escape_json(json.dumps(line, ensure_ascii=False, default=str))


class PlainFormatter(logging.Formatter):
    """Time, level, message and the task's id in brackets; a traceback below, indented."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname:<7} {record.getMessage()}"
        task_id = getattr(record, "task_id", None)
        lines = [escape(f"{text} [{task_id}]" if task_id else text)]
        if record.exc_info:
            lines += indented(self.formatException(record.exc_info))
        if record.stack_info:
            lines += indented(record.stack_info)
        return "\n".join(lines)


@contextmanager
def log_lines(level: str | None) -> Generator[None, None, None]:
    """One handler on stderr for the logger `omniq`; `OMNIQ_LOG_FORMAT=json` chooses the form. Afterwards all is as before."""
    handler = logging.StreamHandler(sys.stderr)
    as_json = os.environ.get("OMNIQ_LOG_FORMAT", "").lower() == "json"
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter())
    logger = logging.getLogger("omniq")
    # A program that runs a command in itself, such as a test, gets its own handlers back.
    before = logger.handlers[:], logger.propagate, logger.level
    # A handler of the root logger, which a task's module may have set up, would show each line twice.
    logger.handlers[:], logger.propagate = [handler], False
    logger.setLevel(level or "INFO")
    try:
        yield
    finally:
        logger.handlers[:], logger.propagate, _ = before
        logger.setLevel(before[2])
