"""Draws stacked bars with matplotlib, and the lines beneath them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mamf.report.charts.chart import limits
from mamf.report.charts.figures import SMALL, TEXT, Named, arrange
from mamf.report.charts.palette import Style, styles_of
from mamf.report.charts.stacked import LinesPanel, StackedChart, StackedPanel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INCHES, _MOST_COLUMNS = 5.2, 4
_HEADROOM = 1.12
# A part that is lower than this share of the highest bar has no room for its figure.
_FIGURE_ROOM = 0.045
# Characters that fit the width, of all titles and of all bars' labels in a row.
_TITLES_LENGTH, _LABELS_LENGTH, _FEWEST_CHARACTERS = 132, 110, 8


def draw_stacked(figure: Figure, chart: StackedChart) -> None:
    columns = min(len(chart.panels), _MOST_COLUMNS)
    rows = -(-len(chart.panels) // columns)
    grid = figure.add_gridspec(rows + (chart.lines is not None), columns)
    lines = [line.name for line in chart.lines.lines] if chart.lines else []
    styles = styles_of([*chart.names, *lines])
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
