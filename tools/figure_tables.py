"""The tables of figures that README.md and docs/ show, computed from run logs by the library's own reports.

A table is a function of the words in its marker: paths of logs (from the root of the repository), and ``name=value``.
``TABLES`` lists them; tools/figures.py puts them into the pages.
"""

from __future__ import annotations

import contextlib
import io
import statistics
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

from mamf.ceilings.ceiling import Ceiling
from mamf.cli import main as mamf_command
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
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


TABLES: Mapping[str, Callable[[Sequence[str]], str]] = {
    "matrix": matrix_table,
    "winners": winners_table,
    "cards": cards_table,
    "repeats": repeats_table,
    "pairs": pairs_table,
    "finder": finder_table,
    "finder-repeats": finder_repeats_table,
    "mamf": mamf_table,
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
