"""The day, hour or minute of a timestamp in UTC, whatever zone the session is in.

Spark's own `to_date` and `date_trunc` answer in the session's zone. These functions count microseconds in whole numbers: a
day of March must not begin an hour earlier because clocks were changed somewhere.
"""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

SECOND_US = 1_000_000
MINUTE_US = 60 * SECOND_US
HOUR_US = 60 * MINUTE_US
DAY_US = 24 * HOUR_US


def day(moment: Column | str) -> Column:
    """The day (UTC) of a timestamp."""
    return date_of(floored(F.unix_micros(moment), DAY_US))


def beginning(moment: Column | str, step_us: int) -> Column:
    """The beginning of the hour, or other stretch of `step_us`, in which a timestamp lies, as a timestamp."""
    return F.timestamp_micros(floored(F.unix_micros(moment), step_us) * step_us)


def floored(number: Column, step: int) -> Column:
    """A whole number divided by a step and rounded down, also below 0. `/` would go through a double and round."""
    return F.call_function("div", number - F.pmod(number, F.lit(step)), F.lit(step))


def date_of(day_no: Column) -> Column:
    """The date of a number of days since 1970."""
    return F.date_from_unix_date(day_no.cast("int"))


def days_spanned(first: Column, last: Column) -> Column:
    """All days from that of one timestamp to that of another, as an array; null if either is null."""
    numbers = F.sequence(floored(F.unix_micros(first), DAY_US), floored(F.unix_micros(last), DAY_US))
    return F.transform(numbers, date_of)
