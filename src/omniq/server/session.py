"""One connection: its commands in order, the tasks it holds, and the transaction it is in. Bytes come and go elsewhere."""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, Protocol, cast

import msgspec

from omniq.durations import format_duration
from omniq.errors import Invalid, StoreError
from omniq.models import Record, TaskError, check_queue
from omniq.operations import Extend, Operation
from omniq.policy import after_failure
from omniq.server import looking, protocol
from omniq.server.atomic import Atomic, ack_of, is_too_big
from omniq.server.engine import LEASE_US, Engine, FetchTasks
from omniq.server.metrics import Tally
from omniq.server.options import ServeOptions
from omniq.server.outbox import Outbox, Sink
from omniq.server.protocol import ProtocolError, PushCommand
from omniq.server.steps import EndTask, ExtendTask, GiveBack, PushTask, Reply, Step, Then, Transact, number_of
from omniq.server.waiting import WaitingFetch, WaitingLine
from omniq.translate import TCP
from omniq.turns import release

log = logging.getLogger("omniq.server")

MAX_UNANSWERED = 1000  # commands of one connection that the store has not answered yet
MAX_BACKLOG = 4 * 1024 * 1024  # bytes of commands that one connection may have sent ahead
MAX_AT_ONCE = 1000  # commands of one connection before others get their turn
MAX_COUNT = 1000
# Payloads in one reply to a FETCH with a count; the tasks beyond are given back. A single larger one is sent all the same.
MAX_REPLY_BYTES = 8 * 1024 * 1024
# Enough for AUTH. Whoever has not shown the token is given no more memory.
UNAUTHENTICATED_LINE = 4096
# How long the answer to a wrong token takes: whoever guesses must wait.
WRONG_TOKEN_S = 1.0


class Wire(Sink, Protocol):
    """The part of a connection that a session needs."""

    def pace(self) -> None:
        """Read on, or no more for now, as `congested` says."""
        ...

    def close(self) -> None: ...
    def set_line_limit(self, limit: int) -> None: ...


class House(Protocol):
    """The part of a server that all its sessions share."""

    options: ServeOptions
    engine: Engine
    tally: Tally
    stopping: bool

    def spawn(self, work: Coroutine[Any, Any, None]) -> None: ...


class Session:
    """Takes lines and answers with lines. `go_on` handles the lines that may be handled now, and sends the replies."""

    def __init__(self, house: House, wire: Wire) -> None:
        self._house, self._wire = house, wire
        self._options, self._engine, self._tally = house.options, house.engine, house.tally
        self._out = Outbox(wire, house.tally)
        self.backoff = house.options.backoff
        self.held: dict[int, Record] = {}
        self.line: WaitingLine | None = None
        self.heard_at = self._now()
        # WaitingLines that are not carried out yet; None for one that was too long to be kept.
        self._inbox: deque[bytes | None] = deque()
        # Bytes of commands since nothing was left to carry out: more than is waiting, and cheap to know.
        self._ahead = 0
        # Commands that the engine has and the store has not answered. Their replies come in order, so a reply that needs no
        # store may be sent at once only while there are none.
        self._unanswered = 0
        # A command is under way that the next one must wait for, such as FETCH: it may need what this one brings.
        self._busy = False
        # The client does not read what it is sent. Nothing more is carried out for it, or its replies would fill the memory.
        self._full = False
        # How much it had still to read when it was last looked at: while that becomes less, it is alive.
        self._backlog = 0
        # The client sends nothing more, and may be gone: half-closed is how `printf … | nc` looks, and how a crash looks too.
        self._ended = False
        # The last reply was made, such as that to QUIT: when all is sent, the connection is closed.
        self._leaving = False
        # The connection is lost, and with it the tasks; what the store still answers for it is given back.
        self.gone = False
        # Tasks given to a client that had already stopped sending: it can acknowledge none, so none counts as a failure.
        self._late: set[int] = set()
        self._atomic: Atomic | None = None
        self._waiter: WaitingFetch | None = None
        # Of the FETCH that waits: tasks per reply (0: one, without a list), and seconds to wait.
        self._fetch: tuple[int, float] = (0, 0.0)
        # The end of a FETCH's time, or of the pause before a wrong token is answered. Never both: each makes it busy.
        self._timer: asyncio.TimerHandle | None = None
        # The token was wrong, of which the client hears in a moment. Until then nothing is read: it might guess on.
        self._refused = False
        # When it was told to go. Over TLS it may be waited for to say goodbye, but not for ever.
        self.dismissed_at: float | None = None
        # It has shown the token, or none is asked for.
        self._known = house.options.token is None
        if not self._known:
            wire.set_line_limit(UNAUTHENTICATED_LINE)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    # -- from the connection -----------------------------------------------------------------------

    @property
    def congested(self) -> bool:
        """Whether nothing more should be read for now."""
        too_much = len(self._inbox) > MAX_UNANSWERED or self._ahead > MAX_BACKLOG
        return too_much or self._refused or (self._full and bool(self._inbox))

    def silent_s(self) -> float:
        """How long it has been silent although nothing of it is under way. Who reads nothing is silent too."""
        if self._full:
            left = self._wire.unsent() or 0
            if left < self._backlog:
                self.heard_at = self._now()
            self._backlog = left
        elif self._busy or self._unanswered or self._inbox:
            return 0.0
        return self._now() - self.heard_at

    @property
    def idle(self) -> bool:
        """It holds nothing and is in the middle of nothing."""
        return not (self.held or self._busy or self._unanswered or self._inbox or self._atomic is not None)

    def receive(self, lines: Sequence[bytes | None]) -> None:
        self.heard_at = self._now()
        self._out.note_sent()
        self._inbox.extend(lines)
        self._ahead += sum(map(len, filter(None, lines)))
        self.go_on()

    def end_of_input(self) -> None:
        """The client has stopped sending, and may be gone altogether: it must not wait for a task any more."""
        self._ended = True
        self._out.note_sent()
        self._wait_no_more()
        self.go_on()

    def stop_waiting(self) -> None:
        """The server stops: a client that waits for a task, or for the answer to a wrong token, is told so."""
        if self._refused and self._timer is not None:
            self._refuse()
        self._wait_no_more()
        self.go_on()

    def _wait_no_more(self) -> bool:
        """End a FETCH that may not wait any longer. One that the store has not been asked for yet still gets its answer."""
        if self._waiter is None or self._unanswered or not (self._ended or self._house.stopping):
            return False
        reply = protocol.err(protocol.STOPPING) if self._house.stopping else protocol.EMPTY
        self._end_waiting(reply * self._fetches_left())
        return True

    def congest(self, full: bool) -> None:
        """The client does not read as fast as it is answered, or has caught up."""
        self._full, self._backlog = full, 0
        if full:
            self._wire.pace()
        else:
            self._out.note_sent()
            self.go_on()

    def lost(self) -> None:
        """The connection is gone, for any cause: each task that it held has failed, if the client has seen it."""
        if self.gone:
            return
        self.gone = True
        self._stop_timer()
        if self._waiter is not None and self.line is not None:
            self._engine.lines.leave(self.line, self._waiter)
            self._waiter = None
        self._inbox.clear()
        self._atomic = None
        self._out.close()
        self.give_back("the connection was lost", self._out.unseen | self._late)

    def give_back(self, reason: str, unseen: set[int] | None = None) -> None:
        """End all leases: a failure of each task, or none for those in `unseen`."""
        held, self.held = self.held, {}
        for number, task in held.items():
            spared = unseen is not None and number in unseen
            self._engine.add(GiveBack(release(task) if spared else self._failure(task, reason)))

    def lose(self, task: Record) -> bool:
        """Hold a task no more. Returns whether it was held here."""
        number = number_of(task.id)
        if isinstance(number, str):  # an id of another door was given a number
            number = next((n for n, held in self.held.items() if held is task), 0)
        return self.held.get(number) is task and self.held.pop(number) is task

    def let_go(self) -> None:
        """The server stops: hand everything back without spending an attempt."""
        self.give_back("", set(self.held))

    def dismiss(self, text: str) -> None:
        """Tell the client why, and close. The tasks that it holds are given back by `lost`, or were before."""
        if not self.gone and self.dismissed_at is None:
            self.dismissed_at = self._now()
            self._out.say(protocol.err(text))
            self._out.flush()
            self._wire.close()

    # -- from the engine ---------------------------------------------------------------------------

    def settled(self, reply: bytes | None) -> None:
        self._unanswered -= 1
        if reply is not None:
            self._out.say(reply)

    def wants(self, waiter: WaitingFetch) -> bool:
        return waiter is self._waiter and not self.gone

    def hold(self, number: int, task: Record) -> None:
        if self.gone:
            self._engine.add(GiveBack(self._failure(task, "the connection was lost")))
        else:
            self.held[number] = task

    def served(self, waiter: WaitingFetch, tasks: Sequence[tuple[int, Record]]) -> None:
        if waiter is not self._waiter:  # it went away in this very turn
            self._engine.add_first([GiveBack(release(task)) for _, task in tasks])
            return
        self._stop_timer()
        lines: list[bytes] = []
        taken: list[int] = []
        size = 0
        for number, task in tasks:
            payload = task.payload
            size += 0 if payload is None else len(payload)
            if lines and size > MAX_REPLY_BYTES and self._fetch[0]:
                self._engine.add_first([GiveBack(release(task))])
                continue
            # What came over this protocol was written on one line when it came.
            if payload is not None and task.origin != TCP:
                payload = protocol.on_one_line(payload)
            lines.append(protocol.task(number, task.queue, task.name, payload, task.attempts - 1))
            # It was sent, and is all that is large about a task: a client may hold thousands.
            task.payload = None
            self.held[number] = task
            taken.append(number)
        if self._ended:
            self._late.update(taken)
        if self._fetch[0]:
            self._out.say_all_at_once(protocol.fetched_many(lines), taken)
        else:
            self._out.say_one_by_one([protocol.fetched(line) for line in lines], taken)
        self._tally.requests["FETCH"] += 1 if self._fetch[0] else len(lines)
        if self._fetch[0] or not waiter.want:
            self._end_waiting()

    def found_nothing(self, waiter: WaitingFetch) -> None:
        """Nothing is there for the FETCH that is first in turn: now its time runs."""
        if waiter is not self._waiter:
            return
        if self._wait_no_more():
            return
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(self._fetch[1], self._waited_long_enough)

    def fetch_failed(self, exc: Exception) -> None:
        self._end_waiting(protocol.err(f"store: {exc}") * self._fetches_left())

    # -- commands ----------------------------------------------------------------------------------

    def go_on(self) -> None:
        inbox = self._inbox
        handled = 0
        while inbox and not (self._busy or self._full or self._leaving or self.gone) and self._unanswered < MAX_UNANSWERED:
            self._handle(inbox.popleft())
            handled += 1
            if handled == MAX_AT_ONCE:
                asyncio.get_running_loop().call_soon(self.go_on)
                break
        if not (inbox or self._unanswered):
            self._ahead = 0
        self._out.flush()
        self._wire.pace()
        if self._leaving or (self._ended and not inbox):
            self._leave()

    def _leave(self) -> None:
        if not (self._busy or self._unanswered or self.gone):
            self._wire.close()

    def _handle(self, line: bytes | None) -> None:
        if self._atomic is not None:
            if line is not None and protocol.verb_of(line) == "DONE":
                self._transact(self._atomic)
            else:
                self._atomic.add(line)
            return
        if line is None:
            self._reply(protocol.err(f"line is longer than max-line, {self._line_limit} bytes"))
            return
        try:
            command = protocol.parse(line)
            if not self._known and not isinstance(command, protocol.AuthCommand | protocol.PingCommand | protocol.QuitCommand):
                raise ProtocolError(protocol.AUTH_REQUIRED)
            self._handlers[type(command)](self, command, line)
        except ProtocolError as exc:
            self._reply(protocol.err(str(exc)))
        except Exception as exc:  # a mistake of ours: the client is told, the connection goes on
            log.exception("a command failed")
            self._reply(protocol.err(f"internal error: {type(exc).__name__}"))

    @property
    def _line_limit(self) -> int:
        return self._options.max_line if self._known else UNAUTHENTICATED_LINE

    def _ping(self, command: protocol.PingCommand, line: bytes) -> None:
        self._tally.requests["PING"] += 1
        self._reply(protocol.PONG)

    def _push(self, push: PushCommand, line: bytes) -> None:
        if push.blocked_by:
            protocol.check_no_positions(push.blocked_by)
        if is_too_big(push, self._options):
            raise ProtocolError(protocol.TOO_BIG)
        self._tally.requests["PUSH"] += 1
        self._add(PushTask(self, push))

    def _start_fetch(self, fetch: protocol.FetchCommand, line: bytes) -> None:
        options = self._options
        timeout_ns = options.heartbeat_ns // 2 if fetch.timeout_ns is None else fetch.timeout_ns
        self._check_timeout(timeout_ns)
        if fetch.count is not None and fetch.count > MAX_COUNT:
            raise ProtocolError(f"count must be at most {MAX_COUNT}")
        if self._house.stopping:
            raise ProtocolError(protocol.STOPPING)
        queues = ["default"] if fetch.queues is msgspec.UNSET else fetch.queues
        if not queues:
            self._reply(protocol.EMPTY)
            return
        room = options.max_held - len(self.held)
        if room <= 0:
            raise ProtocolError(f"this connection holds max-held tasks, {options.max_held}: ACK or NACK some first")
        want = 1
        if fetch.count is not None:
            want = min(fetch.count, room)
        else:
            # A client that sends many FETCH in a row, ahead of the replies, waits as one: they cost one turn and not one each.
            inbox = self._inbox
            while inbox and inbox[0] == line and want < room and want < MAX_UNANSWERED:
                inbox.popleft()
                want += 1
        self._fetch = (fetch.count or 0, timeout_ns / 1e9)
        self._waiter = WaitingFetch(self, want)
        self._busy = True
        self._add(FetchTasks(self, tuple(dict.fromkeys(q for q in queues if _is_queue(q))), self._waiter))

    def _fetches_left(self) -> int:
        """How many FETCH commands are still to be answered."""
        return 1 if self._fetch[0] else cast(WaitingFetch, self._waiter).want

    def _waited_long_enough(self) -> None:
        waiter, line = self._waiter, self.line
        if waiter is None or line is None:
            return
        if self._fetches_left() == 1:
            self._end_waiting(protocol.EMPTY)
        else:
            # The next FETCH of the row begins, at the end of the line.
            self._out.say(protocol.EMPTY)
            line.leave(waiter)
            waiter.want -= 1
            self.line = self._engine.lines.join(line.queues, waiter)
        self.go_on()

    def _end_waiting(self, replies: bytes = b"") -> None:
        if replies:
            self._out.say(replies)
        self._stop_timer()
        if self.line is not None and self._waiter is not None:
            self._engine.lines.leave(self.line, self._waiter)
        self._waiter = self.line = None
        self.heard_at = self._now()
        self._busy = False

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ack(self, ack: protocol.AckCommand, line: bytes) -> None:
        number = cast(int, ack.id)
        task = self._held(number)
        self._tally.requests["ACK"] += 1
        del self.held[number]
        self._add(EndTask(self, number, task, ack_of(task, ack, self._engine.storage.clock())))

    def _nack(self, nack: protocol.NackCommand, line: bytes) -> None:
        number = cast(int, nack.id)
        task = self._held(number)
        self._tally.requests["NACK"] += 1
        del self.held[number]
        self._add(EndTask(self, number, task, self._failure(task, nack.error or "the client sent NACK")))

    def _extend(self, extend: protocol.ExtendCommand, line: bytes) -> None:
        task = self._held(cast(int, extend.id))
        self._tally.requests["EXTEND"] += 1
        self._add(ExtendTask(self, extend_of(task)))

    def _held(self, number: int) -> Record:
        task = self.held.get(number)
        if task is None:
            raise ProtocolError(protocol.NOT_ACQUIRED)
        return task

    def _failure(self, task: Record, message: str) -> Operation:
        error = TaskError("Nack", message).cut()
        now = self._engine.storage.clock()
        return after_failure(task, error, now, random.random())  # noqa: S311

    def task_id(self, number: int) -> str:
        """The id that a number of this connection stands for."""
        held = self.held.get(number)
        return str(number) if held is None else held.id

    def _quit(self, command: protocol.QuitCommand, line: bytes) -> None:
        self._tally.requests["QUIT"] += 1
        # Commands behind QUIT are not carried out.
        self._inbox.clear()
        self._busy = True

        def leave() -> None:
            self.give_back("the client sent QUIT")
            self._add(Then(self, answer))

        def answer() -> None:
            self._out.say(protocol.OK)
            self._leaving, self._busy = True, False

        self._after_others(leave)

    def _authenticate(self, auth: protocol.AuthCommand, line: bytes) -> None:
        wanted = self._options.token
        self._tally.requests["AUTH"] += 1
        if wanted is None or hmac.compare_digest((auth.token or "").encode(), wanted.encode()):
            self._known = True
            self._wire.set_line_limit(self._options.max_line)
            self._reply(protocol.OK)
            return
        self._busy = self._refused = True
        self._inbox.clear()
        self._after_others(self._refuse_soon)

    def _refuse_soon(self) -> None:
        if self._house.stopping:
            self._refuse()
        elif not self.gone:
            self._timer = asyncio.get_running_loop().call_later(WRONG_TOKEN_S, self._refuse)

    def _refuse(self) -> None:
        self._stop_timer()
        self._out.say(protocol.err(protocol.WRONG_TOKEN))
        # One guess per connection.
        self._leaving, self._busy = True, False
        self.go_on()

    # -- looking -----------------------------------------------------------------------------------

    def _info(self, command: protocol.InfoCommand, line: bytes) -> None:
        self._tally.requests["INFO"] += 1
        self._look(lambda: looking.info(self._engine.storage))

    def _cancel(self, command: protocol.CancelCommand, line: bytes) -> None:
        self._tally.requests["CANCEL"] += 1
        task_id = self._wanted_id(command.id)
        self._look(lambda: looking.cancel(self._engine.storage, task_id))

    def _result(self, command: protocol.ResultCommand, line: bytes) -> None:
        timeout_ns = command.timeout_ns
        self._check_timeout(timeout_ns)
        self._tally.requests["RESULT"] += 1
        task_id = self._wanted_id(command.id)

        def unwanted() -> bool:
            return self._ended or self.gone or self._house.stopping

        self._look(lambda: looking.result(self._engine.storage, task_id, timeout_ns / 1e9, unwanted))

    def _check_timeout(self, timeout_ns: int) -> None:
        longest = self._options.heartbeat_ns
        if timeout_ns > longest:
            raise ProtocolError(f"timeout must be smaller than the heartbeat frequency {format_duration(longest)}")

    def _wanted_id(self, wanted: int | str | None) -> str:
        return wanted if isinstance(wanted, str) else self.task_id(cast(int, wanted))

    def _look(self, work: Callable[[], Coroutine[Any, Any, bytes]]) -> None:
        """Answer from the store, after everything before this has been answered. The next command waits."""

        async def answer() -> None:
            try:
                reply = await work()
            except (StoreError, Invalid) as exc:
                reply = protocol.err(f"store: {exc}")
            self.heard_at = self._now()
            self._busy = False
            if not self.gone:
                self._out.say(reply)
                self.go_on()

        self._busy = True
        self._after_others(lambda: self._house.spawn(answer()))

    # -- transactions ------------------------------------------------------------------------------

    def _begin(self, command: protocol.AtomicCommand, line: bytes) -> None:
        self._atomic = Atomic(self._options)

    def _transact(self, atomic: Atomic) -> None:
        self._atomic = None
        try:
            atomic.read(self.held, self._engine.storage.clock())
        except ProtocolError as exc:
            self._add(Reply(self, protocol.err(str(exc)), atomic.pushes))
            return
        for verb, number in (("ATOMIC", 1), ("PUSH", atomic.pushes), ("ACK", len(atomic.acks))):
            self._tally.requests[verb] += number
        for number in atomic.acks:
            del self.held[number]
        self._add(Transact(self, atomic.commands, atomic.acks))
        # Whether the tasks are held again is only known when it has been answered.
        if atomic.acks:
            self._busy = True
            self._after_others(self._unbusy)

    def _unbusy(self) -> None:
        self._busy = False

    # -- replies in order --------------------------------------------------------------------------

    def _add(self, step: Step) -> None:
        self._unanswered += 1
        self._engine.add(step)

    def _reply(self, line: bytes) -> None:
        if self._unanswered:
            self._add(Reply(self, line))
        else:
            self._out.say(line)

    def _after_others(self, action: Callable[[], None]) -> None:
        if self._unanswered:
            self._add(Then(self, action))
        else:
            action()

    _handlers: ClassVar[dict[type[protocol.Command], Callable[[Session, Any, bytes], None]]] = {
        protocol.PingCommand: _ping,
        protocol.PushCommand: _push,
        protocol.FetchCommand: _start_fetch,
        protocol.AckCommand: _ack,
        protocol.NackCommand: _nack,
        protocol.InfoCommand: _info,
        protocol.QuitCommand: _quit,
        protocol.AtomicCommand: _begin,
        protocol.AuthCommand: _authenticate,
        protocol.ExtendCommand: _extend,
        protocol.CancelCommand: _cancel,
        protocol.ResultCommand: _result,
    }


def extend_of(task: Record) -> Extend:
    return Extend(queue=task.queue, id=task.id, token=cast(str, task.token), late=True, lease_us=LEASE_US)


def _is_queue(name: str) -> bool:
    try:
        check_queue(name)
    except Invalid:
        return False
    return True
