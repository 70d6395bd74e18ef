"""Sustained: back to back over rotating operands until clock and power have settled, then at least 2 s."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

from mamf.backend import Backend, Reading
from mamf.kernel import Prepared
from mamf.regimes.base import Launch, Regime, Samples, StoppingRule, no_garbage_collection
from mamf.statistics import relative_slope


class Block(NamedTuple):
    """Consecutive launches timed as one: mean seconds a launch, how many, and the sensors meanwhile."""

    seconds: float
    launches: int
    reading: Reading | None


class Sustained(Regime):
    """The figure at the power limit: MSMF. A sample is the mean over a block of launches; nothing runs between them."""

    name = "sustained"
    rotates = True
    default_seconds = 6.0
    shortest_seconds: ClassVar[float] = 2.0
    block_seconds: ClassVar[float] = 0.1
    #: Settled: over this many blocks, a straight line through the figure rises or falls by no more than this.
    settled_blocks: ClassVar[int] = 20
    fewest_blocks: ClassVar[int] = 3
    settled_slope: ClassVar[float] = 0.01
    longest_settling_seconds: ClassVar[float] = 20.0

    def __init__(self, backend: Backend, visit_seconds: float = shortest_seconds) -> None:
        super().__init__(backend)
        self.visit_seconds = visit_seconds
        self._loaded_seconds = 0.0
        self._loaded_until = float("-inf")

    def sample(self, prepared: Prepared, rule: StoppingRule, estimate: float) -> Samples:
        begun = self.backend.now()
        if begun - self._loaded_until > self.backend.sustained_traits.cold_after_seconds:
            self._loaded_seconds = 0.0
        taken = Samples()
        with no_garbage_collection():
            blocks = self._blocks(prepared.launches)
            if not self._settle(blocks, rule):
                taken.remarks.append("clock and power had not settled")
            self._visit(blocks, rule, taken)
            self.backend.synchronize()
        self._loaded_until = self.backend.now()
        self._loaded_seconds += self._loaded_until - begun
        return taken

    def _settle(self, blocks: Iterator[Block], rule: StoppingRule) -> bool:
        """Run until nothing drifts any more; False when that takes too long or the budget ends."""
        traits = self.backend.sustained_traits
        shortest = max(traits.settle_seconds, traits.soak_seconds - self._loaded_seconds)
        begun = self.backend.now()
        recent: deque[float] = deque(maxlen=self.settled_blocks)
        for block in blocks:
            # The first blocks are short, and at the clock that the pause before them left.
            if block.seconds * block.launches >= self.block_seconds / 2:
                recent.append(block.seconds)
            elapsed = self.backend.now() - begun
            is_flat = len(recent) >= self.fewest_blocks and abs(relative_slope(recent)) <= self.settled_slope
            if elapsed >= shortest and is_flat:
                return True
            if elapsed >= shortest + self.longest_settling_seconds or rule.is_over(self.backend.now()):
                break
        return False

    def _visit(self, blocks: Iterator[Block], rule: StoppingRule, taken: Samples) -> None:
        begun, before = self.backend.now(), self.read_sensors(energy=True)
        for block in blocks:
            taken.seconds.append(block.seconds)
            taken.launches += block.launches
            taken.add_reading(block.reading)
            now = self.backend.now()
            if rule.is_over(now) or (
                now - begun >= self.visit_seconds and rule.enough(taken.seconds, now - begun, now)
            ):
                break
        taken.watts = mean_watts(before, self.read_sensors(energy=True), self.backend.now() - begun)

    def _blocks(self, launches: Sequence[Launch]) -> Iterator[Block]:
        """Endless blocks of back-to-back launches; the next is queued before the last is waited for."""
        backend = self.backend
        rotation = itertools.cycle(launches)
        size = 1
        queued: deque[tuple[object, int]] = deque()
        reached = backend.mark()
        while True:
            for launch in itertools.islice(rotation, size):
                launch()
                backend.submit()
            queued.append((backend.mark(), size))
            if len(queued) < 2:
                continue
            reading = self.read_sensors()
            end, launched = queued.popleft()
            backend.wait(end)
            seconds = backend.seconds_between(reached, end) / launched
            yield Block(seconds, launched, reading)
            reached = end
            if seconds > 0:
                size = min(max(1, round(self.block_seconds / seconds)), 4 * size)


def mean_watts(before: Reading | None, after: Reading | None, seconds: float) -> float | None:
    """Mean power from the energy counter, or None where there is no counter."""
    if before is None or after is None or before.joules is None or after.joules is None:
        return None
    return (after.joules - before.joules) / seconds
