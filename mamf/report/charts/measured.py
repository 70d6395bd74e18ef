"""What charts of run logs share: the rows to draw, their points, and what is said around them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mamf.backend import DeviceInfo
from mamf.errors import UsageError
from mamf.measurement import TERA, Measurement
from mamf.operations.unknown import operation_called
from mamf.plans import ALGORITHM
from mamf.report.charts.lines import Point

_MAX_FAILURES = 4


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


def chosen_regimes(rows: Sequence[Measurement], wanted: str | None) -> list[str]:
    """Regimes to draw, in the order of the log. Raises UsageError where the wanted one has no figure."""
    measured = list(dict.fromkeys(row.regime for row in rows if row.ok and not row.is_reference))
    if not measured:
        raise UsageError("nothing to draw: the log has no measured row")
    if wanted is not None and wanted not in measured:
        raise UsageError(f"nothing to draw in {wanted}: the log holds {', '.join(measured)}")
    return [wanted] if wanted else measured


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
    reasons = [f"{count} x {kernel} ({status})" for (kernel, status), count in counts.most_common(_MAX_FAILURES)]
    more = sum(counts.values()) - sum(count for _, count in counts.most_common(_MAX_FAILURES))
    return [f"no figure: {', '.join(reasons)}" + (f" and {more} more" if more else "")] if reasons else []
