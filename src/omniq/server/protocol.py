"""The line protocol as pure functions: a line in, a command out; an answer in, a line out. No I/O, no state.

A command is one line: `VERB`, or `VERB`, a space and a JSON object. Every reply is one line too: `OK {…}`, `PONG {}`,
`EMPTY {}` or `ERR {"msg":"…"}`. Error texts are part of the protocol.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from omniq.durations import parse_duration
from omniq.errors import Invalid
from omniq.models import MAX_BLOCKERS, to_us

DEFAULT_RETRY = 20
# Attempts are one more than retries, and fit a signed number of 32 bits.
MAX_RETRY = (1 << 31) - 2
MAX_QUEUES = 255
MIN_INTERVAL_NS = 1_000_000
MAX_INTERVAL_NS = 87_600 * 3600 * 10**9  # ten years

TOO_BIG = "cannot push to queue: wall append: serialize operation: input: arguments too big"
TOO_BIG_IN_TRANSACTION = "commit transaction: write to WAL: serialize operation: input: arguments too big"
NOT_ACQUIRED = "task not acquired"
NO_HEARTBEAT = "no heartbeat"
STOPPING = "server is shutting down"
AUTH_REQUIRED = 'authentication required: send AUTH {"token": "..."} first'
WRONG_TOKEN = "authentication failed: wrong token"  # noqa: S105 - a text, not a secret

OK = b"OK {}\n"
PONG = b"PONG {}\n"
EMPTY = b"EMPTY {}\n"

_QUEUE = re.compile(r"[0-9A-Za-z_-]{1,32}")
_NAME = re.compile(r"[0-9A-Za-z_.:-]{1,64}")

Whole = Annotated[int, Meta(ge=0)]


class ProtocolError(Exception):
    """A command that is refused, with the text that the client is told."""


# -- commands ------------------------------------------------------------------------------------


class Command(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The base of all commands. Fields are named as on the wire."""


class PingCommand(Command):
    pass


class InfoCommand(Command):
    pass


class QuitCommand(Command):
    pass


class AtomicCommand(Command):
    pass


class PushCommand(Command):
    name: str | None = None
    queue: str | None = None
    deadqueue: str | None = None
    payload: Raw | UnsetType = UNSET
    retry: Whole | None = None
    execute_at: datetime | None = None
    blocked_by: list[int] | None = None
    idempotency_key: str | None = None
    group: str | None = None
    group_limit: int | None = None
    interval: int | str | None = None

    @property
    def payload_bytes(self) -> bytes | None:
        """The payload's JSON text without needless blanks, else as it was sent."""
        return None if self.payload is UNSET else bytes(self.payload)

    @property
    def eta_us(self) -> int | None:
        """Raises `Invalid` for a time that cannot be kept."""
        return None if self.execute_at is None else max(to_us(self.execute_at), 0)

    @property
    def interval_us(self) -> int | None:
        return None if self.interval is None else cast(int, self.interval) // 1000


class FetchCommand(Command):
    queues: list[str] | UnsetType | None = UNSET
    timeout: int | str | UnsetType | None = UNSET
    count: int | None = None

    @property
    def timeout_ns(self) -> int | None:
        """None: the server's default."""
        return None if self.timeout is UNSET else cast(int, self.timeout)


class AckCommand(Command):
    id: Whole | None = None
    result: Raw | UnsetType = UNSET

    @property
    def result_bytes(self) -> bytes | None:
        return None if self.result is UNSET else bytes(self.result)


class NackCommand(Command):
    id: Whole | None = None
    error: str | None = None


class ExtendCommand(Command):
    id: Whole | None = None


class CancelCommand(Command):
    id: Whole | str | None = None


class ResultCommand(Command):
    id: Whole | str | None = None
    timeout: int | str | None = None

    @property
    def timeout_ns(self) -> int:
        return cast("int | None", self.timeout) or 0


class AuthCommand(Command):
    token: str | None = None


C = TypeVar("C", bound=Command)


# -- parsing -------------------------------------------------------------------------------------


def parse(line: bytes) -> Command:
    """The command of a line without its line end. Raises `ProtocolError` for anything else."""
    verb, _, body = line.partition(b" ")
    parser = _PARSERS.get(verb) or _PARSERS.get(verb.upper())
    if parser is None:
        raise ProtocolError(f"unknown verb {_text(verb)}")
    return parser(body)


def verb_of(line: bytes) -> str:
    """The verb of a line in capitals, known or not."""
    return _text(line.partition(b" ")[0]).upper()


def _text(data: bytes) -> str:
    return data[:200].decode("utf-8", "replace")


def _ignoring(command: Command) -> Callable[[bytes], Command]:
    """A command whose body does not matter."""
    return lambda body: command


def _decoder(kind: type[C]) -> Callable[[bytes], C]:
    exact = msgspec.json.Decoder(kind).decode
    known = {name: name for name in kind.__struct_fields__}

    def decode(body: bytes) -> C:
        try:
            return exact(body)
        except msgspec.ValidationError:
            # The exact decoder refuses what it does not know, which is rare. Then the slow way: an attribute that is not known
            # is ignored, and names match whatever their case. What is wrong all the same is refused with the decoder's words.
            given = _any_object(body)
            fields = {known[name.lower()]: value for name, value in given.items() if name.lower() in known}
            return exact(msgspec.json.encode(fields))

    return decode


_any_object = msgspec.json.Decoder(dict[str, Raw]).decode
_MALFORMED = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)

_decode_push = _decoder(PushCommand)
_decode_fetch = _decoder(FetchCommand)


def _parse_push(body: bytes) -> PushCommand:
    try:
        push = _decode_push(body)
        if push.payload is not UNSET:
            push.payload = _compact(push.payload)
        if push.interval is not None:
            push.interval = cast(int, _nanoseconds(push.interval))
        if push.execute_at is not None:
            _ = push.eta_us
    except (*_MALFORMED, Invalid):
        raise ProtocolError("cannot unmarshal payload") from None
    name = push.name
    if name is None or not _NAME.fullmatch(name):
        raise ProtocolError(f"invalid task name {quoted(name or '')}")
    push.queue = push.queue or "default"
    if not _QUEUE.fullmatch(push.queue):
        raise ProtocolError(f"invalid queue name {quoted(push.queue)}")
    push.deadqueue = push.deadqueue or None
    if push.deadqueue is not None and not _QUEUE.fullmatch(push.deadqueue):
        raise ProtocolError(f"invalid queue name {quoted(push.deadqueue)}")
    if push.retry is None:
        push.retry = DEFAULT_RETRY
    if push.retry > MAX_RETRY:
        raise ProtocolError("cannot unmarshal payload")
    if push.blocked_by is not None and len(push.blocked_by) > MAX_BLOCKERS:
        raise ProtocolError(f"at most {MAX_BLOCKERS} blocked by task IDs can be provided")
    # One comparison spares nearly all commands the checks behind it.
    extras = (push.group, push.group_limit, push.idempotency_key, push.interval)
    if extras != _NO_EXTRAS:
        _check_extras(push)
    return push


_NO_EXTRAS = (None, None, None, None)


def _check_extras(push: PushCommand) -> None:
    for what, value in (("idempotency_key", push.idempotency_key), ("group", push.group)):
        if value is not None and (not 1 <= len(value) <= 255 or "\0" in value):
            raise ProtocolError(f"invalid {what}: 1 to 255 characters without NUL")
    if push.group_limit is not None and (push.group is None or not 1 <= push.group_limit <= MAX_RETRY):
        raise ProtocolError("invalid group_limit: a number of at least 1, together with a group")
    if push.interval is not None and not MIN_INTERVAL_NS <= cast(int, push.interval) <= MAX_INTERVAL_NS:
        raise ProtocolError("invalid interval: a duration from 1ms to 87600h")


def _compact(payload: Raw) -> Raw:
    if not bytes(payload).isascii():
        # msgspec does not look inside the strings of a raw value: without this, bytes that are no UTF-8 would be stored.
        bytes(payload).decode()
    return Raw(msgspec.json.format(bytes(payload), indent=-1))


def _parse_fetch(body: bytes) -> FetchCommand:
    if not body.strip():
        return FetchCommand()
    try:
        fetch = _decode_fetch(body)
        fetch.timeout = _nanoseconds(fetch.timeout)
    except (*_MALFORMED, Invalid):
        raise ProtocolError("cannot unmarshal payload") from None
    if fetch.timeout is not UNSET and fetch.timeout <= 0:
        raise ProtocolError("timeout must be greater than zero")
    if isinstance(fetch.queues, list) and len(fetch.queues) > MAX_QUEUES:
        raise ProtocolError(f"at most {MAX_QUEUES} queues can be fetched from")
    if fetch.count is not None and fetch.count < 1:
        raise ProtocolError("count must be greater than zero")
    return fetch


def _nanoseconds(value: int | str | UnsetType | None) -> int | UnsetType:
    if value is None:
        return 0
    return parse_duration(value) if isinstance(value, str) else value


def _needs_id(kind: type[C], finish: Callable[[C], None] | None = None) -> Callable[[bytes], C]:
    decode = _decoder(kind)

    def parse_body(body: bytes) -> C:
        try:
            command = decode(body)
            if finish is not None:
                finish(command)
        except (*_MALFORMED, Invalid) as exc:
            raise ProtocolError(f"unmarshal payload: {_decoder_text(exc)}") from None
        if not getattr(command, "id", None):
            raise ProtocolError("missing id")
        return command

    return parse_body


def _compact_result(ack: AckCommand) -> None:
    if ack.result is not UNSET:
        ack.result = _compact(ack.result)


def _read_timeout(result: ResultCommand) -> None:
    if result.timeout is not None:
        result.timeout = cast(int, _nanoseconds(result.timeout))


def _parse_auth(body: bytes) -> AuthCommand:
    try:
        return _decoder(AuthCommand)(body)
    except _MALFORMED as exc:
        raise ProtocolError(f"unmarshal payload: {_decoder_text(exc)}") from None


def _decoder_text(exc: BaseException) -> str:
    return "nested too deeply" if isinstance(exc, RecursionError) else str(exc)


_PARSERS: dict[bytes, Callable[[bytes], Command]] = {
    b"PUSH": _parse_push,
    b"FETCH": _parse_fetch,
    b"ACK": _needs_id(AckCommand, _compact_result),
    b"NACK": _needs_id(NackCommand),
    b"PING": _ignoring(PingCommand()),
    b"INFO": _ignoring(InfoCommand()),
    b"QUIT": _ignoring(QuitCommand()),
    b"ATOMIC": _ignoring(AtomicCommand()),
    b"EXTEND": _needs_id(ExtendCommand),
    b"CANCEL": _needs_id(CancelCommand),
    b"RESULT": _needs_id(ResultCommand, _read_timeout),
    b"AUTH": _parse_auth,
}


# -- the commands of a transaction ---------------------------------------------------------------


def parse_in_transaction(number: int, line: bytes, pushes: int) -> PushCommand | AckCommand:
    """Returns the command of a line between ATOMIC and DONE, which `pushes` pushes precede. Relative blockers are checked."""
    verb = verb_of(line)
    if verb not in ("PUSH", "ACK"):
        raise ProtocolError(f"{verb} is not allowed in transaction.")
    try:
        command = cast("PushCommand | AckCommand", parse(line))
        if isinstance(command, PushCommand) and command.blocked_by:
            check_positions(command.blocked_by, pushes)
    except ProtocolError as exc:
        raise ProtocolError(f"message {number}: {verb}: {exc}") from None
    return command


def check_positions(blocked_by: Iterable[int], pushes: int) -> None:
    """Check relative positions: -1 is the last PUSH before this one, and so on. A positive number is an id."""
    for blocker in blocked_by:
        if blocker == 0:
            raise ProtocolError("cannot self reference in blocked by")
        if blocker < -pushes:
            raise ProtocolError("invalid relative task position in blocked by")


def check_no_positions(blocked_by: Iterable[int]) -> None:
    if any(blocker <= 0 for blocker in blocked_by):
        raise ProtocolError("cannot use relative blocked by outside of a transaction")


# -- replies -------------------------------------------------------------------------------------


def quoted(text: str) -> str:
    """Text between double quotes, with escapes where they are needed, and cut if it is long."""
    return json.dumps(text[:200], ensure_ascii=False)


def err(text: str) -> bytes:
    return b'ERR {"msg":%b}\n' % _json(text)


def ok(body: Any) -> bytes:
    return b"OK %b\n" % _json(body)


def pushed(number: int | str, existed: bool = False) -> bytes:
    if existed:
        return b'OK {"id":%b,"existed":true}\n' % _json(number)
    return b'OK {"id":%d}\n' % number if isinstance(number, int) else b'OK {"id":%b}\n' % _json(number)


def committed(ids: list[int | str]) -> bytes:
    return ok({"ids": ids}) if ids else OK


def task(number: int, queue: str, name: str, payload: bytes | None, failures: int) -> bytes:
    """The object that FETCH answers with."""
    place = _places.get((queue, name)) or _place(queue, name)
    if payload is None:
        return b'{"id":%d,%b%b}' % (number, place, b',"failures":%d' % failures if failures else b"")
    if failures:
        return b'{"id":%d,%b,"payload":%b,"failures":%d}' % (number, place, payload, failures)
    return b'{"id":%d,%b,"payload":%b}' % (number, place, payload)


def fetched(one: bytes) -> bytes:
    return b"OK %b\n" % one


def fetched_many(several: list[bytes]) -> bytes:
    return b'OK {"tasks":[%b]}\n' % b",".join(several)


def on_one_line(payload: bytes) -> bytes:
    """Returns a payload of another door as JSON without line ends. A payload that is not JSON becomes a string."""
    try:
        payload.decode()
        return msgspec.json.format(payload, indent=-1)
    except _MALFORMED:
        return _json(payload.decode("utf-8", "replace"))


_json = msgspec.json.Encoder().encode
_places: dict[tuple[str, str], bytes] = {}


def _place(queue: str, name: str) -> bytes:
    made = b'"queue":"%b","name":%b' % (queue.encode(), _json(name))
    # Made once per queue and name; not without a bound, since clients choose the names.
    if len(_places) < 10_000:
        _places[queue, name] = made
    return made
