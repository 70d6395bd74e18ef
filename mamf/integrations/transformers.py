"""MFU and MAMFU in the logs of the transformers Trainer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from mamf.errors import UnsupportedError
from mamf.integrations.metered import MeteredCallback, get_matmul_dtype, stop_metering_on_error, warn

#: Attributes of TRL's trainers that hold models which only run forward passes.
_OTHER_MODELS = ("ref_model", "teacher_model", "reward_model")


class MamfuCallback(MeteredCallback, TrainerCallback):  # type: ignore[misc]
    """Log ``tflops``, ``mfu_percent`` and ``mamfu_percent`` of this rank's device, ``tokens_per_second`` and
    ``samples_per_second`` of all ranks, and ``step_seconds``. Figures that are unknown are left out.

        MamfuCallback().attach(trainer)

    A Trainer runs user callbacks after its reporters, so ``attach`` moves this one to the front. It does not pass the
    batch to callbacks, so a hook on the model reads the model's arguments. ``tokens``, ``samples``: of a batch on this
    rank, or functions that compute them from the batch; needed only if they are not found. Other options are those of
    ``mamf.Meter``; dtype and ranks default to the trainer's. Raises UsageError for an unknown option or an impossible
    value; the hooks raise nothing.
    """

    starts = "on_train_begin"
    _hook: Any = None

    def attach(self, trainer: Any) -> MamfuCallback:
        """Add this callback to a trainer, before its reporters. Returns the callback."""
        callbacks = trainer.callback_handler.callbacks
        callbacks[:] = [self, *(each for each in callbacks if each is not self)]
        if others := [name for name in _OTHER_MODELS if getattr(trainer, name, None) is not None]:
            warn(f"the FLOP of {' and '.join(others)} are not counted: give flops_per_step= to count them")
        return self

    @stop_metering_on_error
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        if getattr(args, "n_gpu", 1) > 1:
            raise UnsupportedError("DataParallel (several devices in one process) cannot be metered: use torchrun")
        defaults = {"dtype": _find_dtype(args, model), "world_size": args.world_size}
        defaults["model_parallel"] = getattr(model, "tp_size", None) or 1
        self.start(model, model, defaults, is_compiled=bool(args.torch_compile))
        self._hook = model.register_forward_pre_hook(self._record_batch, with_kwargs=True)

    @stop_metering_on_error
    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.training.begin()

    @stop_metering_on_error
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.training.stop()

    @stop_metering_on_error
    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.training.step()

    @stop_metering_on_error
    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.training.meter.pause()

    on_save = on_evaluate

    @stop_metering_on_error
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        # Evaluations and the end of a training are logged too, without a loss.
        if logs is None or "loss" not in logs:
            return
        figures = self.training.compute_figures()
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    @stop_metering_on_error
    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.close()

    def close(self) -> None:
        super().close()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @stop_metering_on_error
    def _record_batch(self, module: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        if module.training:
            self.training.add(named or positional)


def _find_dtype(args: Any, model: Any) -> str:
    """Return the dtype of the training's matmuls, from the trainer's arguments."""
    if args.bf16 or args.fp16:
        return "bfloat16" if args.bf16 else "float16"
    return get_matmul_dtype(str(model.dtype).removeprefix("torch."))
