"""What all regimes share: the stopping rule, the samples and the interface."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from mamf.backend import Backend, Reading, Unavailable
from mamf.errors import MamfError, PluginError, get_plugin_errors
from mamf.kernel import Prepared, Problem, Verdict, count_operand_sets, describe_wrong_cells
from mamf.measurement import WRONG_TILES, Conditions
from mamf.plans import Plan
from mamf.statistics import Repeatability, compute_figure, compute_interval

Launch = Callable[[], object]
# Every clock, even a coarse one, advances within this many rounds of launches.
_MANY_ROUNDS = 20
#: Seconds of a row without a time limit: the 150 launches and flushes of classic usually take less.
_USUAL_ROW_SECONDS = 1.0
#: This many flushes keep the device busy for longer than the host needs to place two marks.
_FLUSHES_AHEAD = 16
#: The number of flushes queued ahead of each pair of marks that measures the gap between two marks. A slow host needs
#: the largest number.
_FLUSHES_OF_PAIRS = (2, _FLUSHES_AHEAD, _FLUSHES_AHEAD, _FLUSHES_AHEAD, 128)


@dataclass(frozen=True)
class StoppingRule:
    """When a measurement has enough samples.

    - ``precision``: the half-width to reach of the figure's 95 % interval within the visit, as a share of the figure.
    - ``seconds``: host time after which ``min_samples`` are enough, so that a slow device finishes; None: no limit.
    - ``max_samples``: the measurement stops here even if the interval is still too wide.
    - ``deadline``: backend time (``Backend.now``) at which the budget of the run ends.
    """

    precision: float = 0.003
    seconds: float | None = None
    min_samples: int = 3
    max_samples: int = 1000
    deadline: float | None = None

    def is_budget_over(self, now: float) -> bool:
        """Whether the run's budget has ended."""
        return self.deadline is not None and now >= self.deadline

    def should_stop(
        self,
        samples: Sequence[float],
        elapsed: float,
        now: float,
        is_representative: bool = True,
        figure: str = "median",
    ) -> bool:
        """Return whether to stop sampling. The precision counts only if the samples are representative."""
        if self.is_budget_over(now):
            return True
        if len(samples) < self.min_samples:
            return False
        late = self.seconds is not None and elapsed >= self.seconds
        return late or len(samples) >= self.max_samples or (is_representative and self.is_precise(samples, figure))

    def is_precise(self, samples: Sequence[float], figure: str = "median") -> bool:
        interval = compute_interval(samples, figure)
        return interval.coverage >= 0.95 and interval.half_width <= self.precision * compute_figure(samples, figure)


@dataclass
class Samples:
    """The samples of a visit, in seconds per launch, and the sensor readings taken during it.

    ``clock_hz``: the true clock during the launches, if measured. ``timer_overhead``: seconds that the timer adds to a
    launch, already subtracted from each sample. ``details``: further findings.
    """

    seconds: list[float] = field(default_factory=list)
    launches: int = 0
    readings: list[Reading] = field(default_factory=list)
    watts: float | None = None
    clock_hz: float | None = None
    timer_overhead: float = 0.0
    remarks: list[str] = field(default_factory=list)
    details: dict[str, float | str] = field(default_factory=dict)

    def add_reading(self, reading: Reading | None) -> None:
        if reading is not None:
            self.readings.append(reading)


class Regime(ABC):
    """How samples are taken on one backend.

    - ``best_by``: the statistic that ranks rows.
    - ``rotates_operands``: whether launches rotate over several operand sets.
    - ``must_rewrite_output``: whether C is overwritten before each launch.
    - ``default_seconds``: the time limit per shape; None: no limit. ``usual_seconds``: the time limit of a row of a
      plan.
    - ``warmup_seconds``: device seconds of load before the first row.
    """

    name: ClassVar[str]
    best_by: ClassVar[str] = "median"
    rotates_operands: ClassVar[bool] = False
    must_rewrite_output: ClassVar[bool] = False
    default_seconds: ClassVar[float | None] = None
    usual_seconds: ClassVar[float | None] = None
    warmup_seconds: ClassVar[float] = 0.0

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._last_clock = 0.0
        #: Host seconds of the latest visit, including rest and settling.
        self.last_visit_seconds = 0.0

    @classmethod
    def make_from_plan(cls, backend: Backend, plan: Plan) -> Regime:
        """Make the regime that measures the rows of a plan."""
        return cls(backend)

    @classmethod
    def max_row_seconds(cls, backend: Backend, plan: Plan) -> float:
        """Return the longest time that sampling a row of a plan takes, in seconds."""
        return plan.seconds or cls.usual_seconds or _USUAL_ROW_SECONDS

    @classmethod
    def estimate_seconds(cls, backend: Backend, plan: Plan, launches: Sequence[float]) -> float:
        """Estimate the seconds that the rows of a plan take, without preparing and verifying each. ``launches``: the
        seconds of one launch of each row.
        """
        return cls.warmup_seconds + len(launches) * cls.max_row_seconds(backend, plan)

    @classmethod
    def count_sets(cls, problem: Problem, shape: object, cache_bytes: int | None) -> int:
        """Return the number of operand sets that the launches of a shape use."""
        return count_operand_sets(problem, shape, cache_bytes) if cls.rotates_operands else 1

    def start(self) -> None:
        """Prepare the regime. The runner calls this once, before the first shape."""

    def find_repeatability(self, problem: Problem) -> Repeatability | None:
        """Return how much repeated runs of a problem differ on this device, or None if that is unknown."""
        return None

    @property
    def fixed_visit_seconds(self) -> float:
        """The seconds that a visit takes, if it cannot be cut short; else 0."""
        return 0.0

    @property
    def caveat(self) -> str:
        """Why rows of this regime cannot be trusted fully on this device; empty if they can."""
        return ""

    def explain_too_long(self, seconds: float) -> str | None:
        """Return why a launch of ``seconds`` is too long for this regime, or None."""
        return None

    def keep_device_loaded(self, launches: Sequence[Launch], seconds: float) -> None:
        """Keep the device loaded until the next kernel is ready, if the regime needs that.

        Called after each measurement with its launches and the ``seconds`` that each takes, while the kernel's settings
        still apply, because they are repeated here.
        """

    def make_confirmation_regime(self, chosen: Conditions, seconds: float) -> Regime:
        """Return the regime that confirms a ceiling.

        ``chosen``: the conditions when the ceiling was chosen. ``seconds``: the time available for each visit.
        """
        return self

    def sample_and_verify(self, checked: CheckedKernel, rule: StoppingRule, estimate: float) -> Samples:
        """Take samples, then verify the whole output of the last launches. Sets ``last_visit_seconds``."""
        begun = self.backend.now()
        taken = self.sample(checked, rule, estimate)
        taken.remarks += [self.caveat] if self.caveat else []
        self.refuse_unseen_work(checked, min(taken.seconds, default=0.0))
        checked.verify(whole=True)
        self.last_visit_seconds = self.backend.now() - begun
        return taken

    def measure_true_clock(self, checked: CheckedKernel, seconds: float) -> float | None:
        """Measure the mean clock of the compute units in hertz, with separate launches of about ``seconds`` each. None
        if this regime or device cannot.
        """
        return None

    @abstractmethod
    def sample(self, checked: CheckedKernel, rule: StoppingRule, estimate: float) -> Samples:
        """Sample a verified kernel until the rule is satisfied, and verify the last timed launches.

        ``estimate``: host seconds per launch. Raises WrongResultError.
        """

    def launch_timed(self, launch: Launch) -> tuple[object, object]:
        """Queue a launch between two marks, and return the marks."""
        start = self.backend.mark()
        launch()
        self.backend.submit()
        return start, self.backend.mark()

    def queue_idle_mark(self, after: object) -> object:
        """Queue an idle mark (``Backend.idle_mark``). None if the device has none, or if it has already reached the
        mark ``after``.
        """
        return self.backend.idle_mark(after) if self.backend.has_idle_marks else None

    def queue_marks_behind_flushes(self, flushes: int = _FLUSHES_AHEAD) -> tuple[object, object]:
        """Queue a mark and an idle mark (or None) behind flushes, which keep the device busy until both are queued."""
        for _ in range(flushes):
            self.backend.flush_cache()
        mark = self.backend.mark()
        return mark, self.queue_idle_mark(mark)

    def synchronize(self, checked: CheckedKernel, end: object, idle: object) -> None:
        """Wait for the device, and note the gap from ``end``, the mark after the last launch, to ``idle``, the idle
        mark queued after that, or None.
        """
        self.backend.synchronize()
        if idle is not None:
            checked.gaps.append(self.backend.seconds_between(end, idle))

    def refuse_unseen_work(self, checked: CheckedKernel, seconds: float) -> None:
        """Raise WrongResultError if the device worked past the end marks of launches that took ``seconds``: work in a
        queue that the marks do not wait for.

        The median of the gaps counts, because another process delays only some marks. A longer gap than before the
        visit may be due to new streams (on an H100 it then varies from 4 to 12 us), so it is compared with gaps
        measured now between marks without a launch: with the largest of _MEDIANS medians.
        """
        gap, allowed = statistics.median(checked.gaps or [0.0]), max(_MAX_UNSEEN_SECONDS, _MAX_UNSEEN_SHARE * seconds)
        # There are no gaps if the device has no idle marks, or if it always reached the end before they were queued.
        if not checked.gaps or gap - (usual := self._idle_mark_seconds[0]) <= allowed:
            return
        flushes = [_FLUSHES_AHEAD] * min(len(checked.gaps), _PAIRS_IN_MEDIAN)
        pairs = [list(self._measure_gaps(flushes)) for _ in range(_MEDIANS)]
        medians = [statistics.median(seconds for seconds, _ in each) for each in pairs if each]
        unseen = gap - min(max(medians, default=usual), usual + _MAX_NEW_GAP_SECONDS)
        if unseen > allowed:
            reason = (
                f"the device is still busy {unseen * 1e6:.3g} us after the launch's end event: the kernel works in a "
                "queue that is not timed, or another process uses the device"
            )
            raise WrongResultError(Verdict(math.inf, 0.0, reason=reason))

    def _measure_gaps(self, flushes: Iterable[int]) -> Iterator[tuple[float, float]]:
        """Queue a mark and an idle mark with no launch in front, once for each number of flushes. Yield the device
        seconds between the two and the host seconds to queue both, unless the host was too slow.
        """
        for count in flushes:
            begun = self.backend.now()
            mark, idle = self.queue_marks_behind_flushes(count)
            queueing = self.backend.now() - begun
            self.backend.synchronize()
            if idle is not None:
                yield self.backend.seconds_between(mark, idle), queueing

    @cached_property
    def _idle_mark_seconds(self) -> tuple[float, float]:
        """The minimum device seconds, over several pairs, from a mark to an idle mark on an otherwise idle device; and
        the host seconds that it takes to queue both.
        """
        pairs = list(self._measure_gaps(_FLUSHES_OF_PAIRS)) or [(0.0, 0.0)]
        return min(pairs)[0], statistics.median(queueing for _, queueing in pairs)

    def require_clock_advances(self, rounds: int) -> None:
        """Call this before each round of a loop that ends by time, with the number of the round from 0.

        Raises PluginError if the clock did not advance for many rounds: the loop would never end.
        """
        if rounds % _MANY_ROUNDS:
            return
        before, self._last_clock = self._last_clock, self.backend.now()
        if rounds and before == self._last_clock:
            fault = f"its clock stood still for {_MANY_ROUNDS} rounds of launches"
            raise PluginError(f"backend {self.backend.name} is broken: {fault}")

    def read_sensors(self, energy: bool = False) -> Reading | None:
        telemetry = self.backend.telemetry
        return None if isinstance(telemetry, Unavailable) else telemetry.read(energy)


#: If checked launches take this many times as long as unchecked launches, the unchecked launches skip work.
_EQUAL_WORK = 2.0
#: This many checked launches are not all slow by chance.
_MIN_CHECKED = 4
#: A device may work this long after the end mark of an honest launch: seconds, and a share of the launch.
_MAX_UNSEEN_SECONDS, _MAX_UNSEEN_SHARE = 2e-6, 0.01
#: New streams of the process make the gap between marks longer, but not by more than this.
_MAX_NEW_GAP_SECONDS = 20e-6
#: The number of medians that show how long the gap is without a launch, and the maximum number of gaps in each.
_MEDIANS, _PAIRS_IN_MEDIAN = 8, 5


class WrongResultError(MamfError):
    """A launch gave a wrong result or changed its operands."""

    exit_code = 1

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(describe_wrong_result(verdict))
        self.verdict = verdict


def describe_wrong_result(verdict: Verdict) -> str:
    """Say in one line why a result is wrong."""
    if "changed operands" in verdict.details:
        return f"a launch changed its operands: {verdict.details['changed operands']}"
    if verdict.reason:
        return verdict.reason
    return f"relative error {verdict.error:.2g} against {verdict.reference}; the limit is {verdict.tolerance:.2g}"


def compute_skipped_work_ratio(checked: Sequence[float], others: Sequence[float]) -> float:
    """Return how many times longer the checked launches took than the others, or 0 if that does not show skipped work.

    Both are given as seconds per launch.
    """
    if len(checked) < _MIN_CHECKED or not others:
        return 0.0
    times = min(checked) / max(statistics.median(others), 1e-9)
    return times if times > _EQUAL_WORK else 0.0


def refuse_skipped_work(times: float) -> None:
    """Raise WrongResultError unless ``times``, from ``compute_skipped_work_ratio``, is 0."""
    if times:
        reason = (
            f"launches take {times:.3g} times as long after their operands change: the other launches skip the work"
        )
        raise WrongResultError(Verdict(math.inf, 0.0, reason=reason))


class CheckedKernel:
    """A prepared kernel. Its ``launches`` keep their results until these are verified. ``verdict``: the worst verdict
    so far.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self._returned: list[object] = [None] * len(prepared.launches)
        self._launched: set[int] = set()
        #: Device seconds from the end mark of the last launch of each train, or of the visit, to an idle mark.
        self.gaps: list[float] = []
        self.launches: Sequence[Callable[[], object]] = tuple(
            map(self._make_remembering_launch, range(len(prepared.launches)))
        )
        self.verdict = Verdict(0.0, math.inf)

    @property
    def rewrite_output(self) -> Callable[[], object] | None:
        return self.prepared.rewrite_output

    @property
    def held_bytes(self) -> int:
        return self.prepared.held_bytes

    def _make_remembering_launch(self, index: int) -> Callable[[], object]:
        launch, returned, launched = self.prepared.launches[index], self._returned, self._launched

        def launch_and_remember() -> object:
            returned[index] = None  # its memory is free for this launch
            result = returned[index] = launch()
            launched.add(index)
            return result

        return launch_and_remember

    def warm_up_and_verify(self, backend: Backend) -> float:
        """Launch and verify every operand set. Returns the host seconds of the last launch.

        Raises WrongResultError, and whatever a launch raises.
        """
        self.prepare_check()
        seconds = [self.time_launch(index, backend) for index in range(len(self.launches))]
        self.verify(whole=True)
        self.require_unchanged_operands()
        return seconds[-1]

    def time_launch(self, index: int, backend: Backend) -> float:
        """Launch one operand set, wait for the device, and return the host seconds that this took."""
        begun = backend.now()
        self.launches[index]()
        backend.submit()
        backend.synchronize()
        return backend.now() - begun

    def prepare_check(self) -> None:
        """Change the operands if the kernel can, and poison the outputs: only later launches can give right results."""
        if self.prepared.change_operands is not None:
            self.prepared.change_operands()
        self.poison()

    def poison(self) -> None:
        """Overwrite every output with wrong values, and forget all launches so far."""
        self.prepared.poison(tuple(self._returned))
        self._returned[:] = [None] * len(self._returned)
        self._launched.clear()

    def verify(self, whole: bool = False) -> None:
        """Compare the output of each set's last launch with its reference: sampled entries, and if ``whole`` all of
        them. Raises WrongResultError.
        """
        checks = [self.prepared.verify]
        if whole and self.prepared.verify_whole is not None:
            checks.append(self.prepared.verify_whole)
        for index in sorted(self._launched):
            for check in checks:
                self._record_verdict(check(index, self._returned[index]), index)

    def _record_verdict(self, verdict: Verdict, index: int) -> None:
        if not verdict.ok:
            located = self._locate_error(index)  # before require_unchanged_operands undoes the change of operands
            self.require_unchanged_operands()  # raises first, because it explains more
            raise WrongResultError(replace(verdict, details={**verdict.details, **located}))
        worst = max(verdict, self.verdict, key=lambda each: each.error)
        self.verdict = replace(worst, details={**self.verdict.details, **verdict.details})

    def _locate_error(self, index: int) -> Mapping[str, str]:
        """Return where the output of a set is wrong, if the kernel can locate it."""
        try:
            wrong = self.prepared.locate and self.prepared.locate(index, self._returned[index])
        except get_plugin_errors():  # the result is wrong in any case
            wrong = None
        return {WRONG_TILES: describe_wrong_cells(wrong)} if wrong and wrong.cells else {}

    def require_unchanged_operands(self) -> None:
        """Raise WrongResultError if launches changed operands. The error names them."""
        changed = self.prepared.changed_operands()
        if changed:
            raise WrongResultError(Verdict(math.inf, 0.0, {"changed operands": " ".join(changed)}))
