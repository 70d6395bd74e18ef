"""The interface of kinds of runs: how a kind is measured, and how its logs are reported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mamf.ceilings.ceiling import Ceiling
from mamf.errors import UsageError
from mamf.logs.recording import End
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.plans import Plan
from mamf.report.document import Document

if TYPE_CHECKING:
    from mamf.ceilings.roof import Roofs
    from mamf.engine.runner import Setup, Strategy
    from mamf.report.charts.picture import Picture

#: Ceilings by any key that identifies them.
AnyCeilings = Mapping[Any, Ceiling]


@dataclass(frozen=True)
class View:
    """What a report shows. ``top``: the most rows per table; None: all. ``roofs``: show rows as shares of these.
    ``baseline``: the kernel that speed-ups are relative to.
    """

    top: int | None = None
    roofs: Roofs | None = None
    baseline: str | None = None


@dataclass(frozen=True)
class Drawing:
    """What to draw of a log. None: the default of its kind."""

    regime: str | None = None
    directions: Sequence[str] | None = None

    def require_no_direction(self, log: RunLog) -> None:
        if self.directions:
            raise UsageError(f"{log.path} is a log of {log.plan.operation}, which has no direction: omit it")


class Kind(ABC):
    """A kind of run. ``noun``: what such a run is called. ``has_ceilings``: whether it confirms ceilings.
    ``is_collected``: whether results/ accepts its logs.
    """

    name: ClassVar[str]
    noun: ClassVar[str]
    has_ceilings: ClassVar[bool] = False
    is_collected: ClassVar[bool] = True

    def command(self, plan: Plan) -> str:
        """The mamf command for such a run."""
        return self.name

    @abstractmethod
    def strategy(self, setup: Setup) -> Strategy:
        """The strategy that measures the plan."""

    def count_left(self, setup: Setup) -> int:
        """How many steps have no row, or how many ceilings are not confirmed."""
        return len(setup.steps)

    def is_cut_short(self, setup: Setup, left_out: int) -> bool:
        """Whether the budget ended the run early. ``left_out``: the number of steps that were skipped."""
        return bool(left_out)

    @abstractmethod
    def document(self, log: RunLog, view: View) -> Document:
        """The report of a log."""

    @abstractmethod
    def chart(self, log: RunLog, drawing: Drawing) -> Picture:
        """The chart of a log. Raises UsageError if the log does not have what was requested."""

    @abstractmethod
    def summary(self, plan: Plan, rows: Sequence[Measurement], ceilings: AnyCeilings, end: End) -> dict[str, Any]:
        """The last record of a log. ``ceilings``: those that the rows confirm, or that they are shares of."""
