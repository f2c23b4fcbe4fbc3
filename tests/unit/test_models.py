"""Tasks, ids, names and times as users see them."""

import datetime as dt
import os
import threading

import msgspec
import pytest

from omniq import Event, Schedule, Task, TaskError, TaskResult, TaskStatus
from omniq.errors import Invalid, LimitExceeded, NameRequired, QueueRequired, TaskIdRequired
from omniq.models import (
    MAX_ERROR_CHARS,
    State,
    check_id,
    check_name,
    check_queue,
    check_text,
    duration_us,
    from_us,
    new_id,
    new_token,
    status_of,
    to_us,
)

UTC = dt.UTC
NOON = dt.datetime(2024, 5, 1, 12, tzinfo=UTC)
MINUTE = dt.timedelta(minutes=1)
CROCKFORD = set("0123456789ABCDEFGHJKMNPQRSTVWXYZ")


def test_an_id_is_a_ulid_of_now() -> None:
    made = new_id()
    assert len(made) == 26
    assert set(made) <= CROCKFORD
    ms = 0
    for letter in made[:10]:
        ms = ms * 32 + "0123456789ABCDEFGHJKMNPQRSTVWXYZ".index(letter)
    assert abs(ms / 1000 - dt.datetime.now(UTC).timestamp()) < 60


def test_ids_of_one_process_sort_in_the_order_they_were_made() -> None:
    made = [new_id() for _ in range(20_000)]
    assert made == sorted(made)
    assert len(set(made)) == len(made)


def test_ids_made_by_several_threads_are_unique() -> None:
    made: list[list[str]] = [[] for _ in range(4)]
    threads = [threading.Thread(target=lambda ids=ids: ids.extend(new_id() for _ in range(5000))) for ids in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({i for ids in made for i in ids}) == 20_000
    assert all(ids == sorted(ids) for ids in made)


def test_a_forked_child_makes_other_ids() -> None:
    new_id()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, "".join(new_id() for _ in range(100)).encode())
        os._exit(0)
    mine = {new_id() for _ in range(100)}
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    theirs = {text[i : i + 26] for i in range(0, len(text), 26)}
    assert len(theirs) == 100
    assert not mine & theirs


def test_a_token_has_128_random_bits() -> None:
    assert len({new_token() for _ in range(1000)}) == 1000
    assert len(new_token()) == 32


@pytest.mark.parametrize("good", ["a", "x" * 255, "with space", "ünï/ç:ø", "\n"])
def test_a_callers_own_id_is_almost_any_text(good: str) -> None:
    check_id(good)


@pytest.mark.parametrize("bad", ["", "x" * 256, "a\0b", None, 5])
def test_ids_outside_the_limits_are_refused(bad: str) -> None:
    with pytest.raises(TaskIdRequired):
        check_id(bad)


@pytest.mark.parametrize("good", ["a", "A.b_c-9", "x" * 128, "..."])
def test_queue_names_have_a_small_alphabet(good: str) -> None:
    check_queue(good)


@pytest.mark.parametrize("bad", ["", "x" * 129, "two words", "a/b", "é", "a\n", "a:b", None, 3])
def test_queue_names_outside_the_limits_are_refused(bad: str) -> None:
    with pytest.raises(QueueRequired):
        check_queue(bad)


@pytest.mark.parametrize("good", ["x", "ä" * 255, "free text, any: of it"])
def test_groups_and_keys_are_free_text(good: str) -> None:
    check_text(good, "group")


@pytest.mark.parametrize(("bad", "error"), [("", Invalid), ("x" * 256, LimitExceeded), ("a\0", LimitExceeded), (5, Invalid)])
def test_groups_and_keys_outside_the_limits_are_refused_by_name(bad: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="group"):
        check_text(bad, "group")


@pytest.mark.parametrize("bad", ["", "x" * 1025, "a\0", None])
def test_task_names_outside_the_limits_are_refused(bad: str) -> None:
    with pytest.raises(NameRequired):
        check_name(bad)


def test_a_moment_survives_the_way_through_microseconds() -> None:
    moment = dt.datetime(2024, 2, 29, 23, 59, 59, 999_999, tzinfo=UTC)
    assert from_us(to_us(moment)) == moment
    assert to_us(moment.astimezone(dt.timezone(dt.timedelta(hours=-7)))) == to_us(moment)


def test_a_naive_moment_is_refused_with_what_to_do() -> None:
    with pytest.raises(Invalid, match=r"timezone\.utc"):
        to_us(dt.datetime(2024, 1, 1))


def test_a_moment_that_nothing_could_show_is_refused() -> None:
    last = dt.datetime.max.replace(tzinfo=UTC)
    assert from_us(to_us(last)) == last
    with pytest.raises(Invalid, match="year 9999"):
        to_us(dt.datetime.max.replace(tzinfo=dt.timezone(dt.timedelta(hours=-1))))


@pytest.mark.parametrize(("value", "us"), [(1, 1_000_000), (0.25, 250_000), (dt.timedelta(minutes=1), 60_000_000)])
def test_durations_are_seconds_or_timedeltas(value: float | dt.timedelta, us: int) -> None:
    assert duration_us(value, "lease") == us


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), "5", None, True, dt.timedelta(seconds=-1), [1]])
def test_nonsense_durations_are_refused_by_name(bad: float) -> None:
    with pytest.raises(Invalid, match="lease"):
        duration_us(bad, "lease")


def test_a_duration_too_short_to_count_is_refused() -> None:
    with pytest.raises(Invalid, match="lease"):
        duration_us(1e-9, "lease")


@pytest.mark.parametrize(
    ("state", "attempts", "status"),
    [
        (State.BLOCKED, 0, TaskStatus.PENDING),
        (State.SCHEDULED, 0, TaskStatus.PENDING),
        (State.READY, 0, TaskStatus.PENDING),
        (State.READY, 1, TaskStatus.RETRYING),
        (State.SCHEDULED, 2, TaskStatus.RETRYING),
        (State.RUNNING, 1, TaskStatus.RUNNING),
        (State.DONE, 1, TaskStatus.SUCCESS),
        (State.DEAD, 4, TaskStatus.FAILED),
        (State.CANCELLED, 0, TaskStatus.CANCELLED),
    ],
)
def test_every_state_has_a_word_for_users(state: State, attempts: int, status: TaskStatus) -> None:
    assert status_of(state, attempts) is status


def test_the_statuses_are_the_six_of_the_api() -> None:
    assert [s.value for s in TaskStatus] == ["PENDING", "RUNNING", "SUCCESS", "FAILED", "RETRYING", "CANCELLED"]


def test_a_task_takes_its_first_fields_alone() -> None:
    now = dt.datetime.now(UTC)
    task = Task(
        id="a",
        func_path="m:f",
        args=[1],
        kwargs={"b": 2},
        eta=None,
        interval=None,
        max_retries=3,
        timeout=None,
        created_at=now,
        updated_at=now,
    )
    assert (task.status, task.queue, task.attempts) == (TaskStatus.PENDING, "default", 0)


def test_a_task_needs_only_a_path() -> None:
    one, two = Task(func_path="m:f"), Task(func_path="m:f")
    assert (one.args, one.kwargs) == ([], {})
    assert len(one.id) == 26
    assert one.id < two.id
    assert one.args is not two.args
    assert one.created_at.tzinfo is not None


def test_a_result_and_an_event_have_the_promised_fields() -> None:
    result = TaskResult(task_id="a", status=TaskStatus.SUCCESS)
    assert result.ok
    for field in ("task_id", "status", "result", "error", "finished_at", "attempts", "last_attempt_at"):
        assert hasattr(result, field)
    assert Event.__struct_fields__ == (
        "seq",
        "ts",
        "event",
        "task_id",
        "queue",
        "name",
        "group",
        "attempt",
        "worker",
        "data",
    )
    assert TaskError.__struct_fields__ == ("type", "message", "traceback")


def test_a_schedule_without_interval_has_no_next_run() -> None:
    assert Schedule(NOON).next_run(NOON) is None
    assert Schedule().next_run(NOON) is None


def test_a_schedule_stays_on_its_grid() -> None:
    schedule = Schedule(NOON, MINUTE)
    assert schedule.next_run(NOON - MINUTE) == NOON
    assert schedule.next_run(NOON) == NOON + MINUTE
    assert schedule.next_run(NOON + MINUTE * 1.5) == NOON + MINUTE * 2
    assert schedule.next_run(NOON + MINUTE * 1000) == NOON + MINUTE * 1001


def test_a_schedule_without_eta_starts_now() -> None:
    assert Schedule(interval=MINUTE).next_run(NOON) == NOON + MINUTE


def test_a_task_shows_its_schedule() -> None:
    assert Task(func_path="m:f", eta=NOON, interval=MINUTE).schedule == Schedule(NOON, MINUTE)


def test_a_short_error_is_kept_whole() -> None:
    error = TaskError("ValueError", "no", "Traceback …")
    assert error.cut() == error
    assert str(error) == "ValueError: no"
    assert str(TaskError("ValueError")) == "ValueError"


def test_of_a_long_traceback_the_end_is_kept() -> None:
    error = TaskError("ValueError", "no", "first line\n" + "x" * 100_000 + "\nlast line").cut()
    assert error.type == "ValueError"
    assert error.message == "no"
    assert error.traceback.endswith("last line")
    assert "first line" not in error.traceback
    assert len(error.type) + len(error.message) + len(error.traceback) <= MAX_ERROR_CHARS


@pytest.mark.parametrize(
    "error", [TaskError("T" * 50_000, "m" * 50_000, "t" * 50_000), TaskError("T", "m" * 50_000), TaskError("T" * 50_000)]
)
def test_an_error_is_cut_to_what_a_store_keeps(error: TaskError) -> None:
    cut = error.cut()
    assert len(cut.type) + len(cut.message) + len(cut.traceback) <= MAX_ERROR_CHARS
    assert cut.cut() == cut


def test_an_error_of_an_exception_has_its_type_text_and_traceback() -> None:
    try:
        raise KeyError("here")
    except KeyError as exc:
        error = TaskError.of(exc)
    assert (error.type, error.message) == ("KeyError", "'here'")
    assert "test_an_error_of_an_exception" in error.traceback


@pytest.mark.parametrize(
    ("text", "kind"),
    [("ValueError: no", "ValueError"), ("my.Error: a: b", "my.Error"), ("it broke", ""), ("no good: at all", ""), ("E: ", "")],
)
def test_an_error_that_arrived_as_text_gives_the_text_back(text: str, kind: str) -> None:
    error = TaskError.from_text(text)
    assert error.type == kind
    assert str(error) == text


def test_every_error_can_be_stored() -> None:
    error = TaskError("Odd\ud800", "cannot open a\udcff.pdf", "é \udcff")
    assert error == TaskError("Odd?", "cannot open a?.pdf", "é ?")
    assert msgspec.json.decode(msgspec.json.encode(error), type=TaskError) == error
    assert TaskError("E", "日本語 🦑").message == "日本語 🦑"
