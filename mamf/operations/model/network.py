"""Implement GPT-2, Llama and a mixture of experts in plain torch, for the training steps of ``mamf model``.

The caller passes the function that computes attention, (q, k, v) -> output. Q, K, V and output have the shape [batch,
sequence, heads, head dimension].
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mamf.operations.model.operation import ModelProblem, ModelShape

AttentionFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_ROTARY_BASE = 500_000.0
#: The standard deviation of the attention scores before the softmax. With a smaller value, a kernel that attends to
#: wrong keys could give almost the right loss.
_SCORE_STANDARD_DEVIATION = 2.0


class LanguageModel(nn.Module):
    """A language model that computes the loss of each token, in float32.

    ``forward`` takes tokens and targets (the next token of each token), both [batch, context].
    """

    def __init__(self, problem: ModelProblem, shape: ModelShape, attend: AttentionFunction) -> None:
        super().__init__()
        self.checkpointing = problem.checkpointing
        self.embedding = InputEmbedding(problem, shape)
        #: The elements of ``blocks`` as a tuple, because mypy does not know the element type of a ModuleList.
        self.typed_blocks = tuple(TransformerBlock(problem, shape, attend) for _ in range(problem.layers))
        self.blocks = nn.ModuleList(self.typed_blocks)
        self.head = LossHead(problem)
        if problem.tied:
            self.head.logits.weight = self.embedding.tokens.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.typed_blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(x, targets)  # type: ignore[no-any-return]


class InputEmbedding(nn.Module):
    """The first layer of a network: the embedding of tokens and, in GPT-2, of their positions."""

    def __init__(self, problem: ModelProblem, shape: ModelShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(problem.vocabulary, problem.d_model)
        self.positions = nn.Embedding(shape.context, problem.d_model) if problem.style == "gpt2" else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        return x if self.positions is None else x + self.positions.weight  # type: ignore[no-any-return]


class LossHead(nn.Module):
    """The last layer of a network, which computes the loss of each token from float32 logits, as training code does."""

    def __init__(self, problem: ModelProblem) -> None:
        super().__init__()
        self.norm = make_norm_layer(problem)
        self.logits = nn.Linear(problem.d_model, problem.vocabulary, bias=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            self.logits(self.norm(x)).float().flatten(0, 1), targets.flatten(), reduction="none"
        )


class TransformerBlock(nn.Module):
    def __init__(self, problem: ModelProblem, shape: ModelShape, attend: AttentionFunction) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = make_norm_layer(problem), make_norm_layer(problem)
        self.attention = SelfAttention(problem, shape, attend)
        self.mlp = MixtureOfExperts(problem) if problem.style == "moe" else Mlp(problem)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    """A causal self-attention layer. One matmul computes its queries, keys and values."""

    rotary_cosine: torch.Tensor
    rotary_sine: torch.Tensor

    def __init__(self, problem: ModelProblem, shape: ModelShape, attend: AttentionFunction) -> None:
        super().__init__()
        self.attend, self.head_dim = attend, problem.head_dim
        self.heads, self.kv_heads = problem.heads, problem.kv_heads
        self.is_rotary = problem.style != "gpt2"
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = nn.Linear(problem.d_model, width, bias=not self.is_rotary)
        self.out = nn.Linear(problem.d_model, problem.d_model, bias=not self.is_rotary)
        if self.is_rotary:
            # The tables of rotary position embeddings have the shape [context, 1, head dimension / 2].
            device = self.qkv.weight.device
            pairs = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32)
            positions = torch.arange(shape.context, device=device, dtype=torch.float32)
            angles = torch.outer(positions, _ROTARY_BASE ** (-pairs / self.head_dim))[:, None, :]
            self.register_buffer("rotary_cosine", angles.cos(), persistent=False)
            self.register_buffer("rotary_sine", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, d_model = x.shape
        heads = self.qkv(x).view(batch, context, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        if self.is_rotary:
            q, k = (apply_rotary_positions(each, self.rotary_cosine, self.rotary_sine) for each in (q, k))
        return self.out(self.attend(q, k, v).reshape(batch, context, d_model))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """The MLP of a block. GPT-2 has GELU and biases. Llama has SwiGLU, which uses a gate, and no biases."""

    def __init__(self, problem: ModelProblem) -> None:
        super().__init__()
        d, d_ff, has_bias = problem.d_model, problem.d_ff, problem.style == "gpt2"
        self.gate = None if has_bias else nn.Linear(d, d_ff, bias=False)
        self.up = nn.Linear(d, d_ff, bias=has_bias)
        self.down = nn.Linear(d_ff, d, bias=has_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(functional.gelu(self.up(x), approximate="tanh"))  # type: ignore[no-any-return]
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class MixtureOfExperts(nn.Module):
    """The MLP of a block with several experts, each a SwiGLU MLP.

    Tokens are assigned to experts in turn, so that each expert gets the same number of tokens and all launches do the
    same work. The router only computes the weights with which the experts' outputs are summed.
    """

    def __init__(self, problem: ModelProblem) -> None:
        super().__init__()
        d, d_ff, self.experts, self.active_experts = (
            problem.d_model,
            problem.d_ff,
            problem.experts,
            problem.active_experts,
        )
        self.router = nn.Linear(d, self.experts, bias=False)
        self.gate = nn.Parameter(torch.empty(self.experts, d, d_ff))
        self.up = nn.Parameter(torch.empty(self.experts, d, d_ff))
        self.down = nn.Parameter(torch.empty(self.experts, d_ff, d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Group e contains the tokens e, e + experts, e + 2 * experts and so on. There are ``active_experts`` turns. In
        # turn n, expert (e + n) % experts processes group e.
        groups = x.view(-1, self.experts, x.shape[-1]).transpose(0, 1)
        group_indices = torch.arange(self.experts, device=x.device)
        turns = [(group_indices + turn) % self.experts for turn in range(self.active_experts)]
        router_scores = self.router(groups)
        expert_weights = torch.stack([router_scores[group_indices, :, expert] for expert in turns], dim=-1).softmax(-1)
        output = sum(
            self.compute_expert_outputs(groups.roll(turn, 0)).roll(-turn, 0) * expert_weights[..., turn, None]
            for turn in range(self.active_experts)
        )
        assert isinstance(output, torch.Tensor)
        return output.transpose(0, 1).reshape(x.shape)

    def compute_expert_outputs(self, groups: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all experts. Expert i processes group i.

        ``groups``: a tensor of the shape [experts, tokens, d_model].
        """
        return (functional.silu(groups @ self.gate) * (groups @ self.up)) @ self.down


def make_norm_layer(problem: ModelProblem) -> nn.Module:
    return nn.LayerNorm(problem.d_model) if problem.style == "gpt2" else nn.RMSNorm(problem.d_model, eps=1e-5)


def apply_rotary_positions(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1).to(x.dtype)


@torch.no_grad()
def initialize_weights(network: LanguageModel, generator: torch.Generator) -> None:
    """Set all weights of a network to normal random values, the weights of norms to 1, and all biases to 0.

    The standard deviations of the weights give activations a standard deviation of about 1.
    """
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(0, 1 / math.sqrt(module.weight.shape[1]), generator=generator)
        elif isinstance(module, MixtureOfExperts):
            for weights in (module.gate, module.up, module.down):
                weights.normal_(0, 1 / math.sqrt(weights.shape[1]), generator=generator)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.weight.fill_(1)
        if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
            module.bias.zero_()
    for attention in (block.attention for block in network.typed_blocks):
        width = (attention.heads + attention.kv_heads) * attention.head_dim
        attention.qkv.weight[:width] *= math.sqrt(_SCORE_STANDARD_DEVIATION)
