"""Cycles as bars: one group per shape, one color per kernel. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mamf.errors import UsageError
from mamf.measurement import Measurement
from mamf.operations.unknown import operation_called
from mamf.profiling.counters.counts import Counts
from mamf.profiling.counters.log import Counted
from mamf.report.charts.chart import Axis, Chart, Line, Panel, Point, failures, machine

#: Width of a group of bars, as a share of the distance to the next group.
_WIDTH_OF_GROUP = 0.8


def counters_chart(rows: Sequence[Measurement], counted: Counted, header: Mapping[str, Any]) -> Chart:
    """Raises UsageError if no cycles were counted."""
    counts = [each for each in counted.counts if each.cycles]
    if not counts:
        raise UsageError("nothing to draw: no cycles were counted")
    groups = list(dict.fromkeys((each.problem, each.shape) for each in counts))
    kernels = list(dict.fromkeys(each.kernel for each in counts))
    width = _WIDTH_OF_GROUP / len(kernels)

    def bar(each: Counts) -> Point:
        aside = (kernels.index(each.kernel) - (len(kernels) - 1) / 2) * width
        interval, cycles = each.interval, each.median_cycles
        assert interval is not None and cycles is not None, "only what has cycles is drawn"
        return Point(groups.index((each.problem, each.shape)) + aside, cycles, interval.low, interval.high)

    lines = tuple(Line(name, tuple(bar(each) for each in counts if each.kernel == name)) for name in kernels)
    several = len({problem for problem, _ in groups}) > 1
    labels = [f"{shape} {_words(problem)}" if several else str(shape) for problem, shape in groups]
    axis = Axis("", ticks=tuple((float(place), label) for place, label in enumerate(labels)))
    first = groups[0][0]
    title = f"Cycles of a launch: {first.operation}" + ("" if several else f", {_words(first)}")
    grid = ((Panel("", "tflops", lines, unit="cycles"),),)
    return Chart(
        title, machine(header), axis, grid, tuple(failures(rows, kernels)), is_connected=False, bar_width=width
    )


def _words(problem: Any) -> str:
    return ", ".join([problem.dtype, *operation_called(problem.operation).words(problem)])
