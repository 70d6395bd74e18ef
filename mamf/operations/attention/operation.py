"""The operation ``attention`` and the columns of its rows."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from mamf.backend import Backend, DeviceInfo
from mamf.measurement import TERA, Measurement
from mamf.operation import FlopOperation, Preset, combine, random_sizes
from mamf.operations.attention.shapes import (
    DIRECTIONS,
    PRESETS,
    AttentionKernel,
    AttentionProblem,
    AttentionShape,
    HeadDims,
    equal_widths,
)

_DEFAULT_SIZES: Mapping[str, Sequence[Any]] = {
    "head_dim": equal_widths(128),
    "heads": (None,),
    "kv_heads": (None,),
    "causal": (False,),
    "window": (None,),
    "seqlen_k": (1024, 4096, 16384),
    "seqlen_q": (None,),
    "batch": (None,),
}
# Fewer tokens, because what takes an accelerator a millisecond takes a CPU seconds.
_TOKENS, _CPU_TOKENS = 16384, 1024
_HIDDEN = 2048


class Attention(FlopOperation[AttentionProblem, AttentionShape]):
    name = "attention"
    kernel_group = "mamf.attention_kernels"
    kernel_type = AttentionKernel
    shape_type = AttentionShape
    problem_type = AttentionProblem
    shape_example = "b1h16q4096k4096d128c"
    ranks_by_shape = True
    own_command = "attention"
    chart = "lengths"
    has_shares = True
    gives_tensors = True
    approximate_kernels = frozenset(
        {"sage-1", "sage-2", *(f"sparge-{dtype}-{by}" for dtype in ("fp16", "fp8") for by in ("threshold", "topk"))}
    )
    reference = "float64 softmax and matmuls on the device; four rows in float64 on the host"

    def default_shapes(self, backend: Backend) -> Sequence[AttentionShape]:
        return self.shapes_of({}, backend)

    def presets(self) -> Mapping[str, Preset[AttentionShape]]:
        return PRESETS

    def shapes_of(self, sizes: Mapping[str, Sequence[Any]], backend: Backend) -> Sequence[AttentionShape]:
        """Return a shape for every combination of sizes.

        By default the batch has 16384 tokens (1024 on a CPU) whatever the sequence length, and heads times head
        dimension is 2048.
        """
        tokens = _TOKENS if backend.is_accelerator else _CPU_TOKENS
        return [
            _complete_shape(tokens, **chosen)
            for chosen in combine({name: sizes.get(name, _DEFAULT_SIZES[name]) for name in _DEFAULT_SIZES})
        ]

    def columns(self, row: Measurement, info: DeviceInfo | None = None) -> Mapping[str, object]:
        """Return memory, traffic and, for approximate kernels, the sparsity and the distance from dense attention."""
        details, traffic = row.details, row.problem.traffic(row.shape)
        dense = 1 - float(details.get("sparsity", 0.0))
        names = {"sparsity": "sparsity", "cosine": "cosine_similarity", "relative L1": "relative_l1"}
        return {
            "memory MiB": row.peak_memory_bytes and row.peak_memory_bytes / 2**20,
            "saved MiB": get_saved_mib(row),
            "TB/s": traffic / row.seconds / TERA if row.ok else None,
            **({"effective TFLOPS": row.best_rate * dense} if "sparsity" in details and row.ok else {}),
            **{title: float(details[name]) for title, name in names.items() if name in details},
        }

    def random_case(self, chooser: random.Random, terms: range) -> dict[str, Any]:
        """Draw a random problem with at most two kv heads, so that all of its output and gradients are verified."""
        batch, kv_heads = chooser.choice(((1, 1), (1, 2), (2, 1)))
        heads, width = kv_heads * chooser.choice((1, 2, 4, 8)), chooser.choice((32, 64, 80, 96, 128, 256))
        queries, keys = sorted(random_sizes(chooser, 2, terms, 2 * batch * heads * width))
        masks = chooser.choice((False, True)), chooser.choice((None, None, None, 128))
        shape = AttentionShape(batch, heads, kv_heads, queries, keys, width, width, *masks)
        direction, data = chooser.choice(DIRECTIONS), chooser.choice(("normal", "uniform"))
        return {"direction": direction, "data": data, "shape": shape}

    def describe_problem(self, problem: AttentionProblem) -> Sequence[str]:
        """Return the direction, and the fields that differ from the defaults, as text."""
        rest = [
            f"inputs {100 * problem.sparsity:.0f} % sparse" if problem.sparsity else "",
            f"backward count {problem.backward_count}" if problem.backward_count != "hardware" else "",
            f"data {problem.data}" if problem.data != "normal" else "",
            f"seed {problem.seed}" if problem.seed else "",
        ]
        return [problem.direction, *filter(None, rest)]

    def describe_shape(self, shape: AttentionShape) -> str:
        kv = "" if shape.heads == shape.kv_heads else f" ({shape.kv_heads} kv)"
        length = f"{shape.seqlen_k}" if shape.seqlen_q == shape.seqlen_k else f"{shape.seqlen_q} on {shape.seqlen_k}"
        window = "" if shape.window is None else f", window {shape.window}"
        return (
            f"batch {shape.batch}, {shape.heads} heads{kv}, length {length}, head dimension {shape.head_dims}, "
            f"{'causal' if shape.causal else 'full'}{window}"
        )

    def axis(self, shape: AttentionShape) -> float:
        return float(shape.seqlen_k)


def _complete_shape(tokens: int, head_dim: HeadDims, seqlen_k: int, **sizes: Any) -> AttentionShape:
    """Make a shape. Sizes that are None are derived from the others and from the number of ``tokens``."""
    heads = sizes["heads"] or max(1, _HIDDEN // head_dim.keys)
    return AttentionShape(
        sizes["batch"] or max(1, tokens // seqlen_k),
        heads,
        sizes["kv_heads"] or heads,
        sizes["seqlen_q"] or seqlen_k,
        seqlen_k,
        *head_dim,
        sizes["causal"],
        sizes["window"],
    )


def get_saved_mib(row: Measurement) -> float | None:
    """Return the MiB that the forward pass keeps for the backward pass.

    None unless only the backward pass is measured, or if the device does not report memory.
    """
    held = row.details.get("held_bytes")
    return None if held is None or row.problem.direction != "bwd" else float(held) / 2**20
