"""Log MFU and MAMFU in the Trainer of transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from mamf.errors import UnsupportedError
from mamf.integrations.metered import MeteredCallback, get_matmul_dtype, stop_metering_on_error, warn


class MamfuCallback(MeteredCallback, TrainerCallback):  # type: ignore[misc]
    """A callback that logs how close the training steps of transformers' Trainer come to what the device can do.

        MamfuCallback().attach(trainer)

    It logs ``tflops``, ``mfu_percent`` and ``mamfu_percent`` of this rank's device, ``tokens_per_second`` and
    ``samples_per_second`` of all ranks, and ``step_seconds``. It does not log figures that are unknown.

    A Trainer runs callbacks of the user after its reporters (TensorBoard, for example). ``attach`` puts this callback
    before the reporters, so that they report its figures. A Trainer does not pass batches to callbacks, so a hook on
    the model reads the model's arguments.

    ``tokens``, ``samples``: the number of tokens and of samples per batch on this rank, or functions that compute these
    numbers from the batch. Give them only if the callback does not find the numbers itself. The other options are those
    of ``mamf.Meter``. By default, the callback takes the dtype and the number of ranks from the trainer.

    Raises UsageError for an unknown option or an impossible value. The methods that the trainer calls raise nothing.
    """

    start_method = "on_train_begin"

    def attach(self, trainer: Any) -> MamfuCallback:
        """Add this callback to a trainer, before the trainer's reporters, and return the callback."""
        callbacks = trainer.callback_handler.callbacks
        callbacks[:] = [self, *(callback for callback in callbacks if callback is not self)]
        # Trainers of the library TRL may have additional models in these attributes. They run only forward passes,
        # whose FLOP mamf does not count.
        names = ("ref_model", "teacher_model", "reward_model")
        if uncounted_models := [name for name in names if getattr(trainer, name, None) is not None]:
            warn(
                f"mamf does not count the FLOP of {' and '.join(uncounted_models)}: give flops_per_step= to count "
                "these FLOP too"
            )
        return self

    @stop_metering_on_error
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        if getattr(args, "n_gpu", 1) > 1:
            raise UnsupportedError(
                "mamf cannot meter DataParallel (several devices in one process): start one process per device with "
                "torchrun"
            )
        defaults = {
            "dtype": _find_matmul_dtype(args, model),
            "world_size": args.world_size,
            "model_parallel": getattr(model, "tp_size", None) or 1,
        }
        self.start_metering(model, model, defaults, is_compiled=bool(args.torch_compile))
        self.cleanup_stack.callback(model.register_forward_pre_hook(self._record_batch, with_kwargs=True).remove)

    @stop_metering_on_error
    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.training.begin_pass()

    @stop_metering_on_error
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.training.stop_counting()

    @stop_metering_on_error
    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.training.end_step()

    @stop_metering_on_error
    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.training.meter.pause()

    on_save = on_evaluate

    @stop_metering_on_error
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        # The trainer also logs evaluations and the end of the training. Only its logs of training steps contain "loss".
        if logs is None or "loss" not in logs:
            return
        figures = self.training.compute_figures()
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    @stop_metering_on_error
    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.stop_metering()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @stop_metering_on_error
    def _record_batch(self, module: Any, inputs: tuple[Any, ...], named_inputs: dict[str, Any]) -> None:
        if module.training:
            self.training.add_batch(named_inputs or inputs)


def _find_matmul_dtype(args: Any, model: Any) -> str:
    """Return the dtype of the training's matmuls, from the trainer's arguments or else from the model's dtype. A model
    that is not from transformers may have no dtype: then take that of its first parameter.
    """
    if args.bf16 or args.fp16:
        return "bfloat16" if args.bf16 else "float16"
    return get_matmul_dtype(str(getattr(model, "dtype", None) or next(model.parameters()).dtype).removeprefix("torch."))
