"""Matmul shapes, their exact FLOP counts, and those of known models. Pure: no torch, no clock, no printing."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mamf.limits import LARGEST_SIZE, Sizes, count_values, parse_size, require_steps, whole_number
from mamf.parameters import describe
from mamf.plans import Shape


def _size(help: str) -> Mapping[str, Any]:
    return describe(help, read=parse_size, default="4096", has_range=True)


@dataclass(frozen=True, order=True, slots=True)
class MatmulShape(Sizes):
    """C[M,N] = A[M,K] @ B[K,N]; K is the reduction. Printed and parsed as ``MxNxK``."""

    pattern: ClassVar[re.Pattern[str]] = re.compile(r"(\d+)x(\d+)x(\d+)", re.ASCII)
    written: ClassVar[str] = "a shape; write MxNxK, for example 4096x4096x4096"

    m: int = field(metadata=_size("rows of A and C"))
    n: int = field(metadata=_size("columns of B and C"))
    k: int = field(metadata=_size("size of the reduction: columns of A and rows of B"))

    def __post_init__(self) -> None:
        m, n, k = self.m, self.n, self.k
        if type(m) is type(n) is type(k) is int and min(m, n, k) > 0 and max(m, n, k) <= LARGEST_SIZE:
            return  # fast path for the thousands of shapes of a grid
        for name in ("m", "n", "k"):
            object.__setattr__(self, name, whole_number(name.upper(), getattr(self, name)))

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def flop(self) -> int:
        """FLOP of the matmul: 2*M*N*K, one multiply and one add per term."""
        return 2 * self.m * self.n * self.k

    @property
    def elements(self) -> dict[str, int]:
        """Elements of each operand: ``a`` (M*K), ``b`` (K*N) and ``c`` (M*N)."""
        return {"a": self.m * self.k, "b": self.k * self.n, "c": self.m * self.n}

    @property
    def rows(self) -> dict[str, int]:
        """The number of rows (of K elements) of ``a`` and ``b``."""
        return {"a": self.m, "b": self.n}


#: The matmul that all devices of a shared run measure, so that their rows can be compared.
COMMON_PRODUCT = MatmulShape(8192, 8192, 8192)


@dataclass(frozen=True)
class MatmulGrid:
    """All combinations of these sizes of M, N and K, up to ``most_flop``; sizes need not be evenly spaced."""

    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    most_flop: float = math.inf

    def accepts(self, shape: MatmulShape) -> bool:
        return shape.flop <= self.most_flop

    def shapes(self) -> list[MatmulShape]:
        return [shape for shape in matmul_grid(self.m, self.n, self.k) if self.accepts(shape)]

    def __len__(self) -> int:
        """The number of combinations of sizes."""
        return len(self.m) * len(self.n) * len(self.k)


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search for ceilings. The default kernel, the first of the plan, scouts the grid; then shapes and
    kernels are searched together.

    ``scouts``, ``refinements``: the maximum number of measurements on the grid, and around its best shapes, for all
    kernels together. ``priors``: shapes to measure first. ``is_quick``: whether to use fewer rounds and visits.
    """

    grid: MatmulGrid
    scouts: int = 96
    refinements: int = 132
    priors: tuple[Shape, ...] = ()
    is_quick: bool = False

    def __post_init__(self) -> None:
        whole_number("scouts", self.scouts)
        whole_number("refinements", self.refinements, 0)


def matmul_grid(m: Sequence[int], n: Sequence[int], k: Sequence[int]) -> list[MatmulShape]:
    """All combinations of the sizes, once each, in the given order. Raises UsageError for more than MAX_STEPS.

    >>> [str(shape) for shape in mamf.matmul_grid([1024, 2048], [4096], [4096])]
    ['1024x4096x4096', '2048x4096x4096']
    """
    require_steps(*map(count_values, (m, n, k)))
    return list(dict.fromkeys(MatmulShape(*sizes) for sizes in itertools.product(m, n, k)))


#: The layout of each matmul of a linear layer: y = x W^T (forward), dx = dy W (grad-input), dW = dy^T x (grad-weight).
LAYOUT_OF: Mapping[str, str] = {"forward": "nt", "grad-input": "nn", "grad-weight": "tn"}
_DECODE = (1, 8, 16, 32, 64, 128, 256, 512)
_TRAINING = (8192,)


@dataclass(frozen=True)
class Linear:
    """y = x W^T with x (tokens, ``inputs``) and W (``outputs``, ``inputs``)."""

    name: str
    outputs: int
    inputs: int

    def shape(self, tokens: int, product: str = "forward") -> MatmulShape:
        """Return the shape of one of the layer's matmuls, by its name in LAYOUT_OF."""
        return {
            "forward": MatmulShape(tokens, self.outputs, self.inputs),
            "grad-input": MatmulShape(tokens, self.inputs, self.outputs),
            "grad-weight": MatmulShape(self.outputs, self.inputs, tokens),
        }[product]


@dataclass(frozen=True)
class Preset:
    """The layers of a preset, and the token counts to measure them with."""

    layers: tuple[Linear, ...]
    tokens: tuple[int, ...] = _TRAINING

    def shapes(self, product: str = "forward", tokens: Sequence[int] | None = None) -> dict[MatmulShape, str]:
        """Return the shapes of the matmuls, each with the names of its layers. Layers of the same shape share a row."""
        found: dict[MatmulShape, list[str]] = {}
        for count in tokens or self.tokens:
            for layer in self.layers:
                found.setdefault(layer.shape(count, product), []).append(layer.name)
        return {shape: ", ".join(dict.fromkeys(names)) for shape, names in found.items()}


def _llama(name: str, hidden: int, inside: int, kv: int) -> tuple[Linear, ...]:
    return (
        Linear(f"{name} qkv", hidden + 2 * kv, hidden),
        Linear(f"{name} out", hidden, hidden),
        Linear(f"{name} gate+up", 2 * inside, hidden),
        Linear(f"{name} down", hidden, inside),
        Linear(f"{name} logits", 128256, hidden),
    )


_LLAMA_8B = _llama("llama-8b", 4096, 14336, 1024)
_LLAMA_70B = _llama("llama-70b", 8192, 28672, 1024)
_DEEPSEEK_V3_ATTENTION = (
    Linear("deepseek-v3 q down", 1536, 7168),
    Linear("deepseek-v3 q up", 128 * (128 + 64), 1536),
    Linear("deepseek-v3 kv down", 512 + 64, 7168),
    Linear("deepseek-v3 kv up", 128 * (128 + 128), 512),
    Linear("deepseek-v3 out", 7168, 128 * 128),
)

PRESETS: Mapping[str, Preset] = {
    "decode": Preset(_LLAMA_8B, _DECODE),
    "llama-8b": Preset(_LLAMA_8B),
    "llama-70b": Preset(_LLAMA_70B),
    "attention-projections": Preset((*_LLAMA_8B[:2], *_LLAMA_70B[:2], *_DEEPSEEK_V3_ATTENTION)),
}


def name_layers(shapes: Iterable[MatmulShape]) -> dict[MatmulShape, str]:
    """Name the weights of shapes that share N and K and differ in M, the number of tokens.

    The name is that of a layer if the shapes contain all layers of its preset, or else ``Mx{N}x{K}``. Shapes that share
    N and K with no other shape are left out.
    """
    tokens: dict[tuple[int, int], set[int]] = {}
    for shape in shapes:
        tokens.setdefault((shape.n, shape.k), set()).add(shape.m)
    names = {weights: f"Mx{weights[0]}x{weights[1]}" for weights, counts in tokens.items() if len(counts) > 1}
    for preset in PRESETS.values():
        layers = {(layer.outputs, layer.inputs): layer.name for layer in preset.layers}
        if layers.keys() <= names.keys():
            names |= layers
    return {MatmulShape(m, *weights): name for weights, name in names.items() for m in tokens[weights]}
