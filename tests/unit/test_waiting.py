"""Who is woken by what, inside one process."""

import asyncio
import threading
import time
from typing import Any

from omniq.storage.waiting import Waiters


async def _waiting(waiters: Waiters, **named: Any) -> "asyncio.Task[None]":
    begun = asyncio.Event()
    waiters.on_waiting = begun.set
    task = asyncio.create_task(waiters.wait(**named, timeout=5))
    await asyncio.wait_for(begun.wait(), 5)
    return task


async def test_a_commit_wakes_those_it_concerns_and_no_others() -> None:
    waiters = Waiters()
    mail = await _waiting(waiters, queues=["mail"])
    other = await _waiting(waiters, queues=["other"])
    ended = await _waiting(waiters, tasks=["a"])
    anything = await _waiting(waiters)
    events = await _waiting(waiters, events=True)
    waiters.notify(queues={"mail"})
    await asyncio.gather(mail, anything, events)
    assert not other.done()
    assert not ended.done()
    waiters.notify(tasks={"a"})
    await ended
    assert not other.done()
    waiters.notify_all()
    await other
    assert not waiters.anyone()


async def test_a_change_between_looking_and_waiting_is_not_missed() -> None:
    waiters = Waiters()
    seen = waiters.changes
    waiters.notify(queues={"other"})
    await asyncio.wait_for(waiters.wait(queues=["mail"], after=seen), 1)


async def test_waiting_ends_when_time_is_up() -> None:
    waiters = Waiters()
    before = time.monotonic()
    await waiters.wait(timeout=0.02)
    assert 0.015 <= time.monotonic() - before < 1
    await waiters.wait(timeout=0)
    assert not waiters.anyone()


async def test_a_cancelled_wait_leaves_nothing() -> None:
    waiters = Waiters()
    task = await _waiting(waiters)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not waiters.anyone()


async def test_another_thread_may_ring() -> None:
    waiters = Waiters()
    task = await _waiting(waiters, queues=["q"])
    thread = threading.Thread(target=waiters.notify, args=({"q"},))
    thread.start()
    await task
    thread.join()


async def test_a_waiter_whose_loop_is_gone_disturbs_nobody() -> None:
    waiters = Waiters()

    def begin_to_wait_and_leave() -> None:
        loop = asyncio.new_event_loop()
        task = loop.create_task(waiters.wait())
        loop.run_until_complete(asyncio.sleep(0))
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()

    await asyncio.to_thread(begin_to_wait_and_leave)
    assert waiters.anyone()
    waiters.notify_all()
    mine = await _waiting(waiters)
    waiters.notify_all()
    await mine
