"""The reference for a training step: the same network in float32 with plain attention, one block at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.func import functional_call

from mamf.operations.model.kernels.network import Network


class Reference:
    """Losses and gradients with a network's current parameters. Holds at most one block of them in float32."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def losses(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of each token."""
        head, pairs = self._network.head, zip(tokens.split(1), targets.split(1), strict=True)
        with torch.no_grad(), use_eager_attention(self._network):
            return torch.cat([in_float32(head, self._inputs(own)[-1], follow) for own, follow in pairs])

    def gradients(
        self, tokens: torch.Tensor, targets: torch.Tensor, of: Sequence[nn.Parameter]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The loss of each token, and the gradients of the mean loss."""
        sums = {each: torch.zeros_like(each, dtype=torch.float32) for each in of}
        losses = []
        with use_eager_attention(self._network):
            for own, follow in zip(tokens.split(1), targets.split(1), strict=True):
                with torch.no_grad():
                    inputs = self._inputs(own)
                x = inputs.pop().requires_grad_()
                loss = in_float32(self._network.head, x, follow)
                losses.append(loss.detach())
                gradient = add_gradients(sums, self._network.head, x, loss.sum() / targets.numel())
                for block in reversed(self._network.stack):
                    x = inputs.pop().requires_grad_()
                    gradient = add_gradients(sums, block, x, in_float32(block, x), gradient)
        return torch.cat(losses), list(sums.values())

    def _inputs(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """The inputs of each block and of the head."""
        inputs = [in_float32(self._network.embedding, tokens)]
        for block in self._network.stack:
            inputs.append(in_float32(block, inputs[-1]))
        return inputs


@contextmanager
def use_eager_attention(network: Network) -> Iterator[None]:
    """Replace the network's attention by plain attention within the context."""
    attentions = [block.attention for block in network.stack]
    own = [each.attend for each in attentions]
    try:
        for each in attentions:
            each.attend = causal_attention
        yield
    finally:
        for each, attend in zip(attentions, own, strict=True):
            each.attend = attend


def add_gradients(
    sums: dict[nn.Parameter, torch.Tensor],
    module: nn.Module,
    x: torch.Tensor,
    output: torch.Tensor,
    gradient: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add the gradients of a module's parameters to the existing sums; returns the gradient of its input."""
    wanted = [each for each in module.parameters() if each in sums]
    of_input, *found = torch.autograd.grad(output, [x, *wanted], gradient)
    for parameter, own in zip(wanted, found, strict=True):
        sums[parameter] += own
    return of_input


def in_float32(module: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """A module's output with its parameters and buffers in float32."""
    named = (*module.named_parameters(), *module.named_buffers())
    output: torch.Tensor = functional_call(module, {name: each.float() for name, each in named}, inputs)
    return output


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(Q K^T / sqrt(d)) V, every score in memory."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(unseen, -math.inf).softmax(-1) @ v).transpose(1, 2)
