"""Reports as data: columns, tables and documents. ``mamf.report.formats`` writes them as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Generic, TypeVar

from mamf.measurement import Conditions
from mamf.report.text import (
    DASH,
    counted,
    interval_cell,
    list_once,
    percent,
    plain,
    scaled_unit,
    significant,
    snake_case,
    whole,
)
from mamf.statistics import Interval

RowT = TypeVar("RowT")


@dataclass(frozen=True)
class Column(Generic[RowT]):
    """A figure or a text of each row.

    - ``name``: its key in csv and json, snake_case with the unit: ``rate_tflops``; empty for a column that only tables
      for people have.
    - ``title``: its heading in tables for people; empty for a column that only csv and json have.
    - ``read``: its value with full precision, None if a row has none.
    - ``format``: how people read a value that is not None.
    - ``importance``: 0 is always shown; a narrow terminal drops the columns with the highest numbers first.
    - ``shortest``: characters to which a narrow terminal may cut long names, before it drops columns; 0 for none.
    """

    name: str
    title: str
    read: Callable[[RowT], object]
    format: Callable[[Any], str] = plain
    importance: int = 0
    left: bool = False
    shortest: int = 0

    def cell(self, row: RowT) -> str:
        value = self.read(row)
        return DASH if value is None else self.format(value)

    def is_empty(self, rows: Iterable[RowT]) -> bool:
        """Whether no row has a value."""
        return all(self.read(row) in (None, "") for row in rows)


@dataclass(frozen=True)
class Table(Generic[RowT]):
    """Rows with the same columns.

    - ``rows``: all rows, for csv and json. ``shown``: those for people, best first; None for all.
    - ``top``: how many of ``shown`` people see; None for all.
    - ``key``: the key in json. Tables with one key are one list in json, and one table in csv.
    - ``remarks``: what a reader must know beside the figures of a row; listed once below the table, by ``label``.
    """

    columns: Sequence[Column[RowT]]
    rows: Sequence[RowT]
    title: str = ""
    key: str = "rows"
    shown: Sequence[RowT] | None = None
    top: int | None = None
    remarks: Callable[[RowT], Iterable[str]] = lambda row: ()
    label: Callable[[RowT], str] = str

    @property
    def is_hidden(self) -> bool:
        """Whether people see nothing of it: csv and json alone have it, or it has neither rows nor a title."""
        return not any(column.title for column in self.columns) or not (self.top_rows or self.title)

    @property
    def top_rows(self) -> Sequence[RowT]:
        """The rows that people see."""
        return (self.rows if self.shown is None else self.shown)[: self.top]

    @property
    def top_columns(self) -> list[Column[RowT]]:
        """The columns that people see: those with a title and with a value in some row."""
        rows = self.top_rows
        return [column for column in self.columns if column.title and rows and not column.is_empty(rows)]

    @property
    def notes(self) -> list[str]:
        """Lines below the table: how many rows are left out, and each remark once."""
        rows = self.top_rows
        hidden = len(self.rows if self.shown is None else self.shown) - len(rows)
        more = [f"{counted(hidden, 'more row')} (--top all shows all)"] if hidden else []
        return more + list_once((text, self.label(row)) for row in rows for text in self.remarks(row))

    def records(self) -> list[dict[str, object]]:
        """All rows as csv and json hold them."""
        return [{column.name: column.read(row) for column in self.columns if column.name} for row in self.rows]


@dataclass(frozen=True)
class Lines:
    """Lines of text, under a heading if there is one."""

    texts: Sequence[str]
    heading: str = ""


@dataclass(frozen=True)
class Details(Lines):
    """Lines that a terminal shows only with ``--wide``."""


@dataclass(frozen=True)
class Answer(Lines):
    """The lines that answer what was asked: best kernel, ceiling, verdict. The last block of a report."""


Block = Lines | Table[Any]


@dataclass(frozen=True)
class Document:
    """A report.

    - ``data``: what json holds beside the tables, such as the header and the summary of a log.
    - ``main``: the key of the tables that csv holds; by default that of the first table.
    - ``title``: the title of an html page.
    """

    title: str
    blocks: Sequence[Block]
    data: Mapping[str, Any] = field(default_factory=dict)
    main: str = ""

    @property
    def visible_blocks(self) -> list[Block]:
        """The blocks that people see."""
        return [each for each in self.blocks if (not each.is_hidden if isinstance(each, Table) else each.texts)]

    def tables(self) -> dict[str, list[dict[str, object]]]:
        """The records of all tables by key. Records with one key have equal columns: what one lacks is None."""
        found: dict[str, list[dict[str, object]]] = {}
        for block in self.blocks:
            if isinstance(block, Table):
                found.setdefault(block.key, []).extend(block.records())
        for records in found.values():
            names = dict.fromkeys(name for record in records for name in record)
            records[:] = [{name: record.get(name) for name in names} for record in records]
        return found


def columns_from(
    rows: Iterable[RowT],
    read: Callable[[RowT], Mapping[str, object]],
    importance: int = 0,
    *,
    titled: bool = True,
) -> list[Column[RowT]]:
    """A column for each name in the mappings that ``read`` gives of rows, in their order.

    ``titled``: whether people see them, under that name; csv and json have them under the name in snake_case. Texts are
    aligned to the left.
    """
    rows = list(rows)
    texts = {name for row in rows for name, value in read(row).items() if isinstance(value, str)}

    def reader(name: str) -> Callable[[RowT], object]:
        return lambda row: read(row).get(name)

    return [
        Column(snake_case(name), name if titled else "", reader(name), importance=importance, left=name in texts)
        for name in dict.fromkeys(name for row in rows for name in read(row))
    ]


# -- columns that several reports have ---------------------------------------------------------------------------------


def interval_columns(
    read: Callable[[RowT], Interval | None], name: str, format: Callable[[Interval], str] = interval_cell
) -> list[Column[RowT]]:
    """The interval for people, its ends for csv and json. ``name``: of an end, such as ``rate_{}_tflops``."""
    return [
        Column("", "interval", read, format, importance=4, left=True),
        Column(name.format("low"), "", lambda row: (it := read(row)) and it.low),
        Column(name.format("high"), "", lambda row: (it := read(row)) and it.high),
    ]


def clock_columns(read: Callable[[RowT], Conditions | None], importance: int) -> list[Column[RowT]]:
    """The share of the compute units' cycles that a row used, the clock that they had, and the clock that the driver
    requested. The last one is less important by two.
    """

    def of(name: str, factor: float = 1.0) -> Callable[[RowT], float | None]:
        def value(row: RowT) -> float | None:
            conditions = read(row)
            known = None if conditions is None else getattr(conditions, name)
            return None if known is None else factor * known

        return value

    return [
        Column("cycles_used", "% cycles", of("cycles_used"), percent, importance),
        Column("true_clock_mhz", "MHz", of("true_clock_hz", 1e-6), whole, importance),
        Column("clock_mhz", "MHz requested", of("clock_hz", 1e-6), whole, importance + 2),
    ]


def sensor_columns(read: Callable[[RowT], Conditions | None]) -> list[Column[RowT]]:
    """Clock and power while the samples of a row were taken."""
    return [
        *clock_columns(read, 5),
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
