"""Draws panels of lines and points with matplotlib, from charts of mamf.report.charts.chart."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mamf.report.charts.chart import Axis, Chart, Line, Panel, Point, limits
from mamf.report.charts.figures import GREY, HINTS, SMALL, TEXT, Named, PagePanel, arrange, spaced_labels, width_share
from mamf.report.charts.palette import CEILING, PEAK, Style, styles_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Characters of all panels' titles in a row that fit the width.
_PANEL_TITLES_LENGTH = 132
# A line through more points than this is thin, with small markers.
_MOST_MARKED = 100
# A datasheet that is this many times what was measured is not drawn: the figures would be a line at the bottom.
_FAR_ABOVE = 2.5
# An axis that follows its figures spans at least this share of them: less is no difference.
_LEAST_SPAN = 0.02


def draw_chart(figure: Figure, chart: Chart) -> None:
    axes = figure.subplots(len(chart.grid), len(chart.grid[0]), squeeze=False)
    styles = styles_of([*chart.palette, *chart.names])
    for line, panels in enumerate(chart.grid):
        for column, panel in enumerate(panels):
            if panel is None:
                axes[line][column].set_visible(False)
            else:
                _draw_panel(axes[line][column], panel, chart, styles)
                _label(axes[line][column], panel, chart, line, column)
    rows = len(chart.grid)
    arrange(figure, chart, {1: 6.0, 2: 6.9}.get(rows, 2.9 * rows), named_of_chart(chart))


def chart_panels(chart: Chart) -> Iterator[PagePanel]:
    styles = styles_of([*chart.palette, *chart.names])

    def draw_alone(axes: Axes, panel: Panel) -> None:
        _draw_panel(axes, panel, chart, styles)
        _label(axes, panel, replace(chart, grid=((panel,),)), 0, 0)

    for panel in chart.panels:
        highest = (f"{line.name} up to {max(point.y for point in line.points):.4g}" for line in panel.lines)
        limits_of = {"datasheet": panel.peak, "ceiling": panel.ceiling}
        known = (f"{name} {value:.4g}" for name, value in limits_of.items() if value is not None)
        described = f"{panel.title or chart.title}, {panel.unit}: {'; '.join([*highest, *known])}"
        yield PagePanel(described, functools.partial(draw_alone, panel=panel))


def named_of_chart(chart: Chart) -> Named:
    """What the legend says: the lines, and what a dotted one means."""
    styles = styles_of([*chart.palette, *chart.names])
    common = {"linewidth": 2 if chart.is_connected else 0, "markersize": 7}
    named: Named = [(name, {**common, **vars(styles[name])}) for name in chart.names]
    if chart.companion:
        named.append((chart.companion, {"linewidth": 2, "linestyle": ":", "color": GREY}))
    return named


def _draw_panel(axes: Axes, panel: Panel, chart: Chart, styles: Mapping[str, Style]) -> None:
    axes.set_axisbelow(True)
    axes.grid(True, color="#dddddd", linewidth=0.8)
    for side in axes.spines.values():
        side.set_color("#999999")
    if panel.title:
        title = textwrap.fill(panel.title, int(_PANEL_TITLES_LENGTH * width_share(axes)))
        axes.set_title(title, fontsize=TEXT, loc="left")
    for line in panel.lines:
        _draw_line(axes, line, panel, chart, styles[line.name])
    _scale_x(axes, chart.axis, [point.x for each in chart.panels for line in each.lines for point in line.points])
    _scale_y(axes, panel, chart)
    if panel.best is not None:
        _mark_best(axes, panel, panel.best)
    _draw_references(axes, panel)


def _draw_line(axes: Axes, line: Line, panel: Panel, chart: Chart, style: Style) -> None:
    x, y = [point.x for point in line.points], [point.y for point in line.points]
    hints = [_hint(line, point, panel, chart.axis) for point in line.points]
    is_few = (len(x) if chart.is_connected else sum(len(each.points) for each in panel.lines)) <= _MOST_MARKED
    if chart.is_connected and not is_few:
        (drawn,) = axes.plot(x, y, color=style.color, linewidth=0.8, marker=".", markersize=4, markeredgewidth=0)
        HINTS[drawn] = hints
        return
    (drawn,) = axes.plot(
        x,
        y,
        color=style.color,
        linestyle="none" if not chart.is_connected else ":" if line.is_companion else "-",
        linewidth=2,
        marker=style.marker,
        markersize=7 if is_few else 5,
        markeredgecolor="white",
        markeredgewidth=0.7 if is_few else 0.3,
    )
    HINTS[drawn] = hints
    lows, highs = [point.low for point in line.points], [point.high for point in line.points]
    if chart.has_intervals:
        axes.vlines(x, lows, highs, style.color)
    if chart.is_connected and not line.is_companion:
        axes.fill_between(x, lows, highs, color=style.color, alpha=0.15, linewidth=0)


def _hint(line: Line, point: Point, panel: Panel, axis: Axis) -> str:
    place = {value: text for value, text in axis.ticks if text}.get(point.x, f"{point.x:g}")
    interval = f", {point.low:.4g} to {point.high:.4g}" if point.high > point.low else ""
    return f"{line.name}: {point.y:.4g} {panel.unit}{interval} ({axis.label} {place})"


def _scale_x(axes: Axes, axis: Axis, positions: Sequence[float]) -> None:
    from matplotlib.ticker import MaxNLocator, NullLocator

    if axis.is_log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
    if axis.ticks:
        axes.set_xticks([tick for tick, _ in axis.ticks], labels=spaced_labels(axes, axis.ticks, axis.is_log))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axis.is_shared:
        axes.set_xlim(*limits(positions, axis.is_log))


def _scale_y(axes: Axes, panel: Panel, chart: Chart) -> None:
    """One scale for all panels, so that they compare at a glance, unless each has its own: from 0 where a ceiling is
    drawn or where rates spread that far.
    """
    alike = [panel] if chart.has_own_scales else chart.panels
    points = [point for each in alike for line in each.lines for point in line.points]
    ceilings = [each.ceiling for each in alike if each.ceiling is not None]
    lowest = min(point.low if chart.has_intervals else point.y for point in points)
    highest = max(*(point.high if chart.has_intervals else point.y for point in points), *ceilings, 0.0)
    highest = max(highest, *(each.peak for each in alike if each.peak and each.peak < _FAR_ABOVE * highest), 0.0)
    if (ceilings or lowest < highest / 2) and not chart.has_own_scales:
        axes.set_ylim(0, highest * 1.14)
        return
    margin = max(0.12 * (highest - lowest), _LEAST_SPAN * highest / 2)
    axes.set_ylim(max(0.0, lowest - margin), highest + margin)


def _mark_best(axes: Axes, panel: Panel, best: Point) -> None:
    share = f", {best.y / panel.peak:.0%} of the datasheet" if panel.peak else ""
    axes.plot(best.x, best.y, marker="*", markersize=17, color="#222222", markeredgecolor="white", zorder=6)
    is_right = axes.transAxes.inverted().transform(axes.transData.transform((best.x, best.y)))[0] > 1 / 2
    _write(axes, f"best {best.y:.4g}{share}", (best.x, best.y), (-9 if is_right else 9, 5), is_left=not is_right)


def _draw_references(axes: Axes, panel: Panel) -> None:
    """The datasheet's peak and the ceiling, with their figures and the share."""
    top = axes.get_ylim()[1]
    has_peak = panel.peak is not None and panel.peak < top
    if has_peak and panel.peak is not None:
        axes.axhline(panel.peak, **PEAK)
        _write_along(axes, f"datasheet {panel.peak:.4g}", panel.peak, is_left=False)
    if panel.ceiling is not None:
        axes.axhline(panel.ceiling, **CEILING)
        share = f", {panel.ceiling / panel.peak:.0%} of the datasheet" if has_peak and panel.peak else ""
        _write_along(axes, f"ceiling {panel.ceiling:.4g}{share}", panel.ceiling, is_left=True)


def _write_along(axes: Axes, text: str, height: float, *, is_left: bool) -> None:
    """Above a horizontal line, at one of its ends."""
    _write(axes, text, (axes.get_xlim()[0 if is_left else 1], height), (5 if is_left else -5, 4), is_left=is_left)


def _write(axes: Axes, text: str, at: tuple[float, float], offset: tuple[int, int], *, is_left: bool) -> None:
    """``is_left``: the text begins there, else it ends there. ``offset``: in points."""
    axes.annotate(
        text,
        at,
        xytext=offset,
        textcoords="offset points",
        fontsize=SMALL,
        ha="left" if is_left else "right",
        va="bottom",
        zorder=5,
        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.7},
    )


def _label(axes: Axes, panel: Panel, chart: Chart, line: int, column: int) -> None:
    """Labels where they are needed: on the outer panels."""
    axes.tick_params(labelsize=SMALL, color="#999999")
    left = chart.grid[line][column - 1] if column else None
    if left is None or left.unit != panel.unit:
        axes.set_ylabel(panel.unit, fontsize=TEXT)
    elif not chart.has_own_scales:
        axes.tick_params(labelleft=False)
    if all(row[column] is None for row in chart.grid[line + 1 :]):
        axes.set_xlabel(chart.axis.label, fontsize=TEXT)
    else:
        axes.tick_params(labelbottom=False)
    beside = [each for each in chart.grid[line][column + 1 :] if each is not None]
    whole = panel.peak or panel.ceiling
    if whole is None or whole > axes.get_ylim()[1]:
        return
    if chart.has_own_scales or all((each.peak or each.ceiling) != whole for each in beside):
        _add_shares(axes, whole, "% of the datasheet" if panel.peak else "% MAMFU")


def _add_shares(axes: Axes, whole: float, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    functions = (lambda rate: 100 * rate / whole, lambda share: share * whole / 100)
    shares = axes.secondary_yaxis("right", functions=functions)
    shares.set_ylabel(label, fontsize=TEXT)
    shares.tick_params(labelsize=SMALL, color="#999999")
    shares.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
