"""Define the shapes and problems of matmuls, their exact FLOP and bytes, and the shapes of layers of known models."""

from __future__ import annotations

import itertools
import math
import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

from mamf.dtypes import DTYPES, compute_error_tolerance
from mamf.errors import (
    MAX_SIZE,
    BaseShape,
    count_values,
    parse_size,
    require_known_names,
    require_rows_within_limit,
    require_whole_number,
)
from mamf.kernel import ALL_DATA_CHOICES, Buffer, Kernel, Work, round_up_to_alignment
from mamf.operation import CheckedProblem, describe
from mamf.plans import Shape


def _make_size_metadata(help_text: str) -> Mapping[str, Any]:
    return describe(help_text, parse_text=parse_size, default="4096", has_range=True)


class BaseMatmulShape(BaseShape):
    """The base class of the shapes of single, batched and grouped matmuls. Derived classes define ``row_counts``."""

    __slots__ = ()
    n: int
    k: int

    @property
    @abstractmethod
    def row_counts(self) -> dict[str, int]:
        """The number of rows of A (``a``) and the number of columns of B (``b``), summed over all matmuls. Each row and
        each column has K elements.
        """

    @property
    def flop(self) -> int:
        """The FLOP of all matmuls: 2*M*N*K each, for one multiplication and one addition per term."""
        return 2 * self.row_counts["a"] * self.n * self.k

    @property
    def element_counts(self) -> dict[str, int]:
        """The number of elements of ``a``, ``b`` and ``c``, summed over all matmuls."""
        row_counts = self.row_counts
        return {"a": row_counts["a"] * self.k, "b": row_counts["b"] * self.k, "c": row_counts["a"] * self.n}


@dataclass(frozen=True, order=True, slots=True)
class MatmulShape(BaseMatmulShape):
    """The three sizes of the matmul C[M,N] = A[M,K] @ B[K,N]. ``str`` writes ``MxNxK``, which ``parse`` reads."""

    text_pattern: ClassVar[re.Pattern[str]] = re.compile(r"(\d+)x(\d+)x(\d+)", re.ASCII)
    text_description: ClassVar[str] = "a shape: write MxNxK, for example 4096x4096x4096"

    m: int = field(metadata=_make_size_metadata("rows of A and C"))
    n: int = field(metadata=_make_size_metadata("columns of B and C"))
    k: int = field(metadata=_make_size_metadata("size of the reduction: columns of A and rows of B"))

    def __post_init__(self) -> None:
        m, n, k = self.m, self.n, self.k
        if type(m) is type(n) is type(k) is int and min(m, n, k) > 0 and max(m, n, k) <= MAX_SIZE:
            return  # Skip the slow checks below, because a grid has thousands of shapes.
        for name in ("m", "n", "k"):
            object.__setattr__(self, name, require_whole_number(name.upper(), getattr(self, name)))

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def row_counts(self) -> dict[str, int]:
        return {"a": self.m, "b": self.n}


#: If several devices of a machine take part in one run, each of them measures this shape, so that reports can compare
#: the devices.
COMMON_MATMUL_SHAPE = MatmulShape(8192, 8192, 8192)


@dataclass(frozen=True)
class MatmulGrid:
    """A grid of matmul shapes: all combinations of the given values of M, N and K that need at most ``most_flop`` FLOP.

    The values of a size need not be evenly spaced.
    """

    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    most_flop: float = math.inf

    def accepts(self, shape: MatmulShape) -> bool:
        return shape.flop <= self.most_flop

    def list_shapes(self) -> list[MatmulShape]:
        return [shape for shape in matmul_grid(self.m, self.n, self.k) if self.accepts(shape)]

    def __len__(self) -> int:
        """Return the number of combinations, including those with more than ``most_flop`` FLOP."""
        return len(self.m) * len(self.n) * len(self.k)


@dataclass(frozen=True)
class SearchOptions:
    """The options of a search for ceilings, the highest FLOP per second that any shape and kernel reach.

    The search has two stages. It first measures shapes of the grid with the first kernel. Then it measures shapes that
    are similar to the fastest ones, with all kernels.

    - ``scouts``: the maximum number of measurements in the first stage.
    - ``refinements``: the maximum number of measurements in the second stage, for all kernels together.
    - ``priors``: shapes to measure before the grid, because they were fast in earlier searches.
    - ``is_quick``: whether to repeat measurements less often.
    """

    grid: MatmulGrid
    scouts: int = 96
    refinements: int = 132
    priors: tuple[Shape, ...] = ()
    is_quick: bool = False

    def __post_init__(self) -> None:
        require_whole_number("scouts", self.scouts)
        require_whole_number("refinements", self.refinements, 0)


def matmul_grid(m: Sequence[int], n: Sequence[int], k: Sequence[int]) -> list[MatmulShape]:
    """Return a matmul shape for every combination of the sizes, without duplicates, in the given order.

    Raises UsageError if there are more shapes than a run may measure (``mamf.errors.MAX_RUN_ROWS``).

    >>> [str(shape) for shape in mamf.matmul_grid([1024, 2048], [4096], [4096])]
    ['1024x4096x4096', '2048x4096x4096']
    """
    require_rows_within_limit(*map(count_values, (m, n, k)))
    return list(dict.fromkeys(MatmulShape(*sizes) for sizes in itertools.product(m, n, k)))


#: The layout of each of the three matmuls of a linear layer: y = x W^T (``forward``), dx = dy W (``grad-input``) and
#: dW = dy^T x (``grad-weight``). ``n`` means not transposed and ``t`` transposed, first for A, then for B.
LAYOUT_BY_LAYER_PASS: Mapping[str, str] = {"forward": "nt", "grad-input": "nn", "grad-weight": "tn"}


class LinearLayer(NamedTuple):
    """A linear layer y = x W^T of a model, with x (tokens, ``input_size``) and W (``output_size``, ``input_size``)."""

    name: str
    output_size: int
    input_size: int


class LayerPreset(NamedTuple):
    """A preset of matmul shapes: linear layers of known models, and the numbers of tokens in the layers' input."""

    layers: tuple[LinearLayer, ...]
    token_counts: tuple[int, ...] = (8192,)


def _make_llama_layers(name: str, hidden_size: int, mlp_size: int, kv_size: int) -> tuple[LinearLayer, ...]:
    return (
        LinearLayer(f"{name} qkv", hidden_size + 2 * kv_size, hidden_size),
        LinearLayer(f"{name} out", hidden_size, hidden_size),
        LinearLayer(f"{name} gate+up", 2 * mlp_size, hidden_size),
        LinearLayer(f"{name} down", hidden_size, mlp_size),
        LinearLayer(f"{name} logits", 128256, hidden_size),
    )


_LLAMA_8B_LAYERS = _make_llama_layers("llama-8b", 4096, 14336, 1024)
_LLAMA_70B_LAYERS = _make_llama_layers("llama-70b", 8192, 28672, 1024)

MATMUL_PRESETS: Mapping[str, LayerPreset] = {
    "decode": LayerPreset(_LLAMA_8B_LAYERS, (1, 8, 16, 32, 64, 128, 256, 512)),
    "llama-8b": LayerPreset(_LLAMA_8B_LAYERS),
    "llama-70b": LayerPreset(_LLAMA_70B_LAYERS),
    "attention-projections": LayerPreset(
        (
            *_LLAMA_8B_LAYERS[:2],
            *_LLAMA_70B_LAYERS[:2],
            LinearLayer("deepseek-v3 q down", 1536, 7168),
            LinearLayer("deepseek-v3 q up", 128 * (128 + 64), 1536),
            LinearLayer("deepseek-v3 kv down", 512 + 64, 7168),
            LinearLayer("deepseek-v3 kv up", 128 * (128 + 128), 512),
            LinearLayer("deepseek-v3 out", 7168, 128 * 128),
        )
    ),
}


def name_layer_weights(shapes: Iterable[MatmulShape]) -> dict[MatmulShape, str]:
    """Choose names for the weights that belong to shapes, and return the names by shape.

    Shapes have the same weights if they differ only in M (the number of tokens). The name is that of the layer if
    ``shapes`` contain all layers of a preset, and otherwise ``Mx{N}x{K}``. Omit a shape if no other shape has its
    weights.
    """
    token_counts_by_weights: dict[tuple[int, int], set[int]] = {}
    for shape in shapes:
        token_counts_by_weights.setdefault((shape.n, shape.k), set()).add(shape.m)
    names = {
        weights: f"Mx{weights[0]}x{weights[1]}"
        for weights, counts in token_counts_by_weights.items()
        if len(counts) > 1
    }
    for preset in MATMUL_PRESETS.values():
        layers = {(layer.output_size, layer.input_size): layer.name for layer in preset.layers}
        if layers.keys() <= names.keys():
            names |= layers
    return {MatmulShape(m, *weights): name for weights, name in names.items() for m in token_counts_by_weights[weights]}


MATMUL_LAYOUTS = ("nt", "nn", "tn", "tt")
#: The suffixes that a layout may have. The number in a suffix is the number of unused elements after each stored row of
#: A and B.
PADDING_SUFFIXES = ("", "+1", "+8", "+24")
# The standard deviation of int8 operands, by the kind of data. An int8 C is scaled so that at least
# _MIN_DEVIATIONS_IN_INT8_RANGE standard deviations fit below _INT8_MAX (the largest int8 value), so few values
# saturate.
_INT8_STANDARD_DEVIATIONS = {"normal": 31.7, "uniform": 73.3, "integers": 1.41, "wide": 1.3, "zeros": 0.0}
_INT8_MAX, _MIN_DEVIATIONS_IN_INT8_RANGE = 127, 6
#: The dtype of A and B before they are quantized to a scaled format.
UNQUANTIZED_DTYPE = "bfloat16"


@dataclass(frozen=True)
class BaseMatmulProblem(CheckedProblem):
    """All parameters of single, batched or grouped matmuls except their shape. MatmulProblem explains ``layout``."""

    operation: ClassVar[str]
    work_convention: ClassVar[str]

    dtype: str = "bfloat16"
    out_dtype: str = field(
        default="",
        metadata=describe(
            "dtype of the result C", default="the dtype of A; bfloat16 for 8-bit floats, int32 for int8", is_rare=True
        ),
    )
    layout: str = field(
        default="nt",
        metadata=describe(
            "storage of A and B, one letter each: n (not transposed) or t (transposed); nt+8 leaves 8 unused elements "
            "after each row",
            choices=tuple(layout + padding for padding in PADDING_SUFFIXES for layout in MATMUL_LAYOUTS),
            metavar="LAYOUT",
            is_rare=True,
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
    fast_accumulation: bool = field(
        default=False,
        metadata=describe(
            "let matmuls of 8-bit floats accumulate with fewer bits (use_fast_accum of torch)", is_rare=True
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", DTYPES[self.dtype].default_output_dtype)
        require_known_names(("output dtype", self.out_dtype, DTYPES))

    @property
    def tolerance(self) -> float:
        return compute_error_tolerance(self.dtype, self.out_dtype, self.fast_accumulation)

    @property
    def max_rounding_error(self) -> float:
        """The largest relative error of C from rounding in a kernel that does not round partial sums to bfloat16."""
        return self.tolerance / (4 if self.dtype == "bfloat16" else 2)

    @property
    def has_int8_output(self) -> bool:
        """Whether C is int8. The kernel then scales the int32 result, rounds it and clamps it to the range of int8."""
        return self.dtype == self.out_dtype == "int8"

    def compute_output_scale(self, k: int) -> float:
        """Return the factor s in C = s * A @ B. It is 1, except for an int8 C, where it is a power of two that is so
        small that few values of C saturate.
        """
        if not self.has_int8_output:
            return 1.0
        deviation = _INT8_STANDARD_DEVIATIONS[self.data] ** 2 * math.sqrt(k)
        return 2.0 ** -max(0, math.ceil(math.log2(max(1.0, _MIN_DEVIATIONS_IN_INT8_RANGE * deviation / _INT8_MAX))))

    @property
    def padding_element_count(self) -> int:
        """The number of unused elements after each stored row of A and B."""
        return int(self.layout[2:] or 0)

    @property
    def b_dtype(self) -> str:
        """The dtype of B. If A is float8_e5m2 (the dtype of gradients), B is float8_e4m3fn, because no vendor supports
        two e5m2 operands. Otherwise B has the dtype of A.
        """
        return "float8_e4m3fn" if self.dtype == "float8_e5m2" else self.dtype

    def list_buffers(self, shape: BaseMatmulShape, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        """Return the device buffers for ``sets`` operand sets, by name: ``a``, ``b`` and ``c``.

        With ``rewrite`` there is also ``c_rewrite``, which the regime "classic" (the measurement loop of mamf-finder)
        copies over C before each launch. For a scaled format, ``a`` and ``b`` are the values before quantization, and
        launches read ``a_quantized`` and ``b_quantized``.
        """
        element_counts, scaled_format = shape.element_counts, DTYPES[self.dtype].scaled_format
        buffers_by_name: dict[str, Buffer] = {}
        for name, dtype, is_by_k in (
            ("a", self.dtype, self.layout[0] == "n"),
            ("b", self.b_dtype, self.layout[1] == "t"),
        ):
            # Depending on the layout, an operand is stored as rows of K elements or transposed, as K rows per matmul.
            # Unused elements (the padding) follow each row.
            stored_rows = shape.row_counts[name] if is_by_k else element_counts["b"] // shape.n
            stored_elements = (
                round_up_to_alignment(element_counts[name] + stored_rows * self.padding_element_count) * sets
            )
            buffers_by_name[name] = Buffer(stored_elements, UNQUANTIZED_DTYPE if scaled_format else dtype)
            if scaled_format:
                quantized_bytes = round_up_to_alignment(element_counts[name] // scaled_format.values_per_byte) * sets
                buffers_by_name[f"{name}_quantized"] = Buffer(quantized_bytes, "uint8", fill=False)
        buffers_by_name["c"] = Buffer(round_up_to_alignment(element_counts["c"]) * sets, self.out_dtype, fill=False)
        if rewrite:
            buffers_by_name["c_rewrite"] = Buffer(element_counts["c"], self.out_dtype)
        return buffers_by_name

    def compute_work(self, shape: BaseMatmulShape) -> Work:
        operands = sum(self.count_operand_bytes(shape, name) for name in ("a", "b"))
        return Work(
            shape.flop, operands + shape.element_counts["c"] * DTYPES[self.out_dtype].itemsize, self.work_convention
        )

    def count_operand_bytes(self, shape: BaseMatmulShape, operand: str) -> int:
        """Return the bytes of ``a`` or ``b`` that a launch reads, including the scales of a scaled format."""
        count, scaled_format = shape.element_counts[operand], DTYPES[self.dtype].scaled_format
        if scaled_format is None:
            return count * DTYPES[self.dtype].itemsize
        scaling = scaled_format.get_scaling(operand)
        scale_size = 4 if scaling.scale_dtype == "float32" else 1
        return (
            count // scaled_format.values_per_byte
            + scaling.count_scales(shape.row_counts[operand], shape.k) * scale_size
        )

    def count_bytes(self, shape: BaseMatmulShape, sets: int = 1, rewrite: bool = False) -> int:
        """Return the bytes of all buffers that launches read or write, for ``sets`` operand sets."""
        unread_names = ("a", "b") if DTYPES[self.dtype].scaled_format else ()
        return sum(
            each.nbytes for name, each in self.list_buffers(shape, sets, rewrite).items() if name not in unread_names
        )


MatmulProblemT = TypeVar("MatmulProblemT", bound=BaseMatmulProblem)
MatmulShapeT = TypeVar("MatmulShapeT", bound=BaseMatmulShape)


@dataclass(frozen=True)
class MatmulProblem(BaseMatmulProblem):
    """All parameters of a matmul except its shape.

    ``layout``: a letter for A and a letter for B: ``n`` if memory contains the rows of the matrix one after the other,
    ``t`` if it contains the rows of its transpose. In ``nt``, the layout of a linear layer and of mamf-finder, B is
    stored as N rows of K elements. In ``nt+8``, 8 unused elements follow each stored row.
    """

    operation: ClassVar[str] = "matmul"
    work_convention: ClassVar[str] = "2*M*N*K; A and B read, C written, once each"


class MatmulKernel(Kernel[MatmulProblem, MatmulShape]):
    """An implementation of a single matmul."""

    operation = "matmul"
