"""What all regimes share: the stopping rule, the samples and the interface."""

from __future__ import annotations

import statistics
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
# Even the coarsest clock advances within this many rounds of launches.
_MANY_ROUNDS = 20
#: This many flushes keep the device busy for longer than the host needs to place two marks.
_FLUSHES_AHEAD = 16
#: The flushes ahead of each pair of marks that shows how far apart they are. A slow host needs the most.
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
        """Whether to stop. Precision counts only if the samples cover what varies (``is_representative``)."""
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
    - ``rotates``: whether launches rotate over several operand sets.
    - ``needs_rewrite``: whether C is overwritten before each launch.
    - ``default_seconds``: the time limit per shape; None: no limit.
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

    @classmethod
    def sets(cls, problem: Problem, shape: object, cache_bytes: int | None) -> int:
        """The number of operand sets that the launches of a shape use."""
        return operand_sets(problem, shape, cache_bytes) if cls.rotates else 1

    def start(self) -> None:
        """Called once before the first shape."""

    def repeatability_of(self, problem: Problem) -> Repeatability | None:
        """How much repeated runs of a problem differ on this device; None: unknown."""
        return None

    @property
    def visit_takes(self) -> float:
        """The seconds that a visit takes, if it cannot be cut short; else 0."""
        return 0.0

    @property
    def caveat(self) -> str:
        """Why rows of this regime cannot be trusted fully on this device; empty if they can."""
        return ""

    def outlasted_by(self, seconds: float) -> str | None:
        """Why a launch of ``seconds`` is too long for this regime, or None."""
        return None

    def bridge(self, launches: Sequence[Launch], seconds: float) -> None:
        """Keep the device loaded until the next kernel is ready, if the regime needs that.

        Called after each measurement with its launches and the ``seconds`` that each takes, while the kernel's settings
        still apply, because they are launched again here.
        """

    def confirmation_regime(self, chosen: Conditions, seconds: float) -> Regime:
        """The regime that confirms a ceiling.

        ``chosen``: the conditions when the ceiling was chosen. ``seconds``: the time available for each visit.
        """
        return self

    def visit(self, checked: Checked, rule: StoppingRule, estimate: float) -> Samples:
        """Take samples, then verify the whole output of the last launches. Sets ``visit_took``."""
        begun = self.backend.now()
        taken = self.sample(checked, rule, estimate)
        taken.remarks += [self.caveat] if self.caveat else []
        refuse_unseen_work(checked.unseen_work(min(taken.seconds, default=0.0)))
        checked.verify(whole=True)
        self.visit_took = self.backend.now() - begun
        return taken

    def true_clock(self, checked: Checked, seconds: float) -> float | None:
        """Measure the mean clock of the compute units in hertz, with separate launches of about ``seconds`` each. None
        if this regime or device cannot.
        """
        return None

    @abstractmethod
    def sample(self, checked: Checked, rule: StoppingRule, estimate: float) -> Samples:
        """Sample a rehearsed kernel until the rule is satisfied, and verify timed launches.

        ``estimate``: host seconds per launch. Raises WrongResultError.
        """

    def timed(self, launch: Launch) -> tuple[object, object]:
        """Queue a launch between two marks, and return the marks."""
        start = self.backend.mark()
        launch()
        self.backend.submit()
        return start, self.backend.mark()

    def idle_mark(self) -> object:
        """Queue an idle mark (``Backend.idle_mark``); None if the device has none or is idle already."""
        return self.backend.idle_mark() if self.backend.has_idle_marks else None

    def marks_behind(self, flushes: int = _FLUSHES_AHEAD) -> tuple[object, object]:
        """Queue a mark and an idle mark (or None) behind flushes, which keep the device busy until both are queued."""
        for _ in range(flushes):
            self.backend.flush_cache()
        return self.backend.mark(), self.idle_mark()

    def synchronize(self, checked: Checked, end: object, idle: object) -> None:
        """Wait for the device, and note how long it worked after ``end``, the mark after the last launch. ``idle``: the
        idle mark queued after that, or None.
        """
        self.backend.synchronize()
        if idle is not None:
            checked.note_unseen(self.backend.seconds_between(end, idle) - self._idle_mark_apart[0])

    @cached_property
    def _idle_mark_apart(self) -> tuple[float, float]:
        """Device seconds from a mark to an idle mark on an otherwise idle device, the fewest of several pairs; and the
        host seconds that it takes to queue both.
        """
        backend = self.backend
        apart, placing = [], []
        for flushes in _FLUSHES_OF_PAIRS:
            begun = backend.now()
            mark, idle = self.marks_behind(flushes)
            took = backend.now() - begun
            backend.synchronize()
            if idle is not None:
                apart.append(backend.seconds_between(mark, idle))
                placing.append(took)
        return (min(apart), statistics.median(placing)) if apart else (0.0, 0.0)

    def require_clock_advances(self, rounds: int) -> None:
        """Call this before each round of a loop that ends by time, with the number of the round from 0.

        Raises PluginError if the clock did not advance for many rounds: the loop would never end.
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
