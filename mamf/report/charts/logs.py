"""Build the data for charts of run logs. There are charts of matmul sweeps, of runs of ``mamf find``, of the kernels of
any operation, and of training steps of models.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mamf.backend import DeviceInfo
from mamf.ceilings.ceiling import Ceiling, find_row_ceiling
from mamf.errors import UsageError
from mamf.measurement import TERA, Measurement, RatesByDtypeAndRegime, find_rate, group_pairs
from mamf.operations.model.operation import TRAINING_PHASES, ModelOperation, ModelProblem
from mamf.operations.unknown import get_operation
from mamf.report.ceilings import PHASE_NAMES
from mamf.report.charts.bars import StackedBar, StackedChart, StackedPanel
from mamf.report.charts.lines import (
    Axis,
    Chart,
    Line,
    Panel,
    Point,
    format_with_binary_prefix,
    format_with_decimal_prefix,
    make_even_ticks,
    make_labeled_ticks,
)
from mamf.report.document import choose_unit, format_four_digits, split_shared_parts

_MAX_LISTED_FAILURES = 4


def make_point(row: Measurement, x: float, factor: float = 1.0) -> Point:
    """Return the point of a row at position ``x``. Its value is the rate by which mamf ranks rows, times ``factor``.

    If several devices shared the run, the rate is scaled to the first device. The point has no interval if the interval
    of the rate is unknown.
    """
    seconds, interval = row.work_amount / row.comparable_rate / 1e12, row.comparable_interval
    min_seconds, max_seconds = (
        (interval.low, interval.high)
        if row.ranking_statistic == row.statistic and interval.is_known
        else (seconds, seconds)
    )
    scaled_amount = factor * row.work_amount / 1e12
    return Point(x, scaled_amount / seconds, scaled_amount / max_seconds, scaled_amount / min_seconds)


def choose_regimes(rows: Sequence[Measurement], requested: str | None) -> list[str]:
    """Return the regimes to draw: only the requested regime, or all regimes that have a rate, in the order of the log.
    Raises UsageError if the requested regime has no rate, or if no regime has one.
    """
    measured = list(dict.fromkeys(row.regime for row in rows if row.ok and not row.is_reference))
    if not measured:
        raise UsageError("the log has no measured row, so there is nothing to draw: give another log")
    if requested is not None and requested not in measured:
        raise UsageError(
            f"the log has no rate in regime {requested} to draw, only in {', '.join(measured)}: choose one of these "
            "with --regime"
        )
    return [requested] if requested else measured


def select_rows_to_draw(rows: Sequence[Measurement], requested: str | None) -> tuple[list[str], list[Measurement]]:
    """Return the regimes to draw and their rows that have a rate. Leave out references (rows that a run repeats to
    measure drift). As in tables, leave out rows that a search measured again to choose or to confirm a ceiling, and
    regimes with only such rows, unless there are no other rows. Raises UsageError if the requested regime, or every
    regime, has no rate.
    """
    regimes = choose_regimes(rows, requested)
    candidates = [row for row in rows if row.ok and not row.is_reference and row.regime in regimes]
    drawn = [row for row in candidates if not row.phase] or candidates
    return [name for name in regimes if any(row.regime == name for row in drawn)], drawn


def describe_machine_briefly(header: Mapping[str, Any]) -> str:
    """Return a line with the device and the versions of torch and of the driver, for the subtitle of a chart."""
    device = header["device"]
    torch = header["environment"].get("packages", {}).get("torch", "unknown")
    driver = f", driver {device['driver']}" if device.get("driver") else ""
    shared = [str(each["index"]) for each in header.get("devices", ())]
    devices = f" (devices {' '.join(shared)}, figures scaled to the first)" if shared else ""
    return f"{device['name']}{devices}, torch {torch}{driver}"


def find_peak_rate(problem: Any, header: Mapping[str, Any]) -> float | None:
    """Return the rate that the datasheet states for a problem, in TFLOPS or TB/s, or None if it states no rate."""
    peak = get_operation(problem.operation).find_peak_rate(DeviceInfo(**header["device"]), problem)
    return peak / TERA if peak else None


def describe_row_failures(rows: Iterable[Measurement], drawn_kernels: Iterable[str]) -> list[str]:
    """Return a list with one note that explains gaps in the lines of the drawn kernels: the number of rows without a
    rate, by kernel and status. The list is empty if all rows have a rate.
    """
    names = set(drawn_kernels)
    counts = Counter((row.kernel, row.status) for row in rows if not row.ok and row.kernel in names)
    reasons = [f"{count} x {kernel} ({status})" for (kernel, status), count in counts.most_common(_MAX_LISTED_FAILURES)]
    more = sum(counts.values()) - sum(count for _, count in counts.most_common(_MAX_LISTED_FAILURES))
    return [f"no figure: {', '.join(reasons)}" + (f" and {more} more" if more else "")] if reasons else []


# -- charts of matmul sweeps and of mamf find --------------------------------------------------------------------------


def make_sweep_chart(rows: Sequence[Measurement], header: Mapping[str, Any], regime: str | None = None) -> Chart:
    """Draw a line for each regime of a sweep. The horizontal axis shows one of these:

    - M, N or K, if only this dimension varies between shapes
    - M, if M = N = K in all shapes, or if all rows have the same shape
    - the rank of the row (1 for the fastest row), in all other cases
    """
    regimes, measured = select_rows_to_draw(rows, regime)
    first = measured[0]
    axis, get_x_position, shape = _choose_matmul_axis(measured)
    lines, notes, best_points = [], [], []
    for name in regimes:
        best_first = sorted(
            (row for row in measured if row.regime == name), key=lambda row: row.rate_sort_key, reverse=True
        )
        best = best_first[0]
        notes.append(
            f"{name}: best {format_four_digits(best.comparable_rate)} TFLOPS ({best.ranking_statistic}) at {best.shape}"
        )
        points = [make_point(row, get_x_position(rank, row)) for rank, row in enumerate(best_first, start=1)]
        lines.append(Line(name, tuple(sorted(points, key=lambda each: each.x))))
        best_points.append(points[0])
    panel = Panel(
        "",
        tuple(lines),
        peak=find_peak_rate(first.problem, header),
        best_point=max(best_points, key=lambda each: each.y),
    )
    return Chart(
        f"matmul {shape} by {first.kernel}, {first.problem.dtype}",
        describe_machine_briefly(header),
        axis,
        ((panel,),),
        has_own_scales=True,
        notes=(*notes, *describe_row_failures(rows, [first.kernel])),
    )


def _choose_matmul_axis(rows: Sequence[Measurement]) -> tuple[Axis, Callable[[int, Measurement], float], str]:
    """Return three values for the chart of a sweep:

    - the horizontal axis
    - a function that takes the rank of a row and the row, and returns the position of the row on this axis
    - a text with the dimensions that all shapes share, such as ``Mx4096x4096``
    """
    varying = [name for name in "mnk" if len({getattr(row.shape, name) for row in rows}) > 1]
    shape = "x".join(name.upper() if name in varying else str(getattr(rows[0].shape, name)) for name in "mnk")
    is_cubic = all(row.shape.m == row.shape.n == row.shape.k for row in rows)
    if len(varying) > 1 and not is_cubic:
        return (
            Axis("rank in each regime, best first" if len({row.regime for row in rows}) > 1 else "rank, best first"),
            lambda rank, row: rank,
            f"{len({row.shape for row in rows})} shapes {shape}",
        )
    name = varying[0] if varying else "m"
    sizes = sorted({getattr(row.shape, name) for row in rows})
    label = "M = N = K" if len(varying) > 1 else name.upper()
    steps = {second - first for first, second in itertools.pairwise(sizes)}
    axis = (
        Axis(label, ticks=make_even_ticks(sizes))
        if len(steps) == 1
        else Axis(label, True, make_labeled_ticks(sizes, "{:.0f}".format))
    )
    return axis, lambda rank, row: float(getattr(row.shape, name)), shape


def make_find_chart(
    rows: Sequence[Measurement], ceilings: Mapping[str, Ceiling], header: Mapping[str, Any], regime: str | None = None
) -> Chart:
    """Draw the rows of ``mamf find``, which searches for the fastest matmul, in the order of measurement.

    Each regime has a panel, and each phase of the search has a color.
    """
    regimes = choose_regimes(rows, regime)
    confirmed = {name: ceilings[name] for name in regimes if name in ceilings}
    peak = find_peak_rate(rows[0].problem, header)
    panels = []
    for name in regimes:
        numbered = enumerate([row for row in rows if row.ok and row.regime == name], start=1)
        phases = group_pairs((row.phase, make_point(row, number)) for number, row in numbered)
        lines = tuple(Line(PHASE_NAMES.get(phase, phase), tuple(points)) for phase, points in phases.items())
        panels.append(Panel(name, lines, confirmed[name].tflops if name in confirmed else None, peak=peak))
    answers = ", ".join(
        f"{format_four_digits(each.tflops)} TFLOPS {name}{'' if each.interval.is_known else ' (interval unknown)'}"
        for name, each in confirmed.items()
    )
    notes = [
        f"{name} ceiling: {format_four_digits(each.tflops)} TFLOPS at {each.shape} by {each.kernel}"
        + ("" if each.interval.is_known else "; its interval is unknown, so run 'mamf find' again")
        for name, each in confirmed.items()
    ]
    return Chart(
        f"The ceiling of {rows[0].problem.dtype}" + (f": {answers}" if answers else " was not confirmed"),
        describe_machine_briefly(header),
        Axis("measurement, in the order taken", is_shared=False),
        (tuple(panels),),
        False,
        notes=(
            *notes,
            *(
                ["a ceiling combines all its confirming measurements, so single measurements can exceed it"]
                if notes
                else []
            ),
        ),
    )


# -- charts of kernels of any operation --------------------------------------------------------------------------------

#: The label of the horizontal axis of charts that show rates by FLOP. The ticks of this axis have decimal prefixes. The
#: ticks of other axes have binary prefixes.
_FLOP_AXIS_LABEL = "FLOP"


def make_kernels_chart(rows: Sequence[Measurement], header: Mapping[str, Any], regime: str | None = None) -> Chart:
    """Draw a run that compares kernels, with a row of panels for each problem and a column for each regime.

    If several shapes of a kernel have the same position on the axis, draw only the best of them.
    """
    regimes, measured = select_rows_to_draw(rows, regime)
    axis, get_x_position = _choose_operation_axis(measured)
    panel_rows = group_pairs(((row.problem, row.regime), row) for row in measured)
    problems = list(dict.fromkeys(row.problem for row in measured))
    unit, factor = choose_unit(measured[0].work.unit, [row.best_rate for row in measured])

    def make_panel(problem: Any, name: str) -> Panel | None:
        best_rows: dict[str, dict[float, Measurement]] = {}
        for row in sorted(panel_rows.get((problem, name), ()), key=lambda row: row.rate_sort_key):
            best_rows.setdefault(row.kernel, {})[get_x_position(row)] = row
        if not best_rows:
            return None
        title = ", ".join(
            filter(None, (describe_differing_fields(problem, problems), name if len(regimes) > 1 else ""))
        )
        lines = tuple(
            Line(kernel, tuple(make_point(row_by_x[x], x, factor) for x in sorted(row_by_x)))
            for kernel, row_by_x in best_rows.items()
        )
        peak = find_peak_rate(problem, header)
        return Panel(title, lines, unit=unit, peak=peak and factor * peak)

    _, shared = split_shared_parts(
        [", ".join(get_operation(each.operation).describe_problem(each)) for each in problems]
    )
    return Chart(
        ", ".join(
            filter(None, (measured[0].operation, shared, *regimes, *dict.fromkeys(each.dtype for each in problems)))
        ),
        describe_machine_briefly(header),
        axis,
        tuple(tuple(make_panel(problem, name) for name in regimes) for problem in problems),
        notes=(
            *(
                f"{name} is not drawn, because only its ceilings were measured"
                for name in choose_regimes(rows, regime)
                if name not in regimes
            ),
            *describe_row_failures(rows, {row.kernel for row in rows}),
        ),
    )


def _choose_operation_axis(rows: Sequence[Measurement]) -> tuple[Axis, Callable[[Measurement], float]]:
    """Return the axis of an operation, and a function that returns the position of a row. If the operation has no axis
    or is not installed, number the shapes in the order of the log.
    """
    operation = get_operation(rows[0].operation)
    try:
        positions = {row.shape: float(operation.find_axis_position(row.shape)) for row in rows}
    except NotImplementedError:
        positions = {shape: float(x) for x, shape in enumerate(dict.fromkeys(row.shape for row in rows), start=1)}
        labels = {number: str(shape) for shape, number in positions.items()}
        return Axis("shape", ticks=make_labeled_ticks(labels, labels.__getitem__)), lambda row: positions[row.shape]
    is_logarithmic = min(positions.values()) > 0
    format_label = format_with_decimal_prefix if operation.axis_label == _FLOP_AXIS_LABEL else format_with_binary_prefix
    return Axis(
        operation.axis_label, is_logarithmic, make_labeled_ticks(positions.values(), format_label)
    ), lambda row: positions[row.shape]


def describe_differing_fields(problem: Any, problems: Sequence[Any]) -> str:
    """Return the names and values of the fields in which a problem differs from at least one of ``problems``."""
    make_record = get_operation(problem.operation).make_problem_record
    records = [make_record(each) for each in problems]
    return ", ".join(
        f"{name} {value}"
        for name, value in make_record(problem).items()
        if any(each.get(name) != value for each in records)
    )


# -- charts of training steps of a model -------------------------------------------------------------------------------

#: The parts of a training step that run in each measured phase (such as forward and backward), in order.
_PARTS_BY_PHASE: Mapping[str, tuple[str, ...]] = {
    "forward": ("forward",),
    "forward-backward": ("forward", "backward"),
    "step": ("forward", "backward", "optimizer step"),
}
#: Identifies the rows of one training step, which has a row for each measured phase (such as forward). The key consists
#: of the regime, the problem of the first phase, the kernel and the batch size.
_StepKey = tuple[str, ModelProblem, str, int]
_RowsByPhase = Mapping[str, Measurement]
_DIFFERENCES_NOTE = (
    "all parts but the first are differences between a phase and the phase that it contains, each measured separately"
)


def make_model_chart(
    rows: Sequence[Measurement],
    known_ceilings: RatesByDtypeAndRegime,
    header: Mapping[str, Any],
    regime: str | None = None,
) -> StackedChart:
    """Draw each training step as a bar, stacked from the parts of the step, such as the forward pass.

    Each kernel and model has a panel with a bar for each context length. If all steps have the same context length, one
    panel has all bars. The label of a bar contains the MAMFU (share of the highest measured matmul rate) of the longest
    phase, or its TFLOPS if no ceiling is known.

    ``known_ceilings``: the ceilings from which MAMFU is computed. Raises UsageError if the log has no rates.
    """
    regimes = choose_regimes(rows, regime)
    steps: dict[_StepKey, dict[int, dict[str, Measurement]]] = {}
    for row in rows:
        if row.ok and row.regime in regimes:
            key = row.regime, replace(row.problem, phase=TRAINING_PHASES[0]), row.kernel, row.shape.batch
            steps.setdefault(key, {}).setdefault(row.shape.context, {})[row.problem.phase] = row
    first = next(iter(steps))
    common = set(_list_step_title_parts(first)).intersection(*map(_list_step_title_parts, steps))
    titles = {
        key: ", ".join(word for word in _list_step_title_parts(key) if word not in common) or first[2] for key in steps
    }
    contexts = {context for by_context in steps.values() for context in by_context}
    phases = {
        phase for by_context in steps.values() for rows_by_phase in by_context.values() for phase in rows_by_phase
    }
    subject = "step by phase" if len(phases) > 1 else phases.pop()
    title = f"A model's {subject}: {', '.join(word for word in _list_step_title_parts(first) if word in common)}"
    if len(contexts) == 1:
        title += f", context length {format_with_binary_prefix(*contexts)}"
        bars = [
            _make_step_bar(titles[key], rows_by_phase, known_ceilings)
            for key, by_context in steps.items()
            for rows_by_phase in by_context.values()
        ]
        panels: tuple[StackedPanel, ...] = (StackedPanel("", tuple(sorted(bars, key=lambda bar: -bar.height))),)
    else:
        panels = tuple(
            StackedPanel(
                titles[key],
                tuple(
                    _make_step_bar(format_with_binary_prefix(each), by_context[each], known_ceilings)
                    for each in sorted(by_context)
                ),
            )
            for key, by_context in steps.items()
        )
    notes = list(_describe_mamfu_ceilings(steps, known_ceilings))
    notes += [_DIFFERENCES_NOTE] if any(len(bar.parts) > 1 for panel in panels for bar in panel.bars) else []
    # Because of timing noise, a phase may seem to take no longer than a shorter phase that it contains. The part of the
    # step that is computed as their difference then has height 0, so add a note about it.
    if faster := [
        f"{titles[key]}, {format_with_binary_prefix(context)}"
        for key, by_context in steps.items()
        for context, rows_by_phase in by_context.items()
        if any(height == 0 for _, height in split_step_into_parts(rows_by_phase))
    ]:
        notes.append(f"a phase took no longer than the phase that it contains: {'; '.join(faster)}")
    notes += describe_row_failures(rows, dict.fromkeys(row.kernel for row in rows))
    return StackedChart(
        title,
        describe_machine_briefly(header),
        "milliseconds",
        "" if len(contexts) == 1 else "context length",
        panels,
        notes=tuple(notes),
    )


def _list_step_title_parts(key: _StepKey) -> list[str]:
    regime, problem, kernel, batch = key
    words = [word for word in ModelOperation().describe_problem(problem) if word not in TRAINING_PHASES]
    return [kernel, *words, f"batch {batch}", problem.dtype, regime]


def _make_step_bar(label: str, rows_by_phase: _RowsByPhase, known_ceilings: RatesByDtypeAndRegime) -> StackedBar:
    """Return the bar of a training step, with the interval of its longest phase, and labeled with the MAMFU or TFLOPS
    of this phase.
    """
    longest = rows_by_phase[[phase for phase in TRAINING_PHASES if phase in rows_by_phase][-1]]
    ceiling = find_row_ceiling(longest, known_ceilings)
    rate = longest.comparable_rate
    share = f"{100 * rate / ceiling.tflops:.1f} % MAMFU" if ceiling else f"{format_four_digits(rate)} TFLOPS"
    milliseconds = (1e3 * longest.interval.low, 1e3 * longest.interval.high) if longest.interval.is_known else None
    return StackedBar(f"{label} ({share})", split_step_into_parts(rows_by_phase), interval=milliseconds)


def split_step_into_parts(rows_by_phase: _RowsByPhase) -> tuple[tuple[str, float], ...]:
    """Split a training step into parts with their durations in milliseconds. The first part is the first phase. Each
    further part is the difference between a phase and the longest earlier phase, or 0 if the difference is negative.
    """
    parts, previous_count, previous_milliseconds = [], 0, 0.0
    for phase in (each for each in TRAINING_PHASES if each in rows_by_phase):
        names, milliseconds = _PARTS_BY_PHASE[phase], rows_by_phase[phase].seconds * 1e3
        parts.append((" and ".join(names[previous_count:]), max(0.0, milliseconds - previous_milliseconds)))
        previous_count, previous_milliseconds = len(names), max(previous_milliseconds, milliseconds)
    return tuple(parts)


def _describe_mamfu_ceilings(steps: Mapping[_StepKey, Any], known_ceilings: RatesByDtypeAndRegime) -> Iterator[str]:
    """For each dtype and regime, yield a note that names the ceiling from which MAMFU is computed, or that says that no
    ceiling is known.
    """
    for key in dict.fromkeys((problem.dtype, regime) for regime, problem, _, _ in steps):
        if each := find_rate(known_ceilings, *key):
            yield (
                f"MAMFU: share of {format_four_digits(each.tflops)} TFLOPS, {each.dtype} {each.regime}: "
                f"{each.description}"
            )
        else:
            yield f"TFLOPS of {', '.join(key)}: the log names no ceiling, so shares of it (MAMFU) are unknown"
