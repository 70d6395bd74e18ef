"""Which samples and rows can be true: bounded by the device's physics, and by the clock that was read during the row.

Measuring and ``mamf results check`` ask the same functions.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from mamf.backend import DeviceInfo
from mamf.dtypes import DTYPES
from mamf.measurement import TERA, Measurement
from mamf.peaks import fastest_at_clock
from mamf.regime_names import CLASSIC

#: The largest share of impossible samples at which the others still give a figure.
MOST_IMPOSSIBLE = 0.1
# On a device that nothing bounds, samples this many times shorter than the median are suspect: a timer that misses its
# launch reads microseconds.
_SUSPECT = 10
# The throttle reason of a device at its power limit, as backends name it.
_POWER = "power cap"


def split_impossible(
    seconds: Sequence[float], amount: float, limit: float | None, accuracy: float = 0.0
) -> tuple[list[float], list[float]]:
    """Samples that can be true, and those that cannot: not positive, or faster than ``limit`` (of ``amount`` in a
    second) by more than the ``accuracy`` of the timer, in seconds. A sample that is merely far below the others stays:
    on a busy machine the fast ones are the true ones.
    """
    floor = amount / limit - accuracy if limit else 0.0
    possible = [sample for sample in seconds if sample > 0 and sample >= floor]
    impossible = [sample for sample in seconds if not (sample > 0 and sample >= floor)]
    return possible, impossible


def why_implausible(row: Measurement, info: DeviceInfo, limit: float | None) -> str | None:
    """Why a row on a device gives no figure, or None. Its status is not read.

    ``limit``: what of the row's work the device cannot exceed in a second; None if nothing bounds it.
    """
    every = (*row.samples, *row.implausible_samples)
    possible, impossible = split_impossible(every, row.amount, limit, row.timer_accuracy)
    if len(impossible) > MOST_IMPOSSIBLE * len(every):
        rate = f"{row.amount / max(min(impossible), 1e-12) / TERA:.0f} {row.work.unit}"
        return f"{len(impossible)} of {len(every)} samples are impossibly fast ({rate})"
    if not possible:
        return "it has no samples"
    return _why_beyond_clock(row, info) if limit else _why_suspect(row, info, possible)


def _why_beyond_clock(row: Measurement, info: DeviceInfo) -> str | None:
    """That a row's figure is more than its clock allows; None for rows whose clock was not read while they ran.

    The clock of mamf-finder's loop is whatever it is when it is read. A device that slows down for another reason than
    its power switches between clocks faster than sensors are read, and all readings may be of the lower one.
    """
    clock, dtype = row.conditions.clock_hz, row.problem.dtype
    is_steady = row.regime != CLASSIC and set(row.conditions.throttle_reasons) <= {_POWER}
    if row.work.unit != "TFLOPS" or not is_steady or not clock or dtype not in DTYPES or not row.summary:
        return None
    bound = fastest_at_clock(info, dtype, clock)
    if bound is None or row.best_rate * TERA <= bound * (1 + row.accuracy):
        return None
    return (
        f"{row.best_rate:.4g} {row.work.unit} are more than the {bound / TERA:.4g} that its clock of "
        f"{clock / 1e6:.0f} MHz allows"
    )


def _why_suspect(row: Measurement, info: DeviceInfo, possible: Sequence[float]) -> str | None:
    """That a timer may have missed launches on an accelerator that nothing bounds. No sample is dropped: which of them
    are true is not known. A host's timer cannot miss a launch.

    A median or mean outlives a tenth of such samples, the fastest of all not a single one.
    """
    usual = statistics.median(possible)
    suspect = sum(sample * _SUSPECT < usual for sample in possible)
    if not info.is_accelerator or suspect <= (0 if row.best_by == "fastest" else MOST_IMPOSSIBLE * len(possible)):
        return None
    return (
        f"{suspect} of {len(possible)} samples are more than {_SUSPECT} times shorter than the median, and no known "
        f"peak of {info.name} says which are true"
    )
