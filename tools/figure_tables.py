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
_HEADS = {
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
def read_any(path: str) -> RunLog | FinderRun:
    """Return a log. Each log is read only once. ``path``: the path relative to the root of the repository."""
    try:
        log: RunLog | FinderRun = mamf.read_log(ROOT / path)
    except MamfError as error:
        raise FigureError(str(error)) from None
    return log


def read(path: str) -> RunLog:
    """Read a log of mamf. Raises FigureError for a log of mamf-finder, because it does not contain samples."""
    if isinstance(log := read_any(path), FinderRun):
        raise FigureError(f"{path} is a log of mamf-finder, which holds no samples")
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
        raise FigureError("no log is named")
    return paths, options


# -- rows and their cells ----------------------------------------------------------------------------------------------


def field(row: Measurement, name: str) -> str:
    """Return a field of a row's shape, of its problem or of the row as the text that a table shows."""
    if name == "page_size" and row.shape.page_size is None:
        return MISSING_VALUE
    for holder in (row.shape, row.problem, row):
        value = getattr(holder, name, None)
        if value is not None and not isinstance(value, re.Pattern):  # not the regular expression of a shape class
            break
    else:
        raise FigureError(f"a row of {row.operation} has no field {name!r}")
    if name == "causal":
        return "causal" if value else "full"
    if name == "timed":
        return "matmul" if value == "products" else row.problem.other
    return str(value)


#: Texts that do not sort by alphabet, and their order.
_ORDER = {"fwd": 0, "bwd": 1}


def natural(text: str) -> tuple[int, float, str]:
    """Return a sort key: numbers and sizes sort by value, fwd sorts before bwd, and other texts sort by alphabet."""
    found = re.match(r"\d+(?:\.\d+)?", text)
    scale = next((power for power, unit in enumerate(("KiB", "MiB", "GiB"), 1) if text.endswith(unit)), 0)
    return _ORDER.get(text, -1), float(found[0]) * 1024.0**scale if found else 0.0, text


def rows_of(log: RunLog, filters: Mapping[str, Sequence[str]]) -> Iterator[Measurement]:
    """Yield the successfully measured rows whose fields match ``filters``, except reference rows.

    ``filters``: the accepted values of each field. Rows of a search are left out unless ``filters`` contains ``phase``.
    """
    for row in log.measurements:
        is_kept = row.ok and not row.is_reference and ("phase" in filters or not row.phase)
        if is_kept and all(field(row, name) in values for name, values in filters.items()):
            yield row


def percent(share: float | None, digits: int = 1) -> str:
    return MISSING_VALUE if share is None else f"{100 * share:.{digits}f} %"


def share_of_ceiling(row: Measurement, log: RunLog) -> float | None:
    """Return MAMFU (share of the ceiling), or None without a ceiling.

    Use the matmul ceiling in the log if there is one, and otherwise the known ceiling that the log names.
    """
    share = compute_mamfu(row, log.matmul_ceilings)
    return compute_share_of_known_ceiling(row, log.known_ceilings) if share is None else share


def share_kept(row: Measurement, log: RunLog) -> float:
    """Return the rate of a row of ``mamf overlap``, divided by the rate of the same work when it runs alone."""
    problem = replace(row.problem, alone=True)
    return row.best_rate / next(
        each.best_rate for each in log.measurements if (each.problem, each.shape) == (problem, row.shape)
    )


#: Functions that format one value of a row, by the name of the value.
CELLS: Mapping[str, Callable[[Measurement, RunLog], str]] = {
    "rate": lambda row, log: format_four_digits(row.best_rate),
    "GB/s": lambda row, log: format_four_digits(1000 * row.best_rate),
    "share": lambda row, log: percent(share_of_ceiling(row, log)),
    "kept": lambda row, log: percent(share_kept(row, log)),
    "ms": lambda row, log: f"{1e3 * row.seconds:#.4g}",
    "cycles": lambda row, log: percent(row.conditions.used_cycle_share),
    "MBU": lambda row, log: percent(
        ShareCalculator(log.header, roofs=build_roofs_from_logs([log])).compute_row_mbu(row)
    ),
    "MHz": lambda row, log: f"{(row.conditions.true_clock_hz or 0) / 1e6:.0f} MHz",
    "quantization": lambda row, log: percent(float(row.details["quantization_error"])),
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
    log = read_any(path)
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
        show = CELLS[words[0]]
    except KeyError as error:
        raise FigureError(f"{path} has no {expression!r}: {error} is unknown") from None
    filters = {name: [value] for name, _, value in (word.partition("=") for word in words[1:])}
    rows = list(rows_of(log, filters))
    if not rows or (len(rows) > 1 and "phase" not in filters):
        raise FigureError(f"{path}: {len(rows)} rows match {expression!r}, not one")
    return show(max(rows, key=lambda row: row.best_rate), log)


# -- tables of rows ----------------------------------------------------------------------------------------------------


def matrix_table(words: Sequence[str]) -> str:
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
        raise FigureError("it needs rows= and columns=")
    row_names, (column_name,) = options.pop("rows"), options.pop("columns")
    cell_names, best = options.pop("cell", ["rate"]), options.pop("best", [])
    found: dict[tuple[str, ...], dict[str, list[tuple[Measurement, RunLog]]]] = {}
    cards: dict[str, str] = {}
    for number, path in enumerate(paths, 1):
        log = read(path)
        device = log.header["device"]
        card = cards.setdefault(device["uuid_hash"], f"{device['name'].split()[1]}, card {len(cards) + 1}")
        of_log = {"log": str(number), "card": card}
        for row in rows_of(log, options):
            column = of_log.get(column_name) or field(row, column_name)
            cell = found.setdefault(tuple(field(row, name) for name in row_names), {}).setdefault(column, [])
            if all(other is log for _, other in cell):
                cell.append((row, log))
    if not found:
        raise FigureError(f"no row of these logs is asked for by {options}")
    seen = {column for line in found.values() for column in line}
    columns = [each for each in options.get(column_name, sorted(seen, key=natural)) if each in seen]
    lines = []
    for key in sorted(found, key=lambda key: [natural(part) for part in key]):
        fastest = max((row.best_rate for cell in found[key].values() for row, _ in cell), default=0.0)
        cells = [_cell(found[key].get(column, ()), cell_names, fastest if best else None) for column in columns]
        lines.append([*key, *cells])
    heads = [_HEADS.get(name, name) for name in row_names]
    return format_markdown_table([*heads, *columns], lines, heads)


def _cell(held: Sequence[tuple[Measurement, RunLog]], names: Sequence[str], fastest: float | None) -> str:
    if not held:
        return MISSING_VALUE
    texts = []
    for name in names:
        shown = [CELLS[name](*each) for each in sorted(held, key=lambda each: each[0].best_rate)]
        texts.append(shown[0] if shown[0] == shown[-1] else f"{shown[0]} to {shown[-1]}")
    text = " / ".join(texts)
    return Markup(f"**{text}**") if fastest is not None and held[-1][0].best_rate == fastest else text


# -- tables of ceilings ------------------------------------------------------------------------------------------------


def label(log: RunLog) -> str:
    """Return the dtype of a find, and whether its matmuls use fast accumulation."""
    problem = next(iter(log.ceilings.values())).problem
    fast = ", fast accumulation" if getattr(problem, "fast_accumulation", False) else ""
    return f"{problem.dtype}{fast}"


def winners_table(words: Sequence[str]) -> str:
    """Return a table with one line for each log of a find, and columns for burst and sustained.

    A line shows the kernels that the find tried, the ceilings, the fastest kernel, and how much faster that kernel is
    than the default kernel on the same shape.
    """
    lines = []
    for path in split_words(words)[0]:
        log = read(path)
        cells = [label(log), ", ".join(log.plan.kernels)]
        for regime in ("burst", "sustained"):
            ceiling = log.ceilings[regime]
            gain = ceiling.gain_over_default
            cells += [
                format_four_digits(ceiling.rate),
                ceiling.kernel,
                MISSING_VALUE if gain is None else percent(gain, 1).replace("-0.0 %", "0.0 %"),
            ]
        lines.append(cells)
    heads = [
        "dtype",
        "kernels tried",
        *(column for regime in ("burst", "sustained") for column in (f"{regime} TFLOPS", "fastest kernel", "gain")),
    ]
    return format_markdown_table(heads, lines, {"dtype", "kernels tried", "fastest kernel"})


# -- runs of mamf-finder -----------------------------------------------------------------------------------------------


def finder_repeats_table(words: Sequence[str]) -> str:
    """Return a table that shows how repeatable mamf-finder and mamf are.

    The logs are several runs of mamf-finder and several sweeps over the same shapes on one card. For each program and
    each statistic (``figure=mean,fastest``), a line shows the best rate of every run, how much these best rates differ,
    and how much the rates of one shape differ between runs.
    """
    paths, options = split_words(words)
    groups: dict[tuple[str, str], list[tuple[Mapping[object, float], float]]] = {}
    for log in map(read_any, paths):
        for name in options["figure"]:
            if isinstance(log, FinderRun):
                tool, seconds = "mamf-finder", log.elapsed_seconds
                rates = {row.shape: row.tflops[name] for row in log.rows if name in row.tflops}
            else:
                tool, seconds = f"mamf, {log.measurements[0].regime}", (log.summary or {})["elapsed_seconds"]
                rates = {str(row.shape): row.compute_rate(name) for row in rows_of(log, {})}
            groups.setdefault((tool, name), []).append((rates, seconds or 0.0))
    lines = []
    for (tool, name), runs in groups.items():
        bests_of_runs = [max(rates.values()) for rates, _ in runs]
        apart = [_apart([rates[shape] for rates, _ in runs]) for shape in runs[0][0]]
        took = f"{statistics.median(seconds for _, seconds in runs):.0f} s"
        spreads = [percent(each, 1) for each in (_apart(bests_of_runs), statistics.median(apart), max(apart))]
        lines.append([tool, name, " ".join(map(format_four_digits, bests_of_runs)), *spreads, took])
    heads = ["program", "figure", "best TFLOPS of each run", "spread of the best", "median spread of a shape"]
    heads += ["largest spread of a shape", "run time"]
    return format_markdown_table(heads, lines, set(heads[:3]))


def _apart(rates: Sequence[float]) -> float:
    """Return by which share the highest of the rates exceeds the lowest."""
    return max(rates) / min(rates) - 1


# -- output of commands ------------------------------------------------------------------------------------------------


class _Terminal(io.StringIO):
    """A text buffer that mamf takes for a terminal."""

    def isatty(self) -> bool:
        return True


def terminal_table(words: Sequence[str]) -> str:
    """Return the output of a mamf command on a terminal with 80 columns, as a code block.

    If ``lines=8`` or ``last=3`` is given, "..." replaces the middle of the output: ``lines=8`` keeps the first 8 lines
    (default: 1), and ``last=3`` keeps the last 3 lines (default: 0).
    """
    with mock.patch.dict(os.environ, COLUMNS="80", NO_COLOR="1"):
        return _output(words, _Terminal())


def mamf_table(words: Sequence[str]) -> str:
    """Return the output of a mamf command that does not print on a terminal, as a code block.

    ``lines=`` and ``last=`` shorten the output, as in ``terminal_table``.
    """
    return _output(words, io.StringIO())


def _output(words: Sequence[str], text: io.StringIO) -> str:
    """Run a mamf command that prints into ``text``. Return its output as a code block."""
    paths, options = split_words(words)
    with contextlib.redirect_stdout(text):
        mamf_command([str(ROOT / word) if (ROOT / word).is_file() else word for word in paths])
    shown = text.getvalue().replace(f"{ROOT}/", "")
    if options:
        first, last = (int(options.get(name, ["0"])[0]) for name in ("lines", "last"))
        lines = shown.splitlines(keepends=True)
        shown = "".join([*lines[: first or 1], "...\n", *lines[len(lines) - last :]])
    if not shown:
        raise FigureError(f"'mamf {' '.join(words)}' prints nothing")
    return f"{_FENCE}\n{shown}{_FENCE}\n"


def simulated_table(words: Sequence[str]) -> str:
    """Run a command on the simulated device. Return its report for a terminal with 80 columns, as a code block.

    Leave out the lines above the first blank line, because they name the torch version of this machine.
    """
    if SIMULATED not in words:
        raise FigureError(f"the command does not measure on {SIMULATED}")
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
    "matrix": matrix_table,
    "winners": winners_table,
    "finder-repeats": finder_repeats_table,
    "mamf": mamf_table,
    "terminal": terminal_table,
    "simulated": simulated_table,
}


def table(what: str) -> str:
    """Return a table in markdown. ``what``: the name of the table in ``TABLES``, and the words to pass to it."""
    name, *words = shlex.split(what)
    if name not in TABLES:
        raise FigureError(f"no table is called {name!r}; there are {', '.join(TABLES)}")
    try:
        return TABLES[name](words)
    except FigureError as error:
        raise FigureError(f"table '{name}': {error}") from None
