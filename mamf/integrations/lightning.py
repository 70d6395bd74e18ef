"""MFU and MAMFU in the logs of Lightning's Trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from mamf.errors import UsageError
from mamf.integrations.metered import MeteredCallback, get_matmul_dtype, stop_metering_on_error

_DTYPES = {"bf16": "bfloat16", "16": "float16", "32": "float32", "64": "float64"}


class MamfuCallback(MeteredCallback, Callback):  # type: ignore[misc]
    """Log ``tflops``, ``mfu_percent`` and ``mamfu_percent`` of this rank's device, ``tokens_per_second`` and
    ``samples_per_second`` of all ranks, and ``step_seconds``. Figures that are unknown are left out.

        lightning.Trainer(callbacks=[MamfuCallback()])

    The FLOP follow from the ``config`` of the module, or of its attribute ``model``. ``tokens``, ``samples``: of a
    batch on this rank, or functions that compute them from the batch; needed only if they are not found. Other options
    are those of ``mamf.Meter``; dtype and ranks default to the trainer's. Raises UsageError for an unknown option or an
    impossible value; the hooks raise nothing.
    """

    starts = "on_train_start"
    _steps = 0

    @stop_metering_on_error
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        inner = getattr(pl_module, "model", None)
        own = inner if hasattr(inner, "config") else pl_module
        replicas = (getattr(trainer, "distributed_sampler_kwargs", None) or {}).get("num_replicas", trainer.world_size)
        defaults = {"world_size": trainer.world_size, "model_parallel": trainer.world_size // replicas}
        precision = str(trainer.precision).partition("-")[0]
        if precision not in _DTYPES and "dtype" not in self.options:
            raise UsageError(f"precision {trainer.precision} does not determine one dtype: give dtype=")
        defaults["dtype"] = get_matmul_dtype(_DTYPES.get(precision, "float32"))
        self.start(own, pl_module, defaults)
        self._steps = trainer.global_step
        if len(trainer.optimizers) > 1:
            self.training.warn_once("several optimizers step per batch, so each batch counts as one step")

    @stop_metering_on_error
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.training.begin()
        self.training.add(batch)

    @stop_metering_on_error
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if pl_module.automatic_optimization:
            self.training.stop()

    @stop_metering_on_error
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # With gradient accumulation only the last batch of a step increments global_step.
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        self.training.step()
        if self._steps % trainer.log_every_n_steps == 0 and (figures := self.training.compute_figures()):
            pl_module.log_dict(figures, on_step=True, on_epoch=False)

    @stop_metering_on_error
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.training.meter.pause()

    @stop_metering_on_error
    def on_train_end(self, trainer: Any, pl_module: Any, *exception: BaseException) -> None:
        self.close()

    on_exception = on_train_end
