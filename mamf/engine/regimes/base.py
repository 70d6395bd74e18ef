"""The parts that regimes share: the stopping rule, the samples, and the interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from mamf.backend import Backend, Reading, Unavailable
from mamf.engine.regimes.checking import Checked, refuse_unseen_work
from mamf.errors import PluginError
from mamf.kernel import Problem, operand_sets
from mamf.measurement import Conditions
from mamf.statistics import Repeatability, figure_of, interval_of

Launch = Callable[[], object]
# No clock is so coarse that these pass within one of its ticks.
_MANY_ROUNDS = 20
#: Flushes that take the device longer than the host takes to place two marks.
_FLUSHES_AHEAD = 16


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

    def is_over(self, now: float) -> bool:
        """Whether the run's budget has ended."""
        return self.deadline is not None and now >= self.deadline

    def enough(
        self,
        samples: Sequence[float],
        elapsed: float,
        now: float,
        is_representative: bool = True,
        figure: str = "median",
    ) -> bool:
        """Whether to stop; precision counts only once the samples are representative of what varies between them."""
        if self.is_over(now):
            return True
        if len(samples) < self.min_samples:
            return False
        late = self.seconds is not None and elapsed >= self.seconds
        return late or len(samples) >= self.max_samples or (is_representative and self.is_precise(samples, figure))

    def is_precise(self, samples: Sequence[float], figure: str = "median") -> bool:
        interval = interval_of(samples, figure)
        return interval.coverage >= 0.95 and interval.half_width <= self.precision * figure_of(samples, figure)


@dataclass
class Samples:
    """The samples of a visit in seconds per launch, and the sensor readings taken meanwhile.

    ``clock_hz``: the true clock of the launches, if it was measured. ``timer_overhead``: seconds of the timer itself,
    already subtracted from each sample. ``details``: further findings.
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
        self._looked_at = 0.0
        #: Host seconds of the latest visit, including rest and settling.
        self.visit_took = 0.0
        #: Applied to each number of launches to queue, for ranks that must queue the same number.

    @classmethod
    def sets(cls, problem: Problem, shape: object, cache_bytes: int | None) -> int:
        """Operand sets that a shape is launched over."""
        return operand_sets(problem, shape, cache_bytes) if cls.rotates else 1

    def start(self) -> None:
        """Called once before the first shape."""

    def repeatability_of(self, problem: Problem) -> Repeatability | None:
        """How far runs of a problem lie apart on this device; None: unknown."""
        return None

    @property
    def visit_takes(self) -> float:
        """Seconds of a visit that cannot be cut short, 0 where it can."""
        return 0.0

    @property
    def caveat(self) -> str:
        """Why rows of this regime cannot be trusted fully on this device; empty if they can."""
        return ""

    def outlasted_by(self, seconds: float) -> str | None:
        """Why a launch of ``seconds`` is too long for this regime, or None."""
        return None

    def bridge(self, launches: Sequence[Launch], seconds: float) -> None:
        """Called with the launches of a kernel that was measured, each of so many seconds, before the next is prepared:
        within the kernel's own settings, because they are launched again here.
        """

    def confirmation_regime(self, chosen: Conditions, seconds: float) -> Regime:
        """The regime in which a ceiling is confirmed.

        ``chosen``: the conditions under which it was chosen. ``seconds``: what there is for a visit.
        """
        return self

    def visit(self, checked: Checked, rule: StoppingRule, estimate: float) -> Samples:
        """``sample``, the whole output of what it launched last verified, and how long that took."""
        begun = self.backend.now()
        taken = self.sample(checked, rule, estimate)
        taken.remarks += [self.caveat] if self.caveat else []
        refuse_unseen_work(checked.unseen_work(min(taken.seconds, default=0.0)))
        checked.verify(whole=True)
        self.visit_took = self.backend.now() - begun
        return taken

    def true_clock(self, checked: Checked, seconds: float) -> float | None:
        """The mean clock in hertz that the compute units have during launches of so many seconds, from launches of its
        own; None if this regime or device cannot measure it so.
        """
        return None

    @abstractmethod
    def sample(self, checked: Checked, rule: StoppingRule, estimate: float) -> Samples:
        """Take samples of a rehearsed kernel until the rule is satisfied, verifying what was timed.

        ``estimate``: host seconds of a launch. Raises WrongResultError.
        """

    def timed(self, launch: Launch) -> tuple[object, object]:
        """Queue a launch between two marks."""
        start = self.backend.mark()
        launch()
        self.backend.submit()
        return start, self.backend.mark()

    def idle_mark(self) -> object:
        """An idle mark of the device, or None."""
        return self.backend.idle_mark() if self.backend.has_idle_marks else None

    def marks_behind(self, flushes: int = _FLUSHES_AHEAD) -> tuple[object, object]:
        """A mark, and an idle mark or None, behind flushes that keep the device busy while the host places them."""
        for _ in range(flushes):
            self.backend.flush_cache()
        return self.backend.mark(), self.idle_mark()

    def synchronize(self, checked: Checked, end: object, idle: object) -> None:
        """Wait for the device. ``end``: the mark behind the last launch; ``idle``: the idle mark queued after it."""
        self.backend.synchronize()
        if idle is not None:
            checked.note_unseen(self.backend.seconds_between(end, idle) - self._idle_mark_apart[0])

    @cached_property
    def _idle_mark_apart(self) -> tuple[float, float]:
        """Device seconds from a mark to an idle mark if nothing else is to do, and host seconds of placing both."""
        backend = self.backend
        for flushes in (2, _FLUSHES_AHEAD, 128):
            begun = backend.now()
            mark, idle = self.marks_behind(flushes)
            placing = backend.now() - begun
            backend.synchronize()
            if idle is not None:
                return backend.seconds_between(mark, idle), placing
        return 0.0, 0.0

    def require_clock_advances(self, rounds: int) -> None:
        """Call before each round of launches in a loop over time, with the number of the round from 0. Raises
        PluginError if many rounds took no time: the loop would not end.
        """
        if rounds % _MANY_ROUNDS:
            return
        before, self._looked_at = self._looked_at, self.backend.now()
        if rounds and before == self._looked_at:
            fault = f"its clock stood still for {_MANY_ROUNDS} rounds of launches"
            raise PluginError(f"backend {self.backend.name} is broken: {fault}")

    def read_sensors(self, energy: bool = False) -> Reading | None:
        telemetry = self.backend.telemetry
        return None if isinstance(telemetry, Unavailable) else telemetry.read(energy)
