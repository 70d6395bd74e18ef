"""``mamf find``: both matmul ceilings of the device in about a minute."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mamf.ceilings.ceiling import Ceiling, why_hopeless
from mamf.ceilings.search_plan import SearchPlan
from mamf.cli.commands.sweep import problem_from
from mamf.cli.interruption import EXIT_CODE, Interruption
from mamf.cli.printing import note_stream
from mamf.cli.resuming import Resumed, asked_budget, contradiction, interruptible, require_same_kernels
from mamf.cli.session import Session
from mamf.cli.terminal import say, warn
from mamf.contribution.known_ceilings import place_among_known
from mamf.engine.search.finding import Find
from mamf.engine.search.grid import plan_for
from mamf.errors import UsageError
from mamf.logs.found import cache_ceiling
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.operations.matmul.operation import problem_for
from mamf.operations.matmul.selection import kernel_for, kernels_for
from mamf.plans import FIND, MATMUL, Plan
from mamf.plugins.discovery import open_backend
from mamf.regime_names import CEILINGS, asked_regimes


def run(options: argparse.Namespace) -> int:
    if options.begins and len(set(options.dtype or ())) > 1:
        raise UsageError("--resume continues one log, and each dtype has its own: name one --dtype, or use --output")
    # A resumed run has the dtype of its log.
    is_resumed = options.resume and not options.restart
    dtypes = [options.dtype] if is_resumed else list(dict.fromkeys(options.dtype or [None]))
    output: Path | None = options.output

    def work(interruption: Interruption, resumed: Resumed | None) -> int:
        if len(dtypes) > 1:  # reports a wrong dtype before the first is measured
            backend = open_backend(options.backend or "auto", options.device or 0)
            for dtype in dtypes:
                kernels_for(backend, problem_for(backend, dtype, options.out_dtype), options.kernel)
        for dtype in dtypes[len(options.codes) :]:
            options.dtype = dtype
            if output is not None and len(dtypes) > 1:
                options.output = output.with_name(f"{output.stem}-{dtype}{output.suffix}")
            try:
                session = _FindSession(options, interruption, resumed)
            except UsageError as error:  # too slow for a search, say: the other dtypes need not be
                if len(dtypes) == 1:
                    raise
                warn(str(error))
                code = error.exit_code
            else:
                code = session.dry_run() if options.dry_run else session.run()
            options.codes.append(code)
            resumed = options.restart = None
            if code == EXIT_CODE:
                break
        return int(max(options.codes))

    return interruptible(options, work)


class _FindSession(Session):
    command = kind = FIND
    operation = MATMUL

    def __init__(self, options: argparse.Namespace, interruption: Interruption, resumed: Resumed | None) -> None:
        super().__init__(options, interruption, resumed)
        if self.before is None:
            self.search, self.kernels = plan_for(
                self.backend,
                problem_from(options, self.backend),
                options.kernel,
                regimes=asked_regimes(options.regime, CEILINGS),
                budget_seconds=options.budget,
                precision=options.precision or SearchPlan.precision,
                is_quick=bool(options.quick),
            )
        else:
            self.search = self._search_of(self.before)
            self.kernels = kernels_for(self.backend, self.search.problem, self.search.kernels)
        self.plan = self.make_plan()
        held = self.log.lasting if self.log else []
        self.rows = list(held)
        self.find = Find(self.search, self.kernels, self.backend, held)
        interruption.check()

    def _search_of(self, before: Plan) -> SearchPlan:
        """The search of the log with the budget of this run. Raises LogMismatchError for other kernels."""
        search: SearchPlan = before.searches[0]
        if self.options.kernel:
            then, now = (
                [kernel_for(self.backend, search.problem, name).name for name in names]
                for names in (search.kernels, self.options.kernel)
            )
            require_same_kernels(self.options, then, now)
        return replace(search, budget_seconds=asked_budget(self.options) or search.budget_seconds)

    def new_plan(self) -> Plan:
        return self.search.as_plan()

    def plan_to_compare(self, before: Plan) -> Plan:
        """The grid is the log's: it depends on the speed of the device."""
        options = self.options
        if bool(options.quick) != self.search.is_quick:
            raise contradiction(options, "quick", self.search.is_quick, bool(options.quick))
        of_dtypes = (argparse.Namespace(**{**vars(options), "dtype": name}) for name in options.dtype or [None])
        problems = tuple(problem_from(each, self.backend) for each in of_dtypes)
        precision = options.precision or SearchPlan.precision
        plan = replace(self.search, regimes=asked_regimes(self.options.regime, CEILINGS), precision=precision).as_plan()
        return replace(plan, problems=problems)

    def dry_run(self) -> int:
        grid, names = self.search.grid, ", ".join(self.plan.kernels)
        say(f"device: {self.backend.info.name} ({self.backend.name}:{self.backend.index}), {self.plan.problem.dtype}")
        say(f"kernels: {names}")
        largest = f", up to {grid.most_flop / 1e12:.3g} TFLOP each" if grid.most_flop else ""
        say(f"grid: {len(grid.shapes())} shapes, {grid.m[0]} to {grid.m[-1]} by {grid.m[0]}{largest}")
        say(f"ceilings: {', '.join(self.plan.regimes)}; time: at most {self.search.budget_seconds:.0f} s")
        return 0

    def kernel_name(self) -> str:
        return self.kernels[0].name

    def label(self) -> str:
        return str(self.plan.problem.dtype)

    def measurements(self, on_phase: Callable[[str], None]) -> Iterator[Measurement]:
        self.find.on_phase = on_phase
        return self.find.results()

    def left_out(self) -> bool:
        if why_hopeless(self.rows):
            return bool(self.find.left_out)
        found = {regime for _, regime in self.ceilings_found()}
        return any(regime not in found for regime in self.plan.regimes)

    def ceilings_found(self) -> dict[tuple[Any, str], Ceiling]:
        """The ceilings from logged rows: a signal may come between a row and its evaluation by the search."""
        return {(self.plan.problem, regime): each for regime, each in self.find.confirmed_by(self.rows).items()}

    def _report(self, log: RunLog) -> int:
        code = super()._report(log)
        for ceiling in log.all_ceilings.values():
            if known := place_among_known(ceiling, log.header["device"]):
                say(f"{ceiling.regime}, {known}", note_stream(self.options))
        cache_ceiling(log.path, warn)
        return code
