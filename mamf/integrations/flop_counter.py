"""Count the FLOP of the matmuls, convolutions and attention that torch runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.flop_counter import FlopCounterMode

from mamf.profiling.flops import count_matmul_flop

#: Matmul operations for which torch has no FLOP formula, and the position of the first operand in their arguments.
_FIRST_OPERAND_INDEX_BY_MATMUL = {"_int_mm": 0, "_grouped_mm": 0, "_scaled_grouped_mm": 0, "_addmm_activation": 1}


def count_flops(step: Callable[[], object]) -> float:
    """Run ``step`` and return the FLOP of its matmuls: forward and, if it calls ``backward``, backward too.

    The count comes from torch.utils.flop_counter, which knows torch's own operations only. It misses custom kernels
    (Triton, flash-attn), flex attention, graph replays, recurrent layers and matrix-vector products. It includes the
    masked half of causal attention and everything that is recomputed, but not the matmuls of an optimizer. The result
    is NaN if torch failed to count an operation.

    >>> import torch
    >>> a = torch.ones(64, 32)
    >>> mamf.count_flops(lambda: a @ a.T)
    262144.0
    """
    counter = StepFlopCounter()
    counter.start_counting()
    try:
        step()
    finally:
        flop = counter.stop_counting()
    return flop


class StepFlopCounter(FlopCounterMode):  # type: ignore[misc]
    """A counter of the FLOP that a training program runs between ``start_counting`` and ``stop_counting``.

    If a FLOP formula raises an error, the count becomes NaN, and the program continues.
    """

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_make_missing_formulas())
        self._flop, self._exit_stack = 0.0, ExitStack()
        self._running_optimizer_count, self._has_closure = 0, False

    def start_counting(self) -> None:
        self._exit_stack.enter_context(_use_countable_operations())
        for register, change in (
            (register_optimizer_step_pre_hook, 1),
            (register_optimizer_step_post_hook, -1),
        ):
            self._exit_stack.callback(register(partial(self._change_running_optimizer_count, change)).remove)
        self._exit_stack.enter_context(self)

    def stop_counting(self) -> float:
        """Stop counting and return the FLOP since ``start_counting``, without the matmuls of optimizers such as Muon.

        Return NaN if torch failed to count an operation.
        """
        self._exit_stack.close()
        return self._flop

    def _change_running_optimizer_count(
        self, change: int, optimizer: Any, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        # Count the running optimizers instead of storing a bool, because torch runs the hooks twice if the step() of an
        # optimizer calls the step() of its base class.
        self._running_optimizer_count += change
        self._has_closure = any(map(callable, (*arguments[1:], *options.values())))

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        # While an optimizer runs, count only what its closure runs: a forward pass records gradients, and a backward
        # pass belongs to a graph task. The matmuls of the optimizer itself do neither.
        try:
            if func_packet in self.flop_registry and (
                not self._running_optimizer_count
                or (self._has_closure and (torch.is_grad_enabled() or torch._C._current_graph_task_id() >= 0))
            ):
                self._flop += self.flop_registry[func_packet](*args, **kwargs, out_val=out)
        except Exception:  # An error in a FLOP formula must not stop the training program.
            self._flop = math.nan
        return out


@contextmanager
def _use_countable_operations() -> Iterator[None]:
    """Make torch run only operations that its FLOP counter knows, within the context.

    If no gradients are needed, torch would otherwise run each attention and encoder layer as a fused operation, which
    the counter does not know. Compiled functions also run uncompiled within the context. Otherwise torch would give up
    on a function that it first compiles while the counter is active, and the function would stay uncompiled after the
    context.
    """
    set_stance = getattr(torch.compiler, "set_stance", None)  # torch before 2.6 has no set_stance.
    was_fastpath_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with nullcontext() if set_stance is None else set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_fastpath_enabled)


def _make_missing_formulas() -> dict[Any, Callable[..., int]]:
    """Return the FLOP formulas that torch's own counter lacks, by operation.

    torch lacks formulas for some matmuls and for attention on CPUs. Before torch 2.13 it also lacks a formula for
    attention with fewer key heads than query heads.
    """
    formulas: dict[str, Callable[..., int]] = {
        name: lambda *shapes, first_index=first_index, **_: count_matmul_flop(
            shapes[first_index], shapes[first_index + 1]
        )
        for name, first_index in _FIRST_OPERAND_INDEX_BY_MATMUL.items()
    }
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
    ):
        formulas |= {name: _count_attention_forward_flop, f"{name}_backward": _count_attention_backward_flop}
    formulas["convolution_backward"] = _count_convolution_backward_flop
    return {getattr(torch.ops.aten, name): each for name, each in formulas.items() if hasattr(torch.ops.aten, name)}


def _count_attention_forward_flop(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object
) -> int:
    """Return the FLOP of the forward pass of attention: Q K^T, and softmax of the scores times V.

    All shapes are (batch, heads, tokens, head dimension).
    """
    return 2 * math.prod(query[:3]) * key[-2] * (query[-1] + value[-1])


def _count_attention_backward_flop(
    _: object, query: Sequence[int], key: Sequence[int], value: Sequence[int], *__: object, **___: object
) -> int:
    """Return the FLOP of the backward pass of attention, which recomputes the scores and computes the gradients of
    scores, values, queries and keys.
    """
    return 2 * math.prod(query[:3]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def _count_convolution_backward_flop(
    gradient: Sequence[int], inputs: Sequence[int], weight: Sequence[int], *remaining: Any, **_: object
) -> int:
    """Return the FLOP of a convolution's backward pass: for each gradient that is needed, the FLOP of the forward pass.

    This function replaces torch's formula, which counts a grouped convolution as if it had a single group.
    """
    is_transposed, needed_gradients = remaining[4], remaining[7]
    return 2 * math.prod(inputs if is_transposed else gradient) * math.prod(weight[1:]) * int(sum(needed_gradients[:2]))
