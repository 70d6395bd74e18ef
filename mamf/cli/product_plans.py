"""The plan of a sweep of matmul from its options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace

from mamf.backend import Backend
from mamf.errors import UsageError
from mamf.limits import count_values, require_known, require_steps
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.operation import problem_for
from mamf.operations.matmul.shapes import LAYOUT_OF, PRESETS, MatmulShape, matmul_grid, parse_range
from mamf.plans import MATMUL, SHUFFLED, SWEEP, Plan, SweepOptions

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
