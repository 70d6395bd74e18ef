"""The tables of figures that README.md and docs/ show, computed from run logs by the library's own reports.

A table is a function of the words in its marker: paths of logs (from the root of the repository), and ``name=value``.
``TABLES`` lists them; tools/figures.py puts them into the pages.
"""

from __future__ import annotations

import contextlib
import functools
import io
import runpy
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mamf
from mamf.ceilings.ceiling import CHOOSE, CONFIRM, Ceiling
from mamf.ceilings.known import known_share
from mamf.ceilings.share import mamfu
from mamf.cli import main as mamf_command
from mamf.errors import MamfError
from mamf.logs.legacy import FinderRun
from mamf.logs.run_log import RunLog
from mamf.measurement import TERA, Measurement
from mamf.operations.model.shapes import SIZES
from mamf.report import bests
from mamf.report.ceilings import share_of_peak
from mamf.report.text import DASH, markdown, significant, whole
from mamf.text import Markup

ROOT = Path(__file__).resolve().parents[1]
FENCE = "```"


class FigureError(Exception):
    """A table or figure that cannot be computed: what is wrong, in a line."""


@functools.cache
def read_any(path: str) -> RunLog | FinderRun:
    try:
        return mamf.read_log(ROOT / path)
    except MamfError as error:
        raise FigureError(str(error)) from None


def read(path: str) -> RunLog:
    if isinstance(log := read_any(path), FinderRun):
        raise FigureError(f"{path} is a log of mamf-finder, which holds no samples")
    return log


def split_words(words: Iterable[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Paths of logs, and the values of each ``name=value,value``."""
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


# -- rows and what is shown of them ------------------------------------------------------------------------------------


def field(row: Measurement, name: str) -> str:
    """A field of a row, of its shape or of its problem, as a table shows it; ``size``: what a model is called."""
    if name == "size":
        fields = vars(row.problem)
        return next(size for size, known in SIZES.items() if known.items() <= fields.items())
    for holder in (row.shape, row.problem, row):
        if (value := getattr(holder, name, None)) is not None:
            break
    else:
        raise FigureError(f"a row of {row.operation} has no field {name!r}")
    if name == "causal":
        return "causal" if value else "full"
    return str(value)


def rows_of(log: RunLog, filters: Mapping[str, Sequence[str]]) -> Iterator[Measurement]:
    """Measured rows whose fields have one of the values that ``filters`` names; those of a search only by phase."""
    for row in log.measurements:
        is_kept = row.ok and not row.is_reference and ("phase" in filters or not row.phase)
        if is_kept and all(field(row, name) in values for name, values in filters.items()):
            yield row


def percent(share: float | None, digits: int = 1) -> str:
    return DASH if share is None else f"{100 * share:.{digits}f} %"


def interval_text(interval: Any) -> str:
    return f"{significant(interval.low)} to {significant(interval.high)}"


def share_of_ceiling(row: Measurement, log: RunLog) -> float | None:
    """MAMFU by the ceiling in the log, else by the one that the log names."""
    share = mamfu(row, log.all_ceilings)
    return known_share(row, log.known_ceilings) if share is None else share


#: What a row can show, by name.
CELLS: Mapping[str, Callable[[Measurement, RunLog], str]] = {
    "rate": lambda row, log: significant(row.best_rate),
    "GB/s": lambda row, log: significant(1000 * row.best_rate),
    "half-width": lambda row, log: f"+-{percent(row.relative_half_width)}",
    "interval": lambda row, log: interval_text(row.rate_interval),
    "share": lambda row, log: percent(share_of_ceiling(row, log)),
    "ms": lambda row, log: f"{1e3 * row.seconds:#.4g}",
    "MHz": lambda row, log: whole(row.conditions.clock_hz and row.conditions.clock_hz / 1e6),
    "W": lambda row, log: whole(row.conditions.watts),
    "attention": lambda row, log: percent(row.time_shares["attention"]),
    "matmul": lambda row, log: percent(row.time_shares["matmul"]),
    "idle": lambda row, log: percent(row.time_shares["idle"]),
    "quantization": lambda row, log: percent(float(row.details["quantization_error"])),
    "fastest": lambda row, log: significant(row.rate("fastest")),
}
_HEADS = {"causal": "mask", "head_dim": "d", "seqlen_q": "length", "context": "length"}
_ORDER = {name: number for number, name in enumerate(("fwd", "bwd", "forward", "forward-backward", "step"))}


def natural(text: str) -> tuple[int, float, str]:
    """Numbers and sizes by value, directions and phases as they follow one another, all else by name."""
    digits = "".join(letter for letter in text if letter.isdigit() or letter == ".")
    scale = next((power for power, unit in enumerate(("KiB", "MiB", "GiB"), 1) if text.endswith(unit)), 0)
    number = float(digits) * 1024.0**scale if digits and text[0].isdigit() and digits.count(".") < 2 else 0.0
    return _ORDER.get(text, -1), number, text


def matrix_table(words: Sequence[str]) -> str:
    """Rows by ``rows=`` fields, columns by a ``columns=`` field (``log``: a column a log), in each ``cell=`` (several
    with a slash between). Of several logs the first that has a cell fills it; several rows of a log are given as their
    span. Other words filter rows.
    """
    paths, options = split_words(words)
    row_names, (column_name,) = options.pop("rows"), options.pop("columns")
    cell_names, best = options.pop("cell", ["rate"]), options.pop("best", [])
    titles = dict(zip(options.get(column_name, ()), options.pop("titles", options.get(column_name, ())), strict=True))
    found: dict[tuple[str, ...], dict[str, list[tuple[Measurement, RunLog]]]] = {}
    for number, path in enumerate(paths, 1):
        log = read(path)
        for row in rows_of(log, options):
            column = str(number) if column_name == "log" else field(row, column_name)
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
    heads = [*(_HEADS.get(name, name) for name in row_names), *(titles.get(column, column) for column in columns)]
    return markdown(heads, lines, {_HEADS.get(name, name) for name in row_names})


def _cell(held: Sequence[tuple[Measurement, RunLog]], names: Sequence[str], fastest: float | None) -> str:
    if not held:
        return DASH
    texts = []
    for name in names:
        shown = [CELLS[name](*each) for each in sorted(held, key=lambda each: each[0].best_rate)]
        texts.append(shown[0] if shown[0] == shown[-1] else f"{shown[0]} to {shown[-1]}")
    text = " / ".join(texts).replace(" / +-", " +-")
    return Markup(f"**{text}**") if fastest is not None and held[-1][0].best_rate == fastest else text


# -- tables of ceilings ------------------------------------------------------------------------------------------------


def label(log: RunLog) -> str:
    """The dtype of a find, with what makes its products another kind."""
    problem = next(iter(log.ceilings.values())).problem
    fast = ", fast accumulation" if getattr(problem, "fast_accumulation", False) else ""
    return f"{problem.dtype}{fast}"


def ceiling_cells(ceiling: Ceiling | None, log: RunLog) -> list[str]:
    if ceiling is None:
        return [DASH, DASH, DASH]
    figure = f"{significant(ceiling.rate)} +-{percent(ceiling.interval.half_width / ceiling.rate)}"
    return [figure, f"{ceiling.shape}", percent(share_of_peak(ceiling, log.header))]


def ceilings_table(words: Sequence[str]) -> str:
    """A find a line: both ceilings, where they are reached and by what."""
    lines = []
    for path in split_words(words)[0]:
        log = read(path)
        burst, sustained = (log.ceilings.get(regime) for regime in ("burst", "sustained"))
        joules = None if sustained is None else sustained.joules_per_tflop
        kernels = dict.fromkeys(each.kernel for each in (burst, sustained) if each is not None)
        lines.append(
            [
                label(log),
                *ceiling_cells(burst, log),
                *ceiling_cells(sustained, log),
                DASH if joules is None else f"{joules:#.3g}",
                ", ".join(kernels),
            ]
        )
    heads = ["dtype", "burst (MAMF)", "at", "of the peak", "sustained (MSMF)", "at", "of the peak", "J/TFLOP", "kernel"]
    return markdown(heads, lines, {"dtype", "at", "kernel"})


def cards_table(words: Sequence[str]) -> str:
    """A card a line: the ceilings that finds gave it, in the order of the logs."""
    found: dict[str, dict[str, list[Ceiling]]] = {}
    for path in split_words(words)[0]:
        log = read(path)
        held = found.setdefault(log.header["device"]["uuid_hash"], {})
        for regime, ceiling in log.ceilings.items():
            held.setdefault(regime, []).append(ceiling)
    lines = []
    for card, held in found.items():
        cells = [f"card {card[:6]}"]
        for regime in ("burst", "sustained"):
            rates = [each.rate for each in held.get(regime, [])]
            half = max((each.interval.half_width / each.rate for each in held.get(regime, [])), default=None)
            cells += [" ".join(map(significant, rates)) or DASH, "" if half is None else f"+-{percent(half, 2)}"]
            if len(words) > len(found):
                cells.append(DASH if len(rates) < 2 else percent(max(rates) / min(rates) - 1, 2))
        lines.append(cells)
    apart = ["apart"] if len(words) > len(found) else []
    heads = ["", "burst TFLOPS", "interval", *apart, "sustained TFLOPS", "interval", *apart]
    return markdown(heads, lines, {"", "burst TFLOPS", "sustained TFLOPS"})


def repeats_table(words: Sequence[str]) -> str:
    """Logs that measured the same shape: what repeats do, and whether the stated intervals hold them."""
    logs = [read(path) for path in split_words(words)[0]]
    lines = []
    for regime in dict.fromkeys(row.regime for log in logs for row in rows_of(log, {})):
        rows = [row for log in logs for row in rows_of(log, {"regime": [regime]})]
        if len({(row.shape, row.kernel, row.problem) for row in rows}) != 1:
            raise FigureError("the logs do not measure one and the same product")
        rates = [row.best_rate for row in rows]
        middle = statistics.median(rates)
        widths = sorted(row.relative_half_width for row in rows)
        holding = sum(row.rate_interval.low <= middle <= row.rate_interval.high for row in rows)
        lines.append(
            [
                regime,
                " ".join(map(significant, rates)),
                percent(max(rates) / min(rates) - 1, 2),
                percent(statistics.stdev(rates) / middle, 2),
                f"{100 * widths[0]:.2f} to {100 * widths[-1]:.2f} %",
                f"{holding} of {len(rows)}",
            ]
        )
    heads = ["", "TFLOPS", "spread", "standard deviation", "stated half-width", "intervals that hold the median"]
    return markdown(heads, lines, {"", "TFLOPS"})


def kernels_table(words: Sequence[str]) -> str:
    """A find a group: the best that each kernel reached in it, and its share of the library's default."""
    paths, options = split_words(words)
    lines = []
    for path in paths:
        log = read(path)
        best: dict[str, Measurement] = {}
        for row in rows_of(log, {"phase": ["scout", "refine", "algorithm", CHOOSE, CONFIRM], "regime": ["burst"]}):
            family = row.kernel.partition("[")[0]
            if family not in best or row.best_rate > best[family].best_rate:
                best[family] = row
        default = next(row.kernel.partition("[")[0] for row in log.measurements if row.phase == "scout")
        for family, row in best.items():
            share = DASH if family == default else percent(row.best_rate / best[default].best_rate)
            lines.append([label(log), row.kernel, significant(row.best_rate), str(row.shape), share])
    heads = ["dtype", "kernel", "TFLOPS", "at", f"of {options.get('default', ['the library'])[0]}"]
    return markdown(heads, lines, {"dtype", "kernel", "at"})


def finder_table(words: Sequence[str]) -> str:
    """A log of mamf-finder beside logs of sweeps over the same shapes."""
    lines = []
    for path in split_words(words)[0]:
        log = read_any(path)
        if isinstance(log, FinderRun):
            name = f"mamf-finder {log.version}"
            lines += [[name, figure, significant(best.tflops[figure]), str(best.shape or DASH), str(log.tried or DASH)]
                      for figure, best in log.best.items()]  # fmt: skip
            continue
        for regime, best in bests(log.measurements).items():
            figures = ("median", "fastest") if regime == "burst" else ("fastest", "mean")
            for figure in figures:
                row = max(rows_of(log, {"regime": [regime]}), key=lambda row, figure=figure: row.rate(figure))
                lines.append(
                    [f"mamf, {regime}", figure, significant(row.rate(figure)), str(row.shape), str(best.shapes)]
                )
    return markdown(["", "figure", "best TFLOPS", "at", "shapes"], lines, {"", "figure", "at"})


# -- tables that commands print ----------------------------------------------------------------------------------------


def printed_by(command: Callable[[], object]) -> str:
    """What a command writes on stdout."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        command()
    return text.getvalue()


def show_table(words: Sequence[str]) -> str:
    """``mamf show LOG ...``, as the command prints it."""
    path, *options = words
    text = printed_by(lambda: mamf_command(["show", str(ROOT / path), *options]))
    if not text:
        raise FigureError(f"'mamf show {' '.join(words)}' prints nothing")
    return text if "markdown" in options else f"{FENCE}\n{text}{FENCE}\n"


def run_table(words: Sequence[str]) -> str:
    """What a script of this folder prints: ``run tools/coverage.py results``."""
    before, there = sys.argv, Path.cwd()
    try:
        sys.argv = list(words)
        with contextlib.chdir(ROOT):
            text = printed_by(lambda: runpy.run_path(str(ROOT / words[0]), run_name="__main__"))
    finally:
        sys.argv = before
        assert Path.cwd() == there
    return f"{FENCE}\n{text}{FENCE}\n"


TABLES: Mapping[str, Callable[[Sequence[str]], str]] = {
    "matrix": matrix_table,
    "ceilings": ceilings_table,
    "cards": cards_table,
    "repeats": repeats_table,
    "kernels": kernels_table,
    "finder": finder_table,
    "show": show_table,
    "run": run_table,
}


# -- single figures ----------------------------------------------------------------------------------------------------


def single_figure(path: str, expression: str) -> str:
    """A figure of a log in words, as links name it: ``burst ceiling``, ``burst ceiling interval``, ``burst ceiling
    share``, ``burst best``, ``burst mean``, ``seconds``, ``rows``, or one of ``CELLS`` of the one row that ``name=value`` select.
    """
    words = expression.split()
    log = read(path)
    if words in (["seconds"], ["rows"]):
        measured, seconds = ((log.summary or {}).get(name) for name in ("measured", "elapsed_seconds"))
        return str(measured) if words == ["rows"] else f"{seconds:#.3g}".rstrip(".")
    if words[1:2] == ["ceiling"]:
        return _figure_of_ceiling(log, words[0], words[2:])
    if len(words) == 2 and words[1] in ("best", "mean"):
        best = bests(log.measurements)[words[0]]
        return significant(best.row.best_rate if words[1] == "best" else best.arithmetic_mean)
    filters = {name: [value] for name, _, value in (word.partition("=") for word in words[1:])}
    if words[0] not in CELLS:
        raise FigureError(f"no figure is called {words[0]!r}; there are {', '.join(CELLS)}")
    rows = list(rows_of(log, filters))
    if len(rows) != 1 and "phase" not in filters:
        raise FigureError(f"{path}: {len(rows)} rows are asked for by '{expression}', not one")
    return CELLS[words[0]](max(rows, key=lambda row: row.best_rate), log)


def _figure_of_ceiling(log: RunLog, regime: str, words: Sequence[str]) -> str:
    ceiling = log.ceilings.get(regime)
    if ceiling is None:
        raise FigureError(f"{log.path} has no {regime} ceiling")
    if list(words) == ["interval"]:
        return interval_text(ceiling.interval)
    if list(words) == ["share"]:
        return percent(share_of_peak(ceiling, log.header))
    return significant(ceiling.rate * TERA / TERA)
