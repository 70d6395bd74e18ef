"""Decides which samples and rows are plausible, from the device's peak and the clock that was read during the row.

Measurements and ``mamf results check`` use the same functions.

The two factors of a rate are the clock that the compute units had, and the share of their cycles that a kernel used:
``rate = cycles used x compute units x FLOP per cycle x clock``. The share depends on the kernel only, and is
the same in every regime and for any data. The clock depends on the energy that the kernel and its data take.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence

from mamf.backend import DeviceInfo
from mamf.dtypes import DTYPES
from mamf.files import read_packaged_rows
from mamf.measurement import TERA, Measurement
from mamf.peaks import compute_flop_per_cycle, compute_max_flops_at_clock, find_peak
from mamf.plans import BURST, CLASSIC

#: If a larger share of a row's samples is impossible, its possible samples are not used either.
MAX_IMPOSSIBLE = 0.1
# On a device without a known peak, samples this many times shorter than the median are suspect: a timer that misses a
# launch reads microseconds.
_SUSPECT = 10
# The throttle reason that backends report at the power limit.
_POWER = "power cap"


def split_impossible_samples(
    seconds: Sequence[float], amount: float, limit: float | None, accuracy: float = 0.0
) -> tuple[list[float], list[float]]:
    """Split samples into possible and impossible ones. A sample is impossible if it is not positive, or faster than
    ``limit`` (units of ``amount`` per second) by more than the timer's ``accuracy`` in seconds. Samples that are only
    much shorter than the others count as possible, because on a busy machine the fast samples are the correct ones.
    """
    floor = amount / limit - accuracy if limit else 0.0
    possible = [sample for sample in seconds if sample > 0 and sample >= floor]
    impossible = [sample for sample in seconds if not (sample > 0 and sample >= floor)]
    return possible, impossible


def explain_implausible(row: Measurement, info: DeviceInfo, limit: float | None) -> str | None:
    """Explain why a row is implausible. Return None if it is plausible. The row's status is ignored.

    ``limit``: the FLOP or bytes per second that the device cannot exceed for this work; None if unknown.
    """
    every = (*row.samples, *row.implausible_samples)
    possible, impossible = split_impossible_samples(every, row.amount, limit, row.timer_accuracy)
    if len(impossible) > MAX_IMPOSSIBLE * len(every):
        rate = f"{row.amount / max(min(impossible), 1e-12) / TERA:.0f} {row.work.unit}"
        return f"{len(impossible)} of {len(every)} samples are impossibly fast ({rate})"
    if not possible:
        return "it has no samples"
    return _explain_beyond_clock(row, info) if limit else _explain_suspect_samples(row, info, possible)


def _explain_beyond_clock(row: Measurement, info: DeviceInfo) -> str | None:
    """Explain why a row's rate is more than its clock allows. Return None if it is not, or if the clock is not known
    well enough.

    In classic the clock is read outside the loop. A device that is throttled for a reason other than power switches
    between clocks faster than sensors are read, so all readings may be of the lower clock.
    """
    conditions, dtype = row.conditions, row.problem.dtype
    # In burst the true clock of the units is far below the clock that sensors read.
    clock = min(filter(None, (conditions.true_clock_hz, conditions.clock_hz)), default=None)
    is_steady = row.regime != CLASSIC and set(conditions.throttle_reasons) <= {_POWER}
    if row.work.unit != "TFLOPS" or not is_steady or not clock or dtype not in DTYPES or not row.summary:
        return None
    may_fall = row.regime == BURST and bool(conditions.throttle_reasons)
    bound = compute_max_flops_at_clock(info, dtype, clock, may_fall=may_fall)
    if bound is None or row.best_rate * TERA <= bound * (1 + row.accuracy):
        return None
    return (
        f"{row.best_rate:.4g} {row.work.unit} is more than the {bound / TERA:.4g} that its clock of "
        f"{clock / 1e6:.0f} MHz allows"
    )


def _explain_suspect_samples(row: Measurement, info: DeviceInfo, possible: Sequence[float]) -> str | None:
    """Explain why the timer may have missed launches on an accelerator without a known peak; None if it did not. No
    sample is dropped, because the correct samples are not known. A host's timer cannot miss a launch.

    A median or mean tolerates 10 % of such samples, the fastest sample none.
    """
    usual = statistics.median(possible)
    suspect = sum(sample * _SUSPECT < usual for sample in possible)
    if not info.is_accelerator or suspect <= (0 if row.best_by == "fastest" else MAX_IMPOSSIBLE * len(possible)):
        return None
    return (
        f"{suspect} of {len(possible)} samples are more than {_SUSPECT} times shorter than the median, and without "
        f"a known peak of {info.name} it is unclear which are correct"
    )


@functools.cache
def _read_flop_per_cycle() -> dict[tuple[str, str], float]:
    return {
        (row["architecture"], dtype): float(row["flop"])
        for row in read_packaged_rows("flop_per_cycle.csv")
        for dtype in row["dtypes"].split()
    }


def find_flop_per_cycle(info: DeviceInfo, dtype: str) -> float | None:
    """Return the FLOP that one compute unit can do in a clock cycle, or None if it is unknown.

    The figures are from ``flop_per_cycle.csv``, which cites the architectures' whitepapers. It leaves out an
    architecture if its products differ: GeForce cards have half the tensor rate of workstation cards. For these, the
    figure is the datasheet's peak divided by its clock and the number of units.
    """
    known = DTYPES.get(dtype)
    if known is None:
        return None
    listed = _read_flop_per_cycle().get((info.architecture or "", known.peak_name))
    return listed or compute_flop_per_cycle(find_peak(info.name, dtype, info.compute_units), info.compute_units)


def compute_max_rate(info: DeviceInfo, dtype: str, clock_hz: float | None) -> float | None:
    """Compute the FLOP/s of all compute units if they use every cycle at a clock. None if a factor is unknown."""
    of_unit = find_flop_per_cycle(info, dtype)
    return info.compute_units * of_unit * clock_hz if of_unit and info.compute_units and clock_hz else None


def compute_cycles_used(rate: float, info: DeviceInfo, dtype: str, clock_hz: float | None) -> float | None:
    """Return the share of all compute units' cycles that a rate in FLOP/s takes at a clock, or None if a factor is
    unknown.

    Units that a launch leaves idle count as cycles that it does not use.
    """
    possible = compute_max_rate(info, dtype, clock_hz)
    return rate / possible if possible else None
