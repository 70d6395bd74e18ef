"""FSDP2 and tensor parallelism with a meter, as torchtitan combines them: tokens/s of all ranks, FLOP of this rank.

    torchrun --nproc-per-node 2 examples/parallel_training.py                        # FSDP2
    torchrun --nproc-per-node 2 examples/parallel_training.py --tensor-parallel 2
    torchrun --nproc-per-node 2 examples/parallel_training.py --hidden 128 --length 128    # for a CPU

The ranks that split a model among them train on the same tokens: ``model_parallel`` is their number.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import mamf

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that split each layer")
parser.add_argument("--hidden", type=int, default=2048)
parser.add_argument("--length", type=int, default=2048)
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()

kind = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
ranks, split = int(os.environ["WORLD_SIZE"]), options.tensor_parallel
if kind != "cpu":
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()
mesh = init_device_mesh(kind, (ranks // split, split), mesh_dim_names=("data", "tensor"))

config = LlamaConfig(hidden_size=options.hidden, intermediate_size=3 * options.hidden, num_hidden_layers=4,
                     num_attention_heads=16, vocab_size=32000)  # fmt: skip
model = LlamaForCausalLM(config).to(kind, torch.bfloat16)
columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
for layer in model.model.layers:
    if split > 1:
        parts = {name: name.rpartition(".")[2] for name, _ in layer.named_modules()}
        parallelize_module(layer, mesh["tensor"], {
            **{name: ColwiseParallel() for name, last in parts.items() if last in columns},
            **{name: RowwiseParallel() for name, last in parts.items() if last in rows},
        })  # fmt: skip
    fully_shard(layer, mesh=mesh["data"])
fully_shard(model, mesh=mesh["data"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

meter = mamf.Meter(
    model=config, sequence_length=options.length, dtype="bfloat16", world_size=ranks, model_parallel=split
)
torch.manual_seed(mesh["data"].get_local_rank())
for _ in range(options.steps):
    ids = torch.randint(0, 32000, (4, options.length), device=kind)
    meter.begin()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    meter.step(tokens=ids.numel())
meter.finish()
if (mean := meter.mean()) is not None:
    print(f"rank {dist.get_rank()}: {mean.tflops:.4g} TFLOPS, MAMFU {mean.mamfu_percent:.1f} %, "
          f"{mean.tokens_per_second:.0f} tokens/s of all ranks, {mean.seconds * 1e3:.1f} ms per step")  # fmt: skip
dist.destroy_process_group()
