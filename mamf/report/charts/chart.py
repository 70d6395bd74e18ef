"""What a figure shows, as data: panels of lines of points. Pure; mamf.report.charts.plotting draws it.

What a log shows is decided beside: products in mamf.report.charts.products, attention in mamf.report.charts.attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from mamf.backend import DeviceInfo
from mamf.errors import UsageError
from mamf.measurement import TERA, Measurement
from mamf.operations.unknown import operation_called
from mamf.plans import ALGORITHM
from mamf.text import visible

_MARGIN_SHARE = 0.045
_MOST_TICKS = 10
_MOST_FAILURES = 4
# By power of a thousand, or of 1024.
_UNITS = ("", "k", "M", "G", "T")


@dataclass(frozen=True)
class Point:
    """``low``, ``high``: the interval of the median; ``y`` itself where another statistic is shown."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """``name`` decides the color, in every panel. ``is_companion``: drawn dotted beside the line of that name."""

    name: str
    points: tuple[Point, ...]
    is_companion: bool = False


@dataclass(frozen=True)
class Panel:
    """``unit``: of the rate. ``ceiling``, ``peak``: in this unit; the peak is the datasheet's, without sparsity.
    ``best``: the point to mark, one of the lines'.
    """

    title: str
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
    ``has_intervals``: of points that are not joined.
    ``companion``: what a dotted line means. ``palette``: all names of the run, so that a name has one color in
    every picture of it. ``has_own_scales``: each panel has its own vertical scale.
    """

    title: str
    subtitle: str
    axis: Axis
    grid: tuple[tuple[Panel | None, ...], ...]
    notes: tuple[str, ...] = ()
    is_connected: bool = True
    has_intervals: bool = False
    companion: str = ""
    palette: tuple[str, ...] = ()
    has_own_scales: bool = False

    @property
    def panels(self) -> list[Panel]:
        return [panel for row in self.grid for panel in row if panel is not None]

    @property
    def names(self) -> list[str]:
        """Names of all lines, those of the highest figures first; in the order they come where that has a meaning."""
        best: dict[str, float] = {}
        for panel in self.panels:
            for line in panel.lines:
                best[line.name] = max(best.get(line.name, 0.0), *(point.y for point in line.points))
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


def point(row: Measurement, x: float, share: float = 1.0) -> Point:
    """A measured row's figure: the statistic that its regime is judged by, with its interval if it has one; of several
    devices as the run's first gives it. ``share`` scales it.
    """
    seconds = row.amount / row.comparable_rate / 1e12
    has_interval = row.best_by == row.figure
    interval = row.comparable_interval
    fast, slow = (interval.low, interval.high) if has_interval else (seconds, seconds)
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


def labelled(sizes: Iterable[float], text: Callable[[float], str]) -> tuple[tuple[float, str], ...]:
    """Every size as a tick."""
    return tuple((size, text(size)) for size in sorted(set(sizes)))


def even_ticks(sizes: Sequence[int]) -> tuple[tuple[float, str], ...]:
    """Multiples of a power of two, as sizes are chosen, and few enough to read."""
    step = 1
    while (max(sizes) - min(sizes)) / step > _MOST_TICKS:
        step *= 2
    first = -(-min(sizes) // step) * step
    return tuple((size, str(size)) for size in range(first, max(sizes) + 1, step))


def in_kibi(size: float) -> str:
    """``16k`` for 16384 and ``1G`` for 1073741824, as lengths and sizes are spoken of."""
    power = next((each for each in (3, 2, 1) if size and size % 1024**each == 0), 0)
    return f"{size / 1024**power:.0f}{_UNITS[power]}"


def in_giga(work: float) -> str:
    """``3.76T`` for 3.76e12."""
    power = next((each for each in (4, 3, 2, 1) if work >= 1000**each), 0)
    return f"{work / 1000**power:.3g}{_UNITS[power]}"


def chosen_regimes(rows: Sequence[Measurement], wanted: str | None) -> list[str]:
    """Regimes to draw, in the order of the log. Raises UsageError where the wanted one has no figure."""
    held = list(dict.fromkeys(row.regime for row in rows if row.ok and not row.is_reference))
    if not held:
        raise UsageError("nothing to draw: the log has no measured row")
    if wanted is not None and wanted not in held:
        raise UsageError(f"nothing to draw in {wanted}: the log holds {', '.join(held)}")
    return [wanted] if wanted else held


def drawn_rows(rows: Sequence[Measurement], wanted: str | None) -> tuple[list[str], list[Measurement]]:
    """Regimes to draw, and their measured rows without visits of a reference and rows that rank algorithms. Raises
    UsageError likewise.
    """
    regimes = chosen_regimes(rows, wanted)
    kept = (row for row in rows if row.ok and not row.is_reference and row.phase != ALGORITHM)
    return regimes, [row for row in kept if row.regime in regimes]


def machine(header: Mapping[str, Any]) -> str:
    """Device and software in a line."""
    device = header["device"]
    torch = header["environment"].get("packages", {}).get("torch", "unknown")
    driver = f", driver {device['driver']}" if device.get("driver") else ""
    shared = [str(each["index"]) for each in header.get("devices", ())]
    devices = f" (devices {' '.join(shared)}, figures as of the first)" if shared else ""
    return f"{device['name']}{devices}, torch {torch}{driver}"


def peak_of(problem: Any, header: Mapping[str, Any]) -> float | None:
    """The datasheet's rate for a problem in 1e12/s, or None."""
    peak = operation_called(problem.operation).peak(DeviceInfo(**header["device"]), problem)
    return peak / TERA if peak else None


def failures(rows: Iterable[Measurement], drawn: Iterable[str]) -> list[str]:
    """Why lines have gaps: rows without a figure of what is drawn, by name and status."""
    names = set(drawn)
    counts = Counter((row.kernel, row.status) for row in rows if not row.ok and row.kernel in names)
    reasons = [f"{count} x {kernel} ({status})" for (kernel, status), count in counts.most_common(_MOST_FAILURES)]
    more = sum(counts.values()) - sum(count for _, count in counts.most_common(_MOST_FAILURES))
    return [f"no figure: {', '.join(reasons)}" + (f" and {more} more" if more else "")] if reasons else []
