"""Pythons that start in milliseconds: forks of one process that has imported omniq and its commands already.

Each is a real process, with a pid, signals, streams, an environment and an exit code of its own. What a fork cannot show is how
long the interpreter and the imports take, and which modules a command imports: `tests/cli/test_start.py` starts real ones.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

POSSIBLE = hasattr(os, "pidfd_open")  # Linux
REQUEST_BYTES = 150_000  # what one packet carries
LOCALE = ("LANG", "LC_ALL", "LC_CTYPE")  # an interpreter reads them once, at its start
FRESH = ("windows.py",)  # it hides modules, which here are imported already
# The first is none of the interpreter's: make and .ci/run name it so.
UNDERSTOOD = ("PYTHON", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")


_forks: dict[int, Python] = {}


class Python(subprocess.Popen[Any]):
    """`subprocess.Popen` for `[sys.executable, …]`. What cannot be a fork is started as usual."""

    _address: str | None = None
    _report: socket.socket | None = None

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *more: Any) -> None:
        pass_fds, cwd, env = more[:3]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = more[6:12]
        new_session = more[-2]
        request = _request(args, cwd, env, new_session)
        if request is None or executable or preexec_fn or pass_fds:
            first = preexec_fn or (_take_terminal if new_session else None)
            super()._execute_child(args, executable, first, close_fds, *more)  # type: ignore[misc]
            return
        self._report = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._report.connect(_server())
        streams = [own if fd == -1 else fd for own, fd in enumerate((p2cread, c2pwrite, errwrite))]
        socket.send_fds(self._report, [request], streams)
        self.pid = int(self._report.recv(64))
        self._child_created = True
        _forks[self.pid] = self
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, *more: Any, **other: Any) -> int | None:
        if self._report is None:
            return super()._internal_poll(*more, **other)  # type: ignore[misc]
        if self.returncode is None:
            self._hear(0.0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._report is None:
            return super()._wait(timeout)  # type: ignore[misc]
        if self.returncode is None and not self._hear(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        assert self.returncode is not None
        return self.returncode

    def _hear(self, timeout: float | None) -> bool:
        assert self._report is not None
        self._report.settimeout(timeout)
        try:
            self.returncode = int(self._report.recv(64))
        except (TimeoutError, BlockingIOError):
            return False
        self._report.close()
        _forks.pop(self.pid, None)
        return True


def running() -> set[int]:
    """Forks that have not ended: they are no children of this process."""
    return {pid for pid, fork in list(_forks.items()) if fork.poll() is None}


def run(
    args: list[str], input: str = "", cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with text in and out."""
    pipe = subprocess.PIPE
    with Python(args, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=cwd, env=env) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def _request(args: Any, cwd: Any, env: Mapping[str, str] | None, new_session: bool) -> bytes | None:
    """What the server is to do; None for what only a fresh interpreter can."""
    words = [os.fspath(word) for word in args] if isinstance(args, list) else []
    env = dict(os.environ if env is None else env)
    odd = any(name.startswith("PYTHON") and name not in UNDERSTOOD for name in env)
    if not POSSIBLE or odd or len(words) < 2 or words[0] != sys.executable:
        return None
    if any(env.get(name) != os.environ.get(name) for name in LOCALE):
        return None
    if any((Path(entry) / "sitecustomize.py").exists() for entry in _entries(env)):
        return None
    if os.path.basename(words[1]) in FRESH or (words[1].startswith("-") and words[1] not in ("-m", "-c")):
        return None
    try:
        request = json.dumps([words[1:], os.fspath(cwd or os.getcwd()), env, bool(new_session)]).encode()
        "".join(words).encode()
    except UnicodeEncodeError:
        return None
    return request if len(request) < REQUEST_BYTES else None


def _server() -> str:
    """Where the server of this process listens. It is started once, and ends when nobody holds the pipe any more."""
    if Python._address is None:
        address = str(Path(tempfile.mkdtemp(prefix="omniq-forks-")) / "socket")
        alive, _ = os.pipe()
        subprocess.run([sys.executable, __file__, address, str(alive)], pass_fds=[alive], check=True)
        os.close(alive)
        Python._address = address
    return Python._address


# -- the server ------------------------------------------------------------------------------------


def serve(address: str, alive: int) -> list[str]:
    """Return only in a fork, with the words that its interpreter was given."""
    _import_omniq()
    _build_commands()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    if os.fork():  # the server is nobody's child, so that no test takes it for something left behind
        os._exit(0)
    os.setsid()
    gc.freeze()
    path = [entry for entry in sys.path[1:] if entry not in _entries(os.environ)]
    waiting = selectors.DefaultSelector()
    waiting.register(alive, selectors.EVENT_READ)
    waiting.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fd == alive:
                os.unlink(address)
                os.rmdir(os.path.dirname(address))
                os._exit(0)
            if key.fileobj is not listener:
                pid, report = key.data
                waiting.unregister(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError), report:
                    report.send(str(code).encode())
                continue
            report, _ = listener.accept()
            request, streams, _, _ = socket.recv_fds(report, REQUEST_BYTES, 3)
            if not request:
                report.close()
                continue
            pid = os.fork()
            if not pid:
                for key in list(waiting.get_map().values()):
                    if key.data:
                        key.data[1].close()
                    os.close(key.fd)
                waiting.close()
                listener.detach()
                report.close()
                return _become(json.loads(request), streams, path)
            for fd in streams:
                os.close(fd)
            waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, report))
            report.send(str(pid).encode())


def _import_omniq() -> None:
    """All but what needs Spark, and the tools for tests."""
    import omniq

    for module in pkgutil.walk_packages(omniq.__path__, "omniq.", onerror=lambda name: None):
        if not module.name.startswith(("omniq.spark", "omniq.testing", "omniq.__main__")):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    for name in (
        "asyncinotify",
        "ctypes.util",
        "rich.table",
        "rich.live",
        "rich.progress",
        "redis.asyncio",
        "uvloop",
        "watchfiles",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _build_commands() -> None:
    """Typer makes every command from its signature at each start, and imports half of itself for the first: together that is
    most of what a short command computes."""
    from typer import main, testing

    from omniq.cli.app import app

    main.get_command = functools.cache(main.get_command)
    main.get_command(app)
    testing.CliRunner().invoke(app, ["queues", "--help"])


def _become(request: Any, streams: list[int], path: list[str]) -> list[str]:
    words, folder, environment, new_session = request
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    if new_session:
        os.setsid()
        _take_terminal()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)  # as in every Python
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=bool(environment.get("PYTHONUNBUFFERED")))
    sys.stderr = open(2, "w", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    first = "" if words[0] in ("-m", "-c") else os.path.dirname(os.path.abspath(words[0]))
    sys.path[:] = [os.getcwd() if words[0] == "-m" else first, *_entries(environment), *path]
    importlib.invalidate_caches()
    return words


def _take_terminal() -> None:
    """Make the terminal of a new session its own, so that Ctrl-C is a signal."""
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _entries(environment: Mapping[str, str]) -> list[str]:
    return [os.path.abspath(entry) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _run(words: list[str]) -> None:
    """What `python WORDS` does, in a fresh `__main__`."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        code = compile(words[1], "<string>", "exec")
    else:
        sys.argv = words
        main.__file__ = words[0]
        code = compile(Path(words[0]).read_bytes(), words[0], "exec")
    exec(code, main.__dict__)  # noqa: S102


def _end(code: int) -> None:
    """End as an interpreter does, but for taking all modules down, which takes longer than all of the rest."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        _run(serve(sys.argv[1], int(sys.argv[2])))
        _end(0)
    except SystemExit as exc:
        if exc.code is None or isinstance(exc.code, int):
            _end((exc.code or 0) & 0xFF)
        raise
