"""Kernels of any operation: rate against the operation's axis, a panel per problem and regime, a color per kernel."""

from __future__ import annotations

import itertools
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
    drawn_rows,
    failures,
    in_giga,
    in_kibi,
    labelled,
    machine,
    merge_lines,
    peak_of,
    point,
)

Position = Callable[[Measurement], float]
#: The axis label of work, which is counted in thousands and not in multiples of 1024.
_FLOP = "FLOP"


def kernels_chart(
    rows: Sequence[Measurement],
    header: Mapping[str, Any],
    regime: str | None = None,
    quantities: Sequence[Quantity] = ("tflops",),
) -> Chart:
    """A run of kernels; where several shapes lie at one place of the axis, the best of them."""
    regimes, measured = drawn_rows(rows, regime)
    problems = list(dict.fromkeys(row.problem for row in measured))
    axis, position = _axis(measured)
    peaks = {problem: peak_of(problem, header) for problem in problems}

    def panel(problem: Any, of: str, quantity: Quantity) -> Panel | None:
        shown = [row for row in measured if (row.problem, row.regime) == (problem, of)]
        title = ", ".join(filter(None, (differing_fields(problem, problems), of if len(regimes) > 1 else "")))
        return _panel(shown, title, position, quantity, peaks[problem]) if shown else None

    columns = list(itertools.product(quantities, regimes))
    grid = [[panel(problem, of, quantity) for quantity, of in columns] for problem in problems]
    name, kernels = measured[0].operation, dict.fromkeys(row.kernel for row in rows)
    return Chart(
        f"{name}, {', '.join(regimes)}",
        machine(header),
        axis,
        merge_lines(grid),
        tuple(failures(rows, kernels)),
    )


def _panel(
    rows: Sequence[Measurement], title: str, position: Position, quantity: Quantity, peak: float | None
) -> Panel:
    lines: dict[str, dict[float, Measurement]] = {}
    for row in sorted(rows, key=lambda row: row.rank):
        lines.setdefault(row.kernel, {})[position(row)] = row

    drawn = tuple(Line(name, tuple(point(best[x], x, quantity) for x in sorted(best))) for name, best in lines.items())
    return Panel(title, quantity, drawn, unit=rows[0].work.unit, peak=peak if quantity == "tflops" else None)


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
    text = in_giga if of.axis_label == _FLOP else in_kibi
    return Axis(of.axis_label, is_log, labelled(at.values(), text, is_log=is_log)), lambda row: at[row.shape]


def differing_fields(problem: Any, problems: Sequence[Any]) -> str:
    """The fields that set a problem apart from the others."""
    of = operation_called(problem.operation)
    records = [of.problem_record(each) for each in problems]
    own = of.problem_record(problem)
    return ", ".join(f"{name} {own[name]}" for name in own if any(each.get(name) != own[name] for each in records))
