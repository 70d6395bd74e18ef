"""The models, batches and independent FLOP counts of tools/training_setups.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

#: Sizes on a CPU, and on an accelerator.
SMALL = {"hidden": 128, "layers": 2, "heads": 4, "length": 128, "batch": 4, "vocabulary": 512}
LARGE = {"hidden": 2048, "layers": 8, "heads": 16, "length": 2048, "batch": 8, "vocabulary": 32000}


class Attention(nn.Module):
    """Separate projections, so that tensor parallelism can split them by heads."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.size = hidden // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads)
        self.w1, self.w3 = (nn.Linear(hidden, 3 * hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * hidden, hidden, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.w2(functional.silu(self.w1(y)) * self.w3(y))


class Decoder(nn.Module):
    """A Llama-like language model that returns its loss."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        hidden, layers, heads, vocabulary = (sizes[each] for each in ("hidden", "layers", "heads", "vocabulary"))
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.config = SimpleNamespace(
            model_type="llama", hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
            num_attention_heads=heads, vocab_size=vocabulary,
        )  # fmt: skip

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


def transformers_model(kind: str, sizes: dict[str, int]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a model of transformers with random weights, and one sample of its data."""
    import transformers

    hidden, layers, heads, length = (sizes[each] for each in ("hidden", "layers", "heads", "length"))
    usual = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    usual |= {"num_attention_heads": heads, "vocab_size": sizes["vocabulary"]}
    fields = {
        "Llama": usual | {"num_key_value_heads": heads // 2},
        "Bert": usual | {"max_position_embeddings": length},
        "GPT2": {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": length}
        | {"vocab_size": sizes["vocabulary"]},
    }
    config = getattr(transformers, f"{kind}Config")(**fields[kind], attn_implementation="sdpa")
    head = "MaskedLM" if kind == "Bert" else "CausalLM"
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    ids = torch.randint(3, sizes["vocabulary"], (length,))
    return model.train(), {"input_ids": ids, "labels": ids}


def counted_by_torch(step: Any) -> float:
    """torch's own counter and formulas, with attention as products."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        step()
    return float(counter.get_total_flops())
