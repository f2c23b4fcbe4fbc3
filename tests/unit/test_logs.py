"""Log lines and what terminals show: whatever a program writes into a name or a message, a record stays one line."""

import json
import logging
from typing import Any

import pytest

from omniq.cli.escapes import escape, escape_json
from omniq.cli.logs import JsonFormatter, PlainFormatter
from omniq.cli.output import compact_json, one_line, print_indented, print_json, print_line, print_table

C0 = [chr(code) for code in range(0x20)]
C1 = [chr(code) for code in range(0x7F, 0xA0)]
DIRECTIONS = list("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
LINE_ENDS = list("\u2028\u2029")
NASTY = "a\x1b]0;pwned\x07\rb\nc\x9b31m\u202egnp.exe\u2066\u2028\x00\x7f"


def record_of(message: str, *args: Any, error: BaseException | None = None, **extra: Any) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("omniq.worker", logging.ERROR, "", 0, message, args, info)
    vars(record).update(extra)
    return record


def caught(message: str) -> ValueError:
    try:
        raise ValueError(message)
    except ValueError as exc:
        return exc


@pytest.mark.parametrize("char", [*C0, *C1, *DIRECTIONS, *LINE_ENDS, "\ud800"], ids=lambda char: f"{ord(char):04x}")
def test_what_a_terminal_would_obey_is_written_out(char: str) -> None:
    shown = escape(f"a{char}b")
    assert shown.isprintable()
    assert shown.startswith("a\\")
    assert shown.endswith("b")
    assert len(one_line(f"a{char}b").splitlines()) == 1


@pytest.mark.parametrize("text", ["", "plain", "Zürich – 東京 👩‍👩‍👧 שלום", "a\u00a0b", "C:\\new"])
def test_other_text_stays_as_it_is(text: str) -> None:
    assert escape(text) == text


@pytest.mark.parametrize("char", [*C1, *DIRECTIONS, *LINE_ENDS], ids=lambda char: f"{ord(char):04x}")
def test_json_says_the_same_in_escapes(char: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = {f"k{char}": [f"v{char}", {"deep": char}]}
    print_json(value)
    for document in (capsys.readouterr().out, compact_json(value), escape_json(json.dumps(value, ensure_ascii=False))):
        assert char not in document
        assert f"\\u{ord(char):04x}" in document
        assert json.loads(document) == value


def test_a_row_of_a_table_and_a_line_are_one_line_without_marks_of_direction(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["=ID", "NAME"], [[NASTY, NASTY], ["2", "b"]])
    print_line(NASTY)
    print_indented(NASTY)
    print_line(compact_json({"x": NASTY}))
    shown = capsys.readouterr().out
    assert len(shown.split("\n")) == 3 + 1 + 2 + 1 + 1
    assert shown.count("\n    ") == 1 + 1
    assert all(char not in shown for char in [*C1, *DIRECTIONS, *LINE_ENDS, "\x1b", "\x07", "\r", "\x00"])
    assert json.loads(shown.splitlines()[-1]) == {"x": NASTY}


def test_a_plain_record_is_one_line() -> None:
    shown = PlainFormatter().format(record_of("task %s failed: %s", NASTY, NASTY, task_id=NASTY))
    assert shown.isprintable()
    assert shown.endswith("]")
    assert "ERROR   task a\\x1b]0;pwned\\x07\\rb\\nc\\x9b31m\\u202egnp.exe\\u2066\\u2028\\x00\\x7f failed" in shown


def test_a_traceback_stands_below_in_indented_lines() -> None:
    shown = PlainFormatter().format(record_of("broken", error=caught(NASTY)))
    first, *rest = shown.split("\n")
    assert first.endswith("ERROR   broken")
    assert rest[0] == "    Traceback (most recent call last):"
    assert all(line.startswith("    ") and line.isprintable() for line in rest)
    assert any(line.startswith("    ValueError: a\\x1b]0;pwned") for line in rest)


def test_a_json_record_is_one_line_that_says_the_same() -> None:
    formatter = JsonFormatter()
    shown = formatter.format(record_of("failed: %s", NASTY, error=caught(NASTY), task_id=NASTY, queue="q", worker=object))
    assert shown.isprintable()
    line = json.loads(shown)
    assert (line["msg"], line["task_id"], line["queue"], line["level"]) == (f"failed: {NASTY}", NASTY, "q", "ERROR")
    assert line["exc"].startswith("Traceback (most recent call last):")
    assert line["exc"].endswith(f"ValueError: {NASTY}")


def test_half_a_character_breaks_no_line() -> None:
    for formatter in (PlainFormatter(), JsonFormatter()):
        formatter.format(record_of("%s", "\udc80", task_id="\ud800")).encode()


def test_stack_info_is_indented_too() -> None:
    record = record_of("here")
    record.stack_info = 'Stack (most recent call last):\n  File "x"'
    assert PlainFormatter().format(record).split("\n")[1:] == ["    Stack (most recent call last):", '      File "x"']
