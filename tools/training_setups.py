"""FLOP and tokens/s by mamf beside an independent count and a stopwatch, for nine ways to train.

    python tools/training_setups.py                     # all, on the first accelerators, else on the CPU; a table
    python tools/training_setups.py --only ddp fsdp2    # set-ups whose name contains one of these
    torchrun --nproc-per-node 2 tools/training_setups.py --one loop-fsdp2    # one set-up; prints a line of JSON
    mamf profile tools/training_setups.py --one trainer-llama                # any script's options work
    torchrun --nproc-per-node 2 -m mamf profile --ranks all --output OUT tools/training_setups.py \
        --one loop-fsdp2 --slow-rank 1                                       # a straggler for 'mamf show OUT'

Each set-up runs in a separate process, or in two ranks. Models have random weights and random data. Independent
counts are of torch's own counter for one pass of the same model (attention as products). The stopwatch is the host's
clock, between the same two steps as the meter's mean, with the device synchronized. Set-ups whose library is not
installed are left out, and named.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import mamf

#: Sizes on a CPU, and on an accelerator.
_SMALL = {"hidden": 128, "layers": 2, "heads": 4, "length": 128, "batch": 4, "vocabulary": 512}
_LARGE = {"hidden": 2048, "layers": 8, "heads": 16, "length": 2048, "batch": 8, "vocabulary": 32000}
_WARM_UP = 3
_HAS_ACCELERATOR = torch.accelerator.is_available()
_DEVICE = torch.device(torch.accelerator.current_accelerator() if _HAS_ACCELERATOR else "cpu")
_SIZES = _LARGE if _HAS_ACCELERATOR else _SMALL
_METERED = {"ceiling": 1e15, "warmup_steps": _WARM_UP}
#: Names the rank whose steps have ten matmuls more.
_SLOW_RANK = "MAMF_SLOW_RANK"


# -- models ------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Separate projections, so that tensor parallelism can split them by heads."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.size = hidden // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads)
        self.w1, self.w3 = (nn.Linear(hidden, 3 * hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * hidden, hidden, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.w2(functional.silu(self.w1(y)) * self.w3(y))


class Decoder(nn.Module):
    """A Llama-like language model that returns its loss."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        hidden, layers, heads, vocabulary = (sizes[each] for each in ("hidden", "layers", "heads", "vocabulary"))
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.config = SimpleNamespace(
            model_type="llama", hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
            num_attention_heads=heads, vocab_size=vocabulary,
        )  # fmt: skip

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


def pretrained(kind: str, sizes: dict[str, int]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a model of transformers with random weights, and one sample of its data."""
    import transformers

    hidden, layers, heads, length = (sizes[each] for each in ("hidden", "layers", "heads", "length"))
    usual = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    usual |= {"num_attention_heads": heads, "vocab_size": sizes["vocabulary"]}
    fields = {
        "Llama": usual | {"num_key_value_heads": heads // 2},
        "Bert": usual | {"max_position_embeddings": length},
        "GPT2": {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": length}
        | {"vocab_size": sizes["vocabulary"]},
    }
    config = getattr(transformers, f"{kind}Config")(**fields[kind], attn_implementation="sdpa")
    head = "MaskedLM" if kind == "Bert" else "CausalLM"
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    ids = torch.randint(3, sizes["vocabulary"], (length,))
    return model.train(), {"input_ids": ids, "labels": ids}


def counted_by_torch(step: Any) -> float:
    """torch's own counter and formulas, with attention as products."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        step()
    return float(counter.get_total_flops())


# -- a row -------------------------------------------------------------------------------------------------------------


class Stopwatch:
    """The host's clock at the end of steps, with the device idle."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.times = first, last, {}

    def step(self, number: int) -> None:
        """After a step; only the two at the ends of the mean are stopped at."""
        if number in (self.first, self.last):
            if _HAS_ACCELERATOR:
                torch.accelerator.synchronize()
            self.times[number] = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Of a step."""
        return (self.times[self.last] - self.times[self.first]) / (self.last - self.first)


def result(figures: dict[str, float], watch: Stopwatch, counted: float, tokens: float) -> dict[str, Any]:
    """Return the cells of a row. ``counted``: FLOP of a step on this rank; ``tokens``: of a step on all ranks."""
    flop = figures["tflops"] * figures["step_seconds"] * 1e12
    rate, watched = figures["tokens_per_second"], tokens / watch.seconds
    return {"flop": flop, "counted": counted, "rate": rate, "stopwatch": watched, "tflops": figures["tflops"]}


# -- loops with mamf.Meter ---------------------------------------------------------------------------------------------


def loop(steps: int, split: str = "", accumulation: int = 1, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """A plain loop over a Llama-like model. ``split``: ddp, fsdp2, tp, or fsdp2-tp (2 x 2 ranks)."""
    ranks, here = int(os.environ.get("WORLD_SIZE", 1)), _joined_device()
    torch.manual_seed(0)
    model: Any = Decoder(_SIZES).to(here, dtype)
    batch = torch.randint(0, _SIZES["vocabulary"], (_SIZES["batch"], _SIZES["length"]), device=here)
    counted = accumulation * counted_by_torch(lambda: model(batch).backward())
    model.zero_grad()
    shared = ranks if split == "tp" else 1
    meter = mamf.Meter(
        model=model, sequence_length=_SIZES["length"], tokens_per_step=batch.numel(), accumulation=accumulation,
        world_size=ranks, model_parallel=shared, dtype=str(dtype).removeprefix("torch."), **_METERED,
    )  # fmt: skip
    model = parallel(model, split, ranks)
    foreach = False if split == "tp" else None  # it does not mix tensors and DTensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=foreach)

    is_slow = os.environ.get(_SLOW_RANK) == os.environ.get("RANK", "0")
    extra = torch.randn(4 * _SIZES["hidden"], 4 * _SIZES["hidden"], device=here, dtype=dtype) if is_slow else None

    def step() -> None:
        for _ in range(10 if extra is not None else 0):
            torch.mm(extra, extra)
        for _ in range(accumulation):
            model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    figures, watch = metered(meter, step, steps)
    return result(figures, watch, counted / shared, accumulation * batch.numel() * ranks / shared)


def parallel(model: Any, split: str, ranks: int) -> Any:
    """As torchtitan does: heads and MLP columns by DTensor, each block and the whole sharded by FSDP2."""
    if not split:
        return model
    mesh = init_device_mesh(_DEVICE.type, (ranks,), mesh_dim_names=("ranks",))
    if split == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    for block in model.blocks:
        if split == "tp":
            split_up = {f"attention.{each}": ColwiseParallel() for each in ("wq", "wk", "wv")}
            split_up |= {"attention.wo": RowwiseParallel(), "w1": ColwiseParallel(), "w3": ColwiseParallel()}
            parallelize_module(block, mesh, split_up | {"w2": RowwiseParallel()})
        else:
            fully_shard(block, mesh=mesh)
    if split == "tp":
        return parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    return fully_shard(model, mesh=mesh)


def metered(meter: mamf.Meter, step: Callable[[], None], steps: int) -> tuple[dict[str, float], Stopwatch]:
    watch = Stopwatch(_WARM_UP, steps)
    for number in range(1, steps + 1):
        meter.begin()
        step()
        meter.step()
        watch.step(number)
    meter.finish()
    mean = meter.mean()
    assert mean is not None
    return vars(mean) | {"step_seconds": mean.seconds}, watch


def accelerated(steps: int) -> dict[str, Any]:
    """accelerate with gradient accumulation and bf16 autocast."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16", cpu=not _HAS_ACCELERATOR)
    model = Decoder(_SIZES).to(accelerator.device)
    batch = torch.randint(0, _SIZES["vocabulary"], (_SIZES["batch"], _SIZES["length"]), device=accelerator.device)
    counted = 2 * counted_by_torch(lambda: model(batch).backward())
    meter = mamf.Meter(
        model=model, sequence_length=_SIZES["length"], tokens_per_step=batch.numel(), accumulation=2, dtype="bfloat16",
        world_size=accelerator.num_processes, **_METERED,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch))
                optimizer.step()
                optimizer.zero_grad()

    figures, watch = metered(meter, step, steps)
    return result(figures, watch, counted, 2 * batch.numel() * accelerator.num_processes)


# -- callbacks ---------------------------------------------------------------------------------------------------------


def trainer(steps: int, kind: str, accumulation: int = 1) -> dict[str, Any]:
    """The Trainer of transformers."""
    import transformers

    from mamf.integrations.transformers import MamfuCallback

    model, sample = pretrained(kind, _SIZES)
    local, ranks = _SIZES["batch"], int(os.environ.get("WORLD_SIZE", 1))
    batch = {name: each[None].expand(local, *each.shape).contiguous() for name, each in sample.items()}
    twin = copy.deepcopy(model).to(_joined_device())
    on_device = {name: each.to(_joined_device()) for name, each in batch.items()}
    counted = accumulation * counted_by_torch(lambda: twin(**on_device).loss.backward())
    twin = None
    watch = Stopwatch(_WARM_UP, steps)

    class Timer(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            watch.step(state.global_step)

    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=local, logging_steps=steps, report_to=[],
            gradient_accumulation_steps=accumulation, save_strategy="no", disable_tqdm=True, bf16=True,
            use_cpu=not _HAS_ACCELERATOR, dataloader_drop_last=True,
        )  # fmt: skip
        data = [sample] * (local * accumulation * ranks * steps)
        run = transformers.Trainer(model, options, train_dataset=data, callbacks=[Timer()])
        MamfuCallback(**_METERED).attach(run)
        run.train()
    figures = next(each for each in run.state.log_history if "tflops" in each)
    return result(figures, watch, counted, sample["input_ids"].numel() * local * accumulation * ranks)


def lit(steps: int, kind: str, strategy: str = "auto") -> dict[str, Any]:
    """Lightning's Trainer with a language model of transformers."""
    import lightning

    from mamf.integrations.lightning import MamfuCallback

    ranks, here = int(os.environ.get("WORLD_SIZE", 1)), _device_of_rank()
    model, sample = pretrained(kind, _SIZES)
    batch = {name: each[None].expand(_SIZES["batch"], *each.shape).contiguous() for name, each in sample.items()}
    twin, on_device = copy.deepcopy(model).to(here), {name: each.to(here) for name, each in batch.items()}
    counted = counted_by_torch(lambda: twin(**on_device).loss.backward())
    twin = None
    watch = Stopwatch(_WARM_UP, steps)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Timer(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, run: Any, *others: Any) -> None:
            watch.step(run.global_step)

    run = lightning.Trainer(
        accelerator="auto" if _HAS_ACCELERATOR else "cpu", devices=ranks, strategy=strategy,
        precision="bf16-mixed", max_steps=steps, log_every_n_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Timer(), MamfuCallback(**_METERED)],
    )  # fmt: skip
    run.fit(Module(), torch.utils.data.DataLoader([batch] * steps, batch_size=None))
    figures = {name: float(each) for name, each in run.callback_metrics.items()}
    return result(figures, watch, counted, batch["input_ids"].numel() * ranks)


#: By name: what runs it, its ranks, and the cells of its row.
SETUPS: dict[str, tuple[Callable[[int], dict[str, Any]], int, str]] = {
    "loop": (lambda n: loop(n), 1, "mamf.Meter | Llama-like | bf16 | 1 | none"),
    "loop-float32": (lambda n: loop(n, "", 4, torch.float32), 1, "mamf.Meter | Llama-like | fp32 | 4 | none"),
    "accelerate": (accelerated, 1, "accelerate | Llama-like | bf16 autocast | 2 | none"),
    "trainer-llama": (lambda n: trainer(n, "Llama"), 1, "Trainer | Llama | bf16 autocast | 1 | none"),
    "lightning-gpt2": (lambda n: lit(n, "GPT2"), 1, "Lightning | GPT-2 | bf16-mixed | 1 | none"),
    "lightning-ddp": (lambda n: lit(n, "Bert", strategy="ddp"), 2, "Lightning | BERT | bf16-mixed | 1 | DDP, 2 ranks"),
    "trainer-ddp": (lambda n: trainer(n, "Llama", 2), 2, "Trainer | Llama | bf16 autocast | 2 | DDP, 2 ranks"),
    "loop-fsdp2": (lambda n: loop(n, "fsdp2"), 2, "mamf.Meter | Llama-like | bf16 | 1 | FSDP2, 2 ranks"),
    "loop-tp": (lambda n: loop(n, "tp"), 2, "mamf.Meter | Llama-like | bf16 | 1 | tensor parallel, 2 ranks"),
}  # fmt: skip


def _device_of_rank() -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", 0))
    return torch.device(_DEVICE.type, local) if _HAS_ACCELERATOR else _DEVICE


def _joined_device() -> torch.device:
    """Of this rank, whose process group is made first."""
    device = _device_of_rank()
    if _HAS_ACCELERATOR:
        torch.accelerator.set_device_index(device.index)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        dist.init_process_group()
    return device


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", choices=SETUPS, help="run this set-up here; print a line of JSON")
    parser.add_argument("--only", nargs="+", default=[""], help="set-ups whose name contains one of these")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--slow-rank", default="", metavar="RANK", help="in loops, give this rank ten matmuls more")
    options = parser.parse_args(arguments)
    os.environ[_SLOW_RANK] = options.slow_rank
    if options.one:
        warnings.simplefilter("default")
        found = SETUPS[options.one][0](options.steps)
        line = json.dumps(found | {"rank": int(os.environ.get("RANK", 0))})
        os.write(1, f"{line}\n".encode())  # at once: two ranks share the pipe
        if dist.is_initialized():
            dist.destroy_process_group()
        return 0
    print("| tool | model | precision | accumulation | parallelism | FLOP by mamf | by an independent count | ratio | "
          "rate by mamf | by a stopwatch | ratio | TFLOPS |")  # fmt: skip
    print("|:--|:--|:--|--:|:--|--:|--:|--:|--:|--:|--:|--:|")
    return max(_print_row(name, options.steps) for name in SETUPS if any(each in name for each in options.only))


def _print_row(name: str, steps: int) -> int:
    """One row per rank."""
    _, ranks, cells = SETUPS[name]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    if _HAS_ACCELERATOR and torch.accelerator.device_count() < ranks:
        print(f"{name}: left out, needs {ranks} devices", file=sys.stderr)
        return 0
    command = [sys.executable, *launcher, __file__, "--one", name, "--steps", str(steps)]
    ran = subprocess.run(command, capture_output=True, text=True)
    rows = [json.loads(line[line.index('{"flop"') :]) for line in ran.stdout.splitlines() if '{"flop"' in line]
    if ran.returncode or not rows:
        reason = (ran.stderr.strip() or "nothing was printed").splitlines()
        error = next((line for line in reason if "Error" in line and "Module" in line), reason[-1])
        print(f"{name}: left out, {error}", file=sys.stderr)
        return 0 if "No module named" in error else 1
    for row in sorted(rows, key=lambda each: each["rank"]):
        rank = f", rank {row['rank']}" if ranks > 1 else ""
        print(f"| {cells}{rank} | {row['flop']:.6g} | {row['counted']:.6g} | {row['flop'] / row['counted']:.4f} | "
              f"{row['rate']:.1f} tokens/s | {row['stopwatch']:.1f} | {row['rate'] / row['stopwatch']:.4f} | "
              f"{row['tflops']:.4g} |", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
