"""Burst: rest until the requested clock is back at its maximum, then launch a train that ends before the slow power
controller (20 to 50 ms) reacts.
"""

from __future__ import annotations

import statistics as stdlib_statistics
from collections.abc import Sequence
from typing import ClassVar

from mamf.backend import Backend, ClockStamps, Reading, Unavailable
from mamf.calibration import find_calibration
from mamf.engine.regimes.base import (
    CheckedKernel,
    Launch,
    Regime,
    Samples,
    StoppingRule,
    compute_skipped_work_ratio,
    refuse_skipped_work,
)
from mamf.kernel import Problem
from mamf.machine.environment import disable_garbage_collection
from mamf.measurement import Overhead, choose_overhead, subtract_overhead
from mamf.plans import Plan
from mamf.statistics import Repeatability


class Burst(Regime):
    """Measures the rate before the slow power controller reacts: MAMF. The fast power controller reacts within some 10
    us, so it has already lowered the true clock.
    """

    name = "burst"
    default_seconds = usual_seconds = 1.0
    #: The number of launches in the first train, when the duration of a launch is not known yet. No later train has
    #: fewer.
    min_train_launches: ClassVar[int] = 3
    max_train_launches: ClassVar[int] = 8
    #: How many launches a row usually takes.
    usual_row_launches: ClassVar[int] = 12
    #: A kernel shorter than this varies more between trains than within one, so its median needs at least
    #: ``min_short_trains`` trains.
    short_launch_seconds: ClassVar[float] = 0.00025
    min_short_trains: ClassVar[int] = 10
    #: The most device time of work that is queued ahead of a train.
    max_lead_seconds: ClassVar[float] = 0.004
    #: The minimum device time of that work. After a rest, the host's first launches take half of this time.
    min_lead_seconds: ClassVar[float] = 0.001
    #: How many consecutive first trains may be discarded because earlier load still throttles the device.
    max_throttled_trains: ClassVar[int] = 3

    #: The number of trains with clock stamps, the number of back-to-back stamps after each of these trains, and the
    #: seconds of the shortest launch for which they can measure the clock.
    stamped_train_count: ClassVar[int] = 3
    idle_stamp_count: ClassVar[int] = 8
    min_clocked_launch_seconds: ClassVar[float] = 20e-6

    def __init__(self, backend: Backend, flush: bool = True) -> None:
        """``flush``: whether to evict the operands before each launch; False measures with a warm cache."""
        super().__init__(backend)
        self.flush = flush
        self._rest_until = backend.now()
        self._is_cold = False
        self._throttled_trains = 0
        self._overhead = Overhead(0.0)
        # Seconds of one flush on the device and on the host; and host seconds to queue a flush, two marks and a launch.
        self._flush_seconds = self._flush_host_seconds = 0.0
        self._host_seconds = 100e-6
        #: Host seconds to queue an idle mark. It must be queued before the launch in front of it ends.
        self._idle_mark_host_seconds = 0.0

    @classmethod
    def make_from_plan(cls, backend: Backend, plan: Plan) -> Burst:
        return cls(backend, plan.flush)

    @classmethod
    def estimate_seconds(cls, backend: Backend, plan: Plan, launches: Sequence[float]) -> float:
        traits, longest = backend.burst_traits, plan.seconds or cls.default_seconds
        of_rows = (min(cls.usual_row_launches * launch, max(3 * launch, longest)) for launch in launches)
        return traits.longest_rest_seconds + traits.warm_in_seconds + (1 + traits.rest_ratio) * sum(of_rows)

    def find_repeatability(self, problem: Problem) -> Repeatability:
        return self.backend.burst_traits.repeatability or find_calibration(self.backend.name, self.name, problem)

    @property
    def caveat(self) -> str:
        return self.backend.burst_traits.remark

    def explain_too_long(self, seconds: float) -> str | None:
        longest = self.backend.burst_traits.train_seconds
        if seconds <= longest:
            return None
        return (
            f"a launch of {seconds * 1e3:.3g} ms is longer than a burst of "
            f"{longest * 1e3:.3g} ms: measure it in the sustained regime"
        )

    def start(self) -> None:
        # Earlier work may have left the device throttled.
        self._rest_until = self.backend.now() + self.backend.burst_traits.longest_rest_seconds
        self._is_cold = True
        self._time_flush()
        self._idle_mark_host_seconds = self._idle_mark_seconds[1] if self.backend.has_idle_marks else 0.0
        self._overhead = choose_overhead(self.backend.name, self.backend.timer_overhead())

    def sample(self, checked: CheckedKernel, rule: StoppingRule, estimate: float) -> Samples:
        taken = Samples(timer_overhead=self._overhead.seconds)
        taken.remarks += [self._overhead.remark] if self._overhead.remark else []
        size = self._compute_min_train_size(estimate)
        lead, trains = self.min_lead_seconds, 0
        verified: list[float] = []
        others: list[float] = []
        self._rest()
        self._warm_up(checked, size, rule)
        begun = self.backend.now()
        while True:
            seconds, reading = self._run_train(checked, size, lead)
            now = self.backend.now()
            # All ranks must call is_budget_over, whatever their own sensors say; otherwise one rank would wait for the
            # others forever.
            if not trains and not rule.is_budget_over(now) and self._is_throttled_by_earlier_load(reading):
                self._rest()
                continue
            taken.seconds += seconds
            verified.append(seconds[-1])
            others += seconds[:-1]
            taken.add_reading(reading)
            trains += 1
            median = stdlib_statistics.median(taken.seconds)
            is_representative = trains >= self.min_short_trains or median >= self.short_launch_seconds
            if rule.should_stop(taken.seconds, now - begun, now, is_representative):
                taken.launches = len(taken.seconds)
                refuse_skipped_work(compute_skipped_work_ratio(verified, others))
                return taken
            period = median + self._flush_seconds
            size = self._compute_train_size(period, len(taken.seconds))
            lead = self.min_lead_seconds + size * self._compute_host_lag(period)
            self._rest()

    def measure_true_clock(self, checked: CheckedKernel, seconds: float) -> float | None:
        """Measure the clock in separate trains, because stamps make launches of 0.2 ms 0.5 % slower."""
        stamps = self.backend.stamps
        if isinstance(stamps, Unavailable) or seconds < self.min_clocked_launch_seconds:
            return None
        size = self._compute_train_size(seconds + self._flush_seconds, self.max_train_launches)
        clocks: list[float] = []
        for _ in range(self.stamped_train_count):
            self._rest()
            clocks += self._measure_clocks(stamps, checked.launches[0], size)
        return stdlib_statistics.median(clocks) if clocks else None

    def _measure_clocks(self, stamps: ClockStamps, launch: Launch, size: int) -> list[float]:
        """Return the mean clock of each launch, in hertz.

        The two stamps around a launch also enclose short gaps in which the units run at the idle clock. The
        back-to-back stamps after the train measure that clock, and its cycles are subtracted.
        """
        backend = self.backend
        with disable_garbage_collection():
            self._queue_lead_and_warm_cache(launch, self.max_lead_seconds)
            around = []
            for _ in range(size):
                if self.flush:
                    backend.flush_cache()
                around.append((stamps.stamp(), *self.launch_timed(launch), stamps.stamp()))
            idle = [stamps.stamp() for _ in range(self.idle_stamp_count)]
            backend.synchronize()
        windows = [
            subtract_overhead(backend.seconds_between(*marks), self._overhead.seconds) for _, *marks, _ in around
        ]
        traits = backend.burst_traits
        self._rest_until = backend.now() + min(sum(windows) * traits.rest_ratio, traits.longest_rest_seconds)
        gap, clocks = stamps.between(idle[0], idle[-1]), []
        idle_hz = gap and gap.clock_hz
        for (before, *_, after), seconds in zip(around, windows, strict=True):
            passed = stamps.between(before, after)
            if idle_hz and passed is not None and 0 < seconds <= passed.seconds:
                clocks.append((passed.cycles - (passed.seconds - seconds) * idle_hz) / seconds)
        return clocks

    def _warm_up(self, checked: CheckedKernel, size: int, rule: StoppingRule) -> None:
        """Run trains, without using their times, until a device that was idle reaches its steady speed."""
        traits, begun = self.backend.burst_traits, self.backend.now()
        if not self._is_cold and begun - self._rest_until <= traits.cold_after_seconds:
            return
        trains = 0
        while not rule.is_budget_over(now := self.backend.now()) and now - begun < traits.warm_in_seconds:
            self.require_clock_advances(trains)
            self._run_train(checked, size, self.min_lead_seconds)
            self._rest()
            trains += 1
        self._is_cold = False

    def _is_throttled_by_earlier_load(self, reading: Reading | None) -> bool:
        """Whether earlier load still throttled the first train of a visit, so that more rest may help.

        After ``max_throttled_trains`` such trains, throttling counts as normal for this device.
        """
        if reading is None or not reading.throttle_reasons:
            self._throttled_trains = 0
            return False
        self._throttled_trains += 1
        if self._throttled_trains > self.max_throttled_trains:
            return False
        # Rest as long as possible without cooling so much that the device must be warmed up again.
        self._rest_until = max(self._rest_until, self.backend.now() + self.backend.burst_traits.cold_after_seconds)
        return True

    def _rest(self) -> None:
        owed = self._rest_until - self.backend.now()
        if owed > 0:
            self.backend.sleep(owed)

    def _compute_train_size(self, period: float, taken: int) -> int:
        """Return the number of launches in the next train. ``period``: seconds of a launch with its flush. ``taken``:
        the number of samples so far.
        """
        shortest = self._compute_min_train_size(period)
        if taken <= self.min_train_launches:
            # Two of the shortest trains give the 6 samples that a 95 % interval needs.
            return shortest
        fitting = min(self.backend.burst_traits.train_seconds / period, self.max_train_launches)
        lag = self._compute_host_lag(period)
        if lag > 0:
            spare = self.max_lead_seconds * self._compute_lead_gain() - self.min_lead_seconds
            fitting = min(fitting, spare / lag)
        return max(int(fitting), shortest)

    def _compute_min_train_size(self, period: float) -> int:
        """Return the minimum number of launches in a train: ``min_train_launches``, or as many as fit before the power
        controller reacts.
        """
        fitting = int(self.backend.burst_traits.train_seconds / max(period, 1e-9))
        return min(self.min_train_launches, max(1, fitting))

    def _compute_host_lag(self, period: float) -> float:
        """Return the seconds that the host loses to the device with each launch."""
        return max(0.0, self._host_seconds - period)

    def _compute_lead_gain(self) -> float:
        """Return the seconds that the host gains on the device per device second of flushes."""
        if self.backend.timer == "host clock" or self._flush_seconds <= self._flush_host_seconds:
            return 0.0
        return 1 - self._flush_host_seconds / self._flush_seconds

    def _queue_lead_and_warm_cache(self, launch: Launch, seconds: float) -> None:
        """Queue flushes so that the host gets ahead; for a warm cache, also a launch that fills it again."""
        self._queue_lead(seconds)
        if not self.flush:
            launch()

    def _queue_lead(self, seconds: float) -> None:
        """Queue flushes of ``seconds`` of lead: launching a small kernel takes the host longer than running it takes
        the device, and the device must not wait within the timed window. They also last until the device has woken up.
        """
        gain, waking = self._compute_lead_gain(), self.backend.burst_traits.wake_seconds
        if gain > 0 or waking > 0:
            lead = min(seconds / gain, self.max_lead_seconds) if gain > 0 else 0.0
            for _ in range(1 + int(max(lead, waking) / self._flush_seconds)):
                self.backend.flush_cache()

    def _run_train(self, checked: CheckedKernel, size: int, lead: float) -> tuple[list[float], Reading | None]:
        """Launch a train, then verify its last launch. Returns the seconds of each launch and the sensor reading."""
        backend, launch = self.backend, checked.launches[0]
        with disable_garbage_collection():
            self._queue_lead_and_warm_cache(launch, lead)
            begun = backend.now()
            marks = [self._flush_and_launch(launch) for _ in range(size - 1)]
            paused = backend.now()
            checked.prepare_check()  # so that only the last launch can leave the output that is verified
            self._queue_lead_and_warm_cache(launch, backend.now() - paused + self._idle_mark_host_seconds)
            if not self.flush:
                checked.poison()  # again: the launch that filled the cache wrote the output
            resumed = backend.now()
            marks.append(self._flush_and_launch(launch))
            self._host_seconds = (backend.now() - begun - (resumed - paused)) / size
            idle = self.queue_idle_mark(marks[-1][1])
            reading = self.read_sensors()
            self.synchronize(checked, marks[-1][1], idle)
        seconds = [backend.seconds_between(start, end) for start, end in marks]
        # Flushes draw less than the power limit, so only the launches need a rest.
        traits = backend.burst_traits
        self._rest_until = backend.now() + min(sum(seconds) * traits.rest_ratio, traits.longest_rest_seconds)
        checked.verify()  # during the rest
        return [subtract_overhead(window, self._overhead.seconds) for window in seconds], reading

    def _flush_and_launch(self, launch: Launch) -> tuple[object, object]:
        if self.flush:
            self.backend.flush_cache()
        return self.launch_timed(launch)

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
