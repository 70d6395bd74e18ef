"""Rules about single rows: figures follow from their samples, and samples are physically possible."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from functools import cache, partial
from typing import Any

from mamf.backend import SIMULATED
from mamf.contribution.evidence import Evidence, Finding
from mamf.dtypes import DTYPES
from mamf.errors import MamfError
from mamf.logs.records import measurement_record
from mamf.measurement import TERA, TIME, Measurement
from mamf.operations.attention.operation import is_attention
from mamf.operations.unknown import Unknown, operation_called
from mamf.peaks import fastest_possible_flops
from mamf.plans import MATMUL
from mamf.plausibility import split_impossible, why_implausible
from mamf.plugins.discovery import is_path, kernel_of
from mamf.regime_names import BEST_BY, BURST

# A step of the sixth digit, which rates are rounded to; half a step of the third decimal, which converted logs round
# them to, and of the sixth digit of what is computed anew.
_RATE_ROUNDING, _EARLY_RATE_ROUNDING = 1.1e-5, 5.5e-4
# Products whose rounding shows: float64 may agree with the float64 reference to the last bit, integers must. Rounding
# alone leaves a third of the tolerance, and of float32, whose tolerance is of long sums, a four-hundredth.
_ROUNDED = ("bfloat16", "float16", "tf32", "float32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
_LEAST_OF_TOLERANCE, _LEAST_OF_FLOAT32 = 0.1, 1e-3
# Verification decides by kernel; no result that passed it has a larger error.
_WORST = {True: 0.05, False: 0.5}
_MOST_WATTS = 1.2
# Seconds that two marks may hold beside a launch: of launches as short as that the share is larger than what is left.
_MOST_OF_TIMER = 20e-6
_MOST_CLOCK = 1.02
_OF_INTERVAL = {"interval", "interval_tflops", "interval_coverage", "repeatability"}
# Shares of a launch's time add up to 1, each rounded.
_MOST_OF_TIME = 1.01
# What only kernels say that approximate: they skip work, or multiply in another dtype. The fastest of these bound them.
_OF_APPROXIMATION = ("product_dtypes", "sparsity", "cosine_similarity", "relative_l1")
_APPROXIMATE_DTYPES = ("int8", "float8_e4m3fn")
# The day of mamf's first log, and how far the clocks of two machines may be apart. Records hold whole seconds.
_FIRST_DAY, _CLOCKS_APART, _WHOLE_SECONDS = datetime(2026, 11, 21, tzinfo=timezone.utc), timedelta(days=2), 1.0


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
        if record["flop"] != again["flop"]:
            formula = "the unmasked pairs" if is_attention(row) else row.work.convention.partition(";")[0]
            yield Finding(
                "flop-count", f"{row.shape}: {record['flop']} FLOP are not the {again['flop']} of {formula}", line
            )
        for name in sorted(record.keys() - again.keys() - {"record"}):
            yield Finding("unknown-field", f"mamf writes no field {name!r} of a row: remove it", line)
        for name in again.keys() - {"flop", "time"}:
            # Earlier logs lack fields of today; what belongs to samples they all have.
            is_due = name in record or name in _FROM_SAMPLES
            if is_due and not agree(record.get(name), again[name], _FROM_SAMPLES.get(name, same_number)):
                yield Finding(
                    "row-mismatch", f"{row.shape}: {name} does not follow from the row's samples and plan", line
                )
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
    "seconds": partial(same_number, tolerance=2e-12),
    "interval_coverage": partial(same_number, tolerance=2e-4),
}


def possible(evidence: Evidence) -> Iterator[Finding]:
    """No sample is faster than the device's highest clock or its memory allows, and no figure faster than the clock
    that was read allows.
    """
    yield from _unbounded(evidence)
    for line, row in good_rows(evidence):
        info, limit = evidence.device_of(row), _limit(evidence, row)
        said = [name for name in _OF_APPROXIMATION if name in row.details]
        if said and is_exact(row):
            yield Finding(
                "unknown-field", f"{row.kernel} is not registered as approximate: its rows have no {said[0]}", line
            )
        fastest, unit = row.amount / min(row.samples), row.work.unit
        if limit is not None and split_impossible(row.samples, row.amount, limit, row.timer_accuracy)[1]:
            message = (
                f"{row.shape}: {fastest / TERA:.4g} {unit}, more than the {limit / TERA:.4g} that {info.name} can do"
            )
            yield Finding("implausible", message, line)
        elif reason := why_implausible(row, info, limit):
            yield Finding("implausible", f"{row.shape}: {reason}", line)


def _unbounded(evidence: Evidence) -> Iterator[Finding]:
    rows = [row for _, row in good_rows(evidence)]
    unbounded = Counter(row.problem.dtype for row in rows if _limit(evidence, row) is None)
    for dtype, count in sorted(unbounded.items()):
        of = sum(row.problem.dtype == dtype for row in rows)
        name = evidence.log.device(None).name
        message = f"nothing bounds {count} of its {of} rows in {dtype}: no known peak of {name} does"
        yield Finding("implausible", message, 1, is_warning=True)


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
    """The share of the work that a kernel says to have skipped. Raises ValueError for what is no share."""
    share = float(row.details.get("sparsity", 0.0))
    if not 0 <= share < 1:
        raise ValueError(f"a sparsity of {share:g} is not at least 0 and below 1")
    return share


def is_exact(row: Measurement) -> bool:
    """Whether all FLOP were computed in the row's dtype. Only a kernel that is registered as approximate may skip work
    or use another dtype, whatever the row says.
    """
    if not any(name in row.details for name in _OF_APPROXIMATION):
        return True
    return _is_registered_as_exact(row.operation, row.kernel)


@cache
def _is_registered_as_exact(operation: str, kernel: str) -> bool:
    of = operation_called(operation)
    if isinstance(of, Unknown) or is_path(kernel):
        return True
    try:
        return kernel_of(of, kernel).is_exact
    except MamfError:  # unknown
        return True


def verified(evidence: Evidence) -> Iterator[Finding]:
    """Every good row's result was checked, and its rounding error shows that its operands were not zeros."""
    for line, row in good_rows(evidence):
        bound = row.problem.tolerance if row.operation == MATMUL else _WORST[is_exact(row)]
        if row.error is None:
            yield Finding("unverified", f"{row.shape} by {row.kernel}: its result was not checked", line)
        elif not 0 <= row.error <= bound:
            yield Finding("unverified", f"{row.shape}: relative error {row.error:.2g}, beyond {bound:.2g}", line)
        elif is_rounded(row) and row.error < _least_error(row.problem):
            message = f"{row.shape}: a relative error of {row.error:.2g}, less than rounding leaves of normal data"
            yield Finding("data", message, line)


def _least_error(problem: Any) -> float:
    """Below the error of rounding the result, whatever else rounds."""
    tolerance: float = getattr(problem, "tolerance", DTYPES[problem.dtype].tolerance)
    return tolerance * (_LEAST_OF_FLOAT32 if problem.dtype == "float32" else _LEAST_OF_TOLERANCE)


def is_rounded(row: Measurement) -> bool:
    """Whether rounding must show in a result: true for products of normal data."""
    is_product = row.operation == MATMUL or is_attention(row)
    return is_product and row.problem.data == "normal" and row.problem.dtype in _ROUNDED


def sensors_plausible(evidence: Evidence) -> Iterator[Finding]:
    """Readings lie within the device's limits, the timer's share within a sample."""
    for line, _, row in evidence.rows:
        seen, device = row.conditions, evidence.device_of(row)
        limit, highest = device.power_limit_watts, device.max_clock_hz
        if seen.watts is not None and not 0 <= seen.watts <= _MOST_WATTS * (limit or math.inf):
            yield Finding("implausible", f"{row.shape}: {seen.watts:.0f} W, of {limit} W at most", line)
        if seen.clock_hz is not None and not 0 < seen.clock_hz <= _MOST_CLOCK * (highest or math.inf):
            yield Finding("implausible", f"{row.shape}: {seen.clock_hz / 1e6:.0f} MHz, above the highest clock", line)
        if not 0 <= row.timer_overhead < max(_MOST_OF_TIMER, min(row.samples, default=math.inf)):
            yield Finding("implausible", f"{row.shape}: a timer's share of {row.timer_overhead} s", line)
        peak_memory = row.peak_memory_bytes
        if peak_memory is not None and not 0 <= peak_memory <= (device.memory_bytes or math.inf):
            yield Finding("implausible", f"{row.shape}: {peak_memory} bytes, more than the device has", line)
        timed = [name for name in row.details if name.endswith(TIME)]
        if len(timed) > len(row.time_shares) or sum(row.time_shares.values()) > _MOST_OF_TIME:
            yield Finding("implausible", f"{row.shape}: what its time goes to is no share, or more than all", line)


def times_in_order(evidence: Evidence) -> Iterator[Finding]:
    """Records are written one after the other, between the first day of mamf and today, and no sooner than their
    samples took.
    """
    started = before = datetime.fromisoformat(evidence.header["started"])
    if started < _FIRST_DAY:
        yield Finding("time-order", f"started on {started:%Y-%m-%d}, before there was mamf", 1)
    rows, is_virtual = {line: row for line, _, row in evidence.rows}, evidence.log.device(None).backend == SIMULATED
    measured: dict[int | None, float] = {}
    for line, record in evidence.records[1:]:
        text = record.get("time", record.get("started"))
        if line in rows and not is_virtual:
            device = rows[line].device
            measured[device] = measured.get(device, 0.0) + _seconds_of(rows[line])
        if text is None:
            continue
        now = datetime.fromisoformat(text)
        if now < before:
            yield Finding("time-order", f"written at {text}, before what stands above it ({before.isoformat()})", line)
        before = max(now, before)
        if max(measured.values(), default=0.0) > (before - started).total_seconds() + _WHOLE_SECONDS:
            message = (
                f"written {(before - started).total_seconds():.0f} s after the start, sooner than its samples took"
            )
            yield Finding("time-order", message, line)
            break
    if before > datetime.now(timezone.utc) + _CLOCKS_APART:
        yield Finding("time-order", f"written on {before:%Y-%m-%d}, which is to come")


def _seconds_of(row: Measurement) -> float:
    """Seconds of a row's launches: each sample of a burst is a launch, the others are means of several."""
    if row.regime == BURST:
        return sum(row.samples) + sum(row.implausible_samples)
    return row.launches * row.summary.mean if row.summary else 0.0


def good_rows(evidence: Evidence) -> Iterator[tuple[int, Measurement]]:
    for line, _, row in evidence.rows:
        if row.ok and row.problem.dtype in DTYPES:
            yield line, row
