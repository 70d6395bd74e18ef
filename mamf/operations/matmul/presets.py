"""The linear layers of known models as products: forward, and the gradients of input and weights. Pure.

Sizes come from the models' published configurations: Llama 3.1 8B (hidden 4096, MLP 14336, 32 heads and 8 kv heads of
128, vocabulary 128256) and 70B (8192, 28672, 64 and 8), arXiv 2407.21783, table 3; DeepSeek-V3's attention (hidden
7168, 128 heads of 128 + 64, latents of 1536 and 512), arXiv 2412.19437, section 4.2. Projections of one input are one
product, as in libraries that serve models (q, k and v; gate and up).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mamf.operations.matmul.shapes import MatmulShape

#: The products of a linear layer with their layouts: y = x W^T, dx = dy W, dW = dy^T x.
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
        """The shape of a product, by its name in LAYOUT_OF."""
        return {
            "forward": MatmulShape(tokens, self.outputs, self.inputs),
            "grad-input": MatmulShape(tokens, self.inputs, self.outputs),
            "grad-weight": MatmulShape(self.outputs, self.inputs, tokens),
        }[product]


@dataclass(frozen=True)
class Preset:
    """Layers, and the numbers of tokens to measure them with."""

    layers: tuple[Linear, ...]
    tokens: tuple[int, ...] = _TRAINING

    def shapes(self, product: str = "forward", tokens: Sequence[int] | None = None) -> dict[MatmulShape, str]:
        """The shapes of the products, each with the names of its layers; layers with the same shape share a row."""
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
