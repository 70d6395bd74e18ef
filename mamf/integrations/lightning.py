"""MFU and MAMFU in the logs of Lightning's Trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from mamf.errors import UsageError
from mamf.integrations.metered import MeteredCallback, never_raises, product_dtype

_DTYPES = {"bf16": "bfloat16", "16": "float16", "32": "float32", "64": "float64"}


class MamfuCallback(MeteredCallback, Callback):  # type: ignore[misc]
    """Logs ``tflops``, ``mfu_percent``, ``mamfu_percent`` (of this rank's device), ``tokens_per_second``,
    ``samples_per_second`` (of all) and ``step_seconds``, as far as they are known.

        lightning.Trainer(callbacks=[MamfuCallback()])

    FLOP are those of the module or of its ``model``, whichever has a ``config``. ``tokens``, ``samples``: of a batch on
    this rank, or a function of it, if they are not found. Other options: those of ``mamf.Meter``, by default the
    trainer's dtype and ranks. Raises UsageError for one that is unknown or not possible; later calls raise nothing.
    """

    starts = "on_train_start"
    _steps = 0

    @never_raises
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        inner = getattr(pl_module, "model", None)
        own = inner if hasattr(inner, "config") else pl_module
        replicas = (getattr(trainer, "distributed_sampler_kwargs", None) or {}).get("num_replicas", trainer.world_size)
        defaults = {"world_size": trainer.world_size, "model_parallel": trainer.world_size // replicas}
        precision = str(trainer.precision).partition("-")[0]
        if precision not in _DTYPES and "dtype" not in self.options:
            raise UsageError(f"the precision {trainer.precision} has no one dtype: name it (dtype=)")
        defaults["dtype"] = product_dtype(_DTYPES.get(precision, "float32"))
        self.start(own, pl_module, defaults)
        self._steps = trainer.global_step
        if len(trainer.optimizers) > 1:
            self.training.warn_once("several optimizers step in a batch: a step is a batch")

    @never_raises
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.training.begin()
        self.training.add(batch)

    @never_raises
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if pl_module.automatic_optimization:
            self.training.stop()

    @never_raises
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # With accumulation only the last batch of a step moves the count.
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        self.training.step()
        if self._steps % trainer.log_every_n_steps == 0 and (figures := self.training.figures()):
            pl_module.log_dict(figures, on_step=True, on_epoch=False)

    @never_raises
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.training.meter.pause()

    @never_raises
    def on_train_end(self, trainer: Any, pl_module: Any, *exception: BaseException) -> None:
        self.close()

    on_exception = on_train_end
