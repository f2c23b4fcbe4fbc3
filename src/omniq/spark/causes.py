"""The Python error behind an error of Spark, whose text is mostly about Java."""

from __future__ import annotations

import builtins
import os
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress

import omniq.errors
from omniq.errors import OmniQError, SparkFailed

_TRACEBACK = "Traceback (most recent call last):\n"
# Below the indented frames: the error's type, alone or before a colon and its text, which may have several lines.
_RAISED = re.compile(r"^(?P<type>[^\W\d][\w.]*)(?:: (?P<text>.*))?\Z", re.MULTILINE | re.DOTALL)
_JAVA = re.compile(r"\n+(?:\tat |JVM stacktrace:|Driver stacktrace:)")
_SPARK = re.compile(rf"{_JAVA.pattern}|\n+ ?SQLSTATE: |\n=== Streaming Query")
# What `sentence_first` leaves of an error, behind Spark's own words.
_PLAIN = re.compile(r"(?:^|: )(?P<type>omniq\.errors\.\w+): (?P<text>.*)\Z", re.DOTALL)


def cause(exc: Exception) -> Exception:
    """The Python error behind an error of Spark, without Java's part of the text.

    An error of omniq or a built-in one of Python keeps its type; any other is a `SparkFailed` that names it. The traceback of
    the process that raised it is in its notes. An error that no Python code raised, such as a mistake in SQL, is returned as it
    is, or as a `SparkFailed` when a Java stack follows its text. Errors of anything but Spark are returned as they are.
    """
    if not _is_of_spark(exc):
        return exc
    said = str(exc)
    # The last traceback is of the process that failed; those before it are of the processes that passed its error on.
    _, found, last = said.rpartition(_TRACEBACK)
    if not found:
        plain = _PLAIN.search(_SPARK.split(said, maxsplit=1)[0].rstrip())
        if plain:
            return _rebuilt(plain["type"], plain["text"])
        return SparkFailed(_JAVA.split(said, maxsplit=1)[0].strip()) if _JAVA.search(said) else exc
    trace = _SPARK.split(last, maxsplit=1)[0].rstrip()
    raised = _RAISED.search(trace)
    error = _rebuilt(raised["type"], raised["text"] or "") if raised else SparkFailed(trace)
    error.add_note(f"In a Python process of Spark's:\n{_TRACEBACK}{trace}")
    return error


def _rebuilt(name: str, text: str) -> Exception:
    """The error that a traceback ends with, as its own class where a text is all that its constructor needs."""
    home = omniq.errors if name.startswith("omniq.errors.") else builtins
    kind = getattr(home, name.removeprefix("omniq.errors."), None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(TypeError):
            return kind(text) if text else kind()
    return SparkFailed(f"{name}: {text}" if text else name)


@contextmanager
def sentence_first() -> Generator[None, None, None]:
    """In a planning process of Spark, let an error of omniq reach the user as its sentence, without a traceback.

    Spark reads from the environment whether to send the traceback. The process ends with the error, so nothing is set back.
    """
    try:
        yield
    except OmniQError:
        spec = getattr(sys.modules.get("__main__"), "__spec__", None)
        if getattr(spec, "name", "").startswith("pyspark."):
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise


@contextmanager
def unwrapped() -> Generator[None, None, None]:
    """Raise the Python error behind an error of Spark instead of it; Spark's own error is its `__context__`."""
    try:
        yield
    except Exception as exc:
        found = cause(exc)
        if found is exc:
            raise
        raise found from None


@contextmanager
def reported() -> Generator[None, None, None]:
    """The same for a command: any error of Spark or its processes becomes an `OmniQError` whose text is a sentence or two."""
    try:
        yield
    except Exception as exc:
        found = cause(exc)
        # `__context__`, because functions of omniq.spark have unwrapped their errors already. A fault of our own keeps its
        # type and traceback, so that it is not taken for one of the user's.
        if isinstance(found, OmniQError) or not (_is_of_spark(exc) or _is_of_spark(exc.__context__)):
            raise found from None
        text = _PLAN.split(str(found), maxsplit=1)[0].strip()
        raise SparkFailed(text if _is_of_spark(found) else f"{type(found).__name__}: {text}") from None


# Below a mistake in SQL: the statement, or the plan that Spark made of it.
_PLAN = re.compile(r"[;\s]*(?:SQLSTATE: |\n== |\n[\s~'+-])")


def _is_of_spark(exc: BaseException | None) -> bool:
    return type(exc).__module__.startswith(("pyspark.", "py4j."))
