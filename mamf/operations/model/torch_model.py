"""Training steps in torch with any registered attention kernel, which is named in brackets: ``torch[sdpa-flash]``.

The reference is the same network in float32 with eager attention, one block at a time. The optimizer has a learning
rate of 0: it does all of its work but leaves the parameters unchanged, so the result of every step is known. After each
train of launches, losses and gradients are verified, and the parameters must not have changed. The optimizer's moments
are cleared before a train and must not be zero after it, which shows that the optimizer ran.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from mamf.backend import Backend, OperandPool, Unavailable
from mamf.kernel import Prepared, Verdict
from mamf.operations.attention.operation import AttentionProblem
from mamf.operations.attention.torch_attention import TorchAttention
from mamf.operations.model.network import AttentionFunction, Network, initialize_weights
from mamf.operations.model.operation import ModelKernel, ModelProblem, ModelShape, Phase
from mamf.operations.operand_sets import ChangeDetector, check_torch_backend, get_max_error, list_tensors, poison_tensor
from mamf.operations.unknown import get_operation
from mamf.plugins.discovery import make_kernel
from mamf.torch_backend import TorchBackend, require_memory, to_torch_dtype

#: The number of batches that launches rotate over. All launches share the parameters, so more batches would not evict
#: more data from the cache.
_MAX_BATCHES = 3


class TorchModel(ModelKernel):
    """A model in eager torch that uses the attention kernel named in brackets."""

    takes = "an attention kernel"
    base: ClassVar[str] = "torch"

    def __init__(self, attention: str = "sdpa") -> None:
        """Load the attention kernel. Raises UnknownNameError, or UsageError if it cannot be loaded."""
        self.attention = make_kernel(get_operation("attention"), attention)
        self.name = f"{self.base}[{self.attention.name}]"

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return check_torch_backend(backend) or self.attention.unavailable(backend)

    def unsupported(self, backend: Backend, problem: ModelProblem) -> str | None:
        if not isinstance(self.attention, TorchAttention):
            return f"a model cannot call {self.attention.name}, because it is not a TorchAttention: use another kernel"
        return super().unsupported(backend, problem) or self.attention.unsupported(
            backend, make_attention_problem(problem)
        )

    def unsupported_shape(self, problem: ModelProblem, shape: ModelShape) -> str | None:
        reason = super().unsupported_shape(problem, shape)
        return reason or self.attention.unsupported_shape(make_attention_problem(problem), problem.attention(shape))

    def settings(self, backend: Backend, problem: ModelProblem) -> AbstractContextManager[object]:
        return self.attention.settings(backend, make_attention_problem(problem))

    def refuses(self, error: Exception) -> bool:
        return self.attention.refuses(error)

    def attend(self, backend: Backend, problem: ModelProblem, shape: ModelShape) -> AttentionFunction:
        """Return the attention kernel as a function in the network's layout."""
        attention = self.attention
        assert isinstance(attention, TorchAttention)
        call = attention.bind(backend, make_attention_problem(problem), problem.attention(shape))
        recorded = nullcontext if "fwd+bwd" in attention.directions else torch.no_grad
        is_sequence_first = attention.layout == "bshd"

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with recorded():
                if is_sequence_first:
                    return call(q, k, v)
                return call(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

        return attend

    def make_forward_function(self, network: Network) -> Callable[..., torch.Tensor]:
        """Return the function that a launch calls."""
        return network

    def prepare(
        self,
        backend: Backend,
        problem: ModelProblem,
        shape: ModelShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        assert isinstance(backend, TorchBackend)
        gc.collect()  # free the previous model, which may be in a reference cycle
        require_memory(backend, problem.nbytes(shape))
        network = make_network(backend.device, problem, shape, self.attend(backend, problem, shape))
        run = self.make_forward_function(network)
        if problem.autocast:
            run = wrap_in_autocast(run, backend.device, problem)
        return PreparedModel(problem, shape, network, run, min(sets, _MAX_BATCHES)).prepare()


class CompiledModel(TorchModel):
    """``TorchModel`` under torch.compile, compiled for each shape."""

    base = "compiled"

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return backend.without_compiler() or super().unavailable(backend)

    def make_forward_function(self, network: Network) -> Callable[..., torch.Tensor]:
        # Dynamo compiles a code object at most 8 times. Without the reset, later networks would run uncompiled.
        torch.compiler.reset()
        compiled: Callable[..., torch.Tensor] = torch.compile(network, dynamic=False)
        return compiled


def wrap_in_autocast(
    run: Callable[..., torch.Tensor], device: torch.device, problem: ModelProblem
) -> Callable[..., torch.Tensor]:
    """Wrap a forward pass in torch.autocast, as training code does. Its backward pass uses the same dtypes."""

    def call(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, to_torch_dtype(problem.dtype)):
            return run(tokens, targets)

    return call


def make_attention_problem(problem: ModelProblem) -> AttentionProblem:
    """Make the attention problem of a layer."""
    return AttentionProblem(problem.dtype, "fwd+bwd" if problem.has_backward else "fwd")


def make_network(device: torch.device, problem: ModelProblem, shape: ModelShape, attend: AttentionFunction) -> Network:
    """Make a network on the device, with random parameters that depend on the seed only."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(to_torch_dtype(problem.parameter_dtype))
    try:
        with device:
            network = Network(problem, shape, attend)
    finally:
        torch.set_default_dtype(default_dtype)
    initialize_weights(network, torch.Generator(device).manual_seed(problem.seed))
    return network


# -- launches and their verification -----------------------------------------------------------------------------------


def compute_reference_results(
    network: Network, tokens: torch.Tensor, targets: torch.Tensor, of: Sequence[nn.Parameter]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Compute the loss of each token, and the gradients of the mean loss with respect to the parameters in ``of``.

    Uses the network's current parameters. At most one block of them is converted to float32 at a time.
    """
    losses, sums = [], [torch.zeros_like(each, dtype=torch.float32) for each in of]
    with use_eager_attention(network), torch.set_grad_enabled(bool(of)):
        for own, follow in zip(tokens.split(1), targets.split(1), strict=True):
            x = call_in_float32(network.embedding, own)
            for block in network.stack:
                x = checkpoint(call_in_float32, block, x, use_reentrant=False)
            loss = checkpoint(call_in_float32, network.head, x, follow, use_reentrant=False)
            losses.append(loss.detach())
            if of:
                found = torch.autograd.grad(loss.sum() / targets.numel(), of)
                sums = [before + own for before, own in zip(sums, found, strict=True)]
    return torch.cat(losses), sums


@contextmanager
def use_eager_attention(network: Network) -> Iterator[None]:
    """Replace the network's attention kernel by eager attention within the context."""
    attentions = [block.attention for block in network.stack]
    own = [each.attend for each in attentions]
    try:
        for each in attentions:
            each.attend = compute_causal_attention
        yield
    finally:
        for each, attend in zip(attentions, own, strict=True):
            each.attend = attend


def call_in_float32(module: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """Compute a module's output with its parameters and buffers in float32."""
    named = (*module.named_parameters(), *module.named_buffers())
    output: torch.Tensor = functional_call(module, {name: each.float() for name, each in named}, inputs)
    return output


def compute_causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute causal attention, softmax(Q K^T / sqrt(d)) V. All scores are in memory at once."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(unseen, -math.inf).softmax(-1) @ v).transpose(1, 2)


#: The largest error of the losses, in standard deviations of the reference's losses.
_LOSS_TOLERANCE = {"bfloat16": 0.05, "float32": 5e-4}
_GRADIENT_TOLERANCE_FACTOR = 2.0
_MOMENT_NAMES = ("exp_avg", "exp_avg_sq")
_ReferenceResult = tuple[torch.Tensor, list[torch.Tensor]]


class PreparedModel:
    """A network, and the batches that its launches rotate over.

    A launch returns the loss of each token. With a backward pass it also returns the gradients of the last norm and of
    the first block's attention, which depend on all other layers.
    """

    def __init__(
        self,
        problem: ModelProblem,
        shape: ModelShape,
        network: Network,
        run: Callable[..., torch.Tensor],
        batches: int,
    ) -> None:
        self._problem, self._network, self._run = problem, network, run
        self._device = next(network.parameters()).device
        self._batches = [draw_batch(problem, shape, index, self._device) for index in range(batches)]
        self._sampled_parameters = [*network.stack[0].attention.parameters(), *network.head.norm.parameters()]
        phase: Phase = "forward-backward" if problem.has_backward else "forward"
        alike = replace(problem, phase=phase, checkpointing=False, optimizer="adamw")
        self._shared_references = get_cached_references(alike, shape, self._device)
        self._references = dict(self._shared_references)
        self._optimizer: torch.optim.Optimizer | None = None
        if problem.phase == "step":
            fused = problem.optimizer == "adamw-fused"
            self._optimizer = torch.optim.AdamW(network.parameters(), lr=0.0, fused=fused)
        # Gradients and moments stay in memory between launches. Together they are this many times as large as the
        # parameters.
        copies = 1 + (len(_MOMENT_NAMES) if self._optimizer else 0)
        self._held_bytes = copies * problem.count_parameter_bytes(shape)

    def prepare(self) -> Prepared:
        operands: dict[str, torch.Tensor] = dict(self._network.named_parameters())
        for index, (tokens, targets) in enumerate(self._batches):
            operands |= {f"tokens {index}": tokens, f"targets {index}": targets}
        self._unchanged = ChangeDetector({name: tensor.detach() for name, tensor in operands.items()})
        return Prepared(
            launches=[functools.partial(self._launch, *batch) for batch in self._batches],
            verify=self.verify,
            poison=self.poison,
            changed_operands=self.changed_operands,
            held_bytes=self._held_bytes,
        )

    def _launch(self, tokens: torch.Tensor, targets: torch.Tensor) -> object:
        if not self._problem.has_backward:
            # Record the autograd graph as in training, so that the other phases add only the backward pass.
            return self._run(tokens, targets).detach()
        self._network.zero_grad(set_to_none=True)
        losses = self._run(tokens, targets)
        losses.mean().backward()
        if self._optimizer is not None:
            self._optimizer.step()
        return (losses.detach(), *(each.grad for each in self._sampled_parameters))

    # -- verification ------------------------------------------------------------------------------------------------

    def poison(self, returned: Sequence[object]) -> None:
        """Poison the returned tensors, release all gradients, and clear the moments of the sampled parameters."""
        for result in returned:
            for tensor in list_tensors(result):
                poison_tensor(tensor)
        self._network.zero_grad(set_to_none=True)
        for moment in self._get_moments():
            moment.zero_()

    def changed_operands(self) -> Sequence[str]:
        """Return the names of operands that changed. If none did, share the reference results with other kernels."""
        changed = self._unchanged()
        if not changed:
            self._shared_references |= self._references
        return changed

    def _get_moments(self) -> list[torch.Tensor]:
        """Return the optimizer's moments of the sampled parameters. The list is empty until it has run once."""
        if self._optimizer is None:
            return []
        states = [self._optimizer.state[each] for each in self._sampled_parameters]
        return [state[name] for state in states for name in _MOMENT_NAMES if state]

    def verify(self, index: int, result: object) -> Verdict:
        """Verify the losses, relative to the standard deviation of the expected losses, and the gradients, relative to
        their expected norms.
        """
        losses, gradients = self._get_reference(index)
        found, *own = list_tensors(result)
        error = compute_relative_error(found, losses, losses - losses.mean())
        details: dict[str, float | str] = {}
        if self._problem.has_backward:
            details["gradient_error"] = off = get_max_error(map(compute_relative_error, own, gradients, gradients))
            error = get_max_error((error, off / _GRADIENT_TOLERANCE_FACTOR))
        if any(not float(moment.float().norm()) > 0 for moment in self._get_moments()):
            error, details["optimizer"] = math.inf, "did not run: its moments are 0"
        return Verdict(error, _LOSS_TOLERANCE[self._problem.dtype], details, "float32")

    def _get_reference(self, index: int) -> _ReferenceResult:
        if index not in self._references:
            sampled = self._sampled_parameters if self._problem.has_backward else []
            losses, gradients = compute_reference_results(self._network, *self._batches[index], sampled)
            self._references[index] = losses.cpu(), [each.cpu() for each in gradients]
        return self._references[index]


@functools.lru_cache(maxsize=4)
def get_cached_references(
    problem: ModelProblem, shape: ModelShape, device: torch.device
) -> dict[int, _ReferenceResult]:
    """Return the cache of reference results by batch, in host memory. Kernels share it, because computing a result
    takes longer than measuring a row.
    """
    return {}


def draw_batch(
    problem: ModelProblem, shape: ModelShape, index: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw random tokens. Return them and the targets (the next token of each), both [batch, context]."""
    generator = torch.Generator().manual_seed(problem.seed + index)
    text = torch.randint(problem.vocabulary, (shape.batch, shape.context + 1), generator=generator)
    return text[:, :-1].contiguous().to(device), text[:, 1:].contiguous().to(device)


def compute_relative_error(found: torch.Tensor, reference: torch.Tensor, scale: torch.Tensor) -> float:
    """Return ||found - reference|| / ||scale||."""
    return float((found.float() - reference.to(found.device)).norm() / scale.norm())
