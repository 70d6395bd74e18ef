"""The figures of a sweep of products, of a find and of kernels of any operation as data. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mamf.ceilings.ceiling import Ceiling
from mamf.measurement import Measurement, group_pairs
from mamf.operations.unknown import operation_called
from mamf.report.charts.lines import Axis, Chart, Line, Panel, even_ticks, in_giga, in_kibi, labelled
from mamf.report.charts.measured import chosen_regimes, drawn_rows, failures, machine, peak_of, point


def sweep_chart(
    rows: Sequence[Measurement],
    header: Mapping[str, Any],
    regime: str | None = None,
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

    points = {name: [point(row, x) for x, row in lines[name]] for name in regimes}
    best_point = max((each[0] for each in points.values()), key=lambda each: each.y)
    drawn = tuple(Line(name, tuple(sorted(points[name], key=lambda each: each.x))) for name in regimes)
    panel = Panel("", drawn, peak=peak_of(measured[0].problem, header), best=best_point)
    title = f"matmul {shape} by {measured[0].kernel}, {measured[0].problem.dtype}"
    return Chart(
        title,
        machine(header),
        axis,
        ((panel,),),
        notes=(*notes, *failures(rows, [measured[0].kernel])),
        has_own_scales=True,
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
        numbered = enumerate([row for row in rows if row.ok and row.regime == name], start=1)
        phases = group_pairs((row.phase, point(row, number)) for number, row in numbered)
        lines = tuple(Line(phase, tuple(points)) for phase, points in phases.items())
        panels.append(Panel(name, lines, found[name].tflops if name in found else None, peak=peak))
    answers = ", ".join(f"{each.tflops:.4g} TFLOPS {name}" for name, each in found.items())
    notes = tuple(
        f"{name} ceiling: {each.tflops:.4g} TFLOPS at {each.shape} by {each.kernel}" for name, each in found.items()
    )
    title = f"The ceiling of {rows[0].problem.dtype}" + (f": {answers}" if answers else " was not confirmed")
    axis = Axis("measurement, in the order taken", is_shared=False)
    return Chart(title, machine(header), axis, (tuple(panels),), False, has_own_scales=True, notes=notes)


# -- kernels of any operation ------------------------------------------------------------------------------------------


Position = Callable[[Measurement], float]
#: The axis label of work, which is counted in thousands and not in multiples of 1024.
_FLOP = "FLOP"


def kernels_chart(
    rows: Sequence[Measurement],
    header: Mapping[str, Any],
    regime: str | None = None,
) -> Chart:
    """A run of kernels; where several shapes lie at one place of the axis, the best of them."""
    regimes, measured = drawn_rows(rows, regime)
    problems = list(dict.fromkeys(row.problem for row in measured))
    axis, position = _axis(measured)
    peaks = {problem: peak_of(problem, header) for problem in problems}

    def panel(problem: Any, of: str) -> Panel | None:
        shown = [row for row in measured if (row.problem, row.regime) == (problem, of)]
        title = ", ".join(filter(None, (differing_fields(problem, problems), of if len(regimes) > 1 else "")))
        return _panel(shown, title, position, peaks[problem]) if shown else None

    grid = tuple(tuple(panel(problem, of) for of in regimes) for problem in problems)
    name, kernels = measured[0].operation, dict.fromkeys(row.kernel for row in rows)
    return Chart(
        f"{name}, {', '.join(regimes)}",
        machine(header),
        axis,
        grid,
        notes=tuple(failures(rows, kernels)),
    )


def _panel(rows: Sequence[Measurement], title: str, position: Position, peak: float | None) -> Panel:
    lines: dict[str, dict[float, Measurement]] = {}
    for row in sorted(rows, key=lambda row: row.rank):
        lines.setdefault(row.kernel, {})[position(row)] = row

    drawn = tuple(Line(name, tuple(point(best[x], x) for x in sorted(best))) for name, best in lines.items())
    return Panel(title, drawn, unit=rows[0].work.unit, peak=peak)


def _axis(rows: Sequence[Measurement]) -> tuple[Axis, Position]:
    """The operation's axis; shapes in log order if it has no axis or is not installed."""
    of = operation_called(rows[0].operation)
    try:
        at = {row.shape: float(of.axis(row.shape)) for row in rows}
    except NotImplementedError:
        at = {shape: float(number) for number, shape in enumerate(dict.fromkeys(row.shape for row in rows), start=1)}
        by_number = {number: str(shape) for shape, number in at.items()}
        ticks = labelled(by_number, lambda number: by_number[number])
        return Axis("shape", ticks=ticks), lambda row: at[row.shape]
    is_log = min(at.values()) > 0
    text = in_giga if of.axis_label == _FLOP else in_kibi
    return Axis(of.axis_label, is_log, labelled(at.values(), text)), lambda row: at[row.shape]


def differing_fields(problem: Any, problems: Sequence[Any]) -> str:
    """The fields that set a problem apart from the others."""
    of = operation_called(problem.operation)
    records = [of.problem_record(each) for each in problems]
    own = of.problem_record(problem)
    return ", ".join(f"{name} {own[name]}" for name in own if any(each.get(name) != own[name] for each in records))
