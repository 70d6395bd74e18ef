"""A transformer under FSDP2, to show what ``mamf profile`` says of it: modules, products, ranks and a straggler.

    torchrun --nproc-per-node 2 -m mamf profile --stop --ranks all --output RANKS tools/profiled_fsdp.py
    torchrun --nproc-per-node 2 -m mamf profile --stop --ranks all --output SLOW tools/profiled_fsdp.py --slow-rank 1
    mamf profile --stop --output STEP.jsonl tools/profiled_fsdp.py

On CPUs add ``--small``. ``--slow-rank`` adds ten products to each step of one rank, for which the others wait.
``--own-profiler`` profiles steps 2 to 4 by torch.profiler, beside mamf.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

#: Vocabulary, width, heads, layers, sequences and tokens of each; the vocabulary is GPT-2's, no multiple of 8.
LARGE, SMALL = (50257, 2048, 16, 12, 8, 1024), (1001, 128, 2, 2, 2, 64)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.inward(x).view(*x.shape[:2], 3, self.heads, -1).transpose(1, 3).unbind(2)
        return self.outward(scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--own-profiler", action="store_true")
    args = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(device)
    vocabulary, width, heads, layers, sequences, length = SMALL if args.small else LARGE
    with torch.device(device):
        model = Transformer(vocabulary, width, heads, layers).bfloat16()
        tokens = torch.randint(0, vocabulary, (sequences, length))
        extra = torch.randn(4 * width, 4 * width, dtype=torch.bfloat16)
    if ranks > 1:
        mesh = init_device_mesh(torch.device(device).type, (ranks,))
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    with profiled() if args.own_profiler else contextlib.nullcontext() as own:
        for _ in range(args.steps):
            if rank == args.slow_rank:
                for _ in range(10):
                    extra @ extra
            optimizer.zero_grad()
            cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            if own is not None:
                own.step()
    if ranks > 1:
        dist.destroy_process_group()


@contextlib.contextmanager
def profiled() -> Iterator[torch.profiler.profile]:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
    with torch.profiler.profile(
        schedule=schedule, on_trace_ready=lambda own: print(f"own events: {len(own.events())}")
    ) as own:
        yield own


if __name__ == "__main__":
    main()
