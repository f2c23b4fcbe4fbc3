"""The suite itself: complete, well named, and able to fail."""

import re
from datetime import timedelta

import pytest

from omniq.models import Record
from omniq.operations import Capabilities
from omniq.storage.memory import MemoryStorage
from omniq.testing import FakeClock, conformance

# Driver rules that no storage can be asked about: 52 is about one driver's migrations, 53 to 66 are about workers.
NOT_FOR_DRIVERS = {52, *range(53, 67)}


def test_every_rule_for_drivers_has_a_case() -> None:
    covered = {int(rule) for case in conformance.cases() for rule in case.rules if rule.isdigit()}
    assert covered == set(range(1, 81)) - NOT_FOR_DRIVERS


def test_every_section_of_the_contract_has_a_case() -> None:
    covered = {rule for case in conformance.cases() for rule in case.rules if rule.startswith("§")}
    assert covered == {f"§{n}" for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14)}


def test_every_case_is_named_by_a_sentence() -> None:
    for case in conformance.cases():
        assert re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+){2,}", case.name), case.name


def test_what_a_driver_does_not_promise_is_left_out() -> None:
    poor = Capabilities(durability="none", cross_queue=False, due_order=False, store_clock=True)
    left = conformance.cases(durable=False, capabilities=poor)
    assert 0 < len(left) < len(conformance.cases())
    assert all(not case.needs for case in left)


def test_a_broken_driver_is_caught_without_pytest() -> None:
    class Forgetful(MemoryStorage):
        async def get(self, id: str, queue: str | None = None) -> Record | None:
            task = await super().get(id, queue)
            if task is not None:
                task.payload = None
            return task

    failures = conformance.run(lambda clock: Forgetful(clock=clock))
    assert "enqueue-every_field_comes_back" in failures
    assert not conformance.run(lambda clock: MemoryStorage(clock=clock))


def test_the_fake_clock_moves_when_told() -> None:
    clock = FakeClock()
    start = clock()
    assert start % 1000 == 0
    assert clock.advance(1.5) == start + 1_500_000 == clock()
    clock.advance(timedelta(milliseconds=2))
    assert clock() == start + 1_502_000
    assert clock.now.tzinfo is not None
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)
