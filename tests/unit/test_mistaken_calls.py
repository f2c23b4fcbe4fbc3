"""What people get wrong when they enqueue, and what they are told: the input by its name, and the next step."""

import asyncio
import dataclasses
import functools
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import jobs

import omniq
from omniq import AsyncOmniQ, ConfigError, Invalid, MemoryStorage, OmniQ, SerializationError, SQLiteStorage
from omniq.contract import AsyncContractClient, ContractClient
from omniq.models import new_id
from omniq.tasks import callee


def greet(name: str, greeting: str = "Hello") -> str:
    return f"{greeting}, {name}!"


def files(first: Any, *others: Any, target: Any = None) -> None: ...


@dataclasses.dataclass
class Order:
    folder: Path


class Model:
    """Looks like a model of pydantic."""

    def model_dump(self, mode: str = "python") -> dict[str, Any]:
        return {"mode": mode}


class Array:
    """Looks like an array of NumPy."""

    def tolist(self) -> list[int]:
        return [1]


@pytest.fixture
def oq() -> Iterator[OmniQ]:
    with OmniQ(MemoryStorage()) as oq:
        yield oq


def test_enqueue_of_a_task_without_the_queue_says_what_comes_first() -> None:
    with pytest.raises(TypeError, match=r"give the queue first, enqueue\(oq, …\), an OmniQ; not str"):
        jobs.double.enqueue("x")
    for call in (jobs.double.enqueue, functools.partial(jobs.double.enqueue, number=3)):
        with pytest.raises(TypeError, match=r"give the queue first, enqueue\(oq, …\), an OmniQ"):
            call()


def test_a_store_that_is_none_is_named_at_once() -> None:
    for door in (OmniQ, AsyncOmniQ, ContractClient, AsyncContractClient):
        with pytest.raises(TypeError, match=r"SQLiteStorage\('omniq.db'\), not 'sqlite:///q.db'; a URL is for from_url"):
            door("sqlite:///q.db")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"not <class 'omniq.storage.memory.MemoryStorage'>"):
            door(MemoryStorage)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"not 'redis://:\*\*\*@host/0'"):
            door("redis://:secret@host/0")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("handler", "told"),
    [
        ("jobs:handle", "a handler is a function that takes the job, not 'jobs:handle'"),
        (lambda: None, r"takes one argument, the job; .* takes \(\): too many positional arguments"),
        (lambda job, retries: None, "missing a required argument: 'retries'"),
    ],
)
def test_a_handler_that_would_fail_every_job_is_refused(handler: Any, told: str) -> None:
    async def from_async_code() -> None:
        async with AsyncContractClient(MemoryStorage()) as client:
            await client.consume("pdf", handler)

    with ContractClient(MemoryStorage()) as client, pytest.raises(TypeError, match=told):
        client.consume("pdf", handler)
    with pytest.raises(TypeError, match=told):
        asyncio.run(from_async_code())


@pytest.mark.parametrize("method", ["get_task", "get_result", "cancel", "requeue", "remove", "history"])
@pytest.mark.parametrize("id", [None, 3, ["a"]])
@pytest.mark.parametrize("url", ["memory://", "sqlite://"])
def test_what_is_no_id_is_named(url: str, method: str, id: Any) -> None:
    told = re.escape(f"the id of a task is the text that enqueue returned, not {id!r}")
    with OmniQ.from_url(url) as oq, pytest.raises(TypeError, match=told):
        getattr(oq, method)(id)


def test_what_is_no_filter_page_or_time_is_named(oq: OmniQ) -> None:
    with pytest.raises(TypeError, match=r"Filter\(statuses=.*not 'FAILED'"):
        oq.find("FAILED")  # type: ignore[arg-type]
    with pytest.raises(Invalid, match=r"limit must be a whole number from 1 .* not 0"):
        oq.find(limit=0)
    for timeout in ("3", -1, float("nan")):
        with pytest.raises(Invalid, match=r"timeout is a number of seconds, zero or more, not"):
            oq.get_result("a", wait=True, timeout=timeout)  # type: ignore[arg-type]
    with pytest.raises(Invalid, match=r"group limit must be a whole number from 1 .* not '3'"):
        oq.set_group_limit("default", "g", "3")  # type: ignore[arg-type]


def test_a_mistyped_option_is_named_with_the_one_that_was_meant(oq: OmniQ) -> None:
    with pytest.raises(TypeError, match=r"did you mean 'max_retries'\?"):
        oq.options(max_retry=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unknown option 'delay'; known: eta, interval"):
        omniq.task(delay=3)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({"nmae": "Ada"}, "unexpected keyword argument 'nmae'; did you mean 'name'"),
        ({"name": "Ada", "colour": "red"}, "unexpected keyword argument 'colour'; it takes name, greeting"),
        ({"name": "Ada", "eta": 5}, r"'eta' is an option of the task.*options\(eta=…\)"),
        ({}, "missing a required argument: 'name'; it takes name: str, greeting: str = 'Hello'"),
    ],
)
def test_a_keyword_that_the_function_does_not_have_is_named(oq: OmniQ, kwargs: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError, match=told):
        oq.options(max_retries=1).enqueue(greet, **kwargs)
    assert oq.counts() == []


@pytest.mark.parametrize(
    ("args", "kwargs", "told"),
    [
        ((Path("a.txt"),), {}, r"argument 'first'.*path: pass str\(path\)"),
        (("a", "b", {"deep": [Path("c")]}), {}, r"argument 3:.*pass str\(path\)"),
        (("a",), {"target": Model()}, r"argument 'target'.*model_dump\(mode='json'\)"),
        ((Array(),), {}, r"argument 'first'.*tolist\(\)"),
        ((Order(Path("a")),), {}, r"argument 'first'.*pass str\(path\)"),
        (("a",), {"target": object()}, "argument 'target'.*object of type object.*cloudpickle"),
        ((float("nan"),), {}, "argument 'first'.*nan"),
    ],
)
def test_an_argument_that_cannot_be_stored_is_named_with_what_to_do(
    oq: OmniQ, args: tuple[Any, ...], kwargs: dict[str, Any], told: str
) -> None:
    with pytest.raises(SerializationError, match=told):
        oq.enqueue(files, *args, **kwargs)


def test_the_row_that_is_wrong_is_named(oq: OmniQ) -> None:
    with pytest.raises(TypeError, match=r"^rows\[1\]: .*too many positional arguments"):
        oq.enqueue_many(greet, [("Ada",), ("Ada", "Hello", 3)])
    with pytest.raises(SerializationError, match=r"^rows\[2\]: argument 'name': .*pass str\(path\)"), oq.transaction() as tx:
        tx.enqueue_many(greet, [("Ada",), {"name": "Grace"}, {"name": Path("a")}])
    with pytest.raises(TypeError, match=r"^rows\[0\]: a row is a tuple .* write \('Ada',\)"):
        oq.enqueue_many(greet, ["Ada"])
    assert oq.counts() == []


def give_path() -> Path:
    return Path("a.txt")


def test_a_result_that_cannot_be_stored_is_named_with_what_to_do(oq: OmniQ) -> None:
    with oq.worker():
        result = oq.get_result(oq.options(max_retries=0).enqueue(give_path), wait=True, timeout=10)
    assert str(result.error).startswith("SerializationError: the result: a value of type PosixPath cannot be stored as JSON")
    assert "pass str(path)" in str(result.error)


@pytest.mark.parametrize("name", ["Hello, Ada!", "f(x)", "two words", "jobs:f.<locals>.g"])
def test_a_text_that_a_call_returned_is_not_taken_for_a_task(oq: OmniQ, name: str) -> None:
    with pytest.raises(Invalid, match=r"no task .* is registered here.*enqueue\(f, …\)"):
        oq.enqueue(name)


def _new(name: str) -> str:
    """A name that nobody in this process has been warned of."""
    return f"{name}_{new_id()}"


async def test_a_word_that_no_task_has_here_is_stored_with_one_warning(oq: OmniQ, caplog: pytest.LogCaptureFixture) -> None:
    """It may be a name that only the workers know, or what a call returned."""
    ada, grace, mary, charles, alan = (_new(name) for name in ("Ada", "Grace", "Mary", "Charles", "Alan"))
    oq.enqueue(ada)
    oq.enqueue(ada)
    oq.options(max_retries=1).enqueue(grace)  # type: ignore[arg-type]
    with oq.transaction() as tx:
        tx.enqueue(mary)
    await AsyncOmniQ(MemoryStorage()).enqueue(charles)
    oq.options().enqueue_name(alan)
    oq.enqueue("support.jobs:add", 1)
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(" is ")[0] for text in told] == [f"no task {n!r}" for n in (ada, grace, mary, charles)]
    assert "enqueue(f, …) instead of enqueue(f(…))" in told[0]


def test_a_registered_name_may_hold_anything(oq: OmniQ) -> None:
    made = omniq.task(name="say: hello, world!")(jobs.add)
    try:
        assert oq.get_task(oq.enqueue("say: hello, world!", 1)).func_path == made.name
    finally:
        del omniq.tasks.REGISTRY[made.name]


def test_the_call_of_an_async_function_is_not_taken_for_the_function() -> None:
    with pytest.raises(TypeError, match="without calling it"):
        callee(asyncio.sleep(0))  # type: ignore[arg-type]


def test_a_path_into_main_is_refused(oq: OmniQ) -> None:
    with pytest.raises(Invalid, match="name the module as another program imports it"):
        oq.enqueue("__main__:greet", "Ada")


def test_a_limit_without_a_group_is_refused(oq: OmniQ) -> None:
    with pytest.raises(Invalid, match="group_limit=2 without a group"):
        oq.options(group_limit=2).enqueue(greet, "Ada")
    assert oq.get_task(oq.options(group_limit=2, group="a").enqueue(greet, "Ada")).group == "a"


@pytest.mark.parametrize("backoff", [3, None, ["exp"], {"base": 3}])
def test_a_backoff_that_is_no_text_is_named(oq: OmniQ, backoff: Any) -> None:
    with pytest.raises(ConfigError, match=r"backoff is text like exp:base=1000.*, not "):
        oq.options(backoff=backoff).enqueue(greet, "Ada")


@pytest.fixture
def defined_at_a_prompt(monkeypatch: pytest.MonkeyPatch) -> Any:
    main, name = ModuleType("__main__"), _new("hello")
    exec(f"def {name}(): return 'hello'", vars(main))  # noqa: S102 - as a notebook does
    monkeypatch.setitem(sys.modules, "__main__", main)
    return getattr(main, name)


def test_a_function_of_a_prompt_or_notebook_is_stored_with_one_warning(
    defined_at_a_prompt: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "omniq"), OmniQ(SQLiteStorage(tmp_path / "q.db")) as oq:
        ids = [oq.enqueue(defined_at_a_prompt), oq.options(max_retries=0).enqueue(defined_at_a_prompt)]
        with oq.worker():
            assert [oq.get_result(id, wait=True, timeout=10).result for id in ids] == ["hello", "hello"]
    told = [record.getMessage() for record in caplog.records if "only a worker in this process" in record.getMessage()]
    assert len(told) == 1
    assert f"__main__:{defined_at_a_prompt.__name__}" in told[0]


def test_a_store_of_this_process_needs_no_warning(
    oq: OmniQ, defined_at_a_prompt: Any, caplog: pytest.LogCaptureFixture
) -> None:
    oq.enqueue(defined_at_a_prompt)
    assert caplog.records == []
