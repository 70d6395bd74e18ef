"""torchtitan with a meter: MAMFU of each rank beside torchtitan's own log.

    torchrun --nproc-per-node 2 examples/torchtitan_training.py --module llama3 --config llama3_debugmodel

Takes the options of ``torchtitan.train``. torchtitan computes the FLOP of a token itself; ranks that split a model
(tensor, pipeline and context parallel) share them. With torchtitan 0.3.0.
"""

from typing import Any

import torchtitan.train
from torchtitan.trainer import Trainer

import mamf

_train_step, _meters = Trainer.train_step, {}


def metered_step(self: Any, batches: Any) -> Any:
    ranks, shared = self.parallel_dims.world_size, self.parallel_dims.non_data_parallel_size
    if self not in _meters:
        _meters[self] = mamf.Meter(dtype="bfloat16", world_size=ranks, model_parallel=shared)
    meter, tokens = _meters[self], self.ntokens_seen
    meter.begin()
    result = _train_step(self, batches)
    tokens = self.ntokens_seen - tokens  # of this optimizer step
    figures = meter.step(tokens=tokens, flops=tokens * self.metrics_processor.num_flops_per_token / shared)
    if figures is not None:
        print(f"step {figures.step}: {figures.tflops:.4g} TFLOPS, MAMFU {figures.mamfu_percent:.1f} %, "
              f"{figures.tokens_per_second:.0f} tokens/s of all ranks", flush=True)  # fmt: skip
    return result


Trainer.train_step = metered_step

if __name__ == "__main__":
    torchtitan.train.main()
