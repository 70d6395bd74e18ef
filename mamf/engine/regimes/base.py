"""Define what the regimes (the ways in which mamf rests, launches and times a kernel) share: when to stop, the samples,
the interface ``Regime``, and the verification of timed launches (``CheckedKernel``).

A *mark* is a device event that records the time. An *idle mark* is a mark that waits for all queues of the device. A
*flush* evicts the cache. To *poison* an output is to overwrite it with wrong values before a launch. A *visit* is one
measurement of one kernel on one shape.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from mamf.backend import Backend, SensorReading, Unavailability
from mamf.errors import MamfError, PluginError, get_catchable_plugin_errors
from mamf.kernel import PreparedKernel, Problem, Verdict, choose_operand_set_count, describe_wrong_cells
from mamf.measurement import WRONG_TILES_KEY, Conditions
from mamf.plans import Plan
from mamf.statistics import Repeatability, compute_interval, compute_mean_or_median

Launch = Callable[[], object]


def launch_between_marks(launch: Launch, backend: Backend) -> tuple[object, object]:
    """Queue a launch between two marks (device events that record the time), and return both marks."""
    start = backend.record_mark()
    launch()
    backend.submit()
    return start, backend.record_mark()


# After every this many iterations of a loop, mamf checks that the backend's clock has advanced. Each iteration launches
# a kernel, so in that time even a coarse clock must advance.
_ROUNDS_PER_CLOCK_CHECK = 20
#: Seconds that mamf assumes for a row of a regime without a time limit. The 150 launches and flushes of classic usually
#: take less.
_USUAL_ROW_SECONDS = 1.0
#: This many cache flushes keep the device busy for longer than the host needs to queue two marks.
_FLUSHES_AHEAD_OF_MARKS = 16
#: To measure the overhead of its timing events (marks), mamf queues pairs of marks without a launch between them.
#: Before each pair, it queues cache flushes, which keep the device busy until the host has queued both marks. This
#: tuple has the number of flushes for each pair. Only a slow host needs the largest number.
_FLUSHES_AHEAD_OF_MARK_PAIRS = (2, _FLUSHES_AHEAD_OF_MARKS, _FLUSHES_AHEAD_OF_MARKS, _FLUSHES_AHEAD_OF_MARKS, 128)


@dataclass(frozen=True)
class StoppingRule:
    """A rule that says when a measurement has enough samples.

    - ``precision``: the measurement stops when the 95 % interval of its mean or median is within plus or minus this
      share of the value. The interval is computed from the scatter of the samples.
    - ``max_seconds``: host seconds after which the measurement stops as soon as it has ``min_samples``; None: no limit.
    - ``max_samples``: the measurement stops here even if the interval is still too wide.
    - ``deadline``: the backend time (``Backend.now``) at which the time budget of the run ends; None: no budget.
    """

    precision: float = 0.003
    max_seconds: float | None = None
    min_samples: int = 3
    max_samples: int = 1000
    deadline: float | None = None

    def is_budget_over(self, now: float) -> bool:
        """Return whether the time budget of the run has ended at backend time ``now``."""
        return self.deadline is not None and now >= self.deadline

    def should_stop(
        self,
        samples: Sequence[float],
        elapsed_seconds: float,
        now: float,
        is_representative: bool = True,
        statistic: str = "median",
    ) -> bool:
        """Return whether to stop taking samples, after ``elapsed_seconds`` and at backend time ``now``.

        ``is_representative``: False if the scatter of the samples does not show their precision yet, so the rule must
        not stop because of it. ``statistic``: the statistic that must be precise, ``mean`` or ``median``.
        """
        if self.is_budget_over(now):
            return True
        if len(samples) < self.min_samples:
            return False
        is_late = self.max_seconds is not None and elapsed_seconds >= self.max_seconds
        if is_late or len(samples) >= self.max_samples:
            return True
        interval = compute_interval(samples, statistic)
        is_precise = interval.half_width <= self.precision * compute_mean_or_median(samples, statistic)
        return is_representative and is_precise and interval.coverage >= 0.95


@dataclass
class Samples:
    """The samples of one measurement, and the sensor readings taken during it.

    - ``seconds_per_launch``: the samples, each in seconds per launch.
    - ``launch_count``: the number of launches in all samples together.
    - ``mean_watts``: the mean power from an energy counter; None if there is none.
    - ``mean_clock_hz``: the mean clock of the compute units during the launches; None if not measured.
    - ``timer_overhead_seconds``: seconds that the timer adds to a launch, already subtracted from each sample.
    - ``is_limited_by_host``: True if the device waited for the host between launches, so that the samples depend on the
      speed of the host.
    - ``remarks``, ``details``: texts and named values to add to the row that the samples give.
    """

    seconds_per_launch: list[float] = field(default_factory=list)
    launch_count: int = 0
    readings: list[SensorReading] = field(default_factory=list)
    mean_watts: float | None = None
    mean_clock_hz: float | None = None
    timer_overhead_seconds: float = 0.0
    is_limited_by_host: bool = False
    remarks: list[str] = field(default_factory=list)
    details: dict[str, float | str] = field(default_factory=dict)

    def add_reading(self, reading: SensorReading | None) -> None:
        if reading is not None:
            self.readings.append(reading)


class Regime(ABC):
    """A way to rest the device, launch a kernel and time it, on one opened device. One object serves a whole run.

    - ``ranking_statistic``: the statistic that ranks rows of this regime: ``median``, ``mean`` or ``fastest``.
    - ``rotates_operands``: True if launches rotate over several sets of operands, so that none stays in the cache.
    - ``must_rewrite_output``: True if the output is overwritten before each launch.
    - ``default_sweep_row_seconds``: the time limit of a row in a sweep, which measures one kernel on many shapes; None:
      no limit.
    - ``default_row_seconds``: the time limit of a row in any other run; None: no limit.
    - ``warmup_seconds``: the seconds for which the device is loaded before the first row.
    """

    name: ClassVar[str]
    ranking_statistic: ClassVar[str] = "median"
    rotates_operands: ClassVar[bool] = False
    must_rewrite_output: ClassVar[bool] = False
    default_sweep_row_seconds: ClassVar[float | None] = None
    default_row_seconds: ClassVar[float | None] = None
    warmup_seconds: ClassVar[float] = 0.0

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._last_clock = 0.0
        #: Host seconds of the latest measurement, including the rest before it and the time until the device settled.
        self.last_visit_seconds = 0.0

    @classmethod
    def make_from_plan(cls, backend: Backend, plan: Plan) -> Regime:
        """Make the regime that measures the rows of a plan on an opened device."""
        return cls(backend)

    @classmethod
    def compute_max_row_seconds(cls, backend: Backend, plan: Plan) -> float:
        """Return the maximum time, in seconds, that the timed launches of one row of a plan may take."""
        return plan.seconds or cls.default_row_seconds or _USUAL_ROW_SECONDS

    @classmethod
    def estimate_rows_seconds(cls, backend: Backend, plan: Plan, launch_seconds_of_rows: Sequence[float]) -> float:
        """Estimate the seconds that the rows of a plan take, without the time to prepare and verify their kernels.
        ``launch_seconds_of_rows``: for each row, the seconds of one launch.
        """
        return cls.warmup_seconds + len(launch_seconds_of_rows) * cls.compute_max_row_seconds(backend, plan)

    @classmethod
    def choose_operand_set_count(cls, problem: Problem, shape: object, cache_bytes: int | None) -> int:
        """Return the number of operand sets over which the launches of a shape rotate; 1 if they do not rotate."""
        return choose_operand_set_count(problem, shape, cache_bytes) if cls.rotates_operands else 1

    def prepare_device(self) -> None:
        """Bring the device into the state that the regime needs before its first shape. The runner calls this once."""

    def find_repeatability(self, problem: Problem) -> Repeatability | None:
        """Return how much repeated runs of a problem differ on this device, or None if that is unknown."""
        return None

    @property
    def fixed_visit_seconds(self) -> float:
        """The seconds that every measurement of a shape takes; 0 if this regime can end a measurement early."""
        return 0.0

    @property
    def row_remark(self) -> str:
        """A warning about all rows that this regime measures on this device; empty if there is none."""
        return ""

    def explain_too_long_launch(self, launch_seconds: float) -> str | None:
        """Return why a launch that takes ``launch_seconds`` is too long for this regime; None if it is not."""
        return None

    def keep_device_loaded(self, launches: Sequence[Launch], launch_seconds: float) -> None:
        """Queue launches that keep the device loaded until the host has prepared the next kernel. Do nothing in
        regimes that do not need a loaded device.

        The caller must call this after each measurement, with the ``launches`` of the measurement and the seconds that
        each of them takes. The kernel's settings must still apply, because this method repeats the launches.
        """

    def make_confirmation_regime(self, chosen_conditions: Conditions, max_visit_seconds: float) -> Regime:
        """Return the regime whose measurements confirm a ceiling (the highest rate of a device).

        ``chosen_conditions``: the clock and other conditions when the candidate for the ceiling was chosen.
        ``max_visit_seconds``: the time available for each measurement.
        """
        return self

    def take_and_verify_samples(self, checked: CheckedKernel, rule: StoppingRule, launch_seconds: float) -> Samples:
        """Take samples, then verify the whole output of the last launches, and return the samples. Store the seconds
        that all this takes in ``last_visit_seconds``. ``launch_seconds``: about how many host seconds a launch takes.
        """
        start_time = self.backend.now()
        samples = self.take_samples(checked, rule, launch_seconds)
        samples.remarks += [self.row_remark] if self.row_remark else []
        self.require_no_unseen_work(checked, min(samples.seconds_per_launch, default=0.0))
        checked.verify_last_outputs(checks_all_elements=True)
        self.last_visit_seconds = self.backend.now() - start_time
        return samples

    def measure_true_clock(self, checked: CheckedKernel, launch_seconds: float) -> float | None:
        """Measure the mean clock of the compute units in hertz, with additional launches that take about
        ``launch_seconds`` each. Return None if this regime or device cannot measure it.
        """
        return None

    @abstractmethod
    def take_samples(self, checked: CheckedKernel, rule: StoppingRule, launch_seconds: float) -> Samples:
        """Take samples of a verified kernel until ``rule`` stops the measurement, verify the last timed launches, and
        return the samples. Raise WrongResultError if an output is wrong. ``launch_seconds``: about how many host
        seconds a launch takes.
        """

    def queue_idle_mark(self, earlier_mark: object) -> object:
        """Queue a mark that waits for all queues of the device (``Backend.record_idle_mark``), and return the mark.
        Return None if the device has no idle marks, or if the device has already reached ``earlier_mark``.
        """
        return self.backend.record_idle_mark(earlier_mark) if self.backend.has_idle_marks else None

    def queue_marks_behind_flushes(self, flush_count: int = _FLUSHES_AHEAD_OF_MARKS) -> tuple[object, object]:
        """Queue a number of cache flushes, then a mark and an idle mark (which waits for all queues of the device), and
        return both. The idle mark is None on a device without idle marks. The flushes keep the device busy until the
        host has queued both marks.
        """
        for _ in range(flush_count):
            self.backend.flush_cache()
        mark = self.backend.record_mark()
        return mark, self.queue_idle_mark(mark)

    def wait_and_record_gap(self, checked: CheckedKernel, end_mark: object, idle_mark: object) -> None:
        """Wait for the device, then append the seconds between two marks to ``checked.idle_mark_gap_seconds``.

        ``end_mark``: the mark after the last launch. ``idle_mark``: a later mark that waits for all queues of the
        device; None to append nothing.
        """
        self.backend.synchronize()
        if idle_mark is not None:
            checked.idle_mark_gap_seconds.append(self.backend.compute_seconds_between(end_mark, idle_mark))

    def require_no_unseen_work(self, checked: CheckedKernel, launch_seconds: float) -> None:
        """Raise WrongResultError if the device was still working after the end marks of launches that took
        ``launch_seconds`` each. In that case the kernel works in a queue that its end mark does not wait for.

        The *gap* is the time from an end mark to a mark that waits for all queues. This method uses the median of
        several gaps, because another process may delay a few marks. Even a long median does not prove unseen work,
        because gaps also grow if the process creates streams (on an H100, to between 4 and 12 us). So if the median is
        too long, measure the gap again on the idle device, in _GAP_MEDIAN_COUNT groups. Raise the error only if the
        median is clearly longer than the largest median of these groups, or than the usual gap plus
        _MAX_GAP_INCREASE_SECONDS.
        """
        gap, allowed = (
            statistics.median(checked.idle_mark_gap_seconds or [0.0]),
            max(_MAX_UNSEEN_WORK_SECONDS, _MAX_UNSEEN_WORK_SHARE * launch_seconds),
        )
        # Return if the gap is as short as usual. Also return if there is no gap, because the device has no idle marks
        # or always finished before the host could queue one.
        if not checked.idle_mark_gap_seconds or gap - (usual := self._idle_mark_gap_and_queueing_seconds[0]) <= allowed:
            return
        flush_counts = [_FLUSHES_AHEAD_OF_MARKS] * min(len(checked.idle_mark_gap_seconds), _MAX_GAPS_PER_MEDIAN)
        pairs = [list(self._measure_mark_gaps(flush_counts)) for _ in range(_GAP_MEDIAN_COUNT)]
        medians = [statistics.median(seconds for seconds, _ in group) for group in pairs if group]
        unseen = gap - min(max(medians, default=usual), usual + _MAX_GAP_INCREASE_SECONDS)
        if unseen > allowed:
            reason = (
                f"the device is still busy {unseen * 1e6:.3g} us after the launch's end event: the kernel works in a "
                "queue that is not timed, or another process uses the device"
            )
            raise WrongResultError(Verdict(math.inf, 0.0, reason=reason))

    def _measure_mark_gaps(self, flush_counts: Iterable[int]) -> Iterator[tuple[float, float]]:
        """For each of ``flush_counts``, queue that many cache flushes, then a mark and an idle mark, but no launch.
        Yield the device seconds from mark to idle mark and the host seconds to queue both marks. Yield nothing if the
        device was idle before the host had queued both marks.
        """
        for flush_count in flush_counts:
            start_time = self.backend.now()
            mark, idle_mark = self.queue_marks_behind_flushes(flush_count)
            queueing = self.backend.now() - start_time
            self.backend.synchronize()
            if idle_mark is not None:
                yield self.backend.compute_seconds_between(mark, idle_mark), queueing

    @cached_property
    def _idle_mark_gap_and_queueing_seconds(self) -> tuple[float, float]:
        """Two figures of an idle device: the minimum device seconds from a mark to a mark that waits for all queues,
        and the median host seconds to queue both marks.
        """
        pairs = list(self._measure_mark_gaps(_FLUSHES_AHEAD_OF_MARK_PAIRS)) or [(0.0, 0.0)]
        return min(pairs)[0], statistics.median(queueing for _, queueing in pairs)

    def require_advancing_clock(self, finished_rounds: int) -> None:
        """Raise PluginError if the backend's clock does not advance. Call this method in each iteration of a loop that
        runs for a certain time: if the clock stands still, the loop would never end. ``finished_rounds``: the number of
        iterations so far.
        """
        if finished_rounds % _ROUNDS_PER_CLOCK_CHECK:
            return
        before, self._last_clock = self._last_clock, self.backend.now()
        if finished_rounds and before == self._last_clock:
            raise PluginError(
                f"backend {self.backend.name} is broken: its method now returned the same time during "
                f"{_ROUNDS_PER_CLOCK_CHECK} rounds of launches"
            )

    def read_sensors(self, includes_energy: bool = False) -> SensorReading | None:
        telemetry = self.backend.telemetry
        return None if isinstance(telemetry, Unavailability) else telemetry.read(includes_energy)


#: A checked launch is one whose operands were just changed and whose output is verified. If checked launches take more
#: than this many times as long as the other launches, the other launches skip work.
_MAX_CHECKED_SLOWDOWN_RATIO = 2.0
#: mamf needs at least this many checked launches to judge, because fewer may all be slow by chance.
_MIN_CHECKED_LAUNCHES = 4
#: After the end event of a launch, a device may still work for this many seconds or this share of the launch's time,
#: whichever is longer. If the device works for longer, the kernel uses another queue, which the events do not time.
_MAX_UNSEEN_WORK_SECONDS, _MAX_UNSEEN_WORK_SHARE = 2e-6, 0.01
#: If the process creates streams, the time from a mark to an idle mark grows by at most this many seconds.
_MAX_GAP_INCREASE_SECONDS = 20e-6
#: mamf also measures the time from a mark to an idle mark without a launch. It computes _GAP_MEDIAN_COUNT medians of
#: this time. Each median comes from at most _MAX_GAPS_PER_MEDIAN pairs of marks.
_GAP_MEDIAN_COUNT, _MAX_GAPS_PER_MEDIAN = 8, 5


class WrongResultError(MamfError):
    """The error for a launch that gave a wrong result or changed its operands. ``verdict`` describes the fault."""

    exit_code = 1

    def __init__(self, verdict: Verdict) -> None:
        changed = verdict.details.get("changed operands")
        reason = f"a launch changed its operands: {changed}" if changed else verdict.reason
        mismatch = (
            f"relative error {verdict.error:.2g} against {verdict.reference_arithmetic}; "
            f"the limit is {verdict.tolerance:.2g}"
        )
        super().__init__(reason or mismatch)
        self.verdict = verdict


def explain_skipped_work(checked_seconds: Sequence[float], unchecked_seconds: Sequence[float]) -> str | None:
    """Return why a kernel seems to skip work: checked launches (whose operands were just changed and whose output is
    verified) took much longer than unchecked launches. Otherwise return None. Both lists are in seconds per launch.

    If most launches are checked, as on a CPU, the median of all launches is the time of a checked launch. So do not
    judge by a few unchecked launches, which may differ only because other work used the device.
    """
    if not _MIN_CHECKED_LAUNCHES <= len(checked_seconds) <= len(unchecked_seconds):
        return None
    ratio = min(checked_seconds) / max(statistics.median(unchecked_seconds), 1e-9)
    return (
        f"launches take {ratio:.3g} times as long if their operands have changed, so the kernel probably skips work in "
        "other launches"
        if ratio > _MAX_CHECKED_SLOWDOWN_RATIO
        else None
    )


class CheckedKernel:
    """A prepared kernel that keeps the results of its launches until mamf has verified them. ``launches``: one function
    for each set of operands. ``verdict``: the verdict with the largest error so far.
    """

    def __init__(self, prepared: PreparedKernel) -> None:
        self.prepared = prepared
        self._returned: list[object] = [None] * len(prepared.launches)
        self._launched: set[int] = set()
        #: For each group of launches: device seconds from the mark after its last launch to an idle mark.
        self.idle_mark_gap_seconds: list[float] = []
        self.launches: Sequence[Launch] = tuple(map(self._make_result_keeping_launch, range(len(prepared.launches))))
        self.verdict = Verdict(0.0, math.inf)

    def _make_result_keeping_launch(self, index: int) -> Launch:
        launch, returned, launched = self.prepared.launches[index], self._returned, self._launched

        def launch_and_keep_result() -> object:
            returned[index] = None  # Free the memory of the earlier result for this launch.
            result = returned[index] = launch()
            launched.add(index)
            return result

        return launch_and_keep_result

    def warm_up_and_verify(self, backend: Backend) -> float:
        """Launch the kernel once with each set of operands, verify the whole outputs, and return the host seconds of
        the last launch. Raise WrongResultError if an output is wrong, and any error of a launch.
        """
        self.change_operands_and_poison_outputs()
        seconds = [self.time_launch(index, backend) for index in range(len(self.launches))]
        self.verify_last_outputs(checks_all_elements=True)
        self.require_unchanged_operands()
        return seconds[-1]

    def time_launch(self, index: int, backend: Backend) -> float:
        """Launch the kernel with the operand set ``index``, wait for the device, and return the host seconds from the
        launch to the end of the wait.
        """
        start_time = backend.now()
        self.launches[index]()
        backend.submit()
        backend.synchronize()
        return backend.now() - start_time

    def change_operands_and_poison_outputs(self) -> None:
        """Change the operands if the kernel can do that, and poison the outputs: overwrite them with wrong values. Then
        the outputs become right only if a later launch computes them.
        """
        if self.prepared.change_operands is not None:
            self.prepared.change_operands()
        self.poison_outputs()

    def poison_outputs(self) -> None:
        """Overwrite every output with wrong values, and release the results that launches have returned so far."""
        self.prepared.poison_outputs(tuple(self._returned))
        self._returned[:] = [None] * len(self._returned)
        self._launched.clear()

    def verify_last_outputs(self, checks_all_elements: bool = False) -> None:
        """Verify the output of the last launch for each set of operands. First compare some elements with a reference,
        then all elements if ``checks_all_elements`` is True. Raise WrongResultError if an output is wrong.
        """
        for index in sorted(self._launched):
            for check in (self.prepared.verify, self.prepared.verify_whole_output if checks_all_elements else None):
                if check is not None:
                    self._record_verdict(check(index, self._returned[index]), index)

    def _record_verdict(self, verdict: Verdict, index: int) -> None:
        if not verdict.ok:
            # Locate the error now, while the operands still belong to this output: ``require_unchanged_operands`` may
            # restore the original operands.
            try:
                wrong = self.prepared.locate_wrong_cells and self.prepared.locate_wrong_cells(
                    index, self._returned[index]
                )
            except get_catchable_plugin_errors():  # The result is wrong, but the position of the error stays unknown.
                wrong = None
            located = {WRONG_TILES_KEY: describe_wrong_cells(wrong)} if wrong and wrong.cells else {}
            self.require_unchanged_operands()  # If the launch changed its operands, that explains the wrong result.
            raise WrongResultError(replace(verdict, details={**verdict.details, **located}))
        worst = max(verdict, self.verdict, key=lambda each: each.error)
        self.verdict = replace(worst, details={**self.verdict.details, **verdict.details})

    def require_unchanged_operands(self) -> None:
        """Raise WrongResultError if launches have changed any of their operands. The error names these operands."""
        if changed := self.prepared.list_changed_operands():
            raise WrongResultError(Verdict(math.inf, 0.0, {"changed operands": " ".join(changed)}))
