"""The figures of a sweep of products and of a find as data. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mamf.ceilings.ceiling import Ceiling
from mamf.choices import Quantity
from mamf.measurement import Measurement
from mamf.report.charts.chart import (
    Axis,
    Chart,
    Line,
    Panel,
    Point,
    chosen_regimes,
    drawn_rows,
    even_ticks,
    failures,
    labelled,
    machine,
    peak_of,
    point,
)


def sweep_chart(
    rows: Sequence[Measurement],
    header: Mapping[str, Any],
    regime: str | None = None,
    quantities: Sequence[Quantity] = ("tflops",),
) -> Chart:
    """A sweep against the dimension that varies, or by rank where several do; a line a regime."""
    regimes, measured = drawn_rows(rows, regime)
    axis, position, shape = _matmul_axis(measured)
    lines, notes = {}, []
    for name in regimes:
        best_first = sorted((row for row in measured if row.regime == name), key=lambda row: row.rank, reverse=True)
        best = best_first[0]
        notes.append(f"{name}: best {best.comparable_rate:.4g} TFLOPS ({best.best_by}) at {best.shape}")
        lines[name] = [(position(rank, row), row) for rank, row in enumerate(best_first, start=1)]

    def panel(quantity: Quantity) -> Panel:
        points = {name: [point(row, x, quantity) for x, row in lines[name]] for name in regimes}
        best = max((each[0] for each in points.values()), key=lambda each: each.y)
        drawn = tuple(Line(name, tuple(sorted(points[name], key=lambda each: each.x))) for name in regimes)
        is_rate = quantity == "tflops"
        peak = peak_of(measured[0].problem, header) if is_rate else None
        return Panel("", quantity, drawn, peak=peak, best=best if is_rate else None)

    grid = tuple((panel(quantity),) for quantity in quantities)
    title = f"matmul {shape} by {measured[0].kernel}, {measured[0].problem.dtype}"
    return Chart(
        title, machine(header), axis, grid, notes=(*notes, *failures(rows, [measured[0].kernel])), has_own_scales=True
    )


def _matmul_axis(
    rows: Sequence[Measurement],
) -> tuple[Axis, Callable[[int, Measurement], float], str]:
    """The axis, where a row of a rank lies on it, and what the shapes have in common."""
    varying = [name for name in "mnk" if len({getattr(row.shape, name) for row in rows}) > 1]
    shape = "x".join(name.upper() if name in varying else str(getattr(rows[0].shape, name)) for name in "mnk")
    is_cubic = all(row.shape.m == row.shape.n == row.shape.k for row in rows)
    if len(varying) > 1 and not is_cubic:
        count = len({row.shape for row in rows})
        return Axis("rank, best first"), lambda rank, row: rank, f"{count} shapes {shape}"
    name = varying[0] if varying else "m"
    sizes = sorted({getattr(row.shape, name) for row in rows})
    label = "M = N = K" if len(varying) > 1 else name.upper()
    steps = {second - first for first, second in itertools.pairwise(sizes)}
    if len(steps) == 1:
        axis = Axis(label, ticks=even_ticks(sizes))
    else:
        axis = Axis(label, True, labelled(sizes, lambda size: f"{size:.0f}"))
    return axis, lambda rank, row: float(getattr(row.shape, name)), shape


def find_chart(
    rows: Sequence[Measurement], ceilings: Mapping[str, Ceiling], header: Mapping[str, Any], regime: str | None = None
) -> Chart:
    """A find in the order it measured, a color per phase, a panel per regime."""
    regimes = chosen_regimes(rows, regime)
    found = {name: ceilings[name] for name in regimes if name in ceilings}
    peak = peak_of(rows[0].problem, header)
    panels = []
    for name in regimes:
        measured = [row for row in rows if row.ok and row.regime == name]
        phases: dict[str, list[Point]] = {}
        for number, row in enumerate(measured, start=1):
            phases.setdefault(row.phase, []).append(point(row, number, "tflops"))
        lines = tuple(Line(phase, tuple(points)) for phase, points in phases.items())
        panels.append(Panel(name, "tflops", lines, found[name].tflops if name in found else None, peak=peak))
    answers = ", ".join(f"{each.tflops:.4g} TFLOPS {name}" for name, each in found.items())
    notes = tuple(
        f"{name} ceiling: {each.tflops:.4g} TFLOPS at {each.shape} by {each.kernel}" for name, each in found.items()
    )
    title = f"The ceiling of {rows[0].problem.dtype}" + (f": {answers}" if answers else " was not confirmed")
    axis = Axis("measurement, in the order taken", is_shared=False)
    return Chart(title, machine(header), axis, (tuple(panels),), notes, is_connected=False, has_own_scales=True)
