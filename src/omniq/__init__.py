"""omniq: a job queue that is embedded in your script, durable by default.

Names are imported when they are first used, so that a program pays only for what it uses.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from omniq._version import __version__

# For editors and type checkers, which see nothing of `__getattr__`.
if TYPE_CHECKING:
    from omniq.config import Settings, load_settings
    from omniq.context import Middleware, TaskCancelled, TaskContext, current_task
    from omniq.core import AsyncOmniQ, OmniQ
    from omniq.errors import (
        ConfigError,
        DriverClosed,
        DuplicateId,
        IdempotencyConflict,
        Invalid,
        LeaseExpired,
        NotActive,
        OmniQError,
        OutcomeUnknown,
        Refused,
        Retry,
        SerializationError,
        StoreError,
        StoreFull,
        StoreUnavailable,
        TaskNotFound,
        TokenMismatch,
        Unrecoverable,
    )
    from omniq.models import Event, Schedule, State, Task, TaskError, TaskResult, TaskStatus
    from omniq.operations import Filter, QueueCounts
    from omniq.queue import AsyncTaskQueue
    from omniq.serialization import CloudpickleSerializer, MsgspecSerializer, Serializer
    from omniq.storage.base import BaseStorage
    from omniq.storage.file import FileStorage
    from omniq.storage.memory import MemoryStorage
    from omniq.storage.redis import RedisStorage
    from omniq.storage.sqlite import SQLiteStorage
    from omniq.tasks import TaskFunction, handler, task
    from omniq.worker import AsyncWorkerPool, WorkerPool

_PLACES = {
    "omniq.config": "Settings load_settings",
    "omniq.context": "Middleware TaskCancelled TaskContext current_task",
    "omniq.core": "AsyncOmniQ OmniQ",
    "omniq.errors": (
        "ConfigError DriverClosed DuplicateId IdempotencyConflict Invalid LeaseExpired NotActive OmniQError "
        "OutcomeUnknown Refused Retry SerializationError StoreError StoreFull StoreUnavailable TaskNotFound "
        "TokenMismatch Unrecoverable"
    ),
    "omniq.models": "Event Schedule State Task TaskError TaskResult TaskStatus",
    "omniq.operations": "Filter QueueCounts",
    "omniq.queue": "AsyncTaskQueue",
    "omniq.serialization": "CloudpickleSerializer MsgspecSerializer Serializer",
    "omniq.storage.base": "BaseStorage",
    "omniq.storage.file": "FileStorage",
    "omniq.storage.memory": "MemoryStorage",
    "omniq.storage.redis": "RedisStorage",
    "omniq.storage.sqlite": "SQLiteStorage",
    "omniq.tasks": "TaskFunction handler task",
    "omniq.worker": "AsyncWorkerPool WorkerPool",
}
_HOME = {name: module for module, names in _PLACES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'omniq' has no attribute {name!r}")
    # Kept, so that Python finds it here the next time.
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


__all__ = [
    "AsyncOmniQ",
    "AsyncTaskQueue",
    "AsyncWorkerPool",
    "BaseStorage",
    "CloudpickleSerializer",
    "ConfigError",
    "DriverClosed",
    "DuplicateId",
    "Event",
    "FileStorage",
    "Filter",
    "IdempotencyConflict",
    "Invalid",
    "LeaseExpired",
    "MemoryStorage",
    "Middleware",
    "MsgspecSerializer",
    "NotActive",
    "OmniQ",
    "OmniQError",
    "OutcomeUnknown",
    "QueueCounts",
    "RedisStorage",
    "Refused",
    "Retry",
    "SQLiteStorage",
    "Schedule",
    "SerializationError",
    "Serializer",
    "Settings",
    "State",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "Task",
    "TaskCancelled",
    "TaskContext",
    "TaskError",
    "TaskFunction",
    "TaskNotFound",
    "TaskResult",
    "TaskStatus",
    "TokenMismatch",
    "Unrecoverable",
    "WorkerPool",
    "__version__",
    "current_task",
    "handler",
    "load_settings",
    "task",
]
