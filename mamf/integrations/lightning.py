"""Log MFU and MAMFU in Lightning's Trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from mamf.errors import UsageError
from mamf.integrations.metered import MeteredCallback, get_matmul_dtype, stop_metering_on_error

_DTYPE_BY_PRECISION = {"bf16": "bfloat16", "16": "float16", "32": "float32", "64": "float64"}


class MamfuCallback(MeteredCallback, Callback):  # type: ignore[misc]
    """A callback that logs how close the training steps of Lightning's Trainer come to what the device can do.

        lightning.Trainer(callbacks=[MamfuCallback()])

    It logs ``tflops``, ``mfu_percent`` and ``mamfu_percent`` of this rank's device, ``tokens_per_second`` and
    ``samples_per_second`` of all ranks, and ``step_seconds``. It does not log figures that are unknown.

    The callback computes the FLOP from ``module.model.config`` or, if that does not exist, from ``module.config``.

    ``tokens``, ``samples``: the number of tokens and of samples per batch on this rank, or functions that compute these
    numbers from the batch. Give them only if the callback does not find the numbers itself. The other options are those
    of ``mamf.Meter``. By default, the callback takes the dtype and the number of ranks from the trainer.

    Raises UsageError for an unknown option or an impossible value. The methods that the trainer calls raise nothing.
    """

    start_method = "on_train_start"
    _last_global_step = 0

    @stop_metering_on_error
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        inner_model = getattr(pl_module, "model", None)
        configured_model = inner_model if hasattr(inner_model, "config") else pl_module
        replica_count = (getattr(trainer, "distributed_sampler_kwargs", None) or {}).get(
            "num_replicas", trainer.world_size
        )
        precision = str(trainer.precision).partition("-")[0]
        if precision not in _DTYPE_BY_PRECISION and "dtype" not in self.options:
            raise UsageError(
                f"precision {trainer.precision} does not say which dtype matmuls have: pass dtype= to MamfuCallback"
            )
        defaults = {
            "dtype": get_matmul_dtype(_DTYPE_BY_PRECISION.get(precision, "float32")),
            "world_size": trainer.world_size,
            "model_parallel": trainer.world_size // replica_count,
        }
        self.start_metering(configured_model, pl_module, defaults)
        self._last_global_step = trainer.global_step
        if len(trainer.optimizers) > 1:
            self.training.warn_once("several optimizers step per batch, so each batch counts as one step")

    @stop_metering_on_error
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.training.begin_pass()
        self.training.add_batch(batch)

    @stop_metering_on_error
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if pl_module.automatic_optimization:
            self.training.stop_counting()

    @stop_metering_on_error
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # With gradient accumulation, only the last batch of a training step increments global_step.
        if trainer.global_step == self._last_global_step:
            return
        self._last_global_step = trainer.global_step
        self.training.end_step()
        if self._last_global_step % trainer.log_every_n_steps == 0 and (figures := self.training.compute_figures()):
            pl_module.log_dict(figures, on_step=True, on_epoch=False)

    @stop_metering_on_error
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.training.meter.pause()

    @stop_metering_on_error
    def on_train_end(self, trainer: Any, pl_module: Any, *exception: BaseException) -> None:
        self.stop_metering()

    on_exception = on_train_end
