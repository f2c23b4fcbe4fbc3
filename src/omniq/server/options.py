"""How a server works: every option of `omniq serve`, checked."""

from __future__ import annotations

import ipaddress
from typing import Any

import msgspec

from omniq.backoff import Backoff, parse_backoff
from omniq.durations import parse_duration
from omniq.errors import ConfigError, Invalid

# Retry n waits n⁴ seconds, at most ten years; exactly so, without jitter.
QUARTIC = Backoff(kind="quartic", base_ms=1000, max_ms=10 * 365 * 86_400_000, jitter=0)


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Durations are in seconds, sizes in bytes. A value that makes no sense is a `ConfigError`."""

    host: str = "127.0.0.1"
    port: int = 12345
    heartbeat: float = 45.0
    grace: float = 25.0
    backoff: str = str(QUARTIC)
    max_payload: int = 65_535
    max_line: int = 1_048_576
    max_transaction: int = 10_000
    max_transaction_bytes: int = 16_777_216
    max_connections: int = 15_000
    max_held: int = 10_000
    token: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    insecure: bool = False
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None

    def __post_init__(self) -> None:
        for name in ("port", "metrics_port"):
            number = getattr(self, name)
            if number is not None and not 0 <= number <= 65_535:
                raise ConfigError(f"{name} must be a port from 0 to 65535, not {number}")
        if not 0.001 <= self.heartbeat <= 86_400:
            raise ConfigError(f"heartbeat must be from 1ms to 24h, not {self.heartbeat:g} s")
        if not 0 <= self.grace <= 86_400:
            raise ConfigError(f"grace must be from 0s to 24h, not {self.grace:g} s")
        for name in _LIMITS:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_line < self.max_payload + 4096:
            raise ConfigError(f"max_line must be at least max_payload + 4096 ({self.max_payload + 4096}), not {self.max_line}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key belong together: give both or none")
        if self.token == "":
            raise ConfigError("the token is empty: put a secret of some length into the token file")
        parse_backoff(self.backoff)
        if not self.insecure and not _is_loopback(self.host) and (self.token is None or self.tls_cert is None):
            raise ConfigError(
                f"listening on {self.host}, which others can reach, needs a token file and a TLS certificate with its key "
                "(--token-file, --tls-cert, --tls-key), or --insecure"
            )
        if not self.insecure and self.metrics_port is not None and not _is_loopback(self.metrics_host):
            raise ConfigError(
                f"metrics on {self.metrics_host}, which others can reach, need --insecure: they are served without a token "
                "and TLS, and tell the names of the queues and how much is in them"
            )

    @property
    def heartbeat_ns(self) -> int:
        return round(self.heartbeat * 1e9)


_LIMITS = ("max_payload", "max_line", "max_transaction", "max_transaction_bytes", "max_connections", "max_held")
DURATIONS = ("heartbeat", "grace")


def make_options(**given: Any) -> ServeOptions:
    """Make options of texts and numbers, as a command line or an environment has them. None stands for the default."""
    values = {name: value for name, value in given.items() if value is not None}
    for name in DURATIONS:
        if isinstance(values.get(name), str):
            try:
                values[name] = parse_duration(values[name]) / 1e9
            except Invalid as exc:
                raise ConfigError(f"{name}: {exc}") from exc
    return ServeOptions(**values)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
