"""Distributes the steps of a plan over devices: each takes the next ones when it is free. Pure."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Collection

from mamf.plans import Plan, StepKey

#: A step on which so many devices ended is dropped: otherwise it could end all of them.
_MOST_ENDS = 2
#: Parts that a device takes at once while many wait: it idles for a few milliseconds whenever it asks.
_MOST_AT_ONCE = 4


class Shares:
    """Steps by number, in parts that one device measures together, for so many ``devices``.

    ``left``: steps left out at the end of the budget. A step on which more than one device ended is dropped.
    """

    def __init__(self, parts: Collection[Collection[int]], devices: int) -> None:
        self.waiting = deque(map(list, parts))
        self._devices = devices
        self.taken: dict[int, list[int]] = {}
        self.left: list[int] = []
        self._ends: Counter[int] = Counter()

    @property
    def are_done(self) -> bool:
        return not self.waiting and not any(self.taken.values())

    def take(self, device: int) -> list[int]:
        """The next parts, one by one towards the end, so that all devices end together; there must be one."""
        rounds = len(self.waiting) // (self._devices * _MOST_AT_ONCE)
        parts = [self.waiting.popleft() for _ in range(min(max(rounds, 1), _MOST_AT_ONCE))]
        self.taken[device] = [step for part in parts for step in part]
        return list(self.taken[device])

    def answer(self, device: int, step: int) -> None:
        self.taken[device].remove(step)

    def finish(self, device: int) -> None:
        """A device has finished its part; unanswered steps are left out."""
        self.left += self.taken.pop(device, [])

    def give_back(self, device: int) -> int | None:
        """A device has ended: its unmeasured steps return to the queue, but for the step that this returns, if any."""
        part, dropped = self.taken.pop(device, []), None
        if part:
            self._ends[part[0]] += 1
            if self._ends[part[0]] >= _MOST_ENDS:
                dropped = part.pop(0)
        if part:
            self.waiting.appendleft(part)
        return dropped


def numbered_parts(plan: Plan, held: Collection[StepKey]) -> list[list[int]]:
    """The steps that are not held, by their number among all: one by one, and kernels of one shape together, since they
    are compared with one another.
    """
    wanted = set(plan.steps(held))
    steps = [(number, step) for number, step in enumerate(plan.steps()) if step in wanted]
    grouped = itertools.groupby(steps, key=lambda each: each[1][:3])
    return [[number for number, _ in part] for _, part in grouped]
