"""Fan-in: each member of a key is counted once, and exactly one member is the last, even if it has to ask again."""

from __future__ import annotations

from omniq.errors import IdempotencyConflict, Invalid
from omniq.operations import CountFanIn, FannedIn, OpenFanIn
from omniq.testing.bench import Bench, S, case


async def opened(bench: Bench, key: str, expected: int, ttl_us: int = 60 * S) -> int:
    answer: FannedIn = await bench.do(OpenFanIn(key=key, expected=expected, ttl_us=ttl_us))
    return answer.left


async def counted(bench: Bench, key: str, *members: str) -> list[int]:
    answers: list[FannedIn] = [await bench.do(CountFanIn(key=key, member=member)) for member in members]
    return [answer.left for answer in answers]


@case(rules="§3")
async def the_last_member_of_a_fan_in_hears_zero(bench: Bench) -> None:
    assert await opened(bench, "k", 3) == 3
    assert await counted(bench, "k", "a", "b", "c") == [2, 1, 0]


@case(rules="§3")
async def a_member_counts_once_and_hears_the_same_again(bench: Bench) -> None:
    # A member whose answer got lost asks again. If the last one then heard another number, nobody would go on.
    await opened(bench, "k", 2)
    assert await counted(bench, "k", "a", "a", "a") == [1, 1, 1]
    assert await counted(bench, "k", "b", "b", "a") == [0, 0, 1]


@case(rules="§3")
async def a_member_nobody_waits_for_hears_minus_one(bench: Bench) -> None:
    assert await counted(bench, "never opened", "a") == [-1]
    await opened(bench, "k", 1)
    assert await counted(bench, "k", "a", "one too many") == [0, -1]


@case(rules="§3")
async def the_same_fan_in_may_be_opened_again(bench: Bench) -> None:
    # The caller that opens may have lost its answer too, and members may have come meanwhile.
    await opened(bench, "k", 2)
    await counted(bench, "k", "a")
    assert await opened(bench, "k", 2) == 1
    await counted(bench, "k", "b")
    assert await opened(bench, "k", 2) == 0
    assert await counted(bench, "k", "b") == [0]


@case(rules="§3")
async def a_fan_in_with_another_number_is_a_conflict(bench: Bench) -> None:
    await opened(bench, "k", 2)
    await bench.refused(IdempotencyConflict, OpenFanIn(key="k", expected=3))
    await counted(bench, "k", "a", "b")
    await bench.refused(IdempotencyConflict, OpenFanIn(key="k", expected=3))


@case(rules="§3")
async def a_fan_in_is_forgotten_after_its_time(bench: Bench) -> None:
    await opened(bench, "done", 1, 5 * S)
    await opened(bench, "open", 2, 5 * S)
    await counted(bench, "done", "a")
    await counted(bench, "open", "a")
    bench.advance(5)
    # Its time counts at once: `purge` may come much later.
    assert await counted(bench, "done", "a") == [-1]
    await bench.purge()
    assert await opened(bench, "open", 3) == 3
    assert await opened(bench, "done", 2) == 2
    assert await counted(bench, "done", "a", "b") == [1, 0]


@case(rules="§3,§1")
async def a_repeated_count_is_counted_once(bench: Bench) -> None:
    await opened(bench, "k", 2)
    await bench.do(OpenFanIn(key="k", expected=2, ttl_us=60 * S), repeat=True)
    for _ in range(2):
        answer: FannedIn = await bench.do(CountFanIn(key="k", member="a"), repeat=True)
        assert answer.left == 1


@case(rules="§3")
async def a_fan_in_needs_a_proper_key_and_number(bench: Bench) -> None:
    # Braces would lead to another slot of a Redis cluster.
    for key in ("", "a{b", "a}b", "x" * 129):
        await bench.invalid(Invalid, OpenFanIn(key=key, expected=1))
        await bench.invalid(Invalid, CountFanIn(key=key, member="a"))
    await bench.invalid(Invalid, OpenFanIn(key="k", expected=0))
    await bench.invalid(Invalid, OpenFanIn(key="k", expected=1, ttl_us=0))
    await bench.invalid(Invalid, CountFanIn(key="k", member=""))
    await bench.invalid(Invalid, bench.new("a"), CountFanIn(key="k", member="a"))


@case(rules="§3,80", needs="durable")
async def a_fan_in_survives_a_restart(bench: Bench) -> None:
    await opened(bench, "k", 2)
    await counted(bench, "k", "a")
    await bench.reopen()
    assert await counted(bench, "k", "a", "b") == [1, 0]
