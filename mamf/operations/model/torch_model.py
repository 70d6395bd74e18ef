"""Run training steps in torch with any installed attention kernel.

The name of a model kernel contains the name of its attention kernel in brackets, as in ``torch[sdpa-flash]``.

The reference result comes from the kernel's own network, which mamf runs again in float32 with eager attention, one
block at a time. The optimizer has a learning rate of 0: it does all of its work but leaves the parameters unchanged, so
every step on the same batch has the same result. After a timed series of launches, mamf verifies the losses and
gradients, and checks that the parameters have not changed. To check that the optimizer ran, mamf sets the optimizer's
moments to zero before the series. If the moments are still zero afterward, the optimizer did not run.
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

from mamf.backend import Backend, OperandPool, Unavailability
from mamf.kernel import PreparedKernel, Verdict
from mamf.operations.attention.operation import AttentionProblem
from mamf.operations.attention.torch_attention import TorchAttention
from mamf.operations.model.network import AttentionFunction, LanguageModel, initialize_weights
from mamf.operations.model.operation import ModelKernel, ModelProblem, ModelShape, TrainingPhase
from mamf.operations.operand_sets import (
    ChangeDetector,
    compute_max_error,
    explain_torch_unavailability,
    list_result_tensors,
    poison_tensor,
)
from mamf.operations.unknown import get_operation
from mamf.plugins.discovery import make_kernel
from mamf.torch_backend import TorchBackend, get_torch_dtype, require_free_memory

#: The maximum number of batches that launches use in turn. More batches would not make launches read more data from
#: memory, because all launches share the parameters.
_MAX_BATCHES = 3


class TorchModel(ModelKernel):
    """A kernel that runs a model in eager torch. Its name contains the name of an attention kernel in brackets.

    ``base_name``: the name before the brackets.
    """

    argument_description = "an attention kernel"
    base_name: ClassVar[str] = "torch"

    def __init__(self, attention: str = "sdpa") -> None:
        """Load the attention kernel ``attention``. Raises UnknownNameError if no kernel has this name, and UsageError
        if the kernel cannot be loaded.
        """
        self.attention_kernel = make_kernel(get_operation("attention"), attention)
        self.name = f"{self.base_name}[{self.attention_kernel.name}]"

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        missing = explain_torch_unavailability(backend) or self.attention_kernel.explain_unavailability(backend)
        return missing and replace(
            missing, remedy=missing.remedy.replace("mamf attention --kernel", "mamf model --attention")
        )

    def explain_unsupported_problem(self, backend: Backend, problem: ModelProblem) -> str | None:
        if not isinstance(self.attention_kernel, TorchAttention):
            return (
                f"a model cannot use the attention kernel {self.attention_kernel.name}, because it is not a "
                "subclass of TorchAttention: choose another --attention"
            )
        return super().explain_unsupported_problem(
            backend, problem
        ) or self.attention_kernel.explain_unsupported_problem(backend, make_attention_problem(problem))

    def explain_unsupported_shape(self, problem: ModelProblem, shape: ModelShape) -> str | None:
        return super().explain_unsupported_shape(problem, shape) or self.attention_kernel.explain_unsupported_shape(
            make_attention_problem(problem), problem.make_attention_shape(shape)
        )

    def apply_settings(self, backend: Backend, problem: ModelProblem) -> AbstractContextManager[object]:
        return self.attention_kernel.apply_settings(backend, make_attention_problem(problem))

    def is_refusal(self, error: Exception) -> bool:
        return self.attention_kernel.is_refusal(error)

    def make_attention_function(self, backend: Backend, problem: ModelProblem, shape: ModelShape) -> AttentionFunction:
        """Return a function that runs the attention kernel on Q, K and V in the layout that LanguageModel uses."""
        attention_kernel = self.attention_kernel
        assert isinstance(attention_kernel, TorchAttention)
        run_attention = attention_kernel.bind_operands(
            backend, make_attention_problem(problem), problem.make_attention_shape(shape)
        )
        gradient_context = nullcontext if "fwd+bwd" in attention_kernel.directions else torch.no_grad
        is_sequence_first = attention_kernel.layout == "bshd"

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with gradient_context():
                if is_sequence_first:
                    return run_attention(q, k, v)
                return run_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

        return attend

    def make_forward_function(self, network: LanguageModel) -> Callable[..., torch.Tensor]:
        """Return the function that a launch calls to compute the losses: the network itself, or its compiled form."""
        return network

    def prepare(
        self,
        backend: Backend,
        problem: ModelProblem,
        shape: ModelShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> PreparedKernel:
        assert isinstance(backend, TorchBackend)
        gc.collect()  # Free the memory of the previous model, which may be in a reference cycle.
        require_free_memory(backend, problem.count_bytes(shape))
        network = make_network(backend.device, problem, shape, self.make_attention_function(backend, problem, shape))
        run_forward = self.make_forward_function(network)
        if problem.autocast:
            # Apply autocast only to the forward pass, as training code does. The backward pass uses the same dtypes.
            run_forward = torch.autocast(backend.device.type, get_torch_dtype(problem.dtype))(run_forward)
        return PreparedModel(problem, shape, network, run_forward, min(sets, _MAX_BATCHES)).make_prepared()


class CompiledModel(TorchModel):
    """A kernel like TorchModel, but under torch.compile, which compiles the network separately for each shape."""

    base_name = "compiled"

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        return backend.explain_missing_compiler() or super().explain_unavailability(backend)

    def make_forward_function(self, network: LanguageModel) -> Callable[..., torch.Tensor]:
        # Dynamo compiles the same code object at most 8 times. Reset its counter, so that every network is compiled.
        torch.compiler.reset()
        return torch.compile(network, dynamic=False)  # type: ignore[no-any-return]


def make_attention_problem(problem: ModelProblem) -> AttentionProblem:
    """Return the attention problem of a layer, for the operation ``attention``."""
    return AttentionProblem(problem.dtype, "fwd+bwd" if problem.has_backward_pass else "fwd")


def make_network(
    device: torch.device, problem: ModelProblem, shape: ModelShape, attend: AttentionFunction
) -> LanguageModel:
    """Make a network on the device. Its random parameters depend only on the problem, the shape and the seed."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(get_torch_dtype(problem.parameter_dtype))
    try:
        with device:
            network = LanguageModel(problem, shape, attend)
    finally:
        torch.set_default_dtype(default_dtype)
    initialize_weights(network, torch.Generator(device).manual_seed(problem.seed))
    return network


# -- launches and their verification -----------------------------------------------------------------------------------


def compute_reference_results(
    network: LanguageModel, tokens: torch.Tensor, targets: torch.Tensor, parameters: Sequence[nn.Parameter]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the loss of each token in float32, and the gradients of the mean loss with respect to ``parameters``.

    Convert the parameters of only one block at a time to float32, to save memory.
    """
    losses, sums = [], [torch.zeros_like(each, dtype=torch.float32) for each in parameters]
    with use_eager_attention(network), torch.set_grad_enabled(bool(parameters)):
        for inputs, next_tokens in zip(tokens.split(1), targets.split(1), strict=True):
            x = call_in_float32(network.embedding, inputs)
            for block in network.typed_blocks:
                x = checkpoint(call_in_float32, block, x, use_reentrant=False)
            loss = checkpoint(call_in_float32, network.head, x, next_tokens, use_reentrant=False)
            losses.append(loss.detach())
            if parameters:
                gradients = torch.autograd.grad(loss.sum() / targets.numel(), parameters)
                sums = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
    return torch.cat(losses), sums


@contextmanager
def use_eager_attention(network: LanguageModel) -> Iterator[None]:
    """In the ``with`` block, replace the attention kernel in all blocks of a network with compute_causal_attention."""
    attentions = [block.attention for block in network.typed_blocks]
    kernels = [each.attend for each in attentions]
    try:
        for each in attentions:
            each.attend = compute_causal_attention
        yield
    finally:
        for each, attend in zip(attentions, kernels, strict=True):
            each.attend = attend


def call_in_float32(module: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """Return the output of a module for ``inputs``, computed with its parameters and buffers converted to float32."""
    return functional_call(  # type: ignore[no-any-return]
        module,
        {name: each.float() for name, each in (*module.named_parameters(), *module.named_buffers())},
        inputs,
    )


def compute_causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention, softmax(Q K^T / sqrt(d)) V, computed with all scores in memory at once."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    causal_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(causal_mask, -math.inf).softmax(-1) @ v).transpose(1, 2)


#: The largest allowed error of the losses, divided by the standard deviation of the reference losses, by dtype.
_LOSS_TOLERANCE = {"bfloat16": 0.05, "float32": 5e-4}
_GRADIENT_TOLERANCE_FACTOR = 2.0
_MOMENT_NAMES = ("exp_avg", "exp_avg_sq")
_ReferenceResult = tuple[torch.Tensor, list[torch.Tensor]]


class PreparedModel:
    """A network that is ready to launch, and the batches that its launches use in turn.

    A launch returns the loss of each token. With a backward pass it also returns the gradients of the sampled
    parameters, which are the parameters of the last norm and of the first block's attention. The gradients in the first
    block depend on all other layers.
    """

    def __init__(
        self,
        problem: ModelProblem,
        shape: ModelShape,
        network: LanguageModel,
        run_forward: Callable[..., torch.Tensor],
        batch_count: int,
    ) -> None:
        self._problem, self._network, self._run_forward = problem, network, run_forward
        self._device = next(network.parameters()).device
        self._batches = [draw_batch(problem, shape, index, self._device) for index in range(batch_count)]
        self._sampled_parameters = [*network.typed_blocks[0].attention.parameters(), *network.head.norm.parameters()]
        reference_phase: TrainingPhase = "forward-backward" if problem.has_backward_pass else "forward"
        self._shared_references = get_reference_cache(
            replace(problem, phase=reference_phase, checkpointing=False, optimizer="adamw"), shape, self._device
        )
        self._references = dict(self._shared_references)
        self._optimizer: torch.optim.Optimizer | None = None
        if problem.phase == "step":
            self._optimizer = torch.optim.AdamW(network.parameters(), lr=0.0, fused=problem.optimizer == "adamw-fused")
        # Count the gradients and the optimizer's moments, because they stay in memory between launches.
        tensors_per_parameter = 1 + (len(_MOMENT_NAMES) if self._optimizer else 0)
        self._extra_bytes_per_set = tensors_per_parameter * problem.count_parameter_bytes(shape)

    def make_prepared(self) -> PreparedKernel:
        operands: dict[str, torch.Tensor] = dict(self._network.named_parameters())
        for index, (tokens, targets) in enumerate(self._batches):
            operands |= {f"tokens {index}": tokens, f"targets {index}": targets}
        self._find_changed_operands = ChangeDetector({name: tensor.detach() for name, tensor in operands.items()})
        return PreparedKernel(
            launches=[functools.partial(self._launch, *batch) for batch in self._batches],
            verify=self.verify,
            poison_outputs=self.poison_outputs,
            list_changed_operands=self.list_changed_operands,
            extra_bytes_per_set=self._extra_bytes_per_set,
        )

    def _launch(self, tokens: torch.Tensor, targets: torch.Tensor) -> object:
        if not self._problem.has_backward_pass:
            # Record the autograd graph, as in training. So the time of the phase forward-backward, minus the time of
            # the phase forward, is the time of the backward pass.
            return self._run_forward(tokens, targets).detach()
        self._network.zero_grad(set_to_none=True)
        losses = self._run_forward(tokens, targets)
        losses.mean().backward()
        if self._optimizer is not None:
            self._optimizer.step()
        return (losses.detach(), *(each.grad for each in self._sampled_parameters))

    # -- verification ------------------------------------------------------------------------------------------------

    def poison_outputs(self, returned: Sequence[object]) -> None:
        """Overwrite the results of earlier launches, so that the results are right only if a new launch computes them.

        Fill the tensors in ``returned`` with values that no launch produces, free all gradients, and set the
        optimizer's moments of the sampled parameters (see PreparedModel) to 0.
        """
        for result in returned:
            for tensor in list_result_tensors(result):
                poison_tensor(tensor)
        self._network.zero_grad(set_to_none=True)
        for moment in self._get_moments():
            moment.zero_()

    def list_changed_operands(self) -> Sequence[str]:
        """Return the names of the operands that launches have changed.

        If no operand has changed, also share the reference results with other kernels. The reference results were
        computed from the operands, so they would be wrong if a launch had changed an operand.
        """
        changed_operands = self._find_changed_operands()
        if not changed_operands:
            self._shared_references |= self._references
        return changed_operands

    def _get_moments(self) -> list[torch.Tensor]:
        """Return the optimizer's moments of the sampled parameters (see PreparedModel); empty before the first step."""
        if self._optimizer is None:
            return []
        states = [self._optimizer.state[each] for each in self._sampled_parameters]
        return [state[name] for state in states for name in _MOMENT_NAMES if state]

    def verify(self, index: int, result: object) -> Verdict:
        """Compare the result of a launch on batch ``index`` with the reference result.

        Divide the error of the losses by the standard deviation of the reference losses, and the error of a gradient by
        the norm of the reference gradient.
        """
        losses, gradients = self._get_reference_result(index)
        measured, *measured_gradients = list_result_tensors(result)
        error = compute_relative_error(measured, losses, losses - losses.mean())
        details: dict[str, float | str] = {}
        if self._problem.has_backward_pass:
            details["gradient_error"] = gradient_error = compute_max_error(
                map(compute_relative_error, measured_gradients, gradients, gradients)
            )
            error = compute_max_error((error, gradient_error / _GRADIENT_TOLERANCE_FACTOR))
        if any(not float(moment.float().norm()) > 0 for moment in self._get_moments()):
            error, details["optimizer"] = math.inf, "did not run: its moments (running averages of gradients) are 0"
        return Verdict(error, _LOSS_TOLERANCE[self._problem.dtype], details, "float32")

    def _get_reference_result(self, index: int) -> _ReferenceResult:
        if index not in self._references:
            parameters = self._sampled_parameters if self._problem.has_backward_pass else []
            losses, gradients = compute_reference_results(self._network, *self._batches[index], parameters)
            self._references[index] = losses.cpu(), [each.cpu() for each in gradients]
        return self._references[index]


@functools.lru_cache(maxsize=4)
def get_reference_cache(problem: ModelProblem, shape: ModelShape, device: torch.device) -> dict[int, _ReferenceResult]:
    """Return the dict that caches the reference results of a problem and shape in host memory, by batch number.

    All kernels share this dict, because computing a reference result takes longer than measuring a kernel.
    """
    return {}


def draw_batch(
    problem: ModelProblem, shape: ModelShape, index: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens and their targets (the next token of each token), both [batch, context].

    ``index``: the number of the batch. Each batch has different tokens, which depend only on the seed and this number.
    """
    generator = torch.Generator().manual_seed(problem.seed + index)
    text = torch.randint(problem.vocabulary, (shape.batch, shape.context + 1), generator=generator)
    return text[:, :-1].contiguous().to(device), text[:, 1:].contiguous().to(device)


def compute_relative_error(measured: torch.Tensor, reference: torch.Tensor, scale: torch.Tensor) -> float:
    """Return the norm of ``measured - reference``, divided by the norm of ``scale``."""
    return float((measured.float() - reference.to(measured.device)).norm() / scale.norm())
