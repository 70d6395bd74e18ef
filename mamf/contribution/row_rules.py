"""Rules about rows: figures follow from their samples, and samples are physically possible."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from mamf.contribution.evidence import Evidence, Finding
from mamf.contribution.header_rules import has_sensors
from mamf.logs.records import is_of_old_calibration, measurement_record
from mamf.measurement import TERA, Measurement
from mamf.operations.unknown import operation_called
from mamf.peaks import fastest_possible_flops
from mamf.plans import MATMUL
from mamf.plausibility import split_impossible, why_implausible
from mamf.regime_names import BEST_BY
from mamf.timers import find_timer, is_credible

# A step of the sixth digit, which rates are rounded to; half a step of the third decimal, which converted logs round
# them to, and of the sixth digit of what is computed anew.
_RATE_ROUNDING, _EARLY_RATE_ROUNDING = 1.1e-5, 5.5e-4
# Verification decides by kernel; no result that passed it has a larger error.
_MAX_ERROR, _MAX_ERROR_OF_APPROXIMATION = 0.05, 0.5
# Power as a share of the limit: logs of cards under load have 0.2 to 1.1.
_MIN_POWER, _MAX_POWER = 0.1, 1.2
_MAX_CLOCK = 1.02
# Fewer samples may agree by chance: they are written in whole nanoseconds.
DISTINCTIVE_SAMPLES = 5
_OF_INTERVAL = {"interval", "interval_tflops", "interval_coverage", "repeatability"}
# What only kernels say that approximate: they skip work, or multiply in another dtype. The fastest of these bound them.
_OF_APPROXIMATION = ("product_dtypes", "sparsity", "cosine_similarity", "relative_l1")
_APPROXIMATE_DTYPES = ("int8", "float8_e4m3fn")


def without_interval(record: Mapping[str, Any]) -> dict[str, Any]:
    """A row or a ceiling without the interval and the calibration behind it, which readers replace in old logs."""
    kept = {name: value for name, value in record.items() if name not in _OF_INTERVAL}
    rates = {name: value for name, value in kept.items() if isinstance(value, Mapping) and "interval" in value}
    return kept | {
        name: {statistic: rate for statistic, rate in value.items() if statistic != "interval"}
        for name, value in rates.items()
    }


def rows_recompute(evidence: Evidence) -> Iterator[Finding]:
    """A row holds what mamf writes for its shape, problem and samples, and nothing else."""
    for line, record, row in evidence.rows:
        again = measurement_record(row)
        if is_of_old_calibration(record):
            record, again = without_interval(record), without_interval(again)
        for name in sorted(record.keys() - again.keys() - {"record"}):
            yield Finding("unknown-field", f"mamf writes no field {name!r} of a row: remove it", line)
        # The accuracy of a timer is what was known of it when the log was written.
        for name in sorted(again.keys() - {"time", "timer_accuracy_seconds"}):
            # Earlier logs lack fields of today; what belongs to samples they all have.
            is_due = name in record or name in _FROM_SAMPLES
            if is_due and not agree(record.get(name), again[name], _FROM_SAMPLES.get(name, same_number)):
                message = f"{row.shape}: {name} does not follow from the row's samples and plan"
                yield Finding("row-mismatch", message, line)
        # Without a calibration, as in converted logs, sustained is judged by its median.
        if row.best_by != BEST_BY[row.regime] and (row.repeatability or row.best_by != "median"):
            yield Finding("row-mismatch", f"{row.shape}: a best of {row.regime} is not chosen by {row.best_by}", line)


def same_number(written: float, again: float, tolerance: float = 0.0, relative: float = 6e-6) -> bool:
    """Up to rounding to six digits, or to so many decimals as ``tolerance`` has."""
    return math.isclose(written, again, rel_tol=relative, abs_tol=tolerance)


def same_rate(written: float, again: float) -> bool:
    """Up to rounding to six digits, or to three decimals."""
    is_early = written == round(written, 3) and abs(written - again) <= _EARLY_RATE_ROUNDING
    return is_early or same_number(written, again, relative=_RATE_ROUNDING)


def agree(written: Any, again: Any, same: Callable[[float, float], bool] = same_number) -> bool:
    """Whether two JSON values are equal, numbers up to rounding."""
    if written is again:  # copied as written: nearly all fields of a row
        return True
    if isinstance(again, float) and isinstance(written, (int, float)) and not isinstance(written, bool):
        return same(written, again)
    if isinstance(again, dict):
        is_alike = isinstance(written, dict) and written.keys() == again.keys()
        return is_alike and all(agree(written[key], again[key], same) for key in again)
    if isinstance(again, (list, tuple)):
        if not isinstance(written, list) or len(written) != len(again):
            return False
        if all(map(operator.is_, written, again)):
            return True
        return all(agree(one, other, same) for one, other in zip(written, again, strict=True))
    return type(written) is type(again) and bool(written == again)


# What follows from the samples. Coverage is written with four decimals, seconds with twelve.
_FROM_SAMPLES: Mapping[str, Callable[[float, float], bool]] = {
    "tflops": same_rate,
    "rate": same_rate,
    "flop": same_number,
    "seconds": partial(same_number, tolerance=2e-12),
    "interval_coverage": partial(same_number, tolerance=2e-4),
}


def rows_are_possible(evidence: Evidence) -> Iterator[Finding]:
    """No sample is faster than the device or its memory allows, and no figure faster than the clock that was read."""
    for line, row in evidence.good_rows:
        info, limit = evidence.device_of(row), _limit(evidence, row)
        claimed = [name for name in _OF_APPROXIMATION if name in row.details]
        if claimed and is_exact(row):
            message = f"{row.kernel} is not known to approximate: its rows have no {claimed[0]}"
            yield Finding("unknown-field", message, line)
        if limit is not None and split_impossible(row.samples, row.amount, limit, row.timer_accuracy)[1]:
            fastest, most = row.amount / min(row.samples) / TERA, limit / TERA
            message = f"{row.shape}: {fastest:.4g} {row.work.unit}, more than the {most:.4g} that {info.name} can do"
            yield Finding("implausible", message, line)
        elif reason := why_implausible(row, info, limit):
            yield Finding("implausible", f"{row.shape}: {reason}", line)


def _limit(evidence: Evidence, row: Measurement) -> float | None:
    """The most that a row's rate can be: of a kernel that approximates, all the work in the fastest of its dtypes,
    without what it skipped.
    """
    info = evidence.device_of(row)
    limit = operation_called(row.operation).fastest_possible(info, row.problem, row.shape)
    if limit is None or is_exact(row):
        return limit
    faster = (fastest_possible_flops(info, dtype) for dtype in _APPROXIMATE_DTYPES)
    return max(limit, *filter(None, faster)) / (1 - skipped_share(row))


def skipped_share(row: Measurement) -> float:
    """The share of the work that a kernel says to have skipped. Raises ValueError for what is not a share."""
    share = float(row.details.get("sparsity", 0.0))
    if not 0 <= share < 1:
        raise ValueError(f"a sparsity of {share:g} is not at least 0 and below 1")
    return share


def is_exact(row: Measurement) -> bool:
    """Whether all FLOP were computed in the row's dtype. Only a kernel that its operation lists may approximate,
    whatever a row says; no kernel is imported for it.
    """
    if not any(name in row.details for name in _OF_APPROXIMATION):
        return True
    return row.kernel.partition("[")[0] not in operation_called(row.operation).approximate_kernels


def rows_are_verified(evidence: Evidence) -> Iterator[Finding]:
    """Every good row's result was checked, with an error within its tolerance."""
    for line, row in evidence.good_rows:
        most = _MAX_ERROR if is_exact(row) else _MAX_ERROR_OF_APPROXIMATION
        bound = row.problem.tolerance if row.operation == MATMUL else most
        if row.error is None:
            yield Finding("unverified", f"{row.shape} by {row.kernel}: its result was not checked", line)
        elif not 0 <= row.error <= bound:
            yield Finding("unverified", f"{row.shape}: relative error {row.error:.2g}, beyond {bound:.2g}", line)


def sensors_are_plausible(evidence: Evidence) -> Iterator[Finding]:
    """If the device has sensors, each good row has a clock and a power within the device's limits."""
    if (sensors := evidence.header.get("sensors")) != "available":
        yield Finding("sensors", f"clock, power and temperature: {sensors}", 1, is_warning=True)
    rows = [row.conditions for _, _, row in evidence.rows if row.ok]
    for what, values in (("clock", [row.clock_hz for row in rows]), ("power", [row.watts for row in rows])):
        missing = sum(value is None for value in values)
        if has_sensors(evidence) and missing > 0 and (what == "clock" or missing == len(values)):
            yield Finding("sensors", f"{missing} of {len(rows)} rows have no {what}, but there are sensors")
    for line, _, row in evidence.rows:
        seen, device = row.conditions, evidence.device_of(row)
        limit, highest = device.power_limit_watts or math.inf, device.max_clock_hz or math.inf
        least = _MIN_POWER * limit if row.ok and limit < math.inf else 0
        if seen.watts is not None and not least <= seen.watts <= _MAX_POWER * limit:
            yield Finding("sensors", f"{row.shape}: {seen.watts:.0f} W, with a limit of {limit:.0f} W", line)
        if seen.clock_hz is not None and not 0 < seen.clock_hz <= _MAX_CLOCK * highest:
            yield Finding("sensors", f"{row.shape}: {seen.clock_hz / 1e6:.0f} MHz, above the highest clock", line)
        if not 0 <= (row.peak_memory_bytes or 0) <= (device.memory_bytes or math.inf):
            yield Finding("implausible", f"{row.shape}: {row.peak_memory_bytes} bytes, more than the device has", line)


def samples_differ(evidence: Evidence) -> Iterator[Finding]:
    """Samples of a row are not all equal, and are not those of another row."""
    seen: dict[tuple[float, ...], int] = {}
    for line, _, row in evidence.rows:
        if len(row.samples) < DISTINCTIVE_SAMPLES:
            continue
        if len(set(row.samples)) == 1:
            yield Finding("equal-samples", f"{row.shape}: its {len(row.samples)} samples are all equal", line)
        if (before := seen.setdefault(row.samples, line)) != line:
            yield Finding("equal-samples", f"{row.shape}: has the samples of line {before}", line)


def timer_is_credible(evidence: Evidence) -> Iterator[Finding]:
    """The overhead subtracted lies within the bounds of its backend. Figures of schema 4 are corrected when read."""
    backend, is_early = evidence.header["device"]["backend"], evidence.header["schema"] < 5
    if timer := find_timer(backend):
        bounds = f"{timer.lowest * 1e6:.1f} to {timer.highest * 1e6:.1f}"
    for line, _, row in evidence.rows:
        overhead = row.timer_overhead
        if overhead < 0 or (overhead and not is_credible(backend, overhead)):
            adds = f"the timer of {backend} adds {bounds if timer else '0 to 20'} us"
            yield Finding("timer", f"{overhead * 1e6:.1f} us subtracted, but {adds}", line, is_warning=is_early)
            return
