"""Kernels of any operation: rate against the operation's own axis, a panel a problem, a colour a kernel. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mamf.choices import Quantity
from mamf.measurement import Measurement
from mamf.operations.unknown import operation_called
from mamf.report.charts.chart import (
    Axis,
    Chart,
    Line,
    Panel,
    Point,
    chosen_regimes,
    failures,
    in_kibi,
    labelled,
    machine,
    point,
)

Position = Callable[[Measurement], float]


def kernels_chart(
    rows: Sequence[Measurement],
    header: Mapping[str, Any],
    regime: str | None = None,
    quantities: Sequence[Quantity] = ("tflops",),
) -> Chart:
    """A run of kernels; where several shapes lie at one place of the axis, the best of them."""
    regimes = chosen_regimes(rows, regime)
    measured = [row for row in rows if row.ok and not row.is_reference and row.regime in regimes]
    problems = list(dict.fromkeys(row.problem for row in measured))
    titles = {problem: differing_fields(problem, problems) for problem in problems}
    axis, position = _axis(measured)
    grid = tuple(
        tuple(
            _panel(
                [row for row in measured if row.problem == problem], differing_fields(problem, problems), position, each
            )
            for each in quantities
        )
        for problem, title in titles.items()
    )
    name, kernels = measured[0].operation, dict.fromkeys(row.kernel for row in rows)
    return Chart(f"{name}, {', '.join(regimes)}", machine(header), axis, grid, tuple(failures(rows, kernels)))


def _panel(rows: Sequence[Measurement], title: str, position: Position, quantity: Quantity) -> Panel:
    several = len({row.regime for row in rows}) > 1
    lines: dict[str, dict[float, Measurement]] = {}
    for row in sorted(rows, key=lambda row: row.rank):
        name = f"{row.kernel} ({row.regime})" if several else row.kernel
        lines.setdefault(name, {})[position(row)] = row

    def points(best: Mapping[float, Measurement]) -> tuple[Point, ...]:
        return tuple(point(best[x], x, quantity) for x in sorted(best))

    return Panel(
        title, quantity, tuple(Line(name, points(best)) for name, best in lines.items()), unit=rows[0].work.unit
    )


def _axis(rows: Sequence[Measurement]) -> tuple[Axis, Position]:
    """The operation's axis; shapes in log order if it has no axis or is not installed."""
    of = operation_called(rows[0].operation)
    try:
        at = {row.shape: float(of.axis(row.shape)) for row in rows}
    except NotImplementedError:
        at = {shape: float(number) for number, shape in enumerate(dict.fromkeys(row.shape for row in rows), start=1)}
        by_number = {number: str(shape) for shape, number in at.items()}
        ticks = labelled(by_number, lambda number: by_number[number], is_log=False)
        return Axis("shape", ticks=ticks), lambda row: at[row.shape]
    is_log = min(at.values()) > 0
    return Axis(of.axis_label, is_log, labelled(at.values(), in_kibi, is_log=is_log)), lambda row: at[row.shape]


def differing_fields(problem: Any, problems: Sequence[Any]) -> str:
    """The fields that set a problem apart from the others."""
    of = operation_called(problem.operation)
    records = [of.problem_record(each) for each in problems]
    own = of.problem_record(problem)
    return ", ".join(f"{name} {own[name]}" for name in own if any(each.get(name) != own[name] for each in records))
