"""``mamf find``: both ceilings of the device, by itself, in about a minute."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mamf.api.measuring import problem_for
from mamf.ceilings.ceiling import Ceiling, why_hopeless
from mamf.ceilings.finding import Find
from mamf.ceilings.grid import plan_for
from mamf.cli.interruption import EXIT_CODE, Interruption
from mamf.cli.options import add_device_options, add_output_options, index, share, terminal_width
from mamf.cli.plan_options import held_problem, kernel_name, problem_from, read_names
from mamf.cli.resuming import require_repeated
from mamf.cli.session import End, Resumed, Session, add_run_options, interruptible
from mamf.cli.terminal import say, warn
from mamf.kernel import DATA
from mamf.logs.records import as_logged, ceiling_record
from mamf.logs.writer import RunLogWriter
from mamf.measurement import Measurement
from mamf.models.found import leave
from mamf.operations.matmul.kernel import LAYOUTS, MatmulKernel
from mamf.plans import DEFAULT_BUDGET_SECONDS, QUICK_BUDGET_SECONDS, FindPlan
from mamf.plugins.discovery import open_backend
from mamf.plugins.selection import kernels_for
from mamf.regimes.names import CEILINGS
from mamf.report import FORMATS, find_summary_record, render_find

_EXAMPLES = """examples:
  mamf find                                     burst and sustained ceilings of the first accelerator
  mamf find --dtype bfloat16 float16 fp8        one after the other, a log each
  mamf find --kernel torch.mm cublaslt          choose among cuBLASLt's algorithms too
  mamf find --quick                             both in 20 s
  mamf find --operation NAME --help             ceilings of another operation: what can be asked of it
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "--operation", metavar="NAME", help="one of 'mamf kernels', each with options of its own (default: matmul)"
    )
    group = parser.add_argument_group("product")
    group.add_argument("--dtype", nargs="+", help="one or several, one after the other (default: the device's)")
    group.add_argument("--out-dtype", help="dtype of C (default: as A; bfloat16 for 8-bit floats, int32 for int8)")
    group.add_argument("--layout", choices=LAYOUTS, default=None, help="how A and B lie in memory (default: nt)")
    group.add_argument("--data", choices=DATA, default=None, help="what the operands hold (default: normal)")
    group.add_argument("--seed", type=index, help="of the data and the search (default: 0)")
    group.add_argument(
        "--fast-accumulation",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="8-bit floats: fewer bits in partial sums",
    )
    group.add_argument(
        "--kernel",
        nargs="+",
        help="the first scouts, then all are searched together (default: all but those that compile for long)",
    )
    search = parser.add_argument_group("search")
    search.add_argument("--regime", nargs="+", choices=CEILINGS, help="which ceilings (default: both)")
    search.add_argument(
        "--quick",
        action=argparse.BooleanOptionalAction,
        default=None,
        help=f"both ceilings in {QUICK_BUDGET_SECONDS:.0f}s, in fewer rounds, by the default kernel",
    )
    search.add_argument("--precision", type=share, help="half-width of an interval to reach (default: 0.3%%)")
    add_device_options(parser)
    add_run_options(parser, budget=f"time for a dtype (default: {DEFAULT_BUDGET_SECONDS:.0f}s)")
    add_output_options(parser, FORMATS)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    # A resumed run has the dtype of its log.
    dtypes = [options.dtype] if options.resume else list(dict.fromkeys(options.dtype or [None]))
    output: Path | None = options.output

    def work(interruption: Interruption, resumed: Resumed | None) -> int:
        worst = 0
        if len(dtypes) > 1:  # what is wrong with a later one is said before minutes pass
            backend = open_backend(options.backend or "auto", options.device or 0)
            for dtype in dtypes:
                kernels_for(backend, problem_for(backend, dtype, options.out_dtype), options.kernel)
        for dtype in dtypes:
            options.dtype = dtype
            if output is not None and len(dtypes) > 1:
                options.output = output.with_name(f"{output.stem}-{dtype}{output.suffix}")
            session = _FindSession(options, interruption, resumed)
            code = session.dry_run() if options.dry_run else session.run()
            worst = max(worst, code)
            if code == EXIT_CODE:
                break
        return worst

    return interruptible(options, work)


class _FindSession(Session[FindPlan]):
    command = "find"
    plan_kind = FindPlan

    def __init__(self, options: argparse.Namespace, interruption: Interruption, resumed: Resumed | None) -> None:
        super().__init__(options, interruption, resumed)
        self.plan, self.kernels = self._new() if self.before is None else self._resumed(self.before)
        held = self.log.lasting if self.log else []
        self.rows = list(held)
        self.find = Find(self.plan, self.kernels, self.backend, held)
        interruption.check()

    def _new(self) -> tuple[FindPlan, list[MatmulKernel]]:
        options, backend = self.options, self.backend
        problem = problem_from(options, backend)
        return plan_for(
            backend,
            problem,
            options.kernel,
            regimes=tuple(name for name in CEILINGS if name in (options.regime or CEILINGS)),
            budget_seconds=options.budget,
            precision=options.precision or FindPlan.precision,
            is_quick=bool(options.quick),
        )

    def _resumed(self, before: FindPlan) -> tuple[FindPlan, list[MatmulKernel]]:
        """The log's own plan: only the budget may be given anew."""
        options, backend = self.options, self.backend

        def names(kernels: Sequence[str]) -> tuple[str, ...]:
            return tuple(dict.fromkeys(kernel_name(backend, before.problem, name) for name in kernels))

        held = {
            **held_problem(before.problem),
            "regime": frozenset(before.regimes),
            "precision": before.precision,
            "quick": before.is_quick,
            "kernel": names(before.kernels),
        }
        require_repeated(options, held, {**read_names(backend), "kernel": names})
        plan = replace(before, budget_seconds=options.budget or before.budget_seconds)
        return plan, kernels_for(backend, plan.problem, plan.kernels)

    def dry_run(self) -> int:
        grid, names = self.plan.grid, ", ".join(self.plan.kernels)
        say(f"device: {self.backend.info.name} ({self.backend.name}:{self.backend.index}), {self.plan.problem.dtype}")
        say(f"kernels: {names}")
        largest = f", up to {grid.most_flop / 1e12:.3g} TFLOP each" if self.plan.grid.most_flop else ""
        say(f"grid: {len(grid.shapes())} shapes, {grid.m[0]} to {grid.m[-1]} by {grid.m[0]}{largest}")
        say(f"ceilings: {', '.join(self.plan.regimes)}; time: at most {self.plan.budget_seconds:.0f} s")
        return 0

    def kernel_name(self) -> str:
        return self.kernels[0].name

    def label(self) -> str:
        return self.plan.problem.dtype

    def measurements(self, on_phase: Callable[[str], None]) -> Iterator[Measurement]:
        self.find.on_phase = on_phase
        return self.find.results()

    def after_measuring(self, writer: RunLogWriter) -> None:
        for ceiling in self._ceilings().values():
            writer.write("ceiling", ceiling_record(ceiling))

    def left_out(self) -> bool:
        if why_hopeless(self.rows):
            return bool(self.find.left_out)
        return any(regime not in self._ceilings() for regime in self.plan.regimes)

    def _ceilings(self) -> dict[str, Ceiling]:
        """Of the rows that the log holds: a signal may fall between a row and what the search makes of it."""
        return self.find.confirmed_by(self.rows)

    def summary(self, end: End, elapsed_seconds: float) -> dict[str, Any]:
        return find_summary_record(self.rows, self._ceilings(), end.status, end.reason, elapsed_seconds)

    def _report(self, header: dict[str, Any], summary: dict[str, Any] | None, path: Path) -> int:
        code = super()._report(header, summary, path)
        leave(path, warn)
        return code

    def rendered(self, header: dict[str, Any], summary: dict[str, Any] | None) -> str:
        found = self._ceilings() or (self.log.ceilings if self.log else {})
        ceilings = {regime: as_logged(each) for regime, each in found.items()}
        return render_find(self.options.format, self.rows, ceilings, header, summary, terminal_width(self.options))
