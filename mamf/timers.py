"""What the device timer of a backend adds to a launch, measured against the vendor's profiler: data in timers.csv.

Two quantities are kept apart. The *overhead* is estimated in each process and subtracted; what is left of it from
process to process is part of the repeat interval. The *accuracy* is how far the corrected figure may still be from the
kernel's own time, because the overhead depends on the kernel. All repeats share it, so no repeat interval contains it.
"""

from __future__ import annotations

import csv
import functools
import importlib.resources
from typing import NamedTuple

#: What an overhead may be if nobody has compared the timer of a backend with its profiler, in seconds.
MOST_OVERHEAD_SECONDS = 20e-6
#: By how much the overhead after a run may differ from the one subtracted in it, in seconds.
LARGEST_SHIFT_SECONDS = 0.5e-6
#: Launches shorter than this state their accuracy: a microsecond is 1 % of it.
SHORT_LAUNCH_SECONDS = 100e-6


class Timer(NamedTuple):
    """In seconds: the overhead, from ``lowest`` to ``highest``, and how accurate a corrected figure is; of a log before
    schema 5, which is read with the ``typical`` overhead, ``early_accuracy``: hosts differ by a microsecond.
    """

    lowest: float
    typical: float
    highest: float
    accuracy: float
    early_accuracy: float


class Overhead(NamedTuple):
    """What is subtracted from each window, in seconds, and a remark if that is not what was estimated."""

    seconds: float
    remark: str = ""


@functools.cache
def _timers() -> dict[str, Timer]:
    text = importlib.resources.files("mamf").joinpath("timers.csv").read_text(encoding="utf-8")
    columns = [f"{name}_us" for name in Timer._fields]
    rows = csv.DictReader(text.splitlines())
    return {row["backend"]: Timer(*(float(row[column]) * 1e-6 for column in columns)) for row in rows}


def find_timer(backend: str) -> Timer | None:
    """The measured timer of a backend, or None if nobody has measured it."""
    return _timers().get(backend)


def is_credible(backend: str, overhead: float) -> bool:
    """Whether an overhead in seconds can be that of a backend's timer."""
    timer = find_timer(backend)
    low, high = (timer.lowest, timer.highest) if timer else (0.0, MOST_OVERHEAD_SECONDS)
    return low <= overhead <= high


def credible_overhead(backend: str, estimate: float | None) -> Overhead:
    """The estimate, in seconds; one that cannot be true is replaced by the timer's typical overhead, if that is known.

    Rounded to the nanosecond, as samples are logged.
    """
    if estimate is None:
        return Overhead(0.0)
    if is_credible(backend, estimate):
        return Overhead(round(estimate, 9))
    timer = find_timer(backend)
    if timer is None and -LARGEST_SHIFT_SECONDS < estimate < 0:  # noise around no overhead
        return Overhead(0.0)
    used = round(timer.typical, 9) if timer else 0.0
    return Overhead(
        used, f"timer overhead {used * 1e6:.1f} us assumed: its estimate, {estimate * 1e6:.1f} us, is absurd"
    )


def timer_accuracy(backend: str, overhead: float) -> float:
    """Seconds by which figures that this overhead was subtracted from may be wrong; 0 where nobody has measured it."""
    timer = find_timer(backend)
    return timer.accuracy if timer and overhead else 0.0


def corrected_window(window: float, overhead: float) -> float:
    """The seconds of a launch in a window; never less than half of it, because what is shorter cannot be timed."""
    return max(window - overhead, window / 2)


def raw_window(sample: float, overhead: float) -> float:
    """The window that ``corrected_window`` made a sample of."""
    return sample + overhead if sample > overhead else 2 * sample
