"""What the timer leaves uncertain in all repeats alike: no repeat interval contains it."""

from __future__ import annotations

from collections.abc import Iterable

from mamf.ceilings.share import Ceilings, share_accuracy
from mamf.machine.timers import SHORT_LAUNCH_SECONDS
from mamf.measurement import Measurement


def accuracy_remarks(row: Measurement) -> list[str]:
    """A remark on a launch so short that the timer's accuracy matters, or none."""
    if not row.ok or not row.timer_accuracy or row.seconds >= SHORT_LAUNCH_SECONDS:
        return []
    return [f"accurate to {row.timer_accuracy * 1e6:.1f} us (timer)"]


def share_accuracy_line(rows: Iterable[Measurement], ceilings: Ceilings) -> list[str]:
    """How accurate the shares of these rows are, in a line; none if the timer's accuracy is unknown."""
    known = sorted(accuracy for row in rows if not row.is_reference and (accuracy := share_accuracy(row, ceilings)))
    if not known:
        return []
    least, most = (f"{100 * accuracy:.2g}" for accuracy in (known[0], known[-1]))
    spread = least if least == most else f"{least} to {most}"
    return [f"MAMFU: accurate to {spread} % of each share (timer), the less the shorter a launch"]
