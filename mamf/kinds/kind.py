"""The interface of run kinds: what each does with a log. Most show rows of kernels, ranked together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from mamf.backend import Backend
from mamf.ceilings.ceiling import Ceiling, ceilings_of_plan
from mamf.ceilings.roof import Roofs
from mamf.errors import UsageError
from mamf.kernel import AnyKernel
from mamf.logs.recording import End, Record
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.plans import Plan, StepKey
from mamf.report.charts.logs import kernels_chart
from mamf.report.charts.picture import Picture
from mamf.report.document import Document
from mamf.report.kernels import kernels_document, kernels_summary_record
from mamf.report.shares import Shares

#: Ceilings by any key that identifies them.
AnyCeilings = Mapping[Any, Ceiling]
#: A kernel, with the name that it was requested by.
Named = tuple[str, AnyKernel]


@dataclass(frozen=True)
class View:
    """What a report shows. ``top``: rows per table, None for all. ``roofs``: rows are shown as shares of them.
    ``baseline``: the kernel that speed-ups are relative to.
    """

    top: int | None = None
    roofs: Roofs | None = None
    baseline: str | None = None


@dataclass(frozen=True)
class Drawing:
    """What to draw from a log; None means the default of its kind."""

    regime: str | None = None
    directions: Sequence[str] | None = None

    def require_no_direction(self, log: RunLog) -> None:
        if self.directions:
            raise UsageError(f"{log.path} holds {log.plan.operation}, which has no direction: omit the direction")


class Strategy(Protocol):
    """Chooses the steps of a run, one after the other, and has them measured."""

    @property
    def left_out(self) -> int:
        """Steps that the end of the budget left out, once ``results`` has ended."""

    def results(self) -> Iterator[Measurement | Record]:
        """What the log of the run gets. Closing the iterator loses the measurement in flight."""


@dataclass
class Setup:
    """A plan on an opened device. ``kernels``: the plan's, in its order. ``rows``: those measured for good, also by an
    interrupted run. ``on_phase``: is called with what comes next, in words.
    """

    plan: Plan
    backend: Backend
    kernels: Sequence[Named]
    rows: list[Measurement] = field(default_factory=list)
    on_phase: Callable[[str], None] = lambda text: None

    @property
    def opened(self) -> list[Any]:
        """The kernels without their names."""
        return [kernel for _, kernel in self.kernels]

    @property
    def answers(self) -> dict[StepKey, Measurement]:
        """The rows that answer steps of the plan, which names kernels as they were requested."""
        requested = {kernel.name: name for name, kernel in self.kernels}
        found = {}
        for row in self.rows:
            if row.operation in self.plan.operations and not row.phase and not row.is_reference:
                library = row.kernel.partition("[")[0]  # of an algorithm
                name = requested.get(row.kernel) or requested.get(library, row.kernel)
                found[row.step._replace(kernel=name)] = row
        return found

    @property
    def steps(self) -> list[StepKey]:
        """The steps that no row answers."""
        return self.plan.steps(self.answers)

    @property
    def confirmed(self) -> dict[tuple[Any, str], Ceiling]:
        """The ceilings that the rows confirm, by problem and regime."""
        return ceilings_of_plan(self.plan, self.rows, self.backend.info, self.opened[0].name)


class Kind(ABC):
    """``noun``: what a run of this kind is called. ``has_ceilings``: whether it confirms ceilings of its operation.
    ``is_collected``: whether results/ takes its logs.
    """

    name: ClassVar[str]
    noun: ClassVar[str]
    has_ceilings: ClassVar[bool] = False
    is_collected: ClassVar[bool] = True

    def command(self, plan: Plan) -> str:
        """The mamf command that makes such a run."""
        return self.name

    @abstractmethod
    def strategy(self, setup: Setup) -> Strategy:
        """What measures the plan."""

    def count_left(self, setup: Setup) -> int:
        """How many steps have no row, or how many ceilings are not confirmed."""
        return len(setup.steps)

    def is_cut_short(self, setup: Setup, left_out: int) -> bool:
        """Whether the budget ended the run. ``left_out``: steps that it left out."""
        return bool(left_out)

    @abstractmethod
    def document(self, log: RunLog, view: View) -> Document:
        """The report of a log."""

    @abstractmethod
    def chart(self, log: RunLog, drawing: Drawing) -> Picture:
        """The log as a chart. Raises UsageError if the log lacks what is to be drawn."""

    @abstractmethod
    def summary(self, plan: Plan, rows: Sequence[Measurement], ceilings: AnyCeilings, end: End) -> dict[str, Any]:
        """The last record of a log, computed from its rows. ``ceilings``: confirmed by the rows, or their roofs."""


class KernelRows(Kind):
    """Rows of kernels of one operation."""

    def strategy(self, setup: Setup) -> Strategy:
        from mamf.engine.strategies.kernels import KernelsSweep

        return KernelsSweep(setup.plan, setup.opened, setup.backend, held=setup.answers, on_phase=setup.on_phase)

    def document(self, log: RunLog, view: View) -> Document:
        shares = Shares(log.header, log.all_ceilings, log.known_ceilings, view.roofs)
        own = log.own_ceilings if self.has_ceilings else None
        rows, end, baseline = log.measurements, log.summary, view.baseline
        return kernels_document(rows, shares, end, top=view.top, confirmed=own, baseline=baseline)

    def chart(self, log: RunLog, drawing: Drawing) -> Picture:
        drawing.require_no_direction(log)
        return kernels_chart(log.measurements, log.header, drawing.regime)

    def summary(self, plan: Plan, rows: Sequence[Measurement], ceilings: AnyCeilings, end: End) -> dict[str, Any]:
        return kernels_summary_record(rows, end, dict(ceilings) if self.has_ceilings else {})
