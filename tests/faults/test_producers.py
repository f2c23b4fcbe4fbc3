"""What a producer was told is stored is stored, whenever it is killed."""

import random

import pytest
from fault_processes import Fleet, on_each_store, until

from omniq import OmniQ


@on_each_store
@pytest.mark.parametrize("durability", ["full", "process"])
def test_every_id_that_a_killed_producer_printed_is_in_the_store(fleet: Fleet, seed: int, durability: str) -> None:
    dice = random.Random(seed)
    url = f"{fleet.url}?durability={durability}"
    for number in range(5):
        producer = fleet.producer(f"{seed}-{number}", per_second=100_000, lease=30, url=url)
        wanted = dice.randint(1, 300)
        until(lambda p=producer, n=wanted: len(p.lines) >= n, f"{wanted} enqueues")
        producer.kill()
        assert producer.errors == ""
    printed = [i for p in fleet.all for line in p.lines for i in line.split()]
    assert len(set(printed)) == len(printed) > 5
    with OmniQ.from_url(url) as oq:
        assert [i for i in printed if oq.get_task(i) is None] == []
        stored = sum(c.ready for c in oq.counts())
    most_unprinted_per_kill = 20  # one enqueue_many may have been stored before its ids could be printed
    assert len(printed) <= stored <= len(printed) + 5 * most_unprinted_per_kill


@on_each_store
def test_a_killed_bulk_enqueue_leaves_whole_transactions(fleet: Fleet, seed: int) -> None:
    """`enqueue_many` writes 1,000 rows per transaction; a kill leaves a whole number of them."""
    code = """
import sys
import fault_jobs
from omniq import OmniQ
oq = OmniQ.from_url(sys.argv[1])
print("ready", flush=True)
oq.enqueue_many(fault_jobs.nothing, [()] * 1_000_000)
"""
    dice = random.Random(seed)
    with OmniQ.from_url(fleet.url) as oq:
        for _ in range(3):
            producer = fleet.start("bulk", "-c", code, fleet.url).ready()
            wanted = sum(c.ready for c in oq.counts()) + dice.randint(1, 20_000)
            until(lambda n=wanted: sum(c.ready for c in oq.counts()) >= n, "some rows")
            producer.kill()
            assert sum(c.ready for c in oq.counts()) % 1000 == 0
        assert oq.check() == []
