"""MFU and MAMFU in the logs of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback

from mamf.integrations.metered import MeteredTraining

_DTYPES = {"bf16": "bfloat16", "16": "float16", "32": "float32", "64": "float64"}


def ids_of(batch: Any) -> Any:
    """The token ids of a batch, of shape (sequences, length): ``input_ids``, or the first that it holds."""
    if isinstance(batch, dict):
        return batch["input_ids"]
    return batch[0] if isinstance(batch, (tuple, list)) else batch


class MamfuCallback(Callback):  # type: ignore[misc]
    """Logs ``tflops``, ``mfu_percent``, ``mamfu_percent`` (of this rank's device) and ``tokens_per_second`` (of all).

        lightning.Trainer(callbacks=[MamfuCallback()])

    ``model``: what ``mamf.model_flops`` takes or gives, by default the module or its ``model``, whichever has a
    ``config``. ``tokens``: of a batch the tensor of shape (sequences, length). ``options``: those of ``mamf.Meter``, by
    default the trainer's dtype and ranks.
    """

    def __init__(self, model: Any = None, tokens: Callable[[Any], Any] = ids_of, **options: Any) -> None:
        self.model, self.tokens, self.options = model, tokens, options
        self.training: MeteredTraining | None = None
        self._steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        inner = getattr(pl_module, "model", None)
        own = inner if hasattr(inner, "config") else pl_module
        dtype = _DTYPES.get(str(trainer.precision).partition("-")[0], "bfloat16")
        options = {"dtype": dtype, "world_size": trainer.world_size} | self.options
        self.training = MeteredTraining(own if self.model is None else self.model, options)
        self._steps = trainer.global_step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.training is not None:
            self.training.begin()
            self.training.add(*self.tokens(batch).shape[:2])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # With accumulation only the last batch of a step moves the count.
        if self.training is None or trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        self.training.step()
        if self._steps % trainer.log_every_n_steps == 0 and (figures := self.training.figures()):
            pl_module.log_dict(figures, on_step=True, on_epoch=False)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.training is not None and not trainer.sanity_checking:
            self.training.pause()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.training = None
