"""The tables of figures that README.md and docs/ show, computed from run logs by the library's own reports.

A table is a function of the words in its marker: paths of logs (from the root of the repository), and ``name=value``.
``TABLES`` lists them; tools/figures.py puts them into the pages.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from figure_logs import (
    CELLS,
    ROOT,
    FigureError,
    field,
    natural,
    percent,
    read,
    rows_of,
    split_words,
)
from finder_tables import finder_repeats_table, finder_table

from mamf.ceilings.ceiling import CHOOSE, CONFIRM, Ceiling
from mamf.cli import main as mamf_command
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.report.own_ceilings import ceiling_table, share_of
from mamf.report.text import DASH, markdown, significant
from mamf.text import Markup

FENCE = "```"
_HEADS = {"causal": "mask", "head_dim": "d", "head_dims": "d", "seqlen_q": "length", "context": "length"}


def matrix_table(words: Sequence[str]) -> str:
    """Rows by ``rows=`` fields, columns by a ``columns=`` field (``log``: a column a log), in each ``cell=`` (several
    with a slash between). Of several logs the first that has a cell fills it; several rows of a log are given as their
    span. Other words filter rows.
    """
    paths, options = split_words(words)
    if not {"rows", "columns"} <= options.keys():
        raise FigureError("it needs rows= and columns=")
    row_names, (column_name,) = options.pop("rows"), options.pop("columns")
    cell_names, best = options.pop("cell", ["rate"]), options.pop("best", [])
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
    heads = [_HEADS.get(name, name) for name in row_names]
    return markdown([*heads, *columns], lines, heads)


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
    return [figure, f"{ceiling.shape}", percent(share_of(ceiling.rate, ceiling.problem, log.header))]


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


def winners_table(words: Sequence[str]) -> str:
    """A find a line: the kernels that it tried, which of them holds each ceiling, and what it gains on that shape."""
    lines = []
    for path in split_words(words)[0]:
        log = read(path)
        cells = [label(log), ", ".join(log.plan.kernels)]
        for regime in ("burst", "sustained"):
            ceiling = log.ceilings[regime]
            gain = ceiling.gain_over_default
            cells += [significant(ceiling.rate), ceiling.kernel, DASH if gain is None else percent(gain, 1)]
        lines.append(cells)
    heads = ["dtype", "tried", "burst TFLOPS", "by", "gain", "sustained TFLOPS", "by", "gain"]
    return markdown(heads, lines, {"dtype", "tried", "by"})


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


def pairs_table(words: Sequence[str]) -> str:
    """Logs two by two, of the same card: how the rows that both hold repeat, by regime."""
    paths, lines = split_words(words)[0], []
    for one, other in zip(paths[::2], paths[1::2], strict=True):
        first = {_key(row): row for row in rows_of(read(one), {})}
        again = [(first[key], row) for row in rows_of(read(other), {}) if (key := _key(row)) in first]
        for regime in dict.fromkeys(row.regime for row, _ in again):
            pairs = [(row, repeat) for row, repeat in again if row.regime == regime]
            ratios = [repeat.best_rate / row.best_rate for row, repeat in pairs]
            holding = sum(row.interval.low <= repeat.seconds <= row.interval.high for row, repeat in pairs)
            close = sum(abs(ratio - 1) <= 0.01 for ratio in ratios)
            within = [f"{number} of {len(pairs)}" for number in (close, holding)]
            lines.append([pairs[0][0].operation, regime, f"{statistics.geometric_mean(ratios):.4f}", *within])
    heads = ["operation", "regime", "mean ratio", "repeats within 1 %", "within the interval"]
    return markdown(heads, lines, {"operation", "regime"})


def _key(row: Measurement) -> tuple[object, ...]:
    return row.regime, row.kernel, row.shape, row.problem


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


def confirmed_table(words: Sequence[str]) -> str:
    """The ceilings that a find of any operation confirmed."""
    logs = map(read, split_words(words)[0])
    tables = [ceiling_table(list(log.own_ceilings.values()), log.header) for log in logs]
    columns = {column.title: column for column in tables[0].top_columns}
    lines = [
        [column.cell(row) for column in table.columns if column.title in columns]
        for table in tables
        for row in table.rows
    ]
    return markdown(list(columns), lines, {title for title, column in columns.items() if column.left})


# -- tables that commands print ----------------------------------------------------------------------------------------


def mamf_table(words: Sequence[str]) -> str:
    """What a command prints of logs (``mamf show LOG --top 5``): console output, or markdown as it is."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        mamf_command([str(ROOT / word) if (ROOT / word).is_file() else word for word in words])
    shown = text.getvalue().replace(f"{ROOT}/", "")
    if not shown:
        raise FigureError(f"'mamf {' '.join(words)}' prints nothing")
    return shown if "markdown" in words else f"{FENCE}\n{shown}{FENCE}\n"


def run_table(words: Sequence[str]) -> str:
    """What a script of this repository prints: ``run tools/coverage.py results``."""
    ended = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    if ended.returncode or not ended.stdout:
        raise FigureError(f"'python {' '.join(words)}' prints nothing: {ended.stderr.strip()[-200:]}")
    return f"{FENCE}\n{ended.stdout}{FENCE}\n"


TABLES: Mapping[str, Callable[[Sequence[str]], str]] = {
    "matrix": matrix_table,
    "ceilings": ceilings_table,
    "winners": winners_table,
    "cards": cards_table,
    "repeats": repeats_table,
    "pairs": pairs_table,
    "kernels": kernels_table,
    "finder": finder_table,
    "finder-repeats": finder_repeats_table,
    "confirmed": confirmed_table,
    "mamf": mamf_table,
    "run": run_table,
}


def table(what: str) -> str:
    """The table that the words of a marker name."""
    name, *words = what.split()
    if name not in TABLES:
        raise FigureError(f"no table is called {name!r}; there are {', '.join(TABLES)}")
    try:
        return TABLES[name](words)
    except FigureError as error:
        raise FigureError(f"table '{name}': {error}") from None
