"""Settings: in code, or from the `OMNIQ_…` environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast, get_args
from urllib.parse import quote

import msgspec

from omniq.errors import ConfigError
from omniq.models import DEFAULT_QUEUE, check_queue
from omniq.operations import Retention
from omniq.policy import Backoff
from omniq.storage.url import mask, sqlite_url

Backend = Literal["memory", "file", "sqlite", "redis"]
SerializerName = Literal["msgspec", "cloudpickle"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]

DAY_S = 86_400


class Settings(msgspec.Struct, kw_only=True, frozen=True):
    """How an `AsyncOmniQ` or `OmniQ` works. Every field has a default: SQLite in `omniq.db` of the working folder."""

    backend: Backend = "sqlite"
    database_url: str | None = None
    base_dir: str | None = None
    default_timeout: float | None = 300.0
    default_max_retries: int = 3
    result_ttl_seconds: float = DAY_S
    serializer: SerializerName = "msgspec"
    default_queue: str = DEFAULT_QUEUE
    lease: float = 30.0
    grace: float = 25.0
    backoff_base: float = 1.0
    events: bool = True
    events_max_age: float = 7 * DAY_S
    events_max_count: int = 1_000_000
    dead_letter_ttl: float = 30 * DAY_S
    group_limit_ttl: float = 30 * DAY_S
    idempotency_ttl: float = DAY_S
    unknown_function_s: float = 3600.0
    log_level: LogLevel | None = None

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, get_args(Backend))
        _one_of("serializer", self.serializer, get_args(SerializerName))
        if self.log_level is not None:
            _one_of("log_level", self.log_level, get_args(LogLevel))
        for name in ("lease", "backoff_base", "events_max_age", "dead_letter_ttl", "group_limit_ttl", "idempotency_ttl"):
            _at_least(name, getattr(self, name), 0, strict=True)
        for name in ("default_max_retries", "result_ttl_seconds", "grace", "events_max_count", "unknown_function_s"):
            _at_least(name, getattr(self, name), 0)
        if self.default_timeout is not None:
            _at_least("default_timeout", self.default_timeout, 0, strict=True)
        for name in ("default_max_retries", "events_max_count"):
            if not isinstance(getattr(self, name), int):
                raise ConfigError(f"{name} must be a whole number, not {getattr(self, name)!r}")
        check_queue(self.default_queue)

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        if self.database_url is not None:
            shown["database_url"] = mask(self.database_url)
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def url(self) -> str:
        """The storage URL that these settings resolve to."""
        if self.backend == "memory":
            return "memory://"
        target = self.database_url
        if self.backend == "file":
            if target is not None and target.startswith("file:"):
                return target
            if target is not None and self.base_dir is None:
                raise ConfigError(f"backend 'file' cannot open {mask(target)!r}: give base_dir (OMNIQ_BASE_DIR) or a file: URL")
            return "file://" + quote(os.path.abspath(self.base_dir or "omniq-data"))
        if self.backend == "redis":
            if target is None or not target.startswith(("redis:", "rediss:")):
                raise ConfigError("backend 'redis' needs database_url (OMNIQ_DB_URL) like redis://host:6379/0")
            return target
        if target is None:
            return "sqlite:///omniq.db"
        if target.startswith("sqlite:"):
            return target
        if ":" in target.split("/")[0] and target != ":memory:":
            raise ConfigError(f"backend 'sqlite' cannot open {mask(target)!r}: use sqlite:///path.db or a path")
        return sqlite_url(target)

    @property
    def backoff(self) -> str:
        """The retry policy that tasks carry; empty for the default one."""
        policy = Backoff(base_ms=max(round(self.backoff_base * 1000), 1))
        return "" if policy == Backoff() else str(policy)

    @property
    def retention(self) -> Retention:
        return Retention(
            dead_us=round(self.dead_letter_ttl * 1e6),
            events_us=round(self.events_max_age * 1e6),
            events_max=self.events_max_count,
            limits_us=round(self.group_limit_ttl * 1e6),
        )


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from the environment. A bad value is a `ConfigError` that names its variable."""
    env = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for variable, (field, read) in _VARIABLES.items():
        text = env.get(variable, "").strip()
        if text:
            try:
                values[field] = read(text)
                Settings(**{field: values[field]})
            except ValueError as exc:
                raise ConfigError(f"{variable}={text!r}: {exc}") from exc
    if "backend" not in values:
        values["backend"] = _backend_of(values)
    settings = Settings(**values)
    try:
        _ = settings.url
    except ConfigError as exc:
        raise ConfigError(f"OMNIQ_DB_URL, OMNIQ_BACKEND: {exc}") from exc
    return settings


def _backend_of(values: dict[str, Any]) -> str:
    url = values.get("database_url")
    if url is None:
        return "file" if "base_dir" in values else "sqlite"
    scheme = url.split(":", 1)[0] if "://" in url or url.startswith(("sqlite:", "memory:", "file:")) else "sqlite"
    known = {"sqlite": "sqlite", "memory": "memory", "file": "file", "redis": "redis", "rediss": "redis"}
    if scheme not in known:
        raise ConfigError(f"OMNIQ_DB_URL={mask(url)!r}: unknown scheme {scheme!r}; use sqlite:///path.db")
    return known[scheme]


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError("give a number of seconds") from None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError("give a whole number") from None


_VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "OMNIQ_BACKEND": ("backend", str.lower),
    "OMNIQ_DB_URL": ("database_url", str),
    "OMNIQ_BASE_DIR": ("base_dir", str),
    "OMNIQ_DEFAULT_TIMEOUT": ("default_timeout", _seconds),
    "OMNIQ_DEFAULT_MAX_RETRIES": ("default_max_retries", _whole),
    "OMNIQ_RESULT_TTL": ("result_ttl_seconds", _seconds),
    "OMNIQ_EVENTS_MAX_AGE": ("events_max_age", _seconds),
    "OMNIQ_EVENTS_MAX_COUNT": ("events_max_count", _whole),
    "OMNIQ_UNKNOWN_FUNCTION_S": ("unknown_function_s", _seconds),
    "OMNIQ_SERIALIZER": ("serializer", str.lower),
    "OMNIQ_LOG_LEVEL": ("log_level", str.upper),
}


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def _at_least(name: str, value: object, low: float, *, strict: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value < float("inf"):
        raise ConfigError(f"{name} must be a number, not {value!r}")
    if value < low or (strict and value == low):
        raise ConfigError(f"{name} must be {'more than' if strict else 'at least'} {low}, not {cast(float, value)!r}")
