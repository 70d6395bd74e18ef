"""Implement the command ``mamf verify``: run random problems with every kernel, on all devices at the same time, and
check every element of each output. This finds devices and kernels that compute wrong results.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mamf.cli.planning import make_requested_operation
from mamf.cli.session import Session, run_session
from mamf.cli.terminal import (
    add_multi_device_options,
    add_run_options,
    add_shared_options,
    parse_index,
    print_line,
)
from mamf.cli.watching import REGRESSION_EXIT_CODE
from mamf.operation import MeasurementRequest
from mamf.plans import CHECKING_REGIMES, VERIFY, VERIFY_BUDGET_SECONDS, Plan, choose_regimes

if TYPE_CHECKING:
    from mamf.engine.runner import NamedKernel

EXAMPLES = """examples:
  mamf verify                                 all devices, all kernels, one minute; exit code 3 if a result is wrong
  mamf verify --budget 8h --output night.jsonl
  mamf verify --resume night.jsonl            continue after Ctrl-C
  mamf verify --kernel torch.mm my_package.kernels:MyMatmul --dtype bfloat16
  mamf verify --kernel torch.mm --seed 0 --number 17     repeat the problem of a failure that a report names
docs/verify-a-card.md says which errors a clean run rules out.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to check")
    add_shared_options(group, "--kernel", default_text="all available kernels except those that compile for minutes")
    add_shared_options(group, "--dtype", default_text="all dtypes of the device")
    add_shared_options(
        group,
        "--regime",
        choices=CHECKING_REGIMES,
        help="how to load the device; spaced: launches with rests; loaded: launches back to back at the "
        "power limit (default: both)",
    )
    group.add_argument(
        "--largest",
        metavar="SHAPE",
        help="matmul shape, such as 8192x8192x8192; no random problem has more FLOP than this matmul (default: "
        "depends on the device)",
    )
    group.add_argument("--seed", type=parse_index, metavar="N", help="seed of all random choices (default: 0)")
    group.add_argument(
        "--number",
        type=parse_index,
        default=0,
        metavar="N",
        help="check the random problem with this number again and again; the report of a failure names the number. "
        "Each --regime has different problems (default: one problem after another)",
    )
    group = parser.add_argument_group("device")
    add_shared_options(group, "--backend", "--device")
    add_multi_device_options(parser, "all")
    add_run_options(
        parser,
        budget_default=f"{VERIFY_BUDGET_SECONDS:.0f}s",
        resume_help="log of an interrupted run to continue, or the folder with its logs if several devices share the "
        "run; mamf checks other problems, and the time budget starts again",
    )
    add_shared_options(parser, "--format", "--top", "--wide")


def run_with_options(options: argparse.Namespace) -> int:
    # Hide the many warnings of torch's scaled_dot_product_attention about random problems that it does not support.
    warnings.filterwarnings("ignore", ".*(kernel not used because|runtime disabled|fused kernels require)")
    return run_session(options, _VerifySession, MeasurementRequest(make_requested_operation()))


class _VerifySession(Session):
    kind = VERIFY

    def open_kernels(self) -> Sequence[NamedKernel]:
        from mamf.cli.resuming import require_same_kernels
        from mamf.engine.strategies.studies import choose_kernels_to_verify

        requested_names, logged_plan = self.options.kernel, self.resumed_plan
        if logged_plan and requested_names:
            require_same_kernels(
                self.options, logged_plan.kernels, choose_kernels_to_verify(self.backend, requested_names)
            )
        return list(
            choose_kernels_to_verify(self.backend, logged_plan.kernels if logged_plan else requested_names).items()
        )

    def make_new_plan(self) -> Plan:
        from mamf.engine.strategies.studies import make_verify_plan

        options, regimes = self.options, choose_regimes(self.options.regime, CHECKING_REGIMES)
        return make_verify_plan(
            self.backend,
            dict(self.kernels),
            options.budget,
            options.dtype,
            regimes,
            self.operation.parse_shape(options.largest) if options.largest else None,
            options.seed or 0,
            options.number,
        )

    def print_plan(self) -> None:
        plan = self.plan
        print_line(f"kernels: {', '.join(plan.kernels)}; {' and '.join(plan.regimes)} for {plan.budget_seconds:.0f} s")

    def make_log_name_part(self) -> str:
        return f"device{self.backend.index}"

    def is_run_complete(self) -> bool:
        return self.options.budget is None

    def choose_exit_code(self, run_exit_code: int) -> int:
        from mamf.report.verification import count_verified_items

        return REGRESSION_EXIT_CODE if count_verified_items(self.measured_run.rows)["wrong"] else run_exit_code
