"""Define the operation ``attention``: its shapes and directions, their exact FLOP and bytes, and its report columns.

A multiply-add of Q K^T and of P V, where P is the softmax, counts as 2 FLOP. A forward pass without a mask has
2*b*h*sq*sk*(d + dv) FLOP: b sequences, h heads, sq queries and sk keys per sequence, and head dimensions d of keys and
dv of values. With a causal mask or a window, only unmasked pairs of a query and a key count. A backward pass has 2.5
times the FLOP of its forward pass: five matmuls instead of two, because it computes the scores again. The convention of
model FLOP ignores this recomputation and counts 2 times. This module does not import torch.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from mamf.backend import Backend, DeviceInfo
from mamf.dtypes import DTYPES
from mamf.errors import (
    UsageError,
    advise_against_commas,
    parse_digits,
    parse_share,
    parse_size,
    require_share,
    require_whole_number,
)
from mamf.kernel import ALL_DATA_CHOICES, Buffer, Kernel, Work, round_up_to_alignment
from mamf.measurement import TERA, Measurement
from mamf.operation import (
    DERIVED_METADATA,
    CheckedProblem,
    FlopOperation,
    Preset,
    describe,
    draw_sizes,
    yield_combinations,
)

ATTENTION_DIRECTIONS: tuple[str, ...] = ("fwd", "bwd", "fwd+bwd")
#: The FLOP of a backward pass divided by the FLOP of its forward pass, for each counting convention.
BACKWARD_FLOP_FACTORS: Mapping[str, float] = {"hardware": 2.5, "model": 2.0}
_SHAPE_PATTERN = re.compile(r"b(\d+)h(\d+)(?:kv(\d+))?q(\d+)(?:k(\d+))?d(\d+)(?:v(\d+))?(c?)(?:w(\d+))?", re.ASCII)
_SIZE_FIELD_NAMES = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")


class HeadDims(NamedTuple):
    """The head dimension of queries and keys, and that of values. Written ``192/128``, or ``128`` if both are equal."""

    key_dim: int
    value_dim: int

    @classmethod
    def parse(cls, text: str) -> HeadDims:
        """Read ``192/128``, or ``128`` if both dimensions are equal. Raises UsageError for any other text."""
        keys, *values = map(parse_size, text.split("/", 1))
        return cls(keys, *(values or [keys]))

    def __str__(self) -> str:
        return str(self.key_dim) if self.key_dim == self.value_dim else f"{self.key_dim}/{self.value_dim}"


@dataclass(frozen=True, order=True)
class AttentionShape:
    """The sizes and the mask of softmax(Q K^T / sqrt(d)) V with Q [batch, heads, seqlen_q, head_dim],
    K [batch, kv_heads, seqlen_k, head_dim] and V [batch, kv_heads, seqlen_k, head_dim_v].

    - ``causal``: whether a query sees no later keys. The mask is aligned to the bottom right: the last query sees all
      keys.
    - ``window``: the number of keys that a query sees before itself and, without ``causal``, after itself; None: all.

    ``str`` writes, and ``parse`` reads, a text such as ``b1h16q4096k4096d128c``. It has ``kv2`` after the heads if
    there are fewer kv heads, ``v64`` after the head dimension if values have a different head dimension, and ``w1024``
    at the end for a window.

    Raises UsageError if a size is below 1, or ``heads`` is not a multiple of ``kv_heads``.
    """

    batch: int = field(
        metadata=describe(
            "number of sequences",
            default="16384, or 1024 on a CPU, divided by the number of keys",
            parse_text=parse_size,
        )
    )
    heads: int = field(
        metadata=describe(
            "number of query heads", default="2048 divided by the head dimension", parse_text=parse_size, metavar="H"
        )
    )
    kv_heads: int = field(
        metadata=describe(
            "number of key and value heads", default="as many as query heads", parse_text=parse_size, metavar="H"
        )
    )
    seqlen_q: int = field(
        metadata=describe(
            "number of query tokens per sequence",
            default="as many as keys",
            keyword="query_lens",
            parse_text=parse_size,
            metavar="S",
        )
    )
    seqlen_k: int = field(
        metadata=describe(
            "number of key tokens per sequence",
            default="1024 4096 16384",
            keyword="seq_lens",
            parse_text=parse_size,
            metavar="S",
        )
    )
    head_dim: int = field(
        metadata=describe(
            "head dimension; 192/128 if keys have dimension 192 and values have dimension 128",
            default="128",
            keyword="head_dims",
            parse_text=HeadDims.parse,
            metavar="D",
        )
    )
    head_dim_v: int = field(metadata=DERIVED_METADATA)
    causal: bool = field(default=False, metadata=describe("apply a causal mask: a query attends to no later keys"))
    window: int | None = field(
        default=None,
        metadata=describe(
            "sliding window: a query attends only to this number of keys before its position and, without --causal, to "
            "as many keys after it",
            default="all keys",
            parse_text=parse_size,
            metavar="W",
        ),
    )

    def __post_init__(self) -> None:
        for name in _SIZE_FIELD_NAMES:
            object.__setattr__(self, name, require_whole_number(name, getattr(self, name)))
        if self.heads % self.kv_heads:
            raise UsageError(
                f"the number of query heads ({self.heads}) must be a multiple of the number of "
                f"kv heads ({self.kv_heads})"
            )
        if self.window is not None:
            object.__setattr__(self, "window", require_whole_number("window", self.window))

    def __str__(self) -> str:
        kv = "" if self.kv_heads == self.heads else f"kv{self.kv_heads}"
        value = "" if self.head_dim_v == self.head_dim else f"v{self.head_dim_v}"
        window = "" if self.window is None else f"w{self.window}"
        return (
            f"b{self.batch}h{self.heads}{kv}q{self.seqlen_q}k{self.seqlen_k}d{self.head_dim}{value}"
            f"{'c' if self.causal else ''}{window}"
        )

    @classmethod
    def parse(cls, text: str) -> AttentionShape:
        """Read the text that ``str`` writes. If the numbers of keys and queries are equal, the text may omit the number
        of keys, as in ``b1h16q4096d128c``. Raises UsageError for any other text.
        """
        match = _SHAPE_PATTERN.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"{text!r} is not an attention shape: write it like b1h16q4096k4096d128c{advise_against_commas(text)}"
            )
        batch, heads, kv, q, k, d, v, causal, window = match.groups()
        sizes = dict(
            zip(_SIZE_FIELD_NAMES, map(parse_digits, (batch, heads, kv or heads, q, k or q, d, v or d)), strict=True)
        )
        return cls(**sizes, causal=bool(causal), window=parse_digits(window) if window else None)

    @property
    def head_dims(self) -> HeadDims:
        return HeadDims(self.head_dim, self.head_dim_v)

    @property
    def mask_description(self) -> str:
        """The mask as a text for reports: ``causal`` or ``full``, and the window if there is one."""
        return ("causal" if self.causal else "full") + ("" if self.window is None else f", window {self.window}")

    @property
    def unmasked_pairs_per_head(self) -> int:
        """The number of unmasked pairs of a query and a key, per head."""
        offset, keys = self.seqlen_k - self.seqlen_q, self.seqlen_k
        before = keys + self.seqlen_q if self.window is None else self.window
        after = 0 if self.causal else before
        # Query i sees the keys from offset + i - before to offset + i + after, clamped to the keys that exist. To count
        # the pairs, sum the ends of these ranges over all queries, and subtract the sum of their starts.
        ends = _sum_clamped_integers(keys + after, keys) - _sum_clamped_integers(offset + after, keys)
        return ends - _sum_clamped_integers(keys - before - 1, keys) + _sum_clamped_integers(offset - before - 1, keys)

    @property
    def flop(self) -> int:
        """The FLOP of a forward pass of all heads and sequences."""
        return 2 * self.batch * self.heads * self.unmasked_pairs_per_head * (self.head_dim + self.head_dim_v)

    @property
    def tensor_dimensions(self) -> dict[str, tuple[int, int, int]]:
        """The number of heads, the sequence length and the head dimension of ``q``, ``k``, ``v`` and ``do``. ``do`` is
        the gradient of the output, and has the same sizes as the output.
        """
        return {
            "q": (self.heads, self.seqlen_q, self.head_dim),
            "k": (self.kv_heads, self.seqlen_k, self.head_dim),
            "v": (self.kv_heads, self.seqlen_k, self.head_dim_v),
            "do": (self.heads, self.seqlen_q, self.head_dim_v),
        }

    @property
    def element_counts(self) -> dict[str, int]:
        """The number of elements of ``q``, ``k``, ``v`` and ``do``."""
        return {name: self.batch * math.prod(sizes) for name, sizes in self.tensor_dimensions.items()}


def _sum_clamped_integers(last: int, max_value: int) -> int:
    """Return the sum of min(max(i, 0), max_value) over all integers i up to ``last``."""
    unclamped_count = min(max(last, 0), max_value)
    return unclamped_count * (unclamped_count + 1) // 2 + max(last - max_value, 0) * max_value


def _parse_sparsity(text: str) -> float:
    """Read a sparsity from 0 up to, but not including, 1, such as ``0.5`` or ``50%``. Raises UsageError for other
    text.
    """
    return 0.0 if text.strip(" %") in ("0", "0.0") else parse_share(text)


@dataclass(frozen=True)
class AttentionProblem(CheckedProblem):
    """All parameters of an attention launch except its shape.

    - ``direction``: the passes in a launch: ``fwd``, ``bwd`` (the forward pass ran before) or ``fwd+bwd``.
    - ``backward_count``: how to count the FLOP of a backward pass: ``hardware`` (2.5 times the FLOP of the forward
      pass) or ``model`` (2 times).
    - ``sparsity``: the share of key blocks that hardly affect the output of a query. mamf generates inputs with this
      share to measure kernels that skip such blocks. 0: ordinary inputs.

    Raises UsageError if the sparsity is negative or at least 1, or if another field has an unknown value.
    """

    operation: ClassVar[str] = "attention"

    dtype: str = "bfloat16"
    direction: str = field(
        default="fwd",
        metadata=describe(
            "passes to time: forward (fwd), backward (bwd) or both (fwd+bwd)", choices=ATTENTION_DIRECTIONS
        ),
    )
    data: str = field(
        default="normal",
        metadata=describe(
            "distribution of the operands' random values, or zeros; wide: normal values times random powers of two",
            choices=ALL_DATA_CHOICES,
            is_rare=True,
        ),
    )
    seed: int = 0
    backward_count: str = field(
        default="hardware",
        metadata=describe(
            "how to count the FLOP of a backward pass: 2.5 times those of the forward pass, including recomputation "
            "(hardware), or 2 times (model)",
            choices=tuple(BACKWARD_FLOP_FACTORS),
        ),
    )
    sparsity: float = field(
        default=0.0,
        metadata=describe(
            "share of the key blocks in the generated inputs that hardly affect the result; for kernels that skip such "
            "blocks",
            default="0",
            parse_text=_parse_sparsity,
            metavar="SHARE",
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sparsity != 0:
            require_share("sparsity", self.sparsity)

    @property
    def has_backward_pass(self) -> bool:
        return self.direction != "fwd"

    def compute_work(self, shape: AttentionShape) -> Work:
        flop = self.compute_flop(shape)
        formula = f"{4 * flop / shape.flop:g}*b*h*pairs*d in {self.direction}"
        convention = f"each operand and result once; masked pairs not counted; {formula}"
        return Work(flop, self.compute_traffic_bytes(shape), convention)

    def compute_flop(self, shape: AttentionShape) -> float:
        """Return the FLOP of one launch in the problem's direction."""
        backward = BACKWARD_FLOP_FACTORS[self.backward_count]
        return shape.flop * {"fwd": 1.0, "bwd": backward, "fwd+bwd": 1.0 + backward}[self.direction]

    def compute_traffic_bytes(self, shape: AttentionShape) -> int:
        """Return the minimum bytes that a launch moves: each operand is read once and each result is written once."""
        elements, itemsize = shape.element_counts, DTYPES[self.dtype].itemsize
        forward = sum(elements.values())  # The gradient ``do`` has the size of the output.
        # A backward pass reads q, k, v, o and do, and writes dq, dk and dv.
        backward = 2 * forward
        return itemsize * {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[self.direction]

    def list_buffers(self, shape: AttentionShape, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        """Return the device buffers of a launch, by name: ``q``, ``k``, ``v`` and, for a backward pass, ``do``, the
        gradient of the output. ``sets``: the number of operand sets for which each buffer has space.
        """
        names = ("q", "k", "v", "do") if self.has_backward_pass else ("q", "k", "v")
        return {name: Buffer(round_up_to_alignment(shape.element_counts[name]) * sets, self.dtype) for name in names}

    def count_bytes(self, shape: AttentionShape, sets: int = 1, rewrite: bool = False) -> int:
        """Return the bytes of the buffers plus an estimate of the bytes of the results.

        The estimate is the number of bytes that a launch moves, which is larger than the results.
        """
        return sum(buffer.nbytes for buffer in self.list_buffers(shape, sets).values()) + self.compute_traffic_bytes(
            shape
        )


_CAUSAL_MASK_ONLY, _FULL_MASK_ONLY = (True,), (False,)


def _make_preset(
    head_dims: Sequence[int], key_lengths: Sequence[int], causal: Sequence[bool], **sizes: int
) -> Preset[AttentionShape]:
    """Make a preset with all combinations of these sizes.

    ``head_dims``: head dimensions, which keys and values share. ``causal``: whether the mask is causal. ``sizes``:
    values of other fields of AttentionShape. The remaining fields keep their defaults.
    """
    dim_pairs = [HeadDims(dim, dim) for dim in head_dims]
    other_sizes = {name: (size,) for name, size in sizes.items()}
    return Preset(sizes={"head_dim": dim_pairs, "seqlen_k": key_lengths, "causal": causal, **other_sizes})


ATTENTION_PRESETS: Mapping[str, Preset[AttentionShape]] = {
    "gpt2-small": _make_preset((64,), (1024,), _CAUSAL_MASK_ONLY, heads=12),
    "gpt3": _make_preset((128,), (2048,), _CAUSAL_MASK_ONLY, heads=96),
    "llama-8b": _make_preset((128,), (4096, 8192), _CAUSAL_MASK_ONLY, heads=32, kv_heads=8),
    "llama-70b-gqa": _make_preset((128,), (4096, 8192), _CAUSAL_MASK_ONLY, heads=64, kv_heads=8),
    "bert-base": _make_preset((64,), (512,), _FULL_MASK_ONLY, heads=12),
    "bert-large": _make_preset((64,), (512,), _FULL_MASK_ONLY, heads=16),
    "deepseek-v3": Preset(
        sizes={
            "head_dim": (HeadDims(192, 128),),
            "seqlen_k": (4096, 8192),
            "causal": _CAUSAL_MASK_ONLY,
            "heads": (128,),
        }
    ),
    "long-context": _make_preset((128,), (32768, 65536, 131072), _CAUSAL_MASK_ONLY, heads=16, kv_heads=4, batch=1),
    "inference-batch": _make_preset((128,), (2048, 8192), _FULL_MASK_ONLY, heads=32, kv_heads=8, batch=64, seqlen_q=1),
    "fa3-paper": _make_preset(
        (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384), _FULL_MASK_ONLY + _CAUSAL_MASK_ONLY
    ),
    "scaling": replace(
        _make_preset((16, 32, 64, 128), (256, 1024, 4096, 8192, 16384), _FULL_MASK_ONLY, heads=1, batch=8),
        fields={"direction": ("fwd", "bwd")},
        kernels=("eager", "compiled-eager"),
    ),
}


class AttentionKernel(Kernel[AttentionProblem, AttentionShape]):
    """An implementation of attention. ``dtypes``, ``directions``: the dtypes and directions that it supports."""

    operation = "attention"
    reports_memory = True
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16")
    directions: ClassVar[tuple[str, ...]] = ATTENTION_DIRECTIONS

    def explain_unsupported_problem(self, backend: Backend, problem: AttentionProblem) -> str | None:
        if problem.direction not in self.directions:
            return f"{self.name} does not support --direction {problem.direction}: use {' or '.join(self.directions)}"
        return self._explain_unsupported_dtype(problem)


_DEFAULT_SIZES: Mapping[str, Sequence[Any]] = {
    "head_dim": (HeadDims(128, 128),),
    "heads": (None,),
    "kv_heads": (None,),
    "causal": (False,),
    "window": (None,),
    "seqlen_k": (1024, 4096, 16384),
    "seqlen_q": (None,),
    "batch": (None,),
}
# The default number of tokens in a batch. It is smaller on a CPU, because a CPU is about a thousand times slower than
# an accelerator.
_DEFAULT_BATCH_TOKENS, _DEFAULT_CPU_BATCH_TOKENS = 16384, 1024
# The default number of query heads times the head dimension.
_DEFAULT_HIDDEN_SIZE = 2048


class AttentionOperation(FlopOperation[AttentionProblem, AttentionShape]):
    name = "attention"
    kernel_group = "mamf.attention_kernels"
    kernel_type = AttentionKernel
    shape_type = AttentionShape
    problem_type = AttentionProblem
    shape_example = "b1h16q4096k4096d128c"
    ranks_by_shape = True
    command_name = "attention"
    chart_kind = "lengths"
    shows_ceiling_shares = True
    returns_tensors = True
    approximate_kernels = frozenset(
        {"sage-1", "sage-2", *(f"sparge-{dtype}-{by}" for dtype in ("fp16", "fp8") for by in ("threshold", "topk"))}
    )
    reference = "float64 softmax and matmuls on the device; four rows in float64 on the host"

    def choose_default_shapes(self, backend: Backend) -> Sequence[AttentionShape]:
        return self.build_shapes({}, backend)

    def list_presets(self) -> Mapping[str, Preset[AttentionShape]]:
        return ATTENTION_PRESETS

    def build_shapes(self, sizes: Mapping[str, Sequence[Any]], backend: Backend) -> Sequence[AttentionShape]:
        """Return a shape for every combination of sizes.

        By default, a batch has 16384 tokens (1024 on a CPU) for every sequence length, and the number of heads times
        the head dimension is 2048.
        """
        tokens = _DEFAULT_BATCH_TOKENS if backend.is_accelerator else _DEFAULT_CPU_BATCH_TOKENS
        shapes = []
        for combination in yield_combinations({**_DEFAULT_SIZES, **sizes}):
            key_dim, value_dim = combination.pop("head_dim")
            heads, length = combination["heads"] or max(1, _DEFAULT_HIDDEN_SIZE // key_dim), combination["seqlen_k"]
            default_sizes = {"heads": heads, "kv_heads": heads, "seqlen_q": length, "batch": max(1, tokens // length)}
            given_sizes = {name: size for name, size in combination.items() if size is not None}
            shapes.append(AttentionShape(**{**default_sizes, **given_sizes}, head_dim=key_dim, head_dim_v=value_dim))
        return shapes

    def make_columns(self, row: Measurement, info: DeviceInfo | None = None) -> Mapping[str, object]:
        """Return additional columns of a report: the memory of a launch and of tensors saved for the backward pass, the
        rate of memory traffic and, for approximate kernels, the sparsity and the distance from dense attention.
        """
        details, traffic, is_backward = (
            row.details,
            row.problem.compute_traffic_bytes(row.shape),
            row.problem.direction == "bwd",
        )
        dense = 1 - float(details.get("sparsity", 0.0))
        names = {"sparsity": "sparsity", "cosine": "cosine_similarity", "relative L1": "relative_l1"}
        return {
            "memory MiB": row.peak_memory_bytes and row.peak_memory_bytes / 2**20,
            # The device memory of the tensors that the forward pass saves for the backward pass.
            "saved MiB": float(details["held_bytes"]) / 2**20 if "held_bytes" in details and is_backward else None,
            "TB/s": traffic / row.seconds / TERA if row.ok else None,
            **({"effective TFLOPS": row.best_rate * dense} if "sparsity" in details and row.ok else {}),
            **{title: float(details[name]) for title, name in names.items() if name in details},
        }

    def draw_random_case(self, chooser: random.Random, terms: range) -> dict[str, Any]:
        """Draw a random problem and shape with at most two kv heads, so that a check of the first and the last kv head
        covers all heads.
        """
        batch, kv_heads = chooser.choice(((1, 1), (1, 2), (2, 1)))
        heads, width = kv_heads * chooser.choice((1, 2, 4, 8)), chooser.choice((32, 64, 80, 96, 128, 256))
        queries, keys = sorted(draw_sizes(chooser, 2, terms, 2 * batch * heads * width))
        masks = chooser.choice((False, True)), chooser.choice((None, None, None, 128))
        shape = AttentionShape(batch, heads, kv_heads, queries, keys, width, width, *masks)
        direction, data = chooser.choice(ATTENTION_DIRECTIONS), chooser.choice(("normal", "uniform"))
        return {"direction": direction, "data": data, "shape": shape}

    def describe_problem(self, problem: AttentionProblem) -> Sequence[str]:
        """Return texts for reports: the direction, and each field of the problem that differs from its default."""
        other_texts = (
            f"inputs {100 * problem.sparsity:.0f} % sparse" if problem.sparsity else "",
            f"backward count {problem.backward_count}" if problem.backward_count != "hardware" else "",
            f"data {problem.data}" if problem.data != "normal" else "",
            f"seed {problem.seed}" if problem.seed else "",
        )
        return [problem.direction, *filter(None, other_texts)]

    def describe_shape(self, shape: AttentionShape) -> str:
        kv = "" if shape.heads == shape.kv_heads else f" ({shape.kv_heads} kv heads)"
        length = (
            f"length {shape.seqlen_k}"
            if shape.seqlen_q == shape.seqlen_k
            else f"{shape.seqlen_q} queries and {shape.seqlen_k} keys"
        )
        return (
            f"batch {shape.batch}, {shape.heads} heads{kv}, {length}, head dimension {shape.head_dims}, "
            f"{shape.mask_description}"
        )

    def find_axis_position(self, shape: AttentionShape) -> float:
        return float(shape.seqlen_k)
