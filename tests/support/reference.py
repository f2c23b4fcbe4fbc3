"""A driver beside the reference model: the same stories at every run of `make test`, new ones with `make slow`."""

import os
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from omniq.storage.base import BaseStorage
from omniq.testing import FakeClock
from omniq.testing.stateful import driver_machine

Make = Callable[[FakeClock], BaseStorage]
ROUNDS = int(os.environ.get("ROUNDS") or 20)


def agrees(make_storage: Make, stories: int) -> None:
    _compare(make_storage, stories, repeat=True)


def agrees_on_new_stories(make_storage: Make, stories_per_round: int) -> None:
    _compare(make_storage, stories_per_round * ROUNDS, repeat=False)


def _compare(make_storage: Make, stories: int, *, repeat: bool) -> None:
    run_state_machine_as_test(
        driver_machine(make_storage),
        settings=settings(
            max_examples=stories,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=repeat,
            database=None,
            phases=[Phase.generate, Phase.shrink],
        ),
    )
