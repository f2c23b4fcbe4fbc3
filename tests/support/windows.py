"""Runs a program as if this were Windows: without the modules, functions and signals that only Unix has.

    python windows.py program.py ARGUMENTS…        or        python windows.py -m module ARGUMENTS…

It cannot show what Windows does otherwise, only that nothing asks for what Windows has not.
"""

from __future__ import annotations

import asyncio
import asyncio.unix_events
import ctypes
import logging.handlers
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import uuid
import zoneinfo
from typing import Any

MODULES = ("asyncinotify", "curses", "fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty", "uvloop")
OF_OS = (
    *("fork", "forkpty", "register_at_fork", "getuid", "geteuid", "getgid", "setsid", "killpg", "getpgid", "wait3"),
    *("O_NOFOLLOW", "O_CLOEXEC", "O_DIRECTORY", "O_NONBLOCK", "O_SYNC", "pread", "pwrite", "fdatasync", "fchmod", "fchown"),
    *("sysconf", "uname", "statvfs", "fstatvfs", "mkfifo", "posix_fallocate", "sched_getaffinity", "getloadavg", "WNOHANG"),
)
OF_SIGNAL = ("SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH")
# Imported before anything is hidden: the standard library asks for some of it.
BEFORE = (asyncio, ctypes, logging.handlers, multiprocessing, shutil, signal, socket, ssl, subprocess, tempfile, uuid, zoneinfo)


def no_signal_handlers(*words: Any) -> None:
    raise NotImplementedError  # as asyncio's loops on Windows


def pretend() -> None:
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for module, names in ((os, OF_OS), (signal, OF_SIGNAL)):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    loop: Any = asyncio.unix_events.SelectorEventLoop
    loop.add_signal_handler = loop.remove_signal_handler = no_signal_handlers


if __name__ == "__main__":
    pretend()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
