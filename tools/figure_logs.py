"""Rows and single figures of run logs for README.md and docs/, from the library's readers and reports."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import mamf
from mamf.ceilings.ceiling import known_share, mamfu
from mamf.errors import MamfError
from mamf.logs.legacy import FinderRun
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.operations.model.shapes import SIZES
from mamf.report.rows import bests
from mamf.report.text import DASH, significant

ROOT = Path(__file__).resolve().parents[1]


class FigureError(Exception):
    """A table or figure that cannot be computed: what is wrong, in a line."""


@functools.cache
def read_any(path: str) -> RunLog | FinderRun:
    """A log by its path from the root of the repository; read once."""
    try:
        log: RunLog | FinderRun = mamf.read_log(ROOT / path)
    except MamfError as error:
        raise FigureError(str(error)) from None
    return log


def read(path: str) -> RunLog:
    """One with samples."""
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
        value = getattr(holder, name, None)
        if value is not None and not isinstance(value, re.Pattern):  # how a kind of shape is written
            break
    else:
        raise FigureError(f"a row of {row.operation} has no field {name!r}")
    if name == "causal":
        return "causal" if value else "full"
    return str(value)


#: What follows what, where the alphabet says otherwise.
_ORDER = {name: number for number, name in enumerate(("fwd", "bwd", "forward", "forward-backward", "step"))}


def natural(text: str) -> tuple[int, float, str]:
    """Numbers and sizes by value, directions and phases as they follow one another, all else by name."""
    found = re.match(r"\d+(?:\.\d+)?", text)
    scale = next((power for power, unit in enumerate(("KiB", "MiB", "GiB"), 1) if text.endswith(unit)), 0)
    return _ORDER.get(text, -1), float(found[0]) * 1024.0**scale if found else 0.0, text


def rows_of(log: RunLog, filters: Mapping[str, Sequence[str]]) -> Iterator[Measurement]:
    """Measured rows whose fields have one of the values that ``filters`` names; those of a search only by phase."""
    for row in log.measurements:
        is_kept = row.ok and not row.is_reference and ("phase" in filters or not row.phase)
        if is_kept and all(field(row, name) in values for name, values in filters.items()):
            yield row


def percent(share: float | None, digits: int = 1) -> str:
    return DASH if share is None else f"{100 * share:.{digits}f} %"


def share_of_ceiling(row: Measurement, log: RunLog) -> float | None:
    """MAMFU by the ceiling in the log, else by the one that the log names."""
    share = mamfu(row, log.all_ceilings)
    return known_share(row, log.known_ceilings) if share is None else share


#: What a row can show, by name.
CELLS: Mapping[str, Callable[[Measurement, RunLog], str]] = {
    "rate": lambda row, log: significant(row.best_rate),
    "GB/s": lambda row, log: significant(1000 * row.best_rate),
    "half-width": lambda row, log: f"+-{percent(row.relative_half_width)}",
    "share": lambda row, log: percent(share_of_ceiling(row, log)),
    "ms": lambda row, log: f"{1e3 * row.seconds:#.4g}",
    "quantization": lambda row, log: percent(float(row.details["quantization_error"])),
}


# -- single figures ----------------------------------------------------------------------------------------------------


def single_figure(path: str, expression: str) -> str:
    """The figure of a log that an expression names:

    - ``rows``, ``seconds``: how many rows were measured, and how long that took;
    - ``burst ceiling``: of a find;
    - ``burst best``: of a sweep, over its rows;
    - one of ``CELLS`` and ``name=value`` for each field of the row: ``rate shape=8192x8192x8192 regime=burst``. Of rows
      of a search (``phase=choose``) the best;
    - of a log of mamf-finder ``seconds``, or the name of its figure: ``fastest``.
    """
    log = read_any(path)
    words = expression.split()
    try:
        if isinstance(log, FinderRun) and expression == "seconds":
            return f"{log.elapsed_seconds:.3g}"
        if isinstance(log, FinderRun):
            return significant(log.best[expression].tflops[expression])
        if expression in ("rows", "seconds"):
            summary = log.summary or {}
            return str(summary["measured"]) if expression == "rows" else f"{summary['elapsed_seconds']:.3g}"
        if words[1:2] == ["ceiling"]:
            return significant(log.ceilings[words[0]].rate)
        if words[1:] == ["best"]:
            return significant(bests(log.measurements)[words[0]].row.best_rate)
        show = CELLS[words[0]]
    except KeyError as error:
        raise FigureError(f"{path} has no {expression!r}: {error} is unknown") from None
    filters = {name: [value] for name, _, value in (word.partition("=") for word in words[1:])}
    rows = list(rows_of(log, filters))
    if not rows or (len(rows) > 1 and "phase" not in filters):
        raise FigureError(f"{path}: {len(rows)} rows match {expression!r}, not one")
    return show(max(rows, key=lambda row: row.best_rate), log)
