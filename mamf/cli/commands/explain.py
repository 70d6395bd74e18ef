"""Implement the command ``mamf explain``: explain why a matmul reaches fewer FLOPS than the device's datasheet
promises.

The command measures the matmul for about half a minute, in short bursts and under sustained load, with several kinds of
values in the matrices.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mamf.backend import Backend
from mamf.cli.planning import make_requested_operation
from mamf.cli.session import Session, run_session
from mamf.cli.terminal import (
    add_device_options,
    add_run_options,
    add_shared_options,
    choose_note_stream,
    print_line,
    warn,
)
from mamf.errors import UsageError
from mamf.kernel import DATA_CHOICES
from mamf.measurement import find_rate
from mamf.operation import MeasurementRequest, make_operation_plan
from mamf.plans import BURST, CEILING_REGIMES, EXPLAIN, Plan

if TYPE_CHECKING:
    from mamf.ceilings.ceiling import Ceiling
    from mamf.logs.run_log import RunLog

EXAMPLES = """examples:
  mamf explain --ceiling find.jsonl                         the best shape in this log of 'mamf find'
  mamf explain                                              the ceiling that mamf stored (see 'mamf peak')
  mamf explain --shape 8192x8192x8192 --dtype float16 --picture waterfall.png
"""
_DEFAULT_BUDGET_SECONDS = 30.0
#: The matmul that ``mamf explain`` explains: its problem (dtype, layout and so on), its shape, and the kernel's name as
#: the command line accepts it.
MatmulToExplain = tuple[Any, Any, str]


def add_options(parser: argparse.ArgumentParser) -> None:
    matmul_group = parser.add_argument_group("matmul to explain")
    add_shared_options(
        matmul_group,
        "--ceiling",
        nargs=None,
        help="log of 'mamf find'; mamf explains its burst ceiling; cannot be combined with --shape (default: the log "
        "of the ceiling that mamf stored, see 'mamf peak')",
    )
    add_shared_options(
        matmul_group,
        "--shape",
        help="shape of the matmul to explain, such as 4096x4096x4096 (default: the shape of the burst ceiling, see "
        "--ceiling)",
    )
    add_shared_options(matmul_group, "--dtype", nargs=None)
    add_shared_options(
        matmul_group,
        "--kernel",
        nargs=1,
        default_text="the kernel of the burst ceiling; with --shape: torch.mm, scaled_mm or int_mm, depending on the "
        "dtype",
    )
    add_run_options(parser, budget_default="30s")
    add_device_options(parser)
    add_shared_options(parser, "--picture", "--overwrite")
    add_shared_options(parser, "--format", "--top", "--wide")


def run_with_options(options: argparse.Namespace) -> int:
    from mamf.report.charts.picture import check_image_path

    if options.picture:
        check_image_path(options.picture, options.overwrite)
    if options.ceiling and options.shape:
        raise UsageError("--ceiling cannot be combined with --shape, because each of them gives a shape: use one")
    return run_session(options, ExplainSession, MeasurementRequest(make_requested_operation()))


class ExplainSession(Session):
    """A run of ``mamf explain``: it measures one matmul under several conditions, and compares its FLOPS with the
    datasheet.
    """

    kind = EXPLAIN

    @cached_property
    def matmul_to_explain(self) -> MatmulToExplain:
        """The matmul to explain: the shape of --shape or, without --shape, the fastest matmul in the log of --ceiling.
        Without both options, it is the fastest matmul that the last ``mamf find`` on this device found.
        """
        from mamf.logs.ceiling_cache import find_cached_ceiling
        from mamf.operations.matmul.operation import choose_matmul_kernel, get_installed_kernel, make_problem
        from mamf.operations.matmul.shapes import MatmulShape

        options, backend = self.options, self.backend
        kernel_name = options.kernel[0] if options.kernel else None
        problem = make_problem(backend, options.dtype)
        if options.shape:
            return problem, MatmulShape.parse(options.shape), kernel_name or choose_matmul_kernel(backend, problem).name
        ceiling_path, dtype = options.ceiling, options.dtype and problem.dtype
        ceiling = (
            _read_burst_ceiling(ceiling_path, dtype, backend)
            if ceiling_path
            else find_cached_ceiling(backend.info, problem, BURST)
        )
        if ceiling is None:
            raise UsageError(
                f"'mamf find' has measured no {problem.dtype} ceiling of this device: run 'mamf find', or give a shape "
                "with --shape"
            )
        if not ceiling_path:
            warn(
                f"explaining the matmul {ceiling.shape} by {ceiling.kernel}, the best result of 'mamf find' on "
                f"{ceiling.date[:10]}"
            )
        return (
            replace(ceiling.problem, data=DATA_CHOICES[0]),
            ceiling.shape,
            kernel_name or get_installed_kernel(ceiling.kernel).name,
        )

    def list_requested_kernels(self) -> Sequence[str]:
        return [self.matmul_to_explain[2]]

    def make_new_plan(self) -> Plan:
        problem, shape, kernel = self.matmul_to_explain
        return make_operation_plan(
            self.operation,
            [kernel],
            [replace(problem, data=data) for data in DATA_CHOICES],
            [shape],
            CEILING_REGIMES,
            EXPLAIN,
            budget_seconds=self.options.budget or _DEFAULT_BUDGET_SECONDS,
        )

    def print_report(self, log: RunLog) -> int:
        from mamf.kinds.registry import get_kind
        from mamf.report.charts.picture import draw_figure, save_figure

        exit_code = super().print_report(log)
        if self.options.picture and log.measurements:
            save_figure(draw_figure(get_kind(log.plan).make_chart(log)), self.options.picture, self.options.overwrite)
            print_line(f"figure: {self.options.picture}", choose_note_stream(self.options))
        return exit_code


def _read_burst_ceiling(path: Path, dtype: str | None, backend: Backend) -> Ceiling:
    """Return the burst ceiling of ``dtype`` from the log at ``path``. If ``dtype`` is None, return the first burst
    ceiling in the log.

    Raises UsageError if the log has no burst ceiling, or none of this dtype.
    """
    from mamf.ceilings.ceiling import require_usable_ceiling
    from mamf.logs.run_log import read_run_log

    ceilings = read_run_log(path).matmul_ceilings
    dtypes = [name for name, regime in ceilings if regime == BURST]
    wanted_dtype = dtype or next(iter(dtypes), "")
    ceiling = find_rate(ceilings, wanted_dtype, BURST)
    if ceiling is None:
        remedy = f"use --dtype {' or '.join(dtypes)}" if dtypes else "give a log of 'mamf find'"
        raise UsageError(f"{path} has no burst ceiling{f' of {wanted_dtype}' if wanted_dtype else ''}: {remedy}")
    require_usable_ceiling(ceiling, backend)
    return ceiling
