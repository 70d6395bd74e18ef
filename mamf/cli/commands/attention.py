"""``mamf attention``: attention kernels over shapes, as shares of the device's measured matmul ceiling."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from mamf.ceilings.ceiling import Ceiling, Ceilings
from mamf.ceilings.search_plan import SearchPlan
from mamf.cli.attention_plans import (
    add_searches,
    budget_warning,
    found_ceilings,
    given_ceilings,
    kernels_from,
    limit_budgets,
    missing_shares,
    plan_from,
    require_repeated_ceilings,
    shapes_from,
)
from mamf.cli.commands.kernels_sweep import AnyOperation, KernelsSession, say_plan
from mamf.cli.interruption import Interruption
from mamf.cli.resuming import Resumed
from mamf.cli.session import measure
from mamf.cli.terminal import warn
from mamf.engine.search.finding import Find
from mamf.engine.strategies.kernels import KernelsSweep
from mamf.errors import LogMismatchError, UnknownNameError
from mamf.kernel import AnyKernel
from mamf.kinds.kind import View
from mamf.logs.records import ceiling_record
from mamf.logs.writer import RunLogWriter
from mamf.measurement import Measurement
from mamf.operations.attention.operation import Attention, is_attention
from mamf.operations.matmul.selection import kernels_for, reference_kernels
from mamf.plans import Plan
from mamf.plugins.discovery import operation
from mamf.rate import find_rate

_A_MOMENT = 1e-9


def run(options: argparse.Namespace) -> int:
    if not options.resume:
        shapes_from(options)  # reports wrong sizes before a device is opened
    return measure(options, partial(_AttentionSession, operation(Attention.name), options))


class _AttentionSession(KernelsSession):
    """Measures attention kernels, and before them the ceilings for their shares."""

    def __init__(
        self, of: AnyOperation, options: argparse.Namespace, interruption: Interruption, resumed: Resumed | None
    ) -> None:
        super().__init__(of, options, interruption, resumed)
        self.ceilings: dict[tuple[str, str], Ceiling] = dict(self.log.all_ceilings) if self.log else {}
        given = given_ceilings(options, self.wanted_ceilings(), self.backend)
        if self.log and self.before:
            require_repeated_ceilings(options, self.log, self.before, given)
        self.ceilings |= given
        self._require_first()
        self._references(warn)  # before anything is measured
        names = {each.name for _, each in self.kernels}
        if options.baseline is not None and options.baseline not in names:
            raise UnknownNameError("baseline", options.baseline, names)

    def asked_kernels(self) -> Sequence[str] | None:
        return kernels_from(self.options, self.backend)

    def new_plan(self) -> Plan:
        plan = self.plan_to_compare()
        return plan if self.options.no_ceiling or self.options.ceiling else add_searches(plan, self.backend)

    def plan_to_compare(self, before: Plan | None = None) -> Plan:
        return plan_from(self.options, self.backend, [name for name, _ in self.kernels])

    def _require_first(self) -> None:
        """A ceiling belongs to the device that started the log. Raises LogMismatchError on another one."""
        if not self.log or not self.devices or not self._missing_searches():
            return
        first = self.log.device(None).index
        if self.backend.index != first:
            missing = f"{self.log.path} lacks its ceiling, which is measured on device {first}"
            raise LogMismatchError(f"{missing}: resume with that device, or start a new log with --ceiling")

    def _missing_searches(self) -> list[SearchPlan]:
        dtypes = {key[0] for key in self.wanted_ceilings() if find_rate(self.ceilings, *key) is None}
        searches = [search for search in self.plan.searches if search.problem.dtype in dtypes]
        return limit_budgets(self.plan.budget_seconds, searches)

    def _search(self, plan: SearchPlan, on_phase: Callable[[str], None]) -> Iterator[Measurement]:
        """Search for the ceilings of a dtype; rows of a resumed log are not measured again."""
        problem = plan.problem
        held = [row for row in self.rows if row.phase and row.problem == problem]
        kernels = kernels_for(self.backend, problem, plan.kernels)
        find = Find(plan, kernels, self.backend, held, lambda text: on_phase(f"{problem.dtype} ceiling, {text}"))
        yield from find.results()
        self.ceilings |= (found := found_ceilings(find, self.plan.regimes))
        self._write_ceilings(found)
        for regime in self.plan.regimes:
            if find_rate(found, problem.dtype, regime) is None:
                self.failures.append(missing_shares(problem.dtype, regime, plan))
                warn(self.failures[-1])

    def _references(self, warn: Callable[[str], object] = lambda remark: None) -> Mapping[str, AnyKernel]:
        """The kernels of the ceilings."""
        names = {ceiling.kernel for ceiling in self.ceilings.values()}
        return reference_kernels(names, self.options.ceiling_kernel, warn)

    def dry_run(self) -> int:
        say_plan(self.plan, self.plan.steps(self.held), self.backend, self.devices, self._missing_searches())
        return 0

    def label(self) -> str:
        return "-".join(dict.fromkeys(problem.dtype for problem in self.plan.problems))

    def counts(self, row: Measurement) -> bool:
        return is_attention(row)

    def is_of_step(self, row: Measurement) -> bool:
        return self.counts(row)

    def has_all(self) -> bool:
        return super().has_all() and not self._missing_searches()

    def measurements(self, on_phase: Callable[[str], None]) -> Iterator[Measurement]:
        begun, plan = self.backend.now(), self.plan
        self._write_ceilings(self.ceilings)
        for search in self._missing_searches():
            yield from self._search(search, on_phase)
        if plan.budget_seconds is not None:  # minus the time of the searches
            plan = replace(plan, budget_seconds=max(plan.budget_seconds - (self.backend.now() - begun), _A_MOMENT))
        kernels = [each for _, each in self.kernels]
        self.alone = KernelsSweep(plan, kernels, self.backend, self.ceilings, self._references(), self.held)
        yield from super().measurements(on_phase)

    def before_measuring(self, writer: RunLogWriter) -> None:
        self._writer = writer
        for message in filter(None, map(budget_warning, self._missing_searches())):
            warn(message)

    def _write_ceilings(self, ceilings: Ceilings) -> None:
        known = self.log.all_ceilings if self.log else {}
        with self.interruption.shielded():
            for key, ceiling in ceilings.items():
                if key not in known:
                    self._writer.write("ceiling", ceiling_record(ceiling))

    def ceilings_found(self) -> Ceilings:
        return self.ceilings

    def view(self) -> View:
        return replace(super().view(), baseline=self.options.baseline)
