"""Each async class has a blocking twin, which offers the same under the same names and says so in the same words."""

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any, cast

import pytest

import omniq
import omniq.client
import omniq.contract
import omniq.core
from omniq import AsyncOmniQ, AsyncWorkerPool, MemoryStorage, OmniQ, WorkerPool
from omniq.client import AsyncClient, Client
from omniq.contract import AsyncContractClient, ContractClient
from omniq.worker import WorkerOptions

TWINS = [
    (AsyncOmniQ, OmniQ),
    (omniq.core.AsyncEnqueuer, omniq.core.Enqueuer),
    (omniq.core.AsyncTransactionBlock, omniq.core.TransactionBlock),
    (AsyncWorkerPool, WorkerPool),
    (AsyncContractClient, ContractClient),
    (AsyncClient, Client),
]
ON_A_STORAGE = {kind for twins in (TWINS[0], TWINS[3], TWINS[4]) for kind in twins}
# A storage is blocking and async at once; queue and nodes are what doors and drivers are made of.
ALONE = {"AsyncTaskQueue", "AsyncNodes"}

MEMBERS = [
    pytest.param(asynchronous, blocking, name, id=f"{blocking.__name__}.{name}")
    for asynchronous, blocking in TWINS
    for name in sorted(n for n in dir(asynchronous) if not n.startswith("_"))
]


def _public(kind: type) -> set[str]:
    """The names of what a user gets: of an instance, where one needs nothing but a storage."""
    made = kind(MemoryStorage()) if kind in ON_A_STORAGE else kind
    return {name for name in dir(made) if not name.startswith("_")}


def _blocking_words(text: str | None) -> str | None:
    return None if text is None else re.sub(r"\b(await|async) ", "", text.replace("async with await", "with"))


def test_no_async_class_is_without_a_twin() -> None:
    # Read rather than imported, since some modules need Spark.
    sources = [path.read_text() for path in Path(omniq.__path__[0]).rglob("*.py")]
    found = {name for source in sources for name in re.findall(r"^class (Async\w+)", source, re.MULTILINE)}
    assert found == {asynchronous.__name__ for asynchronous, _ in TWINS} | ALONE


@pytest.mark.parametrize(("asynchronous", "blocking"), TWINS, ids=lambda kind: kind.__name__)
def test_twins_have_the_same_public_names(asynchronous: type, blocking: type) -> None:
    more = {"pool"} if blocking is WorkerPool else set()  # its async half, where these names were before it had them itself
    assert _public(blocking) - more == _public(asynchronous)


@pytest.mark.parametrize(("asynchronous", "blocking", "name"), MEMBERS)
def test_a_member_takes_the_same_and_says_the_same_in_both(asynchronous: type, blocking: type, name: str) -> None:
    ours, theirs = getattr(blocking, name), getattr(asynchronous, name)
    if callable(theirs):
        assert not inspect.iscoroutinefunction(ours)
        assert list(inspect.signature(ours).parameters.values()) == _as_blocking(theirs)
    if name == "consume":  # a handler runs in other places, and signals reach other threads
        assert ours.__doc__.splitlines()[0] == theirs.__doc__.splitlines()[0]
    else:
        assert ours.__doc__ is not None, "an editor shows nothing"
        assert ours.__doc__ == _blocking_words(theirs.__doc__)
        assert _written(ours) == inspect.getdoc(ours), "editors read the source, and run nothing"


def _written(member: Any) -> str | None:
    """The docstring that stands in the source of a method or property."""
    source = textwrap.dedent(inspect.getsource(getattr(member, "fget", member)))
    return ast.get_docstring(cast(ast.FunctionDef, ast.parse(source).body[0]))


def _as_blocking(method: Any) -> list[inspect.Parameter]:
    """The parameters, with the blocking kind of what is async in them."""
    return [
        p.replace(annotation=str(p.annotation).replace("asyncio.Event", "threading.Event"))
        if isinstance(p.annotation, str)
        else p
        for p in inspect.signature(method).parameters.values()
    ]


@pytest.mark.parametrize(("asynchronous", "blocking", "name"), MEMBERS)
def test_a_member_returns_the_same_in_both(asynchronous: type, blocking: type, name: str) -> None:
    ours, theirs = getattr(blocking, name), getattr(asynchronous, name)
    if isinstance(theirs, property):
        ours, theirs = ours.fget, theirs.fget
    if callable(theirs):
        given = str(inspect.signature(theirs).return_annotation).replace("Async", "")
        assert str(inspect.signature(ours).return_annotation).replace(", None, None]", ", None]") == given


def test_the_options_of_a_worker_are_those_of_the_pool() -> None:
    wanted = {n: p.default for n, p in inspect.signature(AsyncWorkerPool).parameters.items()}
    given = {n: p.default for n, p in inspect.signature(WorkerPool).parameters.items() if n != "options"}
    assert given.keys() | WorkerOptions.__annotations__.keys() == wanted.keys()
    assert given == {name: wanted[name] for name in given}
    assert list(inspect.signature(AsyncOmniQ.worker).parameters) == ["self", "concurrency", "poll_interval", "options"]


@pytest.mark.parametrize("kinds", [TWINS[0], TWINS[4], TWINS[5]], ids=lambda kinds: kinds[1].__name__)
def test_twins_are_made_alike(kinds: tuple[type, type]) -> None:
    asynchronous, blocking = kinds
    assert inspect.signature(asynchronous) == inspect.signature(blocking)
