"""The bulk side of a store that does not answer, or whose answer gets lost: every call may be repeated, and is."""

import pytest

from omniq.errors import OutcomeUnknown, StoreUnavailable
from omniq.operations import Enqueue, RunState
from omniq.storage import sending
from omniq.storage.bulk import Bulk
from omniq.storage.memory import MemoryStorage
from omniq.testing.faulty import Fault, FaultyStorage


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "PAUSES_S", (0.001,) * 3)


def tasks(n: int) -> list[Enqueue]:
    return [Enqueue(id=f"t{i}", name="m:f", idempotency_key=f"k{i}") for i in range(n)]


@pytest.mark.parametrize("fault", ["unknown", "unavailable"])
def test_a_call_whose_answer_is_lost_is_sent_again(fault: Fault) -> None:
    storage = FaultyStorage(MemoryStorage())
    with Bulk(storage) as bulk:
        storage.strike(fault, "ok", fault, fault, "ok", fault, fault, fault, "ok")
        bulk.open_run("r", "default")
        bulk.stage("r", tasks(5))
        done = bulk.commit_run("r")
    assert (done.state, done.new, done.released, done.settled) == (RunState.COMMITTED, 5, 5, True)
    assert storage.done[fault] == 6


@pytest.mark.parametrize(("fault", "error"), [("unknown", OutcomeUnknown), ("unavailable", StoreUnavailable)])
def test_a_store_that_stays_away_is_given_up(fault: Fault, error: type[Exception]) -> None:
    storage = FaultyStorage(MemoryStorage())
    with Bulk(storage) as bulk:
        storage.strike(*([fault] * 4))
        with pytest.raises(error):
            bulk.open_run("r", "default")
        assert (storage.done[fault], storage.script) == (4, [])
