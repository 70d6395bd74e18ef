"""Draws where FLOPS went with matplotlib: steps down from the datasheet, and beside them what operands cost."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mamf.report.charts.figures import SMALL, TEXT, Named, arrange
from mamf.report.charts.waterfall import Bar, WaterfallChart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INCHES = 6.5
_HEADROOM = 1.18
#: Measured, computed from the datasheet, lost to the bar before, and measured on other operands.
_MEASURED, _COMPUTED, _LOST, _DATA = "#0072b2", "#b5b5b5", "#d55e00", "#009e73"
_FAINT = 0.3
# Characters of a bar's label that fit the width, by all bars of the picture.
_LABELS_LENGTH = 110
_FEWEST_CHARACTERS = 8


def draw_waterfall(figure: Figure, chart: WaterfallChart) -> None:
    bars = len(chart.steps) + len(chart.data)
    letters = max(_FEWEST_CHARACTERS, _LABELS_LENGTH // bars)
    top = _HEADROOM * max(bar.tflops + max(bar.lost, 0.0) for bar in (*chart.steps, *chart.data))
    if chart.data:
        parts = figure.subplots(1, 2, width_ratios=[len(chart.steps), len(chart.data)])
        _draw_bars(parts[1], chart.data, _DATA, letters, top)
        parts[1].set_title("burst, by what the operands hold", fontsize=TEXT, loc="left")
        parts[1].tick_params(labelleft=False)
        steps = parts[0]
    else:
        steps = figure.subplots()
    _draw_bars(steps, chart.steps, _MEASURED, letters, top)
    steps.set_ylabel("TFLOPS", fontsize=TEXT)
    named: Named = [
        (name, {"linewidth": 0, "marker": "s", "markersize": 9, "color": color, "alpha": alpha})
        for name, color, alpha in (
            ("from the datasheet", _COMPUTED, 1.0),
            ("measured", _MEASURED, 1.0),
            ("lost since the step before", _LOST, _FAINT),
        )
    ]
    arrange(figure, chart, _INCHES, named)


def _draw_bars(axes: Axes, bars: Sequence[Bar], color: str, letters: int, top: float) -> None:
    axes.set_axisbelow(True)
    axes.grid(True, axis="y", color="#dddddd", linewidth=0.8)
    axes.set_ylim(0, top)
    axes.tick_params(labelsize=SMALL, color="#999999")
    places = range(len(bars))
    colors = [_COMPUTED if bar.interval is None else color for bar in bars]
    axes.bar(places, [bar.tflops for bar in bars], color=colors, width=0.7)
    for place, bar in zip(places, bars, strict=True):
        lost, end = max(bar.lost, 0.0), bar.tflops
        if lost:
            axes.bar(place, lost, bottom=bar.tflops, color=_LOST, alpha=_FAINT, width=0.7)
        if bar.interval is not None:
            low, end = bar.interval
            axes.plot([place, place], [low, end], color="black", linewidth=1.5)
        figure = f"{bar.tflops:.4g}" + (f"\n{bar.note}" if bar.note else "")
        axes.annotate(
            figure,
            (place, min(max(bar.tflops + lost, end), top / _HEADROOM)),
            xytext=(0, 4),
            textcoords="offset points",
            fontsize=SMALL,
            ha="center",
            va="bottom",
        )
    axes.set_xticks(list(places), labels=[textwrap.fill(bar.label, letters) for bar in bars])
