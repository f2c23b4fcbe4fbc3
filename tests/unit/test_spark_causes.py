"""The Python error behind an error of Spark's. The texts have the shapes that Spark gives them; no Java is started here."""

import pytest

from omniq.errors import Refused, SparkFailed, TaskNotFound
from omniq.spark.causes import cause, reported, unwrapped

FRAMES = 'Traceback (most recent call last):\n  File "jobs.py", line 3, in f\n    raise it\n    ^^^^^^^^\n'
STACK = "\n\tat org.apache.spark.api.Runner.run(Runner.scala:1)\nCaused by: java.io.IOException: gone\n\t... 3 more"


def _of_spark(text: str) -> Exception:
    return type("PythonException", (Exception,), {"__module__": "pyspark.errors.exceptions.captured"})(text)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (f"thrown from the Python worker:\n{FRAMES}ValueError: bad: a\nb\n", ValueError, "bad: a\nb"),
        (
            f"[STREAM] {FRAMES}omniq.errors.Refused: no\n SQLSTATE: 39000\n=== Streaming Query ===\n",
            Refused,
            "no",
        ),
        (f"{FRAMES}KeyError: 'x'\n\nThe above exception was the direct cause\n\n{FRAMES}OSError: disk", OSError, "disk"),
        (f"Job aborted: {FRAMES}omniq.errors.TaskNotFound: t1{STACK}", TaskNotFound, "t1"),
        (f"{FRAMES}AssertionError\n", AssertionError, ""),
        (f"{FRAMES}json.decoder.JSONDecodeError: line 1{STACK}", SparkFailed, "json.decoder.JSONDecodeError: line 1"),
        (f"{FRAMES}UnicodeDecodeError: 'utf-8' codec", SparkFailed, "UnicodeDecodeError: 'utf-8' codec"),
        (f"{FRAMES}SystemExit: 3", SparkFailed, "SystemExit: 3"),
        (f"{FRAMES}omniq.errors.timedelta: 3", SparkFailed, "omniq.errors.timedelta: 3"),
        (f"Task 0 in stage 1 failed: java.lang.OutOfMemoryError{STACK}", SparkFailed, None),
    ],
)
def test_the_cause_is_what_python_raised_last(text: str, kind: type[Exception], said: str | None) -> None:
    found = cause(_of_spark(text))
    assert type(found) is kind
    assert str(found) == (said if said is not None else "Task 0 in stage 1 failed: java.lang.OutOfMemoryError")
    assert "org.apache" not in "".join([str(found), *getattr(found, "__notes__", [])])


def test_the_notes_hold_the_traceback() -> None:
    found = cause(_of_spark(f"{FRAMES}ValueError: bad"))
    assert found.__notes__ == [f"In a Python process of Spark's:\n{FRAMES}ValueError: bad"]


def test_an_error_without_python_or_java_in_its_text_stays() -> None:
    error = _of_spark("[TABLE_OR_VIEW_NOT_FOUND] no `x`. SQLSTATE: 42P01; line 1")
    assert cause(error) is error


def test_what_is_not_of_spark_is_raised_untouched() -> None:
    error = ValueError(f"{FRAMES}KeyError: 1")
    with pytest.raises(ValueError, match="KeyError") as caught, unwrapped():
        raise error
    assert caught.value is error


def test_the_error_of_spark_stays_reachable() -> None:
    error = _of_spark(f"{FRAMES}ValueError: bad")
    with pytest.raises(ValueError, match="bad") as caught, unwrapped():
        raise error
    assert caught.value.__context__ is error
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (
            "[NOT_FOUND] no `x`. Verify it. SQLSTATE: 42P01; line 1;\n'Project ['nope]\n+- 'Relation [x]",
            SparkFailed,
            None,
        ),
        (f"{FRAMES}ValueError: bad", SparkFailed, "ValueError: bad"),
        (f"{FRAMES}omniq.errors.Refused: no", Refused, "no"),
    ],
)
def test_a_command_says_one_sentence(text: str, kind: type[Exception], said: str | None) -> None:
    with pytest.raises(kind) as caught, reported():
        raise _of_spark(text)
    assert str(caught.value) == (said or "[NOT_FOUND] no `x`. Verify it.")
    with pytest.raises(kind) as again, reported(), unwrapped():
        raise _of_spark(text)
    assert str(again.value) == str(caught.value)


def test_a_command_still_shows_a_fault_of_its_own() -> None:
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught, reported():
        raise error
    assert caught.value is error
