"""Reports as data: columns, tables and documents, and the text of numbers and lines in them.

``mamf.report.formats`` writes documents as text. Foreign text is made harmless here (mamf.text).
"""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Generic, TypeVar

from mamf.backend import describe_sharing
from mamf.kernel import Work
from mamf.measurement import Conditions, group_pairs
from mamf.statistics import Interval
from mamf.text import escape_invisible, escape_markdown, to_csv_cell

MISSING_VALUE = "-"
#: In place of an interval that is wider than +-50 %.
UNKNOWN_INTERVAL = "unknown"
UNKNOWN_INTERVAL_REASON = "interval unknown: the samples scatter so much that a repeat may be more than 50 % off"
_COLUMN_GAP = "  "


def format_significant(value: float) -> str:
    """Four significant digits without an exponent, from a CPU's 0.1336 to an accelerator's 841.3 TFLOPS."""
    return f"{value:#.4g}".rstrip(".") if value < 9999.5 else f"{value:.0f}"


#: Prefixes of units, each with what a value in 1e12 is multiplied by.
_PREFIX_FACTORS = {"T": 1.0, "G": 1e3, "M": 1e6, "k": 1e9}
#: A largest value below this is shown in a smaller unit.
_MIN_SHOWN_VALUE = 0.1


def choose_unit(unit: str, values: Iterable[float]) -> tuple[str, float]:
    """Return the unit in which the largest of ``values`` (in ``unit``: TFLOPS, TB/s) reads well, and its factor."""
    largest = max(values, default=0.0) or 1.0
    if not unit.startswith("T"):
        return unit, 1.0
    prefix, factor = next(
        (each for each in _PREFIX_FACTORS.items() if largest * each[1] >= _MIN_SHOWN_VALUE), ("k", 1e9)
    )
    return prefix + unit[1:], factor


def format_rate(rate: float, unit: str) -> str:
    """Format a rate with its unit: ``841.3 TFLOPS``, ``78.70 MB/s``."""
    name, factor = choose_unit(unit, [rate])
    return f"{format_significant(rate * factor)} {name}"


def describe_counted_work(works: Iterable[Work]) -> str:
    """Say which FLOP and bytes are counted, each once: ``counted: 2*M*N*K; A and B read, C written, once each``."""
    return "counted: " + "; ".join(dict.fromkeys(part for work in works for part in work.convention.split("; ")))


def name_rate_column(name: str, unit: str) -> str:
    """Add the unit of a rate to a name in csv and json: ``rate_tflops``, ``rate_tb_per_s``."""
    return f"{name}_{convert_to_snake_case(unit)}"


def format_plain(value: object) -> str:
    """Format a value of any type: text unchanged, floats with four digits and without an exponent."""
    if not isinstance(value, float):
        return value if isinstance(value, str) else str(value)
    return f"{value:.4g}" if abs(value) < 9999.5 else f"{value:.0f}"


def format_percent(share: float) -> str:
    """Format a share in percent, without the sign: 81.3."""
    return f"{100 * share:.1f}"


def format_count(number: int, noun: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shorten_line(text: str) -> str:
    """Return the first 100 characters of a text, in one line."""
    return textwrap.shorten(escape_invisible(text), 100, placeholder=" ...")


def split_shared_parts(titles: Sequence[str]) -> tuple[list[str], str]:
    """Split titles such as ``burst, bfloat16`` into what each has for itself, and what all of them share."""
    parts = [title.split(", ") for title in titles]
    shared = [part for part in parts[0] if all(part in each for each in parts)] if parts else []
    return [", ".join(part for part in each if part not in shared) for each in parts], ", ".join(shared)


def convert_to_snake_case(title: str) -> str:
    """Convert a heading to a name in csv and json: ``FLOP/byte`` as ``flop_per_byte``."""
    spelled = title.replace("/", " per ").replace("%", " percent ")
    return re.sub(r"\W+", "_", spelled.lower()).strip("_")


def format_interval(interval: Interval, factor: float = 1.0) -> str:
    """Format an interval, times ``factor``; ``unknown`` if it reaches further than 50 % from its middle."""
    low, high = format_significant(interval.low * factor), format_significant(interval.high * factor)
    return f"{low} to {high}" if interval.is_known else UNKNOWN_INTERVAL


def format_whole_number(value: float | None) -> str:
    return MISSING_VALUE if value is None else f"{value:.0f}"


def align_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left_aligned: Collection[str]) -> str:
    """Aligned columns for a terminal."""
    lines = [[escape_invisible(cell) for cell in line] for line in (columns, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]

    def aligned(line: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if name in left_aligned else cell.rjust(width)
            for name, cell, width in zip(columns, line, widths, strict=True)
        )
        return _COLUMN_GAP.join(padded).rstrip()

    return "\n".join(map(aligned, lines)) + "\n"


def merge_remarks(remarks: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each remark, with the first row that it applies to and the number of others."""
    labels = group_pairs(remark for remark in remarks if remark[0])
    return [
        f"{first}{f' and {len(others)} more' if others else ''}: {text}" for text, (first, *others) in labels.items()
    ]


def format_markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left_aligned: Collection[str]) -> str:
    """Format a GitHub table. Its cells are plain text, except Markup."""
    rule = [":--" if name in left_aligned else "--:" for name in columns]
    lines = [list(map(_format_markdown_cell, columns)), rule, *(list(map(_format_markdown_cell, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _format_markdown_cell(text: str) -> str:
    return " ".join(escape_markdown(text).split())


def label_kernel(name: str, header: Mapping[str, Any]) -> str:
    """Return a kernel's name as tables show it: with "(by path)" if the run got it as ``package.module:Class``."""
    planned = _planned_kernels(header)
    is_by_path = any(":" in each for each in planned) and {name, name.partition("[")[0]}.isdisjoint(planned)
    return f"{name} (by path)" if is_by_path else name


def _planned_kernels(header: Mapping[str, Any]) -> Sequence[str]:
    # As they were asked for: by name, or by path (package.module:Class).
    return header.get("plan", {}).get("kernels") or [header.get("kernel", "")]


def describe_machine(header: Mapping[str, Any]) -> str:
    """Name the device, the software and the timer of a run, and the kernels that it was given by path."""
    device = header["device"]
    known = [
        format_count(device["compute_units"], "compute unit") if device.get("compute_units") else "",
        f"{device['power_limit_watts']:.0f} W limit" if device.get("power_limit_watts") else "",
        f"driver {device['driver']}" if device.get("driver") else "",
        f"torch {header['environment']['packages'].get('torch', 'unknown')}",
        f"timed by {header['timer']}",
    ]
    machine = f"{device['name']} ({device['backend']}:{device['index']}), {', '.join(filter(None, known))}"
    by_path = (f"kernel by path: {name}" for name in _planned_kernels(header) if ":" in name)
    return "; ".join(filter(None, [machine, describe_sharing(device["name"]), *by_path]))


def describe_end(summary: Mapping[str, Any] | None, has_count: bool = True) -> str:
    """Say how a run ended: its status and the reason, how much was measured and how much is left."""
    if summary is None:
        return "killed: the log has no summary; resume it"
    end = f"{summary['status']}: {summary['reason']}" if summary["reason"] else summary["status"]
    left = f"; {summary['left']} left, --resume continues" if summary.get("left") else ""
    measured = f"; {summary['measured']} measured" if has_count else ""
    return f"{end}{measured} in {summary['elapsed_seconds']:.1f} s{left}"


def format_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows with equal keys as CSV, with the keys in the first line. Return an empty string for no rows."""
    text = io.StringIO()
    if rows:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(map(to_csv_cell, rows[0]))
        writer.writerows([to_csv_cell(row.get(name)) for name in rows[0]] for row in rows)
    return text.getvalue()


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
    format: Callable[[Any], str] = format_plain
    importance: int = 0
    left: bool = False
    min_characters: int = 0

    def format_cell(self, row: RowT) -> str:
        value = self.read(row)
        return MISSING_VALUE if value is None else self.format(value)

    def is_empty(self, rows: Iterable[RowT]) -> bool:
        """Whether no row has a value."""
        return all(self.read(row) in (None, "") for row in rows)


@dataclass(frozen=True)
class Table(Generic[RowT]):
    """Rows with the same columns.

    - ``rows``: all rows, for csv and json. ``shown``: those for people, best first; None for all.
    - ``top``: how many of ``shown`` people see; None for all.
    - ``key``: the key in json. Tables with one key are one list in json, and one table in csv.
    - ``remarks``: what a reader must know besides the figures of a row; listed once below the table, by ``label``.
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
        """Whether it is not shown to people: only csv and json have it, or it has neither rows nor a title."""
        return not any(column.title for column in self.columns) or not (self.visible_rows or self.title)

    @property
    def visible_rows(self) -> Sequence[RowT]:
        """The rows in tables for people."""
        return (self.rows if self.shown is None else self.shown)[: self.top]

    @property
    def visible_columns(self) -> list[Column[RowT]]:
        """The columns in tables for people: those with a title and with a value in some row."""
        rows = self.visible_rows
        return [column for column in self.columns if column.title and rows and not column.is_empty(rows)]

    @property
    def notes(self) -> list[str]:
        """Lines below the table: how many rows are left out, and each remark once."""
        rows = self.visible_rows
        hidden = len(self.rows if self.shown is None else self.shown) - len(rows)
        more = [f"{format_count(hidden, 'more row')} (--top all shows all)"] if hidden else []
        return more + merge_remarks((text, self.label(row)) for row in rows for text in self.remarks(row))

    def make_records(self) -> list[dict[str, object]]:
        """Return all rows as CSV and JSON contain them."""
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

    - ``data``: what JSON contains besides the tables, such as the header and the summary of a log.
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

    def make_records_by_key(self) -> dict[str, list[dict[str, object]]]:
        """Return the records of all tables by key. Records with one key have equal columns: what one lacks is None."""
        found: dict[str, list[dict[str, object]]] = {}
        for block in self.blocks:
            if isinstance(block, Table):
                found.setdefault(block.key, []).extend(block.make_records())
        for records in found.values():
            names = dict.fromkeys(name for record in records for name in record)
            records[:] = [{name: record.get(name) for name in names} for record in records]
        return found


def make_columns_from_mappings(
    rows: Iterable[RowT],
    read: Callable[[RowT], Mapping[str, object]],
    importance: int = 0,
    *,
    titled: bool = True,
) -> list[Column[RowT]]:
    """Return a column for each name in the mappings that ``read`` returns for rows, in their order.

    ``titled``: whether people see them, under that name; csv and json have them under the name in snake_case. Texts are
    aligned to the left.
    """
    rows = list(rows)
    texts = {name for row in rows for name, value in read(row).items() if isinstance(value, str)}

    def reader(name: str) -> Callable[[RowT], object]:
        return lambda row: read(row).get(name)

    return [
        Column(
            convert_to_snake_case(name), name if titled else "", reader(name), importance=importance, left=name in texts
        )
        for name in dict.fromkeys(name for row in rows for name in read(row))
    ]


# -- columns that several reports have ---------------------------------------------------------------------------------


def make_interval_columns(
    read: Callable[[RowT], Interval | None], name: str, format: Callable[[Interval], str] = format_interval
) -> list[Column[RowT]]:
    """Return the interval for people, its ends for csv and json. ``name``: of an end, such as ``rate_{}_tflops``."""
    return [
        Column("", "interval", read, format, importance=4, left=True),
        Column(name.format("low"), "", lambda row: (it := read(row)) and it.low),
        Column(name.format("high"), "", lambda row: (it := read(row)) and it.high),
    ]


def make_clock_columns(read: Callable[[RowT], Conditions | None], importance: int) -> list[Column[RowT]]:
    """Return the share of the compute units' cycles that a row used, the clock that they had, and the clock that the
    driver requested. The last one is less important by two.
    """

    def of(name: str, factor: float = 1.0) -> Callable[[RowT], float | None]:
        def value(row: RowT) -> float | None:
            conditions = read(row)
            known = None if conditions is None else getattr(conditions, name)
            return None if known is None else factor * known

        return value

    return [
        Column("cycles_used", "% cycles", of("cycles_used"), format_percent, importance),
        Column("true_clock_mhz", "MHz", of("true_clock_hz", 1e-6), format_whole_number, importance),
        Column("clock_mhz", "MHz requested", of("clock_hz", 1e-6), format_whole_number, importance + 2),
    ]


def make_sensor_columns(read: Callable[[RowT], Conditions | None]) -> list[Column[RowT]]:
    """Clock and power while the samples of a row were taken."""
    return [
        *make_clock_columns(read, 5),
        Column("power_watts", "W", lambda row: (it := read(row)) and it.watts, format_whole_number, 6),
    ]


def make_rate_column(
    name: str, unit: str, read: Callable[[RowT], float | None], rows: Iterable[RowT], importance: int = 0
) -> Column[RowT]:
    """Rates in ``unit`` (TFLOPS, TB/s), which people read in the unit that fits the largest of them."""
    title, factor = choose_unit(unit, [rate for row in rows if (rate := read(row))])
    return Column(name, title, read, lambda rate: format_significant(rate * factor), importance)


def make_text_table(titles: Sequence[str], rows: Sequence[Sequence[str | None]]) -> Table[Any]:
    """Format a table for people; a dash stands for None."""
    return Table([Column("", title, itemgetter(place), left=True) for place, title in enumerate(titles)], rows)
