"""The plan for attention kernels from the options."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

from mamf.backend import Backend
from mamf.cli.options.attention_shapes import MASKS
from mamf.cli.terminal import warn
from mamf.limits import require_steps
from mamf.operations.attention.operation import attention_kernel
from mamf.operations.attention.shapes import (
    PRESETS,
    AttentionProblem,
    AttentionShape,
    Preset,
    equal_widths,
)
from mamf.operations.matmul.operation import problem_for
from mamf.plans import KERNEL_REGIMES, SWEEP, Plan
from mamf.regime_names import asked_regimes

_TOKENS = 16384
# A CPU takes seconds for the work of a millisecond on an accelerator.
_TOKENS_OF_CPU = 1024
_DEFAULT = Preset(equal_widths(128), (1024, 4096, 16384), causal=(False,))


def shapes_from(options: argparse.Namespace, tokens: int = _TOKENS) -> tuple[AttentionShape, ...]:
    """Every combination of the sizes, with ``tokens`` in total if no batch is given. Raises UsageError for heads that
    cannot share kv heads.
    """
    preset = preset_of(options)
    found: dict[AttentionShape, None] = {}
    sizes: tuple[Sequence[Any], ...] = (
        options.head_dims or preset.head_dims,
        options.heads or (preset.heads,),
        options.kv_heads or (preset.kv_heads,),
        MASKS[options.causal] if options.causal else preset.causal,
        options.window or (None,),
        options.seq_lens or preset.seq_lens,
        options.query_lens or preset.query_lens or (None,),
        options.batch or (preset.batch,),
    )
    require_steps(*map(len, sizes))
    for dims, heads, kv_heads, causal, window, keys, queries, batch in itertools.product(*sizes):
        heads = heads or max(1, preset.hidden // dims.keys)
        batch = batch or max(1, tokens // keys)
        lengths = (queries or keys, keys)
        found[AttentionShape(batch, heads, kv_heads or heads, *lengths, dims.keys, dims.values, causal, window)] = None
    return tuple(found)


def preset_of(options: argparse.Namespace) -> Preset:
    return PRESETS[options.preset] if options.preset else _DEFAULT


def kernels_from(options: argparse.Namespace, backend: Backend) -> Sequence[str] | None:
    """The named kernels, or those of the preset that are available, with a warning for others; None for all."""
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
        asked_regimes(options.regime, KERNEL_REGIMES[:1], KERNEL_REGIMES),
        options.precision or Plan.precision,
        options.time_limit,
        options.budget,
        not options.no_flush,
    )


def tokens_of(backend: Backend) -> int:
    return _TOKENS if backend.is_accelerator else _TOKENS_OF_CPU
