"""``mamf find --operation NAME``: ceilings of any operation; the best of each problem is confirmed in new rounds."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from mamf.cli.options import add_session_options
from mamf.cli.parser import Parser
from mamf.cli.planning import add_named_operation
from mamf.cli.session import Session, run_kernels
from mamf.errors import UsageError
from mamf.plans import DEFAULT_BUDGET_SECONDS, FIND, Plan
from mamf.regime_names import CEILINGS, asked_regimes

EXAMPLES = """examples:
  mamf find --operation bandwidth --set pattern=copy,read,write,triad
  mamf find --operation NAME --regime burst --budget 20s
  mamf find --operation NAME --resume LOG                   continue after Ctrl-C or kill
"""
_BUDGET = f"{DEFAULT_BUDGET_SECONDS:.0f}s, and half of it for each problem beyond the first"


def configure(parser: Parser) -> None:
    add_named_operation(parser)
    add_session_options(parser, budget=_BUDGET, regimes="both")


def run(options: argparse.Namespace) -> int:
    return run_kernels(options, KernelsFindSession)


class KernelsFindSession(Session):
    """Finds the ceilings of kernels of one operation."""

    kind = FIND

    def new_plan(self) -> Plan:
        plan = super().new_plan()
        regimes = asked_regimes(self.options.regime, CEILINGS)
        budget = self.options.budget or DEFAULT_BUDGET_SECONDS * (1 + len(plan.problems)) / 2
        return replace(plan, kind=FIND, options=None, shapes=self._shapes(plan), regimes=regimes, budget_seconds=budget)

    def _shapes(self, plan: Plan) -> tuple[Any, ...]:
        """The shapes of the options, or default shapes that may be a ceiling. Raises UsageError if none may."""
        able = [shape for shape in plan.shapes if self._may_be_ceiling(plan, shape)]
        if not able and not self.request.names_shapes:
            raise UsageError(
                "no default shape that fits in the memory of this device may be a ceiling, because a cache serves it: "
                f"'mamf sweep --operation {self.of.name}' still measures them"
            )
        if not able:
            own = [shape for shape in self.of.default_shapes(self.backend) if self._may_be_ceiling(plan, shape)]
            of_own = f", such as {own[0]}" if own else ""
            raise UsageError(
                f"--shapes: none of these may be a ceiling, because a cache serves them; add others{of_own}"
            )
        return plan.shapes if self.request.names_shapes else tuple(able)

    def _may_be_ceiling(self, plan: Plan, shape: Any) -> bool:
        info = self.backend.info
        return any(self.of.may_be_ceiling(info, problem, shape) for problem in plan.problems)

    def count_due(self) -> None:
        return None
