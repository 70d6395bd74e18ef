"""``mamf sweep``: measure shapes, keep a run log, print the best."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from mamf.ceilings.roof import require_same_device
from mamf.cli.interruption import Interruption
from mamf.cli.options import add_device_options, add_output_options, terminal_width
from mamf.cli.plan_options import (
    add_measuring_options,
    add_problem_options,
    add_shape_options,
    kernel_name,
    plan_from,
    shapes_from,
)
from mamf.cli.resuming import require_repeated
from mamf.cli.roofs import add_roof_option, given_roofs
from mamf.cli.session import End, Resumed, Session, add_run_options, measure, say_memory
from mamf.cli.sharing import add_devices_options, led, say_devices
from mamf.cli.terminal import say
from mamf.engine.estimate import estimate_seconds, probe_flops
from mamf.errors import UnsupportedError
from mamf.measurement import Measurement
from mamf.node.sharing import SharedSweep
from mamf.operations.matmul.kernel import MatmulKernel
from mamf.operations.matmul.selection import kernel_for
from mamf.plans import Plan
from mamf.report import FORMATS, render, summary_record
from mamf.strategies.shapes import Sweep, operand_bytes

_EXAMPLES = """examples:
  mamf sweep --m-range 0 20480 256                    79 shapes Mx4096x4096 in burst
  mamf sweep --m 8192 --n 8192 --k 8192 --regime burst sustained
  mamf sweep --m-range 0 20480 256 --regime classic   mamf-finder's protocol
  mamf sweep --preset decode --top all                linear layers of Llama 8B, 1 to 512 tokens
  mamf sweep --preset llama-8b --product grad-weight  as a backward pass multiplies them
  mamf sweep --resume LOG                             go on after Ctrl-C or kill
  mamf sweep --operation NAME --help                  kernels of another operation: what can be asked of it
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "--operation", metavar="NAME", help="one of 'mamf kernels', each with options of its own (default: matmul)"
    )
    add_shape_options(parser)
    add_problem_options(parser)
    add_measuring_options(parser)
    add_device_options(parser)
    add_devices_options(parser)
    parser.add_argument("--led", nargs=2, help=argparse.SUPPRESS)
    add_run_options(parser, budget="stop after so long, for example 5m; the rest can be resumed")
    add_roof_option(parser)
    add_output_options(parser, FORMATS)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    if options.led:
        return led(*options.led)
    return measure(options, partial(_SweepSession, options))


class _SweepSession(Session[Plan]):
    command = "sweep"
    plan_kind = Plan

    def __init__(self, options: argparse.Namespace, interruption: Interruption, resumed: Resumed | None) -> None:
        requested = shapes_from(options)
        self.roofs = given_roofs(options)
        super().__init__(options, interruption, resumed)
        self.plan = plan_from(options, requested, self.backend, self.before)
        if self.devices:
            self.plan = replace(self.plan, reference=self.plan.common())
        if self.roofs is not None:
            info = self.backend.info
            require_same_device((self.roofs.device, self.roofs.uuid_hash), (info.name, info.uuid_hash))
        self.kernel = self._kernel()
        self.held = self.log.held if self.log else set()
        self.rows = self.log.kept if self.log else []
        self.sweep: Sweep | SharedSweep = Sweep(self.plan, self.kernel, self.backend, self.held)
        # A library may have swallowed the exception while it was imported.
        interruption.check()

    def _kernel(self) -> MatmulKernel:
        backend, problem, name = self.backend, self.plan.problem, self.options.kernel
        if self.log:
            held = {"kernel": self.log.header["kernel"]}
            require_repeated(self.options, held, {"kernel": lambda name: kernel_name(backend, problem, name)})
            name = name or held["kernel"]
        kernel = kernel_for(backend, problem, name or "auto")
        if reason := kernel.unsupported(backend, problem):
            raise UnsupportedError(reason)
        return kernel

    def dry_run(self) -> int:
        plan, backend = self.plan, self.backend
        steps = plan.steps(self.held)
        needed = max(operand_bytes(plan, shape, backend.info.cache_bytes) for shape in plan.measured_shapes())
        flops = probe_flops(self.kernel, plan.problem, backend)
        seconds = estimate_seconds(plan, steps, backend, flops)
        say(f"device: {backend.info.name} ({backend.name}:{backend.index}), {self.kernel.name} {plan.problem.dtype}")
        say(f"shapes: {len(plan.shapes)}, in {', '.join(plan.regimes)}: {len(steps)} to measure")
        say_memory(needed, "the largest", backend)
        say_devices(self.devices)
        seconds /= max(len(self.devices), 1)
        say(f"time: about {seconds:.0f} s, judging by {flops / 1e12:.3g} TFLOPS of a square product")
        return 0

    def kernel_name(self) -> str:
        return self.kernel.name

    def label(self) -> str:
        return f"{self.plan.problem.dtype}-{'-'.join(self.plan.regimes)}"

    def count_due(self) -> int:
        return len(self.plan.steps(self.held))

    def measurements(self, on_phase: Callable[[str], None]) -> Iterator[Measurement]:
        sweep = Sweep(self.plan, self.kernel, self.backend, self.held, on_phase)
        self.sweep = self.shared(sweep, self.options.kernel or self.kernel.name)
        return self.sweep.results()

    def left_out(self) -> bool:
        return bool(self.sweep.left_out)

    def summary(self, end: End, elapsed_seconds: float) -> dict[str, Any]:
        left = len(self.plan.steps({row.step for row in self.rows if not row.is_reference}))
        return summary_record(self.rows, end.status, end.reason, elapsed_seconds, left)

    def rendered(self, header: dict[str, Any], summary: dict[str, Any] | None) -> str:
        options = self.options
        return render(options.format, self.rows, header, summary, options.top, terminal_width(options), self.roofs)
