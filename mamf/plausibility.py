"""Decide which samples and rows are plausible, from the device's peak rate and the clock that mamf read while it
measured the row. Both the engine, for each new row, and ``mamf results check`` use these functions.

The rate of a kernel depends on the share of the compute units' cycles that it uses, and on the clock of these units:
``rate = share of cycles x compute units x FLOP per cycle x clock``. The share of cycles depends on the kernel only: it
is equal in all regimes and for any data. The clock depends on how much power the kernel draws with this data.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence

from mamf.backend import DeviceInfo
from mamf.dtypes import DTYPES
from mamf.files import read_packaged_csv_rows
from mamf.measurement import TERA, Measurement
from mamf.peaks import compute_flop_per_cycle, compute_max_flops_at_clock, find_datasheet_rate
from mamf.plans import BURST, CLASSIC

#: If more than this share of the samples of a row are faster than the device can be, mamf discards all samples of the
#: row.
MAX_IMPOSSIBLE_SAMPLE_SHARE = 0.1
# On a device without a known peak, samples that are this many times shorter than the median are suspect. A timer that
# misses a launch reports such a short time.
_MIN_SUSPECT_SPEEDUP = 10
# The throttle reason that backends report for a device that is at its power limit.
_POWER_LIMIT_REASON = "power cap"


def separate_impossible_samples(
    samples: Sequence[float], amount: float, max_rate: float | None, timer_error_seconds: float = 0.0
) -> tuple[list[float], list[float]]:
    """Split samples (seconds per launch) into possible and impossible ones.

    A launch of ``amount`` FLOP or bytes takes at least ``amount / max_rate`` seconds. A sample is impossible if it is
    shorter than this by more than the timer's error, or if it is not above 0. If ``max_rate`` is None, only samples
    that are not above 0 are impossible.

    Samples that are possible but much shorter than the median are kept, because on a busy machine the short samples are
    the correct ones.
    """
    min_seconds = amount / max_rate - timer_error_seconds if max_rate else 0.0
    possible = [sample for sample in samples if sample > 0 and sample >= min_seconds]
    return possible, [sample for sample in samples if not (sample > 0 and sample >= min_seconds)]


def explain_implausible_row(row: Measurement, info: DeviceInfo, max_rate: float | None) -> str | None:
    """Explain why a row is implausible. Return None if it is plausible. The row's status does not affect the result.

    ``max_rate``: the FLOP or bytes per second that the device cannot exceed for this dtype; None if unknown.
    """
    all_samples = (*row.samples, *row.implausible_samples)
    possible, impossible = separate_impossible_samples(all_samples, row.work_amount, max_rate, row.timer_error_seconds)
    if len(impossible) > MAX_IMPOSSIBLE_SAMPLE_SHARE * len(all_samples):
        rate = row.work_amount / max(min(impossible), 1e-12) / TERA
        return (
            f"{len(impossible)} of {len(all_samples)} samples are faster than the device can be (up to {rate:.0f} "
            f"{row.work.unit})"
        )
    if not possible:
        return "the measurement has no samples"
    return _explain_rate_above_clock_limit(row, info) if max_rate else _explain_suspect_samples(row, info, possible)


def _explain_rate_above_clock_limit(row: Measurement, info: DeviceInfo) -> str | None:
    """Explain why a row's rate is higher than its clock allows. Return None if the rate is not too high, or if the
    clock is not known well enough.

    The clock is not known well enough in two cases. In the regime classic, mamf reads the clock only outside the loop
    of launches. If the device is throttled for a reason other than power, the clock changes faster than mamf reads it,
    so mamf may miss the higher clocks.
    """
    conditions, dtype = row.conditions, row.problem.dtype
    # Use the lower one of the two clocks. In the burst regime, the true clock of the compute units is far below the
    # clock that the sensors report.
    clock_hz = min(filter(None, (conditions.true_clock_hz, conditions.clock_hz)), default=None)
    is_steady = row.regime != CLASSIC and set(conditions.throttle_reasons) <= {_POWER_LIMIT_REASON}
    if row.work.unit != "TFLOPS" or not is_steady or not clock_hz or dtype not in DTYPES or not row.summary:
        return None
    may_clock_fall = row.regime == BURST and bool(conditions.throttle_reasons)
    max_flops = compute_max_flops_at_clock(info, dtype, clock_hz, may_clock_fall=may_clock_fall)
    if max_flops is None or row.best_rate * TERA <= max_flops * (1 + row.relative_timing_error):
        return None
    return (
        f"{row.best_rate:.4g} {row.work.unit} is more than the {max_flops / TERA:.4g} {row.work.unit} that the "
        f"measured clock of {clock_hz / 1e6:.0f} MHz allows"
    )


def _explain_suspect_samples(row: Measurement, info: DeviceInfo, possible: Sequence[float]) -> str | None:
    """Explain why a row's samples suggest that the timer of an accelerator missed launches. Return None if they do not.

    Call this only if the peak of the accelerator is not known. ``possible``: the samples that are not faster than the
    hardware allows, in seconds. A sample is suspect if it is far shorter than the median.

    mamf does not drop suspect samples, because it cannot know which samples are correct. It accepts up to 10 % suspect
    samples in a row that is ranked by its median or mean, and none in a row that is ranked by its fastest sample. On a
    CPU, it accepts all samples, because the host's clock times launches and cannot miss one.
    """
    median_seconds = statistics.median(possible)
    suspect_count = sum(sample * _MIN_SUSPECT_SPEEDUP < median_seconds for sample in possible)
    if not info.is_accelerator or suspect_count <= (
        0 if row.ranking_statistic == "fastest" else MAX_IMPOSSIBLE_SAMPLE_SHARE * len(possible)
    ):
        return None
    return (
        f"{suspect_count} of {len(possible)} samples are more than {_MIN_SUSPECT_SPEEDUP} times shorter than the "
        f"median, and without a known peak of {info.name} it is unclear which are correct"
    )


@functools.cache
def _read_flop_per_cycle() -> dict[tuple[str, str], float]:
    return {
        (row["architecture"], dtype): float(row["flop"])
        for row in read_packaged_csv_rows("flop_per_cycle.csv")
        for dtype in row["dtypes"].split()
    }


def find_flop_per_cycle(info: DeviceInfo, dtype: str) -> float | None:
    """Return the FLOP that one compute unit can do in a clock cycle with operands of ``dtype``, or None if unknown.

    The figures are from ``flop_per_cycle.csv``, which cites the architectures' whitepapers. The file leaves out
    architectures if the compute units of some products are faster than those of others. For example, GeForce cards have
    half the tensor rate of workstation cards. For a device that the file leaves out, the result is the datasheet's peak
    divided by the datasheet's clock and by the number of compute units.
    """
    known_dtype = DTYPES.get(dtype)
    if known_dtype is None:
        return None
    listed_flop = _read_flop_per_cycle().get((info.architecture or "", known_dtype.datasheet_dtype))
    return listed_flop or compute_flop_per_cycle(
        find_datasheet_rate(info.name, dtype, info.compute_units), info.compute_units
    )


def compute_theoretical_flops(info: DeviceInfo, dtype: str, clock_hz: float | None) -> float | None:
    """Compute the FLOP/s that a device would reach if its compute units used every cycle at the clock ``clock_hz``.
    Return None if the clock, the number of units or their FLOP per cycle is unknown.
    """
    flop_per_cycle = find_flop_per_cycle(info, dtype)
    return (
        info.compute_units * flop_per_cycle * clock_hz if flop_per_cycle and info.compute_units and clock_hz else None
    )


def compute_used_cycle_share(rate: float, info: DeviceInfo, dtype: str, clock_hz: float | None) -> float | None:
    """Return the share of the compute units' cycles that the device uses if it reaches ``rate`` FLOP/s at ``clock_hz``.
    Return None if the clock, the number of units or their FLOP per cycle is unknown.

    The cycles of idle compute units count as unused.
    """
    theoretical_flops = compute_theoretical_flops(info, dtype, clock_hz)
    return rate / theoretical_flops if theoretical_flops else None
