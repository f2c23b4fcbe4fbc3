"""The options of format `omniq`, checked before anything is read or written."""

import pytest

from omniq.errors import Invalid
from omniq.spark.reading.options import READ, read_options
from omniq.storage.tables import Condition

URL = "redis://127.0.0.1:6379/0"


def test_only_the_url_is_needed() -> None:
    asked = read_options({"url": URL})
    assert (asked.table, asked.columns, asked.where, asked.parts) == ("tasks", None, (), None)
    assert (asked.batch_rows, asked.start, asked.end, asked.max_rows, asked.fail_on_data_loss) == (
        10_000,
        "earliest",
        "latest",
        100_000,
        True,
    )


def test_options_are_read_in_any_case_and_load_takes_the_url_too() -> None:
    asked = read_options({"path": URL, "TABLE": "events", "numpartitions": "3", "failondataloss": "FALSE"})
    assert (asked.url, asked.table, asked.parts, asked.fail_on_data_loss) == (URL, "events", 3, False)


def test_every_option_of_a_stream_arrives() -> None:
    asked = read_options(
        {
            "url": URL,
            "table": "events",
            "columns": "seq, event",
            "where": "event = 'failed'",
            "numPartitions": "2",
            "batchRows": "7",
            "startingOffsets": "latest",
            "maxRowsPerTrigger": "50",
            "failOnDataLoss": "false",
        },
        streaming=True,
    )
    assert asked.columns == ("seq", "event")
    assert asked.where == (Condition("event", "=", "failed"),)
    assert (asked.parts, asked.batch_rows, asked.start, asked.max_rows, asked.fail_on_data_loss) == (2, 7, "latest", 50, False)


@pytest.mark.parametrize("start", ["earliest", "latest", "2026-11-16", "2026-11-16T08:00:00Z", '{"shards": {"": 7}}'])
def test_a_position_is_a_word_a_time_or_json(start: str) -> None:
    assert read_options({"url": URL, "table": "events", "startingOffsets": start}).start == start


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "needs the option url"),
        ({"url": URL, "tabel": "tasks"}, f"no option 'tabel' for reading; did you mean 'table'? It has {', '.join(READ)}"),
        ({"url": URL, "table": "jobs"}, "no table 'jobs'; there are tasks"),
        ({"url": URL, "columns": "id,state"}, "no column 'state'"),
        ({"url": URL, "columns": "id,id"}, "name each column once"),
        ({"url": URL, "columns": " "}, "name each column once"),
        ({"url": URL, "where": "status"}, "ends too early"),
        ({"url": URL, "numPartitions": "0"}, "numPartitions '0': give a whole number"),
        ({"url": URL, "batchRows": "many"}, "batchRows 'many'"),
        ({"url": URL, "failOnDataLoss": "no"}, "failOnDataLoss 'no': give true or false"),
        ({"url": URL, "startingOffsets": "latest"}, "startingOffsets is for the table events"),
        ({"url": URL, "endingOffsets": "latest"}, "endingOffsets is for the table events"),
        ({"url": URL, "table": "events", "startingOffsets": "soon"}, "startingOffsets 'soon': give earliest, latest, a time"),
        ({"url": URL, "table": "events", "startingOffsets": "{}"}, "startingOffsets: offset '{}': write"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, str], said: str) -> None:
    with pytest.raises(Invalid) as refused:
        read_options(given)
    assert said in str(refused.value)


def test_only_events_are_a_stream() -> None:
    with pytest.raises(Invalid, match=r'table \'tasks\' is no stream; add .option\("table", "events"\)'):
        read_options({"url": URL}, streaming=True)


def test_a_stream_has_no_end() -> None:
    with pytest.raises(Invalid, match="availableNow"):
        read_options({"url": URL, "table": "events", "endingOffsets": "latest"}, streaming=True)
