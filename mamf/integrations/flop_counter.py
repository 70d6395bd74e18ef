"""Count the FLOP of the matmuls, convolutions and attention that torch runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.flop_counter import FlopCounterMode

from mamf.profiling.flops import count_matmul_flop

#: The index of the argument that is the first operand, by operation.
_FIRST_OPERANDS = {"_int_mm": 0, "_grouped_mm": 0, "_scaled_grouped_mm": 0, "_addmm_activation": 1}
_FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)


def count_flops(step: Callable[[], object]) -> float:
    """Run ``step`` and return the FLOP of its matmuls: forward and, if it calls ``backward``, backward too.

    The count comes from torch.utils.flop_counter, which knows torch's own operations only. It misses custom kernels
    (Triton, flash-attn), flex attention, graph replays, recurrent layers and matrix-vector products. It counts the
    whole square of causal attention, and everything that is recomputed. Matmuls of an optimizer are left out. NaN if
    torch failed to count an operation.

    >>> import torch
    >>> a = torch.ones(64, 32)
    >>> mamf.count_flops(lambda: a @ a.T)
    262144.0
    """
    counter = StepCounter()
    counter.start()
    try:
        step()
    finally:
        flop = counter.stop()
    return flop


class StepCounter(FlopCounterMode):  # type: ignore[misc]
    """Count the FLOP that another program runs between ``start`` and ``stop``. Raises nothing into that program."""

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_make_formulas())
        self._flop, self._running_optimizers, self._stack = 0.0, 0, ExitStack()

    def start(self) -> None:
        self._stack.enter_context(_run_counted_operations())
        for register, change in (
            (register_optimizer_step_pre_hook, 1),
            (register_optimizer_step_post_hook, -1),
        ):
            hook = register(lambda *_, change=change: self._add_running_optimizer(change))
            self._stack.callback(hook.remove)
        self._stack.enter_context(self)

    def stop(self) -> float:
        """Return the FLOP, without those of optimizers such as Muon; NaN if torch failed to count an operation."""
        self._stack.close()
        return self._flop

    def _add_running_optimizer(self, change: int) -> None:
        # If the step() of an optimizer calls that of its base class, torch runs the hooks of both.
        self._running_optimizers += change

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        try:
            if func_packet in self.flop_registry and not self._running_optimizers:
                self._flop += self.flop_registry[func_packet](*args, **kwargs, out_val=out)
        except Exception:  # a formula that does not fit must not stop the program
            self._flop = math.nan
        return out


@contextmanager
def _run_counted_operations() -> Iterator[None]:
    """Make torch run operations that its counter knows.

    Without gradients torch would run attention and encoder layers as one fused operation each, which the counter does
    not know. And a compiled function whose first call is under a counter would stay uncompiled.
    """
    stance = getattr(torch.compiler, "set_stance", None)  # from torch 2.6 on
    usual = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with nullcontext() if stance is None else stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(usual)


def _make_formulas() -> dict[Any, Callable[..., int]]:
    """Return the FLOP formulas that torch lacks, by operation.

    torch lacks formulas for some matmuls and for attention on CPUs. Before torch 2.13 it also lacks one for attention
    with fewer key heads than query heads.
    """
    formulas: dict[str, Callable[..., int]] = {
        name: _make_matmul_formula(first) for name, first in _FIRST_OPERANDS.items()
    }
    for name in _FUSED_ATTENTION:
        formulas |= {name: _count_attention_forward, f"{name}_backward": _count_attention_backward}
    formulas["convolution_backward"] = _count_convolution_backward_flop
    return {getattr(torch.ops.aten, name): each for name, each in formulas.items() if hasattr(torch.ops.aten, name)}


def _make_matmul_formula(first: int) -> Callable[..., int]:
    """Return the formula of a matmul whose operands are the arguments ``first`` and ``first + 1``."""
    return lambda *shapes, **_: count_matmul_flop(shapes[first], shapes[first + 1])


def _count_attention_forward(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object
) -> int:
    """Return the FLOP of Q K^T and P V, forward. Shapes are (batch, heads, tokens, head dimension)."""
    return 2 * _count_pairs(query, key) * (query[-1] + value[-1])


def _count_attention_backward(
    _: object, query: Sequence[int], key: Sequence[int], value: Sequence[int], *__: object, **___: object
) -> int:
    """Return the FLOP of the recomputed scores and of the gradients of scores, values, queries and keys."""
    return 2 * _count_pairs(query, key) * (3 * query[-1] + 2 * value[-1])


def _count_convolution_backward_flop(
    gradient: Sequence[int], inputs: Sequence[int], weight: Sequence[int], *others: Any, **_: object
) -> int:
    """Return the FLOP of the gradients: each takes as many as the forward pass. torch's own formula counts grouped
    channels as dense.
    """
    is_transposed, wanted = others[4], others[7]
    positions = math.prod(inputs if is_transposed else gradient)
    return 2 * positions * math.prod(weight[1:]) * int(sum(wanted[:2]))


def _count_pairs(query: Sequence[int], key: Sequence[int]) -> int:
    """Count the pairs of a query and a key, over all batches and query heads."""
    batch, heads, queries, _ = query
    return batch * heads * queries * key[-2]
