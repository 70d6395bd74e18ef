"""MFU and MAMFU in the logs of the transformers Trainer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from mamf.errors import UnsupportedError
from mamf.integrations.metered import MeteredCallback, never_raises, product_dtype, warn

#: Models of TRL's trainers that run forward passes only.
_OTHER_MODELS = ("ref_model", "teacher_model", "reward_model")


class MamfuCallback(MeteredCallback, TrainerCallback):  # type: ignore[misc]
    """Logs ``tflops``, ``mfu_percent``, ``mamfu_percent`` (of this rank's device), ``tokens_per_second``,
    ``samples_per_second`` (of all) and ``step_seconds``, as far as they are known.

        MamfuCallback().attach(trainer)

    A Trainer runs its users' callbacks after its reporters, and does not pass them the batch. So ``attach`` puts
    this one first, and a hook on the model reads its arguments. ``tokens``, ``samples``: of a batch on this rank, or a
    function of it, if they are not found. Other options: those of ``mamf.Meter``, by default the trainer's dtype and
    ranks. Raises UsageError for one that is unknown or not possible; later calls raise nothing.
    """

    starts = "on_train_begin"
    _hook: Any = None

    def attach(self, trainer: Any) -> MamfuCallback:
        """Run before the reporters of a trainer; returns itself."""
        callbacks = trainer.callback_handler.callbacks
        callbacks[:] = [self, *(each for each in callbacks if each is not self)]
        if others := [name for name in _OTHER_MODELS if getattr(trainer, name, None) is not None]:
            warn(f"the FLOP of {' and '.join(others)} are not counted: give flops_per_step= to count them")
        return self

    @never_raises
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        if getattr(args, "n_gpu", 1) > 1:
            raise UnsupportedError("DataParallel uses several devices in one process; use torchrun")
        defaults = {"dtype": _dtype(args, model), "world_size": args.world_size}
        defaults["model_parallel"] = getattr(model, "tp_size", None) or 1
        self.start(model, model, defaults, is_compiled=bool(args.torch_compile))
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    @never_raises
    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.training.begin()

    @never_raises
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.training.stop()

    @never_raises
    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.training.step()

    @never_raises
    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.training.meter.pause()

    on_save = on_evaluate

    @never_raises
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        # An evaluation and the end of a training are logged too.
        if logs is None or "loss" not in logs:
            return
        figures = self.training.figures()
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    @never_raises
    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.close()

    def close(self) -> None:
        super().close()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @never_raises
    def _count(self, module: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        if module.training:
            self.training.add(named or positional)


def _dtype(args: Any, model: Any) -> str:
    """The dtype of the training's products, from the trainer's arguments."""
    if args.bf16 or args.fp16:
        return "bfloat16" if args.bf16 else "float16"
    return product_dtype(str(model.dtype).removeprefix("torch."))
