"""Calls of Redis that the script carries out in parts: every answer reaches its transaction."""

from typing import Any

import pytest

from omniq.models import State
from omniq.operations import Cancel, Enqueue
from omniq.storage.redis import packing


@pytest.mark.parametrize("rows", [1, 2, 4, 7])
def test_a_run_that_is_cut_several_times_is_answered_whole(rows: int) -> None:
    """`rows`: of how many the script takes care before its budget is spent."""
    packed = packing.Packed(
        [(Enqueue(id=f"t{n}", name="job", queue="q"),) for n in range(7)] + [(Cancel(queue="q", id="t0"),)] * 2
    )

    def script(entries: list[packing.Entry]) -> list[Any]:
        first = entries[0][0]
        return [[1] * min(rows, len(first["rows"]) // 3)] if first["kind"] == "enqueues" else [[[int(State.CANCELLED)]]]

    answers: list[Any] = []
    rest = packed.entries
    while rest:
        more = script(rest)
        answers, rest = packing.joined(packed.entries, answers, more), packing.rest_of(rest, more)
    assert [type(answer[0]).__name__ for answer in packed.read(answers)] == ["Enqueued"] * 7 + ["Cancelled"] * 2  # type: ignore[index]
