"""Settings: in code, or from the `OMNIQ_…` environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from omniq.backoff import Backoff
from omniq.errors import ConfigError
from omniq.models import DEFAULT_QUEUE, check_queue
from omniq.operations import Retention
from omniq.storage.url import OWN, backend_of, driver_of, file_url, mask, scheme_of, schemes, sqlite_url

SerializerName = Literal["msgspec", "cloudpickle"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]

DAY_S = 86_400


class Settings(msgspec.Struct, kw_only=True, frozen=True):
    """How an `AsyncOmniQ` or `OmniQ` works. Every field has a default: SQLite in `omniq.db` of the working folder."""

    backend: str = "sqlite"
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
        # Our own are known without the metadata of all packages that are installed, which is slow to read.
        if self.backend not in OWN:
            _one_of("backend", self.backend, sorted(schemes()))
        _one_of("serializer", self.serializer, get_args(SerializerName))
        if self.log_level is not None:
            _one_of("log_level", self.log_level, get_args(LogLevel))
        for name in ("lease", "backoff_base", "events_max_age", "dead_letter_ttl", "group_limit_ttl", "idempotency_ttl"):
            _check_number(name, getattr(self, name))
        for name in ("default_max_retries", "result_ttl_seconds", "grace", "events_max_count", "unknown_function_s"):
            _check_number(name, getattr(self, name), may_be_0=True)
        if self.default_timeout is not None:
            _check_number("default_timeout", self.default_timeout)
        for name in ("default_max_retries", "events_max_count"):
            if not isinstance(getattr(self, name), int):
                raise ConfigError(f"{name} must be a whole number, not {getattr(self, name)!r}")
        check_queue(self.default_queue)

    def __repr__(self) -> str:
        # Settings get into logs, and a URL may have a password.
        shown = self if self.database_url is None else msgspec.structs.replace(self, database_url=mask(self.database_url))
        return super(Settings, shown).__repr__()

    @property
    def url(self) -> str:
        """The storage URL that follows from these settings."""
        # Memory is nowhere: there is nothing that a URL could add to the name of the backend.
        given = None if self.backend == "memory" else self.database_url
        scheme = scheme_of(given or "")
        if self.backend == "file" and scheme != "file" and self.base_dir:
            return file_url(os.path.abspath(self.base_dir))
        if given is None:
            return self._default_url()
        if scheme and backend_of(given) == backend_of(f"{self.backend}:"):
            return given
        if scheme or self.backend != "sqlite":
            raise ConfigError(
                f"backend {self.backend!r} cannot open {mask(given)!r}: give a URL that begins with {self.backend}:"
            )
        return sqlite_url(given)

    def _default_url(self) -> str:
        url: str = getattr(driver_of(f"{self.backend}:"), "default_url", "")
        if not url:
            raise ConfigError(f"backend {self.backend!r} needs database_url (OMNIQ_DB_URL), which begins with {self.backend}:")
        return url

    @property
    def backoff(self) -> str:
        """The retry policy that tasks carry, as text. The default is an empty text."""
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
                # Each value alone at first, so that an error names its variable.
                Settings(**{field: values[field]})
            except ValueError as exc:
                raise ConfigError(f"{variable}={text!r}: {exc}") from exc
    named = values.keys() & {"backend", "database_url"}
    try:
        if "backend" not in values:
            values["backend"] = _backend_of(values)
        settings = Settings(**values)
        if named:  # else there is nothing to refuse, and the default driver is imported by whoever opens it
            _ = settings.url
    except ConfigError as exc:
        raise ConfigError(f"OMNIQ_DB_URL, OMNIQ_BACKEND: {exc}") from exc
    return settings


def _backend_of(values: Mapping[str, Any]) -> str:
    """Returns the backend that the other variables name."""
    url = values.get("database_url")
    if url is None:
        return "file" if "base_dir" in values else "sqlite"
    return backend_of(url) if scheme_of(url) else "sqlite"


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


def _one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def _check_number(name: str, value: Any, *, may_be_0: bool = False) -> None:
    # Neither infinity nor NaN is less than infinity.
    if isinstance(value, bool) or not isinstance(value, int | float) or not value < float("inf"):
        raise ConfigError(f"{name} must be a number, not {value!r}")
    if value < 0 or (value == 0 and not may_be_0):
        raise ConfigError(f"{name} must be {'at least' if may_be_0 else 'more than'} 0, not {value!r}")
