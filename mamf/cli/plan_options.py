"""The options that make up a plan, and what a resumed run may change of it."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields, replace
from typing import Any

from mamf.api import problem_for
from mamf.backend import Backend
from mamf.cli.options import duration, index, shape, share, size
from mamf.cli.session import require_same
from mamf.errors import LogMismatchError, UsageError
from mamf.kernel import DATA, LAYOUTS
from mamf.regimes import REGIMES
from mamf.run_log import RunLog
from mamf.shapes import MatmulShape, matmul_grid, parse_range
from mamf.sweeping import ORDERS, Plan

_DEFAULT_SIZE = 4096
# What a resumed run may change: nothing in these decides a figure.
_FREE_TO_CHANGE = {"budget_seconds"}


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("shapes", "C[M,N] = A[M,K] @ B[K,N]; a dimension not given is 4096")
    for name in "mnk":
        either = group.add_mutually_exclusive_group()
        either.add_argument(f"--{name}", type=size, nargs="+", metavar=name.upper(), help=f"sizes of {name.upper()}")
        either.add_argument(
            f"--{name}-range",
            type=int,
            nargs=3,
            metavar=("START", "STOP", "STEP"),
            help="STOP is excluded; a START of 0 means STEP",
        )
    group.add_argument(
        "--shapes", type=shape, nargs="+", metavar="MxNxK", help="these shapes, in place of sizes of M, N and K"
    )
    group.add_argument(
        "--order", choices=ORDERS, help="shuffled by the seed, so drift cannot pose as a trend (default), or as given"
    )
    group.add_argument(
        "--reference", type=shape, metavar="MxNxK", help="measure this shape again and again, to show drift"
    )
    group.add_argument(
        "--reference-every", type=size, metavar="COUNT", help="shapes between two visits of it (default: 100)"
    )


def add_problem_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("product")
    group.add_argument(
        "--dtype", help="bfloat16, float16, float32, tf32, float64, fp8, float8_e5m2, int8, ... (default: the device's)"
    )
    group.add_argument("--out-dtype", help="dtype of C (default: as A; bfloat16 for 8-bit floats, int32 for int8)")
    group.add_argument(
        "--layout", choices=LAYOUTS, help="how A and B lie in memory, n as multiplied, t transposed (default: nt)"
    )
    group.add_argument("--data", choices=DATA, help="what the operands hold (default: normal)")
    group.add_argument("--seed", type=index, help="of the data and the order (default: 0)")
    group.add_argument(
        "--kernel", help="torch.mm, scaled_mm, int_mm or package.module:Class (default: the one for the dtype)"
    )
    group.add_argument(
        "--fast-accumulation",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="8-bit floats: fewer bits in partial sums",
    )


def add_measuring_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measuring")
    group.add_argument("--regime", choices=list(REGIMES), nargs="+", help="how samples are taken (default: burst)")
    group.add_argument(
        "--precision", type=share, help="half-width of the median's 95%% interval to reach (default: 0.3%%)"
    )
    group.add_argument(
        "--time-limit", type=duration, help="per shape; after it 3 launches suffice (default: burst 1s, sustained 6s)"
    )
    group.add_argument(
        "--num-warmup-iterations", type=index, metavar="COUNT", help="classic: untimed launches (default: 50)"
    )
    group.add_argument("--num-iterations", type=size, metavar="COUNT", help="classic: timed launches (default: 100)")


def shapes_from(options: argparse.Namespace) -> tuple[MatmulShape, ...]:
    """The shapes asked for, or none when no dimension is given. Raises UsageError for an empty or backward range."""
    sizes: dict[str, list[int] | None] = {}
    for name in "mnk":
        bounds = getattr(options, f"{name}_range")
        sizes[name] = parse_range(*bounds) if bounds else getattr(options, name)
    if options.shapes and any(sizes.values()):
        raise UsageError("--shapes names whole shapes: leave the sizes of M, N and K out")
    if not any(sizes.values()):
        return tuple(dict.fromkeys(options.shapes or ()))
    return tuple(matmul_grid(*(sizes[name] or [_DEFAULT_SIZE] for name in "mnk")))


def plan_from(
    options: argparse.Namespace, shapes: tuple[MatmulShape, ...], backend: Backend, log: RunLog | None
) -> Plan:
    """The plan asked for; what is not asked for is the log's when resuming, else the default.

    Raises LogMismatchError when something asked for is not what the log was measured with.
    """
    before = log.plan if log else None
    if log is not None and not isinstance(before, Plan):
        raise LogMismatchError(f"{log.path} is not of a sweep: resume it with the command that began it")
    assert before is None or isinstance(before, Plan)
    problem_options = {
        name: value
        for name in ("dtype", "out_dtype", "layout", "data", "seed", "fast_accumulation")
        if (value := getattr(options, name)) is not None
    }
    known = {} if before is None else asdict(before.problem)
    problem = problem_for(backend, **known | problem_options)
    asked: dict[str, Any] = {
        "shapes": shapes or None,
        "problem": problem,
        "regimes": options.regime and tuple(dict.fromkeys(options.regime)),
        "order": options.order,
        "precision": options.precision,
        "seconds": options.time_limit,
        "budget_seconds": options.budget,
        "warmup_launches": options.num_warmup_iterations,
        "timed_launches": options.num_iterations,
        "reference": options.reference,
        "reference_every": options.reference_every,
    }
    asked = {name: value for name, value in asked.items() if value is not None}
    if before is None or log is None:
        default = (MatmulShape(_DEFAULT_SIZE, _DEFAULT_SIZE, _DEFAULT_SIZE),)
        return Plan(**{"shapes": default, **asked})
    plan = replace(
        before, budget_seconds=None, **{name: value for name, value in asked.items() if name != "budget_seconds"}
    )
    require_same_plan(log, before, plan)
    return replace(plan, budget_seconds=options.budget)


def require_same_plan(log: RunLog, before: Plan, plan: Plan) -> None:
    for field in fields(Plan):
        if field.name in _FREE_TO_CHANGE:
            continue
        then, now = getattr(before, field.name), getattr(plan, field.name)
        if field.name == "problem":
            for part in fields(then):
                require_same(log, part.name, getattr(then, part.name), getattr(now, part.name))
        elif field.name == "shapes" and then != now:
            raise LogMismatchError(
                f"{log.path} holds another list of shapes; leave the shapes out to go on with its own"
            )
        else:
            require_same(log, field.name, then, now)
