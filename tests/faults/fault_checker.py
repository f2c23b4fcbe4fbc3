"""Reads a store after a run full of faults and says which promises were broken.

I1 nothing acknowledged is missing; I2 no completion by a token that was not the current one; I3 at most one completion and
1 + max_retries starts; I4 groups stay within their limit and start in order; I6 attempts never pass the limit; I7 events
follow the life of a task; I8 nothing is left behind; and the store's counters agree with its rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from omniq import BaseStorage
from omniq.models import Record, State
from omniq.operations import EventRow, Filter

ENDS_A_RUN = frozenset({"succeeded", "retried", "failed", "cancelled", "expired", "released"})


async def everything(storage: BaseStorage) -> tuple[list[Record], list[EventRow]]:
    tasks: list[Record] = []
    cursor: str | None = None
    while True:
        page = await storage.find(Filter(states=tuple(State)), cursor, 1000, newest_first=False)
        tasks += page.tasks
        cursor = page.cursor
        if cursor is None:
            break
    return tasks, await storage.events(limit=10_000_000)


async def broken_promises(
    storage: BaseStorage,
    acknowledged: Iterable[str],
    runs: Iterable[tuple[str, int, int]],
    group_limits: Mapping[str, int],
) -> list[str]:
    """One sentence per broken promise; `runs` is what the side file says: task id, attempt, pid."""
    tasks, events = await everything(storage)
    by_id = {task.id: task for task in tasks}
    histories: dict[str, list[EventRow]] = defaultdict(list)
    for event in events:
        histories[event.task_id].append(event)
    results = await storage.results(list(by_id))
    wrong = [f"acknowledged task {task_id} is gone (I1)" for task_id in acknowledged if task_id not in by_id]
    wrong += [text for task in tasks for text in _bad_end(task)]
    wrong += [text for task in tasks for text in _bad_history(task, histories[task.id])]
    wrong += _bad_runs(runs, histories)
    for task in tasks:
        if task.state is State.DONE:
            stored = results.get(task.id)
            wrong += _bad_result(task, histories[task.id], None if stored is None else stored.result)
    wrong += _bad_groups(events, group_limits)
    wrong += [f"check(): {text}" for text in await storage.check()]
    return wrong


def _bad_end(task: Record) -> list[str]:
    if task.attempts > task.max_attempts:
        return [f"{task.id} has {task.attempts} attempts of {task.max_attempts} (I6)"]
    if task.state is State.DONE:
        return []
    lost = task.last_error is not None and task.last_error.type == "WorkerLost"
    if task.state is State.DEAD and lost and task.attempts == task.max_attempts:
        return []
    return [f"{task.id} ended as {task.state.name} after {task.attempts} of {task.max_attempts}: {task.last_error}"]


def _bad_history(task: Record, history: list[EventRow]) -> list[str]:
    """Walk the events of one task: a run starts only when none is under way, and only its holder completes it."""
    wrong: list[str] = []
    running: EventRow | None = None
    ended = False
    for event in history:
        if event.event == "started":
            if running is not None or ended:
                wrong.append(f"{task.id} started (event {event.seq}) while it ran or after its end (I7)")
            running = event
        elif event.event in ENDS_A_RUN:
            if running is None:
                wrong.append(f"{task.id} {event.event} (event {event.seq}) without a run (I2)")
            elif (event.worker, event.attempt + (event.event == "released")) != (running.worker, running.attempt):
                wrong.append(f"{task.id} {event.event} by {event.worker}, but {running.worker} held it (I2)")
            ended = ended or event.state.final
            running = None
    counted = Counter(event.event for event in history)
    if counted["enqueued"] != 1 or counted["succeeded"] > 1:
        wrong.append(f"{task.id} has {counted['enqueued']} enqueues and {counted['succeeded']} completions (I3)")
    if counted["started"] - counted["released"] > task.max_attempts:
        wrong.append(f"{task.id} started {counted['started']} times, {task.max_attempts} are allowed (I3)")
    return wrong


def _bad_runs(runs: Iterable[tuple[str, int, int]], histories: Mapping[str, list[EventRow]]) -> list[str]:
    """Whatever ran had a lease in the log, and no attempt ran twice."""
    counted = Counter((task, attempt) for task, attempt, _ in runs)
    wrong = [f"attempt {attempt} of {task} ran {n} times" for (task, attempt), n in counted.items() if n > 1]
    for task, attempt in counted:
        if not any(e.event == "started" and e.attempt == attempt for e in histories.get(task, ())):
            wrong.append(f"attempt {attempt} of {task} ran without a lease")
    return wrong


def _bad_result(task: Record, history: list[EventRow], result: bytes | None) -> list[str]:
    """The stored result is that of the attempt which the log calls successful."""
    if result is None:
        return [f"{task.id} has no result"]
    done = [e for e in history if e.event == "succeeded"]
    if not done:
        return [f"{task.id} is DONE without a completion in the log"]
    attempt, _, pid = str(msgspec.json.decode(result)).partition("-")
    held_by = (done[-1].worker or "").split(":")[1]
    if (attempt, pid) != (str(done[-1].attempt), held_by):
        return [f"{task.id} has the result of attempt {attempt} in {pid}, not of {done[-1].attempt} in {held_by} (I2)"]
    return []


def _bad_groups(events: Iterable[EventRow], limits: Mapping[str, int]) -> list[str]:
    wrong: list[str] = []
    enqueued: dict[str, list[str]] = defaultdict(list)
    first_starts: dict[str, list[str]] = defaultdict(list)
    running: dict[str, set[str]] = defaultdict(set)
    seen: set[str] = set()
    for event in events:
        group = event.group
        if group is None:
            continue
        if event.event == "enqueued":
            enqueued[group].append(event.task_id)
        elif event.event == "started":
            running[group].add(event.task_id)
            if len(running[group]) > limits[group]:
                wrong.append(f"group {group} had {len(running[group])} runs at event {event.seq}, limit {limits[group]} (I4)")
            if event.task_id not in seen:
                seen.add(event.task_id)
                first_starts[group].append(event.task_id)
        elif event.event in ENDS_A_RUN:
            running[group].discard(event.task_id)
    for group, ids in first_starts.items():
        if ids != enqueued[group][: len(ids)]:
            wrong.append(f"group {group} did not start in the order of enqueue (I4)")
    return wrong
