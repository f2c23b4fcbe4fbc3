"""The conformance suite: everything that a storage driver must do, as short cases that run on any driver.

The author of a driver writes one factory and runs the whole suite:

    from omniq.testing import conformance

    def make_storage(clock):
        return MyStorage(fresh_place(), clock=clock)

    test_conformance = conformance.tests(make_storage)

`make_storage(clock)` returns a new, empty storage each time. For a driver that keeps its tasks after `close`, pass also
`reopen=`, a function that takes a storage and a clock and returns another storage object on the same store. For a driver that
declares less than the full `Capabilities`, pass `capabilities=`; cases that need more are then left out.
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
    """Returns the cases that hold for a driver with these abilities. By default a driver has all abilities."""
    _load()
    able = capabilities or Capabilities(durability="power", restores=True)
    has = {
        "durable": durable,
        "cross_queue": able.cross_queue,
        "due_order": able.due_order,
        "own_clock": not able.store_clock,
        "restores": able.restores,
    }
    return [case for case in CASES.values() if all(has[need] for need in case.needs)]


def tests(
    make_storage: Factory, *, reopen: Reopen | None = None, capabilities: Capabilities | None = None
) -> Callable[[Case], None]:
    """Returns a pytest test function with one parameter set per case. It is not async: no plugin for asyncio is needed."""
    import pytest  # only here, so that `run` works where pytest is not installed

    found = cases(durable=reopen is not None, capabilities=capabilities)

    @pytest.mark.parametrize("case", found, ids=[case.id for case in found])
    def test_conformance(case: Case) -> None:
        run_case(case, make_storage, reopen)

    return test_conformance


def run(
    make_storage: Factory, *, reopen: Reopen | None = None, capabilities: Capabilities | None = None
) -> dict[str, Exception]:
    """Runs the whole suite without pytest. Returns the errors of the cases that failed, by the names of the cases."""
    failures: dict[str, Exception] = {}
    for case in cases(durable=reopen is not None, capabilities=capabilities):
        try:
            run_case(case, make_storage, reopen)
        except Exception as exc:
            failures[case.id] = exc
    return failures


def run_case(case: Case, make_storage: Factory, reopen: Reopen | None = None) -> None:
    """Runs a case on a storage of its own, then checks that storage and closes it."""

    async def whole() -> None:
        clock = FakeClock()
        bench = Bench(make_storage(clock), clock, reopen)
        try:
            await case.body(bench)
            if not bench.closed:
                await bench.verify()
        finally:
            await bench.close()

    # A new event loop for each case, so that nothing of a case that failed reaches the next one.
    asyncio.run(whole())


def _load() -> None:
    """Imports the cases, which register themselves."""
    # Before the import, or else pytest shows a failed assertion of a case without the values that it compared.
    if _CASES_PACKAGE not in sys.modules and "pytest" in sys.modules:
        sys.modules["pytest"].register_assert_rewrite(_CASES_PACKAGE)
    package = importlib.import_module(_CASES_PACKAGE)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{_CASES_PACKAGE}.{module.name}")
