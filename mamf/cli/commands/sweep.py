"""``mamf sweep``: measure shapes, keep a run log, print the best."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial

from mamf.backend import Backend
from mamf.ceilings.roof import require_same_device
from mamf.cli.commands.kernels_sweep import KernelsSession
from mamf.cli.interruption import Interruption
from mamf.cli.printing import say_memory
from mamf.cli.reading import read_roofs
from mamf.cli.resuming import Resumed, require_same_kernels
from mamf.cli.session import measure
from mamf.cli.terminal import say
from mamf.engine.estimate import estimate_seconds, probe_flops
from mamf.engine.strategies.shapes import Sweep, measured_shapes, operand_bytes
from mamf.errors import UnsupportedError, UsageError
from mamf.kernel import AnyKernel
from mamf.kinds.kind import View
from mamf.limits import count_values, require_known, require_steps
from mamf.measurement import Measurement
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.operation import problem_for
from mamf.operations.matmul.selection import kernel_for
from mamf.operations.matmul.shapes import LAYOUT_OF, PRESETS, MatmulShape, matmul_grid, parse_range
from mamf.plans import MATMUL, SHUFFLED, SWEEP, Plan, SweepOptions
from mamf.plugins.discovery import is_path, operation

_DEFAULT_SIZE = 4096


def _sizes_from(options: argparse.Namespace) -> dict[str, Sequence[int]]:
    """The sizes by dimension. Raises UsageError for an empty or backward range, and for more steps than a run
    may have.
    """
    found: dict[str, Sequence[int]] = {}
    for name in "mnk":
        if bounds := getattr(options, f"{name}_range"):
            found[name] = parse_range(*bounds)
        elif sizes := getattr(options, name):
            found[name] = sizes
    if options.shapes and found:
        raise UsageError("--shapes names whole shapes: leave the sizes of M, N and K out")
    require_steps(*map(count_values, found.values()), len(options.regime or "1"))
    return found


def named_shapes(options: argparse.Namespace) -> dict[MatmulShape, str]:
    """The products of the preset with the names of their layers; sizes of M are its tokens."""
    if options.preset is None:
        if options.product is not None:
            raise UsageError("--product selects a pass of a --preset: name one")
        return {}
    sizes = _sizes_from(options)
    if options.shapes or sizes.keys() - {"m"}:
        raise UsageError("--preset names whole layers: only --m, their tokens, can be combined with it")
    require_known(("preset of matmul (moe is one of --operation grouped)", options.preset, PRESETS))
    return PRESETS[options.preset].shapes(options.product or "forward", sizes.get("m"))


def shapes_from(options: argparse.Namespace) -> tuple[MatmulShape, ...]:
    """The shapes to measure. Raises UsageError for an empty or backward range."""
    if named := named_shapes(options):
        return tuple(named)
    sizes = _sizes_from(options)
    return tuple(dict.fromkeys(options.shapes or matmul_grid(*(sizes.get(name, [_DEFAULT_SIZE]) for name in "mnk"))))


def problem_from(options: argparse.Namespace, backend: Backend) -> MatmulProblem:
    """The problem, with defaults for options that are not given."""
    names = (field.name for field in fields(MatmulProblem))
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    usual = LAYOUT_OF.get(getattr(options, "product", None) or "forward")
    return problem_for(backend, **{"layout": usual, **given})


def plan_from(options: argparse.Namespace, backend: Backend, kernel: str) -> Plan:
    """The plan from the options."""
    swept = {
        "order": options.order,
        "warmup_launches": options.num_warmup_iterations,
        "timed_launches": options.num_iterations,
        "reference": options.reference,
        "reference_every": options.reference_every,
    }
    return Plan(
        SWEEP,
        MATMUL,
        (problem_from(options, backend),),
        (kernel,),
        shapes_from(options),
        tuple(dict.fromkeys(options.regime or Plan.regimes)),
        options.precision or Plan.precision,
        options.time_limit,
        options.budget,
        layers=tuple(named_shapes(options).values()),
        options=replace(SweepOptions(SHUFFLED), **{name: each for name, each in swept.items() if each is not None}),
    )


def run(options: argparse.Namespace) -> int:
    shapes_from(options)  # reports wrong shapes before a device is opened
    return measure(options, partial(_SweepSession, options))


class _SweepSession(KernelsSession):
    """Measures one matmul kernel over a list of shapes."""

    def __init__(self, options: argparse.Namespace, interruption: Interruption, resumed: Resumed | None) -> None:
        self.roofs = read_roofs(options)
        super().__init__(operation(MATMUL), options, interruption, resumed)
        if self.roofs is not None:
            info = self.backend.info
            require_same_device((self.roofs.device, self.roofs.uuid_hash), (info.name, info.uuid_hash))

    def opened_kernels(self) -> list[tuple[str, AnyKernel]]:
        before, backend = self.before, self.backend
        problem = before.problem if before else problem_from(self.options, backend)
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
        return plan_from(self.options, self.backend, self.kernels[0][0])

    def strategy(self) -> Sweep:
        (_, kernel), *_ = self.kernels
        return Sweep(self.plan, kernel, self.backend, self.held)  # type: ignore[arg-type]

    def counts(self, row: Measurement) -> bool:
        return self.is_of_step(row)

    def dry_run(self) -> int:
        plan, backend, ((_, kernel),) = self.plan, self.backend, self.kernels
        steps = plan.steps(self.held)
        needed = max(operand_bytes(plan, shape, backend.info.cache_bytes) for shape in measured_shapes(plan))
        flops = probe_flops(kernel, plan.problem, backend)  # type: ignore[arg-type]
        seconds = estimate_seconds(plan, steps, backend, flops)
        say(f"device: {backend.info.name} ({backend.name}:{backend.index}), {kernel.name} {plan.problem.dtype}")
        say(f"shapes: {len(plan.shapes)}, in {', '.join(plan.regimes)}: {len(steps)} to measure")
        say_memory(needed, "the largest", backend)
        say(f"time: about {seconds:.0f} s, estimated from {flops / 1e12:.3g} TFLOPS of a square product")
        return 0

    def label(self) -> str:
        return f"{self.plan.problem.dtype}-{'-'.join(self.plan.regimes)}"

    def view(self) -> View:
        return replace(super().view(), roofs=self.roofs)
