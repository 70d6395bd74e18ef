"""Represent reports as data (columns, tables, documents), and format the numbers and lines in them.

``mamf.report.formats`` turns a document into text. Names from logs and plugins may contain control characters, so
tables and lines escape them (``mamf.text``).
"""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mamf.backend import format_sharing_warning
from mamf.kernel import Work
from mamf.machine.environment import list_logged_warnings
from mamf.measurement import Conditions, group_pairs
from mamf.statistics import Interval
from mamf.text import convert_to_csv_cell, escape_invisible_characters, escape_markdown

if TYPE_CHECKING:
    from mamf.logs.run_log import RunLog

#: Text of a table cell without a value.
MISSING_VALUE = "-"
#: Text that reports show in place of an interval that is wider than +-50 %.
UNKNOWN_INTERVAL = "unknown"
#: An interval is unknown if its half-width is above this share of the figure.
MAX_KNOWN_HALF_WIDTH = 0.5
UNKNOWN_INTERVAL_REASON = "the interval is unknown, because the rate of another run may differ by more than 50 %"
#: Blanks between two columns on a terminal.
COLUMN_GAP = "  "


def format_four_digits(value: float) -> str:
    """Format a number with four significant digits and without an exponent: 0.1336, 841.3."""
    return f"{value:#.4g}".rstrip(".") if value < 9999.5 else f"{value:.0f}"


#: Prefixes of units, with the factor that converts a value from the prefix T: 1 TB/s is 1e3 GB/s.
_PREFIX_FACTORS = {"T": 1.0, "G": 1e3, "M": 1e6, "k": 1e9}
#: Smallest number that reports show in a unit with a prefix, such as TB/s, and in TFLOPS. For smaller numbers they use
#: the next smaller prefix: 0.05 TB/s becomes 50 GB/s.
_MIN_PREFIXED_VALUE, _MIN_PREFIXED_FLOPS = 0.1, 0.01


def choose_unit(unit: str, values: Iterable[float]) -> tuple[str, float]:
    """Choose a unit in which the largest of ``values`` is easy to read. Return this unit, and the factor that converts
    the values to it. ``unit``: the unit of ``values``, such as TFLOPS or TB/s.
    """
    largest = max(values, default=0.0) or 1.0
    if not unit.startswith("T"):
        return unit, 1.0
    least = _MIN_PREFIXED_FLOPS if unit == "TFLOPS" else _MIN_PREFIXED_VALUE
    prefix, factor = next((each for each in _PREFIX_FACTORS.items() if largest * each[1] >= least), ("k", 1e9))
    return prefix + unit[1:], factor


def format_rate(rate: float, unit: str) -> str:
    """Format a rate in a unit that is easy to read: ``841.3 TFLOPS``, ``78.70 MB/s`` (from 0.0000787 TB/s)."""
    name, factor = choose_unit(unit, [rate])
    return f"{format_four_digits(rate * factor)} {name}"


def describe_counted_work(works: Iterable[Work]) -> str:
    """Return a line that explains how the FLOP and bytes of ``works`` are counted, without repeating an explanation:
    ``counted: 2*M*N*K; A and B read, C written, once each``.
    """
    return "counted: " + "; ".join(
        dict.fromkeys(part for work in works for part in work.counting_convention.split("; "))
    )


def make_rate_key(name: str, unit: str) -> str:
    """Return the key of a rate in CSV and JSON, which is ``name`` with the unit: ``rate_tflops``, ``rate_tb_per_s``."""
    return f"{name}_{convert_to_snake_case(unit)}"


def format_any_value(value: object) -> str:
    """Format a value of any type. Text is returned unchanged; floats get four significant digits and no exponent."""
    if not isinstance(value, float):
        return value if isinstance(value, str) else str(value)
    return f"{value:.4g}" if abs(value) < 9999.5 else f"{value:.0f}"


def format_percent(share: float) -> str:
    """Format a share in percent with one decimal and without a percent sign: 81.3."""
    return f"{100 * share:.1f}"


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1: ``1 row``, ``2 rows``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shorten_line(text: str) -> str:
    """Join the lines of a text into one line of at most 150 characters, and escape invisible characters."""
    return textwrap.shorten(escape_invisible_characters(text), 150, placeholder=" ...")


def split_shared_parts(titles: Sequence[str]) -> tuple[list[str], str]:
    """Split titles at their commas into parts. Return each title without the parts that all titles share, and a string
    with the shared parts.
    """
    parts = [title.split(", ") for title in titles]
    shared = [part for part in parts[0] if all(part in each for each in parts)] if parts else []
    return [", ".join(part for part in each if part not in shared) for each in parts], ", ".join(shared)


def convert_to_snake_case(title: str) -> str:
    """Convert the heading of a column to its key in CSV and JSON: ``FLOP/byte`` becomes ``flop_per_byte``."""
    return re.sub(r"\W+", "_", title.replace("/", " per ").replace("%", " percent ").lower()).strip("_")


def format_interval(interval: Interval, factor: float = 1.0) -> str:
    """Format an interval, with both ends multiplied by ``factor``; return ``unknown`` if an end is more than 50 % away
    from the middle.
    """
    low, high = format_four_digits(interval.low * factor), format_four_digits(interval.high * factor)
    return f"{low} to {high}" if interval.is_known else UNKNOWN_INTERVAL


def format_half_width(share: float) -> str:
    """Format a half-width as a percentage of its figure, without a percent sign; return ``unknown`` for an unknown
    interval.
    """
    return format_percent(share) if share <= MAX_KNOWN_HALF_WIDTH else UNKNOWN_INTERVAL


def format_whole_number(value: float | None) -> str:
    return MISSING_VALUE if value is None else f"{value:.0f}"


def align_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left_aligned: Collection[str]) -> str:
    """Return the lines of a table with aligned columns for a terminal. ``left_aligned``: the headings of the columns
    that are aligned to the left.
    """
    lines = [[escape_invisible_characters(cell) for cell in line] for line in (columns, *rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    align = [str.ljust if name in left_aligned else str.rjust for name in columns]
    padded = ([pad(cell, width) for pad, cell, width in zip(align, line, widths, strict=True)] for line in lines)
    return "".join(f"{COLUMN_GAP.join(cells).rstrip()}\n" for cells in padded)


def merge_remarks(remarks: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each distinct remark: the labels of the rows with this remark (of more than three, the
    first label and the number of the others), and the remark.

    ``remarks``: pairs of a remark and the label of its row.
    """
    labels = group_pairs(remark for remark in remarks if remark[0])
    return [
        f"{'; '.join(rows) if len(rows) <= 3 else f'{rows[0]} and {len(rows) - 1} more'}: {text}"
        for text, rows in labels.items()
    ]


def format_markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left_aligned: Collection[str]) -> str:
    """Return a table in GitHub markdown. All cells are escaped, except those that are Markup already."""
    rule = [":--" if name in left_aligned else "--:" for name in columns]
    heads, *cells = [[" ".join(escape_markdown(cell).split()) for cell in line] for line in (columns, *rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (heads, rule, *cells))


def label_kernel(name: str, header: Mapping[str, Any]) -> str:
    """Return the name of a kernel for tables. Append "(by path)" if the user named the kernel by its path,
    ``package.module:Class``.
    """
    planned = _get_requested_kernels(header)
    is_by_path = any(":" in each for each in planned) and {name, name.partition("[")[0]}.isdisjoint(planned)
    return f"{name} (by path)" if is_by_path else name


def _get_requested_kernels(header: Mapping[str, Any]) -> Sequence[str]:
    # Users name kernels by registered name or by path (package.module:Class). Headers store these names unchanged.
    return header.get("plan", {}).get("kernels") or [header.get("kernel", "")]


def describe_machine(header: Mapping[str, Any]) -> str:
    """Return a line that names the device, software and timer of a run, and the kernels that the user named by path."""
    device = header["device"]
    known = [
        format_count(device["compute_units"], "compute unit") if device.get("compute_units") else "",
        f"{device['power_limit_watts']:.0f} W limit" if device.get("power_limit_watts") else "",
        f"driver {device['driver']}" if device.get("driver") else "",
        f"torch {header['environment']['packages'].get('torch', 'unknown')}",
        f"timed by {header['timer']}",
    ]
    machine = f"{device['name']} ({device['backend']}:{device['index']}), {', '.join(filter(None, known))}"
    by_path = (f"kernel by path: {name}" for name in _get_requested_kernels(header) if ":" in name)
    return "; ".join(filter(None, [machine, format_sharing_warning(device["name"]), *by_path]))


def describe_run_end(summary: Mapping[str, Any] | None, has_count: bool = True, left_noun: str = "measurement") -> str:
    """Describe how a run ended: its status and reason, its duration, and how much is left to measure.

    - ``has_count``: whether to add the number of measured rows.
    - ``left_noun``: the name of one item that is left to measure, such as ``ceiling``; empty if --resume cannot
      continue the run.
    """
    if summary is None:
        return "the log has no summary: the run is still running, or was killed (then continue it with --resume)"
    end = f"{summary['status']}: {summary['reason']}" if summary["reason"] else summary["status"]
    count_left = left_noun and summary.get("left")
    more_time = " and a longer --budget" if summary["reason"].startswith("the budget ended") else ""
    left = f"; {format_count(count_left, left_noun)} left: continue with --resume{more_time}" if count_left else ""
    count, earlier_count = summary["measured"], summary.get("measured_before_resume")
    seconds, total = f"{summary['elapsed_seconds']:.1f} s", ""
    if earlier_count is not None:
        seconds, total = f"{seconds} since the run continued", f", {count} in total"
        count -= earlier_count
    measured = f"; {format_count(count, 'measurement')} in {seconds}{total}" if has_count else f" in {seconds}"
    return f"{end}{measured}{left}"


def format_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows that have the same keys as CSV, with the keys in the first line. Return an empty string if there are
    no rows.
    """
    text = io.StringIO()
    if rows:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(map(convert_to_csv_cell, rows[0]))
        writer.writerows([convert_to_csv_cell(row.get(name)) for name in rows[0]] for row in rows)
    return text.getvalue()


RowT = TypeVar("RowT")


@dataclass(frozen=True)
class Column(Generic[RowT]):
    """A column of a table: it reads one value from each row and formats it.

    - ``name``: the key in CSV and JSON, in snake_case with the unit (``rate_tflops``); empty if only tables for people
      have the column.
    - ``title``: the heading in tables for people; empty if only CSV and JSON have the column.
    - ``read_value``: returns the value of a row with full precision, or None.
    - ``format_value``: turns a value other than None into text for people.
    - ``drop_priority``: a narrow terminal drops the columns with the highest priority first, and never those with 0.
    - ``is_left_aligned``: whether the cells are aligned to the left.
    - ``min_characters``: the length to which a narrow terminal may cut long texts before it drops columns; 0 to never
      cut.
    """

    name: str
    title: str
    read_value: Callable[[RowT], object]
    format_value: Callable[[Any], str] = format_any_value
    drop_priority: int = 0
    is_left_aligned: bool = False
    min_characters: int = 0

    def format_cell(self, row: RowT) -> str:
        value = self.read_value(row)
        return MISSING_VALUE if value is None else self.format_value(value)

    def is_empty(self, rows: Iterable[RowT]) -> bool:
        """Return whether all rows have no value, or an empty string, in this column."""
        return all(self.read_value(row) in (None, "") for row in rows)


@dataclass(frozen=True)
class Table(Generic[RowT]):
    """A table of a report: rows that share the same columns.

    - ``rows``: all rows, for CSV and JSON.
    - ``title``: the heading for people.
    - ``key``: the key in JSON. Tables with the same key become one list in JSON and one table in CSV.
    - ``shown_rows``: the rows for people, best first; None for all rows.
    - ``max_shown_rows``: the maximum number of rows for people; None for no maximum.
    - ``get_remarks``: returns remarks about a row for the notes below the table. The notes contain a remark only once,
      even if several rows have it.
    - ``get_label``: returns the name of a row, which the notes use.
    """

    columns: Sequence[Column[RowT]]
    rows: Sequence[RowT]
    title: str = ""
    key: str = "rows"
    shown_rows: Sequence[RowT] | None = None
    max_shown_rows: int | None = None
    get_remarks: Callable[[RowT], Iterable[str]] = lambda row: ()
    get_label: Callable[[RowT], str] = str

    @property
    def is_hidden(self) -> bool:
        """Whether reports for people omit this table, because no column has a title, or because the table has neither a
        title nor rows for people.
        """
        return not any(column.title for column in self.columns) or not (self.visible_rows or self.title)

    @property
    def visible_rows(self) -> Sequence[RowT]:
        """The rows that people see: at most ``max_shown_rows`` of ``shown_rows``."""
        return (self.rows if self.shown_rows is None else self.shown_rows)[: self.max_shown_rows]

    @property
    def visible_columns(self) -> list[Column[RowT]]:
        """The columns that people see: those with a title and a value in at least one visible row."""
        rows = self.visible_rows
        return [column for column in self.columns if column.title and rows and not column.is_empty(rows)]

    @property
    def notes(self) -> list[str]:
        """The lines below the table: how many rows it leaves out, and the remarks about rows, each remark once."""
        rows = self.visible_rows
        hidden = len(self.rows if self.shown_rows is None else self.shown_rows) - len(rows)
        more = [f"{format_count(hidden, 'more row')} (--top all shows all)"] if hidden else []
        return more + merge_remarks((text, self.get_label(row)) for row in rows for text in self.get_remarks(row))

    def make_records(self) -> list[dict[str, object]]:
        """Return each row as a mapping from column names to values, for CSV and JSON."""
        return [{column.name: column.read_value(row) for column in self.columns if column.name} for row in self.rows]


@dataclass(frozen=True)
class Lines:
    """A block of text lines in a report, below ``heading`` if the heading is not empty."""

    texts: Sequence[str]
    heading: str = ""


@dataclass(frozen=True)
class Details(Lines):
    """A block of lines that a terminal shows only with ``--wide``."""


@dataclass(frozen=True)
class Answer(Lines):
    """A block of lines that answer the question of the command: the best kernel, the ceiling or the verdict. It is the
    last block of a report.
    """


Block = Lines | Table[Any]


@dataclass(frozen=True)
class Document:
    """A report: blocks of lines and tables in the order in which people read them.

    - ``title``: the title of the HTML page.
    - ``json_data``: what JSON contains besides the tables, such as the header and the summary of a log.
    - ``main_table_key``: the key of the tables that CSV contains; if empty, the key of the first table.
    """

    title: str
    blocks: Sequence[Block]
    json_data: Mapping[str, Any] = field(default_factory=dict)
    main_table_key: str = ""

    @property
    def visible_blocks(self) -> list[Block]:
        """The blocks that people see: tables with visible columns and rows, and lines that are not empty."""
        return [each for each in self.blocks if (not each.is_hidden if isinstance(each, Table) else each.texts)]

    def make_records_by_key(self) -> dict[str, list[dict[str, object]]]:
        """Return the rows of all tables as records (mappings from column names to values), by the key of the table. All
        records with the same key get the same columns, with None for a missing value.
        """
        records_by_key: dict[str, list[dict[str, object]]] = {}
        for block in self.blocks:
            if isinstance(block, Table):
                records_by_key.setdefault(block.key, []).extend(block.make_records())
        for records in records_by_key.values():
            names = dict.fromkeys(name for record in records for name in record)
            records[:] = [{name: record.get(name) for name in names} for record in records]
        return records_by_key


def add_logged_warnings(document: Document, log: RunLog) -> Document:
    """Take the warnings about the machine from a log, and insert them before the last block of the log's report."""
    return replace(document, blocks=[*document.blocks[:-1], Lines(list_warnings(log)), *document.blocks[-1:]])


def list_warnings(log: RunLog) -> list[str]:
    """List the warnings about the machine that a log records. If several devices shared the run, list those of all
    their logs.
    """
    headers = [part.header for part in log.part_logs] or [log.header]
    return list(dict.fromkeys(text for header in headers for text in list_logged_warnings(header)))


def make_columns_from_mappings(
    rows: Iterable[RowT],
    read_mapping: Callable[[RowT], Mapping[str, object]],
    drop_priority: int = 0,
    *,
    has_titles: bool = True,
) -> list[Column[RowT]]:
    """Return a column for each key of the mappings that ``read_mapping`` returns for the rows, in order of appearance.
    Align columns that contain text to the left. If a key is "TB/s", tables for people convert the values to a unit in
    which they are easy to read, such as GB/s.

    ``has_titles``: whether people see the columns, with the keys as titles. CSV and JSON contain all columns, with the
    keys in snake_case.
    """
    rows = list(rows)
    text_names = {name for row in rows for name, value in read_mapping(row).items() if isinstance(value, str)}

    def make_column(name: str) -> Column[RowT]:
        rates = [rate for row in rows if isinstance(rate := read_mapping(row).get(name), float)]
        title, factor = choose_unit(name, rates) if name == "TB/s" else (name, None)
        return Column(
            convert_to_snake_case(name),
            title if has_titles else "",
            lambda row: read_mapping(row).get(name),
            format_any_value if factor is None else lambda rate: format_four_digits(rate * factor),
            drop_priority,
            name in text_names,
        )

    return [make_column(name) for name in dict.fromkeys(name for row in rows for name in read_mapping(row))]


# -- columns that several reports share --------------------------------------------------------------------------------


def make_interval_columns(
    read_interval: Callable[[RowT], Interval | None],
    name: str,
    format_value: Callable[[Interval], str] = format_interval,
    read_shown_interval: Callable[[RowT], Interval | None] | None = None,
) -> list[Column[RowT]]:
    """Return a column that shows an interval to people, and two columns with its lower and upper end for CSV and JSON.

    If the text for people is ``unknown``, both ends are None.

    ``name``: the key of each end, with ``{}`` in place of "low" or "high": ``rate_{}_tflops``.
    ``read_shown_interval``: returns the interval for people, if its unit differs from that for CSV and JSON.
    """

    def read_end(row: RowT, index: int) -> float | None:
        interval = read_interval(row)
        is_known = interval is not None and format_value(interval) != UNKNOWN_INTERVAL
        return (interval.low, interval.high)[index] if interval is not None and is_known else None

    return [
        Column(
            "", "interval", read_shown_interval or read_interval, format_value, drop_priority=4, is_left_aligned=True
        ),
        Column(name.format("low"), "", partial(read_end, index=0)),
        Column(name.format("high"), "", partial(read_end, index=1)),
    ]


def make_clock_columns(read_conditions: Callable[[RowT], Conditions | None], drop_priority: int) -> list[Column[RowT]]:
    """Return columns for the share of the compute units' cycles that a kernel used, the measured clock, and the clock
    that the driver requested. If the terminal is too narrow, tables drop the column of the requested clock first.
    """

    def read_megahertz(row: RowT, name: str) -> float | None:
        hertz = getattr(read_conditions(row), name, None)
        return None if hertz is None else 1e-6 * hertz

    true_clock, clock = (partial(read_megahertz, name=name) for name in ("true_clock_hz", "clock_hz"))
    return [
        Column(
            "cycles_used",
            "% cycles",
            lambda row: getattr(read_conditions(row), "used_cycle_share", None),
            format_percent,
            drop_priority,
        ),
        Column("true_clock_mhz", "MHz", true_clock, format_whole_number, drop_priority),
        Column("clock_mhz", "MHz requested", clock, format_whole_number, drop_priority + 2),
    ]


def make_sensor_columns(read_conditions: Callable[[RowT], Conditions | None]) -> list[Column[RowT]]:
    """Return columns for the clock and the power of the device during the samples of a row."""
    return [
        *make_clock_columns(read_conditions, 5),
        Column("power_watts", "W", lambda row: (it := read_conditions(row)) and it.watts, format_whole_number, 6),
    ]


def make_rate_column(
    name: str, unit: str, read_rate: Callable[[RowT], float | None], rows: Iterable[RowT], drop_priority: int = 0
) -> Column[RowT]:
    """Return a column of rates. CSV and JSON contain the rates in ``unit`` (TFLOPS or TB/s). Printed tables show them
    with a prefix (GFLOPS, PFLOPS) that suits the largest rate of ``rows``.
    """
    title, factor = choose_unit(unit, [rate for row in rows if (rate := read_rate(row))])
    return Column(name, title, read_rate, lambda rate: format_four_digits(rate * factor), drop_priority)


def make_text_table(titles: Sequence[str], rows: Sequence[Sequence[str | None]]) -> Table[Any]:
    """Return a table of text cells for people; CSV and JSON leave it out. None becomes a dash."""
    return Table(
        [Column("", title, itemgetter(place), is_left_aligned=True) for place, title in enumerate(titles)], rows
    )
