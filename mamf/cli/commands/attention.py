"""Implement the command ``mamf attention``: measure attention kernels, and show the rate of each as a share of the
matmul ceiling, the highest matmul rate that was measured on the same device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mamf.cli.parser import CommandParser, find_option_value
from mamf.cli.planning import AnyOperation, add_operation_options, find_logged_operation
from mamf.cli.session import Session, print_plan, run_kernel_session
from mamf.cli.terminal import (
    add_device_options,
    add_measuring_options,
    add_multi_device_options,
    add_run_options,
    add_shared_options,
    warn,
)
from mamf.errors import UnknownNameError, require_known_names
from mamf.kernel import AnyKernel
from mamf.measurement import find_rate
from mamf.operation import MeasurementRequest
from mamf.operations.attention.operation import AttentionOperation
from mamf.operations.decode.operation import DecodeOperation
from mamf.plans import Plan

if TYPE_CHECKING:
    from mamf.ceilings.ceiling import Ceiling, Ceilings
    from mamf.engine.runner import RunSetup, Strategy

EXAMPLES = """examples:
  mamf attention                                        all installed kernels; bfloat16, 1k to 16k tokens
  mamf attention --preset fa3-paper --direction fwd bwd --ceiling LOG
  mamf attention --preset scaling --no-ceiling          eager and compiled kernels until memory is full
  mamf attention --seq-lens 256 512 --head-dims 64      small enough for a CPU
  mamf attention --preset llama-8b-decode               one token per KV cache; also shares of the read bandwidth
  mamf attention --operation decode --cache-lens 8192 --page-sizes 16 --graph
  mamf attention --kernel sdpa-cudnn my.module:MyKernel --baseline sdpa-cudnn
"""

_OPERATION_NAMES = (AttentionOperation.name, DecodeOperation.name)


def add_options(parser: CommandParser) -> None:
    name, preset = (find_option_value(option, parser.command_words) for option in ("--operation", "--preset"))
    # Read the log to resume only if no option names the operation, because a long log takes a while to read.
    operation = _choose_operation(name, preset, None if name or preset else find_logged_operation(parser.command_words))
    parser.set_defaults(requested_operation=operation)
    # Without --operation, also accept the presets of the operation decode. Such a preset selects decode.
    accepts_decode_presets = name is None and isinstance(operation, AttentionOperation)
    add_operation_options(
        parser, operation, other_presets=DecodeOperation().list_presets() if accepts_decode_presets else ()
    )
    parser.operation_name, parser.list_operation_names = operation.name, lambda: _OPERATION_NAMES
    group = parser.add_argument_group("what to measure")
    add_shared_options(
        group,
        "--operation",
        help="operation to use: attention or decode (default: attention, or decode if --preset is a preset of decode)",
    )
    add_shared_options(group, "--kernel")
    group = add_measuring_options(parser)
    exclusive_group = group.add_mutually_exclusive_group()
    add_shared_options(exclusive_group, "--ceiling", default_text="none; mamf measures the ceilings first")
    exclusive_group.add_argument(
        "--no-ceiling",
        action="store_true",
        default=None,
        help="do not measure ceilings; the report then shows no share of a ceiling",
    )
    group.add_argument(
        "--ceiling-kernel",
        nargs="+",
        default=(),
        metavar="CLASS",
        help="classes of the kernels to measure the ceiling with, as package.module:Class; needed only for kernels "
        "that 'mamf kernels' does not list",
    )
    group.add_argument(
        "--baseline",
        metavar="KERNEL",
        help="kernel to which speed-ups are relative; if the run has several shapes or directions, add --top all to "
        "see the speed-ups (default: eager, or the slowest kernel if eager is not measured)",
    )
    add_device_options(parser)
    add_multi_device_options(parser)
    add_run_options(parser)
    add_shared_options(parser, "--format", "--top", "--wide")


def _choose_operation(name: str | None, preset: str | None, logged: AnyOperation | None) -> AnyOperation:
    """Return the operation called ``name``, attention or decode. If it is None or empty, return the operation that has
    ``preset``. If ``preset`` is None too, return attention, or ``logged``, the operation of the log to resume, if it is
    decode. Raises UnknownNameError for an unknown name or preset.
    """
    operations_by_name: dict[str, AnyOperation] = {
        operation.name: operation for operation in (AttentionOperation(), DecodeOperation())
    }
    if not name:
        operation_names_by_preset = {
            preset_name: name
            for name, operation in operations_by_name.items()
            for preset_name in operation.list_presets()
        }
        if preset:
            require_known_names(("preset of attention", preset, operation_names_by_preset))
        name = operation_names_by_preset.get(
            preset or "", logged.name if logged and logged.name in operations_by_name else AttentionOperation.name
        )
    require_known_names(("operation of attention", name, operations_by_name))
    return operations_by_name[name]


def run_with_options(options: argparse.Namespace) -> int:
    return run_kernel_session(options, _AttentionSession, options.requested_operation)


class _AttentionSession(Session):
    """A run of ``mamf attention``: it first searches for the ceilings that are neither in the logs of --ceiling nor in
    the resumed log, then measures the attention kernels and shows each rate as a share of its ceiling.
    """

    def __init__(self, request: MeasurementRequest, options: argparse.Namespace, *session_arguments: Any) -> None:
        from mamf.ceilings.roof import make_ceiling_key
        from mamf.cli.ceilings import list_needed_ceiling_keys, read_given_ceilings, require_same_ceilings

        super().__init__(request, options, *session_arguments)
        logged_ceilings = (
            [*self.resumed_log.matmul_ceilings.values(), *self.resumed_log.other_ceilings.values()]
            if self.resumed_log
            else []
        )
        self.ceilings: dict[tuple[str, str], Ceiling] = {
            make_ceiling_key(ceiling): ceiling for ceiling in logged_ceilings
        }
        given_ceilings = read_given_ceilings(options, list_needed_ceiling_keys(self.plan), self.backend)
        if self.resumed_log and self.resumed_plan:
            require_same_ceilings(options, self.resumed_log, self.resumed_plan, given_ceilings)
        self.given_ceilings_to_log = {
            key: ceiling for key, ceiling in given_ceilings.items() if key not in self.ceilings
        }
        self.ceilings |= given_ceilings
        self.measured_run.known_ceilings = self.ceilings
        self._open_ceiling_kernels(self.ceilings, warn)  # Report a missing kernel before mamf measures anything.
        names = {each.name for _, each in self.kernels}
        if options.baseline is not None and options.baseline not in names:
            raise UnknownNameError("baseline", options.baseline, names)
        self.baseline_kernel = options.baseline

    def make_plan(self) -> Plan:
        from mamf.cli.ceilings import add_ceiling_searches

        plan, options = super().make_plan(), self.options
        if self.resumed_plan or options.no_ceiling or options.ceiling:
            return plan
        return add_ceiling_searches(plan, self.backend)

    def _list_searches_for_missing_ceilings(self) -> list[Plan]:
        from mamf.ceilings.roof import get_ceiling_name
        from mamf.cli.ceilings import divide_search_budget, list_needed_ceiling_keys

        names = {key[0] for key in list_needed_ceiling_keys(self.plan) if find_rate(self.ceilings, *key) is None}
        return divide_search_budget(
            self.plan.budget_seconds, [search for search in self.plan.searches if get_ceiling_name(search) in names]
        )

    def _open_ceiling_kernels(self, ceilings: Ceilings, warn: Callable[[str], object]) -> Mapping[str, AnyKernel]:
        """Import the matmul kernels with which ``ceilings`` were measured, and return them by name. ``warn``: called
        with the text of each warning.
        """
        from mamf.ceilings.roof import READ_BANDWIDTH_KEY
        from mamf.operations.matmul.operation import get_ceiling_kernels

        return get_ceiling_kernels(
            {ceiling.kernel for (name, _), ceiling in ceilings.items() if name != READ_BANDWIDTH_KEY},
            self.options.ceiling_kernel,
            warn,
        )

    def make_strategy(self, setup: RunSetup) -> Strategy:
        from mamf.cli.ceilings import check_search_budgets
        from mamf.engine.search.shares import CeilingSharesStrategy
        from mamf.logs.recording import LogRecord
        from mamf.logs.records import make_ceiling_record

        searches = self._list_searches_for_missing_ceilings()
        self.measured_run.check_results = [
            *self.measured_run.check_results,
            *check_search_budgets(searches, self.backend),
        ]
        return CeilingSharesStrategy(
            setup,
            self.ceilings,
            [LogRecord("ceiling", make_ceiling_record(ceiling)) for ceiling in self.given_ceilings_to_log.values()],
            searches,
            choose_reference_kernels=lambda ceilings: self._open_ceiling_kernels(ceilings, lambda warning: None),
            on_failure=self.record_failure,
        )

    def print_plan(self) -> None:
        print_plan(
            self.plan,
            self.kernels,
            self.measured_run.remaining_row_keys,
            self.backend,
            self._list_searches_for_missing_ceilings(),
        )

    def is_run_complete(self) -> bool:
        return super().is_run_complete() and not self._list_searches_for_missing_ceilings()
