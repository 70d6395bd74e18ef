"""Sweep, find and ceilings as calls, for programs and notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mamf.backend import Backend
from mamf.ceilings.ceiling import Ceiling
from mamf.ceilings.finding import Find
from mamf.ceilings.grid import plan_for
from mamf.discovery import KERNELS, kernel, kernel_for, open_backend, registered
from mamf.dtypes import DTYPES, canonical_name
from mamf.errors import DeviceError, RunLogError, UnsupportedError
from mamf.logs.run_log import read_run_log
from mamf.measurement import Measurement
from mamf.operations.matmul.kernel import MatmulKernel, MatmulProblem
from mamf.operations.matmul.shapes import MatmulShape
from mamf.plans import DEFAULT_BUDGET_SECONDS, Plan
from mamf.strategies.shapes import Sweep


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
    regime: str = "burst",
    backend: str | Backend = "auto",
    device: int = 0,
    kernels: Sequence[str] | None = None,
    out_dtype: str | None = None,
    layout: str = "nt",
    data: str = "normal",
    seed: int = 0,
    fast_accumulation: bool = False,
    precision: float = 0.003,
    budget_seconds: float = DEFAULT_BUDGET_SECONDS,
) -> Ceiling:
    """The ceiling of a device for a dtype in a regime (burst or sustained).

    Raises UnavailableError, UnknownNameError or UnsupportedError for what cannot be measured, and DeviceError when
    nothing was confirmed within the budget.
    """
    opened = open_backend(backend, device) if isinstance(backend, str) else backend
    problem = problem_for(opened, dtype, out_dtype, layout, data, seed, fast_accumulation)
    chosen = kernels_for(opened, problem, kernels)
    regimes = tuple(dict.fromkeys(("burst", regime)))
    plan = plan_for(opened, problem, chosen, regimes=regimes, budget_seconds=budget_seconds, precision=precision)
    search = Find(plan, chosen, opened)
    for _ in search.results():
        pass
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
    shapes: Iterable[MatmulShape],
    *,
    backend: str | Backend = "auto",
    device: int = 0,
    regime: str = "burst",
    kernel: str = "auto",
    dtype: str | None = None,
    out_dtype: str | None = None,
    layout: str = "nt",
    data: str = "normal",
    seed: int = 0,
    fast_accumulation: bool = False,
    precision: float = 0.003,
    budget_seconds: float | None = None,
) -> Iterator[Measurement]:
    """Measure shapes one by one, in an order shuffled by ``seed``.

    ``dtype`` None is the device's own default (bfloat16 on accelerators). Raises UnavailableError, UnknownNameError or
    UnsupportedError before anything is allocated; afterwards whatever goes wrong is the status of a measurement.
    """
    opened = open_backend(backend, device) if isinstance(backend, str) else backend
    problem = problem_for(opened, dtype, out_dtype, layout, data, seed, fast_accumulation)
    plan = Plan(tuple(shapes), problem, (regime,), precision=precision, budget_seconds=budget_seconds)
    return Sweep(plan, kernel_for(opened, problem, kernel), opened).results()
