"""Launches that end the process: their rows are kept where they survive, and no step is launched again that did so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from mamf.backend import Backend
from mamf.errors import GIVEN_UP
from mamf.measurement import Measurement

_MOST_ENDS = 3


@dataclass
class Crashes:
    """What is known of launches on a device that end its process.

    ``fatal``: rows of such launches. ``keep``: is called with the row that is to be logged if the process dies now, and
    with None after the last launch of a step.
    """

    fatal: Sequence[Measurement] = ()
    keep: Callable[[Measurement | None], None] = lambda row: None

    def reason_against(self, asked: Measurement) -> str:
        """Why a step must not be launched; empty if it may be."""
        of_kernel = [row for row in self.fatal if row.kernel == asked.kernel]
        same = next((row.reason for row in of_kernel if row.step == asked.step), "")
        ends = sum(not row.reason.startswith(GIVEN_UP) for row in of_kernel)
        return same or (f"{GIVEN_UP}: not launched" if ends >= _MOST_ENDS else "")


_OF_DEVICES: WeakKeyDictionary[Backend, Crashes] = WeakKeyDictionary()


def crashes_of(backend: Backend) -> Crashes:
    """Those of an opened device."""
    return _OF_DEVICES.setdefault(backend, Crashes())
