"""``mamf verify``: random problems by every kernel, each whole output checked, on all devices at once."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence

from mamf.cli.devices import WRONG
from mamf.cli.interruption import Interruption
from mamf.cli.resuming import require_same_kernels
from mamf.cli.session import Session, run_session
from mamf.cli.terminal import say
from mamf.engine.strategies.verify import kernels_to_verify, verify_plan
from mamf.kinds.driver import Resumed
from mamf.kinds.kind import Named
from mamf.operation import Request
from mamf.plans import MATMUL, VERIFY, Plan
from mamf.plugins.discovery import operation
from mamf.regime_names import CHECKING, asked_regimes
from mamf.report.verification import counts


def run(options: argparse.Namespace) -> int:
    # What scaled_dot_product_attention says, line by line, of a problem that it refuses.
    warnings.filterwarnings("ignore", ".*(kernel not used because|runtime disabled|fused kernels require)")
    return run_session(options, _VerifySession)


class _VerifySession(Session):
    kind = VERIFY

    def __init__(self, options: argparse.Namespace, interruption: Interruption, resumed: Resumed | None) -> None:
        super().__init__(Request(operation(MATMUL)), options, interruption, resumed)

    def open_kernels(self) -> Sequence[Named]:
        asked, before = self.options.kernel, self.before
        if before and asked:
            require_same_kernels(self.options, before.kernels, kernels_to_verify(self.backend, asked))
        return list(kernels_to_verify(self.backend, before.kernels if before else asked).items())

    def new_plan(self) -> Plan:
        asked, regimes = self.options, asked_regimes(self.options.regime, CHECKING)
        largest = operation(MATMUL).parse_shape(asked.largest) if asked.largest else None
        given = (asked.budget, asked.dtype, regimes, largest, asked.seed or 0, asked.number)
        return verify_plan(self.backend, dict(self.kernels), *given)

    def say_plan(self) -> None:
        plan = self.plan
        say(f"kernels: {', '.join(plan.kernels)}; {' and '.join(plan.regimes)} for {plan.budget_seconds:.0f} s")

    def label(self) -> str:
        return f"device{self.backend.index}"

    def count_due(self) -> None:
        return None

    def has_all(self) -> bool:
        return self.options.budget is None

    def judge(self, code: int) -> int:
        return WRONG if counts(self.driven.rows)["wrong"] else code
