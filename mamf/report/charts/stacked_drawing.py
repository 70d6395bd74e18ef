"""Draws bars with matplotlib: stacked ones with the lines beneath them, and steps down from the datasheet."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mamf.report.charts.chart import limits
from mamf.report.charts.figures import SMALL, TEXT, Named, arrange
from mamf.report.charts.palette import Style, styles_of
from mamf.report.charts.stacked import LinesPanel, StackedChart, StackedPanel
from mamf.report.charts.waterfall import Bar, WaterfallChart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INCHES, _WATERFALL_INCHES, _MOST_COLUMNS = 5.2, 6.5, 4
_HEADROOM, _WATERFALL_HEADROOM = 1.12, 1.18
# A part that is lower than this share of the highest bar has no room for its figure.
_FIGURE_ROOM = 0.045
#: Of a waterfall: measured, computed from the datasheet, lost to the bar before, and measured on other operands.
_MEASURED, _COMPUTED, _LOST, _DATA = "#0072b2", "#b5b5b5", "#d55e00", "#009e73"
_FAINT = 0.3
# Characters that fit the width, of all titles and of all bars' labels in a row.
_TITLES_LENGTH, _LABELS_LENGTH, _FEWEST_CHARACTERS = 132, 110, 8


def draw_stacked(figure: Figure, chart: StackedChart) -> None:
    columns = min(len(chart.panels), _MOST_COLUMNS)
    rows = -(-len(chart.panels) // columns)
    grid = figure.add_gridspec(rows + (chart.lines is not None), columns)
    styles = styles_of([*chart.names, *([line.name for line in chart.lines.lines] if chart.lines else [])])
    top = _HEADROOM * max(bar.height for panel in chart.panels for bar in panel.bars)
    for number, panel in enumerate(chart.panels):
        axes = figure.add_subplot(grid[divmod(number, columns)])
        _draw_bars(axes, panel, styles, top, columns)
        axes.set_xlabel(chart.below, fontsize=TEXT)
        if number % columns:
            axes.tick_params(labelleft=False)
        else:
            axes.set_ylabel(chart.unit, fontsize=TEXT)
    named: Named = [
        (name, {"linewidth": 0, "marker": "s", "markersize": 9, "color": styles[name].color}) for name in chart.names
    ]
    if chart.lines is not None:
        named += _draw_lines(figure.add_subplot(grid[rows, :]), chart.lines, styles)
    arrange(figure, chart, _INCHES * (rows + (chart.lines is not None)), named)


def _draw_bars(axes: Axes, panel: StackedPanel, styles: Mapping[str, Style], top: float, columns: int) -> None:
    _prepare(axes)
    axes.set_ylim(0, top)
    axes.set_xlim(-0.6, max(len(panel.bars), 2) - 0.4)
    axes.set_title(textwrap.fill(panel.title, _TITLES_LENGTH // columns), fontsize=TEXT, loc="left")
    for place, bar in enumerate(panel.bars):
        bottom = 0.0
        for name, height in bar.parts:
            axes.bar(
                place, height, bottom=bottom, color=styles[name].color, width=0.7, edgecolor="white", linewidth=0.7
            )
            if height > _FIGURE_ROOM * top:
                middle = bottom + height / 2
                axes.text(place, middle, f"{height:.3g}", fontsize=SMALL, color="white", ha="center", va="center")
            bottom += height
        axes.text(place, bottom + 0.01 * top, f"{bottom:.4g}", fontsize=SMALL, ha="center", va="bottom")
    letters = max(_FEWEST_CHARACTERS, _LABELS_LENGTH // columns // len(panel.bars))
    axes.set_xticks(range(len(panel.bars)), labels=[textwrap.fill(bar.label, letters) for bar in panel.bars])


def _draw_lines(axes: Axes, panel: LinesPanel, styles: Mapping[str, Style]) -> Named:
    """Returns what the legend says of them."""
    from matplotlib.ticker import NullLocator

    _prepare(axes)
    axes.set_title(textwrap.fill(panel.title, _TITLES_LENGTH), fontsize=TEXT, loc="left")
    named: Named = []
    for line in panel.lines:
        style: dict[str, Any] = {"linewidth": 2, "markersize": 7, **vars(styles[line.name])}
        x = [point.x for point in line.points]
        axes.plot(x, [point.y for point in line.points], markeredgecolor="white", **style)
        axes.fill_between(
            x,
            [point.low for point in line.points],
            [point.high for point in line.points],
            color=style["color"],
            alpha=0.15,
            linewidth=0,
        )
        named.append((line.name, style))
    if panel.axis.is_log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks([tick for tick, _ in panel.axis.ticks], labels=[text for _, text in panel.axis.ticks])
    axes.set_xlim(*limits([point.x for line in panel.lines for point in line.points], panel.axis.is_log))
    axes.set_ylim(0, _HEADROOM * max(point.high for line in panel.lines for point in line.points))
    axes.set_xlabel(panel.axis.label, fontsize=TEXT)
    axes.set_ylabel(panel.unit, fontsize=TEXT)
    return named


def _prepare(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.grid(True, axis="y", color="#dddddd", linewidth=0.8)
    axes.tick_params(labelsize=SMALL, color="#999999")


# -- steps down from the datasheet -------------------------------------------------------------------------------------


def draw_waterfall(figure: Figure, chart: WaterfallChart) -> None:
    bars = len(chart.steps) + len(chart.data)
    letters = max(_FEWEST_CHARACTERS, _LABELS_LENGTH // bars)
    top = _WATERFALL_HEADROOM * max(bar.tflops + max(bar.lost, 0.0) for bar in (*chart.steps, *chart.data))
    if chart.data:
        parts = figure.subplots(1, 2, width_ratios=[len(chart.steps), len(chart.data)])
        _draw_steps(parts[1], chart.data, _DATA, letters, top)
        parts[1].set_title("burst, by what the operands hold", fontsize=TEXT, loc="left")
        parts[1].tick_params(labelleft=False)
        steps = parts[0]
    else:
        steps = figure.subplots()
    _draw_steps(steps, chart.steps, _MEASURED, letters, top)
    steps.set_ylabel("TFLOPS", fontsize=TEXT)
    named: Named = [
        (name, {"linewidth": 0, "marker": "s", "markersize": 9, "color": color, "alpha": alpha})
        for name, color, alpha in (
            ("from the datasheet", _COMPUTED, 1.0),
            ("measured", _MEASURED, 1.0),
            ("lost since the step before", _LOST, _FAINT),
        )
    ]
    arrange(figure, chart, _WATERFALL_INCHES, named)


def _draw_steps(axes: Axes, bars: Sequence[Bar], color: str, letters: int, top: float) -> None:
    _prepare(axes)
    axes.set_ylim(0, top)
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
        axes.annotate(
            f"{bar.tflops:.4g}" + (f"\n{bar.note}" if bar.note else ""),
            (place, min(max(bar.tflops + lost, end), top / _WATERFALL_HEADROOM)),
            xytext=(0, 4),
            textcoords="offset points",
            fontsize=SMALL,
            ha="center",
            va="bottom",
        )
    axes.set_xticks(list(places), labels=[textwrap.fill(bar.label, letters) for bar in bars])
