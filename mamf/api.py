"""The sweep as one call, for programs and notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mamf.backend import Backend
from mamf.discovery import kernel_for, open_backend
from mamf.dtypes import DTYPES, canonical_name
from mamf.kernel import MatmulProblem
from mamf.measure import Measurement
from mamf.shapes import MatmulShape
from mamf.sweep import Plan, Sweep


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
