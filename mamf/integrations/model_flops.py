"""FLOP of a transformer's training step by formula: 6 N a token, and attention.

Each weight that a token is multiplied with costs it 2 FLOP forward and 4 backward: 6 N (Kaplan et al. 2020, arXiv
2001.08361, section 2.1). Attention adds 12 L H Q T a token: layers, heads, head dimension, sequence length (Chowdhery
et al. 2022, PaLM, arXiv 2204.02311, appendix B). That counts the whole square of scores; a causal mask needs half.
What is computed anew (activation checkpointing, a flash kernel's scores) is not counted: it is not work of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mamf.errors import UnsupportedError

_GATED = frozenset(
    {
        *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "phi3"),
        *("olmo", "olmo2", "olmoe", "granite"),
    }
)
_TWO_LAYERS = frozenset({"gpt2", "gpt_neox", "gptj", "starcoder2", "phi"})
_AGREEMENT = 0.01
_MISSED = "the counter knows no custom kernels and no flex attention, and misses"
_FORWARD, _RECOMPUTED_FORWARD = 1 / 3, 4 / 3
# A flash kernel's backward multiplies five times where the forward pass does twice: 7 in place of 6.
_FLASH_ATTENTION = 7 / 6


@dataclass(frozen=True)
class ModelFlops:
    """``weights``: N, those that a token is multiplied with: linear layers, of experts the active ones, router, and the
    output layer; looking up an embedding is no product. ``expert_weights``: those of ``weights`` that are experts'.
    ``attention_width``: heads times head dimension.
    """

    weights: int
    layers: int
    attention_width: int
    expert_weights: int = 0

    def per_token(self, sequence_length: int, causal: bool = False) -> float:
        """FLOP of forward and backward; ``causal``: only the half of attention that a causal mask leaves."""
        attention = 12 * self.layers * self.attention_width * sequence_length
        return 6 * self.weights + (attention / 2 if causal else attention)

    def beside(self, counted: float, tokens: int, sequence_length: int) -> str:
        """A line on what ``mamf.count_flops`` says of a step of so many tokens, and why it differs."""
        linear, experts = 6 * self.weights, 6 * self.expert_weights
        formula, causal = self.per_token(sequence_length), self.per_token(sequence_length, causal=True)
        attention = formula - linear
        both = (
            f"a token: {formula / 1e9:.4g} GFLOP by formula ({causal / 1e9:.4g} causal), "
            f"{counted / tokens / 1e9:.4g} counted"
        )
        reasons = (
            (formula, "they agree"),
            (causal, "the attention kernel counts as causal"),
            (linear, f"{_MISSED} attention"),
            (formula - experts, f"{_MISSED} the experts"),
            (linear - experts, f"{_MISSED} attention and the experts"),
            (linear + attention * _FLASH_ATTENTION, "the counter adds what a flash kernel's backward computes anew"),
            (formula * _FORWARD, "the forward pass alone was counted"),
            (formula * _RECOMPUTED_FORWARD, "checkpointing computes the forward pass anew, which is no model FLOP"),
        )
        # The nearest counts: a model of short sequences has attention of less than the tolerance.
        expected, reason = min(reasons, key=lambda each: abs(counted / tokens - each[0]))
        if abs(counted / tokens / expected - 1) > _AGREEMENT:
            reason = "layers that the formula does not know, or kernels that the counter does not"
        return f"{both}: {reason}"


def model_flops(model: Any) -> ModelFlops:
    """FLOP by formula of a transformer, from its configuration.

    ``model``: a configuration of transformers, or what has one as ``config``; any object with its attributes does
    (``model_type``, ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads``, ``vocab_size``, ...). Raises
    UnsupportedError for an architecture that it does not know.

    >>> from types import SimpleNamespace
    >>> gpt2 = SimpleNamespace(
    ...     model_type="gpt2", hidden_size=768, num_hidden_layers=12, num_attention_heads=12, vocab_size=50257
    ... )
    >>> flops = mamf.model_flops(gpt2)
    >>> f"{flops.weights / 1e6:.1f} M weights, {flops.per_token(1024) / 1e6:.1f} MFLOP a token"
    '123.5 M weights, 854.4 MFLOP a token'
    """
    config = getattr(model, "config", model)
    kind = str(getattr(config, "model_type", type(config).__name__))
    if kind not in _GATED | _TWO_LAYERS:
        known = ", ".join(sorted(_GATED | _TWO_LAYERS))
        raise UnsupportedError(
            f"no formula for {kind!r}: count it (mamf.count_flops), or give its FLOP (flops_per_step=); known: {known}"
        )
    hidden, layers, heads = (
        _number(config, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    width = heads * (_number(config, "head_dim", 0) or hidden // heads)
    of_keys = _number(config, "num_key_value_heads", heads) * width // heads
    attention = 2 * hidden * width + 2 * hidden * of_keys
    mlps, experts = _mlp_weights(config, hidden, layers, matrices=3 if kind in _GATED else 2)
    weights = layers * attention + mlps + hidden * _number(config, "vocab_size")
    return ModelFlops(weights, layers, width, experts)


def _mlp_weights(config: Any, hidden: int, layers: int, matrices: int) -> tuple[int, int]:
    """Of all layers, and of these the experts': where there are some, those that a token meets, and the router."""
    inner = _number(config, "intermediate_size", 0) or _number(config, "n_inner", 0) or 4 * hidden
    dense = matrices * hidden * inner
    experts = next((found for name in ("num_local_experts", "num_experts") if (found := _number(config, name, 0))), 0)
    if not experts:
        return layers * dense, 0
    each = matrices * hidden * (_number(config, "moe_intermediate_size", 0) or inner)
    active = _number(config, "num_experts_per_tok") * each
    shared = _number(config, "shared_expert_intermediate_size", 0)
    sparse = active + hidden * experts + matrices * hidden * shared + (hidden if shared else 0)
    every, without = _number(config, "decoder_sparse_step", 1), set(getattr(config, "mlp_only_layers", None) or ())
    is_sparse = [number not in without and (number + 1) % every == 0 for number in range(layers)]
    return sum(sparse if each else dense for each in is_sparse), active * sum(is_sparse)


def _number(config: Any, name: str, otherwise: int | None = None) -> int:
    found = getattr(config, name, None)
    if found is None:
        if otherwise is None:
            raise UnsupportedError(f"the model's configuration has no {name}: give its FLOP (flops_per_step=)")
        return otherwise
    return int(found)
