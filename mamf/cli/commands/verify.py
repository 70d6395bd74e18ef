"""``mamf verify``: random problems by every kernel, each whole output checked, on all devices at once."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

from mamf.cli.devices import WRONG
from mamf.cli.interruption import Interruption
from mamf.cli.resuming import Resumed, asked_budget, require_same_kernels
from mamf.cli.session import Session, measure
from mamf.cli.terminal import say
from mamf.engine.strategies.verify import VerifySweep, kernels_to_verify, verify_plan
from mamf.measurement import Measurement
from mamf.plans import MATMUL, VERIFY, VERIFY_BUDGET_SECONDS, Plan
from mamf.regime_names import CHECKING, asked_regimes
from mamf.report.verification import counts


def run(options: argparse.Namespace) -> int:
    # What scaled_dot_product_attention says, line by line, of a problem that it refuses.
    warnings.filterwarnings("ignore", ".*(kernel not used because|runtime disabled|fused kernels require)")
    return measure(options, lambda interruption, resumed: _VerifySession(options, interruption, resumed))


class _VerifySession(Session):
    command = kind = VERIFY
    operation = MATMUL

    def __init__(self, options: argparse.Namespace, interruption: Interruption, resumed: Resumed | None) -> None:
        super().__init__(options, interruption, resumed)
        if self.before and options.kernel:
            require_same_kernels(options, self.before.kernels, kernels_to_verify(self.backend, options.kernel))
        self.kernels = kernels_to_verify(self.backend, self.before.kernels if self.before else options.kernel)
        # A resumed run gets the whole budget once more.
        budget = asked_budget(options) or (self.before and self.before.budget_seconds) or VERIFY_BUDGET_SECONDS
        self.plan = replace(self.make_plan(), budget_seconds=budget)
        self.rows = list(self.log.lasting) if self.log else []
        self.sweep = VerifySweep(self.plan, list(self.kernels.values()), self.backend, tuple(self.rows))

    def new_plan(self) -> Plan:
        asked, regimes = self.options, asked_regimes(self.options.regime, CHECKING)
        given = (asked.budget, asked.dtype, regimes, asked.largest, asked.seed or 0, asked.number)
        return verify_plan(self.backend, self.kernels, *given)

    def dry_run(self) -> int:
        plan = self.plan
        say(f"kernels: {', '.join(plan.kernels)}; {' and '.join(plan.regimes)} for {plan.budget_seconds:.0f} s")
        return 0

    def kernel_name(self) -> str:
        return " ".join(self.plan.kernels)

    def label(self) -> str:
        return f"device{self.backend.index}"

    def has_all(self) -> bool:
        return self.options.budget is None

    def measurements(self, on_phase: Callable[[str], None]) -> Iterator[Measurement]:
        self.sweep.on_phase = on_phase
        return self.sweep.results()

    def left_out(self) -> bool:
        return False

    def run(self) -> int:
        code = super().run()
        return WRONG if counts(self.rows)["wrong"] else code
