"""Measure in the regime `burst`: rest until the requested clock is back at its maximum, then launch a *train* (a few
launches, one after another) that ends before the slow power controller (20 to 50 ms) reacts.

Before each train, mamf queues a *lead*: cache flushes that keep the device busy while the host queues the launches. A
*visit* is one measurement of one kernel on one shape, with as many trains and rests as it needs.
"""

from __future__ import annotations

import statistics as stdlib_statistics
from collections.abc import Sequence
from typing import ClassVar

from mamf.backend import Backend, ClockStamps, SensorReading, Unavailability
from mamf.calibration import look_up_repeatability
from mamf.engine.regimes.base import (
    CheckedKernel,
    Launch,
    Regime,
    Samples,
    StoppingRule,
    WrongResultError,
    explain_skipped_work,
    launch_between_marks,
)
from mamf.kernel import Problem, Verdict
from mamf.machine.environment import pause_garbage_collection
from mamf.measurement import TimerOverhead, choose_timer_overhead, subtract_timer_overhead
from mamf.plans import Plan
from mamf.statistics import Repeatability

#: A kernel seems to skip work if the last launch of every train is slow. The regime runs at least this many trains
#: before it says so, because other work on a busy CPU can slow the last launches of a few trains by chance.
_MIN_TRAINS_TO_BLAME_KERNEL = 16


class BurstRegime(Regime):
    """The regime that measures MAMF (maximum achievable matmul FLOPS): the rate before the slow power controller
    reacts. The fast power controller reacts within about 10 us, so it lowers the true clock during a burst too.
    """

    name = "burst"
    default_sweep_row_seconds = default_row_seconds = 1.0
    #: The number of launches in the first train of a visit, when mamf does not know yet how long a launch takes. Later
    #: trains have at least this number of launches.
    min_train_launches: ClassVar[int] = 3
    max_train_launches: ClassVar[int] = 8
    #: The usual number of launches of a row. mamf estimates the time of a run from this number.
    usual_row_launches: ClassVar[int] = 12
    #: A launch that takes at most this long is short: its time varies more between trains than within a train, so its
    #: median needs at least ``min_trains_of_short_launches`` trains.
    max_short_launch_seconds: ClassVar[float] = 0.00025
    min_trains_of_short_launches: ClassVar[int] = 10
    #: The number of cache flushes that mamf times to learn how long one flush takes.
    timed_flush_count: ClassVar[int] = 10
    #: The maximum time, in device seconds, of the cache flushes ahead of a train, unless the device needs longer to
    #: wake up.
    max_lead_seconds: ClassVar[float] = 0.004
    #: The minimum time, in seconds, by which the host gets ahead of the device before a train. The host needs about
    #: half of this time to queue the first launches after a rest.
    min_lead_seconds: ClassVar[float] = 0.001
    #: If earlier load still throttles the device, mamf discards the first train of a visit and repeats it, at most this
    #: many times in succession.
    max_throttled_trains: ClassVar[int] = 3

    #: A *stamp* is a reading of the device's clock counter. To measure the true clock, mamf runs
    #: ``trains_per_clock_measurement`` trains, and takes a stamp before and after each launch. After each train, it
    #: takes ``idle_stamps_per_train`` more stamps in succession. If a launch takes less than
    #: ``min_launch_seconds_for_clock``, mamf does not measure the clock.
    trains_per_clock_measurement: ClassVar[int] = 3
    idle_stamps_per_train: ClassVar[int] = 8
    min_launch_seconds_for_clock: ClassVar[float] = 20e-6

    def __init__(self, backend: Backend, must_flush_cache: bool = True) -> None:
        """Prepare to measure on an opened device. ``must_flush_cache``: True to flush the cache before each launch;
        False to measure with a warm cache.
        """
        super().__init__(backend)
        self.must_flush_cache = must_flush_cache
        self._rest_until = backend.now()
        self._is_cold = False
        self._throttled_trains = 0
        self._overhead = TimerOverhead(0.0)
        #: Device seconds of one cache flush, and host seconds to queue it.
        self._flush_seconds = self._flush_queueing_seconds = 0.0
        #: Host seconds to queue a cache flush, a launch, and a mark (timing event) before and after the launch.
        self._queueing_seconds = 100e-6
        #: Host seconds to queue the mark that waits for all queues of the device. The host must queue this mark while
        #: the last launch of a train still runs.
        self._idle_mark_queueing_seconds = 0.0

    @classmethod
    def make_from_plan(cls, backend: Backend, plan: Plan) -> BurstRegime:
        return cls(backend, plan.flush)

    @classmethod
    def estimate_rows_seconds(cls, backend: Backend, plan: Plan, launch_seconds_of_rows: Sequence[float]) -> float:
        traits, max_seconds = backend.burst_traits, plan.seconds or cls.default_sweep_row_seconds
        row_seconds = (
            # On a CPU, hardly any row reaches the precision before its time limit.
            min(
                cls.usual_row_launches * launch if backend.is_accelerator else float("inf"),
                max(3 * launch, max_seconds),
            )
            for launch in launch_seconds_of_rows
        )
        return traits.longest_rest_seconds + traits.warm_in_seconds + (1 + traits.rest_ratio) * sum(row_seconds)

    def find_repeatability(self, problem: Problem) -> Repeatability:
        return self.backend.burst_traits.repeatability or look_up_repeatability(self.backend.name, self.name, problem)

    @property
    def row_remark(self) -> str:
        return self.backend.burst_traits.remark

    def explain_too_long_launch(self, launch_seconds: float) -> str | None:
        max_seconds = self.backend.burst_traits.train_seconds
        durations = f"a launch takes {launch_seconds * 1e3:.3g} ms, longer than a burst of {max_seconds * 1e3:.3g} ms"
        return f"{durations}: measure it in the sustained regime" if launch_seconds > max_seconds else None

    def prepare_device(self) -> None:
        # Begin with the longest rest, because earlier work may have left the device throttled.
        backend = self.backend
        self._is_cold = True
        self._rest_until = backend.now() + backend.burst_traits.longest_rest_seconds
        backend.flush_cache()
        backend.synchronize()
        start, start_time = backend.record_mark(), backend.now()
        for _ in range(self.timed_flush_count):
            backend.flush_cache()
        self._flush_queueing_seconds = (backend.now() - start_time) / self.timed_flush_count
        end = backend.record_mark()
        backend.synchronize()
        self._flush_seconds = backend.compute_seconds_between(start, end) / self.timed_flush_count
        self._idle_mark_queueing_seconds = (
            self._idle_mark_gap_and_queueing_seconds[1] if backend.has_idle_marks else 0.0
        )
        self._overhead = choose_timer_overhead(backend.name, backend.estimate_timer_overhead())

    def take_samples(self, checked: CheckedKernel, rule: StoppingRule, launch_seconds: float) -> Samples:
        samples = Samples(timer_overhead_seconds=self._overhead.seconds)
        samples.remarks += [self._overhead.remark] if self._overhead.remark else []
        train_size = self._compute_min_train_size(launch_seconds)
        lag_seconds, trains = 0.0, 0
        verified_seconds: list[float] = []
        unverified_seconds: list[float] = []
        self._rest_until_recovered()
        self._warm_up_device(checked, train_size, rule)
        start_time = self.backend.now()
        while True:
            seconds, reading = self._run_train(checked, train_size, lag_seconds)
            now = self.backend.now()
            # If earlier load still throttled the device, discard this first train, unless the budget is over.
            if not trains and not rule.is_budget_over(now) and self._schedule_rest_if_throttled(reading):
                self._rest_until_recovered()
                continue
            samples.seconds_per_launch += seconds
            verified_seconds.append(seconds[-1])
            unverified_seconds += seconds[:-1]
            samples.add_reading(reading)
            trains += 1
            median = stdlib_statistics.median(samples.seconds_per_launch)
            is_representative = trains >= self.min_trains_of_short_launches or median >= self.max_short_launch_seconds
            if rule.should_stop(samples.seconds_per_launch, now - start_time, now, is_representative):
                skipped_work = explain_skipped_work(verified_seconds, unverified_seconds)
                if not skipped_work:
                    samples.launch_count = len(samples.seconds_per_launch)
                    return samples
                if trains >= _MIN_TRAINS_TO_BLAME_KERNEL:
                    raise WrongResultError(Verdict(float("inf"), 0.0, reason=skipped_work))
            seconds_per_launch = median + self._flush_seconds
            train_size = self._compute_train_size(seconds_per_launch, len(samples.seconds_per_launch))
            lag_seconds = max(0.0, self._queueing_seconds - seconds_per_launch)
            self._rest_until_recovered()

    def measure_true_clock(self, checked: CheckedKernel, launch_seconds: float) -> float | None:
        """Measure the mean clock of the compute units in hertz, during additional launches that take about
        ``launch_seconds`` each; return None if this device cannot measure it. These launches give no samples, because
        reading the clock counter makes launches of 0.2 ms 0.5 % slower.
        """
        stamps = self.backend.clock_stamps
        if isinstance(stamps, Unavailability) or launch_seconds < self.min_launch_seconds_for_clock:
            return None
        train_size = self._compute_train_size(launch_seconds + self._flush_seconds, self.max_train_launches)
        clock_hz_of_launches: list[float] = []
        for _ in range(self.trains_per_clock_measurement):
            self._rest_until_recovered()
            clock_hz_of_launches += self._measure_launch_clocks(stamps, checked.launches[0], train_size)
        return stdlib_statistics.median(clock_hz_of_launches) if clock_hz_of_launches else None

    def _measure_launch_clocks(self, stamps: ClockStamps, launch: Launch, train_size: int) -> list[float]:
        """Run a train of ``train_size`` launches between readings of the device's clock counter (``stamps``), and
        return the mean clock of each launch, in hertz.

        Between the two stamps around a launch, the device is also idle for a short time, at another clock. The stamps
        after the train show this idle clock, so that mamf can subtract the idle cycles.
        """
        backend = self.backend
        with pause_garbage_collection():
            self._queue_flushes_and_warm_cache(launch, self.max_lead_seconds)
            stamps_and_marks = []
            for _ in range(train_size):
                if self.must_flush_cache:
                    backend.flush_cache()
                stamps_and_marks.append(
                    (stamps.record_stamp(), *launch_between_marks(launch, backend), stamps.record_stamp())
                )
            idle_stamps = [stamps.record_stamp() for _ in range(self.idle_stamps_per_train)]
            backend.synchronize()
        launch_seconds = [
            subtract_timer_overhead(backend.compute_seconds_between(*marks), self._overhead.seconds)
            for _, *marks, _ in stamps_and_marks
        ]
        traits = backend.burst_traits
        self._rest_until = backend.now() + min(sum(launch_seconds) * traits.rest_ratio, traits.longest_rest_seconds)
        idle_gap = stamps.compute_elapsed(idle_stamps[0], idle_stamps[-1])
        idle_hz = idle_gap and idle_gap.clock_hz
        stamp_gaps = [stamps.compute_elapsed(before, after) for before, *_, after in stamps_and_marks]
        return [
            (gap.cycles - (gap.seconds - seconds) * idle_hz) / seconds
            for gap, seconds in zip(stamp_gaps, launch_seconds, strict=True)
            if idle_hz and gap is not None and 0 < seconds <= gap.seconds
        ]

    def _warm_up_device(self, checked: CheckedKernel, train_size: int, rule: StoppingRule) -> None:
        """Run trains of ``train_size`` launches and discard their times, until a device that has been idle for a long
        time reaches its steady speed, or until the budget of the run ends.
        """
        traits, start_time = self.backend.burst_traits, self.backend.now()
        if not self._is_cold and start_time - self._rest_until <= traits.cold_after_seconds:
            return
        trains = 0
        while not rule.is_budget_over(now := self.backend.now()) and now - start_time < traits.warm_in_seconds:
            self.require_advancing_clock(trains)
            self._run_train(checked, train_size, lag_seconds=0.0)
            self._rest_until_recovered()
            trains += 1
        self._is_cold = False

    def _schedule_rest_if_throttled(self, reading: SensorReading | None) -> bool:
        """Schedule more rest and return True if the sensor ``reading`` of a visit's first train shows that earlier load
        still throttled the device. Otherwise return False.

        Also return False after ``max_throttled_trains`` throttled trains in succession: more rest does not help,
        because this device is always throttled.
        """
        if reading is None or not reading.throttle_reasons:
            self._throttled_trains = 0
            return False
        self._throttled_trains += 1
        if self._throttled_trains > self.max_throttled_trains:
            return False
        # Rest as long as possible, but not so long that the device cools and must be warmed up again.
        self._rest_until = max(self._rest_until, self.backend.now() + self.backend.burst_traits.cold_after_seconds)
        return True

    def _rest_until_recovered(self) -> None:
        self.backend.sleep(max(0.0, self._rest_until - self.backend.now()))

    def _compute_train_size(self, seconds_per_launch: float, sample_count: int) -> int:
        """Return the number of launches in the next train. ``seconds_per_launch``: device seconds of a launch with its
        cache flush. ``sample_count``: the number of samples so far in this visit.
        """
        min_size = self._compute_min_train_size(seconds_per_launch)
        if sample_count <= self.min_train_launches:
            # Make the first two trains short: together they give the 6 samples that a 95 % interval needs.
            return min_size
        max_size = min(self.backend.burst_traits.train_seconds / seconds_per_launch, self.max_train_launches)
        # The seconds by which the host falls behind the device with each launch.
        lag_seconds = self._queueing_seconds - seconds_per_launch
        if lag_seconds > 0:
            spare = self.max_lead_seconds * self._compute_host_lead_per_flush_second() - self.min_lead_seconds
            max_size = min(max_size, spare / lag_seconds)
        return max(int(max_size), min_size)

    def _compute_min_train_size(self, seconds_per_launch: float) -> int:
        """Return the minimum number of launches in a train: ``min_train_launches``, or fewer if that many launches take
        longer than a train may take on this device. ``seconds_per_launch``: the device seconds of a launch.
        """
        return min(
            self.min_train_launches,
            max(1, int(self.backend.burst_traits.train_seconds / max(seconds_per_launch, 1e-9))),
        )

    def _compute_host_lead_per_flush_second(self) -> float:
        """Return how many seconds the host gets ahead of the device for each second of cache flushes that it queues."""
        if self.backend.timer == "host clock" or self._flush_seconds <= self._flush_queueing_seconds:
            return 0.0
        return 1 - self._flush_queueing_seconds / self._flush_seconds

    def _queue_flushes_and_warm_cache(self, launch: Launch, lead_seconds: float) -> None:
        """Queue cache flushes until the host is ``lead_seconds`` ahead of the device and the device has woken up from
        its rest. Without this lead, the device would wait for the host between small launches, which the host queues
        more slowly than the device runs them. To measure with a warm cache, also queue a launch, which fills the cache
        again.
        """
        lead_per_flush_second, waking = (
            self._compute_host_lead_per_flush_second(),
            self.backend.burst_traits.wake_seconds,
        )
        if lead_per_flush_second > 0 or waking > 0:
            flush_seconds = (
                min(lead_seconds / lead_per_flush_second, self.max_lead_seconds) if lead_per_flush_second > 0 else 0.0
            )
            for _ in range(1 + int(max(flush_seconds, waking) / self._flush_seconds)):
                self.backend.flush_cache()
        if not self.must_flush_cache:
            launch()

    def _run_train(
        self, checked: CheckedKernel, train_size: int, lag_seconds: float
    ) -> tuple[list[float], SensorReading | None]:
        """Queue cache flushes, so that the host gets ahead of the device, then launch a train of ``train_size``
        launches, and verify the output of the last launch. Return the device seconds of each launch, and the sensor
        reading.

        ``lag_seconds``: an estimate of the seconds by which the host falls behind the device with each launch.
        """
        backend, launch = self.backend, checked.launches[0]
        with pause_garbage_collection():
            self._queue_flushes_and_warm_cache(launch, self.min_lead_seconds + train_size * lag_seconds)
            start_time = backend.now()
            marks = [self._flush_and_queue_launch(launch) for _ in range(train_size - 1)]
            paused = backend.now()
            # Poison the output, so that only the last launch can produce the correct output that mamf verifies next.
            checked.change_operands_and_poison_outputs()
            # Queue more flushes, because the host may not be ahead of the device any more. Otherwise the last launch
            # would wait for the host and take longer than the others, and mamf would conclude that the others skip
            # work.
            self._queue_flushes_and_warm_cache(
                launch, backend.now() - paused + self._idle_mark_queueing_seconds + 2 * lag_seconds
            )
            if not self.must_flush_cache:
                # Poison the output again, because the launch that filled the cache has written it.
                checked.poison_outputs()
            resumed = backend.now()
            marks.append(self._flush_and_queue_launch(launch))
            self._queueing_seconds = (backend.now() - start_time - (resumed - paused)) / train_size
            idle_mark = self.queue_idle_mark(marks[-1][1])
            reading = self.read_sensors()
            self.wait_and_record_gap(checked, marks[-1][1], idle_mark)
        seconds = [backend.compute_seconds_between(start, end) for start, end in marks]
        # Compute the rest from the time of the launches only: cache flushes do not reach the power limit, so the device
        # need not recover from them.
        traits = backend.burst_traits
        self._rest_until = backend.now() + min(sum(seconds) * traits.rest_ratio, traits.longest_rest_seconds)
        checked.verify_last_outputs()  # The device rests during this verification.
        return [subtract_timer_overhead(window, self._overhead.seconds) for window in seconds], reading

    def _flush_and_queue_launch(self, launch: Launch) -> tuple[object, object]:
        if self.must_flush_cache:
            self.backend.flush_cache()
        return launch_between_marks(launch, self.backend)
