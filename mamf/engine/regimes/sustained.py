"""Sustained: back to back over rotating operands until clock and power have settled, then at least 2 s."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

from mamf.backend import Backend, Reading, Unavailable
from mamf.calibration import ANEW, find_calibration
from mamf.engine.regimes.base import Launch, Regime, Samples, StoppingRule
from mamf.engine.regimes.checking import Checked
from mamf.kernel import Problem
from mamf.machine.garbage import no_garbage_collection
from mamf.measurement import Conditions
from mamf.statistics import Repeatability, relative_slope

#: Share of the maximum clock from which the device counts as not throttled.
_AT_BOOST = 0.98
#: Between two readings of the energy counter, and between two of its ticks.
_POLL_SECONDS, _LONGEST_TICK_SECONDS = 0.001, 0.12
#: How long to wait for a tick at most.
_BLOCKS_TO_WAIT = 1.6
#: Of a visit that starts anew, at least: one to settle, one to measure.
_MIN_SWINGS = 2


class Tick(NamedTuple):
    """A moment at which the energy counter changed, and its value since then."""

    seconds: float
    joules: float


class Block(NamedTuple):
    """Consecutive launches timed as one: mean seconds a launch, how many, the sensors meanwhile, a tick of the energy
    counter if one was asked for and seen, and whether the outputs had been poisoned before it.
    """

    seconds: float
    launches: int
    reading: Reading | None
    tick: Tick | None
    is_of_visit: bool


class Anew(NamedTuple):
    """How a visit starts that draws the power controller's state: idle for a while, then loaded until it settled."""

    rest_seconds: float
    settling_seconds: float


class Sustained(Regime):
    """The figure at the power limit: MSMF, total work over total time. A sample is the mean over a block of launches,
    all of one visit equally many; nothing runs between them.

    ``anew``: how each visit starts and how long it is, where it follows a rest. A power controller can stay in one of
    several states, 1.3 % apart, for as long as the device is loaded: the mean of visits that each drew theirs repeats,
    that of one state does not.
    """

    name = "sustained"
    best_by = "mean"
    rotates = True
    default_seconds = 6.0
    shortest_seconds: ClassVar[float] = 2.0
    block_seconds: ClassVar[float] = 0.1
    #: Settled: over this many blocks, a straight line through the figure rises or falls by no more than this.
    settled_blocks: ClassVar[int] = 20
    min_blocks: ClassVar[int] = 3
    settled_slope: ClassVar[float] = 0.01
    longest_settling_seconds: ClassVar[float] = 20.0
    #: Launches that a bridge queues at most: a vendor's queue holds about a thousand.
    max_in_bridge: ClassVar[int] = 500

    def __init__(self, backend: Backend, visit_seconds: float = shortest_seconds, *, anew: Anew | None = None) -> None:
        super().__init__(backend)
        self.visit_seconds = visit_seconds
        self.anew = anew
        self._loaded_seconds = 0.0
        self._loaded_until = float("-inf")

    def repeatability_of(self, problem: Problem) -> Repeatability:
        traits = self.backend.sustained_traits
        known = traits.anew_repeatability if self.anew else traits.repeatability
        return known or find_calibration(self.backend.name, ANEW if self.anew else self.name, problem)

    @property
    def caveat(self) -> str:
        return self.backend.sustained_traits.remark

    @classmethod
    def shortest_anew(cls, backend: Backend) -> float:
        """Seconds of the shortest visit that starts anew, where the device asks for such."""
        traits = backend.sustained_traits
        return cls._anew_takes(backend, _MIN_SWINGS * traits.swing_seconds) if traits.rest_seconds else 0.0

    @classmethod
    def _anew_takes(cls, backend: Backend, loaded: float) -> float:
        """Seconds of a visit that starts anew: settling ends with a block and the one behind it, measuring with one."""
        return backend.sustained_traits.rest_seconds + loaded + 3 * cls.block_seconds

    @property
    def visit_takes(self) -> float:
        if self.anew is None:
            return 0.0
        return self._anew_takes(self.backend, self.anew.settling_seconds + self.visit_seconds)

    def bridge(self, launches: Sequence[Launch], seconds: float) -> None:
        """Queue what keeps the device loaded while the host prepares the next kernel.

        After an idle time of tens of milliseconds the power controller swings for seconds, and what is measured
        meanwhile is up to 1 % off (docs/measuring.md).
        """
        if self.anew or self.backend.timer == "host clock":
            return
        count = math.ceil(self.backend.sustained_traits.bridge_seconds / max(seconds, 1e-9))
        for launch in itertools.islice(itertools.cycle(launches), min(self.max_in_bridge, count)):
            launch()
            self.backend.submit()

    def confirmation_regime(self, chosen: Conditions, seconds: float) -> Regime:
        """Visits that start anew, where the device was held back when it was chosen, or does not tell: of whole swings
        of the controller, as many as there is time for.
        """
        traits, maximum = self.backend.sustained_traits, self.backend.info.max_clock_hz
        is_held_back = chosen.clock_hz is None or maximum is None or chosen.clock_hz < _AT_BOOST * maximum
        if not is_held_back or not traits.rest_seconds:
            return self
        swing = traits.swing_seconds
        loaded = min(seconds - self._anew_takes(self.backend, 0.0), traits.restart_seconds + self.shortest_seconds)
        swings = max(_MIN_SWINGS, int(loaded / swing + 1e-9))
        measured = min(swings - 1, max(1, int(self.shortest_seconds / swing + 1e-9)))
        return Sustained(self.backend, measured * swing, anew=Anew(traits.rest_seconds, (swings - measured) * swing))

    def sample(self, checked: Checked, rule: StoppingRule, estimate: float) -> Samples:
        if self.anew:
            self.backend.sleep(self.anew.rest_seconds)
        begun = self.backend.now()
        if self._is_cold():
            self._loaded_seconds = 0.0
        taken = Samples()
        with no_garbage_collection():
            blocks = _Blocks(self, checked)
            if not self._settle(blocks, rule):
                taken.remarks.append("clock and power had not settled")
            self._measure(blocks, rule, taken)
            self.synchronize(checked, *self._last_marks())
        taken.clock_hz = blocks.clock_hz()
        checked.verify()
        self._loaded_until = self.backend.now()
        self._loaded_seconds += self._loaded_until - begun
        return taken

    def _last_marks(self) -> tuple[object, object]:
        """Behind the last launch; if nothing of it is left in this queue, behind flushes: another one may be busy."""
        mark, idle = self.marks_behind(0)
        return (mark, idle) if idle is not None or not self.backend.has_idle_marks else self.marks_behind()

    def _is_cold(self) -> bool:
        return self.backend.now() - self._loaded_until > self.backend.sustained_traits.cold_after_seconds

    def _settle(self, blocks: _Blocks, rule: StoppingRule) -> bool:
        """Run until the rate no longer drifts; False if that takes too long or the budget ends."""
        traits = self.backend.sustained_traits
        shortest = max(traits.settle_seconds, traits.soak_seconds - self._loaded_seconds)
        if self.anew:
            shortest = self.anew.settling_seconds
        begun = self.backend.now()
        recent: deque[float] = deque(maxlen=self.settled_blocks)
        for block in blocks:
            # The first blocks are short, and at the clock that the pause before them left.
            if block.seconds * block.launches >= self.block_seconds / 2:
                recent.append(block.seconds)
            elapsed = self.backend.now() - begun
            is_flat = len(recent) >= self.min_blocks and abs(relative_slope(recent)) <= self.settled_slope
            # An alternating controller is never flat over so few blocks, but the mean of a visit covers whole periods.
            if elapsed >= shortest and (is_flat or self.anew is not None):
                return True
            is_too_long = elapsed >= shortest + self.longest_settling_seconds
            if is_too_long or rule.is_over(self.backend.now()):
                break
        return False

    def _measure(self, blocks: _Blocks, rule: StoppingRule, taken: Samples) -> None:
        blocks.begin_visit()
        begun, ticks = self.backend.now(), list[Tick]()
        for block in blocks:
            now = self.backend.now()
            ticks += [block.tick] if block.tick is not None else []
            # The first tick, and any that may be the last of the visit. In every other block only: meanwhile the host
            # may fall behind.
            is_near_end = now - begun + 3 * block.seconds * block.launches >= self.visit_seconds
            blocks.must_find_tick = not blocks.must_find_tick and (not ticks or is_near_end)
            if not block.is_of_visit:  # queued before the visit began
                begun = now
                continue
            taken.seconds.append(block.seconds)
            taken.launches += block.launches
            taken.add_reading(block.reading)
            is_long_enough = now - begun >= self.visit_seconds
            if rule.is_over(now) or (is_long_enough and rule.enough(taken.seconds, now - begun, now, figure="mean")):
                break
        taken.watts = mean_watts(ticks)
        blocks.end_visit()

    def next_tick(self, longest: float) -> Tick | None:
        """Wait until the energy counter changes; None if there is no counter, or if it does not change within
        ``longest`` seconds.
        """
        begun, before = self.backend.now(), self.read_sensors(energy=True)
        while before is not None and before.joules is not None and self.backend.now() - begun < longest:
            self.backend.sleep(_POLL_SECONDS)
            after = self.read_sensors(energy=True)
            if after is not None and after.joules is not None and after.joules != before.joules:
                return Tick(self.backend.now(), after.joules)
        return None


class _Blocks:
    """Endless blocks of back-to-back launches; the next is queued before the last is waited for."""

    def __init__(self, regime: Sustained, checked: Checked) -> None:
        self._regime, self._checked = regime, checked
        self._size = 1
        self._is_visit = False
        self._must_poison = True
        #: Stamps of the clock at both ends of the visit.
        self._begun: object | None = None
        self._ended: object | None = None
        #: Whether to find a tick of the energy counter while the next block runs.
        self.must_find_tick = False
        self._queued = self._run()

    def end_visit(self) -> None:
        """Stamp the clock behind what is queued, if the device has stamps."""
        stamps = self._regime.backend.stamps
        self._ended = None if isinstance(stamps, Unavailable) else stamps.stamp()

    def clock_hz(self) -> float | None:
        """The mean clock of the compute units during the visit, which the device has finished; None without stamps."""
        stamps = self._regime.backend.stamps
        if isinstance(stamps, Unavailable) or self._begun is None or self._ended is None:
            return None
        passed = stamps.between(self._begun, self._ended)
        return passed and passed.cycles / passed.seconds

    def begin_visit(self) -> None:
        """Poison the outputs between two blocks, and count launches in equal blocks from then on."""
        self._is_visit = self._must_poison = True

    def __iter__(self) -> Iterator[Block]:
        return self._queued

    def _run(self) -> Iterator[Block]:
        backend, rotation = self._regime.backend, itertools.cycle(self._checked.launches)
        queued: deque[tuple[object, object, int, bool]] = deque()
        reached, lasted = backend.mark(), 0.0
        for blocks in itertools.count():
            self._regime.require_clock_advances(blocks)
            if self._must_poison:
                self._checked.prepare_check()
                if self._is_visit and not isinstance(backend.stamps, Unavailable):
                    self._begun = backend.stamps.stamp()
                self._must_poison, reached = False, backend.mark()
            for launch in itertools.islice(rotation, self._size):
                launch()
                backend.submit()
            end = backend.mark()
            queued.append((reached, end, self._size, self._is_visit))
            reached = end
            if len(queued) < 2:
                continue
            reading = self._regime.read_sensors()
            # One block runs and another is queued, so the device stays loaded.
            longest = min(_LONGEST_TICK_SECONDS, _BLOCKS_TO_WAIT * lasted)
            tick = self._regime.next_tick(longest) if self.must_find_tick else None
            start, end, launched, is_of_visit = queued.popleft()
            backend.wait(end)
            lasted = backend.seconds_between(start, end)
            seconds = lasted / launched
            yield Block(seconds, launched, reading, tick, is_of_visit)
            if not self._is_visit:
                fitting = round(self._regime.block_seconds / seconds) if seconds > 0 else self._size
                self._size = min(max(1, fitting), 4 * self._size)


def mean_watts(ticks: Sequence[Tick]) -> float | None:
    """Mean power from the first tick of the energy counter to the last, or None without two.

    NVIDIA's counters tick every 0.1 s: between other moments one-second visits would be up to 10 % off.
    """
    if len(ticks) < 2:
        return None
    return (ticks[-1].joules - ticks[0].joules) / (ticks[-1].seconds - ticks[0].seconds)
