"""From options to operations: the form that settings, a function and its options give a task, before its arguments."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET

from omniq.backoff import Backoff, parse_backoff
from omniq.config import Settings
from omniq.errors import ConfigError, Invalid
from omniq.models import MAX_COUNT, Blocker, check_count, check_id, check_queue, check_text, duration_us, to_us
from omniq.operations import Enqueue
from omniq.tasks import Callee, Options


def plain_form(settings: Settings) -> Enqueue:
    """Returns the form that the settings give every task."""
    timeout = settings.default_timeout
    return Enqueue(
        id="",
        name="",
        queue=settings.default_queue,
        timeout_us=None if timeout is None else duration_us(timeout, "timeout"),
        lease_us=duration_us(settings.lease, "lease"),
        result_ttl_us=duration_us(settings.result_ttl_seconds, "result_ttl", zero=True),
        max_attempts=1 + settings.default_max_retries,
        backoff=settings.backoff,
        key_ttl_us=duration_us(settings.idempotency_ttl, "idempotency_ttl"),
    )


def form_of(func: Callee, options: Options, plain: Enqueue) -> Enqueue:
    """Returns the form of all calls of a function with these options. Its id is empty, unless they name one.

    Raises `Invalid` or another error of omniq for an option that no task could have.
    """
    asked = options.over(func.options)
    given: dict[str, Any] = {}
    for option, read in _READERS.items():
        value = getattr(asked, option)
        if value is not UNSET:
            given |= read(value)
    form = msgspec.structs.replace(plain, name=func.name, **given)
    if options.group_limit is not UNSET and form.group is None:
        raise Invalid(f"group_limit={options.group_limit!r} without a group: give group=… as well")
    return form


def _eta(eta: Any) -> dict[str, Any]:
    """A timedelta is a delay on the store's clock."""
    if eta is None:
        return {"eta_us": None, "delay_us": None}
    if isinstance(eta, timedelta):
        return {"eta_us": None, "delay_us": duration_us(eta, "eta", zero=True)}
    if not isinstance(eta, datetime):
        raise Invalid(f"eta must be a datetime with a time zone or a timedelta, not {eta!r}")
    return {"eta_us": to_us(eta), "delay_us": None}


def _duration(what: str, value: Any, *, zero: bool = False) -> dict[str, Any]:
    return {f"{what}_us": None if value is None else duration_us(value, what, zero=zero)}


def _whole(what: str, value: Any, least: int) -> int:
    if type(value) is not int or value < least:
        raise Invalid(f"{what} must be a whole number of at least {least}, not {value!r}")
    # Attempts are one more than retries, and must fit as well.
    check_count(value, what, least, MAX_COUNT - 1)
    return value


def _queue(name: Any) -> dict[str, Any]:
    check_queue(name)
    return {"queue": name}


def _key(key: Any) -> dict[str, Any]:
    if key is not None:
        check_text(key, "idempotency_key")
    return {"idempotency_key": key}


def _blockers(ids: Any) -> dict[str, Any]:
    if isinstance(ids, str):
        raise Invalid(f"blocked_by is a list of task ids, not the text {ids!r}")
    for blocker in ids:
        check_id(blocker)
    return {"blocked_by": tuple(Blocker(i) for i in ids)}


def _backoff(text: Any) -> dict[str, Any]:
    if not isinstance(text, str):
        raise ConfigError(f"backoff is text like {Backoff()!s}, not {text!r}")
    parse_backoff(text)
    return {"backoff": text}


def _headers(headers: Any) -> dict[str, Any]:
    try:
        return {"headers": None if headers is None else msgspec.convert(headers, dict[str, str])}
    except msgspec.ValidationError as exc:
        raise Invalid(f"headers are a dict of text to text, not {headers!r}") from exc


def _task_id(task_id: Any) -> dict[str, Any]:
    if task_id is not None:
        check_id(task_id)
    return {"id": task_id or ""}


_interval = partial(_duration, "interval")

# How the value of each option becomes fields of an `Enqueue`, in the order in which nonsense is complained of. The last wins.
_READERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "eta": _eta,
    "interval": _interval,
    "schedule": lambda schedule: {**_eta(schedule.eta), **_interval(schedule.interval)},
    "queue": _queue,
    "idempotency_key": _key,
    "backoff": _backoff,
    "headers": _headers,
    "timeout": partial(_duration, "timeout"),
    "lease": partial(_duration, "lease"),
    "result_ttl": partial(_duration, "result_ttl", zero=True),
    "max_retries": lambda retries: {"max_attempts": 1 + _whole("max_retries", retries, 0)},
    "group": lambda group: {"group": group},
    "group_limit": lambda limit: {"group_limit": _whole("group_limit", limit, 1)},
    "dead_queue": lambda queue: {"dead_queue": queue},
    "blocked_by": _blockers,
    "task_id": _task_id,
}
