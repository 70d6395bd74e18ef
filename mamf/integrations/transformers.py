"""MFU and MAMFU in the logs of the transformers Trainer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from mamf.integrations.metered import MeteredTraining


class MamfuCallback(TrainerCallback):  # type: ignore[misc]
    """Logs ``tflops``, ``mfu_percent``, ``mamfu_percent`` (of this rank's device) and ``tokens_per_second`` (of all).

        MamfuCallback().attach(trainer)

    A Trainer runs its users' callbacks after its reporters, and does not pass them the batch. So ``attach`` puts
    this one first, and a hook on the model counts tokens. ``model``: what ``mamf.model_flops`` takes or
    gives, by default the trainer's own; ``options``: those of ``mamf.Meter``, by default the trainer's dtype and ranks.
    """

    def __init__(self, model: Any = None, **options: Any) -> None:
        self.model, self.options = model, options
        self.training: MeteredTraining | None = None
        self._hook: Any = None

    def attach(self, trainer: Any) -> MamfuCallback:
        """Run before the reporters of a trainer; returns itself."""
        callbacks = trainer.callback_handler.callbacks
        callbacks[:] = [self, *(each for each in callbacks if each is not self)]
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        options = {"dtype": _dtype(args, model), "world_size": args.world_size} | self.options
        self.training = MeteredTraining(model if self.model is None else self.model, options)
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.training is not None:
            self.training.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.training is not None:
            self.training.step()

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.training is not None:
            self.training.pause()

    on_save = on_evaluate

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        # An evaluation and the end of a training are logged too.
        if self.training is None or logs is None or "loss" not in logs:
            return
        figures = self.training.figures()
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._hook is not None:
            self._hook.remove()
        self.training = self._hook = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _count(self, module: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = named.get("input_ids", named.get("inputs_embeds", positional[0] if positional else None))
        if self.training is not None and module.training and given is not None:
            self.training.add(*given.shape[:2])


def _dtype(args: Any, model: Any) -> str:
    """The dtype of the training's products, from the trainer's arguments."""
    if args.bf16 or args.fp16:
        return "bfloat16" if args.bf16 else "float16"
    name = str(model.dtype).removeprefix("torch.")
    return "tf32" if name == "float32" and torch.get_float32_matmul_precision() != "highest" else name
