"""Time for Hypothesis: where a store and the model differ, it looks for the shortest story that shows it."""

import pytest

SHRINKING_S = 600.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "the_reference_model" in item.name and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SHRINKING_S))
