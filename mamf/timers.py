"""The time that a backend's device timer adds to a launch, measured against the vendor's profiler (timers.csv).

There are two quantities. The *overhead* is estimated in each process and subtracted; its variation between processes
is part of the repeat interval. The *accuracy* is the error that remains, because the overhead depends on the kernel:
1.0 us or 0.5 % on NVIDIA, whichever is larger. All repeats share this error, so repeat intervals do not contain it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from mamf.files import packaged_rows

#: No figure is more accurate than this, as a share: long launches have other errors than the overhead.
MIN_RELATIVE_ACCURACY = 0.005
#: No timer has been shown to be more accurate than this, in seconds.
MIN_ACCURACY_SECONDS = 1e-6
#: The largest plausible overhead of a timer that has not been compared with a profiler, in seconds.
MAX_OVERHEAD_SECONDS = 20e-6
#: The largest acceptable difference between the overhead after a run and the one subtracted during it, in seconds.
LARGEST_SHIFT_SECONDS = 0.5e-6
#: Reports give the accuracy only of launches shorter than this, of which 1 us is 1 % or more.
SHORT_LAUNCH_SECONDS = 100e-6


class Timer(NamedTuple):
    """The timer of a backend, in seconds: its overhead, from ``lowest`` to ``highest``, and the ``accuracy`` of figures
    after subtraction.
    """

    lowest: float
    typical: float
    highest: float
    accuracy: float


class Overhead(NamedTuple):
    """The seconds to subtract from each window, and a remark if they are not the estimate."""

    seconds: float
    remark: str = ""


@functools.cache
def _timers() -> dict[str, Timer]:
    columns = [f"{name}_us" for name in Timer._fields]
    rows = packaged_rows("timers.csv")
    return {row["backend"]: Timer(*(float(row[column]) * 1e-6 for column in columns)) for row in rows}


def find_timer(backend: str) -> Timer | None:
    """The measured timer of a backend, or None if it has not been measured."""
    return _timers().get(backend)


def is_credible(backend: str, overhead: float) -> bool:
    """Whether an overhead in seconds is plausible for a backend's timer."""
    timer = find_timer(backend)
    low, high = (timer.lowest, timer.highest) if timer else (0.0, MAX_OVERHEAD_SECONDS)
    return low <= overhead <= high


def credible_overhead(backend: str, estimate: float | None) -> Overhead:
    """The estimate in seconds if it is plausible, else the timer's typical overhead (0 if unknown). Rounded to the
    nanosecond, like logged samples.
    """
    if estimate is None:
        return Overhead(0.0)
    if is_credible(backend, estimate):
        return Overhead(round(estimate, 9))
    timer = find_timer(backend)
    if timer is None and -LARGEST_SHIFT_SECONDS < estimate < 0:  # noise of a timer without overhead
        return Overhead(0.0)
    used = round(timer.typical, 9) if timer else 0.0
    return Overhead(
        used, f"assumed a timer overhead of {used * 1e6:.1f} us: the estimate of {estimate * 1e6:.1f} us is implausible"
    )


def timer_accuracy(backend: str, overhead: float) -> float:
    """The error in seconds of short launches after subtraction of this overhead; 0 if unknown."""
    timer = find_timer(backend)
    return timer.accuracy if timer and overhead else 0.0


def relative_accuracy(accuracy: float, seconds: float) -> float:
    """The error of a figure as a share of its seconds, from ``timer_accuracy``; 0 if that is unknown."""
    return max(accuracy / seconds, MIN_RELATIVE_ACCURACY) if accuracy else 0.0


def corrected_window(window: float, overhead: float) -> float:
    """The seconds of a launch, from its window: at least half the window, because shorter launches cannot be timed."""
    return max(window - overhead, window / 2)
