"""The options that make up a plan of products, and what of it a resumed run repeats."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace

from mamf.backend import Backend
from mamf.cli.options import bound, duration, index, shape, share, size
from mamf.errors import UsageError
from mamf.kernel import DATA
from mamf.limits import count_values, require_known, require_steps
from mamf.operations.matmul.kernel import LAYOUTS, MatmulProblem
from mamf.operations.matmul.operation import problem_for
from mamf.operations.matmul.presets import LAYOUT_OF, PRESETS
from mamf.operations.matmul.shapes import MatmulShape, matmul_grid, parse_range
from mamf.plans import MATMUL, ORDERS, SHUFFLED, SWEEP, Plan, SweepOptions
from mamf.regime_names import NAMES

_DEFAULT_SIZE = 4096


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("shapes", "C[M,N] = A[M,K] @ B[K,N]; a dimension not given is 4096")
    for name in "mnk":
        either = group.add_mutually_exclusive_group()
        either.add_argument(f"--{name}", type=size, nargs="+", metavar=name.upper(), help=f"sizes of {name.upper()}")
        either.add_argument(
            f"--{name}-range",
            type=bound,
            nargs=3,
            metavar=("START", "STOP", "STEP"),
            help="STOP is excluded; a START of 0 means STEP",
        )
    group.add_argument(
        "--shapes", type=shape, nargs="+", metavar="MxNxK", help="these shapes, in place of sizes of M, N and K"
    )
    group.add_argument(
        "--preset", metavar="NAME", help=f"linear layers of known models ({', '.join(PRESETS)}); --m are their tokens"
    )
    group.add_argument(
        "--product", choices=list(LAYOUT_OF), help="of a preset's layers: each has its own layout (default: forward)"
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
        "--dtype",
        help="bfloat16, float16, float32, tf32, float64, fp8, float8_e5m2, int8; formats with scales: fp8_rowwise, "
        "mxfp8, nvfp4, ... (default: the device's)",
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
    group.add_argument("--regime", choices=list(NAMES), nargs="+", help="how samples are taken (default: burst)")
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


def _sizes_from(options: argparse.Namespace) -> dict[str, Sequence[int]]:
    """The sizes asked for by dimension. Raises UsageError for an empty or backward range, and for more steps than a run
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
    """The products of the preset asked for, each with the layer that it is of; sizes of M are its tokens."""
    if options.preset is None:
        if options.product is not None:
            raise UsageError("--product is of the layers of a --preset")
        return {}
    sizes = _sizes_from(options)
    if options.shapes or sizes.keys() - {"m"}:
        raise UsageError("--preset names whole layers: only --m, their tokens, can be given with it")
    require_known(("preset of matmul (moe is one of --operation grouped)", options.preset, PRESETS))
    return PRESETS[options.preset].shapes(options.product or "forward", sizes.get("m"))


def shapes_from(options: argparse.Namespace) -> tuple[MatmulShape, ...]:
    """The shapes asked for. Raises UsageError for an empty or backward range."""
    if named := named_shapes(options):
        return tuple(named)
    sizes = _sizes_from(options)
    return tuple(dict.fromkeys(options.shapes or matmul_grid(*(sizes.get(name, [_DEFAULT_SIZE]) for name in "mnk"))))


def problem_from(options: argparse.Namespace, backend: Backend) -> MatmulProblem:
    """The product asked for; what is not asked for is the default."""
    names = (field.name for field in fields(MatmulProblem))
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    usual = LAYOUT_OF.get(getattr(options, "product", None) or "forward")
    return problem_for(backend, **{"layout": usual, **given})


def plan_from(options: argparse.Namespace, backend: Backend, kernel: str) -> Plan:
    """The plan asked for."""
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
