"""Explains the gap between the datasheet's FLOPS and the achieved FLOPS of a product as a waterfall. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mamf.backend import DeviceInfo
from mamf.measurement import TERA, Measurement
from mamf.peaks import find_peak, flop_per_cycle
from mamf.regime_names import BURST, SUSTAINED
from mamf.statistics import Interval

NORMAL, ZEROS = "normal", "zeros"
NO_COST = "no significant cost of real data"
TOO_NOISY = "too noisy to tell what real data cost"
#: Clock readings within this share are equal.
_SAME_CLOCK = 0.005
#: From this share of the power limit on, a device counts as being at its limit.
_AT_LIMIT = 0.95


@dataclass(frozen=True)
class WaterfallStep:
    """One step of the waterfall. ``tflops``: None if unknown, with the reason in ``cause``. ``row``: the measured row,
    if any. ``before``: TFLOPS of the last step that is known.
    """

    name: str
    tflops: float | None
    cause: str
    row: Measurement | None = None
    before: float | None = None

    @property
    def change(self) -> float | None:
        """The change from the step before, as a share of it."""
        return self.tflops / self.before - 1 if self.tflops is not None and self.before else None

    @property
    def interval(self) -> Interval | None:
        """The 95 % repeat interval in TFLOPS."""
        return None if self.row is None or not self.row.ok else self.row.rate_interval


def waterfall_steps(rows: Sequence[Measurement], info: DeviceInfo) -> list[WaterfallStep]:
    """The waterfall down from the datasheet's peak. ``rows``: at least one of one product, on several kinds of data."""
    normal, zeros = find_row(rows, NORMAL, BURST), find_row(rows, ZEROS, BURST)
    last = find_row(rows, NORMAL, SUSTAINED)
    first = rows[0]
    steps = [
        _datasheet(info, first.problem.dtype),
        _units(info, first.problem.dtype, normal or zeros),
        _measured("burst, zeros", zeros, "the kernel's rate when data cost no power" + _timer(zeros)),
        _measured("burst, normal data", normal, _cost_of_data(zeros, normal)),
        _measured("sustained, normal data", last, _cost_of_power(last, info)),
    ]
    known: list[float | None] = [None]
    for step in steps:
        known.append(known[-1] if step.tflops is None else step.tflops)
    return [replace(step, before=before) for step, before in zip(steps, known, strict=False)]


def rank_bursts(rows: Iterable[Measurement]) -> list[Measurement]:
    """The valid burst rows on all kinds of data, fastest first."""
    return sorted((row for row in rows if row.regime == BURST and row.ok), key=lambda row: -row.best_rate)


def find_row(rows: Iterable[Measurement], data: str, regime: str) -> Measurement | None:
    return next((row for row in rows if (row.problem.data, row.regime) == (data, regime)), None)


def _datasheet(info: DeviceInfo, dtype: str) -> WaterfallStep:
    peak = find_peak(info.name, dtype, info.compute_units)
    if peak is None:
        return WaterfallStep("datasheet", None, f"no datasheet figure of {info.name} is listed for {dtype}")
    clock = f", at {peak.clock_hz / 1e6:.0f} MHz" if peak.clock_hz else ""
    return WaterfallStep("datasheet", peak.flops / TERA, f"dense {peak.dtype} of {peak.origin}{clock}")


def _units(info: DeviceInfo, dtype: str, row: Measurement | None) -> WaterfallStep:
    """The rate of the compute units at the clock that was read, independent of the datasheet's clock."""
    name, peak = "units at their clock", find_peak(info.name, dtype, info.compute_units)
    clock = row.conditions.clock_hz if row is not None else None
    per_cycle = flop_per_cycle(peak, info.compute_units)
    if peak is None:
        return WaterfallStep(name, None, "FLOP per cycle are unknown, because no datasheet figure is listed")
    if per_cycle is None or not info.compute_units:
        what = "the clock of that peak" if info.compute_units else "the number of units"
        return WaterfallStep(name, None, f"FLOP per cycle are unknown, because {what} is unknown")
    if clock is None:
        return WaterfallStep(name, None, "no sensor reads the clock")
    product = f"{info.compute_units} units x {per_cycle:.0f} FLOP x {clock / 1e6:.0f} MHz"
    return WaterfallStep(name, info.compute_units * per_cycle * clock / TERA, f"{product}, as read in burst")


def _measured(name: str, row: Measurement | None, cause: str) -> WaterfallStep:
    if row is None:
        return WaterfallStep(name, None, "not measured")
    if not row.ok:
        return WaterfallStep(name, None, f"{row.status}: {row.reason}", row)
    return WaterfallStep(name, row.best_rate, cause, row)


def _timer(row: Measurement | None) -> str:
    """The accuracy of a measured step, which is compared with figures from the datasheet."""
    return f"; accurate to {100 * row.accuracy:.1f} % (timer)" if row is not None and row.ok and row.accuracy else ""


def _cost_of_data(zeros: Measurement | None, normal: Measurement | None) -> str:
    if zeros is None or normal is None or not zeros.ok or not normal.ok:
        return ""
    if zeros.rate_interval.overlaps(normal.rate_interval):
        return TOO_NOISY if not (zeros.interval.is_known and normal.interval.is_known) else NO_COST
    if normal.best_rate > zeros.best_rate:
        return "faster than on zeros: the device was not at rest (measure again)"
    before, after = zeros.conditions.clock_hz, normal.conditions.clock_hz
    if not before or not after:
        return "the cost of real data; no sensor reads the clock"
    if abs(after / before - 1) > _SAME_CLOCK:
        return f"real data: the clock goes from {before / 1e6:.0f} to {after / 1e6:.0f} MHz"
    return f"real data draw more current; slower although the clock reads {after / 1e6:.0f} MHz as on zeros"


def _cost_of_power(row: Measurement | None, info: DeviceInfo) -> str:
    """The sensor readings of a settled device, in words."""
    if row is None or not row.ok:
        return ""
    seen, limit = row.conditions, info.power_limit_watts
    parts = [*seen.throttle_reasons]
    if seen.watts is not None:
        is_at_limit = limit is not None and seen.watts >= _AT_LIMIT * limit
        of = f" of {limit:.0f}" if limit else ""
        parts.insert(0, f"{'power limit: ' if is_at_limit else ''}{seen.watts:.0f}{of} W")
        parts.append(f"{seen.watts / row.best_rate:.3f} J/TFLOP")
    if seen.clock_hz:
        parts.append(f"{seen.clock_hz / 1e6:.0f} MHz")
    return ", ".join(parts) or "no sensor reads power or clock"
