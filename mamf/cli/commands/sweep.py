"""``mamf sweep``: measure shapes, keep a run log, print the best."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from mamf.ceilings.roof import require_same_device
from mamf.cli.planning import make_plan
from mamf.cli.reading import read_roofs
from mamf.cli.resuming import require_same_kernels
from mamf.cli.session import Session, run_kernels
from mamf.cli.terminal import say, say_memory
from mamf.engine.estimate import estimate_seconds, probe_flops
from mamf.engine.strategies.shapes import measured_shapes, operand_bytes
from mamf.errors import UnsupportedError
from mamf.kernel import AnyKernel
from mamf.kinds.kind import View
from mamf.operation import Request
from mamf.operations.matmul.selection import kernel_for
from mamf.plans import MATMUL, SHUFFLED, Plan, SweepOptions
from mamf.plugins.discovery import is_path, operation
from mamf.regime_names import NAMES

#: Options that are SweepOptions, by field.
_HOW = {
    "order": "order",
    "warmup_launches": "num_warmup_iterations",
    "timed_launches": "num_iterations",
    "reference_every": "reference_every",
}


def run(options: argparse.Namespace) -> int:
    return run_kernels(options, _SweepSession, operation(MATMUL))


class _SweepSession(Session):
    """Measures one matmul kernel over a list of shapes."""

    def __init__(self, request: Request, options: argparse.Namespace, *opened: Any) -> None:
        self.roofs = read_roofs(options)
        super().__init__(request, options, *opened)
        if self.roofs is not None:
            info = self.backend.info
            require_same_device((self.roofs.device, self.roofs.uuid_hash), (info.name, info.uuid_hash))

    def open_kernels(self) -> list[tuple[str, AnyKernel]]:
        before, backend = self.before, self.backend
        (problem,) = before.problems if before else self.request.problems(backend)
        name = self.options.kernel or (before.kernels[0] if before else "auto")
        kernel = kernel_for(backend, problem, name)
        # Earlier logs name a kernel that was loaded by path as it calls itself.
        planned = name if is_path(before.kernels[0] if before else name) else kernel.name
        if before:
            require_same_kernels(self.options, before.kernels, [planned])
        if reason := kernel.unsupported(backend, problem):
            raise UnsupportedError(reason)
        return [(planned, kernel)]

    def new_plan(self) -> Plan:
        given = {field: getattr(self.options, option) for field, option in _HOW.items()}
        given["reference"] = self.options.reference and self.of.parse_shape(self.options.reference)
        how = replace(SweepOptions(SHUFFLED), **{field: each for field, each in given.items() if each is not None})
        return make_plan(self.request, self.options, self.backend, [name for name, _ in self.kernels], NAMES, how)

    def say_plan(self) -> None:
        plan, backend, ((_, kernel),) = self.plan, self.backend, self.kernels
        steps = self.driven.steps
        needed = max(operand_bytes(plan, shape, backend.info.cache_bytes) for shape in measured_shapes(plan))
        flops = probe_flops(kernel, plan.problem, backend)  # type: ignore[arg-type]
        seconds = estimate_seconds(plan, steps, backend, flops)
        say(f"device: {backend.info.name} ({backend.name}:{backend.index}), {kernel.name} {plan.problem.dtype}")
        say(f"shapes: {len(plan.shapes)}, in {', '.join(plan.regimes)}: {len(steps)} to measure")
        say_memory(needed, "the largest", backend)
        say(f"time: about {seconds:.0f} s, estimated from {flops / 1e12:.3g} TFLOPS of a square product")

    def label(self) -> str:
        return f"{self.plan.problem.dtype}-{'-'.join(self.plan.regimes)}"

    def view(self) -> View:
        return replace(super().view(), roofs=self.roofs)
