"""What may be enqueued, with which options, and what a worker may run."""

import functools
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import jobs

import omniq
from omniq.errors import Invalid, NameRequired
from omniq.tasks import (
    MAX_FAILED_IMPORTS,
    REGISTRY,
    Callee,
    NotRunnable,
    Options,
    Resolver,
    callee,
    func_path,
    make_options,
)
from omniq.testing import FakeClock


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The registry, put back afterwards."""
    before = dict(REGISTRY)
    yield REGISTRY
    REGISTRY.clear()
    REGISTRY.update(before)


def nested() -> Callable[[], None]:
    def inner() -> None: ...

    return inner


# -- paths ----------------------------------------------------------------------------------------


def test_a_function_of_a_module_has_a_path() -> None:
    assert func_path(jobs.add) == "support.jobs:add"
    assert func_path(jobs.Holder.static) == "support.jobs:Holder.static"


@pytest.mark.parametrize("func", [lambda: None, nested()], ids=["lambda", "nested"])
def test_a_lambda_or_a_nested_function_is_refused_with_what_to_do(func: Callable[[], None]) -> None:
    with pytest.raises(Invalid, match="top of a module"):
        func_path(func)


@pytest.mark.parametrize(
    "func",
    [jobs.Holder().method, jobs.Holder.of_class, functools.partial(jobs.add, 1), jobs.Holder(), [].append, "x".upper],
    ids=["method", "classmethod", "partial", "instance", "builtin method", "str method"],
)
def test_what_has_no_path_is_refused_with_what_to_do(func: Callable[..., Any]) -> None:
    with pytest.raises(Invalid, match="plain function of a module"):
        func_path(func)


# -- checking arguments ---------------------------------------------------------------------------


def positional_only(a: int, /, b: int = 0) -> None: ...


def star(*args: int) -> None: ...


def star_after_one(a: int, *args: int) -> None: ...


def only_keywords(*, a: int, b: int = 0) -> None: ...


def any_keywords(a: int, **rest: int) -> None: ...


GOOD = [
    (jobs.add, (1,), {}),
    (jobs.add, (1, 2), {}),
    (jobs.add, (1,), {"b": 2}),
    (jobs.add, (), {"a": 1, "b": 2}),
    (positional_only, (1,), {"b": 2}),
    (star, (), {}),
    (star, tuple(range(50)), {}),
    (star_after_one, (1, 2, 3), {}),
    (only_keywords, (), {"a": 1}),
    (any_keywords, (1,), {"anything": 2}),
    (jobs.keyword_only, (1,), {"b": 2}),
    (jobs.nothing, (), {}),
]
BAD = [
    (jobs.add, (), {}),
    (jobs.add, (1, 2, 3), {}),
    (jobs.add, (1,), {"a": 1}),
    (jobs.add, (1,), {"c": 3}),
    (positional_only, (), {"a": 1}),
    (star, (), {"a": 1}),
    (star_after_one, (), {}),
    (only_keywords, (), {}),
    (only_keywords, (1,), {}),
    (jobs.keyword_only, (1,), {}),
    (jobs.keyword_only, (1, 2), {}),
    (jobs.nothing, (1,), {}),
]


@pytest.mark.parametrize(("func", "args", "kwargs"), GOOD)
def test_arguments_that_fit_pass(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    callee(func).check(args, kwargs)


@pytest.mark.parametrize(("func", "args", "kwargs"), BAD)
def test_arguments_that_do_not_fit_are_a_type_error(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match=func.__name__):
        callee(func).check(args, kwargs)


def test_a_path_that_nobody_registered_is_not_checked() -> None:
    callee("some.module:function").check((1, 2), {"c": 3})


def test_a_registered_name_is_checked_like_its_function() -> None:
    with pytest.raises(TypeError, match=r"tests\.double"):
        callee("tests.double").check((), {})


def test_a_function_without_signature_is_not_checked() -> None:
    Callee("builtin", Options(), dict).check((1, 2, 3, 4), {})


@pytest.mark.parametrize("bad", [5, None, ["m:f"], object()])
def test_what_is_no_function_is_a_type_error(bad: Any) -> None:
    with pytest.raises(TypeError, match="cannot enqueue"):
        callee(bad)


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(NameRequired):
        callee("")


# -- options --------------------------------------------------------------------------------------


def test_an_unknown_option_is_named_and_the_known_ones_listed() -> None:
    with pytest.raises(TypeError, match=r"'retries'.*max_retries"):
        make_options({"retries": 3})
    with pytest.raises(TypeError, match="colour"):
        omniq.task(colour="red")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="prio"):
        omniq.OmniQ(omniq.MemoryStorage()).options(prio=1)


def test_every_option_of_the_api_is_known() -> None:
    assert {
        "eta",
        "interval",
        "max_retries",
        "timeout",
        "lease",
        "queue",
        "group",
        "group_limit",
        "idempotency_key",
        "blocked_by",
        "dead_queue",
    } <= set(Options.__struct_fields__)


def test_options_of_a_call_stand_over_those_of_the_task() -> None:
    over = make_options({"queue": "a", "timeout": None}).over(make_options({"queue": "b", "max_retries": 2, "timeout": 5}))
    assert (over.queue, over.max_retries, over.timeout) == ("a", 2, None)


# -- the decorator --------------------------------------------------------------------------------


def test_a_task_still_calls_its_function() -> None:
    assert jobs.double(4) == 8
    assert jobs.double.__name__ == "double"
    assert jobs.double.__doc__ == jobs.double.func.__doc__


def test_a_task_is_named_by_its_path_unless_it_has_a_name() -> None:
    assert jobs.triple.name == "support.jobs:triple"
    assert jobs.double.name == "tests.double"
    assert REGISTRY["tests.double"] is jobs.double
    assert "tests.double" in repr(jobs.double)


def test_a_name_belongs_to_one_function(registry: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match=r"tests\.double.*support\.jobs:double"):
        omniq.task(name="tests.double")(jobs.add)
    assert registry["tests.double"] is jobs.double


def test_a_module_that_is_loaded_again_registers_its_tasks_again(registry: dict[str, Any]) -> None:
    again = omniq.task(name="tests.double")(jobs.double.func)
    assert registry["tests.double"] is again


def test_a_task_cannot_be_made_a_task_twice(registry: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match="already"):
        omniq.task(jobs.double)


def test_a_lambda_cannot_be_a_task_without_a_name(registry: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match="top of a module"):
        omniq.task(lambda: None)


# -- what a worker finds --------------------------------------------------------------------------


def test_any_importable_function_is_found_where_everything_is_allowed() -> None:
    resolver = Resolver(None)
    assert resolver.resolve("support.jobs:add") is jobs.add
    assert resolver.resolve("support.jobs:Holder.static") is jobs.Holder.static
    assert resolver.resolve("support.jobs:double") is jobs.double.func
    assert resolver.resolve("tests.double") is jobs.double.func


def test_with_a_list_only_those_modules_and_registered_tasks_run() -> None:
    resolver = Resolver(["support.jobs"])
    assert resolver.resolve("support.jobs:add") is jobs.add
    assert resolver.resolve("tests.double") is jobs.double.func
    with pytest.raises(NotRunnable, match=r"may not run 'os:getpid'.*@omniq\.task.*support\.jobs"):
        resolver.resolve("os:getpid")


def test_an_empty_list_leaves_registered_tasks() -> None:
    resolver = Resolver([])
    assert resolver.resolve("support.jobs:triple") is jobs.triple.func
    with pytest.raises(NotRunnable, match="allowed now: none"):
        resolver.resolve("support.jobs:add")


def test_a_module_that_an_allowed_one_imported_is_not_allowed() -> None:
    """Names reach out of a module: `support.jobs:os.getpid` would be a way around the list."""
    with pytest.raises(NotRunnable):
        Resolver(["support.jobs"]).resolve("support.jobs:os.getpid")


def test_a_list_given_as_one_text_is_refused() -> None:
    with pytest.raises(Invalid):
        Resolver("support.jobs")


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("no_such_name", r"@omniq\.task\(name='no_such_name'\)"),
        (":f", "registered"),
        ("support.jobs:", "registered"),
        ("no.such.module:f", "import path"),
        ("support.jobs:no_such", "check the name"),
        ("support.jobs:not_callable", "not a function"),
        ("__main__:no_such_function", "move it into a module"),
    ],
)
def test_what_cannot_be_found_says_what_to_do(path: str, advice: str) -> None:
    with pytest.raises(NotRunnable, match=advice):
        Resolver(None).resolve(path)


@pytest.mark.parametrize(
    ("path", "allow", "unknown"),
    [
        ("no_such_name", None, True),
        (":f", [], True),
        ("*", [], True),
        ("no.such.module:f", None, True),
        ("no.such.module:f", ["no.such.module"], True),
        ("support.jobs:no_such", None, True),
        ("support.jobs:no_such", ["support.jobs"], True),
        ("support.jobs:Holder.no_such", None, True),
        ("support.jobs:no_such", [], True),  # this worker has registered tasks of that module: it may be a newer one
        ("no.such.module:f", [], False),
        ("os:getpid", ["support.jobs"], False),
        ("support.jobs:add", [], False),
        ("support.jobs:os.getpid", ["support.jobs"], False),
        ("support.jobs:not_callable", None, False),
        ("__main__:no_such_function", None, False),
        ("__main__:no_such_function", [], False),
    ],
)
def test_what_another_worker_may_have_is_told_from_what_none_must_run(
    path: str, allow: list[str] | None, unknown: bool
) -> None:
    with pytest.raises(NotRunnable) as caught:
        Resolver(allow).resolve(path)
    assert caught.value.unknown is unknown


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Writes a module that counts its imports; its name."""
    name = f"deployed_{uuid.uuid4().hex}"
    counting = f"from support import jobs; jobs.count('{name}')\n"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(text: str) -> str:
        (tmp_path / f"{name}.py").write_text(counting + text)
        return name

    yield write
    sys.modules.pop(name, None)


@pytest.mark.parametrize("broken", ["import no_such_package", "raise SystemExit(3)", "def f(:", "1 / 0"])
def test_a_module_that_fails_is_tried_again_but_not_for_each_task(module: Callable[[str], str], broken: str) -> None:
    name, clock = module(broken), FakeClock()
    resolver = Resolver([name], clock)
    messages: set[str] = set()
    for _ in range(1000):
        with pytest.raises(NotRunnable, match="cannot import") as caught:
            resolver.resolve(f"{name}:f")
        assert caught.value.unknown
        messages.add(str(caught.value))
    assert len(messages) == 1
    assert jobs.runs[name] == ("(:" not in broken)  # what cannot be compiled is never begun
    module("def f(): return 7")
    clock.advance(1)
    assert resolver.resolve(f"{name}:f")() == 7


def test_a_module_that_goes_on_failing_is_tried_ever_more_seldom(module: Callable[[str], str]) -> None:
    name, clock = module("1 / 0"), FakeClock()
    resolver = Resolver([name], clock)
    for _ in range(3600):
        with pytest.raises(NotRunnable):
            resolver.resolve(f"{name}:f")
        clock.advance(1)
    assert 12 < jobs.runs[name] < 40


def test_failed_imports_of_endless_names_are_not_all_kept() -> None:
    resolver = Resolver(None, FakeClock())
    names = [f"no_such_module_{n}:f" for n in range(MAX_FAILED_IMPORTS + 5)]

    def is_kept(name: str) -> bool:
        """A failure that is kept is told again. Any other has a new cause, since the import was tried."""
        with pytest.raises(NotRunnable) as caught:
            resolver.resolve(name)
        return caught.value.__cause__ is None

    assert not any(is_kept(name) for name in names)
    # The last first: what is tried again is kept anew, and may push out others.
    kept = sum(is_kept(name) for name in reversed(names))
    assert 0 < kept <= MAX_FAILED_IMPORTS


def test_a_function_of_main_runs_in_the_process_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import __main__

    monkeypatch.setattr(__main__, "made_here", jobs.add, raising=False)
    assert Resolver(None).resolve("__main__:made_here") is jobs.add
