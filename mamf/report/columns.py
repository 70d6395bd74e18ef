"""Columns that several reports have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, TypeVar

from mamf.measurement import Conditions
from mamf.report.document import Column, Table
from mamf.report.text import interval_cell, scaled_unit, significant, whole
from mamf.statistics import Interval

RowT = TypeVar("RowT")


def interval_columns(
    read: Callable[[RowT], Interval | None], name: str, format: Callable[[Interval], str] = interval_cell
) -> list[Column[RowT]]:
    """The interval for people, its ends for csv and json. ``name``: of an end, such as ``rate_{}_tflops``."""
    return [
        Column("", "interval", read, format, importance=4, left=True),
        Column(name.format("low"), "", lambda row: (it := read(row)) and it.low),
        Column(name.format("high"), "", lambda row: (it := read(row)) and it.high),
    ]


def sensor_columns(read: Callable[[RowT], Conditions | None]) -> list[Column[RowT]]:
    """Clock and power while the samples of a row were taken."""
    return [
        Column("clock_mhz", "MHz", lambda row: (it := read(row)) and it.clock_hz and it.clock_hz / 1e6, whole, 6),
        Column("power_watts", "W", lambda row: (it := read(row)) and it.watts, whole, 6),
    ]


def rate_column(
    name: str, unit: str, read: Callable[[RowT], float | None], rows: Iterable[RowT], importance: int = 0
) -> Column[RowT]:
    """Rates in ``unit`` (TFLOPS, TB/s), which people read in the unit that fits the smallest of them."""
    title, factor = scaled_unit(unit, [rate for row in rows if (rate := read(row))])
    return Column(name, title, read, lambda rate: significant(rate * factor), importance)


def text_table(titles: Sequence[str], rows: Sequence[Sequence[str | None]]) -> Table[Any]:
    """A table of texts for people; a dash stands for None."""
    return Table([Column("", title, itemgetter(place), left=True) for place, title in enumerate(titles)], rows)
