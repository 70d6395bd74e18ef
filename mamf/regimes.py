"""burst, sustained, classic: when to idle, flush, launch and stop.

An accelerator at its power limit has two repeatable states, and a plain loop measures an uncontrolled mix of both
(docs/measuring.md has the evidence). Every figure therefore names its regime:

- **burst**: rest until the clock is back at boost, then a train of launches shorter than the power controller's
reaction.
- **sustained**: back to back over rotating operands until clock and power have settled, then at least 2 s.
- **classic**: mamf-finder's published loop, for figures that line up with its tables.

A regime object lives for a whole run, because what ran before a shape decides how long to rest or soak.
"""

from __future__ import annotations

import gc
import itertools
import statistics as stdlib_statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from mamf.backend import MIB, Backend, Reading, Unavailable
from mamf.errors import UnknownNameError
from mamf.kernel import Prepared
from mamf.statistics import median_interval, relative_slope

Launch = Callable[[], object]


@dataclass(frozen=True)
class StoppingRule:
    """When a measurement has enough samples.

    ``precision``: half-width of the median's 95 % interval to reach, as a share of the median. ``seconds``: host time
    after which ``fewest`` samples suffice, so that a slow device finishes too; None is the regime's own. ``most``:
    samples after which more would not help. ``deadline``: the moment (backend time) at which the run's budget ends.
    """

    precision: float = 0.003
    seconds: float | None = None
    fewest: int = 3
    most: int = 1000
    deadline: float | None = None

    def is_over(self, now: float) -> bool:
        """Whether the run's budget has ended."""
        return self.deadline is not None and now >= self.deadline

    def enough(self, samples: Sequence[float], elapsed: float, now: float) -> bool:
        if self.is_over(now):
            return True
        if len(samples) < self.fewest:
            return False
        late = self.seconds is not None and elapsed >= self.seconds
        return late or len(samples) >= self.most or self.is_precise(samples)

    def is_precise(self, samples: Sequence[float]) -> bool:
        interval = median_interval(samples)
        middle = stdlib_statistics.median(samples)
        return interval.coverage >= 0.95 and (interval.high - interval.low) / 2 <= self.precision * middle


@dataclass
class Samples:
    """What a regime took: seconds a launch, one sample each, and what the sensors said meanwhile."""

    seconds: list[float] = field(default_factory=list)
    launches: int = 0
    readings: list[Reading] = field(default_factory=list)
    watts: float | None = None
    remarks: list[str] = field(default_factory=list)

    def add_block(self, block: Block) -> None:
        self.seconds.append(block.seconds)
        self.launches += block.launches
        if block.reading is not None:
            self.readings.append(block.reading)


class Regime(ABC):
    """How samples are taken on one backend.

    ``best_by``: the statistic that a best is chosen by. ``rotates``: launches rotate over several operand sets.
    ``needs_rewrite``: C is overwritten between launches. ``default_seconds``: the stopping rule's time limit a shape.
    """

    name: ClassVar[str]
    best_by: ClassVar[str] = "median"
    rotates: ClassVar[bool] = False
    needs_rewrite: ClassVar[bool] = False
    default_seconds: ClassVar[float | None] = None

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def start(self) -> None:
        """Called once before the first shape."""

    @abstractmethod
    def sample(self, prepared: Prepared, rule: StoppingRule, estimate: float) -> Samples:
        """Take samples of a verified kernel until the rule is satisfied. ``estimate``: host seconds of its first
        launch.
        """

    def read_sensors(self) -> Reading | None:
        telemetry = self.backend.telemetry
        return None if isinstance(telemetry, Unavailable) else telemetry.read()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python's collector would pause the host while the device runs dry."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Burst(Regime):
    """The figure at boost clock: MAMF."""

    name = "burst"
    default_seconds = 1.0
    #: Launches of the first train, before the kernel's duration is known, and the fewest of any.
    fewest_in_train: ClassVar[int] = 3
    most_in_train: ClassVar[int] = 64
    #: A launch this slow is a train of its own, so that a time limit is heeded between launches.
    slow_launch_seconds: ClassVar[float] = 0.1
    #: Device time of the work queued ahead of a train, at most.
    longest_lead_seconds: ClassVar[float] = 0.004
    #: Device time of the work queued ahead of any train: after resting, the host's first launches take half of that.
    shortest_lead_seconds: ClassVar[float] = 0.001

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._rested_at = backend.now()
        # Seconds of one flush, and of queueing flush, marks and launch: on the device and on the host.
        self._flush_seconds = self._flush_host_seconds = 0.0
        self._host_seconds = 100e-6

    def start(self) -> None:
        # Whatever ran before this regime may have left the device throttled.
        self._rested_at = self.backend.now() + self.backend.burst_traits.longest_rest_seconds
        self._time_flush()

    def sample(self, prepared: Prepared, rule: StoppingRule, estimate: float) -> Samples:
        taken = Samples()
        launch = prepared.launches[0]
        size = 1 if estimate > self.slow_launch_seconds else self.fewest_in_train
        lead = self.shortest_lead_seconds
        self._rest()
        begun = self.backend.now()
        while True:
            taken.seconds += self._train(launch, size, lead, taken)
            now = self.backend.now()
            if rule.enough(taken.seconds, now - begun, now):
                taken.launches = len(taken.seconds)
                return taken
            period = stdlib_statistics.median(taken.seconds) + self._flush_seconds
            size = self._train_size(period, len(taken.seconds))
            lead = self.shortest_lead_seconds + size * self._lag(period)
            self._rest()

    def _rest(self) -> None:
        owed = self._rested_at - self.backend.now()
        if owed > 0:
            self.backend.sleep(owed)

    def _train_size(self, period: float, taken: int) -> int:
        """Launches of the next train, given seconds a launch with its flush and the samples so far."""
        if period > self.slow_launch_seconds:
            return 1
        if taken <= self.fewest_in_train:
            # Two of the shortest trains make the fewest samples that an interval at 95 % can be had from.
            return self.fewest_in_train
        fitting = min(self.backend.burst_traits.train_seconds / period, self.most_in_train)
        lag = self._lag(period)
        if lag > 0:
            spare = self.longest_lead_seconds * self._lead_gain() - self.shortest_lead_seconds
            fitting = min(fitting, spare / lag)
        return max(int(fitting), self.fewest_in_train)

    def _lag(self, period: float) -> float:
        """Seconds by which the host falls behind the device with each launch."""
        return max(0.0, self._host_seconds - period)

    def _lead_gain(self) -> float:
        """Seconds that the host gains per device second of flushes queued ahead."""
        if self.backend.timer == "host clock" or self._flush_seconds <= self._flush_host_seconds:
            return 0.0
        return 1 - self._flush_host_seconds / self._flush_seconds

    def _queue_lead(self, seconds: float) -> None:
        """Put the host ahead: launching costs it more than a small kernel takes, and must stay outside the window."""
        gain = self._lead_gain()
        if gain > 0:
            for _ in range(1 + int(min(seconds / gain, self.longest_lead_seconds) / self._flush_seconds)):
                self.backend.flush_cache()

    def _train(self, launch: Launch, size: int, lead: float, taken: Samples) -> list[float]:
        backend = self.backend
        with no_garbage_collection():
            self._queue_lead(lead)
            begun = backend.now()
            marks = [self._timed_launch(launch) for _ in range(size)]
            self._host_seconds = (backend.now() - begun) / size
            reading = self.read_sensors()
            backend.synchronize()
        if reading is not None:
            taken.readings.append(reading)
        seconds = [backend.seconds_between(start, end) for start, end in marks]
        # Flushes draw less than the power limit, so rest is owed for the launches alone.
        traits = backend.burst_traits
        self._rested_at = backend.now() + min(sum(seconds) * traits.rest_ratio, traits.longest_rest_seconds)
        return seconds

    def _timed_launch(self, launch: Launch) -> tuple[object, object]:
        self.backend.flush_cache()
        start = self.backend.mark()
        launch()
        self.backend.submit()
        return start, self.backend.mark()

    def _time_flush(self, repeats: int = 10) -> None:
        self.backend.flush_cache()
        self.backend.synchronize()
        start, begun = self.backend.mark(), self.backend.now()
        for _ in range(repeats):
            self.backend.flush_cache()
        self._flush_host_seconds = (self.backend.now() - begun) / repeats
        end = self.backend.mark()
        self.backend.synchronize()
        self._flush_seconds = self.backend.seconds_between(start, end) / repeats


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
    settled_slope: ClassVar[float] = 0.01
    longest_settling_seconds: ClassVar[float] = 20.0

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
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
            recent.append(block.seconds)
            elapsed = self.backend.now() - begun
            if elapsed >= shortest and abs(relative_slope(recent)) <= self.settled_slope:
                return True
            if elapsed >= shortest + self.longest_settling_seconds or rule.is_over(self.backend.now()):
                break
        return False

    def _visit(self, blocks: Iterator[Block], rule: StoppingRule, taken: Samples) -> None:
        begun, before = self.backend.now(), self.read_sensors()
        for block in blocks:
            taken.add_block(block)
            now = self.backend.now()
            if rule.is_over(now) or (
                now - begun >= self.shortest_seconds and rule.enough(taken.seconds, now - begun, now)
            ):
                break
        taken.watts = mean_watts(before, self.read_sensors(), self.backend.now() - begun)

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


class Classic(Regime):
    """mamf-finder's loop, for figures that line up with its tables: the clock is whatever the loop leaves it.

    30 s of warm-up once, then per shape untimed and timed launches in one queue, each after a 256 MiB flush and a
    rewrite of C.
    """

    name = "classic"
    best_by = "fastest"
    needs_rewrite = True
    flush_bytes: ClassVar[int] = 256 * MIB
    queue_depth: ClassVar[int] = 32

    def __init__(
        self, backend: Backend, warmup_launches: int = 50, timed_launches: int = 100, warmup_seconds: float = 30.0
    ) -> None:
        super().__init__(backend)
        self.warmup_launches = warmup_launches
        self.timed_launches = timed_launches
        self._warmup_owed = warmup_seconds

    def sample(self, prepared: Prepared, rule: StoppingRule, estimate: float) -> Samples:
        begun = self.backend.now()
        while self.backend.now() - begun < self._warmup_owed and not rule.is_over(self.backend.now()):
            self._loop(prepared, rule)
        self._warmup_owed = 0.0
        return self._loop(prepared, rule)

    def _loop(self, prepared: Prepared, rule: StoppingRule) -> Samples:
        backend, begun = self.backend, self.backend.now()
        marks: list[tuple[object, object]] = []
        taken = Samples()
        for count in range(1, self.warmup_launches + self.timed_launches + 1):
            marks.append(self._timed_launch(prepared))
            if count > self.queue_depth:
                backend.wait(marks[count - self.queue_depth][1])
            now = backend.now()
            late = rule.seconds is not None and now - begun >= rule.seconds and count >= rule.fewest
            if late or rule.is_over(now):
                break
        if (reading := self.read_sensors()) is not None:
            taken.readings.append(reading)
        backend.synchronize()
        # Cut short, the last launches are the ones to keep: they are at least as warm as the others.
        timed = marks[self.warmup_launches :] or marks[-rule.fewest :]
        taken.seconds = [backend.seconds_between(start, end) for start, end in timed]
        taken.launches = len(taken.seconds)
        return taken

    def _timed_launch(self, prepared: Prepared) -> tuple[object, object]:
        self.backend.flush_cache(self.flush_bytes)
        if prepared.rewrite_output is not None:
            prepared.rewrite_output()
        start = self.backend.mark()
        prepared.launches[0]()
        self.backend.submit()
        return start, self.backend.mark()


def mean_watts(before: Reading | None, after: Reading | None, seconds: float) -> float | None:
    """Mean power from the energy counter, or None where there is no counter."""
    if before is None or after is None or before.joules is None or after.joules is None:
        return None
    return (after.joules - before.joules) / seconds


REGIMES: dict[str, type[Regime]] = {regime.name: regime for regime in (Burst, Sustained, Classic)}


def regime_class(name: str) -> type[Regime]:
    """Raises UnknownNameError."""
    if name not in REGIMES:
        raise UnknownNameError("regime", name, REGIMES)
    return REGIMES[name]
