"""Compute the tables and single figures in README.md and docs/ from run logs.

tools/figures.py calls this module and writes the results into the pages. ``TABLES`` lists the functions that make a
table. Their argument is a list of words from the page: paths of logs, relative to the root of the repository, and
options of the form ``name=value``. Most tables show values as mamf's reports format them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import mamf
from mamf.ceilings.ceiling import compute_mamfu, compute_share_of_known_ceiling
from mamf.cli import main as mamf_command
from mamf.cli import run_command
from mamf.errors import MamfError
from mamf.logs.legacy import FinderRun
from mamf.logs.roofs import build_roofs_from_logs
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.report.document import MISSING_VALUE, format_four_digits, format_markdown_table
from mamf.report.rows import rank_rows_by_regime
from mamf.report.shares import ShareCalculator
from mamf.text import Markup

ROOT = Path(__file__).resolve().parents[1]
_COLUMN_HEADINGS = {
    "head_dims": "d",
    "cache_len": "cached tokens",
    "page_size": "page size",
    "timed": "kept by",
}
_FENCE = "```"
SIMULATED = "mamf.testing:SimulatedBackend"


class FigureError(Exception):
    """The error for a table or figure that cannot be computed. Its text is one line that says why."""


@functools.cache
def read_any_log(path: str) -> RunLog | FinderRun:
    """Return a log. Each log is read only once. ``path``: the path relative to the root of the repository."""
    try:
        log: RunLog | FinderRun = mamf.read_log(ROOT / path)
    except MamfError as error:
        raise FigureError(str(error)) from None
    return log


def read_log(path: str) -> RunLog:
    """Read a log of mamf. Raises FigureError for a log of mamf-finder, because it does not contain samples."""
    if isinstance(log := read_any_log(path), FinderRun):
        raise FigureError(f"{path} is a log of mamf-finder, which contains no samples: give a log of mamf")
    return log


def split_words(words: Iterable[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Split words into paths of logs and options. An option is ``name=value,value``. Returns its values by its name."""
    paths, options = [], {}
    for word in words:
        name, separator, values = word.partition("=")
        if separator:
            options[name] = values.split(",")
        else:
            paths.append(word)
    if not paths:
        raise FigureError("no log is given: add the path of at least one log")
    return paths, options


# -- rows and their cells ----------------------------------------------------------------------------------------------


def format_field(row: Measurement, name: str) -> str:
    """Return a field of a row's shape, of its problem or of the row as the text that a table shows."""
    if name == "page_size" and row.shape.page_size is None:
        return MISSING_VALUE
    for owner in (row.shape, row.problem, row):
        value = getattr(owner, name, None)
        if value is not None:
            break
    else:
        raise FigureError(f"rows of {row.operation} have no field {name!r}: name a field of the shape, problem or row")
    if name == "causal":
        return "causal" if value else "full"
    if name == "timed":
        return "matmul" if value == "products" else row.problem.other
    return str(value)


#: Texts that do not sort by alphabet, and their order.
_TEXT_ORDER = {"fwd": 0, "bwd": 1}


def make_sort_key(text: str) -> tuple[int, float, str]:
    """Return a sort key: numbers and sizes sort by value, fwd sorts before bwd, and other texts sort by alphabet."""
    match = re.match(r"\d+(?:\.\d+)?", text)
    scale = next((power for power, unit in enumerate(("KiB", "MiB", "GiB"), 1) if text.endswith(unit)), 0)
    return _TEXT_ORDER.get(text, -1), float(match[0]) * 1024.0**scale if match else 0.0, text


def select_rows(log: RunLog, filters: Mapping[str, Sequence[str]]) -> Iterator[Measurement]:
    """Yield the successfully measured rows whose fields match ``filters``, except reference rows.

    ``filters``: the accepted values of each field. Rows of a search are left out unless ``filters`` contains ``phase``.
    """
    for row in log.measurements:
        is_kept = row.ok and not row.is_reference and ("phase" in filters or not row.phase)
        if is_kept and all(format_field(row, name) in values for name, values in filters.items()):
            yield row


def format_percent(share: float | None, digits: int = 1) -> str:
    return MISSING_VALUE if share is None else f"{100 * share:.{digits}f} %"


def compute_share_of_ceiling(row: Measurement, log: RunLog) -> float | None:
    """Return MAMFU (share of the ceiling), or None without a ceiling.

    Use the matmul ceiling in the log if there is one, and otherwise the known ceiling that the log names.
    """
    share = compute_mamfu(row, log.matmul_ceilings)
    return compute_share_of_known_ceiling(row, log.known_ceilings) if share is None else share


def compute_kept_share(row: Measurement, log: RunLog) -> float:
    """Return the rate of a row of ``mamf overlap``, divided by the rate of the same work when it runs alone.

    Raises FigureError if the log has no rate of the work alone.
    """
    alone = replace(row.problem, alone=True)
    rows = (other for other in log.measurements if other.ok and (other.problem, other.shape) == (alone, row.shape))
    row_alone = next(rows, None)
    if row_alone is None:
        raise FigureError(
            f"{log.path.name} has no rate of {row.shape} alone: give a log that also measures the work alone"
        )
    return row.best_rate / row_alone.best_rate


#: Functions that format one value of a row, by the name of the value.
CELLS: Mapping[str, Callable[[Measurement, RunLog], str]] = {
    "rate": lambda row, log: format_four_digits(row.best_rate),
    "GB/s": lambda row, log: format_four_digits(1000 * row.best_rate),
    "share": lambda row, log: format_percent(compute_share_of_ceiling(row, log)),
    "kept": lambda row, log: format_percent(compute_kept_share(row, log)),
    "ms": lambda row, log: f"{1e3 * row.seconds:#.4g}",
    "cycles": lambda row, log: format_percent(row.conditions.used_cycle_share),
    "MBU": lambda row, log: format_percent(
        ShareCalculator(log.header, roofs=build_roofs_from_logs([log])).compute_row_mbu(row)
    ),
    "MHz": lambda row, log: f"{(row.conditions.true_clock_hz or 0) / 1e6:.0f} MHz",
    "quantization": lambda row, log: format_percent(float(row.details["quantization_error"])),
}


# -- single figures ----------------------------------------------------------------------------------------------------


def single_figure(path: str, expression: str) -> str:
    """Return one figure of a log. The expression is one of these:

    - ``rows`` or ``seconds``: the number of measured rows, or the duration of the run.
    - ``burst ceiling`` (or another regime): the ceiling in the log of a find.
    - ``burst best`` (or another regime): the best rate in the log of a sweep.
    - A name in ``CELLS`` and fields that select one row, as in ``rate shape=8192x8192x8192 regime=burst``. If
      ``phase=choose`` or another phase selects several rows of a search, the one with the best rate counts.
    - For a log of mamf-finder: ``seconds``, or the name of a statistic, such as ``fastest``.

    Raises FigureError if the log does not have the figure.
    """
    log = read_any_log(path)
    words = expression.split()
    try:
        if isinstance(log, FinderRun) and expression == "seconds":
            return f"{log.elapsed_seconds:.3g}"
        if isinstance(log, FinderRun):
            return format_four_digits(log.best[expression].tflops[expression])
        if expression in ("rows", "seconds"):
            summary = log.summary or {}
            return str(summary["measured"]) if expression == "rows" else f"{summary['elapsed_seconds']:.3g}"
        if words[1:2] == ["ceiling"]:
            return format_four_digits(log.ceilings[words[0]].rate)
        if words[1:] == ["best"]:
            return format_four_digits(rank_rows_by_regime(log.measurements)[words[0]][0].best_rate)
        format_cell = CELLS[words[0]]
    except KeyError as error:
        raise FigureError(f"{path} has no figure {expression!r}: it does not contain {error}") from None
    filters = {name: [value] for name, _, value in (word.partition("=") for word in words[1:])}
    rows = list(select_rows(log, filters))
    if not rows or (len(rows) > 1 and "phase" not in filters):
        raise FigureError(
            f"{path}: {len(rows)} rows match {expression!r}: change or add fields until exactly one row matches"
        )
    return format_cell(max(rows, key=lambda row: row.best_rate), log)


# -- tables of rows ----------------------------------------------------------------------------------------------------


def make_matrix_table(words: Sequence[str]) -> str:
    """Return a table of rows of run logs, arranged by their fields.

    - ``rows=``: the fields in the first columns. Each combination of their values gets a line.
    - ``columns=``: the field that gets a column for each of its values. ``log`` and ``card`` make a column for each log
      or for each card.
    - ``cell=``: the values in each cell, from ``CELLS``, with a slash between them (default: ``rate``).
    - ``best=row``: print the cell with the best rate of each line in bold.
    - Other options select rows by the values of a field, such as ``regime=burst``.

    If several logs have a value for a cell, the first log counts. If one log has several rows for a cell, the cell
    shows the values of the slowest and of the fastest row.
    """
    paths, options = split_words(words)
    if not {"rows", "columns"} <= options.keys():
        raise FigureError("rows= or columns= is missing: give both")
    row_names, (column_name,) = options.pop("rows"), options.pop("columns")
    cell_names, bold_options = options.pop("cell", ["rate"]), options.pop("best", [])
    cells_by_line: dict[tuple[str, ...], dict[str, list[tuple[Measurement, RunLog]]]] = {}
    cards: dict[str, str] = {}
    for number, path in enumerate(paths, 1):
        log = read_log(path)
        device = log.header["device"]
        card = cards.setdefault(device["uuid_hash"], f"{device['name'].split()[1]}, card {len(cards) + 1}")
        log_fields = {"log": str(number), "card": card}
        for row in select_rows(log, options):
            column = log_fields.get(column_name) or format_field(row, column_name)
            line = cells_by_line.setdefault(tuple(format_field(row, name) for name in row_names), {})
            cell = line.setdefault(column, [])
            if all(other_log is log for _, other_log in cell):
                cell.append((row, log))
    if not cells_by_line:
        raise FigureError(f"no row of these logs matches {options}: change these options, or give other logs")
    used_columns = {column for line in cells_by_line.values() for column in line}
    ordered_columns = options.get(column_name, sorted(used_columns, key=make_sort_key))
    columns = [column for column in ordered_columns if column in used_columns]
    lines = []
    for key in sorted(cells_by_line, key=lambda key: [make_sort_key(part) for part in key]):
        fastest = max((row.best_rate for cell in cells_by_line[key].values() for row, _ in cell), default=0.0)
        bold_rate = fastest if bold_options else None
        cells = [_format_cell(cells_by_line[key].get(column, ()), cell_names, bold_rate) for column in columns]
        lines.append([*key, *cells])
    headings = [_COLUMN_HEADINGS.get(name, name) for name in row_names]
    return format_markdown_table([*headings, *columns], lines, headings)


def _format_cell(
    rows_and_logs: Sequence[tuple[Measurement, RunLog]], names: Sequence[str], bold_rate: float | None
) -> str:
    """Return a cell with the values of its rows. ``bold_rate``: print the cell in bold if a row has this rate."""
    if not rows_and_logs:
        return MISSING_VALUE
    texts = []
    slowest_first = sorted(rows_and_logs, key=lambda row_and_log: row_and_log[0].best_rate)
    for name in names:
        values = [CELLS[name](*row_and_log) for row_and_log in slowest_first]
        texts.append(values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}")
    text = " / ".join(texts)
    return Markup(f"**{text}**") if bold_rate is not None and rows_and_logs[-1][0].best_rate == bold_rate else text


# -- tables of ceilings ------------------------------------------------------------------------------------------------


def describe_find(log: RunLog) -> str:
    """Return the dtype of a find, and whether its matmuls use fast accumulation."""
    problem = next(iter(log.ceilings.values())).problem
    fast = ", fast accumulation" if getattr(problem, "fast_accumulation", False) else ""
    return f"{problem.dtype}{fast}"


def make_winners_table(words: Sequence[str]) -> str:
    """Return a table with one line for each log of a find, and columns for burst and sustained.

    A line shows the kernels that the find tried, the ceilings, the fastest kernel, and how much faster that kernel is
    than the default kernel on the same shape.
    """
    lines = []
    for path in split_words(words)[0]:
        log = read_log(path)
        cells = [describe_find(log), ", ".join(log.plan.kernels)]
        for regime in ("burst", "sustained"):
            ceiling = log.ceilings[regime]
            gain = ceiling.gain_over_default
            cells += [
                format_four_digits(ceiling.rate),
                ceiling.kernel,
                MISSING_VALUE if gain is None else format_percent(gain, 1).replace("-0.0 %", "0.0 %"),
            ]
        lines.append(cells)
    headings = [
        "dtype",
        "kernels tried",
        *(column for regime in ("burst", "sustained") for column in (f"{regime} TFLOPS", "fastest kernel", "gain")),
    ]
    return format_markdown_table(headings, lines, {"dtype", "kernels tried", "fastest kernel"})


# -- runs of mamf-finder -----------------------------------------------------------------------------------------------


def make_finder_repeats_table(words: Sequence[str]) -> str:
    """Return a table that shows how repeatable mamf-finder and mamf are.

    The logs are several runs of mamf-finder and several sweeps over the same shapes on one card. For each program and
    each statistic (``figure=mean,fastest``), a line shows the best rate of every run, how much these best rates differ,
    and how much the rates of one shape differ between runs.
    """
    paths, options = split_words(words)
    groups: dict[tuple[str, str], list[tuple[Mapping[object, float], float]]] = {}
    for log in map(read_any_log, paths):
        for name in options["figure"]:
            if isinstance(log, FinderRun):
                tool, seconds = "mamf-finder", log.elapsed_seconds
                rates = {row.shape: row.tflops[name] for row in log.rows if name in row.tflops}
            else:
                tool, seconds = f"mamf, {log.measurements[0].regime}", (log.summary or {})["elapsed_seconds"]
                rates = {str(row.shape): row.compute_rate(name) for row in select_rows(log, {})}
            groups.setdefault((tool, name), []).append((rates, seconds or 0.0))
    lines = []
    for (tool, name), runs in groups.items():
        best_rates = [max(rates.values()) for rates, _ in runs]
        shape_spreads = [_compute_spread([rates[shape] for rates, _ in runs]) for shape in runs[0][0]]
        run_time = f"{statistics.median(seconds for _, seconds in runs):.0f} s"
        shown_spreads = [
            format_percent(spread, 1)
            for spread in (_compute_spread(best_rates), statistics.median(shape_spreads), max(shape_spreads))
        ]
        lines.append([tool, name, " ".join(map(format_four_digits, best_rates)), *shown_spreads, run_time])
    headings = ["program", "figure", "best TFLOPS of each run", "spread of the best", "median spread of a shape"]
    headings += ["largest spread of a shape", "run time"]
    return format_markdown_table(headings, lines, set(headings[:3]))


def _compute_spread(rates: Sequence[float]) -> float:
    """Return by which share the highest of the rates exceeds the lowest."""
    return max(rates) / min(rates) - 1


# -- output of commands ------------------------------------------------------------------------------------------------


class _Terminal(io.StringIO):
    """A text buffer that mamf takes for a terminal."""

    def isatty(self) -> bool:
        return True


def make_terminal_table(words: Sequence[str]) -> str:
    """Return the output of a mamf command on a terminal with 80 columns, as a code block.

    If ``lines=8`` or ``last=3`` is given, "..." replaces the middle of the output: ``lines=8`` keeps the first 8 lines
    (default: 1), and ``last=3`` keeps the last 3 lines (default: 0).
    """
    with mock.patch.dict(os.environ, COLUMNS="80", NO_COLOR="1"):
        return _run_mamf(words, _Terminal())


def make_mamf_table(words: Sequence[str]) -> str:
    """Return the output of a mamf command that does not print on a terminal, as a code block.

    ``lines=`` and ``last=`` shorten the output, as in ``make_terminal_table``.
    """
    return _run_mamf(words, io.StringIO())


def _run_mamf(words: Sequence[str], text: io.StringIO) -> str:
    """Run a mamf command that prints into ``text``. Return its output as a code block."""
    paths, options = split_words(words)
    with contextlib.redirect_stdout(text):
        mamf_command([str(ROOT / word) if (ROOT / word).is_file() else word for word in paths])
    output = text.getvalue().replace(f"{ROOT}/", "")
    if options:
        first, last = (int(options.get(name, ["0"])[0]) for name in ("lines", "last"))
        lines = output.splitlines(keepends=True)
        output = "".join([*lines[: first or 1], "...\n", *lines[len(lines) - last :]])
    if not output:
        raise FigureError(f"'mamf {' '.join(words)}' prints nothing: give a command that prints a report")
    return f"{_FENCE}\n{output}{_FENCE}\n"


def make_simulated_table(words: Sequence[str]) -> str:
    """Run a command on the simulated device. Return its report for a terminal with 80 columns, as a code block.

    Leave out the lines above the first blank line, because they name the torch version of this machine.
    """
    if SIMULATED not in words:
        raise FigureError(f"the command does not measure on the simulated device: add --backend {SIMULATED}")
    text = _Terminal()
    with (
        mock.patch.dict(os.environ, COLUMNS="80", NO_COLOR="1"),
        mock.patch("psutil.cpu_percent", lambda interval: 0.0),  # a busy host would add a warning to the report
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        run_command([*words, "--output", f"{folder}/run.jsonl"])
    report = text.getvalue().partition("\n\n")[2].partition("\nlog: ")[0]
    return f"{_FENCE}\n{report}\n{_FENCE}\n"


TABLES: Mapping[str, Callable[[Sequence[str]], str]] = {
    "matrix": make_matrix_table,
    "winners": make_winners_table,
    "finder-repeats": make_finder_repeats_table,
    "mamf": make_mamf_table,
    "terminal": make_terminal_table,
    "simulated": make_simulated_table,
}


def make_table(description: str) -> str:
    """Return a table in markdown. ``description``: the name of the table in ``TABLES``, and the words to pass to it."""
    name, *words = shlex.split(description)
    if name not in TABLES:
        raise FigureError(f"unknown table {name!r}: use one of {', '.join(TABLES)}")
    try:
        return TABLES[name](words)
    except FigureError as error:
        raise FigureError(f"table '{name}': {error}") from None
