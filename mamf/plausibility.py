"""Which samples and rows are plausible, given the device's physics and the clock that was read during the row.

Measurements and ``mamf results check`` use the same functions.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from mamf.backend import DeviceInfo
from mamf.dtypes import DTYPES
from mamf.measurement import TERA, Measurement
from mamf.peaks import fastest_at_clock
from mamf.regime_names import BURST, CLASSIC

#: The largest share of impossible samples for which the other samples are still used.
MAX_IMPOSSIBLE = 0.1
# On a device without a known peak, samples this many times shorter than the median are suspect: a timer that misses
# its launch reads microseconds.
_SUSPECT = 10
# The throttle reason that backends report at the power limit.
_POWER = "power cap"


def split_impossible(
    seconds: Sequence[float], amount: float, limit: float | None, accuracy: float = 0.0
) -> tuple[list[float], list[float]]:
    """Split samples into possible and impossible ones: not positive, or faster than ``limit`` (units of ``amount`` per
    second) by more than the timer's ``accuracy`` in seconds. A sample that is merely far below the others is kept: on a
    busy machine the fast samples are the correct ones.
    """
    floor = amount / limit - accuracy if limit else 0.0
    possible = [sample for sample in seconds if sample > 0 and sample >= floor]
    impossible = [sample for sample in seconds if not (sample > 0 and sample >= floor)]
    return possible, impossible


def why_implausible(row: Measurement, info: DeviceInfo, limit: float | None) -> str | None:
    """Why a row on a device is implausible, or None. The row's status is ignored.

    ``limit``: the most FLOP or bytes per second that the device can reach for the row's work; None if unknown.
    """
    every = (*row.samples, *row.implausible_samples)
    possible, impossible = split_impossible(every, row.amount, limit, row.timer_accuracy)
    if len(impossible) > MAX_IMPOSSIBLE * len(every):
        rate = f"{row.amount / max(min(impossible), 1e-12) / TERA:.0f} {row.work.unit}"
        return f"{len(impossible)} of {len(every)} samples are impossibly fast ({rate})"
    if not possible:
        return "it has no samples"
    return _why_beyond_clock(row, info) if limit else _why_suspect(row, info, possible)


def _why_beyond_clock(row: Measurement, info: DeviceInfo) -> str | None:
    """Why a row's rate is more than its clock allows, or None; None also if the clock was not read during the row.

    Rows of the classic regime are not judged: the clock is read outside its loop. A device that is throttled for
    another reason than power switches between clocks faster than sensors are read, and all readings may be of the
    lower clock.
    """
    conditions, dtype = row.conditions, row.problem.dtype
    # In burst the units' true clock is far below the one that sensors read.
    clock = min(filter(None, (conditions.true_clock_hz, conditions.clock_hz)), default=None)
    is_steady = row.regime != CLASSIC and set(conditions.throttle_reasons) <= {_POWER}
    if row.work.unit != "TFLOPS" or not is_steady or not clock or dtype not in DTYPES or not row.summary:
        return None
    may_fall = row.regime == BURST and bool(conditions.throttle_reasons)
    bound = fastest_at_clock(info, dtype, clock, may_fall=may_fall)
    if bound is None or row.best_rate * TERA <= bound * (1 + row.accuracy):
        return None
    return (
        f"{row.best_rate:.4g} {row.work.unit} are more than the {bound / TERA:.4g} that its clock of "
        f"{clock / 1e6:.0f} MHz allows"
    )


def _why_suspect(row: Measurement, info: DeviceInfo, possible: Sequence[float]) -> str | None:
    """Why the timer may have missed launches on an accelerator without a known peak, or None. No sample is dropped,
    because it is unknown which samples are correct. A host's timer cannot miss a launch.

    A median or mean tolerates 10 % of such samples; the fastest sample tolerates none.
    """
    usual = statistics.median(possible)
    suspect = sum(sample * _SUSPECT < usual for sample in possible)
    if not info.is_accelerator or suspect <= (0 if row.best_by == "fastest" else MAX_IMPOSSIBLE * len(possible)):
        return None
    return (
        f"{suspect} of {len(possible)} samples are more than {_SUSPECT} times shorter than the median, and no known "
        f"peak of {info.name} says which are true"
    )
