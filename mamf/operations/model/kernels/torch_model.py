"""A training step in torch with any registered attention kernel, named in brackets: ``torch[sdpa-flash]``."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from mamf.backend import Backend, OperandPool, Unavailable
from mamf.kernel import Prepared
from mamf.operations.attention.kernels.torch_attention import TorchAttention
from mamf.operations.attention.operation import Attention
from mamf.operations.attention.shapes import AttentionProblem
from mamf.operations.model.kernels.network import Attend, Network, fill
from mamf.operations.model.kernels.step import Step
from mamf.operations.model.shapes import ModelKernel, ModelProblem, ModelShape
from mamf.operations.operand_sets import check_torch
from mamf.plugins.discovery import kernel_of
from mamf.torch_backend import TorchBackend, require_memory, torch_dtype

#: Batches to rotate: all launches share the parameters, so more batches would not evict anything.
_MOST_BATCHES = 3


class TorchModel(ModelKernel):
    """Parameters and activations in the problem's dtype, attention with the kernel named in brackets."""

    takes = "an attention kernel"
    base: ClassVar[str] = "torch"

    def __init__(self, attention: str = "sdpa") -> None:
        """Raises UnknownNameError, or UsageError if the attention kernel cannot be loaded."""
        self.attention = kernel_of(Attention(), attention)
        self.name = f"{self.base}[{self.attention.name}]"

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return check_torch(backend) or self.attention.unavailable(backend)

    def unsupported(self, backend: Backend, problem: ModelProblem) -> str | None:
        if not isinstance(self.attention, TorchAttention):
            return f"{self.attention.name} is not a TorchAttention, so a model cannot call it"
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

    def attend(self, backend: Backend, problem: ModelProblem, shape: ModelShape) -> Attend:
        """The attention kernel's function, in the network's layout."""
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

    def runnable(self, network: Network) -> Callable[..., torch.Tensor]:
        """The function that a launch calls."""
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
        gc.collect()  # the previous model may be part of a reference cycle, and its memory is needed
        require_memory(backend, problem.nbytes(shape))
        network = network_on(backend.device, problem, shape, self.attend(backend, problem, shape))
        run = self.runnable(network)
        if problem.autocast:
            run = autocast(run, backend.device, problem)
        return Step(problem, shape, network, run, min(sets, _MOST_BATCHES)).prepared()


class CompiledModel(TorchModel):
    """The same under torch.compile, compiled for each shape."""

    base = "compiled"

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return backend.without_compiler() or super().unavailable(backend)

    def runnable(self, network: Network) -> Callable[..., torch.Tensor]:
        # Dynamo caches compilations per code object, and after 8 networks further ones run uncompiled.
        torch.compiler.reset()
        compiled: Any = torch.compile(network, dynamic=False)
        call: Callable[..., torch.Tensor] = compiled
        return call


def autocast(
    run: Callable[..., torch.Tensor], device: torch.device, problem: ModelProblem
) -> Callable[..., torch.Tensor]:
    """Run only the forward pass under autocast, as training code does; the backward pass uses the same dtypes."""

    def call(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch_dtype(problem.dtype)):
            return run(tokens, targets)

    return call


def make_attention_problem(problem: ModelProblem) -> AttentionProblem:
    """The attention problem of a layer."""
    return AttentionProblem(problem.dtype, "fwd+bwd" if problem.has_backward else "fwd")


def network_on(device: torch.device, problem: ModelProblem, shape: ModelShape, attend: Attend) -> Network:
    """A network with parameters drawn from the seed."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch_dtype(problem.parameter_dtype))
    try:
        with device:
            network = Network(problem, shape, attend)
    finally:
        torch.set_default_dtype(usual)
    fill(network, torch.Generator(device).manual_seed(problem.seed))
    return network
