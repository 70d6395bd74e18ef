"""Rules about the timer: the overhead subtracted from a window matches what the device's timer adds."""

from __future__ import annotations

from collections.abc import Iterator

from mamf.contribution.evidence import Evidence, Finding
from mamf.logs.timer_correction import RELIABLE_SINCE, describe_shift
from mamf.timers import find_timer, is_credible


def timer_is_credible(evidence: Evidence) -> Iterator[Finding]:
    """The overhead subtracted lies within the bounds of its backend. Earlier logs get a warning: their figures are
    recomputed when they are read.
    """
    backend, is_early = evidence.header["device"]["backend"], evidence.header["schema"] < RELIABLE_SINCE
    timer, refused = find_timer(backend), dict[float, list[int]]()
    for line, _, row in evidence.rows:
        if row.timer_overhead and not is_credible(backend, row.timer_overhead):
            refused.setdefault(row.timer_overhead, []).append(line)
    for overhead, lines in sorted(refused.items()):
        bounds = f"{timer.lowest * 1e6:.1f} to {timer.highest * 1e6:.1f}" if timer else "0 to 20"
        message = (
            f"{overhead * 1e6:.1f} us subtracted from {len(lines)} rows, but the timer of {backend} adds {bounds} us"
        )
        used = f"; read with {timer.typical * 1e6:.1f} us" if timer and is_early else ""
        yield Finding("timer", message + used, lines[0], is_warning=is_early)


def timer_stayed(evidence: Evidence) -> Iterator[Finding]:
    """The overhead after the run is the one subtracted in it (warning)."""
    summary = evidence.log.summary
    if summary and (shift := describe_shift(summary, evidence.log.every_row)):
        yield Finding("timer", shift, is_warning=True)
