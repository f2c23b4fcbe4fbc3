"""Rows become tasks. A task's id follows from its key, so a row that comes again is the same task and not another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from omniq.config import load_settings
from omniq.errors import Invalid, SerializationError
from omniq.operations import Enqueue
from omniq.serialization import MsgspecSerializer
from omniq.tasks import OptionFields, callee, make_options
from omniq.template import form_of, plain_form
from omniq.translate import encode_call, fingerprint

if TYPE_CHECKING:
    import pyarrow as pa

# Of the 64 hex digits of a SHA-256: 128 bits, so that no two keys of any real table meet. Stored ids rest on it.
ID_CHARS = 32
# Fields of the form in which a second task of the same key must agree, besides the payload, group and eta of its row.
_BODY = ("name", "timeout_us", "max_attempts", "dead_queue")


def task_id(namespace: str, key: str) -> str:
    """The id of a key's task: half a SHA-256, which Spark computes too (`left(sha2(…, 256), 32)`)."""
    return hashlib.sha256(f"{namespace}\0{key}".encode()).hexdigest()[:ID_CHARS]


class TaskRows(msgspec.Struct, frozen=True, kw_only=True):
    """The columns that make a task; `form` holds everything that the tasks have in common.

    `key` is text or a whole number and never null. `id` names a column that holds `task_id(namespace, key)` already. `args` are
    passed in order, `kwargs` are keyword → column. With `once`, a key is remembered for the form's `key_ttl_us`, also when its
    task is gone; `hashed` gives tasks a fingerprint, by which another body under the same key is recognised.
    """

    form: Enqueue
    namespace: str
    key: str
    args: tuple[str, ...] = ()
    kwargs: dict[str, str] = {}
    group: str | None = None
    eta: str | None = None
    id: str | None = None
    once: bool = False
    hashed: bool = False

    @property
    def columns(self) -> list[str]:
        """The columns that a row must have."""
        named = [self.key, *self.args, *self.kwargs.values(), self.group, self.eta, self.id]
        return list(dict.fromkeys(name for name in named if name is not None))

    def check(self, names: Sequence[str]) -> None:
        """Raise `Invalid` if one of the columns is missing."""
        for name in self.columns:
            if name not in names:
                raise Invalid(f"there is no column {name!r}; the DataFrame has {', '.join(names)}")

    def tasks(self, batch: pa.RecordBatch) -> list[Enqueue]:
        """The tasks of a batch of rows, in their order."""
        self.check(batch.schema.names)
        keys = _keys(batch, self.key)
        ids = [task_id(self.namespace, key) for key in keys] if self.id is None else _texts(batch, self.id)
        groups = [self.form.group] * len(keys) if self.group is None else _texts(batch, self.group)
        etas = [self.form.eta_us] * len(keys) if self.eta is None else _moments(batch, self.eta)
        columns = [_values(batch, name) for name in self.args]
        named = {name: _values(batch, column) for name, column in self.kwargs.items()}
        serializer = MsgspecSerializer()
        # Everything that is the same for each row is put together once per batch: this method takes a fifth of an enqueue.
        fields = {name: getattr(self.form, name) for name in self.form.__struct_fields__ if name not in _OWN}
        body = fingerprint(*[fields[name] for name in _BODY])
        wants_hash = self.hashed or self.once
        found: list[Enqueue] = []
        for n, (id, group, eta) in enumerate(zip(ids, groups, etas, strict=True)):
            kwargs = {name: values[n] for name, values in named.items()}
            try:
                payload = encode_call([values[n] for values in columns], kwargs, serializer)
            except SerializationError as exc:
                raise SerializationError(f"the row with key {keys[n]!r}: {exc}") from exc
            mark = fingerprint(payload, group, eta, body) if wants_hash else ""
            key = id if self.once else None
            made = Enqueue(id=id, payload=payload, group=group, eta_us=eta, idempotency_key=key, fingerprint=mark, **fields)
            found.append(made)
        return found


def rows_of(
    func: Callable[..., Any] | str,
    *,
    key: str,
    args: Sequence[str] | Mapping[str, str] | None = None,
    group: str | None = None,
    eta: str | None = None,
    namespace: str | None = None,
    options: OptionFields | None = None,
) -> TaskRows:
    """Rows that call `func`: `key`, `group` and `eta` name columns, `args` is columns in order or keyword → column.

    `options` hold for all tasks. Raises `Invalid` or `TypeError` before any row is read when no task could be made of them.
    Unless a namespace is given, keys are unique within a queue and function.
    """
    if isinstance(args, str):
        raise Invalid(f"args is a list of columns, or a dict of keyword → column, not the text {args!r}")
    ordered = () if args is None or isinstance(args, Mapping) else tuple(args)
    named = dict(args) if isinstance(args, Mapping) else {}
    target = callee(func)
    target.check(ordered, dict.fromkeys(named))
    given: OptionFields = {**(options or {})}
    if group is not None:
        given["group"] = "of the row"  # a limit without a group is refused; each row has its own
    form = form_of(target, make_options(given), plain_form(load_settings()))
    return TaskRows(
        form=form,
        namespace=f"{form.queue}/{form.name}" if namespace is None else namespace,
        key=key,
        args=ordered,
        kwargs=named,
        group=group,
        eta=eta,
    )


# The fields that differ from row to row, and `encoding`: payloads made here are JSON, whatever the settings say.
_OWN = frozenset({"id", "payload", "encoding", "group", "eta_us", "idempotency_key", "fingerprint"})


def _keys(batch: pa.RecordBatch, name: str) -> list[str]:
    import pyarrow as pa

    column = batch.column(name)
    if column.null_count:
        raise Invalid(f"key column {name!r} has rows without a value; every row needs a key of its own")
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or pa.types.is_integer(column.type)):
        raise Invalid(f"key column {name!r} is {column.type}; cast it to string first, so that a key is always the same text")
    return list(map(str, column.to_pylist()))


def _texts(batch: pa.RecordBatch, name: str) -> list[str]:
    import pyarrow as pa

    return batch.column(name).cast(pa.string()).to_pylist()


def _moments(batch: pa.RecordBatch, name: str) -> list[int | None]:
    import pyarrow as pa

    column = batch.column(name)
    if not pa.types.is_timestamp(column.type) or column.type.tz is None:
        raise Invalid(f"eta column {name!r} is {column.type}; cast it to timestamp")
    return column.cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_pylist()


def _values(batch: pa.RecordBatch, name: str) -> list[Any]:
    """A column as the Python values that a program would have passed, with times in UTC whatever the session's zone."""
    column = batch.column(name)
    plain = _in_utc(column.type)
    return (column if plain == column.type else column.cast(plain)).to_pylist(maps_as_pydicts="strict")


def _in_utc(kind: pa.DataType) -> pa.DataType:
    """The same type with every time in UTC, also inside of lists, maps and structs."""
    import pyarrow as pa

    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")
    if pa.types.is_struct(kind):
        return pa.struct([kind.field(n).with_type(_in_utc(kind.field(n).type)) for n in range(kind.num_fields)])
    if pa.types.is_map(kind):
        return pa.map_(_in_utc(kind.key_type), kind.item_field.with_type(_in_utc(kind.item_type)))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_in_utc(kind.value_type)))
    return kind
