"""omniq: a job queue that is embedded in your script, durable by default."""

from omniq._version import __version__
from omniq.config import Settings, load_settings
from omniq.context import TaskCancelled, TaskContext, current_task
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
from omniq.middleware import Middleware
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
