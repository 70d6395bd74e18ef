"""What a figure shows, as data: panels of lines of points. Pure; mamf.report.charts.plotting draws it.

Here too: the figures of a sweep and of a find. Those of attention are in mamf.report.charts.attention.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from mamf.ceilings.ceiling import Ceiling
from mamf.choices import Quantity
from mamf.errors import UsageError
from mamf.measurement import Measurement
from mamf.text import visible

# Labels nearer than this share of an axis would touch, where so many panels share the width.
_LABEL_DISTANCE, _LABEL_DISTANCE_PER_COLUMN = 0.01, 0.03
_MARGIN_SHARE = 0.045
_MOST_TICKS = 10
_MOST_FAILURES = 4


@dataclass(frozen=True)
class Point:
    """``low``, ``high``: the interval of the median; ``y`` itself where another statistic is shown."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """``name`` decides the colour, in every panel. ``is_companion``: drawn dotted beside the line of that name."""

    name: str
    points: tuple[Point, ...]
    is_companion: bool = False


@dataclass(frozen=True)
class Panel:
    """``unit``: of the rate. ``ceiling``, ``peak``: in this unit; the peak is the datasheet's, without sparsity.
    ``best``: the point to mark, one of the lines'.
    """

    title: str
    quantity: Quantity
    lines: tuple[Line, ...]
    ceiling: float | None = None
    unit: str = "TFLOPS"
    peak: float | None = None
    best: Point | None = None


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of all panels, to one scale if ``is_shared``. No ``ticks``: wherever they fall."""

    label: str
    is_log: bool = False
    ticks: tuple[tuple[float, str], ...] = ()
    is_shared: bool = True


@dataclass(frozen=True)
class Chart:
    """``grid``: rows of panels, None where nothing was measured. ``is_connected``: points are joined by lines.
    ``bar_width``: on the axis, where points are drawn as bars. ``has_intervals``: of points that are not joined.
    ``companion``: what a dotted line means. ``palette``: all names of the run, so that a name has one colour in
    every picture of it.
    """

    title: str
    subtitle: str
    axis: Axis
    grid: tuple[tuple[Panel | None, ...], ...]
    notes: tuple[str, ...] = ()
    is_connected: bool = True
    bar_width: float | None = None
    has_intervals: bool = False
    companion: str = ""
    palette: tuple[str, ...] = ()

    @property
    def panels(self) -> list[Panel]:
        return [panel for row in self.grid for panel in row if panel is not None]

    @property
    def names(self) -> list[str]:
        """Names of all lines, those of the highest figures first; in the order they come where that has a meaning."""
        best: dict[str, float] = {}
        for panel in self.panels:
            for line in panel.lines:
                highest = max(point.y for point in line.points)
                lowest = min(point.y for point in line.points)
                best[line.name] = max(
                    best.get(line.name, -math.inf), highest if panel.quantity == "tflops" else -lowest
                )
        return sorted(best, key=lambda name: -best[name]) if self.is_connected else list(best)


def with_visible_texts(part: Any) -> Any:
    """A chart, or any part of one, with its foreign text made harmless."""
    if isinstance(part, str):
        return visible(part)
    if isinstance(part, tuple):
        return tuple(map(with_visible_texts, part))
    if is_dataclass(part) and not isinstance(part, (type, Point)):
        return replace(part, **{each.name: with_visible_texts(getattr(part, each.name)) for each in fields(part)})
    return part


def point(row: Measurement, x: float, quantity: Quantity, share: float = 1.0) -> Point:
    """A measured row's figure: the statistic that its regime is judged by, with its interval if it has one; of several
    devices as the run's first gives it. ``share`` scales it.
    """
    seconds = row.amount / row.comparable_rate / 1e12
    has_interval = row.best_by == row.figure
    interval = row.comparable_interval
    fast, slow = (interval.low, interval.high) if has_interval else (seconds, seconds)
    if quantity == "ms":
        return Point(x, seconds * 1e3, fast * 1e3, slow * 1e3)
    scale = share * row.amount / 1e12
    return Point(x, scale / seconds, scale / slow, scale / fast)


def limits(positions: Sequence[float], is_log: bool) -> tuple[float, float]:
    """Ends of an axis that holds all positions, with a margin: panels that lack some keep the scale of the others."""
    low, high = min(positions), max(positions)
    if is_log:
        margin = (high / low) ** _MARGIN_SHARE if high > low else 2.0
        return low / margin, high * margin
    margin = _MARGIN_SHARE * (high - low) or 1.0
    return low - margin, high + margin


def labelled(
    sizes: Iterable[float], text: Callable[[float], str], columns: int = 1, is_log: bool = True
) -> tuple[tuple[float, str], ...]:
    """Every size as a tick; those whose labels would touch the one before have none."""
    ordered = sorted(set(sizes))
    at = [math.log2(size) if is_log else size for size in ordered]
    nearest = (_LABEL_DISTANCE + _LABEL_DISTANCE_PER_COLUMN * columns) * (at[-1] - at[0])
    ticks: list[tuple[float, str]] = []
    last = -math.inf
    for size, position in zip(ordered, at, strict=True):
        is_free = position - last >= nearest
        ticks.append((size, text(size) if is_free else ""))
        last = position if is_free else last
    return tuple(ticks)


def even_ticks(sizes: Sequence[int]) -> tuple[tuple[float, str], ...]:
    """Multiples of a power of two, as sizes are chosen, and few enough to read."""
    step = 1
    while (max(sizes) - min(sizes)) / step > _MOST_TICKS:
        step *= 2
    first = -(-min(sizes) // step) * step
    return tuple((size, str(size)) for size in range(first, max(sizes) + 1, step))


def in_kibi(size: float) -> str:
    """``16k`` for 16384, as lengths are spoken of; ``4G`` for 4 GiB."""
    for power, prefix in ((3, "G"), (2, "M"), (1, "k")):
        if size >= 1024**power and size % 1024**power == 0:
            return f"{size / 1024**power:.0f}{prefix}"
    return f"{size:.0f}"


def chosen_regimes(rows: Sequence[Measurement], wanted: str | None) -> list[str]:
    """Regimes to draw, in the order of the log. Raises UsageError where the wanted one has no figure."""
    held = list(dict.fromkeys(row.regime for row in rows if row.ok and not row.is_reference))
    if not held:
        raise UsageError("nothing to draw: the log has no measured row")
    if wanted is not None and wanted not in held:
        raise UsageError(f"nothing to draw in {wanted}: the log holds {', '.join(held)}")
    return [wanted] if wanted else held


def machine(header: Mapping[str, Any]) -> str:
    """Device and software in a line."""
    device = header["device"]
    torch = header["environment"].get("packages", {}).get("torch", "unknown")
    driver = f", driver {device['driver']}" if device.get("driver") else ""
    shared = [str(each["index"]) for each in header.get("devices", ())]
    devices = f" (devices {' '.join(shared)}, figures as of the first)" if shared else ""
    return f"{device['name']}{devices}, torch {torch}{driver}"


def failures(rows: Iterable[Measurement], drawn: Iterable[str]) -> list[str]:
    """Why lines have gaps: rows without a figure of what is drawn, by name and status."""
    names = set(drawn)
    counts = Counter((row.kernel, row.status) for row in rows if not row.ok and row.kernel in names)
    reasons = [f"{count} x {kernel} ({status})" for (kernel, status), count in counts.most_common(_MOST_FAILURES)]
    more = sum(counts.values()) - sum(count for _, count in counts.most_common(_MOST_FAILURES))
    return [f"no figure: {', '.join(reasons)}" + (f" and {more} more" if more else "")] if reasons else []


def sweep_chart(
    rows: Sequence[Measurement],
    header: Mapping[str, Any],
    regime: str | None = None,
    quantities: Sequence[Quantity] = ("tflops",),
) -> Chart:
    """A sweep against the dimension that varies, or by rank where several do; a line a regime."""
    regimes = chosen_regimes(rows, regime)
    measured = [row for row in rows if row.ok and not row.is_reference and row.regime in regimes]
    axis, position, shape = _matmul_axis(measured)
    by_name = {name: [row for row in measured if row.regime == name] for name in regimes}

    def line(name: str, quantity: Quantity) -> Line:
        best_first = sorted(by_name[name], key=lambda row: row.rank, reverse=True)
        best = best_first[0]
        points = [point(row, position(rank, row), quantity) for rank, row in enumerate(best_first, start=1)]
        label = f"{name}: best {best.comparable_rate:.4g} TFLOPS ({best.best_by}) at {best.shape}"
        return Line(label, tuple(sorted(points, key=lambda each: each.x)))

    grid = tuple((Panel("", quantity, tuple(line(name, quantity) for name in regimes)),) for quantity in quantities)
    title = f"{shape}, {measured[0].kernel}, {measured[0].problem.dtype}"
    return Chart(title, machine(header), axis, grid, tuple(failures(rows, [measured[0].kernel])))


def _matmul_axis(
    rows: Sequence[Measurement],
) -> tuple[Axis, Callable[[int, Measurement], float], str]:
    """The axis, where a row of a rank lies on it, and what the shapes have in common."""
    varying = [name for name in "mnk" if len({getattr(row.shape, name) for row in rows}) > 1]
    shape = "x".join(name.upper() if name in varying else str(getattr(rows[0].shape, name)) for name in "mnk")
    is_cubic = all(row.shape.m == row.shape.n == row.shape.k for row in rows)
    if len(varying) > 1 and not is_cubic:
        count = len({row.shape for row in rows})
        return Axis("rank, best first"), lambda rank, row: rank, f"{count} shapes {shape} by rank"
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
    """A find in the order it measured, a colour a phase, a panel a regime."""
    regimes = chosen_regimes(rows, regime)
    panels = []
    for name in regimes:
        measured = [row for row in rows if row.ok and row.regime == name]
        phases: dict[str, list[Point]] = {}
        for number, row in enumerate(measured, start=1):
            phases.setdefault(row.phase, []).append(point(row, number, "tflops"))
        lines = tuple(Line(phase, tuple(points)) for phase, points in phases.items())
        ceiling = ceilings.get(name)
        panels.append(Panel(name, "tflops", lines, None if ceiling is None else ceiling.tflops))
    title = f"Finding the ceiling of {rows[0].problem.dtype}"
    notes = tuple(
        f"{name} ceiling: {ceiling.tflops:.4g} TFLOPS at {ceiling.shape} by {ceiling.kernel}"
        for name, ceiling in ceilings.items()
        if name in regimes
    )
    axis = Axis("measurement, in the order taken", is_shared=False)
    return Chart(title, machine(header), axis, (tuple(panels),), notes, is_connected=False)
