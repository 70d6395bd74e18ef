"""Compare mamf's FLOP and tokens/s with an independent count and with a stopwatch, for many ways to train.

    python tools/training_setups.py                      # run all set-ups, and print a table
    torchrun --nproc-per-node 2 tools/training_setups.py --one loop-fsdp2    # run one set-up; each rank prints JSON
    mamf profile tools/training_setups.py --one trainer-llama                # profile one set-up

Without an accelerator, everything runs on the CPU, with smaller models. Each set-up runs in a separate process, or in
two ranks. Models have random weights and train on random data.

The independent count comes from torch's FLOP counter. It counts the forward and backward passes of the same steps, with
attention computed as matmuls, with the documents of a packed batch one by one, and without checkpointing and
compilation. The stopwatch is the host's clock, read at the start and at the end of the same steps, with the device
synchronized.

The table lacks set-ups whose library is not installed, that need more devices than there are, or that fail. The tool
prints their names on stderr. The exit code is 1 if any set-up failed.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
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

#: The sizes of models and batches on a CPU, and those on an accelerator.
_SMALL = {"hidden": 128, "layers": 2, "heads": 4, "length": 128, "batch": 4, "vocabulary": 512}
_LARGE = {"hidden": 2048, "layers": 8, "heads": 16, "length": 2048, "batch": 8, "vocabulary": 32000}
_WARM_UP = 3
_HAS_ACCELERATOR = torch.accelerator.is_available()
_DEVICE = torch.device(torch.accelerator.current_accelerator() if _HAS_ACCELERATOR else "cpu")
_SIZES = _LARGE if _HAS_ACCELERATOR else _SMALL
_METERED = {"ceiling": 1e15, "warmup_steps": _WARM_UP}


# -- models ------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention. Its projections are separate, so that tensor parallelism can split them by heads."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.size = hidden // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer block: attention and a gated MLP, each after a norm."""

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


def pretrained(kind: str, sizes: dict[str, int]) -> Any:
    """Return a model of the transformers library with random weights. ``kind``: a key of the table below."""
    import transformers

    hidden, layers, heads, length = (sizes[each] for each in ("hidden", "layers", "heads", "length"))
    usual = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    usual |= {"num_attention_heads": heads, "vocab_size": sizes["vocabulary"]}
    few = {"num_key_value_heads": heads // 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    encoder = {"dim": hidden, "hidden_dim": 3 * hidden, "n_layers": layers, "n_heads": heads}
    fields, head = {
        "Llama": (usual | few, "CausalLM"),
        "Qwen3Moe": (usual | few | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
                     | {"head_dim": hidden // heads}, "CausalLM"),
        "Bert": (usual | {"max_position_embeddings": length}, "MaskedLM"),
        "GPT2": ({"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": length}
                 | {"vocab_size": sizes["vocabulary"]}, "CausalLM"),
        "DistilBert": (encoder | {"vocab_size": sizes["vocabulary"]}, "SequenceClassification"),
        "Wav2Vec2": (usual | {"conv_dim": [hidden // 4] * 7, "num_conv_pos_embeddings": 16, "layerdrop": 0.0}
                     | {"num_conv_pos_embedding_groups": 1, "mask_time_prob": 0.0}, "AudioClassification"),
    }[kind]  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**fields, attn_implementation="sdpa")
    return getattr(transformers, f"AutoModelFor{head}").from_config(config).train()


def sample_of(length: int) -> dict[str, torch.Tensor]:
    """Return a sequence of random tokens, which are its labels too."""
    ids = torch.randint(3, _SIZES["vocabulary"], (length,))
    return {"input_ids": ids, "labels": ids}


def counted_by_torch(step: Any) -> float:
    """Run a step and return its FLOP according to torch's counter, with attention computed as matmuls."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        step()
    return float(counter.get_total_flops())


# -- rows of the table -------------------------------------------------------------------------------------------------


class Stopwatch:
    """A stopwatch that reads the host's clock at the end of the steps ``first`` and ``last``."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.times = first, last, {}

    def step(self, number: int) -> None:
        """Read the clock if the step that has just ended is the first or the last. Synchronize the device before."""
        if number in (self.first, self.last):
            if _HAS_ACCELERATOR:
                torch.accelerator.synchronize()
            self.times[number] = time.perf_counter()

    @property
    def seconds(self) -> float:
        """The mean seconds per step."""
        return (self.times[self.last] - self.times[self.first]) / (self.last - self.first)


def result(figures: dict[str, float], watch: Stopwatch, counted: float, tokens: float) -> dict[str, Any]:
    """Return the values of a row of the table, as mean values of a step.

    ``figures``: mamf's figures. ``counted``: the FLOP on this rank by the independent count. ``tokens``: the number of
    tokens on all ranks.
    """
    flop = figures["tflops"] * figures["step_seconds"] * 1e12
    rate, watched = figures.get("tokens_per_second", math.nan), tokens / watch.seconds
    return {"flop": flop, "counted": counted, "rate": rate, "stopwatch": watched, "tflops": figures["tflops"]}


# -- loops with mamf.Meter ---------------------------------------------------------------------------------------------


def loop(steps: int, split: str = "", accumulation: int = 1, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Train ``Decoder`` in a plain loop with ``mamf.Meter``. Return the values of its row.

    ``split``: how to distribute the model over the ranks: ``fsdp2``, ``tp`` (tensor parallel), or empty for one rank.
    """
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
    foreach = False if split == "tp" else None  # foreach cannot update tensors and DTensors together
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=foreach)

    def step() -> None:
        for _ in range(accumulation):
            model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    figures, watch = metered(meter, step, steps)
    return result(figures, watch, counted / shared, accumulation * batch.numel() * ranks / shared)


def parallel(model: Any, split: str, ranks: int) -> Any:
    """Distribute a model over the ranks as torchtitan does, and return it.

    ``tp`` splits attention heads, MLPs and the output layer with DTensor. ``fsdp2`` shards each block and the whole
    model.
    """
    if not split:
        return model
    mesh = init_device_mesh(_DEVICE.type, (ranks,), mesh_dim_names=("ranks",))
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
    """Run the steps. Return the mean figures of the meter, and the stopwatch of the same steps."""
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


# -- callbacks ---------------------------------------------------------------------------------------------------------


class Recorder:
    """A recorder of the named inputs that a model gets in each forward pass with gradients.

    ``number``: the number of the current step. ``passes``: the inputs by step.
    """

    def __init__(self, model: Any) -> None:
        self.passes, self.number = defaultdict[int, list[dict[str, Any]]](list), 1
        self.hook = model.register_forward_pre_hook(self.see, with_kwargs=True)

    def see(self, model: Any, positional: Any, named: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and model.training:
            kept = {name: each.detach() if torch.is_tensor(each) else each for name, each in named.items()}
            self.passes[self.number].append(kept)

    def flop(self, model: Any, number: int) -> float:
        """Run the passes of a step again, with packed documents one by one. Return their FLOP."""
        total = 0.0
        for each in self.passes[number]:
            if each.pop("fused_lm_head", False):  # torch does not count TRL's fused output layer and loss
                each.pop("labels", None)
            for part in documents_of(each):
                total += counted_by_torch(lambda part=part: loss_of(model(**part)).backward())
                model.zero_grad()
        return total

    def tokens(self, number: int) -> float:
        """Return the number of tokens in a step, or NaN if the model gets no tokens."""
        return sum(each["input_ids"].numel() for each in self.passes[number] if "input_ids" in each) or math.nan


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss of a model's output. If there is none, return some function of the logits."""
    return output.logits.float().square().mean() if output.get("loss") is None else output.loss


def documents_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a packed batch into its documents. Return any other batch unchanged, as the only element of the list."""
    positions = batch.get("position_ids")
    if positions is None or batch.get("attention_mask") is not None:
        return [batch]
    begins = [*(positions[0] == 0).nonzero().flatten().tolist(), positions.shape[1]]
    names = ("input_ids", "labels", "position_ids")
    return [{name: batch[name][:, begin:end] for name in names if name in batch} for begin, end in pairwise(begins)]


#: A function that makes a trainer of transformers or TRL from the trainer's arguments.
Make = Callable[[dict[str, Any]], Any]


def trainer(steps: int, make: Make, accumulation: int = 1, **given: Any) -> dict[str, Any]:
    """Train with the Trainer of transformers, or with a class derived from it. Return the values of the row.

    ``make``: the function that makes the trainer. ``given``: additional arguments of the trainer.
    """
    import transformers

    from mamf.integrations.transformers import MamfuCallback

    _joined_device()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        usual = {"output_dir": folder, "max_steps": steps, "logging_steps": 1, "report_to": [], "save_strategy": "no"}
        usual |= {"per_device_train_batch_size": _SIZES["batch"], "gradient_accumulation_steps": accumulation}
        usual |= {"disable_tqdm": True, "bf16": True, "use_cpu": not _HAS_ACCELERATOR, "dataloader_drop_last": True}
        run = make(usual | given)
        recorder, times = Recorder(run.model), dict[int, float]()

        class Timer(transformers.TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
                if _HAS_ACCELERATOR:
                    torch.accelerator.synchronize()
                times[state.global_step], recorder.number = time.perf_counter(), state.global_step + 1

        run.add_callback(Timer())
        MamfuCallback(**_METERED).attach(run)
        run.train()
    recorder.hook.remove()
    model = getattr(run.model, "_orig_mod", run.model)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch does not count grouped matmuls
    if getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()
    logged = {each["step"]: each for each in run.state.log_history if "tflops" in each}
    assert logged, "nothing was metered"
    seconds = sum(each["step_seconds"] for each in logged.values())
    mean = {"step_seconds": seconds / len(logged)}
    for name in ("tflops", "tokens_per_second"):
        mean[name] = sum(each.get(name, math.nan) * each["step_seconds"] for each in logged.values()) / seconds
    counted = sum(recorder.flop(model, number) for number in logged) / len(logged)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    tokens = ranks * sum(map(recorder.tokens, logged)) / len(logged)
    watch = Stopwatch(0, len(logged))
    watch.times = {0: 0.0, len(logged): sum(times[number] - times[number - 1] for number in logged)}
    return result(mean, watch, counted, tokens)


def plain(kind: str, change: Callable[[Any], Any] = lambda model: model, **more: Any) -> Make:
    """Return a function that makes a Trainer of transformers.

    ``change``: a function that freezes or wraps the model. ``more``: additional options of the Trainer.
    """

    def make(arguments: dict[str, Any]) -> Any:
        import transformers

        options = transformers.TrainingArguments(**arguments)
        samples = [sample_of(_SIZES["length"])] * 4096
        model = change(pretrained(kind, _SIZES))
        built = {name: each(model) if name == "optimizers" else each for name, each in more.items()}
        return transformers.Trainer(model, options, **{"train_dataset": samples} | built)

    return make


def lora(model: Any) -> Any:
    """Return the model with LoRA adapters in all linear layers."""
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))


def bottom_frozen(model: Any) -> Any:
    """Freeze the embedding and the lower half of the layers, and return the model."""
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[: _SIZES["layers"] // 2].requires_grad_(False)
    return model


def muon(model: Any) -> Any:
    """Return the optimizer Muon for the matrices in the layers, and no scheduler."""
    matrices = [each for name, each in model.named_parameters() if each.dim() == 2 and "layers" in name]
    return torch.optim.Muon(matrices, lr=1e-4), None


def of_lengths(kind: str) -> Make:
    """Return a function that makes a Trainer whose batches have different lengths.

    The shortest and the longest batch come first. If torch counts the FLOP of the model, it then counts only these two
    batches, and mamf interpolates for the others.
    """

    def sample(length: int) -> dict[str, Any]:
        if kind == "Wav2Vec2":
            return {"input_values": torch.randn(length * 320 + 80), "labels": 0}
        return sample_of(length) | {"labels": 0}

    def make(arguments: dict[str, Any]) -> Any:
        top = _SIZES["length"]
        shares = [0.25, 1.0, *(0.3 + 0.11 * (number % 7) for number in range(256))]
        data = [sample(int(top * share)) for share in shares for _ in range(_SIZES["batch"])]
        options = arguments | {"train_sampling_strategy": "sequential"}
        return plain(kind, train_dataset=data)(options)

    return make


def flattened(arguments: dict[str, Any]) -> Any:
    """Return a Trainer that packs documents of several lengths into one sequence."""
    import transformers

    data = [{name: each.tolist() for name, each in sample_of(8 + 29 * number % 120).items()} for number in range(512)]
    collator = transformers.DataCollatorWithFlattening()
    return plain("Llama", train_dataset=data, data_collator=collator)(arguments)


def tokenizer() -> Any:
    """Return a tokenizer whose words are numbers."""
    import tokenizers
    import transformers

    words = {word: number for number, word in enumerate(["[PAD]", "[BOS]", "[EOS]", *map(str, range(3, 512))])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[PAD]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def words_of(count: int) -> str:
    """Return a text of random words for ``tokenizer``."""
    return " ".join(map(str, torch.randint(3, 512, (count,)).tolist()))


def sft(padding_free: bool) -> Make:
    """Return a function that makes TRL's trainer for supervised fine-tuning."""

    def make(arguments: dict[str, Any]) -> Any:
        import datasets
        import trl

        rows = [{"input_ids": torch.randint(3, 512, (8 + 29 * number % 120,)).tolist()} for number in range(512)]
        options = trl.SFTConfig(**arguments, padding_free=padding_free, max_length=None)
        data = datasets.Dataset.from_list(rows)
        return trl.SFTTrainer(pretrained("Llama", _SIZES), options, train_dataset=data, processing_class=tokenizer())

    return make


def grpo(arguments: dict[str, Any]) -> Any:
    """Return TRL's trainer for GRPO. The reward is the length of the completion."""
    import datasets
    import trl

    options = trl.GRPOConfig(**arguments, num_generations=2, max_completion_length=16)
    return trl.GRPOTrainer(
        pretrained("Llama", _SIZES), lambda completions, **_: [float(len(each)) for each in completions], options,
        train_dataset=datasets.Dataset.from_list([{"prompt": words_of(24)} for _ in range(256)]),
        processing_class=tokenizer(),
    )  # fmt: skip


def dpo(arguments: dict[str, Any]) -> Any:
    """Return TRL's trainer for DPO, with a separate reference model."""
    import datasets
    import trl

    rows = [{"prompt": words_of(24), "chosen": words_of(20), "rejected": words_of(30)} for _ in range(256)]
    options = trl.DPOConfig(**arguments)
    data = datasets.Dataset.from_list(rows)
    model, teacher = pretrained("Llama", _SIZES), pretrained("Llama", _SIZES)
    return trl.DPOTrainer(model, teacher, options, train_dataset=data, processing_class=tokenizer())


def lit(steps: int, kind: str, strategy: str = "auto") -> dict[str, Any]:
    """Train a language model of transformers with Lightning's Trainer. Return the values of the row."""
    import lightning

    here, model = _device_of_rank(), pretrained(kind, _SIZES)
    sample = sample_of(_SIZES["length"]).items()
    batch = {name: each[None].expand(_SIZES["batch"], *each.shape).contiguous() for name, each in sample}
    twin, on_device = copy.deepcopy(model).to(here), {name: each.to(here) for name, each in batch.items()}
    counted = counted_by_torch(lambda: twin(**on_device).loss.backward())
    twin = None

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    trained = fit(Module(), [batch] * steps, strategy=strategy, precision="bf16-mixed")
    return result(*trained, counted, batch["input_ids"].numel() * int(os.environ.get("WORLD_SIZE", 1)))


def fit(module: Any, batches: Sequence[Any], **options: Any) -> tuple[dict[str, float], Stopwatch]:
    """Train on each batch once, on every rank. Return mamf's figures and the stopwatch of the same steps.

    ``options``: additional options of Lightning's Trainer.
    """
    import lightning

    from mamf.integrations.lightning import MamfuCallback

    steps, ranks = len(batches), int(os.environ.get("WORLD_SIZE", 1))
    watch = Stopwatch(_WARM_UP, steps)

    class Timer(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, run: Any, *others: Any) -> None:
            watch.step(others[-1] + 1)

    run = lightning.Trainer(
        accelerator="auto" if _HAS_ACCELERATOR else "cpu", devices=ranks, max_epochs=1,
        log_every_n_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Timer(), MamfuCallback(**_METERED)], **options,
    )  # fmt: skip
    # Lightning divides the batches among the ranks.
    run.fit(module, torch.utils.data.DataLoader([*batches] * ranks, batch_size=None))
    return {name: float(each) for name, each in run.callback_metrics.items()}, watch


def with_two_optimizers(steps: int) -> dict[str, Any]:
    """Train with Lightning and two optimizers, as a GAN does. Return the values of the row.

    Each batch trains the critic five times and the generator once.
    """
    import lightning

    noise = torch.randn(_SIZES["batch"], _SIZES["hidden"])

    class Gan(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.critic, self.generator = (nn.Linear(_SIZES["hidden"], _SIZES["hidden"]) for _ in range(2))

        def losses(self, batch: torch.Tensor) -> Iterator[torch.Tensor]:
            for _ in range(5):
                yield self.critic(self.generator(batch).detach()).square().mean()
            yield self.critic(self.generator(batch)).square().mean()

        def training_step(self, batch: torch.Tensor, number: int) -> None:
            optimizers = self.optimizers()
            for place, loss in enumerate(self.losses(batch)):
                self.manual_backward(loss)
                optimizers[place // 5].step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(each.parameters()) for each in (self.critic, self.generator)]

    twin = Gan().to(_DEVICE)
    counted = counted_by_torch(lambda: [loss.backward() for loss in twin.losses(noise.to(_DEVICE))])
    return result(*fit(Gan(), [noise] * steps), counted, math.nan)


#: The function that runs a set-up with a number of steps, the number of ranks, and the first cells of the row.
Setup = tuple[Callable[[int], dict[str, Any]], int, str]


def on_one(cells: str, make: Make, **given: Any) -> Setup:
    """Return a set-up that runs a trainer in one process.

    ``cells``: the tool and the model, as the row shows them. ``given``: additional arguments of the trainer.
    """
    return functools.partial(trainer, make=make, **given), 1, f"{cells} | bf16 autocast | 1 | none"


_CHECKPOINTED = {"gradient_checkpointing": True}
_COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
#: All set-ups, by name.
SETUPS: dict[str, Setup] = {
    "loop": (lambda n: loop(n), 1, "mamf.Meter | Llama-like | bf16 | 1 | none"),
    "loop-float32": (lambda n: loop(n, "", 4, torch.float32), 1, "mamf.Meter | Llama-like | fp32 | 4 | none"),
    "trainer-llama": on_one("Trainer | Llama", plain("Llama")),
    "checkpoint": on_one("Trainer | Llama, checkpointing", plain("Llama"), **_CHECKPOINTED),
    "moe": on_one("Trainer | Qwen 3 MoE", plain("Qwen3Moe")),
    "muon": on_one("Trainer, Muon | Llama", plain("Llama", optimizers=muon)),
    "frozen": on_one("Trainer | Llama, lower half frozen", plain("Llama", bottom_frozen)),
    "lora": on_one("Trainer, PEFT | Llama, LoRA", plain("Llama", lora)),
    "lora-checkpoint": on_one("Trainer, PEFT | Llama, LoRA, checkpointing", plain("Llama", lora), **_CHECKPOINTED),
    "lora-compile": on_one("Trainer, PEFT | Llama, LoRA, compiled", plain("Llama", lora), **_COMPILED),
    "flattened": on_one("Trainer | Llama, packed documents", flattened),
    "distilbert": on_one("Trainer | DistilBERT, changing lengths", of_lengths("DistilBert")),
    "wav2vec2": on_one("Trainer | wav2vec 2, changing lengths", of_lengths("Wav2Vec2")),
    "sft": on_one("TRL SFT | Llama, padded", sft(False)),
    "sft-padding-free": on_one("TRL SFT | Llama, packed documents", sft(True)),
    "grpo": on_one("TRL GRPO | Llama", grpo),
    "dpo": on_one("TRL DPO | Llama", dpo),
    "lightning-gpt2": (lambda n: lit(n, "GPT2"), 1, "Lightning | GPT-2 | bf16-mixed | 1 | none"),
    "lightning-gan": (with_two_optimizers, 1, "Lightning, 2 optimizers | GAN | fp32 | 1 | none"),
    "lightning-ddp": (lambda n: lit(n, "Bert", strategy="ddp"), 2, "Lightning | BERT | bf16-mixed | 1 | DDP, 2 ranks"),
    "trainer-ddp": (lambda n: trainer(n, plain("Llama"), 2), 2, "Trainer | Llama | bf16 autocast | 2 | DDP, 2 ranks"),
    "loop-fsdp2": (lambda n: loop(n, "fsdp2"), 2, "mamf.Meter | Llama-like | bf16 | 1 | FSDP2, 2 ranks"),
    "loop-tp": (lambda n: loop(n, "tp"), 2, "mamf.Meter | Llama-like | bf16 | 1 | tensor parallel, 2 ranks"),
}


def _device_of_rank() -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", 0))
    return torch.device(_DEVICE.type, local) if _HAS_ACCELERATOR else _DEVICE


def _joined_device() -> torch.device:
    """Create the process group if there are several ranks. Return the device of this rank."""
    device = _device_of_rank()
    if _HAS_ACCELERATOR:
        torch.accelerator.set_device_index(device.index)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        dist.init_process_group()
    return device


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", choices=SETUPS, help="run this set-up in this process; print a line of JSON")
    parser.add_argument("--steps", type=int, default=20, help="number of optimizer steps (default: 20)")
    options = parser.parse_args(arguments)
    if options.one:
        warnings.simplefilter("default")
        found = SETUPS[options.one][0](options.steps)
        line = json.dumps(found | {"rank": int(os.environ.get("RANK", 0))})
        os.write(1, f"{line}\n".encode())  # in one call, because two ranks share the pipe
        if dist.is_initialized():
            dist.destroy_process_group()
        return 0
    print("| tool | model | precision | accumulation | parallelism | FLOP by mamf | by an independent count | ratio | "
          "rate by mamf | by a stopwatch | ratio | TFLOPS |")  # fmt: skip
    print("|:--|:--|:--|--:|:--|--:|--:|--:|--:|--:|--:|--:|")
    return max(_print_row(name, options.steps) for name in SETUPS)


def _print_row(name: str, steps: int) -> int:
    """Run a set-up in separate processes, and print a row for each rank. Return the exit code.

    The exit code is 0 if the set-up is left out because of a missing library or too few devices.
    """
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
