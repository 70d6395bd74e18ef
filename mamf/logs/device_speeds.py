"""Speeds of a run's devices relative to its first, from their ceilings or a reference that all of them measured. Pure.

Cards of the same model differ by several percent, so rows from different cards are corrected before they are ranked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from mamf.ceilings.ceiling import CHOOSE, CONFIRM, Ceiling, combine_rounds, confirm_ceiling
from mamf.measurement import Measurement


class DeviceSpeed(NamedTuple):
    """``factor``: speed relative to the run's first device. ``half_width``: of its interval, as a share. ``work``: of
    the reference, in FLOP or bytes.
    """

    factor: float
    half_width: float
    work: float

    def half_width_at(self, work: float) -> float:
        """The half width for less work than the reference, where devices differ as much or less. Four H200 that differ
        by 2.5 % at 343 GFLOP differ by 1.8 % at 137, by 1.3 % at 69, and not at all below 34, at the same clock.
        """
        return self.half_width + abs(math.log(self.factor)) * max(0.0, 1 - work / self.work)


#: Regime and dtype, within which devices are compared.
Context = tuple[str, str]
#: Speeds by context and device, for the devices that were compared.
DeviceSpeeds = Mapping[Context, Mapping[int, DeviceSpeed]]
#: Visits by reference product and device.
_Visits = dict[Any, dict[int, list[Measurement]]]


def device_speeds(rows: Iterable[Measurement]) -> DeviceSpeeds:
    """Speeds from these rows, each device's relative to that of the lowest index: by their ceilings if each found its
    own, else by the median of the reference visits.
    """
    visits: dict[Context, _Visits] = {}
    searched: dict[Context, dict[int, list[Measurement]]] = {}
    for row in rows:
        if row.device is not None and row.is_reference and row.ok:
            of = visits.setdefault(context_of(row), {}).setdefault((row.problem, row.shape, row.kernel), {})
            of.setdefault(row.device, []).append(row)
        elif row.device is not None and row.phase in (CHOOSE, CONFIRM):
            searched.setdefault(context_of(row), {}).setdefault(row.device, []).append(row)
    found = {context: _speeds(each) for context, each in visits.items()}
    for context, by_device in searched.items():
        ceilings = {device: ceiling for device, own in by_device.items() if (ceiling := confirm_ceiling(own, ""))}
        if context in found and ceilings.keys() >= found[context].keys():
            found[context] = _speeds_by_ceilings(ceilings)
    return found


def _speeds_by_ceilings(ceilings: Mapping[int, Ceiling]) -> dict[int, DeviceSpeed]:
    first = ceilings[min(ceilings)]
    found = {}
    for device, own in ceilings.items():
        half_widths = (0.0, 0.0) if own is first else (each.interval.half_width / each.rate for each in (own, first))
        work = float(own.problem.work(own.shape).amount)
        found[device] = DeviceSpeed(own.rate / first.rate, math.hypot(*half_widths), work)
    return found


def context_of(row: Measurement) -> Context:
    return row.regime, row.problem.dtype


def _speeds(visits: _Visits) -> dict[int, DeviceSpeed]:
    first = min(device for of in visits.values() for device in of)
    found: dict[int, DeviceSpeed] = {}
    for of in visits.values():
        if first in of:
            for device, own in of.items():
                found.setdefault(device, _speed(own, of[first]))
    return found


def _speed(own: Sequence[Measurement], firsts: Sequence[Measurement]) -> DeviceSpeed:
    if own is firsts:
        return DeviceSpeed(1.0, 0.0, own[0].amount)
    rate, of_first = (median(row.best_rate for row in visits) for visits in (own, firsts))
    return DeviceSpeed(rate / of_first, math.hypot(_half_width(own), _half_width(firsts)), own[0].amount)


def _half_width(visits: Sequence[Measurement]) -> float:
    """Half width of the combined interval of these visits, as a share."""
    if len(visits) == 1:
        return visits[0].relative_half_width
    rate, interval = combine_rounds(visits)
    return interval.half_width / rate


def with_device_speeds(rows: Sequence[Measurement]) -> list[Measurement]:
    """The rows, each with the speed of its device. Rows of a run on one device are unchanged."""
    if all(row.device is None for row in rows):
        return list(rows)
    speeds = device_speeds(rows)
    return [with_speed(row, speeds) for row in rows]


def with_speed(row: Measurement, speeds: DeviceSpeeds) -> Measurement:
    if row.device is None:
        return row
    speed = speeds.get(context_of(row), {}).get(row.device)
    if speed is None:
        return replace(row, device_speed=None)
    return replace(row, device_speed=speed.factor, device_speed_half_width=speed.half_width_at(row.amount))
