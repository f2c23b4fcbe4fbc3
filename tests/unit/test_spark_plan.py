"""Offsets and the parts between them: whatever the split, each event is read once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniq.errors import EventsLost, Invalid
from omniq.operations import Shard
from omniq.spark.reading.plan import (
    ROWS_PER_PART,
    Offset,
    advance,
    between,
    check_whole,
    earliest,
    latest,
    offset_of,
    packed,
    parts_for,
    size,
)
from omniq.storage.scanning import Range

NAMES = st.sampled_from(["", "default", "mail", "ähm"])
SHARDS = st.dictionaries(NAMES, st.tuples(st.integers(1, 500), st.integers(0, 500)), max_size=4).map(
    lambda found: [Shard(name=name, first=first, last=first - 1 + rows) for name, (first, rows) in found.items()]
)


def numbers(parts: list[tuple[Range, ...]]) -> list[tuple[str, int]]:
    return [(r.shard, seq) for ranges in parts for r in ranges for seq in range(r.after + 1, r.upto + 1)]


def everything(shards: list[Shard]) -> list[tuple[str, int]]:
    return [(shard.name, seq) for shard in shards for seq in range(shard.first, shard.last + 1)]


@given(SHARDS, st.one_of(st.none(), st.integers(1, 40)))
def test_any_split_holds_every_event_once(shards: list[Shard], parts: int | None) -> None:
    found = numbers(between(earliest("s", shards), latest("s", shards), parts))
    assert sorted(found) == sorted(everything(shards))


@given(SHARDS, st.integers(1, 200), st.integers(1, 7))
def test_batches_of_any_size_hold_every_event_once(shards: list[Shard], limit: int, parts: int) -> None:
    start, target = earliest("s", shards), latest("s", shards)
    found: list[tuple[str, int]] = []
    while (end := advance(start, target, shards, limit)) != start:
        batch = numbers(between(start, end, parts))
        assert 0 < len(batch) <= limit
        found += batch
        start = end
    assert start == target
    assert sorted(found) == sorted(everything(shards))


@given(SHARDS, st.integers(1, 100))
def test_a_part_is_not_much_larger_than_its_share(shards: list[Shard], parts: int) -> None:
    found = between(earliest("s", shards), latest("s", shards), parts)
    share = -(-len(everything(shards)) // parts)
    assert all(sum(map(size, ranges)) <= share for ranges in found)
    assert len(found) <= 2 * parts


def test_many_small_shards_share_a_part() -> None:
    ranges = [Range("tasks", f"q-{n}", 0, 10) for n in range(1000)]
    found = packed(ranges, 4)
    assert len(found) == 4
    assert [r for ranges in found for r in ranges] == ranges


def test_a_shard_that_appears_later_is_read_from_its_beginning() -> None:
    start = Offset("s", {"mail": 7})
    shards = [Shard(name="mail", first=1, last=9), Shard(name="new", first=1, last=3)]
    end = advance(start, latest("s", shards), shards, None)
    assert end == Offset("s", {"mail": 9, "new": 3})
    assert numbers(between(start, end)) == [("mail", 8), ("mail", 9), ("new", 1), ("new", 2), ("new", 3)]


def test_a_shard_that_is_gone_keeps_its_place() -> None:
    start = Offset("s", {"gone": 4, "mail": 7})
    shards = [Shard(name="mail", first=1, last=8)]
    assert advance(start, latest("s", shards), shards, None) == Offset("s", {"gone": 4, "mail": 8})


def test_a_limit_is_shared_by_the_shards() -> None:
    shards = [
        Shard(name="big", first=1, last=1000),
        Shard(name="small", first=1, last=3),
        Shard(name="other", first=1, last=900),
    ]
    end = advance(Offset("s", {}), latest("s", shards), shards, 103)
    assert end.shards == {"small": 3, "other": 50, "big": 50}


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (Offset("other", {"": 5}), "in the store other, but the store there now is s"),
        (Offset("s", {"": 3}), "after event 3, but the store keeps only those from 5 on"),
        (Offset("s", {"": 10}), "after event 10, but the store has only 9"),
    ],
)
def test_what_was_lost_is_said_with_both_sides(start: Offset, said: str) -> None:
    with pytest.raises(EventsLost, match=said):
        check_whole(start, "s", [Shard(name="", first=5, last=9)])
    check_whole(start, "s", [Shard(name="", first=5, last=9)], lenient=True)


def test_nothing_is_lost_at_the_edges() -> None:
    for after in (4, 9):
        check_whole(Offset("s", {"": after}), "s", [Shard(name="", first=5, last=9)])


@pytest.mark.parametrize("start", [Offset("other", {"": 5}), Offset("s", {"": 3}), Offset("s", {"": 100})])
def test_a_lenient_query_goes_on_with_what_is_there(start: Offset) -> None:
    shards = [Shard(name="", first=5, last=9)]
    end = advance(start, latest("s", shards), shards, 3)
    assert end == Offset("s", {"": 7})
    wanted = [seq for _, seq in numbers(between(start, end)) if seq >= 5]
    assert wanted == [5, 6, 7]
    assert advance(end, latest("s", shards), shards, 3) == Offset("s", {"": 9})


def test_a_target_that_was_purged_meanwhile_is_still_reached() -> None:
    target = Offset("s", {"": 6})
    shards = [Shard(name="", first=9, last=12)]
    assert advance(Offset("s", {"": 2}), target, shards, 100) == target


@given(st.dictionaries(st.text(max_size=5), st.integers(0, 2**60)), st.text(max_size=8))
def test_an_offset_survives_its_json(shards: dict[str, int], store: str) -> None:
    offset = Offset(store, shards)
    assert offset_of(offset.to_json()) == offset


@pytest.mark.parametrize(
    "given", ["", "{}", "7", '{"shards": 3}', '{"shards": {"": -1}}', '{"shards": {"": true}}', '{"shards": {"": "7"}}']
)
def test_what_is_no_offset_is_refused_with_an_example(given: str) -> None:
    with pytest.raises(Invalid, match=r"write \{'v': 1, 'store'"):
        offset_of(given)


def test_an_offset_of_a_later_version_is_refused() -> None:
    with pytest.raises(Invalid, match="version 2; this omniq knows 1"):
        offset_of({"v": 2, "store": "s", "shards": {}})


def test_small_tables_are_read_in_one_part_and_large_ones_in_two_per_core() -> None:
    assert parts_for(10, 8) == 1
    assert parts_for(3 * ROWS_PER_PART, 8) == 3
    assert parts_for(1000 * ROWS_PER_PART, 8) == 16
    assert parts_for(10, 8, asked=5) == 5
