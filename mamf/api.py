"""What the command line does, as calls for programs and notebooks.

Every measuring call streams its rows, may be broken off at any moment, and keeps a run log where ``log`` names a file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mamf.backend import Backend
from mamf.ceilings.ceiling import Ceiling
from mamf.ceilings.finding import Find
from mamf.ceilings.grid import plan_for
from mamf.ceilings.share import Ceilings
from mamf.discovery import KERNELS, kernel, kernel_for, kernel_of, open_backend, operation, registered
from mamf.dtypes import DTYPES, canonical_name
from mamf.errors import DeviceError, RunLogError, UnavailableError, UnsupportedError
from mamf.kernel import AnyKernel
from mamf.logs.recording import Recording
from mamf.logs.records import ceiling_record
from mamf.logs.run_log import read_run_log
from mamf.measurement import Measurement
from mamf.operation import Operation
from mamf.operations.attention.operation import Attention
from mamf.operations.attention.report import attention_summary_record
from mamf.operations.attention.shapes import AttentionShape
from mamf.operations.matmul.kernel import MatmulKernel, MatmulProblem
from mamf.operations.matmul.shapes import MatmulShape
from mamf.plans import DEFAULT_BUDGET_SECONDS, KernelsPlan, Plan
from mamf.report import find_summary_record, summary_record
from mamf.report.kernels import kernels_summary_record
from mamf.strategies.kernels import KernelsSweep
from mamf.strategies.shapes import Sweep

#: Called with each measurement as it is made.
OnRow = Callable[[Measurement], object]


def problem_for(
    backend: Backend,
    dtype: str | None = None,
    out_dtype: str | None = None,
    layout: str = "nt",
    data: str = "normal",
    seed: int = 0,
    fast_accumulation: bool = False,
) -> MatmulProblem:
    """A problem with the device's defaults filled in. Raises UnknownNameError for names that mean nothing."""
    operand = backend.resolve_dtype(canonical_name(dtype or backend.default_dtype))
    output = out_dtype and (out_dtype if out_dtype in DTYPES else backend.resolve_dtype(canonical_name(out_dtype)))
    return MatmulProblem(operand, output or DTYPES[operand].default_output, layout, data, seed, fast_accumulation)


def kernels_for(backend: Backend, problem: MatmulProblem, names: Sequence[str] | None = None) -> list[MatmulKernel]:
    """The kernels that a search for a ceiling tries: the named ones, or the default and all that are tried unasked.

    Raises UnavailableError, UnknownNameError or UnsupportedError when a named one cannot be used.
    """
    if names is None:
        default = kernel_for(backend, problem)
        others = (kernel(name) for name in sorted(registered(KERNELS)))
        usable = [other for other in others if other.is_tried_unasked and is_usable(other, backend, problem)]
        return [default, *(other for other in usable if other.name != default.name)]
    chosen = [kernel_for(backend, problem, name) for name in dict.fromkeys(names)]
    for each in chosen:
        reason = each.unsupported(backend, problem)
        if reason:
            raise UnsupportedError(reason)
    return chosen


def is_usable(candidate: MatmulKernel, backend: Backend, problem: MatmulProblem) -> bool:
    return candidate.unavailable(backend) is None and candidate.unsupported(backend, problem) is None


def find(
    dtype: str | None = None,
    *,
    problem: MatmulProblem | None = None,
    regime: str = "burst",
    backend: str | Backend = "auto",
    device: int = 0,
    kernels: Sequence[str] | None = None,
    precision: float = 0.003,
    budget_seconds: float = DEFAULT_BUDGET_SECONDS,
    on_row: OnRow | None = None,
    log: str | Path | None = None,
) -> Ceiling:
    """The ceiling of a device in a regime (burst or sustained), for a dtype or a whole ``problem``.

    ``on_row`` is called with each measurement as it is made. Raises UnavailableError, UnknownNameError or
    UnsupportedError for what cannot be measured, and DeviceError when nothing was confirmed within the budget.
    """
    opened = opened_backend(backend, device)
    problem = problem or problem_for(opened, dtype)
    chosen = kernels_for(opened, problem, kernels)
    regimes = tuple(dict.fromkeys(("burst", regime)))
    plan = plan_for(opened, problem, chosen, regimes=regimes, budget_seconds=budget_seconds, precision=precision)
    search = Find(plan, chosen, opened)
    recording = Recording(log, opened, chosen[0].name, plan)
    rows = recording.of(
        search.results(),
        lambda taken, *end: find_summary_record(taken, search.ceilings, *end),
        lambda: [("ceiling", ceiling_record(ceiling)) for ceiling in search.ceilings.values()],
        left=lambda: len(set(regimes) - search.ceilings.keys()),
    )
    for row in rows:
        if on_row is not None:
            on_row(row)
    if regime not in search.ceilings:
        raise DeviceError(f"no {regime} ceiling was confirmed in {budget_seconds:.0f} s: give it more")
    return search.ceilings[regime]


def load_ceiling(path: str | Path, regime: str = "burst") -> Ceiling:
    """The ceiling that a run log of ``mamf find`` holds. Raises RunLogError when it has none of this regime."""
    log = read_run_log(Path(path))
    if regime not in log.ceilings:
        held = ", ".join(log.ceilings) or "none"
        raise RunLogError(f"{path} holds no {regime} ceiling (it holds: {held}); measure one with 'mamf find'")
    return log.ceilings[regime]


def sweep(
    shapes: Iterable[MatmulShape | str],
    *,
    problem: MatmulProblem | None = None,
    dtype: str | None = None,
    regime: str = "burst",
    backend: str | Backend = "auto",
    device: int = 0,
    kernel: str = "auto",
    precision: float = 0.003,
    budget_seconds: float | None = None,
    log: str | Path | None = None,
) -> Iterator[Measurement]:
    """Measure products one by one, in an order shuffled by the problem's seed; shapes may be text, ``4096x4096x4096``.

    ``dtype`` None is the device's own default (bfloat16 on accelerators). Raises UnavailableError, UnknownNameError or
    UnsupportedError before anything is allocated; afterwards whatever goes wrong is the status of a measurement.
    """
    opened = opened_backend(backend, device)
    problem = problem or problem_for(opened, dtype)
    wanted = tuple(shape if isinstance(shape, MatmulShape) else MatmulShape.parse(shape) for shape in shapes)
    plan = Plan(wanted, problem, (regime,), precision=precision, budget_seconds=budget_seconds)
    chosen = kernel_for(opened, problem, kernel)
    running = Sweep(plan, chosen, opened)
    return Recording(log, opened, chosen.name, plan).of(
        running.results(),
        lambda taken, status, reason, seconds: summary_record(taken, status, reason, seconds, running.left_out),
        left=lambda: running.left_out,
    )


def measure_kernels(
    of: str,
    shapes: Iterable[Any] | None = None,
    *,
    problems: Iterable[Any] | None = None,
    kernels: Sequence[str] | None = None,
    regimes: Sequence[str] = ("burst",),
    ceilings: Ceilings | None = None,
    backend: str | Backend = "auto",
    device: int = 0,
    precision: float = 0.003,
    budget_seconds: float | None = None,
    log: str | Path | None = None,
) -> Iterator[Measurement]:
    """Measure kernels of any operation but matmul, ``of`` its name: all that are available, or those named.

    Shapes may be the operation's text; without shapes and problems its own defaults are taken. ``ceilings`` (by dtype
    and regime) make shares: the product of each is measured beside its rows. Raises as ``sweep`` does.
    """
    opened, found = opened_backend(backend, device), operation(of)
    wanted = tuple(found.parse_shape(each) if isinstance(each, str) else each for each in shapes or ())
    asked = tuple(problems or (found.problem_for(opened, {}),))
    chosen = available_kernels(found, opened, kernels)
    names = tuple(each.name for each in chosen)
    plan = KernelsPlan(
        of, wanted or tuple(found.default_shapes(opened)), asked, names, tuple(regimes), precision,
        budget_seconds=budget_seconds,
    )  # fmt: skip
    known = dict(ceilings or {})
    references = {ceiling.kernel: kernel(ceiling.kernel) for ceiling in known.values()}
    running = KernelsSweep(plan, chosen, opened, known, references)
    return Recording(log, opened, " ".join(names), plan).of(
        running.results(),
        functools.partial(_summary_of_kernels, running),
        left=lambda: running.left_out,
    )


def attention(shapes: Iterable[AttentionShape | str] | None = None, **options: Any) -> Iterator[Measurement]:
    """Measure attention kernels: ``measure_kernels("attention", ...)``."""
    return measure_kernels("attention", shapes, **options)


def available_kernels(of: Operation[Any, Any], backend: Backend, names: Sequence[str] | None = None) -> list[AnyKernel]:
    """The named kernels of an operation, or all that can be used here. Raises UnavailableError for a named one."""
    if names is None:
        every = [kernel_of(of, name) for name in sorted(registered(of.kernel_group))]
        return [each for each in every if each.unavailable(backend) is None]
    chosen = [kernel_of(of, name) for name in dict.fromkeys(names)]
    for each in chosen:
        reason = each.unavailable(backend)
        if reason is not None:
            raise UnavailableError(f"kernel {each.name} is not available on {backend.name}: {reason}")
    return chosen


def opened_backend(backend: str | Backend, device: int) -> Backend:
    return open_backend(backend, device) if isinstance(backend, str) else backend


def _summary_of_kernels(
    running: KernelsSweep, taken: list[Measurement], status: str, reason: str, seconds: float
) -> dict[str, Any]:
    """The last record of the log: attention's names its shares."""
    end = (status, reason, seconds, running.left_out)
    if running.plan.operation == Attention.name:
        return attention_summary_record(taken, running.ceilings, *end)
    return kernels_summary_record(taken, *end)
