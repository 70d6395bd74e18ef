"""Rows of kernels as shares of the device's matmul ceilings, which are searched for first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from mamf.ceilings.ceiling import Ceiling
from mamf.engine.search.finding import Find
from mamf.engine.strategies.kernels import KernelsSweep
from mamf.kernel import AnyKernel
from mamf.logs.recording import Record
from mamf.logs.records import ceiling_from_record, ceiling_record
from mamf.measurement import Measurement
from mamf.operations.matmul.selection import kernels_for
from mamf.plans import Plan

_A_MOMENT = 1e-9


@dataclass
class SharesSweep(KernelsSweep):
    """One run of a plan with searches.

    ``ceilings``: those that are known, to which those that are found are added. ``searches``: those that are left to
    do. ``rows``: of an interrupted run. ``references_of``: the kernels that ceilings were measured with.
    ``on_failure``: is called with what the run goes on without.
    """

    ceilings: dict[tuple[str, str], Ceiling] = field(default_factory=dict)
    searches: Sequence[Plan] = ()
    rows: Sequence[Measurement] = ()
    references_of: Callable[[Mapping[tuple[str, str], Ceiling]], Mapping[str, AnyKernel]] = lambda ceilings: {}
    on_failure: Callable[[str], None] = lambda message: None

    def results(self) -> Iterator[Measurement | Record]:
        begun, budget = self.backend.now(), self.plan.budget_seconds
        yield from self.records
        for search in self.searches:
            yield from self._searched(search)
        if budget is not None:
            left = budget - (self.backend.now() - begun)
            self.plan = replace(self.plan, budget_seconds=max(left, _A_MOMENT))
        self.records, self.references = (), self.references_of(self.ceilings)
        yield from super().results()

    def _searched(self, search: Plan) -> Iterator[Measurement | Record]:
        """Find the ceilings of a dtype; what an interrupted run measured of it is not measured again."""
        problem = search.problem
        held = [row for row in self.rows if row.phase and row.problem == problem]
        kernels = kernels_for(self.backend, problem, search.kernels)
        find = Find(search, kernels, self.backend, held, lambda text: self.on_phase(f"{problem.dtype} ceiling, {text}"))
        yield from find.results()
        found = find.ceilings
        for regime in self.plan.regimes:
            if regime not in found:
                self.on_failure(_missing_shares(problem.dtype, regime, search))
                continue
            record = ceiling_record(found[regime])
            yield Record("ceiling", record)
            device = {"device": asdict(self.backend.info)}
            ceiling = ceiling_from_record(record, device)  # as the log holds it
            self.ceilings[ceiling.dtype, regime] = ceiling


def _missing_shares(dtype: str, regime: str, search: Plan) -> str:
    return (
        f"no {dtype} {regime} ceiling was confirmed in {search.budget_seconds:.3g} s, so its rows have no shares "
        "(MAMFU): --resume continues the search (use a longer --budget), or start a new run with --ceiling LOG"
    )
