"""Draws bars with matplotlib: stacked ones with the lines beneath them, and steps down from the datasheet."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mamf.report.charts.drawing import chart_panels
from mamf.report.charts.figures import (
    HINTS,
    PAGE_WIDTH,
    SMALL,
    TEXT,
    Named,
    PagePanel,
    arrange,
    width_share,
)
from mamf.report.charts.palette import Style, styles_of
from mamf.report.charts.stacked import StackedChart, StackedPanel
from mamf.report.charts.waterfall import Bar, WaterfallChart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INCHES, _INCHES_PER_BAR, _MOST_COLUMNS = 5.2, 1.4, 4
_HEADROOM, _WATERFALL_HEADROOM = 1.12, 1.18
# A part that is lower than this share of the highest bar has no room for its figure.
_FIGURE_ROOM = 0.045
#: Of a waterfall: measured, computed from the datasheet, lost to the bar before, and measured on other operands.
_MEASURED, _COMPUTED, _LOST, _DATA = "#0072b2", "#b5b5b5", "#d55e00", "#009e73"
_FAINT = 0.3
_SQUARE = {"linewidth": 0, "marker": "s", "markersize": 9}
_LINE = {"linewidth": 2, "markersize": 7}
# Characters that fit the width, of all titles and of all bars' labels in a row.
_TITLES_LENGTH, _LABELS_LENGTH, _FEWEST_CHARACTERS = 132, 110, 8


def draw_stacked(figure: Figure, chart: StackedChart) -> None:
    columns = min(len(chart.panels), _MOST_COLUMNS)
    rows = -(-len(chart.panels) // columns)
    grid = figure.add_gridspec(rows + (chart.lines is not None), columns)
    for number, panel in enumerate(stacked_panels(chart)):
        is_lines = number == len(chart.panels)
        axes = figure.add_subplot(grid[rows, :] if is_lines else grid[divmod(number, columns)])
        panel.draw(axes)
        if number % columns and not is_lines:
            axes.tick_params(labelleft=False)
            axes.set_ylabel("")
    arrange(figure, chart, _INCHES * (rows + (chart.lines is not None)), named_of_stacked(chart))


def stacked_panels(chart: StackedChart) -> Iterator[PagePanel]:
    """A panel of bars after the other, then that of the lines."""
    for panel in chart.panels:
        described = "; ".join(f"{bar.label}: {bar.height:.4g} {chart.unit}" for bar in panel.bars)
        yield PagePanel(described, functools.partial(_draw_bars, panel=panel, chart=chart))
    if chart.lines is not None:
        yield from chart_panels(replace(chart.lines, palette=tuple(_styles(chart))))


def named_of_stacked(chart: StackedChart) -> Named:
    styles = _styles(chart)
    named = [(name, {**_SQUARE, "color": styles[name].color}) for name in chart.names]
    return [*named, *((name, {**_LINE, **vars(styles[name])}) for name in (chart.lines.names if chart.lines else ()))]


def _styles(chart: StackedChart) -> dict[str, Style]:
    return styles_of([*chart.names, *(chart.lines.names if chart.lines else ())])


def _draw_bars(axes: Axes, panel: StackedPanel, chart: StackedChart) -> None:
    _prepare(axes)
    styles = _styles(chart)
    top = _HEADROOM * max(bar.height for each in chart.panels for bar in each.bars)
    axes.set_ylim(0, top)
    axes.set_xlim(-0.6, max(len(panel.bars), 2) - 0.4)
    axes.set_title(textwrap.fill(panel.title, int(_TITLES_LENGTH * width_share(axes))), fontsize=TEXT, loc="left")
    axes.set_xlabel(chart.below, fontsize=TEXT)
    axes.set_ylabel(chart.unit, fontsize=TEXT)
    for place, bar in enumerate(panel.bars):
        bottom = 0.0
        for name, height in bar.parts:
            color = styles[name].color
            (drawn,) = axes.bar(place, height, bottom=bottom, color=color, width=0.7, edgecolor="white", linewidth=0.7)
            share = f" ({height / bar.height:.1%})" if bar.height else ""
            HINTS[drawn] = [f"{bar.label}, {name}: {height:.4g} {chart.unit}{share}"]
            if height > _FIGURE_ROOM * top:
                middle = bottom + height / 2
                axes.text(place, middle, f"{height:.3g}", fontsize=SMALL, color="white", ha="center", va="center")
            bottom += height
        axes.text(place, bottom + 0.01 * top, f"{bottom:.4g}", fontsize=SMALL, ha="center", va="bottom")
    _label_bars(axes, [bar.label for bar in panel.bars])


def _label_bars(axes: Axes, labels: Sequence[str]) -> None:
    letters = max(_FEWEST_CHARACTERS, int(_LABELS_LENGTH * width_share(axes)) // len(labels))
    axes.set_xticks(range(len(labels)), labels=[textwrap.fill(label, letters) for label in labels])


def _prepare(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.grid(True, axis="y", color="#dddddd", linewidth=0.8)
    axes.tick_params(labelsize=SMALL, color="#999999")


# -- steps down from the datasheet -------------------------------------------------------------------------------------


def waterfall_panels(chart: WaterfallChart) -> Iterator[PagePanel]:
    """The steps, then the same product on other operands."""
    top = _WATERFALL_HEADROOM * max(bar.tflops + max(bar.lost, 0.0) for bar in (*chart.steps, *chart.data))
    for bars, color, title in ((chart.steps, _MEASURED, ""), (chart.data, _DATA, "burst, by what the operands hold")):
        if bars:
            described = "; ".join(f"{bar.label}: {bar.tflops:.4g} TFLOPS {bar.note}" for bar in bars)
            draw = functools.partial(_draw_steps, bars=bars, color=color, title=title, top=top)
            size = max(PAGE_WIDTH, _INCHES_PER_BAR * len(bars)), 5.0
            yield PagePanel(described, draw, size, len(bars))


def named_of_waterfall(_: WaterfallChart) -> Named:
    return [
        (name, {**_SQUARE, "color": color, "alpha": alpha})
        for name, color, alpha in (
            ("from the datasheet", _COMPUTED, 1.0),
            ("measured", _MEASURED, 1.0),
            ("lost since the step before", _LOST, _FAINT),
        )
    ]


def _draw_steps(axes: Axes, bars: Sequence[Bar], color: str, title: str, top: float) -> None:
    _prepare(axes)
    axes.set_title(title, fontsize=TEXT, loc="left")
    axes.set_ylabel("TFLOPS", fontsize=TEXT)
    axes.set_ylim(0, top)
    places = range(len(bars))
    colors = [_COMPUTED if bar.interval is None else color for bar in bars]
    drawn = axes.bar(places, [bar.tflops for bar in bars], color=colors, width=0.7)
    HINTS.update(
        (each, [f"{bar.label}: {bar.tflops:.4g} TFLOPS {bar.note}"]) for each, bar in zip(drawn, bars, strict=True)
    )
    for place, bar in zip(places, bars, strict=True):
        lost, end = max(bar.lost, 0.0), bar.tflops
        if lost:
            (part,) = axes.bar(place, lost, bottom=bar.tflops, color=_LOST, alpha=_FAINT, width=0.7)
            HINTS[part] = [f"lost: {lost:.4g} TFLOPS"]
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
    _label_bars(axes, [bar.label for bar in bars])
