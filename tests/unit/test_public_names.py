"""The public names: what they are, where they live, and what they take."""

import importlib
import inspect
from typing import Any

import pytest

import omniq
from omniq import AsyncOmniQ, AsyncWorkerPool, OmniQ, WorkerPool
from omniq.storage import arguments

PLACES = {
    "omniq.core": ["AsyncOmniQ", "OmniQ"],
    "omniq.models": ["Task", "TaskResult", "TaskStatus", "TaskError", "Schedule", "Event"],
    "omniq.storage.base": ["BaseStorage"],
    "omniq.storage.sqlite": ["SQLiteStorage"],
    "omniq.storage.file": ["FileStorage"],
    "omniq.storage.memory": ["MemoryStorage"],
    "omniq.storage.redis": ["RedisStorage"],
    "omniq.queue": ["AsyncTaskQueue"],
    "omniq.worker": ["AsyncWorkerPool", "WorkerPool"],
    "omniq.config": ["Settings", "load_settings"],
    "omniq.serialization": ["Serializer", "MsgspecSerializer", "CloudpickleSerializer", "SerializationError"],
}


# Paths that the documentation names, or programs rely on, whatever folder the code is in.
PATHS = {
    "omniq.models": "Record State",
    "omniq.operations": "Enqueue Reserve Ack Capabilities",
    "omniq.policy": "Backoff after_failure after_loss parse_backoff",
    "omniq.storage.bulk": "open_bulk",
    "omniq.storage.ledger": "Ledger",
    "omniq.storage.machine": "Machine",
    "omniq.storage.url": "mask open_url",
    "omniq.testing": "FakeClock FaultyStorage assert_enqueued run_until_idle",
    "omniq.testing.conformance": "run tests",
}


@pytest.mark.parametrize("module", PATHS)
def test_paths_that_are_named_lead_there(module: str) -> None:
    there = importlib.import_module(module)
    assert [name for name in PATHS[module].split() if not hasattr(there, name)] == []


def test_all_is_sorted_and_complete() -> None:
    assert omniq.__all__ == sorted(omniq.__all__)
    assert len(set(omniq.__all__)) == len(omniq.__all__)
    named = {name for names in omniq._PLACES.values() for name in names.split()}
    assert named == set(omniq.__all__) - {"__version__"}
    loaded = {name: getattr(omniq, name) for name in dir(omniq) if not name.startswith("_")}
    helpers = {"Any", "TYPE_CHECKING", "annotations"}
    public = {name for name, value in loaded.items() if not inspect.ismodule(value)} - helpers
    assert public == set(omniq.__all__) - {"__version__"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = omniq.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", PLACES)
def test_names_are_where_they_are_promised_and_in_omniq_too(module: str) -> None:
    there = importlib.import_module(module)
    for name in PLACES[module]:
        assert hasattr(there, name), f"{module} has no {name}"
        assert getattr(omniq, name) is getattr(there, name)
        assert name in omniq.__all__


@pytest.mark.parametrize(
    "name", ["task", "current_task", "Retry", "Unrecoverable", "Middleware", "TaskNotFound", "NotActive", "DuplicateId"]
)
def test_what_tasks_and_callers_need_is_in_omniq(name: str) -> None:
    assert name in omniq.__all__


def test_every_public_name_says_what_it_is() -> None:
    silent = [n for n in omniq.__all__ if n != "__version__" and not inspect.getdoc(getattr(omniq, n))]
    assert not silent


def test_every_error_that_the_api_raises_is_an_omniq_error_of_omniq() -> None:
    assert issubclass(omniq.TaskNotFound, omniq.NotActive)
    for name in ("Invalid", "Refused", "StoreError", "SerializationError", "ConfigError"):
        assert issubclass(getattr(omniq, name), omniq.OmniQError)


def _parameters(method: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(method).parameters.values())


def test_the_two_constructors_take_the_same() -> None:
    assert _parameters(AsyncOmniQ.__init__) == _parameters(OmniQ.__init__)
    given = inspect.signature(AsyncOmniQ.__init__).parameters
    assert list(given) == ["self", "storage", "settings"]
    assert given["settings"].kind is inspect.Parameter.KEYWORD_ONLY


def test_the_signatures_of_the_specification_hold() -> None:
    enqueue = inspect.signature(AsyncOmniQ.enqueue).parameters
    assert list(enqueue) == ["self", "func", "args", "eta", "interval", "kwargs"]
    get_result = inspect.signature(AsyncOmniQ.get_result).parameters
    assert list(get_result) == ["self", "task_id", "wait", "timeout"]
    assert (get_result["wait"].default, get_result["timeout"].default) == (False, None)
    worker = inspect.signature(AsyncOmniQ.worker).parameters
    assert list(worker)[1:3] == ["concurrency", "poll_interval"]
    assert (worker["concurrency"].default, worker["poll_interval"].default) == (1, 1.0)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("enqueue", ["task"]),
        ("dequeue", ["now"]),
        ("mark_running", ["task_id"]),
        ("mark_done", ["task_id", "result"]),
        ("mark_failed", ["task_id", "error", "will_retry"]),
        ("get_result", ["task_id"]),
        ("purge_results", ["older_than"]),
        ("reschedule", ["task_id", "new_eta"]),
    ],
)
def test_a_storage_has_the_calls_of_the_specification(name: str, parameters: list[str]) -> None:
    method = getattr(omniq.BaseStorage, name)
    assert inspect.iscoroutinefunction(method)
    assert list(inspect.signature(method).parameters)[1:] == parameters


@pytest.mark.parametrize("kind", [AsyncOmniQ, OmniQ, omniq.FileStorage, omniq.SQLiteStorage, omniq.MemoryStorage])
def test_every_public_class_closes_and_is_a_context_manager(kind: type[Any]) -> None:
    assert hasattr(kind, "close")
    assert hasattr(kind, "__aenter__") or hasattr(kind, "__enter__")


@pytest.mark.parametrize("kind", [AsyncWorkerPool, WorkerPool])
def test_pools_are_context_managers(kind: type[Any]) -> None:
    assert hasattr(kind, "__aenter__") or hasattr(kind, "__enter__")


def test_each_call_of_a_storage_that_takes_texts_or_numbers_checks_them() -> None:
    checked = arguments.CALLS
    by_themselves = {"pause", "resume", "is_paused", "set_group_limit"}
    for name, call in vars(omniq.BaseStorage).items():
        if inspect.iscoroutinefunction(call) and getattr(call, "__isabstractmethod__", False) and not name.startswith("_"):
            taken = inspect.signature(call).parameters.keys() & (arguments.TEXTS | arguments.NUMBERS.keys())
            assert not taken or name in checked or name in by_themselves, f"nobody looks at {taken} of {name}"
