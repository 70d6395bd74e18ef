"""Represent two kinds of charts as data, and draw them with matplotlib. A StackedChart has stacked bars. A RangeChart
has rows with values and their intervals.
"""

from __future__ import annotations

import functools
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mamf.measurement import group_pairs
from mamf.report.charts.picture import (
    PANEL_WIDTH_INCHES,
    PEAK_LINE_STYLE,
    SMALL_FONT_POINTS,
    TEXT_FONT_POINTS,
    TOOLTIPS_BY_ARTIST,
    DrawablePanel,
    LegendEntries,
    Picture,
    choose_styles,
    compute_panel_width_share,
    style_axes,
)
from mamf.report.document import format_four_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Layout of image files: the height of a panel, and the maximum number of panels in a row.
_FILE_PANEL_HEIGHT_INCHES, _MAX_PANELS_ACROSS = 5.2, 4
# Heights on a web page: a bar, the space below a bar, one line of the label above a bar, and everything except the bars
# and their labels.
_PAGE_BAR_INCHES, _PAGE_GAP_INCHES, _PAGE_LINE_INCHES, _PAGE_FRAME_INCHES = 0.3, 0.12, 0.21, 1.2
# Maximum number of characters in one line of a label on a web page.
_MAX_PAGE_LABEL_CHARACTERS = 60
# Height of the vertical axis, as a multiple of the height of the highest bar or interval.
_AXIS_HEIGHT_FACTOR = 1.12
# A part of a bar shows its value only if the part is at least this high: in image files as a share of the axis, and on
# web pages as a share of the highest bar.
_MIN_LABELED_PART_SHARE, _MIN_LABELED_PAGE_PART_SHARE = 0.045, 0.1
_FAINT_OPACITY = 0.3
# Labels below the bars are wrapped, so that the labels of all bars side by side have at most
# _MAX_CHARACTERS_OF_ALL_LABELS characters across an image file. But a line of a label has at least
# _MIN_LABEL_LINE_CHARACTERS characters.
_MAX_CHARACTERS_OF_ALL_LABELS, _MIN_LABEL_LINE_CHARACTERS = 110, 10


@dataclass(frozen=True)
class StackedBar:
    """A bar of stacked parts.

    - ``label``: the text below the bar.
    - ``parts``: name and height of each part, from the bottom to the top.
    - ``note``: the text above the bar; if empty, the height of the bar.
    - ``interval``: lower and upper end of an error bar; None for no error bar.
    """

    label: str
    parts: tuple[tuple[str, float], ...]
    note: str = ""
    interval: tuple[float, float] | None = None

    @property
    def height(self) -> float:
        return sum(height for _, height in self.parts)


@dataclass(frozen=True)
class StackedPanel:
    title: str
    bars: tuple[StackedBar, ...]


@dataclass(frozen=True)
class StackedChart(Picture):
    """A chart with panels of stacked bars.

    - ``unit``: the unit of the heights.
    - ``axis_label``: the label of the horizontal axis, which says what the labels of the bars are.
    - ``faint_part_names``: the names of parts that are drawn in a pale color.
    """

    unit: str
    axis_label: str
    panels: tuple[StackedPanel, ...]
    faint_part_names: tuple[str, ...] = ()

    @property
    def part_names(self) -> list[str]:
        """The distinct names of the parts of all bars, in order of appearance."""
        return list(dict.fromkeys(name for panel in self.panels for bar in panel.bars for name, _ in bar.parts))

    @property
    def max_height(self) -> float:
        """The height of the highest bar or interval in all panels."""
        return max(max(bar.height, *(bar.interval or (0.0,))) for panel in self.panels for bar in panel.bars)

    @property
    def height_inches(self) -> float:
        return _FILE_PANEL_HEIGHT_INCHES * len(self.make_panel_rows())

    def make_panel_rows(self) -> list[list[DrawablePanel | None]]:
        drawn_panels: list[DrawablePanel | None] = [self._make_drawable_panel(panel) for panel in self.panels]
        min_panel_characters = _MIN_LABEL_LINE_CHARACTERS * max(len(panel.bars) for panel in self.panels)
        max_columns = min(_MAX_PANELS_ACROSS, _MAX_CHARACTERS_OF_ALL_LABELS // min_panel_characters or 1)
        columns = -(-len(drawn_panels) // -(-len(drawn_panels) // max_columns))
        drawn_panels += [None] * (-len(drawn_panels) % columns)
        return [drawn_panels[start : start + columns] for start in range(0, len(drawn_panels), columns)]

    def _make_drawable_panel(self, panel: StackedPanel) -> DrawablePanel:
        description = "; ".join(f"{bar.label}: {format_four_digits(bar.height)} {self.unit}" for bar in panel.bars)
        line_count = sum(len(self.wrap_page_label(bar)) for bar in panel.bars)
        bars_inches = len(panel.bars) * (_PAGE_BAR_INCHES + _PAGE_GAP_INCHES) + line_count * _PAGE_LINE_INCHES
        return DrawablePanel(
            description,
            functools.partial(_draw_bars, panel=panel, chart=self),
            self.unit,
            (PANEL_WIDTH_INCHES, bars_inches + _PAGE_FRAME_INCHES),
            max(len(panel.bars), 2),
            keeps_own_labels=True,
            draw_on_page=functools.partial(_draw_page_bars, panel=panel, chart=self),
        )

    def wrap_page_label(self, bar: StackedBar) -> list[str]:
        """Return the lines of the label above a bar on a web page. The label ends with the note of the bar, or with its
        height if it has no note.
        """
        label = f"{self.axis_label} {bar.label}: {bar.note or format_four_digits(bar.height)}".lstrip()
        return textwrap.wrap(label, _MAX_PAGE_LABEL_CHARACTERS)

    def get_part_color_and_opacity(self, name: str) -> tuple[str, float]:
        """Return the color and opacity of all parts that are called ``name``."""
        return choose_styles(self.part_names)[name].color, _FAINT_OPACITY if name in self.faint_part_names else 1.0

    def make_legend(self) -> LegendEntries:
        colors = ((name, *self.get_part_color_and_opacity(name)) for name in self.part_names)
        return [
            (name, {"linewidth": 0, "marker": "s", "markersize": 9, "color": color, "alpha": alpha})
            for name, color, alpha in colors
        ]


def _draw_bars(axes: Axes, panel: StackedPanel, chart: StackedChart) -> None:
    style_axes(axes, panel.title, grid="y")
    top = _AXIS_HEIGHT_FACTOR * chart.max_height
    axes.set_ylim(0, top)
    axes.set_xlim(-0.6, max(len(panel.bars), 2) - 0.4)
    axes.set_xlabel(chart.axis_label, fontsize=TEXT_FONT_POINTS)
    axes.set_ylabel(chart.unit, fontsize=TEXT_FONT_POINTS)
    for x, bar in enumerate(panel.bars):
        _draw_bar(axes, x, bar, chart, top)
    line_characters = max(
        _MIN_LABEL_LINE_CHARACTERS,
        int(_MAX_CHARACTERS_OF_ALL_LABELS * compute_panel_width_share(axes)) // len(panel.bars),
    )
    # A number stays on one line with its percent sign and the word that follows.
    axes.set_xticks(
        range(len(panel.bars)),
        labels=[textwrap.fill(bar.label.replace(" % ", "\u00a0%\u00a0"), line_characters) for bar in panel.bars],
    )


def _draw_bar(axes: Axes, x: int, bar: StackedBar, chart: StackedChart, top: float) -> None:
    _draw_parts(axes, x, bar, chart, _MIN_LABELED_PART_SHARE * top)
    end = max(bar.height, bar.interval[1] if bar.interval else 0.0)
    axes.text(
        x,
        end + 0.01 * top,
        bar.note or format_four_digits(bar.height),
        fontsize=SMALL_FONT_POINTS,
        ha="center",
        va="bottom",
    )
    if bar.interval is not None:
        axes.plot([x, x], bar.interval, color="black", linewidth=1.5)


def _draw_page_bars(axes: Axes, panel: StackedPanel, chart: StackedChart) -> None:
    """Draw horizontal bars from top to bottom, each below its label. A chart with many bars becomes tall, but it still
    fits the width of a phone.

    Positions on the vertical axis are in inches.
    """
    style_axes(axes, panel.title, grid="x")
    axes.set_xlim(0, 1.02 * chart.max_height)
    axes.set_xlabel(chart.unit, fontsize=TEXT_FONT_POINTS)
    axes.set_yticks([])
    y = _PAGE_GAP_INCHES / 2
    for bar in panel.bars:
        lines = chart.wrap_page_label(bar)
        y += len(lines) * _PAGE_LINE_INCHES
        axes.text(0, y, "\n".join(lines), fontsize=SMALL_FONT_POINTS, va="bottom")
        y += _PAGE_BAR_INCHES / 2
        _draw_parts(axes, y, bar, chart, _MIN_LABELED_PAGE_PART_SHARE * chart.max_height, is_horizontal=True)
        if bar.interval is not None:
            axes.plot(bar.interval, [y, y], color="black", linewidth=1.5)
        y += _PAGE_BAR_INCHES / 2 + _PAGE_GAP_INCHES
    axes.set_ylim(y, 0)


def _draw_parts(
    axes: Axes,
    place: float,
    bar: StackedBar,
    chart: StackedChart,
    min_labeled_height: float,
    is_horizontal: bool = False,
) -> None:
    """Draw the parts of one bar. ``place``: the position of the bar on the axis along which the bars are lined up. A
    part shows its height if it is above ``min_labeled_height``. If a bar has only one part and its label already states
    the height, the part does not show it.
    """
    bottom = 0.0
    for name, height in bar.parts:
        color, alpha = chart.get_part_color_and_opacity(name)
        bar_style: dict[str, Any] = {"color": color, "alpha": alpha, "edgecolor": "white", "linewidth": 0.7}
        if is_horizontal:
            (drawn,) = axes.barh(place, height, _PAGE_BAR_INCHES, left=bottom, **bar_style)
        else:
            (drawn,) = axes.bar(place, height, 0.7, bottom=bottom, **bar_style)
        share = f" ({100 * height / bar.height:.1f} %)" if len(bar.parts) > 1 and bar.height else ""
        TOOLTIPS_BY_ARTIST[drawn] = [f"{bar.label}, {name}: {format_four_digits(height)} {chart.unit}{share}"]
        if height > min_labeled_height and (len(bar.parts) > 1 or bar.note):
            ink, middle = "white" if alpha == 1 else "#222222", bottom + height / 2
            x, y = (middle, place) if is_horizontal else (place, middle)
            axes.text(x, y, format_four_digits(height), fontsize=SMALL_FONT_POINTS, color=ink, ha="center", va="center")
        bottom += height


# -- RangeChart: values in rows, with intervals ------------------------------------------------------------------------

_RANGE_ROW_INCHES, _SPACE_BELOW_ROWS_INCHES = 0.26, 0.9
_MAX_NAME_CHARACTERS = 34


@dataclass(frozen=True)
class RangePoint:
    """A value with its interval from ``low`` to ``high``.

    ``tooltip``: what the tooltip of the point says besides the value, such as card and date.
    """

    value: float
    low: float
    high: float
    tooltip: str = ""


@dataclass(frozen=True)
class RangeRow:
    """A row of a RangeChart: a name at the left and points on the common axis.

    - ``group``: the heading above this row and the next rows with the same heading.
    - ``peak``: the peak of the datasheet, drawn as a tick; None for no tick.
    - ``style_name``: the name that decides the color; if empty, ``name`` decides it.
    """

    group: str
    name: str
    points: tuple[RangePoint, ...]
    peak: float | None = None
    style_name: str = ""

    @property
    def style_key(self) -> str:
        return self.style_name or self.name


@dataclass(frozen=True)
class RangeChart(Picture):
    """A chart that has a row for each name, with one or more points in the row.

    - ``unit``: the unit of all values.
    - ``has_bars``: whether each value is drawn as a bar that begins at 0, with the value as text at its end.
    """

    unit: str
    rows: tuple[RangeRow, ...]
    has_bars: bool = False

    @property
    def height_inches(self) -> float:
        heading_lines = sum(len(self.wrap_heading(group)) for group in {row.group for row in self.rows})
        return _RANGE_ROW_INCHES * (len(self.rows) + heading_lines) + _SPACE_BELOW_ROWS_INCHES

    def wrap_heading(self, group: str) -> list[str]:
        """Wrap the heading of a group of rows, and return its lines. The row names to the left of the heading take some
        of the width, so longer names make the lines shorter.
        """
        name_characters = min(_MAX_NAME_CHARACTERS, max(len(row.name) for row in self.rows))
        return textwrap.wrap(group, _MAX_PAGE_LABEL_CHARACTERS - name_characters)

    def make_panel_rows(self) -> list[list[DrawablePanel]]:
        return [
            [
                DrawablePanel(
                    f"{self.title}, {self.unit}",
                    functools.partial(_draw_ranges, chart=self),
                    size_inches=(PANEL_WIDTH_INCHES, self.height_inches),
                )
            ]
        ]

    def make_legend(self) -> LegendEntries:
        styles = choose_styles(row.style_key for row in self.rows)
        names = dict.fromkeys(row.style_key for row in self.rows)
        return [
            (
                name,
                {"linewidth": 0, "markersize": 7, **vars(styles[name]), **({"marker": "s"} if self.has_bars else {})},
            )
            for name in names
        ]


def _draw_ranges(axes: Axes, chart: RangeChart) -> None:
    """Draw the rows of a RangeChart from top to bottom, each group of rows below its heading."""
    style_axes(axes, grid="x")
    styles, names, y = choose_styles(row.style_key for row in chart.rows), {}, -1
    for group, rows in group_pairs((row.group, row) for row in chart.rows).items():
        lines = chart.wrap_heading(group)
        y += len(lines)
        axes.text(
            0.005,
            y - (len(lines) - 1) / 2,
            "\n".join(lines),
            fontsize=SMALL_FONT_POINTS,
            weight="bold",
            va="center",
            transform=axes.get_yaxis_transform(),
        )
        for row in rows:
            y += 1
            # Names of logs differ at their ends.
            names[y] = row.name if len(row.name) <= _MAX_NAME_CHARACTERS else f"{row.name[:14]}...{row.name[-17:]}"
            _draw_range_row(axes, row, y, chart, vars(styles[row.style_key]))
    axes.set_yticks(list(names), labels=list(names.values()))
    axes.set_ylim(y + 0.6, -0.6)
    axes.locator_params(axis="x", nbins=7)
    axes.set_xlabel(chart.unit, fontsize=TEXT_FONT_POINTS)
    ends = [end for row in chart.rows for point in row.points for end in (point.low, point.high)]
    if chart.has_bars or min(ends) < max(ends) / 2:
        axes.set_xlim(0, _AXIS_HEIGHT_FACTOR * max(ends) if chart.has_bars else None)


def _draw_range_row(axes: Axes, row: RangeRow, y: int, chart: RangeChart, style: dict[str, str]) -> None:
    values, ys = [point.value for point in row.points], [y] * len(row.points)
    lines_color = "black" if chart.has_bars else style["color"]
    axes.hlines(ys, [point.low for point in row.points], [point.high for point in row.points], lines_color)
    if chart.has_bars:
        axes.barh(ys, values, 0.8, color=style["color"])
        for point in row.points:
            axes.annotate(f"{point.value:.1f}", (point.high, y), (5, 0), textcoords="offset points", va="center")
    marker_style: dict[str, Any] = style | {"marker": "none"} if chart.has_bars else style
    (drawn,) = axes.plot(values, ys, **marker_style, linestyle="none", markersize=7, markeredgecolor="white")
    TOOLTIPS_BY_ARTIST[drawn] = [
        f"{row.name}: {format_four_digits(point.value)} {chart.unit} {point.tooltip}" for point in row.points
    ]
    if row.peak is not None:
        axes.plot([row.peak] * 2, [y - 0.4, y + 0.4], **PEAK_LINE_STYLE)
