"""Find the ceilings (highest rates) of a device, then measure rows and report their rates as shares of these."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from mamf.ceilings.ceiling import Ceiling, Ceilings
from mamf.ceilings.roof import get_ceiling_name, make_ceiling_key
from mamf.engine.runner import RunSetup
from mamf.engine.search.strategy import GridSearchStrategy, RowsSearchStrategy
from mamf.engine.strategies.rows import RowsStrategy
from mamf.kernel import AnyKernel
from mamf.logs.recording import LogRecord
from mamf.logs.records import make_ceiling_record, read_ceiling_record
from mamf.measurement import Measurement
from mamf.operations.unknown import get_operation
from mamf.plans import Plan
from mamf.plugins.discovery import choose_kernels

#: The value of ``phase`` in rows that a search measures only to find out which shapes and kernels are worth confirming.
SCOUT_PHASE = "scout"
_MIN_BUDGET_SECONDS = 1e-9


class CeilingSharesStrategy(RowsStrategy):
    """A strategy that finds the ceilings of a device, then measures rows and reports their rates as shares of these.

    - ``ceilings``: the known ceilings; the strategy adds those that it finds.
    - ``search_plans``: the plans of the searches for the ceilings that are not known yet.
    - ``choose_reference_kernels``: takes ceilings, and returns the kernels with which they were measured, by name.
    - ``on_failure``: called with one message that names all ceilings that could not be confirmed.
    """

    def __init__(
        self,
        setup: RunSetup,
        ceilings: dict[tuple[str, str], Ceiling],
        records: Iterable[LogRecord],
        search_plans: Sequence[Plan],
        choose_reference_kernels: Callable[[Ceilings], Mapping[str, AnyKernel]],
        on_failure: Callable[[str], None],
    ) -> None:
        super().__init__(setup, ceilings, records=records)
        self.found_ceilings, self.search_plans = ceilings, search_plans
        self.choose_reference_kernels, self.on_failure = choose_reference_kernels, on_failure

    def yield_results(self) -> Iterator[Measurement | LogRecord]:
        start_time, budget = self.backend.now(), self.plan.budget_seconds
        yield from self.records
        for search in self.search_plans:
            yield from self._find_ceilings(search)
        needed_keys = itertools.product(map(get_ceiling_name, self.search_plans), self.plan.regimes)
        if missing := [f"{' '.join(key)} ceiling" for key in needed_keys if key not in self.found_ceilings]:
            self.on_failure(
                f"no {' and no '.join(missing)} was confirmed in {self.search_plans[0].budget_seconds:.3g} s, so rows "
                "show no share of it: search again with --resume and a longer --budget, or start a new run with "
                "--ceiling LOG"
            )
        if budget is not None:
            self.plan = replace(
                self.plan, budget_seconds=max(budget - (self.backend.now() - start_time), _MIN_BUDGET_SECONDS)
            )
        self.records, self.reference_kernels = (), self.choose_reference_kernels(self.found_ceilings)
        yield from super().yield_results()

    def _find_ceilings(self, search_plan: Plan) -> Iterator[Measurement | LogRecord]:
        """Search for the ceilings of a dtype or of memory. Yield the rows of the search and the record of each
        ceiling. Do not measure rows of an interrupted run again.
        """
        problem, backend, name = search_plan.problem, self.backend, get_ceiling_name(search_plan)
        opened = choose_kernels(get_operation(search_plan.operation), backend, search_plan.kernels)
        interrupted_rows = [row for row in self.setup.rows if row.phase and row.problem == problem]
        find = RunSetup(search_plan, backend, opened, interrupted_rows)
        find.report_phase = lambda text: self.setup.report_phase(f"{name} ceiling, {text}")
        find.report_step = self.setup.report_step
        strategy = GridSearchStrategy(find) if search_plan.is_search else RowsSearchStrategy(find)
        for row in strategy.yield_results():
            if not isinstance(row, Measurement):
                yield row
                continue
            yield row if row.phase else replace(row, phase=SCOUT_PHASE)
            find.rows.append(row)
        confirmed = {regime: ceiling for (_, regime), ceiling in find.confirmed_ceilings.items()}
        for regime in (each for each in self.plan.regimes if each in confirmed):
            record = make_ceiling_record(confirmed[regime])
            yield LogRecord("ceiling", record)
            # Read the ceiling from its record, so that its rate is rounded as in the log.
            ceiling = read_ceiling_record(record, {"device": asdict(backend.info)})
            self.found_ceilings[make_ceiling_key(ceiling)] = ceiling
