"""Implement the command ``mamf model``: time training steps of language models, and show the FLOPS of each step as a
share of the ceiling, which is the highest known matmul rate of the device.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from mamf.backend import Backend
from mamf.cli import run_command
from mamf.cli.planning import add_operation_options, make_measurement_request
from mamf.cli.resuming import has_plan_options, make_contradiction_error
from mamf.cli.session import Session, run_kernel_session
from mamf.cli.terminal import add_session_options, add_shared_options, print_line, print_needed_memory, warn
from mamf.errors import MamfError, UsageError
from mamf.measurement import Rate, find_rate
from mamf.operations.model.operation import ModelOperation

if TYPE_CHECKING:
    from mamf.engine.runner import RunSetup
    from mamf.engine.strategies.rows import RowsStrategy

EXAMPLES = """examples:
  mamf model --size small --phase forward forward-backward step
  mamf model --size 1b --batch 4 --context-lengths 2048 8192 --attention sdpa-flash flash-attn-4
  mamf model --size xl --phase step --set optimizer=adamw-fused --compile
  mamf model --set d_model=1024 d_ff=4096 layers=8 heads=8 kv_heads=8 --context-lengths 512
  mamf model --set d_model=256 layers=2 --quick         scale the other sizes with d_model
  mamf model --size 1b --phase step --memory mem.pickle  report what occupies the memory at its peak
  mamf model --resume LOG                               continue after Ctrl-C or kill
"""
#: The default time budget with --quick, in seconds.
_QUICK_BUDGET_SECONDS = 60.0
#: The minimum number of launches that mamf needs to verify and measure the first row of a model.
_MIN_FIRST_ROW_LAUNCHES = 10


def add_options(parser: argparse.ArgumentParser) -> None:
    add_operation_options(parser, ModelOperation(), defaults={"context": (1024,)})
    group = parser.add_argument_group("what to measure")
    group.add_argument(
        "--attention",
        nargs="+",
        metavar="KERNEL",
        help="attention kernels to use in the model; 'mamf kernels' lists their names (default: sdpa)",
    )
    group.add_argument(
        "--compile", action="store_true", default=None, help="also measure each model with torch.compile (default: no)"
    )
    group.add_argument(
        "--quick",
        action="store_true",
        help="use defaults that take less time: one sequence of 256 tokens, 0.5 s per row and "
        f"{_QUICK_BUDGET_SECONDS:.0f} s in all",
    )
    add_shared_options(parser, "--ceiling", default_text="the ceilings that 'mamf peak' prints")
    group = parser.add_argument_group("profile one kernel and shape as 'mamf profile' does, instead of measuring")
    add_shared_options(group, "--nvtx", "--dtypes", "--memory")
    add_session_options(parser, regimes_default="sustained")


def run_with_options(options: argparse.Namespace) -> int:
    if options.quick:
        quick_values = {"size_batch": (1,), "size_context": (256,), "seconds": 0.5, "budget": _QUICK_BUDGET_SECONDS}
        for name, value in quick_values.items():
            if name not in options.given_names and getattr(options, name) in (None, (1024,)):
                setattr(options, name, value)
    options.kernel = make_kernel_names(options)
    if options.nvtx or options.dtypes or options.memory:
        return _profile_single_row(options)
    return run_kernel_session(options, ModelSession, ModelOperation())


def _profile_single_row(options: argparse.Namespace) -> int:
    """Run ``mamf profile`` on launches of the single row (kernel, problem and shape) that the options describe, and
    return its exit code. Raises UsageError if the options describe several rows or none.
    """
    from mamf.plugins.discovery import open_backend
    from mamf.profiling.counters.ncu import make_run_options

    backend = open_backend(options.backend or "auto", options.device or 0)
    request = make_measurement_request(ModelOperation(), options)
    rows = [(kernel, problem, shape) for kernel in options.kernel or () for problem in request.make_problems(backend)
            for shape in request.make_labeled_shapes(backend)]  # fmt: skip
    if len(rows) != 1:
        raise UsageError(
            f"--nvtx, --dtypes and --memory profile a single row (one kernel, problem and shape), not {len(rows)}: "
            "give a single value of --phase, --context-lengths and other options"
        )
    ((kernel, problem, shape),) = rows
    profile_options = [name for name in ("--nvtx", "--dtypes") if getattr(options, name[2:])]
    profile_options += ["--memory", str(options.memory)] if options.memory else []
    device_options = ["--backend", backend.name, "--device", str(backend.index)]
    command = ["-m", "mamf", "run", kernel, *make_run_options(problem, shape), *device_options, "--no-verify"]
    step_options = ["--warmup", "1", "--steps", "1", "--calls", "mamf.engine.launching:launch_between_marks"]
    return run_command(["profile", *step_options, *profile_options, *device_options, *command, "--launches", "3"])


def make_kernel_names(options: argparse.Namespace) -> list[str] | None:
    """Return one kernel name per attention kernel, such as ``torch[sdpa]`` for a model that uses sdpa, and with
    --compile also names such as ``compiled[sdpa]``. Return None if the resumed log names the kernels.
    """
    if options.resume and not has_plan_options(options):
        return None
    return [
        f"{prefix}[{name}]"
        for name in options.attention or ("sdpa",)
        for prefix in (("torch", "compiled") if options.compile else ("torch",))
    ]


class ModelSession(Session):
    """A run of ``mamf model``: it measures training steps of models, and compares their FLOPS with known ceilings.

    ``known_ceilings``: the ceilings to compare with, by dtype and regime (burst or sustained load).
    """

    def __init__(self, *session_arguments: Any) -> None:
        from mamf.ceilings.ceiling import copy_as_given_ceiling
        from mamf.cli.ceilings import list_needed_ceiling_keys, read_given_ceilings
        from mamf.logs.records import make_known_ceiling_record

        super().__init__(*session_arguments)
        needed_keys = list_needed_ceiling_keys(self.plan)
        self.known_ceilings = dict(self.resumed_log.known_ceilings) if self.resumed_log else {}
        for key, each in read_given_ceilings(self.options, needed_keys, self.backend).items():
            ceiling, previous_ceiling = copy_as_given_ceiling(each), self.known_ceilings.get(key)
            if previous_ceiling and make_known_ceiling_record(previous_ceiling) != make_known_ceiling_record(ceiling):
                logged_ceiling = f"a {' '.join(key)} ceiling of {previous_ceiling.tflops:.6g} TFLOPS"
                raise make_contradiction_error(self.options, "ceiling", logged_ceiling, self.options.ceiling)
            if any(find_rate({key: ceiling}, *each) for each in needed_keys):
                self.known_ceilings[key] = ceiling
        if self.plan.budget_seconds is None or self.backend.is_accelerator or self.resumed_log:
            return
        if (row_seconds := self._estimate_first_row_seconds()) > self.plan.budget_seconds:
            raise UsageError(
                f"the first row takes about {row_seconds:.0f} s on this CPU, which is more than the budget: choose a "
                f"smaller --batch or --context-lengths, {'' if self.options.quick else 'add --quick, '}or give a "
                "longer --budget"
            )

    def _estimate_first_row_seconds(self) -> float:
        """Estimate the seconds that a CPU takes to measure and verify the first row, from the FLOPS of float32 matmul,
        because mamf computes the reference result in float32 for models of any dtype.
        """
        from mamf.engine.estimate import measure_matmul_flops
        from mamf.operations.matmul.operation import make_matmul_kernel, make_problem

        _, problem, shape, _ = self.measured_run.remaining_row_keys[0]
        flops = measure_matmul_flops(
            make_matmul_kernel("torch.mm"), make_problem(self.backend, "float32"), self.backend
        )
        return float(_MIN_FIRST_ROW_LAUNCHES * problem.compute_flop(shape) / flops)

    def print_plan(self) -> None:
        super().print_plan()
        if not self.backend.is_accelerator and self.measured_run.remaining_row_keys:
            print_line(f"the first row and its verification take about {self._estimate_first_row_seconds():.0f} s")
        needed_bytes = max(
            (problem.count_bytes(shape) for _, problem, shape, _ in self.measured_run.remaining_row_keys), default=0
        )
        print_needed_memory(needed_bytes, "the largest row, without its activations", self.backend)

    def make_strategy(self, setup: RunSetup) -> RowsStrategy:
        from mamf.cli.ceilings import list_needed_ceiling_keys
        from mamf.engine.strategies.rows import RowsStrategy
        from mamf.logs.recording import LogRecord
        from mamf.logs.records import make_known_ceiling_record

        missing_keys = [
            key for key in list_needed_ceiling_keys(self.plan) if find_rate(self.known_ceilings, *key) is None
        ]
        self.known_ceilings |= find_known_ceilings(self.backend, missing_keys)
        logged_ceilings = self.resumed_log.known_ceilings if self.resumed_log else {}
        new_records = [
            LogRecord("known_ceiling", make_known_ceiling_record(each))
            for key, each in self.known_ceilings.items()
            if key not in logged_ceilings
        ]
        return RowsStrategy(setup, records=new_records)


def find_known_ceilings(backend: Backend, needed_keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], Rate]:
    """Return the known ceilings for the pairs of dtype and regime in ``needed_keys``. A ceiling is known if it was
    measured on this device, or if users contributed it for a device of the same model. Warn about each pair without a
    known ceiling.
    """
    from mamf.contribution.known_ceilings import find_measured_peak

    known_ceilings: dict[tuple[str, str], Rate] = {}
    for dtype, regime in needed_keys:
        try:
            ceiling = find_measured_peak(backend, dtype, regime)
            known_ceilings[ceiling.dtype, regime] = ceiling
        except MamfError as error:
            warn(f"rows in {regime} show no MAMFU, their share of the matmul ceiling: {error}")
    return known_ceilings
