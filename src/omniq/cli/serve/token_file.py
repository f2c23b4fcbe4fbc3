"""The file that holds the token of `omniq serve` and `omniq send`."""

from __future__ import annotations

from pathlib import Path

from omniq.cli.exits import say
from omniq.errors import ConfigError
from omniq.server.secret_files import readable_by_others


def read_token(path: str) -> str:
    """The first line of a file, without blanks around it. Warns when other users can read it, too."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"the token file {path} cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc
    if warning := readable_by_others(path, "token file"):
        say(f"warning: {warning}")
    token = text.strip().partition("\n")[0].strip()
    if not token:
        raise ConfigError(f"the token file {path} is empty: put a secret of some length into it")
    return token
