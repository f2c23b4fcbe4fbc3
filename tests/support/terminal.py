"""A program in a pseudo-terminal, and the screen that a person would see."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import pyte

from support.forks import Python


class Terminal:
    """Runs a command on a terminal of its own; `screen()` is what it shows now."""

    def __init__(
        self, arguments: list[str], folder: Path, environment: Mapping[str, str], columns: int = 120, lines: int = 40
    ) -> None:
        self._emulated = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._emulated)
        self.raw = b""
        self._end, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        inherited = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
        env = {**inherited, "TERM": "xterm-256color"}
        self.process = Python(
            arguments,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            cwd=folder,
            env=env,
            start_new_session=True,
        )
        os.close(inner)

    def _read(self, seconds: float) -> bool:
        """Take in what the program wrote; False when nobody has the terminal any more."""
        ready, _, _ = select.select([self._end], [], [], seconds)
        if not ready:
            return True
        try:
            data = os.read(self._end, 65536)
        except OSError:
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)

    def screen(self) -> str:
        return "\n".join(line.rstrip() for line in self._emulated.display)

    def until(self, text: str, seconds: float = 20.0) -> str:
        """The screen, as soon as this text is on it."""
        end = time.monotonic() + seconds
        while text not in self.screen():
            alive = self._read(0.02)
            assert alive or text in self.screen(), f"it ended without {text!r}:\n{self.screen()}"
            assert time.monotonic() < end, f"no {text!r} on\n{self.screen()}"
        return self.screen()

    def is_silent(self, seconds: float) -> bool:
        """Whether the program writes nothing for so long."""
        before = len(self.raw)
        return self._read(seconds) and len(self.raw) == before

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        self._emulated.resize(lines, columns)
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process.send_signal(signal.SIGWINCH)

    def ended(self, seconds: float = 20.0) -> int:
        """The exit code, once the program has ended."""
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            self._read(0.02)
            assert time.monotonic() < end, f"it has not ended:\n{self.screen()}"
        while self._read(0):
            if not select.select([self._end], [], [], 0)[0]:
                break
        return self.process.returncode

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            os.close(self._end)
