"""The options that make up a plan for attention kernels, and what of it a resumed run repeats."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mamf.backend import Backend
from mamf.cli.kernels_options import add_common_options
from mamf.cli.options import index, share, size
from mamf.cli.terminal import warn
from mamf.limits import require_steps
from mamf.operations.attention.operation import attention_kernel
from mamf.operations.attention.shapes import (
    BACKWARD_COUNTS,
    DIRECTIONS,
    PRESETS,
    AttentionProblem,
    AttentionShape,
    Preset,
)
from mamf.operations.matmul.operation import problem_for
from mamf.plans import KERNEL_REGIMES, SWEEP, Plan

_TOKENS = 16384
# A CPU takes seconds for what an accelerator does in a millisecond.
_TOKENS_OF_CPU = 1024
_DEFAULT = Preset((128,), (1024, 4096, 16384), causal=(False,))
_MASKS = {"yes": (True,), "no": (False,), "both": (False, True)}


def sparsity(text: str) -> float:
    """A share from 0 to below 1: ``0.5`` or ``50%``."""
    return 0.0 if text.strip(" %") in ("0", "0.0") else share(text)


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("shapes", "every option is a list, and the product of all is measured")
    group.add_argument("--preset", choices=list(PRESETS), help="shapes that people compare by; the others override it")
    group.add_argument("--seq-lens", type=size, nargs="+", metavar="S", help="keys (default: 1024 4096 16384)")
    group.add_argument("--query-lens", type=size, nargs="+", metavar="S", help="queries (default: as many as keys)")
    group.add_argument("--head-dims", type=size, nargs="+", metavar="D", help="(default: 128)")
    group.add_argument("--heads", type=size, nargs="+", metavar="H", help="(default: 2048 / head dimension)")
    group.add_argument("--kv-heads", type=size, nargs="+", metavar="H", help="(default: as many as heads)")
    group.add_argument(
        "--batch", type=size, nargs="+", metavar="B", help="(default: 16384 tokens in all, 1024 on a CPU)"
    )
    mask = group.add_mutually_exclusive_group()
    mask.add_argument("--causal", choices=list(_MASKS), nargs="?", const="yes", help="(default: no, or the preset's)")
    mask.add_argument("--no-causal", dest="causal", action="store_const", const="no", help="as --causal no")
    group.add_argument("--window", type=size, nargs="+", metavar="W", help="keys seen before (and after) each query")


def add_problem_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("problem")
    add_common_options(group)
    group.add_argument("--direction", choices=DIRECTIONS, nargs="+", help="(default: fwd)")
    group.add_argument("--backward-count", choices=list(BACKWARD_COUNTS), help="FLOP of bwd (default: hardware, 2.5x)")
    group.add_argument("--sparsity", type=sparsity, nargs="+", metavar="SHARE", help="block structure of the inputs")
    group.add_argument("--seed", type=index, help="of the data (default: 0)")


def add_ceiling_options(group: argparse._ArgumentGroup) -> None:
    either = group.add_mutually_exclusive_group()
    either.add_argument(
        "--ceiling", type=Path, nargs="+", metavar="LOG", help="logs of 'mamf find' (default: one is made first)"
    )
    either.add_argument(
        "--no-ceiling",
        action="store_true",
        default=None,
        help="no shares, and nothing measured beside the kernels",
    )
    group.add_argument(
        "--ceiling-kernel",
        nargs="+",
        default=(),
        metavar="CLASS",
        help="package.module:Class of a ceiling's kernel that is not installed",
    )
    group.add_argument("--baseline", metavar="KERNEL", help="what speed-ups are over (default: eager, or the slowest)")


def shapes_from(options: argparse.Namespace, tokens: int = _TOKENS) -> tuple[AttentionShape, ...]:
    """Every combination of the sizes asked for, ``tokens`` in all where no batch is given. Raises UsageError for heads
    that cannot share kv heads.
    """
    preset = preset_of(options)
    found: dict[AttentionShape, None] = {}
    sizes: tuple[Sequence[Any], ...] = (
        options.head_dims or preset.head_dims,
        options.heads or (preset.heads,),
        options.kv_heads or (preset.kv_heads,),
        _MASKS[options.causal] if options.causal else preset.causal,
        options.window or (None,),
        options.seq_lens or preset.seq_lens,
        options.query_lens or preset.query_lens or (None,),
        options.batch or (preset.batch,),
    )
    require_steps(*map(len, sizes))
    for dim, heads, kv_heads, causal, window, keys, queries, batch in itertools.product(*sizes):
        heads = heads or max(1, preset.hidden // dim)
        batch = batch or max(1, tokens // keys)
        shape = AttentionShape(batch, heads, kv_heads or heads, queries or keys, keys, dim, dim, causal, window)
        found[shape] = None
    return tuple(found)


def preset_of(options: argparse.Namespace) -> Preset:
    return PRESETS[options.preset] if options.preset else _DEFAULT


def kernels_from(options: argparse.Namespace, backend: Backend) -> Sequence[str] | None:
    """The kernels asked for, or those of the preset that can be used here; None for all. What is left out is said."""
    of_preset = preset_of(options).kernels
    if options.kernel or not of_preset:
        return options.kernel  # type: ignore[no-any-return]
    reasons = {name: attention_kernel(name).unavailable(backend) for name in of_preset}
    able = [name for name in of_preset if reasons[name] is None]
    for name in of_preset:
        if able and reasons[name]:
            warn(f"{name} is left out: {reasons[name]}")
    return able or of_preset


def problems_from(options: argparse.Namespace, backend: Backend) -> tuple[AttentionProblem, ...]:
    dtypes = [problem_for(backend, name).dtype for name in options.dtype or [None]]
    return tuple(
        AttentionProblem(dtype, direction, "normal", options.seed or 0, options.backward_count or "hardware", sparse)
        for dtype in dict.fromkeys(dtypes)
        for direction in dict.fromkeys(options.direction or preset_of(options).directions or ["fwd"])
        for sparse in dict.fromkeys(options.sparsity or [0.0])
    )


def plan_from(options: argparse.Namespace, backend: Backend, kernels: Sequence[str]) -> Plan:
    return Plan(
        SWEEP,
        "attention",
        problems_from(options, backend),
        tuple(kernels),
        shapes_from(options, tokens_of(backend)),
        tuple(name for name in KERNEL_REGIMES if name in (options.regime or KERNEL_REGIMES[:1])),
        options.precision or Plan.precision,
        options.time_limit,
        options.budget,
        not options.no_flush,
    )


def tokens_of(backend: Backend) -> int:
    return _TOKENS if backend.is_accelerator else _TOKENS_OF_CPU
