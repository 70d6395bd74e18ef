"""A search for ceilings as an iterator over rows."""

from __future__ import annotations

from collections.abc import Generator

from mamf.ceilings.ceiling import Ceiling, why_hopeless
from mamf.engine.search.finding import Find
from mamf.errors import DeviceError
from mamf.measurement import Measurement


class CeilingSearch:
    """Iterate over it, and it measures. Leaving the loop, by ``break`` or by Ctrl-C, ends the search and its log.

    >>> search = mamf.search("bfloat16")
    >>> for row in search:
    ...     if search.ceilings:
    ...         break
    >>> search.ceiling.rounds
    3
    """

    def __init__(self, find: Find, regime: str) -> None:
        self.find, self.regime = find, regime
        #: The rows still to come; whoever keeps a log of them puts itself between.
        self.rows = self.find.results()

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
            raise DeviceError(f"no {self.regime} ceiling was confirmed in {budget:.0f} s: give it more")
        return found[self.regime]
