"""The memory driver against the whole contract and against the reference model."""

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from omniq.storage.memory import MemoryStorage
from omniq.testing import FakeClock, conformance
from omniq.testing.stateful import driver_machine


def make_storage(clock: FakeClock) -> MemoryStorage:
    return MemoryStorage(clock=clock)


test_conformance = conformance.tests(make_storage, capabilities=MemoryStorage.capabilities)


def test_the_reference_model_agrees() -> None:
    run_state_machine_as_test(
        driver_machine(make_storage),
        settings=settings(max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)),
    )
