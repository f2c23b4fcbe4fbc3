"""Functions that may be enqueued and may run: registered tasks, functions by their path, and the options of a call."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, cast, overload

import msgspec
from msgspec import UNSET, UnsetType

from omniq.errors import Invalid, OmniQError
from omniq.models import Schedule, check_name, check_queue, now_us
from omniq.policy import unknown_pause_us

P = ParamSpec("P")
R = TypeVar("R")
# Whoever enqueues makes up the names, so only so many are remembered.
MAX_FAILED_IMPORTS = 1000
MAIN = "__main__"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a call, apart from the function's own arguments. An option that is unset comes from the settings."""

    eta: datetime | timedelta | UnsetType | None = UNSET
    interval: timedelta | float | UnsetType | None = UNSET
    max_retries: int | UnsetType = UNSET
    timeout: float | timedelta | UnsetType | None = UNSET
    lease: float | timedelta | UnsetType = UNSET
    queue: str | UnsetType = UNSET
    group: str | UnsetType | None = UNSET
    group_limit: int | UnsetType = UNSET
    idempotency_key: str | UnsetType | None = UNSET
    blocked_by: Sequence[str] | UnsetType = UNSET
    dead_queue: str | UnsetType | None = UNSET
    result_ttl: float | timedelta | UnsetType = UNSET
    backoff: str | UnsetType = UNSET
    task_id: str | UnsetType = UNSET
    headers: dict[str, str] | UnsetType = UNSET
    schedule: Schedule | UnsetType = UNSET

    def over(self, base: Options) -> Options:
        """Returns these options, with those of `base` where these are unset."""
        if base is NO_OPTIONS:
            return self
        if self is NO_OPTIONS:
            return base
        given = {f: v for f in self.__struct_fields__ if (v := getattr(self, f)) is not UNSET}
        return msgspec.structs.replace(base, **given)


NO_OPTIONS = Options()


class OptionFields(TypedDict, total=False):
    """The keyword arguments of `options(…)` and `@omniq.task(…)`, for editors and type checkers."""

    eta: datetime | timedelta | None
    interval: timedelta | float | None
    max_retries: int
    timeout: float | timedelta | None
    lease: float | timedelta
    queue: str
    group: str | None
    group_limit: int
    idempotency_key: str | None
    blocked_by: Sequence[str]
    dead_queue: str | None
    result_ttl: float | timedelta
    backoff: str
    task_id: str
    headers: dict[str, str]
    schedule: Schedule


def make_options(values: OptionFields) -> Options:
    unknown = values.keys() - set(Options.__struct_fields__)
    if unknown:
        first, known = sorted(unknown)[0], Options.__struct_fields__
        raise TypeError(f"unknown option {first!r}; {_meant(first, known) or 'known: ' + ', '.join(known)}")
    return Options(**values)


def _meant(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else ""


class NotRunnable(OmniQError):
    """This worker will not run the task. With `unknown` it lacks the function, so another worker may run it."""

    def __init__(self, message: str, *, unknown: bool = False) -> None:
        super().__init__(message)
        self.unknown = unknown


class _AsyncDoor(Protocol):
    async def enqueue_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> str: ...


class _Door(Protocol):
    def enqueue_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> str: ...


class TaskFunction(Generic[P, R]):
    """A function with a name in the registry and options of its own. Calling it calls the function."""

    def __init__(self, func: Callable[P, R], name: str, options: Options) -> None:
        self.func, self.name, self.default_options = func, name, options
        functools.update_wrapper(cast(Any, self), func)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.func(*args, **kwargs)

    @overload
    def enqueue(self, oq: _AsyncDoor, /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[str]: ...
    @overload
    def enqueue(self, oq: _Door, /, *args: P.args, **kwargs: P.kwargs) -> str: ...
    # With a default, so that a call without a queue is told what it lacks and not which argument is missing.
    def enqueue(self, oq: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        """Enqueue a call of this task on `oq`. Returns the id, or an awaitable of it on an `AsyncOmniQ`."""
        if not hasattr(oq, "enqueue_call"):
            raise TypeError(f"{self.name}: give the queue first, enqueue(oq, …), an OmniQ; not {type(oq).__name__}")
        return oq.enqueue_call(self, args, kwargs, NO_OPTIONS)

    def __repr__(self) -> str:
        return f"<omniq task {self.name!r}>"


REGISTRY: dict[str, TaskFunction[..., Any]] = {}


@overload
def task(func: Callable[P, R], /) -> TaskFunction[P, R]: ...
@overload
def task(*, name: str | None = None, **options: Unpack[OptionFields]) -> Callable[[Callable[P, R]], TaskFunction[P, R]]: ...
def task(func: Callable[..., Any] | None = None, /, *, name: str | None = None, **options: Unpack[OptionFields]) -> Any:
    """Register a function as a task, with a name of its own and options for every call of it.

    Works as `@omniq.task` and as `@omniq.task(name="resize", queue="images", max_retries=5)`.
    """
    fixed = make_options(options)

    def register(f: Callable[..., Any]) -> TaskFunction[..., Any]:
        if isinstance(f, TaskFunction):
            raise Invalid(f"{f!r} is a task already")
        made = TaskFunction(f, name or func_path(f), fixed)
        check_name(made.name)
        # The same function again is a module that is loaded anew, as in a notebook.
        there = REGISTRY.get(made.name)
        if there is not None and (module_of(there.func), there.func.__qualname__) != (module_of(f), f.__qualname__):
            raise Invalid(f"task name {made.name!r} is taken by {there.func.__module__}:{there.func.__qualname__}")
        REGISTRY[made.name] = made
        return made

    return register if func is None else register(func)


HANDLERS: dict[str, Callable[..., Any]] = {}
F = TypeVar("F", bound=Callable[..., Any])


def handler(queue: str) -> Callable[[F], F]:
    """Register a function for the tasks of a queue that name no function, as clients of other languages publish them.

    It gets the payload; `{"args": […], "kwargs": {…}}` is spread.
    """
    check_queue(queue)

    def register(f: F) -> F:
        there = HANDLERS.get(queue)
        if there is not None and (there.__module__, there.__qualname__) != (f.__module__, f.__qualname__):
            raise Invalid(f"queue {queue!r} is handled by {there.__module__}:{there.__qualname__} already")
        HANDLERS[queue] = f
        return f

    return register


def func_path(func: Callable[..., Any]) -> str:
    """Returns `module:qualname` of a function. Raises `Invalid`, with the remedy, if no worker could find it by that path."""
    module, name = module_of(func), getattr(func, "__qualname__", None)
    shown = name or repr(func)
    if not module or not name or inspect.ismethod(func):
        raise Invalid(f"{shown} has no path that a worker could import: enqueue a plain function of a module")
    if "<lambda>" in name or "<locals>" in name:
        raise Invalid(
            f"{shown} is a lambda or a function inside a function, which no worker can find: move it to the top of a module"
        )
    return f"{module}:{name}"


class Callee:
    """A function as the enqueuing side knows it: its name, its own options, and a check of the arguments."""

    __slots__ = ("_least", "_most", "_signature", "name", "options", "parameters")

    def __init__(self, name: str, options: Options, func: Callable[..., Any] | None) -> None:
        self.name, self.options = name, options
        self._signature: inspect.Signature | None = None
        self._least, self._most = 0, -1
        self.parameters: tuple[str, ...] = ()  # those that are given by their place
        if func is not None:
            try:
                self._signature = inspect.signature(func)
            except (TypeError, ValueError):  # some built-ins have none
                return
            self._least, self._most = _positional_range(self._signature)
            known = self._signature.parameters.values()
            self.parameters = tuple(p.name for p in known if p.kind <= p.POSITIONAL_OR_KEYWORD)

    def check(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raise `TypeError` for arguments that the function would refuse."""
        if self._signature is None or (not kwargs and self._least <= len(args) <= self._most):
            return
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise TypeError(f"{self.name}: {self._mistyped(kwargs) or self._misfit(exc)}") from None

    def _misfit(self, exc: TypeError) -> str:
        assert self._signature is not None
        return f"{exc}; it takes {', '.join(map(str, self._signature.parameters.values())) or 'none'}"

    def _mistyped(self, kwargs: dict[str, Any]) -> str | None:
        """Returns a sentence about a keyword that the function lacks: Python complains of a missing argument instead."""
        assert self._signature is not None
        known = self._signature.parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in known):
            return None
        names = [p.name for p in known if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        unknown = next((name for name in kwargs if name not in names), None)
        if unknown is None:
            return None
        if unknown in Options.__struct_fields__:
            return f"{unknown!r} is an option of the task, not an argument of its function: give it to options({unknown}=…)"
        hint = _meant(unknown, names) or f"it takes {', '.join(names) or 'none'}"
        return f"got an unexpected keyword argument {unknown!r}; {hint}"


def _positional_range(signature: inspect.Signature) -> tuple[int, int]:
    """Returns how few and how many positional arguments suffice. (0, -1) if they never do."""
    least = most = 0
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            most = sys.maxsize
        elif parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            return 0, -1
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            most += most != sys.maxsize
            least += parameter.default is parameter.empty
    return least, most


def callee(func: Callable[..., Any] | str | TaskFunction[..., Any]) -> Callee:
    """Returns the callee of a function, a registered task, or a name (`module:callable` or registered)."""
    if isinstance(func, str):
        known = REGISTRY.get(func)
        if known is None:
            check_name(func)
            _check_path(func)
            return Callee(func, NO_OPTIONS, None)
        func = known
    if isinstance(func, TaskFunction):
        return _callee_of_task(cast("TaskFunction[..., Any]", func))
    if not callable(func):
        if inspect.iscoroutine(func):
            func.close()  # nobody will await it
        raise TypeError(f"cannot enqueue {func!r}: give the function itself, without calling it, or 'module:callable'")
    return _callee_of_function(func)


def module_meant(path: str) -> str:
    """The module that the name of a file stands for: `jobs.mail` for `./jobs/mail.py`."""
    return path.removesuffix(".py").strip("./").replace("/", ".")


# What sentences and texts of results have in them, and no name of a function.
_NOT_IN_NAMES = re.compile(r"[\s()\[\]{}<>,;!?\"']")


def _check_path(name: str) -> None:
    """Refuse a text that no worker will find a function by."""
    if name.startswith(f"{MAIN}:"):
        raise Invalid(f"{name!r}: a worker cannot import {MAIN}; name the module as another program imports it")
    module, colon, function = name.partition(":")
    if colon and ("/" in module or module.endswith(".py")):
        raise Invalid(f"{name!r} names a file: write its module, {module_meant(module)}:{function}")
    if _NOT_IN_NAMES.search(name):
        shown = name if len(name) <= 60 else name[:60] + "…"
        raise Invalid(
            f"no task {shown!r} is registered here, and it is no 'module:callable'; if a function returned it, enqueue the "
            "function itself: enqueue(f, …) instead of enqueue(f(…))"
        )


# A signature is slow to read, and a program enqueues few functions many times.
@functools.lru_cache(maxsize=4096)
def _callee_of_task(func: TaskFunction[..., Any]) -> Callee:
    return Callee(func.name, func.default_options, func.func)


@functools.lru_cache(maxsize=4096)
def _callee_of_function(func: Callable[..., Any]) -> Callee:
    return Callee(func_path(func), NO_OPTIONS, func)


class _FailedImport:
    """A module that could not be imported. It is tried again, but not for each of a thousand tasks."""

    __slots__ = ("help", "since_us", "tried_us")

    def __init__(self, since_us: int, tried_us: int, help: str) -> None:
        self.since_us, self.tried_us, self.help = since_us, tried_us, help

    def is_due(self, now_us: int) -> bool:
        """Half of a task's own pause: its next try must not come a moment too early."""
        return now_us - self.tried_us >= unknown_pause_us(self.tried_us - self.since_us) // 2


class Resolver:
    """Finds the function of a task on the worker's side, within what this worker may run.

    `allow` names modules whose functions may run beside registered tasks; None allows any importable function.
    """

    def __init__(self, allow: Iterable[str] | None, clock: Callable[[], int] = now_us) -> None:
        if isinstance(allow, str):
            raise Invalid(f"allow is a list of module names, not the text {allow!r}")
        self._allow = None if allow is None else frozenset(allow)
        self._clock = clock
        self._found: dict[str, Callable[..., Any]] = {}
        self._failed: dict[str, _FailedImport] = {}

    def resolve(self, name: str, queue: str = "") -> Callable[..., Any]:
        """Returns the function of that name. For `*`, which stands for no name, the handler of the queue."""
        if name == "*":
            return self._handler(queue)
        found = self._found.get(name)
        if found is None:
            registered = REGISTRY.get(name)
            found = self._found[name] = registered.func if registered is not None else self._import(name)
        return found

    def _handler(self, queue: str) -> Callable[..., Any]:
        found = HANDLERS.get(queue)
        if found is None:
            raise NotRunnable(
                f"this task names no function: register a handler with @omniq.handler({queue!r}), put a registered name into "
                f"its payload as 'func', or run the queue with consume() of omniq.contract",
                unknown=True,
            )
        return found.func if isinstance(found, TaskFunction) else found

    def _import(self, path: str) -> Callable[..., Any]:
        module_name, colon, qualname = path.partition(":")
        if not colon or not module_name or not qualname:
            raise NotRunnable(
                f"no task named {path!r} is registered in this worker: import the module that has @omniq.task(name={path!r}), "
                f"for example with 'omniq worker that.module'",
                unknown=bool(path),  # no task can have an empty name
            )
        if self._allow is not None and module_name not in self._allow:
            if module_name == "__main__":
                raise NotRunnable(_import_help(path, module_name))
            if _may_be_registered_elsewhere(module_name, qualname):
                raise NotRunnable(
                    f"no task named {path!r} is registered in this worker, and {module_name} has nothing of that name: "
                    "deploy the worker's code",
                    unknown=True,
                )
            allowed = ", ".join(sorted(self._allow)) or "none"
            raise NotRunnable(
                f"this worker may not run {path!r}: register it with @omniq.task, or start the worker for its module "
                f"({module_name}; allowed now: {allowed})"
            )
        target: Any = self._module(path, module_name)
        try:
            for part in qualname.split("."):
                target = getattr(target, part)
                # At each part: by what an allowed module only imports, such as `os`, one could reach anything.
                if self._allow is not None and module_of(target) != module_name:
                    raise NotRunnable(
                        f"this worker may not run {path!r}: it is not defined in {module_name}, only imported there"
                    )
        except NotRunnable:
            raise
        except Exception as exc:
            raise NotRunnable(_import_help(path, module_name, exc), unknown=module_name != "__main__") from exc
        if isinstance(target, TaskFunction):
            return cast("TaskFunction[..., Any]", target).func
        if not callable(target):
            raise NotRunnable(f"{path!r} is not a function; enqueue a function of a module")
        return cast("Callable[..., Any]", target)

    def _module(self, path: str, module_name: str) -> Any:
        there = loaded(module_name)
        if there is not None:
            return there
        now_us, failed = self._clock(), self._failed.get(module_name)
        if failed is not None:
            if not failed.is_due(now_us):
                raise NotRunnable(failed.help, unknown=True)
            importlib.invalidate_caches()  # its file may be new
        try:
            return importlib.import_module(module_name)
        # A module that calls sys.exit() must not end the worker.
        except (Exception, SystemExit) as exc:
            help = _import_help(path, module_name, exc)
            if len(self._failed) >= MAX_FAILED_IMPORTS:
                self._failed.clear()
            self._failed[module_name] = _FailedImport(now_us if failed is None else failed.since_us, now_us, help)
            raise NotRunnable(help, unknown=True) from exc


def _may_be_registered_elsewhere(module_name: str, qualname: str) -> bool:
    """Whether this worker registered tasks of that module, which here has nothing of that name: another version may."""
    if all(getattr(task.func, "__module__", None) != module_name for task in REGISTRY.values()):
        return False
    return qualname.partition(".")[0] not in vars(sys.modules.get(module_name, object))


def _import_help(path: str, module_name: str, exc: BaseException | None = None) -> str:
    if module_name == "__main__":
        return f"{path!r} was defined in a script that is not this process: move it into a module that the worker can import"
    if isinstance(exc, AttributeError):
        return f"module {module_name!r} has no {path.partition(':')[2]!r}: check the name, or deploy the worker's code"
    return f"cannot import {module_name!r} ({type(exc).__name__}: {exc}): put it on the worker's import path"


# -- the script that runs: what it defines is in `__main__` only here, other processes import it by its own name --------------


def module_of(func: Any) -> str | None:
    """Returns the module of a function. For the running script it is the name of the file, if importing that would find it."""
    module: str | None = getattr(func, "__module__", None)
    code = getattr(inspect.unwrap(func), "__code__", None) if module == MAIN else None
    if code is None or code.co_filename != getattr(sys.modules.get(MAIN), "__file__", None):
        return module
    return _name_of(code.co_filename) or module


def loaded(name: str) -> ModuleType | None:
    """Returns a module that is imported already, or None. The running script is found by its own name, too."""
    found = sys.modules.get(name)
    if found is None and name == _name_of(getattr(sys.modules.get(MAIN), "__file__", None)):
        return sys.modules[MAIN]
    return found


@functools.lru_cache(maxsize=8)
def _name_of(file: str | None) -> str | None:
    if file is None:
        return None
    spec = getattr(sys.modules.get(MAIN), "__spec__", None)
    name = Path(file).stem if spec is None else spec.name  # it has a spec when it was started with -m
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    origin = None if found is None else found.origin
    return name if origin is not None and os.path.exists(origin) and os.path.samefile(origin, file) else None
