"""Whether an overdue lease is still renewed, as far as one process can see."""

from collections.abc import Callable

import pytest

from omniq.storage.liveness import MAX_SEEN, Renewals, WatchedLease

S = 1_000_000
HOUR = 3600 * S


class Watch:
    """Renewals on a clock of the test's own, with workers that live."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.living = {"w"}
        self.renewals = Renewals(self.living.__contains__, lambda: self.seconds)

    def over(
        self, *held: WatchedLease, now_us: int, lost: tuple[str, ...] = (), whole: bool = True, given: bool = False
    ) -> list[int]:
        return [lease.seq for lease in self.renewals.over(held, now_us, lost, whole=whole, given=given)]


@pytest.fixture
def watch() -> Watch:
    return Watch()


def lease(until_s: float, seq: int = 1, worker: str = "w", length_s: float = 30) -> WatchedLease:
    return WatchedLease(seq, "token", worker, int(until_s * S), int((until_s - length_s) * S))


def test_a_lease_that_moves_is_never_over_however_far_ahead_the_clock_is(watch: Watch) -> None:
    for second in range(0, 300, 1):
        watch.seconds = second
        renewed = second // 10 * 10
        assert watch.over(lease(renewed + 30), now_us=second * S + HOUR) == []


def test_a_lease_that_stands_still_is_over_when_it_ends(watch: Watch) -> None:
    """Its holder was watched all the while, so nothing is added to the lease."""
    assert watch.over(lease(30), now_us=11 * S) == []
    watch.seconds = 18.9
    assert watch.over(lease(30), now_us=int(29.9 * S)) == []
    watch.seconds = 19
    assert watch.over(lease(30), now_us=30 * S) == [1]


def test_an_overdue_lease_at_first_sight_is_looked_at_again_for_less_than_its_length(watch: Watch) -> None:
    assert watch.over(lease(30), now_us=HOUR) == []
    watch.seconds = 17.9
    assert watch.over(lease(30), now_us=HOUR) == []
    watch.seconds = 18
    assert watch.over(lease(30), now_us=HOUR) == [1]


@pytest.mark.parametrize("worker", ["", "of another host"])
def test_without_a_living_process_the_clock_alone_decides(watch: Watch, worker: str) -> None:
    assert watch.over(lease(30, worker=worker), now_us=30 * S - 1) == []
    assert watch.over(lease(30, worker=worker), now_us=30 * S) == [1]


def test_a_lost_worker_is_not_waited_for(watch: Watch) -> None:
    assert watch.over(lease(30), now_us=0, lost=("w",)) == [1]


def test_a_holder_whose_own_beats_are_past_the_end_does_not_renew(watch: Watch) -> None:
    """It lives and beats, and has forgotten this task: an answer may have got lost."""
    assert watch.over(lease(30, length_s=-1), now_us=31 * S) == [1]


def test_leases_granted_together_are_told_apart_and_come_oldest_first(watch: Watch) -> None:
    both = lease(20, seq=2), lease(10, seq=1)
    watch.over(*both, now_us=0)
    watch.seconds = 18
    assert watch.over(*both, now_us=HOUR) == [1, 2]
    assert watch.over(lease(40, seq=2), lease(10, seq=1), now_us=HOUR) == [1]


def test_a_moment_that_the_caller_gives_counts_as_it_is(watch: Watch) -> None:
    assert watch.over(lease(30), lease(31, seq=2), now_us=30 * S, given=True) == [1]


def test_a_look_at_some_queues_forgets_nothing_of_the_others(watch: Watch) -> None:
    watch.over(lease(30), now_us=HOUR)
    watch.seconds = 18
    assert watch.over(now_us=HOUR, whole=False) == []
    assert watch.over(lease(30), now_us=HOUR) == [1]


def test_what_was_seen_is_forgotten_in_the_end(watch: Watch) -> None:
    watch.over(*[lease(30, seq=seq) for seq in range(MAX_SEEN + 1)], now_us=HOUR, whole=False)
    watch.over(lease(30, seq=0), now_us=HOUR, whole=False)
    watch.seconds = 18
    assert watch.over(lease(30, seq=1), now_us=HOUR) == [], "seen for the first time again"


def test_the_lock_of_a_worker_is_asked_for_once_a_look() -> None:
    asked: list[str] = []

    def lives(worker: str) -> bool:
        asked.append(worker)
        return True

    check: Callable[[str], bool] = lives
    Renewals(check).over([lease(30, seq=n) for n in range(50)], HOUR, (), whole=True)
    assert asked == ["w"]
