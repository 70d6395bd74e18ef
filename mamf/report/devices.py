"""Rows of several devices in one table: which measured each, and what makes them comparable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from mamf.ceilings.ceiling import CONFIRM
from mamf.logs.records import significant_digits
from mamf.logs.run_log import device_speeds
from mamf.measurement import Measurement, group_pairs
from mamf.report.document import Column
from mamf.report.text import counted, rate_name, rate_text, scaled_unit, significant

COMPARABLE = "comparable"


def flat_device(row: Measurement) -> dict[str, Any]:
    """``device_speed``: to the run's first, by the reference; None where the two were not compared."""
    speed = row.device_speed and significant_digits(row.device_speed)
    return {} if row.device is None else {"device": row.device, "device_speed": speed}


def device_columns(rows: Sequence[Measurement]) -> list[Column[Measurement]]:
    """The device, and the rate as the run's first device would give it; none in a run of one device."""
    if all(row.device is None for row in rows):
        return []
    unit = rows[0].work.unit
    factor = scaled_unit(unit, [row.best_rate for row in rows if row.ok])[1]
    return [
        Column("device", "device", lambda row: row.device, importance=1),
        Column("device_speed", "", lambda row: row.device_speed and significant_digits(row.device_speed)),
        Column(
            rate_name("comparable_rate", unit),
            COMPARABLE,
            lambda row: row.comparable_rate if row.ok and row.device_speed is not None else None,
            lambda rate: significant(rate * factor),
            1,
        ),
    ]


def device_remark(row: Measurement) -> str:
    """The device of a row, and the rate that the run's first device would give."""
    if row.device is None:
        return ""
    if row.device_speed is None:
        return f"device {row.device}, not compared"
    if row.device_speed == 1.0:
        return f"device {row.device}"
    half_width = row.comparable_interval.half_width / row.comparable_seconds
    return f"device {row.device}, {significant(row.comparable_rate)} +-{100 * half_width:.2f} % as of the first"


def device_lines(rows: Sequence[Measurement], header: Mapping[str, Any]) -> list[str]:
    """The devices that shared a run, and how they compare; empty for a run on one device."""
    devices = header.get("devices", ())
    lines = [_device_line(device) for device in devices]
    for (regime, dtype), speeds in device_speeds(rows).items():
        first = min(speeds)
        others = [
            f"device {each} {100 * (speed.factor - 1):+.2f} +-{100 * speed.factor * speed.half_width:.2f} %"
            for each, speed in sorted(speeds.items())
            if each != first
        ]
        same = [row for row in rows if (row.regime, row.problem.dtype) == (regime, dtype)]
        visit = next(row for row in same if row.is_reference and row.ok)
        is_by_ceilings = any(row.phase == CONFIRM and row.device is not None for row in same)
        by = "their ceilings" if is_by_ceilings else f"the reference {visit.shape}, {visit.kernel}"
        reference = f"to device {first} by {by}"
        compared = f"{', '.join(others)} {reference}" if others else f"device {first} alone"
        lines.append(f"{regime} {dtype}: {compared}")
    uncompared = sorted({row.device for row in rows if row.device is not None and row.device_speed is None})
    if uncompared:
        lines.append(f"not compared, and ranked after the others: device {', '.join(map(str, uncompared))}")
    if devices:
        lines.append(f"ranked and averaged is the rate as of the first device ({COMPARABLE}); all else is as measured")
    return lines


def _device_line(device: Mapping[str, Any]) -> str:
    known = [
        f"{device['compute_units']} compute units" if device["compute_units"] else "",
        f"{device['power_limit_watts']:.0f} W limit" if device["power_limit_watts"] else "",
        f"uuid {device['uuid_hash']}" if device["uuid_hash"] else "",
    ]
    return f"device {device['index']}: {', '.join(filter(None, [device['name'], *known]))}"


def drift_lines(visits: Sequence[Measurement]) -> list[str]:
    """How far the figures of each reference of a regime lie apart, on each device that visited it more than once."""
    groups = group_pairs(((row.device, row.problem, row.shape, row.kernel), row) for row in visits if row.ok)
    return [line for rows in groups.values() for line in _drift(rows)]


def _drift(visits: Sequence[Measurement]) -> list[str]:
    if len(visits) < 2:
        return []
    figures, device = [row.best_rate for row in visits], visits[0].device
    middle = median(figures)
    below, above = 100 * (min(figures) / middle - 1), 100 * (max(figures) / middle - 1)
    where = "" if device is None else f" on device {device}"
    spread = f"{below:+.2f} % to {above:+.2f} %"
    return [
        f"reference {visits[0].shape}{where}, {counted(len(figures), 'visit')}: "
        f"{rate_text(middle, visits[0].work.unit)}, {spread}"
    ]
