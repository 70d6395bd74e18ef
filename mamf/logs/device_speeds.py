"""How fast the devices of a run are to its first, by the reference that all of them measured. Pure.

Cards of one model differ by percents: rows of two are ranked against one another only after this correction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from mamf.measurement import Measurement

#: Regime and dtype, within which devices are compared.
Context = tuple[str, str]
#: By context, by device: the factor by which it is faster than the run's first; of those that were compared.
DeviceSpeeds = Mapping[Context, Mapping[int, float]]
#: Rates by what was visited, by device.
_Visits = dict[Any, dict[int, list[float]]]


def device_speeds(rows: Iterable[Measurement]) -> DeviceSpeeds:
    """By the visits of references among these rows: a device's median over that of the lowest index."""
    visits: dict[Context, _Visits] = {}
    for row in rows:
        if row.is_reference and row.ok and row.device is not None:
            of = visits.setdefault(context_of(row), {}).setdefault((row.problem, row.shape, row.kernel), {})
            of.setdefault(row.device, []).append(row.best_rate)
    return {context: _speeds(each) for context, each in visits.items()}


def context_of(row: Measurement) -> Context:
    return row.regime, row.problem.dtype


def _speeds(visits: _Visits) -> dict[int, float]:
    first = min(device for of in visits.values() for device in of)
    found: dict[int, float] = {}
    for of in visits.values():
        if first in of:
            for device, rates in of.items():
                found.setdefault(device, median(rates) / median(of[first]))
    return found


def with_device_speeds(rows: Sequence[Measurement]) -> list[Measurement]:
    """The rows, each with the speed of its device; those of a run of one device as they are."""
    if all(row.device is None for row in rows):
        return list(rows)
    speeds = device_speeds(rows)
    return [with_speed(row, speeds) for row in rows]


def with_speed(row: Measurement, speeds: DeviceSpeeds) -> Measurement:
    if row.device is None:
        return row
    return replace(row, device_speed=speeds.get(context_of(row), {}).get(row.device))
