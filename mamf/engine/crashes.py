"""Launches that end the process: the row of the step in flight is kept where it survives, and a step that ended a
process is not launched again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from mamf.backend import Backend
from mamf.errors import CRASHED, GIVEN_UP
from mamf.measurement import Measurement

_MOST_ENDS = 3


@dataclass
class Crashes:
    """What is known of launches that end the process of a device.

    ``fatal``: rows whose launches ended a process of this run. ``keep``: keeps the row in flight, as it is to be logged
    if this process dies; None when the launches have returned.
    """

    fatal: Sequence[Measurement] = ()
    keep: Callable[[Measurement | None], None] = lambda row: None

    def reason_against(self, asked: Measurement) -> str:
        """Why a step must not be launched; empty if it may be."""
        of_kernel = [row for row in self.fatal if row.kernel == asked.kernel]
        same = next((row.reason for row in of_kernel if row.step == asked.step), "")
        ends = sum(not row.reason.startswith(GIVEN_UP) for row in of_kernel)
        return same or (f"{GIVEN_UP}: not launched" if ends >= _MOST_ENDS else "")

    @contextmanager
    def in_flight(self, asked: Measurement) -> Iterator[None]:
        """Keep the row of a step during its launches; which signal ends them is known to who survives."""
        self.keep(replace(asked, reason=CRASHED))
        try:
            yield
        finally:
            self.keep(None)


_OF_DEVICES: WeakKeyDictionary[Backend, Crashes] = WeakKeyDictionary()


def crashes_of(backend: Backend) -> Crashes:
    """What is known of launches on an opened device."""
    return _OF_DEVICES.setdefault(backend, Crashes())
