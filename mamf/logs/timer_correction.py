"""The timer's overhead in a log: recomputed in logs of schema 4, and compared with an estimate after the run.

The estimator of earlier logs depended on the history of the process: the same timer read 2.6 to 5.4 us, once 17.3. The
raw windows are right, so burst figures are recomputed from them with the timer's typical overhead. The file is never
changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from mamf.backend import Backend
from mamf.measurement import Measurement, group_pairs
from mamf.regime_names import BURST
from mamf.statistics import summarize
from mamf.timers import LARGEST_SHIFT_SECONDS, Timer, corrected_window, is_credible, raw_window

#: The first schema whose logged overhead is reliable.
RELIABLE_SINCE = 5
_REFERENCE = "reference_tflops"


def recompute_rows(rows: Sequence[Measurement], backend: str, timer: Timer) -> list[Measurement]:
    """The rows with the typical overhead subtracted. ``backend``: its name."""
    found = [_recompute_row(row, backend, timer) for row in rows]
    visits = ((old, new) for old, new in zip(rows, found, strict=True) if old.is_reference and old.ok)
    ratios = group_pairs(((old.problem.dtype, old.regime), new.seconds / old.seconds) for old, new in visits)
    return [_recompute_reference(row, ratios.get((row.problem.dtype, row.regime), [1.0])) for row in found]


def _recompute_row(row: Measurement, backend: str, timer: Timer) -> Measurement:
    before = row.timer_overhead
    if row.regime != BURST or not before:
        return row
    samples = tuple(recorrected(sample, before, timer) for sample in row.samples)
    refused = not is_credible(backend, before)
    remark = (f"timer overhead {timer.typical * 1e6:.1f} us instead of the {before * 1e6:.1f} us in the log",)
    return replace(
        row,
        samples=samples,
        summary=row.summary and summarize(samples, row.best_by),
        timer_overhead=timer.typical,
        timer_accuracy=timer.early_accuracy,
        remarks=(*row.remarks, *(remark if refused else ())),
    )


def _recompute_reference(row: Measurement, ratios: Sequence[float]) -> Measurement:
    """A row that holds the rate of its reference product; ``ratios``: that product's new seconds to its old."""
    if row.regime != BURST or _REFERENCE not in row.details:
        return row
    return replace(row, details={**row.details, _REFERENCE: float(row.details[_REFERENCE]) / fmean(ratios)})


def recorrected(sample: float, overhead: float, timer: Timer) -> float:
    """A sample in seconds with the typical overhead in place of ``overhead``, to the nanosecond."""
    return max(round(corrected_window(raw_window(sample, overhead), timer.typical), 9), 1e-9)


# -- after a run -----------------------------------------------------------------------------------------------------


def overhead_after(backend: Backend, rows: Iterable[Measurement]) -> dict[str, Any]:
    """A field of the summary: the timer's overhead estimated again after the last row; empty if no row used it."""
    if not any(row.timer_overhead for row in rows):
        return {}
    try:
        after = backend.timer_overhead()
    except Exception:  # a device that failed has ended the run already, with a reason
        return {}
    return {} if after is None else {"timer_overhead_after_seconds": round(after, 9)}


def describe_shift(summary: dict[str, Any], rows: Sequence[Measurement]) -> str:
    """A warning if the overhead after the run is not the one subtracted in it, else an empty text."""
    timed = [row for row in rows if row.ok and row.timer_overhead]
    after = summary.get("timer_overhead_after_seconds")
    if after is None or not timed or abs(after - timed[-1].timer_overhead) <= LARGEST_SHIFT_SECONDS:
        return ""
    before = timed[-1].timer_overhead
    share = abs(after - before) / min(row.seconds for row in timed)
    return (
        f"the timer's overhead moved from {before * 1e6:.1f} to {after * 1e6:.1f} us during the run: "
        f"the shortest launches may be off by {share:.1%}; measure them again"
    )
