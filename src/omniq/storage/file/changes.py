"""The changes of one commit of a file store: lines to write and to blank, and rows of the tables that are in no line."""

from __future__ import annotations

import copy
from collections.abc import Callable

import msgspec

from omniq.operations import WorkerInfo
from omniq.storage.file.index import Counters, Index, Place
from omniq.storage.ledger import FanIn, Lane, QueueRow, StagedRun


class Rows(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Rows of the small tables: those that a commit changed, or all."""

    queues: list[QueueRow] = []
    lanes: list[Lane] = []
    lanes_gone: list[tuple[str, str]] = []
    deferred: dict[str, bool] = {}
    undeferred: list[str] = []
    workers: list[WorkerInfo] = []
    workers_gone: list[str] = []
    fan_ins: dict[str, FanIn] = {}
    fan_ins_gone: list[str] = []
    members: dict[str, dict[str, int]] = {}  # of a fan-in: each that was counted, and what it was told
    runs: list[StagedRun] = []
    runs_gone: list[tuple[str, str]] = []
    claims: dict[str, tuple[str, tuple[str, ...]]] = {}  # of a staged task: its queue, and the runs that claim it too
    counters: Counters | None = None

    def apply(self, index: Index) -> None:
        for row in self.queues:
            index.queues[row.queue] = row
        # First what went: a commit may delete a lane or a fan-in and make another of the same name.
        for queue, group in self.lanes_gone:
            index.remove_lane(queue, group)
        for lane in self.lanes:
            index.put_lane(lane)
        for id in self.undeferred:
            index.deferrals.pop(id, None)
        index.deferrals.update(self.deferred)
        for worker in self.workers_gone:
            index.workers.pop(worker, None)
        for info in self.workers:
            index.workers[info.worker] = info
        for key in self.fan_ins_gone:
            index.fan_ins.pop(key, None)
            index.members.pop(key, None)
        index.fan_ins.update(self.fan_ins)
        for key, members in self.members.items():
            index.members.setdefault(key, {}).update(members)
        for place in self.runs_gone:
            index.runs.pop(place, None)
        for run in self.runs:
            index.runs[run.queue, run.run_id] = run
        for id, (queue, runs) in self.claims.items():
            index.put_claims(id, queue, runs)
        if self.counters is not None:
            index.counters = self.counters

    @staticmethod
    def of(index: Index) -> Rows:
        # Copies of the tables: a checkpoint writes them after the lock was let go, when the index may have gone on.
        return Rows(
            queues=list(index.queues.values()),
            lanes=[lane for lanes in index.lanes.values() for lane in lanes.values()],
            deferred=dict(index.deferrals),
            workers=list(index.workers.values()),
            fan_ins=dict(index.fan_ins),
            members={key: dict(members) for key, members in index.members.items()},
            runs=list(index.runs.values()),
            claims={id: (index.entries[id].queue, runs) for id, runs in index.claims.items()},
            counters=copy.copy(index.counters),
        )


class NewLine(msgspec.Struct):
    """A line that a commit will write, and the call that hears its place."""

    table: str
    data: bytes
    placed: Callable[[Place], None] | None = None


class Changes(msgspec.Struct, kw_only=True):
    """Everything that a commit has to write."""

    lines: list[NewLine] = []
    blanks: list[Place] = []
    gone: list[str] = []
    unkept: list[str] = []
    keys_gone: list[tuple[str, str]] = []
    drops: list[str] = []
    first_event: int = 0  # the number of the first event among the lines
    rows: Rows = msgspec.field(default_factory=Rows)

    def __bool__(self) -> bool:
        return self != Changes()
