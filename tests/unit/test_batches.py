"""Calls of Redis that travel together: the one that the script cannot take fails alone."""

import asyncio
from collections.abc import Sequence
from typing import Any

from omniq.errors import StoreError
from omniq.storage.redis.batches import Batches


async def test_a_call_that_the_script_cannot_take_fails_alone() -> None:
    calls: list[tuple[list[Any], bool]] = []

    async def script(key: str, entries: Sequence[Any], now: int | None, repeat: bool) -> list[Any]:
        calls.append((list(entries), repeat))
        await asyncio.sleep(0)
        if "bad" in entries:
            raise StoreError("the script failed")
        return [f"{entry} done" for entry in entries]

    batches = Batches(script)  # type: ignore[arg-type]
    wanted = ["first", "second", "a", "bad", "b"]
    answers = await asyncio.gather(*[batches.send("k", [w], None, False) for w in wanted], return_exceptions=True)
    await batches.close()
    first, second, a, bad, b = answers
    assert (first, second, a, b) == (["first done"], ["second done"], ["a done"], ["b done"])
    assert isinstance(bad, StoreError)
    together, alone = [c for c in calls if len(c[0]) > 1], [c for c in calls if len(c[0]) == 1 and c[1]]
    assert together == [(["a", "bad", "b"], False)]
    assert [entries for entries, _ in alone] == [["a"], ["bad"], ["b"]], "what was done already is sent as a repeat"
