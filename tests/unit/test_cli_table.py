"""Tables in narrow terminals: names are cut, numbers stay."""

import io
from collections import Counter

import pytest
from rich.console import Console, ConsoleDimensions

from omniq.cli.queues.activity import Rates
from omniq.cli.queues.queues import COLUMNS as QUEUES
from omniq.cli.queues.top_screen import View, draw
from omniq.cli.table import Fitted
from omniq.operations import QueueCounts

NAME = "a-queue-whose-name-has-fifty-seven-characters-in-it-xxxxx"
COUNTS = (120_417, 31, 8, 4, 504, 2_918_333, 17, 2)


def shown(table: Fitted, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=table.width(width), highlight=False)
    console.print(table)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [200, 120, 100, 88, 80])
def test_every_number_stays_and_the_name_is_cut(width: int) -> None:
    assert len(NAME) == 57
    table = Fitted(QUEUES)
    table.add(NAME, *COUNTS, "12.5", "1034.0", "2h05m", "paused")
    table.add("mail", *COUNTS, None, None, None, "")
    titles, first, second = shown(table, width)
    assert max(map(len, (titles, first, second))) <= width
    assert titles.split()[1:] == [column.strip(">=") for column in QUEUES[1:] if column != "="]
    name, *rest = first.split()
    assert rest == [*map(str, COUNTS), "12.5", "1034.0", "2h05m", "paused"]
    assert name == NAME if width == 200 else (NAME.startswith(name[:-1]) and name.endswith("…"))
    assert second.split() == ["mail", *map(str, COUNTS), "–", "–", "–"]


def test_numbers_stay_also_where_there_is_no_room_for_them() -> None:
    table = Fitted(QUEUES)
    table.add(NAME, *COUNTS, "12.5", "1034.0", "2h05m", "")
    titles, line = shown(table, 30)
    assert titles.split()[0] == "QU…"
    assert line.split() == [NAME[:2] + "…", *map(str, COUNTS), "12.5", "1034.0", "2h05m"]


def test_ids_and_states_are_cut_when_there_are_no_words_left_to_cut() -> None:
    table = Fitted(["=ID", "=STATUS", "QUEUE", "NAME", ">TRIES", "ERROR"])
    id = "01JAB3Y8Z0000000000000000X"
    table.add(id, "RETRYING", NAME, "module.of.mine:function_with_a_name", 3, "a long story " * 20)
    for width in (120, 90, 80):
        line = shown(table, width)[1]
        assert len(line) == width
        assert line.startswith(f"{id}")
        assert line.split()[1] == "RETRYING"
        assert line.count("…") == 3
    (narrow,) = shown(table, 50)[1:]
    assert len(narrow) == 50
    assert "… RETRYING a-queue… module.…     3 a long …" in narrow


def test_a_folded_column_loses_nothing() -> None:
    table = Fitted(["=WHEN", "WHAT"], fold=True)
    words = " ".join(f"word-{n}" for n in range(30))
    table.add("now", words)
    lines = shown(table, 40)
    assert max(map(len, lines)) <= 40
    assert " ".join(" ".join(lines[1:]).split()) == f"now {words}"


def test_wide_characters_count_as_what_they_take() -> None:
    table = Fitted(["QUEUE", ">READY"])
    table.add("待" * 40, 1_234_567)
    line = shown(table, 30)[1]
    assert line.endswith(" 1234567")
    assert "…" in line


def test_words_take_the_room_there_is_where_asked() -> None:
    table = Fitted(["QUEUE", ">READY", "NAME"], expand=True)
    table.add("a", 1, "b")
    assert table.width(61) == 61
    assert shown(table, 61)[1].split() == ["a", "1", "b"]


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (100, set[str]()),
        (80, set[str]()),
        (60, {"BLOCK", "SCHED", "LEASED"}),
        (44, {"BLOCK", "SCHED", "LEASED", "DONE", "OUT/S", "IN/S"}),
    ],
)
def test_top_leaves_out_columns_and_never_half_a_number(width: int, left_out: set[str]) -> None:
    now = 1_800_000_000_000_000
    full = QueueCounts(
        queue=NAME,
        ready=120_417,
        scheduled=31,
        blocked=8,
        running=504,
        done=91_833,
        dead=17,
        oldest_ready_us=now - 7_500_000_000,
    )
    rates = Rates(span_s=10.0, came=Counter({NAME: 125}), ended=Counter({NAME: 10_340}))
    view = View(url="sqlite:///q.db", now_us=now, queues=[full, QueueCounts(queue="mail", paused=True)], rates=rates)
    console = Console(file=io.StringIO(), width=width, height=24, highlight=False)
    console.print(draw(view, ConsoleDimensions(width, 24)))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    titles, first, second = (line.strip("│ ").split() for line in lines[2:5])
    cells = {"READY": "120417", "SCHED": "31", "BLOCK": "8", "RUN": "0", "LEASED": "504", "DONE": "91833", "FAIL": "17"}
    cells |= {"IN/S": "12.5", "OUT/S": "1034.0", "OLDEST": "2h05m"}
    kept = [title for title in cells if title not in left_out]
    assert titles == ["QUEUE", *kept]
    assert first[1:] == [cells[title] for title in kept]
    assert len(first[0]) >= 8
    assert second[-1] == "paused"
