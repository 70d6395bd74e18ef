"""The operation and shapes of single launches: any operation by its shapes, attention by its sizes too."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mamf.backend import Backend
from mamf.cli import attention_plans
from mamf.cli.kernel_plans import AnyOperation
from mamf.cli.resuming import flag
from mamf.errors import UsageError
from mamf.operations.attention.operation import Attention
from mamf.plugins.discovery import operation
from mamf.plugins.selection import find_operation

_SIZES = ("preset", "seq_lens", "query_lens", "head_dims", "heads", "kv_heads", "batch", "causal", "window")


def operation_asked_for(options: argparse.Namespace, kernels: Sequence[str]) -> AnyOperation:
    """The named operation, else the operation of the kernel. Raises UsageError for sizes of another operation."""
    if options.direction:
        options.set = [*(options.set or ()), f"direction={','.join(options.direction)}"]
    sizes = [flag(name) for name in _SIZES if getattr(options, name) is not None]
    of = operation(options.operation) if options.operation else find_operation(kernels[0])
    if sizes and of.name != Attention.name:
        raise UsageError(
            f"{sizes[0]} belongs to attention: name a shape of {of.name}, such as --shape {of.shape_example}"
        )
    if sizes and options.shapes:
        raise UsageError(f"--shape names whole shapes: leave {sizes[0]} out")
    return of


def with_shapes_of_sizes(of: AnyOperation, options: argparse.Namespace, backend: Backend) -> None:
    """Replace sizes of attention with shapes."""
    if of.name == Attention.name and any(getattr(options, name) is not None for name in _SIZES):
        tokens = attention_plans.tokens_of(backend)
        options.shapes = [str(shape) for shape in attention_plans.shapes_from(options, tokens)]
