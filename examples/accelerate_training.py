"""accelerate with a meter: MAMFU of each rank, tokens/s of all.

accelerate launch examples/accelerate_training.py
torchrun --nproc-per-node 2 examples/accelerate_training.py
python examples/accelerate_training.py --cpu --hidden 128 --length 128
"""

import argparse

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import mamf

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cpu", action="store_true")
parser.add_argument("--hidden", type=int, default=2048)
parser.add_argument("--length", type=int, default=2048)
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()

passes = 2
accelerator = Accelerator(gradient_accumulation_steps=passes, mixed_precision="bf16", cpu=options.cpu)
config = LlamaConfig(hidden_size=options.hidden, intermediate_size=3 * options.hidden, num_hidden_layers=4,
                     num_attention_heads=16, vocab_size=32000)  # fmt: skip
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
ids = torch.randint(0, 32000, (64, options.length))
loader = torch.utils.data.DataLoader([{"input_ids": each, "labels": each} for each in ids], batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

meter = mamf.Meter(model=config, sequence_length=options.length, dtype="bfloat16", world_size=accelerator.num_processes)
tokens = step = 0
while step < options.steps:
    for batch in loader:
        if tokens == 0:
            meter.begin()
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        tokens += batch["input_ids"].numel()
        if accelerator.sync_gradients:  # the optimizer has stepped
            meter.step(tokens=tokens)
            tokens, step = 0, step + 1
            if step == options.steps:
                break
meter.finish()
if (mean := meter.mean()) is not None:
    print(f"rank {accelerator.process_index}: {mean.tflops:.4g} TFLOPS, MAMFU {mean.mamfu_percent:.1f} %, "
          f"{mean.tokens_per_second:.0f} tokens/s of all ranks, {mean.seconds * 1e3:.1f} ms per step")  # fmt: skip
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
