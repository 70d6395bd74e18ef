"""Represent line charts as data (Chart), and draw them with matplotlib. A chart has panels, and a panel has lines."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mamf.measurement import group_pairs
from mamf.report.charts.picture import (
    CEILING_LINE_STYLE,
    PEAK_LINE_STYLE,
    SMALL_FONT_POINTS,
    TEXT_FONT_POINTS,
    TOOLTIPS_BY_ARTIST,
    DrawablePanel,
    LegendEntries,
    Picture,
    Style,
    choose_styles,
    compute_panel_width_share,
    style_axes,
)
from mamf.report.document import format_four_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Margin at each end of a horizontal axis, as a share of the range of the positions.
_AXIS_MARGIN_SHARE = 0.045
_MAX_TICKS = 10
# Prefixes of units. The prefix at index i stands for the factor 1000**i or 1024**i.
_PREFIXES = ("", "k", "M", "G", "T")
# The maximum number of characters of all tick labels together, if the axis is as wide as an image file.
_MAX_TICK_LABEL_CHARACTERS = 112
# Lines with at most this many points have large markers. Lines with more points are thin and have small markers.
_MAX_LARGE_MARKERS = 100
# Draw the peak of the datasheet only if it is less than this many times the highest measured rate. A higher peak would
# flatten the measured lines at the bottom of the panel.
_MAX_PEAK_RATIO = 2.5
# Minimum span of a vertical axis that does not begin at 0, as a share of the highest rate. Smaller differences are
# noise, which a narrower axis would magnify.
_MIN_AXIS_SPAN_SHARE = 0.02


@dataclass(frozen=True)
class Point:
    """A point of a line. ``low`` and ``high`` are the ends of the interval of ``y``. They are equal to ``y`` if the
    interval is unknown.
    """

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """The points of one kernel or regime. ``name``: the name that decides the color in all panels."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Panel:
    """A panel of a chart.

    - ``unit``: the unit of all rates in the panel.
    - ``ceiling``: the measured ceiling, drawn as a horizontal line; None for no line.
    - ``peak``: the dense peak of the datasheet, drawn as a dashed line; None for no line.
    - ``best_point``: the point that is marked with a star; None for no star.
    """

    title: str
    lines: tuple[Line, ...]
    ceiling: float | None = None
    unit: str = "TFLOPS"
    peak: float | None = None
    best_point: Point | None = None

    @property
    def points(self) -> list[Point]:
        return [point for line in self.lines for point in line.points]


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of all panels.

    - ``ticks``: positions and labels of ticks; if empty, matplotlib chooses the ticks.
    - ``is_shared``: whether all panels have the same range.
    """

    label: str
    is_logarithmic: bool = False
    ticks: tuple[tuple[float, str], ...] = ()
    is_shared: bool = True


@dataclass(frozen=True)
class Chart(Picture):
    """A chart of panels with lines.

    - ``grid``: rows of panels, with None in place of a panel without measurements.
    - ``is_connected``: whether lines join the points.
    - ``has_intervals``: whether a vertical line shows the interval of each point.
    - ``palette_names``: all names that occur in any picture of the run. Pictures with the same ``palette_names`` give
      each name the same color.
    - ``has_own_scales``: whether each panel has its own vertical scale.
    - ``comes_with_intervals``: whether the log has intervals. If not, no marker is hollow.
    """

    axis: Axis
    grid: tuple[tuple[Panel | None, ...], ...]
    is_connected: bool = True
    has_intervals: bool = False
    palette_names: tuple[str, ...] = ()
    has_own_scales: bool = False
    comes_with_intervals: bool = True

    @property
    def has_hollow_markers(self) -> bool:
        """Whether hollow markers show points with an unknown interval."""
        shows_intervals = self.comes_with_intervals and (self.is_connected or self.has_intervals)
        return shows_intervals and any(point.high <= point.low for panel in self.panels for point in panel.points)

    @property
    def all_notes(self) -> Sequence[str]:
        return [*self.notes, *(["hollow marker: the interval is unknown"] if self.has_hollow_markers else [])]

    @property
    def panels(self) -> list[Panel]:
        return [panel for row in self.grid for panel in row if panel is not None]

    @property
    def names(self) -> list[str]:
        """The names of all lines. They are sorted by rate, the highest first, or in order of appearance if no lines
        join the points.
        """
        rates = group_pairs(
            (line.name, point.y) for panel in self.panels for line in panel.lines for point in line.points
        )
        return sorted(rates, key=lambda name: -max(rates[name])) if self.is_connected else list(rates)

    @functools.cached_property
    def styles(self) -> dict[str, Style]:
        return choose_styles([*self.palette_names, *self.names])

    @property
    def height_inches(self) -> float:
        return {1: 6.0, 2: 6.9}.get(len(self.grid), 2.9 * len(self.grid))

    def make_panel_rows(self) -> list[list[DrawablePanel | None]]:
        return [[self._make_drawable_panel(panel) if panel else None for panel in row] for row in self.grid]

    def _make_drawable_panel(self, panel: Panel) -> DrawablePanel:
        highest = (
            f"{line.name} up to {format_four_digits(max(point.y for point in line.points))}" for line in panel.lines
        )
        references = (("datasheet", panel.peak), ("ceiling", panel.ceiling))
        known = (f"{name} {value:.4g}" for name, value in references if value is not None)
        description = f"{panel.title or self.title}, {panel.unit}: {'; '.join([*highest, *known])}"
        scale_key = None if self.has_own_scales else (panel.unit, panel.peak, panel.ceiling)
        return DrawablePanel(description, functools.partial(_draw_panel, panel=panel, chart=self), scale_key)

    def make_legend(self) -> LegendEntries:
        line_style = {"linewidth": 2 if self.is_connected else 0, "markersize": 7}
        return [(name, {**line_style, **vars(self.styles[name])}) for name in self.names]


# -- ticks and scales of the axes of a Chart ---------------------------------------------------------------------------


def compute_axis_limits(positions: Sequence[float], is_logarithmic: bool) -> tuple[float, float]:
    """Return the lower and upper end of an axis that shows all positions with a margin."""
    low, high = min(positions), max(positions)
    if is_logarithmic:
        margin = (high / low) ** _AXIS_MARGIN_SHARE if high > low else 2.0
        return low / margin, high * margin
    margin = _AXIS_MARGIN_SHARE * (high - low) or 1.0
    return low - margin, high + margin


def make_labeled_ticks(
    positions: Iterable[float], format_label: Callable[[float], str]
) -> tuple[tuple[float, str], ...]:
    """Return a tick at each distinct position, in increasing order. ``format_label``: formats a position as a label."""
    return tuple((position, format_label(position)) for position in sorted(set(positions)))


def make_even_ticks(sizes: Sequence[int]) -> tuple[tuple[float, str], ...]:
    """Return ticks at all multiples of a step within the range of sizes. The step is the smallest power of two that
    divides this range into at most ten parts.
    """
    step = 1
    while (max(sizes) - min(sizes)) / step > _MAX_TICKS:
        step *= 2
    return tuple((size, str(size)) for size in range(-(-min(sizes) // step) * step, max(sizes) + 1, step))


def format_with_binary_prefix(size: float) -> str:
    """Format a size with the largest binary prefix that leaves a whole number: 16384 as ``16k``, 1073741824 as ``1G``,
    1000 as ``1000``.
    """
    power = next((each for each in (3, 2, 1) if size and size % 1024**each == 0), 0)
    return f"{size / 1024**power:.0f}{_PREFIXES[power]}"


def format_with_decimal_prefix(work: float) -> str:
    """Format an amount of work with a decimal prefix and three significant digits: 3.76e12 as ``3.76T``."""
    power = next((each for each in (4, 3, 2, 1) if work >= 1000**each), 0)
    return f"{work / 1000**power:.3g}{_PREFIXES[power]}"


def _scale_x_axis(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import MaxNLocator, NullLocator

    axis = chart.axis
    if axis.is_logarithmic:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
    if axis.ticks:
        axes.set_xticks([tick for tick, _ in axis.ticks], labels=_select_spaced_labels(axes, axis))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if axis.is_shared:
        axes.set_xlim(
            *compute_axis_limits([point.x for panel in chart.panels for point in panel.points], axis.is_logarithmic)
        )


def _select_spaced_labels(axes: Axes, axis: Axis) -> list[str]:
    """Return the labels of all ticks, with an empty string in place of labels that would touch the previous label."""
    positions = [math.log(position) if axis.is_logarithmic else position for position, _ in axis.ticks]
    letter_width = (positions[-1] - positions[0]) / (_MAX_TICK_LABEL_CHARACTERS * compute_panel_width_share(axes))
    labels, previous_end = [], -math.inf
    for position, (_, text) in zip(positions, axis.ticks, strict=True):
        half_width = letter_width * (len(text) + 2) / 2
        labels.append(text if position - half_width >= previous_end else "")
        previous_end = position + half_width if labels[-1] else previous_end
    return labels


def _scale_y_axis(axes: Axes, panel: Panel, chart: Chart) -> None:
    """Set the vertical scale of a panel. All panels share one scale, unless ``chart.has_own_scales``.

    The shared scale begins at 0 if lines join the points and a panel has a ceiling. It also begins at 0 if the highest
    rate is more than twice the lowest.
    """
    panels = [panel] if chart.has_own_scales else chart.panels
    points = [point for each in panels for point in each.points]
    ceilings = [each.ceiling for each in panels if each.ceiling is not None]
    lowest = min(point.low if chart.has_intervals else point.y for point in points)
    highest = max(*(point.high if chart.has_intervals else point.y for point in points), *ceilings, 0.0)
    highest = max(highest, *(each.peak for each in panels if each.peak and each.peak < _MAX_PEAK_RATIO * highest), 0.0)
    # Bands of intervals are drawn only around lines.
    band_bottom = 0.99 * min(point.low for point in points) if chart.is_connected else lowest
    band_top = 1.01 * max(point.high for point in points) if chart.is_connected else 0.0
    if ((ceilings and chart.is_connected) or lowest < highest / 2) and not chart.has_own_scales:
        axes.set_ylim(0, max(highest * 1.14, band_top))
        return
    margin = max(0.12 * (highest - lowest), _MIN_AXIS_SPAN_SHARE * highest / 2)
    axes.set_ylim(max(0.0, min(lowest - margin, band_bottom)), max(highest + margin, band_top))


def _add_share_axis(axes: Axes, panel: Panel) -> None:
    """Add a vertical axis on the right that shows rates in percent of the datasheet's peak, or of the ceiling if no
    peak is known. Add no axis if neither is known, or if the peak (or ceiling) is above the panel.
    """
    from matplotlib.ticker import MaxNLocator

    reference = panel.peak or panel.ceiling
    if reference is None or reference > axes.get_ylim()[1]:
        return
    functions = (lambda rate: 100 * rate / reference, lambda percent: percent * reference / 100)
    share_axis = axes.secondary_yaxis("right", functions=functions)
    ceiling_label = "% MBU" if panel.unit.endswith("B/s") else "% MAMFU"
    share_axis.set_ylabel("% of the datasheet" if panel.peak else ceiling_label, fontsize=TEXT_FONT_POINTS)
    share_axis.tick_params(labelsize=SMALL_FONT_POINTS, color="#999999")
    share_axis.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))


# -- drawing the panels of a Chart -------------------------------------------------------------------------------------


def _draw_panel(axes: Axes, panel: Panel, chart: Chart) -> None:
    style_axes(axes, panel.title)
    axes.set_xlabel(chart.axis.label, fontsize=TEXT_FONT_POINTS)
    axes.set_ylabel(panel.unit, fontsize=TEXT_FONT_POINTS)
    for line in panel.lines:
        _draw_line(axes, line, panel, chart, chart.styles[line.name])
    _scale_x_axis(axes, chart)
    _scale_y_axis(axes, panel, chart)
    if panel.best_point is not None:
        _draw_best_point_star(axes, panel, panel.best_point, chart.has_hollow_markers)
    _draw_reference_lines(axes, panel)
    _add_share_axis(axes, panel)


def _draw_line(axes: Axes, line: Line, panel: Panel, chart: Chart, style: Style) -> None:
    x, y = [point.x for point in line.points], [point.y for point in line.points]
    has_few_points = len(x) == 1 or len(x if chart.is_connected else panel.points) <= _MAX_LARGE_MARKERS
    is_thin = chart.is_connected and not has_few_points
    (drawn,) = axes.plot(
        x,
        y,
        color=style.color,
        linestyle="-" if chart.is_connected else "none",
        linewidth=0.8 if is_thin else 2,
        marker="." if is_thin else style.marker,
        markersize=12 if len(x) == 1 and len(panel.points) > _MAX_LARGE_MARKERS else 7 if has_few_points else 4,
        markeredgecolor="white",
        markeredgewidth=0.7 if has_few_points else 0,
    )
    TOOLTIPS_BY_ARTIST[drawn] = [_format_tooltip(line, point, panel, chart.axis) for point in line.points]
    if chart.has_hollow_markers and (unknown := [point for point in line.points if point.high <= point.low]):
        axes.plot(
            [point.x for point in unknown],
            [point.y for point in unknown],
            color=style.color,
            linestyle="none",
            marker=style.marker,
            markersize=7 if has_few_points else 4,
            markerfacecolor="white",
        )
    # The band has a gap at points with an unknown interval.
    ends = [(point.low, point.high) if point.high > point.low else (math.nan, math.nan) for point in line.points]
    lows, highs = zip(*ends, strict=True)
    # The band of a single point, or of a point between two gaps, has no width. So also draw the interval of each point.
    if chart.has_intervals or (chart.is_connected and (len(x) == 1 or any(map(math.isnan, lows)))):
        axes.vlines(x, lows, highs, style.color)
    if chart.is_connected:
        axes.fill_between(x, lows, highs, color=style.color, alpha=0.15, linewidth=0)


def _format_tooltip(line: Line, point: Point, panel: Panel, axis: Axis) -> str:
    x_label = {value: text for value, text in axis.ticks if text}.get(point.x, f"{point.x:g}")
    interval = (
        f", {format_four_digits(point.low)} to {format_four_digits(point.high)}" if point.high > point.low else ""
    )
    return f"{line.name}: {format_four_digits(point.y)} {panel.unit}{interval} ({axis.label} {x_label})"


def _draw_best_point_star(axes: Axes, panel: Panel, best: Point, can_be_hollow: bool) -> None:
    share = f"\n{100 * best.y / panel.peak:.0f} % of the datasheet" if panel.peak else ""
    face, edge = ("white", "#222222") if can_be_hollow and best.high <= best.low else ("#222222", "white")
    axes.plot(best.x, best.y, marker="*", markersize=17, markerfacecolor=face, markeredgecolor=edge, zorder=6)
    is_right = axes.transAxes.inverted().transform(axes.transData.transform((best.x, best.y)))[0] > 1 / 2
    _write_text(axes, f"best {format_four_digits(best.y)}{share}", (best.x, best.y), (-9 if is_right else 9, 5))


def _draw_reference_lines(axes: Axes, panel: Panel) -> None:
    """Draw horizontal lines for the peak of the datasheet and for the ceiling, with their values."""
    (left, right), top = axes.get_xlim(), axes.get_ylim()[1]
    share = ""
    if panel.peak is not None and panel.peak < top:
        axes.axhline(panel.peak, **PEAK_LINE_STYLE)
        _write_text(axes, f"datasheet {panel.peak:.4g}", (right, panel.peak), (-5, 4))
        share = f", {100 * panel.ceiling / panel.peak:.0f} % of the datasheet" if panel.ceiling else ""
    if panel.ceiling is not None:
        axes.axhline(panel.ceiling, **CEILING_LINE_STYLE)
        # Markers of the first measurements may be where the label is, so draw the label behind them.
        _write_text(
            axes, f"ceiling {format_four_digits(panel.ceiling)}{share}", (left, panel.ceiling), (5, 4), zorder=1.9
        )


def _write_text(
    axes: Axes, text: str, position: tuple[float, float], offset: tuple[int, int], zorder: float = 5
) -> None:
    """Write text at a distance of ``offset`` (in units of 1/72 inch) from ``position``: to the right of ``position`` if
    the horizontal offset is positive, or else to the left.
    """
    axes.annotate(
        text,
        position,
        xytext=offset,
        textcoords="offset points",
        fontsize=SMALL_FONT_POINTS,
        ha="left" if offset[0] > 0 else "right",
        va="bottom",
        zorder=zorder,
        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.7},
    )
