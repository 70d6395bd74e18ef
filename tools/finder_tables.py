"""Tables that show runs of mamf-finder beside sweeps over the same shapes (tools/figure_tables.py)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

from figure_logs import FigureError, percent, read_any, rows_of, split_words

from mamf.logs.legacy import FinderRun
from mamf.logs.run_log import RunLog
from mamf.report.rows import bests
from mamf.report.text import DASH, markdown, significant


def finder_table(words: Sequence[str]) -> str:
    """A log of mamf-finder beside those of sweeps over the same shapes: the best by each figure, and the median ratio
    to mamf-finder's figure over all shapes.
    """
    finder, *others = map(read_any, split_words(words)[0])
    if not isinstance(finder, FinderRun):
        raise FigureError("the first log is not of mamf-finder")
    seen = {name: {row.shape: row.tflops[name] for row in finder.rows if name in row.tflops} for name in finder.best}
    lines = []
    for name, best in finder.best.items():
        where = [str(best.shape or DASH), str(finder.tried or DASH)]
        lines.append([f"mamf-finder {finder.version}", name, significant(best.tflops[name]), *where, DASH])
    for log in others:
        assert isinstance(log, RunLog)
        for regime, name in itertools.product(bests(log.measurements), ("mean", "median", "fastest")):
            rates = {str(row.shape): row.rate(name) for row in rows_of(log, {"regime": [regime]})}
            shape = max(rates, key=rates.__getitem__)
            ratios = [rates[each] / rate for each, rate in seen.get(name, {}).items() if each in rates]
            ratio = f"{statistics.median(ratios):.3f}" if ratios else DASH
            lines.append([f"mamf, {regime}", name, significant(rates[shape]), str(shape), str(len(rates)), ratio])
    return markdown(["", "figure", "best TFLOPS", "at", "shapes", "median ratio"], lines, {"", "figure", "at"})


def finder_repeats_table(words: Sequence[str]) -> str:
    """Runs of mamf-finder and of sweeps over the same shapes of one card, several each: the bests of the repeats, and
    how far apart those and the figures of each shape are. ``figure=mean,fastest`` chooses figures.
    """
    paths, options = split_words(words)
    groups: dict[tuple[str, str], list[tuple[Mapping[object, float], float]]] = {}
    for log in map(read_any, paths):
        for name in options.get("figure", ["mean", "median", "fastest"]):
            if isinstance(log, FinderRun):
                tool, seconds = "mamf-finder", log.elapsed_seconds
                rates = {row.shape: row.tflops[name] for row in log.rows if name in row.tflops}
            else:
                tool, seconds = f"mamf, {log.measurements[0].regime}", (log.summary or {})["elapsed_seconds"]
                rates = {str(row.shape): row.rate(name) for row in rows_of(log, {})}
            groups.setdefault((tool, name), []).append((rates, seconds or 0.0))
    lines = []
    for (tool, name), runs in groups.items():
        bests_of_runs = [max(rates.values()) for rates, _ in runs]
        apart = [_apart([rates[shape] for rates, _ in runs]) for shape in runs[0][0]]
        took = f"{statistics.median(seconds for _, seconds in runs):.0f} s"
        spreads = [percent(each, 1) for each in (_apart(bests_of_runs), statistics.median(apart), max(apart))]
        lines.append([tool, name, " ".join(map(significant, bests_of_runs)), *spreads, took])
    heads = ["", "figure", "best TFLOPS of each run", "apart", "a shape apart, median", "most", "a run takes"]
    return markdown(heads, lines, {"", "figure", heads[2]})


def _apart(rates: Sequence[float]) -> float:
    """How far the fastest of repeats is above the slowest."""
    return max(rates) / min(rates) - 1
