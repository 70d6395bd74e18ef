"""Finds both ceilings of a device in about a minute, and logs the rows that confirm them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass

from mamf.backend import Backend
from mamf.ceilings.ceiling import Ceiling, ceilings_of_plan, why_hopeless
from mamf.engine.clocks import ClockChoice
from mamf.engine.runner import Runner
from mamf.engine.search.strategy import FindStrategy
from mamf.errors import DeviceError
from mamf.measurement import Measurement
from mamf.operations.matmul.kernel import MatmulKernel
from mamf.plans import Plan


@dataclass
class Find:
    """One run of a plan on an opened backend. ``results`` yields what it measures.

    ``held`` are the rows of an interrupted run, in their order: they answer the search in place of measuring, and it
    goes on where it was. Whether a phase had ended then is read off them, because it may have been time that ended it.
    ``kernels`` are those of the plan.
    """

    plan: Plan
    kernels: Sequence[MatmulKernel]
    backend: Backend
    held: Collection[Measurement] = ()
    on_phase: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        #: Held, and measured so far.
        self.rows = list(self.held)

    def results(self) -> Iterator[Measurement]:
        """Search and confirm. Breaking off loses the measurement in flight."""
        self._run = Runner(
            self.backend, self.plan.budget_seconds, self.held, self.on_phase, clocks=ClockChoice.of(self.plan)
        )
        for row in self._run.results(FindStrategy(self.plan, self.kernels, self._run).steps()):
            self.rows.append(row)
            yield row

    @property
    def ceilings(self) -> dict[str, Ceiling]:
        """The ceilings that the rows so far confirm, by regime."""
        found = ceilings_of_plan(self.plan, self.rows, self.backend.info, self.kernels[0].name)
        return {regime: ceiling for (_, regime), ceiling in found.items()}

    @property
    def left_out(self) -> int:
        """Whether the budget ended before everything was measured, once ``results`` has ended."""
        return self._run.left_out


class CeilingSearch:
    """Iterate over it, and it measures. Leaving the loop, by ``break`` or by Ctrl-C, ends the search and its log.

    >>> search = mamf.search("bfloat16")
    >>> for row in search:
    ...     if search.ceilings:
    ...         break
    >>> search.ceiling.rounds
    3
    """

    def __init__(self, find: Find, regime: str, rows: Iterator[Measurement]) -> None:
        self.find, self.regime = find, regime
        #: The rows still to come, each after it is logged.
        self.rows = rows

    def __iter__(self) -> Generator[Measurement, None, None]:
        """Each row as it is measured."""
        yield from self.rows  # and closes them with the loop

    @property
    def ceilings(self) -> dict[str, Ceiling]:
        """What the rows so far confirm, by regime."""
        return self.find.ceilings

    @property
    def ceiling(self) -> Ceiling:
        """The ceiling of the requested regime. Raises DeviceError until it is confirmed."""
        found = self.ceilings
        if self.regime not in found:
            if reason := why_hopeless(self.find.rows):
                raise DeviceError(f"no ceiling can be found: {reason}")
            budget = self.find.plan.budget_seconds
            raise DeviceError(f"no {self.regime} ceiling was confirmed in {budget:.0f} s: raise budget_seconds")
        return found[self.regime]
