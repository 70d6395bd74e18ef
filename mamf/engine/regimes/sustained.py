"""Measure in the regime `sustained`: launch back to back over rotating sets of operands until clock and power settle,
then measure for at least 2 s.

A *visit* is one measurement of one kernel on one shape. It consists of *blocks*: launches that are timed together. A
*tick* is a change of the device's energy counter.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple

from mamf.backend import Backend, SensorReading, Unavailability
from mamf.calibration import AFTER_REST_STATE, look_up_repeatability
from mamf.engine.regimes.base import CheckedKernel, Launch, Regime, Samples, StoppingRule
from mamf.kernel import Problem
from mamf.machine.environment import pause_garbage_collection
from mamf.measurement import Conditions
from mamf.plans import Plan
from mamf.statistics import Repeatability, compute_relative_slope

#: A device whose clock is at least this share of its maximum counts as not throttled.
_MIN_UNTHROTTLED_SHARE = 0.98
#: Seconds between two readings of the energy counter, and the maximum number of readings. NVIDIA's counters change
#: every 0.1 s, so 120 readings are enough. The maximum also ends the loop if a faulty backend never reports that the
#: device has reached a mark.
_ENERGY_POLL_SECONDS, _MAX_ENERGY_POLLS = 0.001, 120
#: If the device idles for more than this share of a block, the next block does not count, because the rested device is
#: faster. If it idles for more than this share of a visit, the row gets a remark.
_MAX_IDLE_SHARE = 0.01
#: To learn whether the device waits for the host within a block, mamf queues a mark before the last launches of the
#: block (this share of all its launches). If the device reaches the mark before the host has queued these last
#: launches, the device is waiting for the host.
_LAST_LAUNCHES_SHARE = 0.01
#: The minimum number of oscillation periods of the power controller in a visit after a rest: one in which the power
#: controller settles, and one that is measured.
_MIN_OSCILLATIONS_PER_VISIT = 2


class EnergyTick(NamedTuple):
    """One change of the device's energy counter. ``change_time``: the backend time of the change. ``joules``: the new
    value of the counter.
    """

    change_time: float
    joules: float


class LaunchBlock(NamedTuple):
    """One block: consecutive launches that are timed together.

    - ``seconds_per_launch``: the mean seconds of a launch. ``launch_count``: the number of launches.
    - ``reading``: what the sensors reported while the device was busy; None if the device has no sensors.
    - ``energy_tick``: a change of the energy counter; None if it did not change or was not asked for.
    - ``was_queued_in_measured_part``: True if the block was queued after the visit's measured part began.
    - ``idle_seconds``: the seconds for which the device idled before the block, because the host queued the block only
      after the device had finished the previous one. ``seconds_per_launch`` does not include them.
    - ``is_limited_by_host``: True if the device waited for the host within the block, because it ran the launches
      faster than the host queued them. ``seconds_per_launch`` includes this waiting time.
    """

    seconds_per_launch: float
    launch_count: int
    reading: SensorReading | None
    energy_tick: EnergyTick | None
    was_queued_in_measured_part: bool
    idle_seconds: float
    is_limited_by_host: bool


class SustainedRegime(Regime):
    """The regime that measures MSMF (maximum sustained matmul FLOPS): the rate at the power limit, as total work
    divided by total time. A sample is the mean of a block of launches. All blocks of a visit have the same number of
    launches, and nothing runs between them. If the device idles between two blocks because the host is late, the idle
    time does not count.

    ``settling_seconds_after_rest``: if not None, the device rests before each visit. After the rest, mamf loads the
    device for this many seconds before it measures, so that the power controller settles.

    While a device is loaded, its power controller can stay in one of several states, whose rates differ by up to 1.3 %.
    After a rest, the power controller chooses a state again. So the mean of several visits is repeatable only if the
    device rests before each visit.
    """

    name = "sustained"
    ranking_statistic = "mean"
    rotates_operands = True
    default_sweep_row_seconds = 6.0
    min_visit_seconds: ClassVar[float] = 2.0
    # Limit a row to one visit of the minimum length. mamf also measures the matmul that reached the ceiling, before and
    # after each row, and these measurements take time as well.
    default_row_seconds = min_visit_seconds
    block_seconds: ClassVar[float] = 0.1
    #: To learn whether a device has settled, mamf fits a straight line to the launch times of the last
    #: ``settled_block_count`` blocks (at least ``min_settled_blocks``). The device has settled if the line rises or
    #: falls by at most the share ``max_settled_slope`` of the mean launch time.
    settled_block_count: ClassVar[int] = 20
    min_settled_blocks: ClassVar[int] = 3
    max_settled_slope: ClassVar[float] = 0.01
    max_settling_seconds: ClassVar[float] = 20.0
    #: The maximum number of launches that ``keep_device_loaded`` queues. The launch queue of a vendor's driver has room
    #: for about a thousand.
    max_launches_to_keep_device_loaded: ClassVar[int] = 500

    def __init__(
        self,
        backend: Backend,
        visit_seconds: float = min_visit_seconds,
        *,
        settling_seconds_after_rest: float | None = None,
    ) -> None:
        super().__init__(backend)
        self.visit_seconds = visit_seconds
        self.settling_seconds_after_rest = settling_seconds_after_rest
        self._loaded_seconds = 0.0
        self._loaded_until = float("-inf")

    @classmethod
    def compute_max_row_seconds(cls, backend: Backend, plan: Plan) -> float:
        return backend.sustained_traits.settle_seconds + cls.min_visit_seconds

    @classmethod
    def estimate_rows_seconds(cls, backend: Backend, plan: Plan, launch_seconds_of_rows: Sequence[float]) -> float:
        visit = cls.compute_max_row_seconds(backend, plan)
        return backend.sustained_traits.soak_seconds + sum(max(visit, 4 * launch) for launch in launch_seconds_of_rows)

    def find_repeatability(self, problem: Problem) -> Repeatability:
        traits = self.backend.sustained_traits
        if self.settling_seconds_after_rest is None:
            return traits.repeatability or look_up_repeatability(self.backend.name, self.name, problem)
        return traits.repeatability_after_rest or look_up_repeatability(self.backend.name, AFTER_REST_STATE, problem)

    @property
    def row_remark(self) -> str:
        return self.backend.sustained_traits.remark

    @classmethod
    def compute_min_visit_seconds_with_rest(cls, backend: Backend) -> float:
        """Return the minimum seconds that a visit takes if it begins with a rest. Return 0 if the power controller of
        this device does not restart during a rest.
        """
        traits = backend.sustained_traits
        return (
            cls._compute_visit_seconds_with_rest(backend, _MIN_OSCILLATIONS_PER_VISIT * traits.swing_seconds)
            if traits.rest_seconds
            else 0.0
        )

    @classmethod
    def _compute_visit_seconds_with_rest(cls, backend: Backend, loaded_seconds: float) -> float:
        """Return the seconds of a visit that begins with a rest and then loads the device for ``loaded_seconds`` to let
        it settle and to measure. The result includes three more blocks, because settling and measuring end with whole
        blocks.
        """
        return backend.sustained_traits.rest_seconds + loaded_seconds + 3 * cls.block_seconds

    @property
    def fixed_visit_seconds(self) -> float:
        if self.settling_seconds_after_rest is None:
            return 0.0
        return self._compute_visit_seconds_with_rest(
            self.backend, self.settling_seconds_after_rest + self.visit_seconds
        )

    def keep_device_loaded(self, launches: Sequence[Launch], launch_seconds: float) -> None:
        """Queue launches, of ``launch_seconds`` each, that keep the device loaded while the host prepares a kernel.

        If the device idles for tens of milliseconds, its power controller oscillates for seconds after the idle time.
        Measurements during these seconds are up to 1 % off (docs/measuring.md).
        """
        if self.settling_seconds_after_rest is not None or self.backend.timer == "host clock":
            return
        count = math.ceil(self.backend.sustained_traits.bridge_seconds / max(launch_seconds, 1e-9))
        for launch in itertools.islice(itertools.cycle(launches), min(self.max_launches_to_keep_device_loaded, count)):
            launch()
            self.backend.submit()

    def make_confirmation_regime(self, chosen_conditions: Conditions, max_visit_seconds: float) -> Regime:
        """Return the regime whose visits confirm a ceiling. If the device was not throttled when the candidate was
        chosen (``chosen_conditions``), or if this device needs no rest, return this regime.

        Otherwise return a regime that rests before each visit. A device that does not report its clock counts as
        throttled. The visits last a whole number of oscillation periods of the power controller, and at most about
        ``max_visit_seconds``.
        """
        traits, maximum = self.backend.sustained_traits, self.backend.info.max_clock_hz
        is_held_back = (
            chosen_conditions.clock_hz is None
            or maximum is None
            or chosen_conditions.clock_hz < _MIN_UNTHROTTLED_SHARE * maximum
        )
        if not is_held_back or not traits.rest_seconds:
            return self
        period = traits.swing_seconds
        loaded_seconds = min(
            max_visit_seconds - self._compute_visit_seconds_with_rest(self.backend, 0.0),
            traits.restart_seconds + self.min_visit_seconds,
        )
        periods = max(_MIN_OSCILLATIONS_PER_VISIT, int(loaded_seconds / period + 1e-9))
        measured_periods = min(periods - 1, max(1, int(self.min_visit_seconds / period + 1e-9)))
        return SustainedRegime(
            self.backend, measured_periods * period, settling_seconds_after_rest=(periods - measured_periods) * period
        )

    def take_samples(self, checked: CheckedKernel, rule: StoppingRule, launch_seconds: float) -> Samples:
        if self.settling_seconds_after_rest is not None:
            self.backend.sleep(self.backend.sustained_traits.rest_seconds)
        start_time = self.backend.now()
        stamps = self.backend.clock_stamps
        if start_time - self._loaded_until > self.backend.sustained_traits.cold_after_seconds:
            self._loaded_seconds = 0.0
        samples = Samples()
        with pause_garbage_collection():
            blocks = _BlockQueue(self, checked)
            if not self._run_until_settled(blocks, rule):
                samples.remarks.append("clock and power had not settled when the measurement began")
            idle_share = self._take_block_samples(blocks, rule, samples)
            last_stamp = None if isinstance(stamps, Unavailability) else stamps.record_stamp()
            # Queue a mark and an idle mark (which waits for all queues) to find work that is still running in another
            # queue. If the device has already reached the first mark, try again behind cache flushes, which keep the
            # device busy.
            mark, idle_mark = self.queue_marks_behind_flushes(0)
            if idle_mark is None and self.backend.has_idle_marks:
                mark, idle_mark = self.queue_marks_behind_flushes()
            self.wait_and_record_gap(checked, mark, idle_mark)
        # An idle device has a higher clock, so use the mean clock only if the device was busy for nearly the whole
        # time.
        if not isinstance(stamps, Unavailability) and idle_share <= _MAX_IDLE_SHARE:
            elapsed = stamps.compute_elapsed(blocks.first_stamp, last_stamp)
            samples.mean_clock_hz = elapsed and elapsed.clock_hz
        checked.verify_last_outputs()
        self._loaded_until = self.backend.now()
        self._loaded_seconds += self._loaded_until - start_time
        return samples

    def _run_until_settled(self, blocks: _BlockQueue, rule: StoppingRule) -> bool:
        """Run blocks of launches until their rate no longer drifts. Return False if that takes too long or the budget
        of the run ends first.
        """
        traits, start_time = self.backend.sustained_traits, self.backend.now()
        min_seconds = (
            max(traits.settle_seconds, traits.soak_seconds - self._loaded_seconds)
            if self.settling_seconds_after_rest is None
            else self.settling_seconds_after_rest
        )
        recent_block_seconds: deque[float] = deque(maxlen=self.settled_block_count)
        for block in blocks.finished_blocks:
            # Ignore the first blocks: they are short, and their clock still depends on the pause before them.
            if block.seconds_per_launch * block.launch_count >= self.block_seconds / 2:
                recent_block_seconds.append(block.seconds_per_launch)
            elapsed = self.backend.now() - start_time
            is_flat = (
                len(recent_block_seconds) >= self.min_settled_blocks
                and abs(compute_relative_slope(recent_block_seconds)) <= self.max_settled_slope
            )
            # After a rest, mamf measures over whole oscillation periods of the power controller, so the rate need not
            # be flat. Do not wait for a flat rate, because the rate is never flat while the power controller alternates
            # between clocks.
            if elapsed >= min_seconds and (is_flat or self.settling_seconds_after_rest is not None):
                return True
            if elapsed >= min_seconds + self.max_settling_seconds or rule.is_budget_over(self.backend.now()):
                break
        return False

    def _take_block_samples(self, blocks: _BlockQueue, rule: StoppingRule, samples: Samples) -> float:
        """Take the samples of a visit, and return the device's idle time as a share of its loaded time."""
        # Begin the measured part of the visit: change operands and poison outputs before the next block, and give all
        # later blocks the same number of launches.
        blocks.is_in_measured_part = blocks.must_poison = True
        start_time, ticks, idle_seconds, host_limited_count = self.backend.now(), list[EnergyTick](), 0.0, 0
        for block in blocks.finished_blocks:
            now = self.backend.now()
            ticks += [block.energy_tick] if block.energy_tick is not None else []
            # mamf computes the mean power from the first and the last change (tick) of the energy counter. So look for
            # the first change and, near the end of the visit, for every change.
            is_near_end = now - start_time + 3 * block.seconds_per_launch * block.launch_count >= self.visit_seconds
            blocks.must_find_tick = not ticks or is_near_end
            if not block.was_queued_in_measured_part:  # The measured part of the visit begins after this block.
                start_time = now
                continue
            idle_seconds += block.idle_seconds
            is_long_enough, is_budget_over = now - start_time >= self.visit_seconds, rule.is_budget_over(now)
            # After a rest, the device is faster for about one block. Do not count this block.
            is_rested = block.idle_seconds > _MAX_IDLE_SHARE * block.seconds_per_launch * block.launch_count
            if is_rested and not is_long_enough and not is_budget_over:
                continue
            samples.seconds_per_launch.append(block.seconds_per_launch)
            samples.launch_count += block.launch_count
            host_limited_count += block.is_limited_by_host
            samples.add_reading(block.reading)
            if is_budget_over or (
                is_long_enough and rule.should_stop(samples.seconds_per_launch, now - start_time, now, statistic="mean")
            ):
                break
        idle_share = idle_seconds / (statistics.fmean(samples.seconds_per_launch) * samples.launch_count)
        samples.is_limited_by_host = 2 * host_limited_count > len(samples.seconds_per_launch)
        if samples.is_limited_by_host:
            samples.remarks.append(
                "the device ran the launches faster than the host queued them, so the rate depends on the host"
            )
        elif idle_share > _MAX_IDLE_SHARE:
            samples.remarks.append(
                f"the device idled for more than {100 * _MAX_IDLE_SHARE:.0f} % of the time between launches; the rate "
                "does not count the idle time"
            )
        # Compute the mean power between two changes of the counter. NVIDIA's counters change only every 0.1 s. If mamf
        # read the counter at arbitrary moments, the mean power of a visit of 1 s would be up to 10 % off.
        if len(ticks) >= 2:
            samples.mean_watts = (ticks[-1].joules - ticks[0].joules) / (ticks[-1].change_time - ticks[0].change_time)
        return idle_share

    def wait_for_energy_tick(self, mark: object) -> EnergyTick | None:
        """Read the energy counter until it changes, and return the time and the new reading. Return None if the device
        has no energy counter, or if the counter does not change before the device reaches ``mark`` or within
        _MAX_ENERGY_POLLS readings.
        """
        before = self.read_sensors(includes_energy=True)
        for _ in range(_MAX_ENERGY_POLLS):
            if before is None or before.joules is None or self.backend.is_mark_reached(mark):
                break
            self.backend.sleep(_ENERGY_POLL_SECONDS)
            after = self.read_sensors(includes_energy=True)
            if after is not None and after.joules is not None and after.joules != before.joules:
                return EnergyTick(self.backend.now(), after.joules)
        return None


class _BlockQueue:
    """The blocks of back-to-back launches of one visit. The generator ``finished_blocks`` yields blocks without end. It
    queues each block before it waits for the end of the previous block, so that the device never idles.

    - ``is_in_measured_part``: True if the next block is in the measured part of the visit.
    - ``must_poison``: True to change operands and poison outputs before the next block.
    - ``must_find_tick``: True to watch the energy counter while the host waits for the next block.
    - ``first_stamp``: the reading of the device's clock counter when the measured part of the visit began; None until
      then, or if the device has no clock counter.
    """

    def __init__(self, regime: SustainedRegime, checked: CheckedKernel) -> None:
        self._regime, self._checked = regime, checked
        self._launches_per_block = 1
        self.must_poison = True
        self.is_in_measured_part = False
        self.must_find_tick = False
        self.first_stamp: object = None
        self.finished_blocks = self._run_blocks()

    def _run_blocks(self) -> Iterator[LaunchBlock]:
        backend, rotation = self._regime.backend, itertools.cycle(self._checked.launches)
        queued_blocks: deque[tuple[object, object, object, int, bool, bool]] = deque()
        last_mark = backend.record_mark()
        is_host_clock = backend.timer == "host clock"  # Then the host waits for each launch.
        for blocks in itertools.count():
            self._regime.require_advancing_clock(blocks)
            if self.must_poison:
                self._checked.change_operands_and_poison_outputs()
                if self.is_in_measured_part and not isinstance(backend.clock_stamps, Unavailability):
                    self.first_stamp = backend.clock_stamps.record_stamp()
                self.must_poison, last_mark = False, backend.record_mark()
            start = backend.record_mark() if backend.is_mark_reached(last_mark) else last_mark
            first_count = self._launches_per_block - math.ceil(_LAST_LAUNCHES_SHARE * self._launches_per_block)
            self._queue_launches(itertools.islice(rotation, first_count))
            mark = None if is_host_clock or not first_count else backend.record_mark()
            self._queue_launches(itertools.islice(rotation, self._launches_per_block - first_count))
            is_limited_by_host = mark is not None and backend.is_mark_reached(mark)
            end = backend.record_mark()
            queued_blocks.append(
                (last_mark, start, end, self._launches_per_block, self.is_in_measured_part, is_limited_by_host)
            )
            last_mark = end
            if len(queued_blocks) < 2:
                continue
            reading = self._regime.read_sensors()
            previous_end, start, end, launch_count, was_queued_in_measured_part, is_limited_by_host = (
                queued_blocks.popleft()
            )
            tick = self._regime.wait_for_energy_tick(end) if self.must_find_tick else None
            backend.wait_for_mark(end)
            seconds = backend.compute_seconds_between(start, end) / launch_count
            idle_seconds = backend.compute_seconds_between(previous_end, start)
            yield LaunchBlock(
                seconds, launch_count, reading, tick, was_queued_in_measured_part, idle_seconds, is_limited_by_host
            )
            if not self.is_in_measured_part:
                fitting = round(self._regime.block_seconds / seconds) if seconds > 0 else self._launches_per_block
                self._launches_per_block = min(max(1, fitting), 4 * self._launches_per_block)

    def _queue_launches(self, launches: Iterable[Launch]) -> None:
        for launch in launches:
            launch()
            self._regime.backend.submit()
