"""Draw the share of cycles that each row's kernel used against the clock of the device, with lines of equal TFLOPS,
because the rate is the product of cycles used and clock.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mamf.errors import UsageError
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.operations.unknown import get_operation
from mamf.report.charts.logs import describe_machine_briefly
from mamf.report.charts.picture import (
    SMALL_FONT_POINTS,
    TEXT_FONT_POINTS,
    TOOLTIPS,
    DrawnPanel,
    LegendEntries,
    Picture,
    choose_styles,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARGIN_MHZ, _MARGIN_CYCLES_PERCENT, _MARKER_SIZE_POINTS = 25.0, 6.0, 10
#: Candidate rates in TFLOPS for lines of equal rate. Only lines that begin within the picture are drawn.
_EQUAL_RATE_TFLOPS = (50, 100, 200, 300, 400, 500, 600, 700, 800, 1000, 1200, 1500, 2000, 3000, 5000)


@dataclass(frozen=True)
class ClockPoint:
    """A point of the chart, which stands for a row: the share of the compute units' cycles that its kernel used in
    percent, the clock in MHz, and the rate in TFLOPS. ``label``: a short name of the row's shape.
    """

    kernel: str
    label: str
    clock_mhz: float
    cycles_percent: float
    tflops: float


@dataclass(frozen=True)
class ClockChart(Picture):
    """A chart of cycles used against clock. ``tflops_per_mhz``: the rate of all compute units for each MHz if they use
    every cycle, which places the lines of equal TFLOPS.
    """

    points: tuple[ClockPoint, ...]
    tflops_per_mhz: float

    height_inches = 6.5

    def make_panel_rows(self) -> Sequence[Sequence[DrawnPanel | None]]:
        kernels = ", ".join(dict.fromkeys(mark.kernel for mark in self.points))
        return [[DrawnPanel(f"cycles used against clock: {kernels}", functools.partial(_draw_clock_chart, chart=self))]]

    def make_legend(self) -> LegendEntries:
        return [
            (name, {**vars(style), "linestyle": "none"})
            for name, style in choose_styles(mark.kernel for mark in self.points).items()
        ]


def make_clock_chart(log: RunLog) -> ClockChart:
    """Draw the rows of a log whose clock was measured. Raises UsageError if there is no such row or if the rows have
    several dtypes.
    """
    measured = (row for row in log.measurements if row.ok and not row.is_reference)
    rows = [row for row in measured if row.conditions.cycles_used and row.conditions.true_clock_hz]
    dtypes = {row.problem.dtype for row in rows}
    if not rows:
        raise UsageError(f"{log.path} has no row with a measured clock: measure on an accelerator with --clock all")
    if len(dtypes) > 1:
        raise UsageError(f"{log.path} has several dtypes ({', '.join(sorted(dtypes))}): draw a log of one dtype")
    fields = [get_operation(row.operation).make_problem_record(row.problem) for row in rows]
    varying = [name for name in fields[0] if len({str(each[name]) for each in fields}) > 1]
    marks = tuple(
        _make_clock_point(row, [str(each[name]) for name in varying]) for row, each in zip(rows, fields, strict=True)
    )
    first = marks[0]
    return ClockChart(
        f"Cycles used and clock, {dtypes.pop()}",
        describe_machine_briefly(log.header),
        marks,
        first.tflops / (first.cycles_percent / 100) / first.clock_mhz,
        notes=("grey: lines of equal TFLOPS. Cycles depend on the kernel, the clock on the card and the energy.",),
    )


def _make_clock_point(row: Measurement, words: Sequence[str]) -> ClockPoint:
    """Make the point of a row. ``words``: the values of the fields in which the problems of the rows differ."""
    conditions = row.conditions
    assert conditions.true_clock_hz is not None and conditions.cycles_used is not None, (
        "make_clock_chart selects rows with a measured clock"
    )
    # The head dimension identifies the shape of attention.
    size = f"d{row.shape.head_dim}" if hasattr(row.shape, "head_dim") else str(row.shape)
    return ClockPoint(
        row.kernel,
        " ".join([size, *words]),
        conditions.true_clock_hz / 1e6,
        100 * conditions.cycles_used,
        row.best_rate,
    )


def _draw_clock_chart(axes: Axes, chart: ClockChart) -> None:
    style_axes(axes)
    clocks, cycles = [mark.clock_mhz for mark in chart.points], [mark.cycles_percent for mark in chart.points]
    left, right = min(clocks) - 2 * _MARGIN_MHZ, max(clocks) + _MARGIN_MHZ
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
    styles = choose_styles(mark.kernel for mark in chart.points)
    for mark in chart.points:
        marker_style: dict[str, Any] = {
            "markersize": _MARKER_SIZE_POINTS,
            "markeredgecolor": "white",
            "linestyle": "none",
            "zorder": 4,
        }
        (drawn,) = axes.plot(mark.clock_mhz, mark.cycles_percent, **vars(styles[mark.kernel]), **marker_style)
        TOOLTIPS[drawn] = [f"{mark.kernel}, {mark.label}: {mark.tflops:.4g} TFLOPS"]
        axes.annotate(
            mark.label,
            (mark.clock_mhz, mark.cycles_percent),
            (8, -4),
            textcoords="offset points",
            fontsize=SMALL_FONT_POINTS,
        )
