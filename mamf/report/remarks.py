"""What a report says of rows beside their figures: remarks, failures, and the best in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mamf.measurement import Measurement
from mamf.report.devices import device_remark
from mamf.report.own_ceilings import in_mhz
from mamf.report.rows import group_title, label
from mamf.report.shares import Shares
from mamf.report.text import (
    WHY_UNKNOWN,
    counted,
    interval_cell,
    percent,
    rate_text,
    scaled_unit,
    shortened,
    whole,
)
from mamf.statistics import arithmetic_mean, geometric_mean
from mamf.timers import SHORT_LAUNCH_SECONDS


def failure(row: Measurement) -> str:
    """Why a row has no figure, in short; the log has the full text."""
    return "out of memory" if row.status == "out_of_memory" else f"{row.status}: {shortened(row.reason)}"


def failure_lines(rows: Iterable[Measurement]) -> list[str]:
    """How many rows of a kernel have no figure, by status, and why the first has none."""
    found: dict[tuple[str, str], list[Measurement]] = {}
    for row in rows:
        if not row.ok:
            found.setdefault((row.kernel, row.status), []).append(row)
    return [
        f"{label(first)}{f' and {len(others)} more' if others else ''}: {failure(first)}"
        for first, *others in found.values()
    ]


def remarks(row: Measurement, shares: Shares) -> list[str]:
    """What a reader must know about a row beside its figures."""
    parts = [] if row.ok else [failure(row)]
    if "ran" in row.details:
        parts.append(f"ran {row.details['ran']}")
    parts += [*shares.remarks(row), *row.conditions.throttle_reasons, *row.remarks]
    if row.ok and row.timer_accuracy and row.seconds < SHORT_LAUNCH_SECONDS:
        parts.append(f"accurate to {row.timer_accuracy * 1e6:.1f} us (timer)")
    if row.ok and not row.interval.is_known:
        parts.append(WHY_UNKNOWN)
    if row.implausible_samples:
        parts.append(f"{counted(len(row.implausible_samples), 'implausible sample')} left out")
    return parts


def best_lines(rows: Sequence[Measurement], shares: Shares) -> Iterator[str]:
    """The best of a group with what it was taken under, and the means over shapes."""
    best, *_ = measured = [row for row in rows if row.ok]
    rate = rate_text(best.best_rate, best.work.unit)
    yield f"best {group_title(best)}: {rate} ({best.best_by}) @ {best.shape} by {best.kernel}, {interval_text(best)}"
    conditions, share = best.conditions, shares.mamfu(best)
    details = [
        shares.peak_text(best),
        "" if share is None else f"{percent(share)} % of the ceiling (MAMFU)",
        f"{whole(in_mhz(conditions.clock_hz))} MHz" if conditions.clock_hz else "",
        f"{whole(conditions.watts)} W" if conditions.watts else "",
        f"{whole(conditions.celsius)} C" if conditions.celsius else "",
        device_remark(best),
        *(text for text in remarks(best, shares) if text != WHY_UNKNOWN),  # the line above says it
    ]
    if any(details):
        yield f"    {'; '.join(filter(None, details))}"
    if len(measured) > 1 and len({row.kernel for row in measured}) == 1:
        rates = [row.comparable_rate for row in measured]
        means = [rate_text(mean(rates), best.work.unit) for mean in (arithmetic_mean, geometric_mean)]
        yield f"mean {group_title(best)} over {len(rates)} shapes: arithmetic {means[0]}, geometric {means[1]}"


def interval_text(row: Measurement) -> str:
    """The interval of a row's rate, and what it covers."""
    interval = row.rate_interval
    factor = scaled_unit(row.work.unit, [row.best_rate])[1]
    bounds, coverage = interval_cell(interval, factor), f"{100 * interval.coverage:.0f} %"
    if row.repeatability is None:
        return f"{coverage} interval of the {row.figure} {bounds}, within this visit"
    return f"{coverage} repeat interval: {bounds}" if interval.is_known else WHY_UNKNOWN
