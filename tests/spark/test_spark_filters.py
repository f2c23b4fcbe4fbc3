"""Pushed filters and the option `where`, as conditions of a store."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql import datasource as spark_filters

from omniq.errors import Invalid
from omniq.models import to_us
from omniq.spark.reading.filters import conditions, pushed
from omniq.storage.tables import Condition

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("status = 'FAILED'", [Condition("status", "=", "FAILED")]),
        ('STATUS="FAILED"', [Condition("status", "=", "FAILED")]),
        ("`status` = 'it''s'", [Condition("status", "=", "it's")]),
        ("attempts>=3 and attempts < 10", [Condition("attempts", ">=", 3), Condition("attempts", "<", 10)]),
        ("3 <= attempts", [Condition("attempts", ">=", 3)]),
        ("seq > -1", [Condition("seq", ">", -1)]),
        ("queue IN ('a', 'b')", [Condition("queue", "in", ("a", "b"))]),
        ("group_id IS NULL AND worker is not null", [Condition("group_id", "null"), Condition("worker", "not null")]),
        ("name LIKE 'app.mail:%'", [Condition("name", "starts", "app.mail:")]),
        ("seq BETWEEN 2 AND 9 AND id = 'x'", [Condition("seq", ">=", 2), Condition("seq", "<=", 9), Condition("id", "=", "x")]),
        ("(status = 'FAILED' AND (attempts > 1))", [Condition("status", "=", "FAILED"), Condition("attempts", ">", 1)]),
        ("finished_at > '2026-11-16T12:00:00Z'", [Condition("finished_at", ">", to_us(NOON))]),
        ("finished_at > TIMESTAMP '2026-11-16 12:00:00'", [Condition("finished_at", ">", to_us(NOON))]),
        ("created_at >= DATE '2026-11-16'", [Condition("created_at", ">=", to_us(NOON.replace(hour=0)))]),
    ],
)
def test_a_predicate_becomes_conditions(text: str, expected: list[Condition]) -> None:
    assert list(conditions("tasks", text)) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("status = 'FAILED' OR attempts > 2", "cannot read 'OR attempts > 2'"),
        ("status <> 'FAILED'", "cannot read \"> 'FAILED'\""),
        ("status != 'FAILED'", "cannot read"),
        ("NOT status = 'FAILED'", "no column 'not'"),
        ("stats = 'FAILED'", "table 'tasks' has no column 'stats'; it has id, queue"),
        ("status = FAILED", "cannot read 'FAILED'"),
        ("status = 7", "no string is '7'"),
        ("attempts = '7'", "no int is"),
        (f"seq < {1 << 63}", "no long is"),
        ("finished_at > 'yesterday'", "no timestamp is \"'yesterday'\""),
        ("name LIKE '%mail%'", "LIKE takes a start and one % at the end"),
        ("name LIKE 'a_b%'", "LIKE takes a start and one % at the end"),
        ("payload = 'x'", "nothing compares with the bytes of"),
        ("status =", "ends too early"),
        ("status = 'FAILED' AND", "ends too early"),
        ("status IN ('a'", "ends too early"),
        ("lower(name) = 'a'", "no column 'lower'"),
        ("status = 'it's'", "cannot read"),
        ("1 = 1", "cannot read"),
    ],
)
def test_more_than_comparisons_joined_by_and_is_refused(text: str, said: str) -> None:
    with pytest.raises(Invalid) as refused:
        conditions("tasks", text)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        (spark_filters.EqualTo(("status",), "FAILED"), Condition("status", "=", "FAILED")),
        (spark_filters.EqualNullSafe(("status",), "FAILED"), Condition("status", "=", "FAILED")),
        (spark_filters.EqualNullSafe(("group_id",), None), Condition("group_id", "null")),
        (spark_filters.In(("queue",), ("a", None, "b")), Condition("queue", "in", ("a", "b"))),
        (spark_filters.GreaterThan(("attempts",), 2), Condition("attempts", ">", 2)),
        (spark_filters.GreaterThanOrEqual(("seq",), 2), Condition("seq", ">=", 2)),
        (spark_filters.LessThan(("created_at",), NOON), Condition("created_at", "<", to_us(NOON))),
        (spark_filters.LessThanOrEqual(("attempts",), 2), Condition("attempts", "<=", 2)),
        (spark_filters.StringStartsWith(("name",), "app."), Condition("name", "starts", "app.")),
        (spark_filters.IsNull(("group_id",)), Condition("group_id", "null")),
        (spark_filters.IsNotNull(("group_id",)), Condition("group_id", "not null")),
    ],
)
def test_a_filter_of_spark_becomes_a_condition(filter: Any, expected: Condition) -> None:
    assert pushed("tasks", filter) == expected


@dataclass(frozen=True)
class Unheard:
    attribute: tuple[str, ...] = ("status",)
    value: str = "x"


@pytest.mark.parametrize(
    "filter",
    [
        spark_filters.Not(spark_filters.EqualTo(("status",), "FAILED")),
        spark_filters.StringContains(("name",), "mail"),
        spark_filters.EqualTo(("status",), None),
        spark_filters.EqualTo(("payload",), b"x"),
        spark_filters.EqualTo(("attempts",), "2"),
        spark_filters.EqualTo(("attempts",), True),
        spark_filters.GreaterThan(("created_at",), datetime(2026, 11, 16)),
        spark_filters.In(("attempts",), (1, "2")),
        Unheard(),
    ],
)
def test_a_filter_without_an_equal_is_left_to_spark(filter: Any) -> None:
    assert pushed("tasks", filter) is None
