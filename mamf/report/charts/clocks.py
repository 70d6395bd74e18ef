"""Draw a chart with a point for each row of a log. The horizontal axis is the clock of the device. The vertical axis is
the share of the clock cycles that the kernel used. The rate is proportional to the product of both, so curves in the
background connect points of equal TFLOPS.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mamf.errors import UsageError
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement, group_pairs
from mamf.operations.unknown import get_operation
from mamf.report.charts.lines import format_with_binary_prefix
from mamf.report.charts.logs import describe_machine_briefly
from mamf.report.charts.picture import (
    FILE_WIDTH_INCHES,
    SMALL_FONT_POINTS,
    TEXT_FONT_POINTS,
    TOOLTIPS_BY_ARTIST,
    DrawablePanel,
    LegendEntries,
    Picture,
    choose_styles,
    style_axes,
)
from mamf.report.document import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARGIN_MHZ, _MARGIN_CYCLES_PERCENT, _MARKER_SIZE_POINTS = 25.0, 6.0, 10
#: Possible places of a label relative to its marker, in order of preference: the offset to the right and upward in 1/72
#: inch, and whether the text is right-aligned.
_LABEL_PLACES = tuple((-8 if ends else 8, up, ends) for up in (-4, 9, -17, 22, -30) for ends in (False, True))
#: Approximate sizes: the width and the height of the axes as shares of the picture, and the width of a letter as a
#: multiple of the font size.
_AXES_WIDTH_SHARE, _AXES_HEIGHT_SHARE, _LETTER_WIDTH_FONT_SIZES = 0.94, 0.72, 0.6
#: Candidate rates in TFLOPS for lines of equal rate. Only lines that begin within the picture are drawn.
_EQUAL_RATE_TFLOPS = (50, 100, 200, 300, 400, 500, 600, 700, 800, 1000, 1200, 1500, 2000, 3000, 5000)


@dataclass(frozen=True)
class ClockPoint:
    """A point of the chart, for one row.

    - ``label``: a short name of the row's shape.
    - ``cycles_percent``: the share of the compute units' cycles that the kernel used, in percent.
    """

    kernel: str
    label: str
    clock_mhz: float
    cycles_percent: float
    tflops: float


@dataclass(frozen=True)
class ClockChart(Picture):
    """A chart with the clock on the horizontal axis and the share of used cycles on the vertical axis.

    ``tflops_per_mhz``: the TFLOPS that the device would reach at a clock of 1 MHz if all compute units used every
    cycle. The curves of equal TFLOPS are computed from this value.
    """

    points: tuple[ClockPoint, ...]
    tflops_per_mhz: float

    height_inches = 6.5

    def make_panel_rows(self) -> Sequence[Sequence[DrawablePanel | None]]:
        kernels = ", ".join(dict.fromkeys(point.kernel for point in self.points))
        return [
            [DrawablePanel(f"cycles used against clock: {kernels}", functools.partial(_draw_clock_chart, chart=self))]
        ]

    def make_legend(self) -> LegendEntries:
        return [
            (name, {**vars(style), "linestyle": "none"})
            for name, style in choose_styles(point.kernel for point in self.points).items()
        ]


def make_clock_chart(log: RunLog) -> ClockChart:
    """Draw the rows of a log whose clock was measured. Raises UsageError if there is no such row or if the rows have
    several dtypes.
    """
    # A search measures a shape several times. Draw the fastest of these rows.
    rows_by_key = group_pairs(
        ((row.regime, row.kernel, row.shape, row.problem), row)
        for row in log.measurements
        if row.ok and not row.is_reference
    )
    rows = [
        max(clocked, key=lambda row: row.best_rate)
        for group in rows_by_key.values()
        if (clocked := [row for row in group if row.conditions.used_cycle_share and row.conditions.true_clock_hz])
    ]
    dtypes = {row.problem.dtype for row in rows}
    if not rows:
        raise UsageError(f"{log.path} has no row with a measured clock: measure on an accelerator with --clock all")
    if len(dtypes) > 1:
        raise UsageError(f"{log.path} has several dtypes ({', '.join(sorted(dtypes))}): draw a log of one dtype")
    records = [{**get_operation(row.operation).make_problem_record(row.problem), "regime": row.regime} for row in rows]
    varying = [name for name in records[0] if len({str(each[name]) for each in records}) > 1]
    has_several_lengths = len({getattr(row.shape, "seqlen_k", None) for row in rows}) > 1
    points = tuple(
        _make_clock_point(row, has_several_lengths, [str(each[name]) for name in varying])
        for row, each in zip(rows, records, strict=True)
    )
    first, clockless_count = points[0], len(rows_by_key) - len(rows)
    return ClockChart(
        f"Cycles used and clock, {dtypes.pop()}",
        describe_machine_briefly(log.header),
        points,
        first.tflops / (first.cycles_percent / 100) / first.clock_mhz,
        notes=(
            "Gray lines: equal TFLOPS. The clock depends on the power that the kernel draws, and on the card.",
            *(
                [f"{format_count(clockless_count, 'more row')} without a measured clock (--clock all measures it)."]
                if clockless_count
                else []
            ),
        ),
    )


def _make_clock_point(row: Measurement, has_length: bool, field_texts: Sequence[str]) -> ClockPoint:
    """Return the point of a row.

    - ``has_length``: whether the label of attention has the length of the keys.
    - ``field_texts``: the values of the fields that differ between the problems of the rows.
    """
    conditions = row.conditions
    assert conditions.true_clock_hz is not None and conditions.used_cycle_share is not None, (
        "make_clock_chart selects rows with a measured clock"
    )
    # Label attention with its head dimension and mask, and other operations with the whole shape.
    is_attention = hasattr(row.shape, "causal")  # and not attention over a cache
    size = f"d{row.shape.head_dim}{'c' * row.shape.causal}" if is_attention else str(row.shape)
    length = [format_with_binary_prefix(row.shape.seqlen_k)] if is_attention and has_length else []
    return ClockPoint(
        row.kernel,
        " ".join([*length, size, *field_texts]),
        conditions.true_clock_hz / 1e6,
        100 * conditions.used_cycle_share,
        row.best_rate,
    )


def _draw_clock_chart(axes: Axes, chart: ClockChart) -> None:
    style_axes(axes)
    clocks, cycles = [point.clock_mhz for point in chart.points], [point.cycles_percent for point in chart.points]
    # The labels are often to the right of their markers.
    left, right = min(clocks) - 2 * _MARGIN_MHZ, max(clocks) + 2 * _MARGIN_MHZ + 0.1 * (max(clocks) - min(clocks))
    low, high = max(0.0, min(cycles) - _MARGIN_CYCLES_PERCENT), min(105.0, max(cycles) + _MARGIN_CYCLES_PERCENT)
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)
    axes.set_xlabel("clock during the launch (MHz)", fontsize=TEXT_FONT_POINTS)
    axes.set_ylabel("cycles used (%)", fontsize=TEXT_FONT_POINTS)
    for tflops in _EQUAL_RATE_TFLOPS:
        ends = [100 * tflops / (chart.tflops_per_mhz * mhz) for mhz in (left, right)]
        if low < ends[0] < high:
            axes.plot((left, right), ends, color="#bbbbbb", linewidth=1, zorder=1)
            axes.annotate(
                f"{tflops} TFLOPS", (left, ends[0]), (6, 4), textcoords="offset points", fontsize=SMALL_FONT_POINTS
            )
    styles = choose_styles(point.kernel for point in chart.points)
    points_per_mhz = 72 * FILE_WIDTH_INCHES * _AXES_WIDTH_SHARE / (right - left)
    points_per_percent = 72 * chart.height_inches * _AXES_HEIGHT_SHARE / (high - low)
    places = _choose_label_places(
        [(point.clock_mhz * points_per_mhz, point.cycles_percent * points_per_percent) for point in chart.points],
        [len(point.label) * _LETTER_WIDTH_FONT_SIZES * SMALL_FONT_POINTS for point in chart.points],
    )
    for point, (x, y, ends_there) in zip(chart.points, places, strict=True):
        marker_style: dict[str, Any] = {
            "markersize": _MARKER_SIZE_POINTS,
            "markeredgecolor": "white",
            "linestyle": "none",
            "zorder": 4,
        }
        (drawn,) = axes.plot(point.clock_mhz, point.cycles_percent, **vars(styles[point.kernel]), **marker_style)
        TOOLTIPS_BY_ARTIST[drawn] = [f"{point.kernel}, {point.label}: {point.tflops:.4g} TFLOPS"]
        axes.annotate(
            point.label,
            (point.clock_mhz, point.cycles_percent),
            (x, y),
            textcoords="offset points",
            fontsize=SMALL_FONT_POINTS,
            horizontalalignment="right" if ends_there else "left",
        )


def _choose_label_places(
    centers: Sequence[tuple[float, float]], label_widths: Sequence[float]
) -> Iterator[tuple[float, float, bool]]:
    """Choose a place from ``_LABEL_PLACES`` for the label of each marker: the place where the label covers the fewest
    markers and earlier labels. If several places are equally good, choose the first of them.

    ``centers``: the positions of the markers. ``label_widths``: the widths of the labels. Both are in units of
    1/72 inch.
    """
    from matplotlib.transforms import Bbox

    half = _MARKER_SIZE_POINTS / 2
    occupied = [Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in centers]
    for (x, y), width in zip(centers, label_widths, strict=True):
        boxes = {
            (right, up, ends): Bbox.from_bounds(x + right - width * ends, y + up, width, SMALL_FONT_POINTS)
            for right, up, ends in _LABEL_PLACES
        }
        place = min(boxes, key=lambda each: boxes[each].count_overlaps(occupied))
        occupied.append(boxes[place])
        yield place
