"""What a step must give: the same network in float32 with attention written out, a sequence and a block at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.func import functional_call

from mamf.operations.model.kernels.network import Network
from mamf.operations.model.shapes import ModelProblem, ModelShape


class Reference:
    """Of a network's parameters as they are. Never holds more than a block of them in float32."""

    def __init__(self, problem: ModelProblem, shape: ModelShape, network: Network) -> None:
        with torch.device("meta"):
            written_out = Network(problem, shape, causal_attention)
        self._network = network
        #: What runs, and whose parameters it runs with.
        self._blocks = list(zip(written_out.stack, network.stack, strict=True))
        self._head = (written_out.head, network.head)
        self._embedding = (written_out.embedding, network.embedding)

    def losses(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of every token."""
        with torch.no_grad():
            return torch.cat(
                [
                    in_float32(*self._head, self._inputs(own)[-1], follow)
                    for own, follow in zip(tokens.split(1), targets.split(1), strict=True)
                ]
            )

    def gradients(
        self, tokens: torch.Tensor, targets: torch.Tensor, of: Sequence[nn.Parameter]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The loss of every token, and the gradients of the mean loss."""
        losses, sums = [], {each: torch.zeros_like(each, dtype=torch.float32) for each in of}
        for own, follow in zip(tokens.split(1), targets.split(1), strict=True):
            with torch.no_grad():
                inputs = self._inputs(own)
            loss = in_float32(*self._head, x := inputs.pop().requires_grad_(), follow)
            gradient = add_gradients(sums, self._head[1], x, loss.sum() / targets.numel())
            for block in reversed(self._blocks):
                x = inputs.pop().requires_grad_()
                gradient = add_gradients(sums, block[1], x, in_float32(*block, x), gradient)
            losses.append(loss.detach())
        return torch.cat(losses), list(sums.values())

    def _inputs(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """What goes into each block, and into the head."""
        inputs = [in_float32(*self._embedding, tokens)]
        for block in self._blocks:
            inputs.append(in_float32(*block, inputs[-1]))
        return inputs


def add_gradients(
    sums: dict[nn.Parameter, torch.Tensor],
    module: nn.Module,
    x: torch.Tensor,
    output: torch.Tensor,
    gradient: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add the gradients of a module's parameters to the sums that there are; returns that of its input."""
    wanted = [each for each in module.parameters() if each in sums]
    of_input, *found = torch.autograd.grad(output, [x, *wanted], gradient)
    for parameter, own in zip(wanted, found, strict=True):
        sums[parameter] += own
    return of_input


def in_float32(module: nn.Module, weights_of: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """A module's output with another's parameters and buffers."""
    named = (*weights_of.named_parameters(), *weights_of.named_buffers())
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
