"""``mamf sweep --operation NAME``: kernels of any operation over shapes. Other commands build on its session
and on its plan.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from mamf.backend import Backend
from mamf.cli.interruption import Interruption
from mamf.cli.planning import AnyOperation, kernels_of, make_plan, request_of
from mamf.cli.resuming import Resumed, asked_budget, require_same_kernels
from mamf.cli.session import Session, measure
from mamf.cli.sharing import say_devices
from mamf.cli.terminal import say
from mamf.engine.estimate import kernels_seconds
from mamf.engine.strategies.kernels import KernelsSweep
from mamf.engine.strategies.shapes import Sweep
from mamf.errors import UsageError
from mamf.kernel import AnyKernel
from mamf.measurement import Measurement
from mamf.node.sharing import SharedSweep
from mamf.operation import Request
from mamf.plans import SWEEP, Plan, StepKey
from mamf.plugins.discovery import kernel_of, operation
from mamf.plugins.selection import choose_kernels
from mamf.report.text import counted


def say_plan(
    plan: Plan, steps: Sequence[StepKey], backend: Backend, devices: Sequence[int], searches: Sequence[Plan] = ()
) -> None:
    """Print a plan, for a dry run. ``steps``, ``searches``: those that are not done."""
    say(f"device: {backend.info.name} ({backend.name}:{backend.index})")
    say(f"kernels: {', '.join(plan.kernels)}")
    say(f"shapes: {len(plan.shapes)}, {counted(len(steps), 'row')} in {', '.join(plan.regimes)}")
    say_devices(devices)
    for search in searches:
        names = " and ".join(search.regimes)
        say(f"ceilings: {search.problem.dtype} {names}, found first in at most {search.budget_seconds:.0f} s")
    seconds = kernels_seconds(plan, steps, backend) / max(len(devices), 1)
    seconds += sum(search.budget_seconds or 0.0 for search in searches)
    if plan.budget_seconds is not None and (plan.confirms or seconds >= plan.budget_seconds):
        say(f"time: at most {plan.budget_seconds:.0f} s, the budget")
    else:
        say(f"time: about {seconds:.0f} s, and more to prepare and verify the rows")


def run(options: argparse.Namespace) -> int:
    return run_session(options, KernelsSession)


def run_session(
    options: argparse.Namespace, session: Callable[..., KernelsSession], of: AnyOperation | None = None
) -> int:
    """Measure kernels of an operation, by default that of the options. Wrong options are reported before a device is
    opened.
    """
    return measure(options, partial(session, request_of(of or operation(options.operation), options), options))


class KernelsSession(Session):
    """Measures kernels of one operation."""

    kind = SWEEP

    def __init__(
        self, request: Request, options: argparse.Namespace, interruption: Interruption, resumed: Resumed | None
    ) -> None:
        self.command = options.command
        self.request, self.of = request, request.of
        self.operation = self.of.name
        super().__init__(options, interruption, resumed)
        if self.devices and self.of.is_of_links:
            raise UsageError(
                f"{self.of.name} use links that all devices share, so that they would slow each other down: leave "
                "--devices out, or use 'mamf node'"
            )
        self.kernels = self.opened_kernels()
        self.plan = self.make_plan()
        self.rows = list(self.log.lasting) if self.log else []
        self.known_ceilings = dict(self.log.known_ceilings) if self.log else {}
        self.held = {self.step_of(row) for row in self.rows if self.is_of_step(row)}
        #: The strategy on one device, and the one in use: the same, or shared by several devices.
        self.alone = self.strategy()
        self.sweep: Sweep | KernelsSweep | SharedSweep = self.alone
        # A library may have swallowed the exception during its import.
        interruption.check()

    def opened_kernels(self) -> list[tuple[str, AnyKernel]]:
        """The kernels, with their names in the options."""
        if self.before is None:
            return choose_kernels(self.of, self.backend, self.asked_kernels())
        if self.options.kernel:
            asked = (kernel_of(self.of, name).name for name in self.options.kernel)
            require_same_kernels(self.options, [kernel_of(self.of, name).name for name in self.before.kernels], asked)
        return choose_kernels(self.of, self.backend, self.before.kernels)

    def asked_kernels(self) -> Sequence[str] | None:
        """The names in the options or of the preset; None for all kernels."""
        return kernels_of(self.request, self.options, self.backend)

    def make_plan(self) -> Plan:
        plan = super().make_plan()
        if self.before is None:
            return plan
        budget = asked_budget(self.options) or (plan.budget_seconds if plan.confirms else None)
        return replace(plan, kernels=tuple(name for name, _ in self.kernels), budget_seconds=budget)

    def new_plan(self) -> Plan:
        return make_plan(self.request, self.options, self.backend, [name for name, _ in self.kernels])

    def strategy(self) -> Sweep | KernelsSweep:
        return KernelsSweep(self.plan, [each for _, each in self.kernels], self.backend, held=self.held)

    def shared_kernel(self) -> str:
        """The kernel for devices that share the run, if the plan has another name for it."""
        return ""

    def wanted_ceilings(self) -> list[tuple[str, str]]:
        """The ceilings for the shares of the rows, by dtype and regime."""
        dtypes = dict.fromkeys(problem.dtype for problem in self.plan.problems)
        return [(dtype, regime) for dtype in dtypes for regime in self.plan.regimes]

    def is_of_step(self, row: Measurement) -> bool:
        return not row.phase and not row.is_reference

    def step_of(self, row: Measurement) -> StepKey:
        """The step of the plan of a row; the plan names kernels as in the options."""
        asked = {each.name: name for name, each in self.kernels}
        library = row.kernel.partition("[")[0]  # of an algorithm
        name = asked.get(row.kernel) or asked.get(library, row.kernel)
        return StepKey(row.regime, row.problem, row.shape, name)

    def dry_run(self) -> int:
        say_plan(self.plan, self.plan.steps(self.held), self.backend, self.devices)
        return 0

    def kernel_name(self) -> str:
        return " ".join(self.plan.kernels)

    def label(self) -> str:
        dtypes = dict.fromkeys(problem.dtype for problem in self.plan.problems)
        return "-".join([*([] if self.command == self.of.name else [self.of.name]), *dtypes, *self.plan.regimes])

    def count_due(self) -> int | None:
        return len(self.plan.steps(self.held))

    def measurements(self, on_phase: Callable[[str], None]) -> Iterator[Measurement]:
        self.alone.on_phase = on_phase
        self.sweep = self.share(self.alone, self.shared_kernel())
        return self.sweep.results()

    def left_out(self) -> bool:
        return bool(self.sweep.left_out)

    def count_left(self) -> int:
        return len(self.plan.steps({self.step_of(row) for row in self.rows if self.is_of_step(row)}))
