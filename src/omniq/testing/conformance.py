"""The conformance suite: what every storage driver must do, as short cases that run on any of them.

A driver's author writes one factory and runs the suite whole:

    from omniq.testing import conformance

    def make_storage(clock):
        return MyStorage(fresh_place(), clock=clock)

    test_conformance = conformance.tests(make_storage)

`make_storage(clock)` gives a fresh, empty storage each time. A driver that keeps its tasks after `close` also passes
`reopen=`, a function that takes a storage and a clock and gives another storage object on the same store. A driver that
declares less than the others passes `capabilities=`; what it does not promise is then left out.
"""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import sys
from collections.abc import Callable

from omniq.operations import Capabilities
from omniq.storage.base import BaseStorage
from omniq.testing.bench import CASES, Bench, Case, Reopen
from omniq.testing.clock import FakeClock

Factory = Callable[[FakeClock], BaseStorage]
_CASES_PACKAGE = "omniq.testing.cases"


def cases(*, durable: bool = True, capabilities: Capabilities | None = None) -> list[Case]:
    """The cases that hold for a driver with these abilities; all of them by default."""
    _load()
    has = {"durable"} if durable else set[str]()
    if capabilities is None or capabilities.cross_queue:
        has.add("cross_queue")
    if capabilities is None or capabilities.due_order:
        has.add("due_order")
    if capabilities is None or not capabilities.store_clock:
        has.add("own_clock")
    if capabilities is None or capabilities.restores:
        has.add("restores")
    return [case for case in CASES.values() if has.issuperset(case.needs)]


def tests(
    make_storage: Factory, *, reopen: Reopen | None = None, capabilities: Capabilities | None = None
) -> Callable[[Case], None]:
    """A pytest test function with one parameter set per case. It is plain: no plugin for asyncio is needed."""
    import pytest

    found = cases(durable=reopen is not None, capabilities=capabilities)

    @pytest.mark.parametrize("case", found, ids=[case.id for case in found])
    def test_conformance(case: Case) -> None:
        run_case(case, make_storage, reopen)

    return test_conformance


def run(
    make_storage: Factory, *, reopen: Reopen | None = None, capabilities: Capabilities | None = None
) -> dict[str, Exception]:
    """The whole suite without pytest: the cases that failed, by name, with what they raised."""
    failures: dict[str, Exception] = {}
    for case in cases(durable=reopen is not None, capabilities=capabilities):
        try:
            run_case(case, make_storage, reopen)
        except Exception as exc:
            failures[case.id] = exc
    return failures


def run_case(case: Case, make_storage: Factory, reopen: Reopen | None = None) -> None:
    """One case on a storage of its own, which is checked afterwards and closed."""

    async def whole() -> None:
        clock = FakeClock()
        bench = Bench(make_storage(clock), clock, reopen)
        try:
            await case.body(bench)
            if not bench.closed:
                await bench.verify()
        finally:
            await bench.close()

    asyncio.run(whole())


def _load() -> None:
    """Import the cases; under pytest with its detailed assertion messages."""
    if _CASES_PACKAGE not in sys.modules and "pytest" in sys.modules:
        sys.modules["pytest"].register_assert_rewrite(_CASES_PACKAGE)
    package = importlib.import_module(_CASES_PACKAGE)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{_CASES_PACKAGE}.{module.name}")
