"""Rules about the timer: what was subtracted from a window is what its device's timer adds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mamf.contribution.evidence import Evidence, Finding
from mamf.logs.timer_correction import RELIABLE_SINCE, describe_shift
from mamf.machine.timers import find_timer, is_credible


def timer_is_credible(evidence: Evidence) -> Iterator[Finding]:
    """The overhead subtracted lies within the bounds of its backend. Earlier logs get a warning: their figures are
    recomputed when they are read.
    """
    backend, is_early = evidence.header["device"]["backend"], evidence.header["schema"] < RELIABLE_SINCE
    refused = Counter[float]()
    first: dict[float, int] = {}
    for line, _, row in evidence.rows:
        overhead = row.timer_overhead
        if overhead and not is_credible(backend, overhead):
            refused[overhead] += 1
            first.setdefault(overhead, line)
    for overhead, count in sorted(refused.items()):
        timer = find_timer(backend)
        bounds = f"{timer.lowest * 1e6:.1f} to {timer.highest * 1e6:.1f}" if timer else "0 to 20"
        message = f"{overhead * 1e6:.1f} us subtracted from {count} rows, but the timer of {backend} adds {bounds} us"
        used = f"; read with {timer.typical * 1e6:.1f} us" if timer and is_early else ""
        yield Finding("timer", message + used, first[overhead], is_warning=is_early)


def timer_stayed(evidence: Evidence) -> Iterator[Finding]:
    """The overhead after the run is the one subtracted in it (warning)."""
    summary = evidence.log.summary
    shift = describe_shift(summary, evidence.log.every_row) if summary else ""
    if shift:
        yield Finding("timer", shift, is_warning=True)
