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
_METER_OPTIONS = {"ceiling": 1e15, "warmup_steps": _WARM_UP}


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
        hidden, layers, heads, vocabulary = (sizes[name] for name in ("hidden", "layers", "heads", "vocabulary"))
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


def make_model(kind: str, sizes: dict[str, int]) -> Any:
    """Return a model of the transformers library with random weights. ``kind``: a key of the table below."""
    import transformers

    hidden, layers, heads, length = (sizes[name] for name in ("hidden", "layers", "heads", "length"))
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


def make_sample(length: int) -> dict[str, torch.Tensor]:
    """Return a sequence of random tokens, which are its labels too."""
    ids = torch.randint(3, _SIZES["vocabulary"], (length,))
    return {"input_ids": ids, "labels": ids}


def count_flop(step: Any) -> float:
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


def make_row_values(figures: dict[str, float], watch: Stopwatch, counted_flop: float, tokens: float) -> dict[str, Any]:
    """Return the values of a row of the table, as mean values of a step.

    ``figures``: mamf's figures. ``counted_flop``: the FLOP on this rank by the independent count.
    ``tokens``: the number of tokens on all ranks.
    """
    flop = figures["tflops"] * figures["step_seconds"] * 1e12
    rate, stopwatch_rate = figures.get("tokens_per_second", math.nan), tokens / watch.seconds
    return {
        "flop": flop,
        "counted": counted_flop,
        "rate": rate,
        "stopwatch": stopwatch_rate,
        "tflops": figures["tflops"],
    }


# -- loops with mamf.Meter ---------------------------------------------------------------------------------------------


def train_loop(
    steps: int, split: str = "", accumulation: int = 1, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Train ``Decoder`` in a plain loop with ``mamf.Meter``. Return the values of its row.

    ``split``: how to distribute the model over the ranks: ``fsdp2``, ``tp`` (tensor parallel), or empty for one rank.
    """
    ranks, device = int(os.environ.get("WORLD_SIZE", 1)), _join_process_group()
    torch.manual_seed(0)
    model: Any = Decoder(_SIZES).to(device, dtype)
    batch = torch.randint(0, _SIZES["vocabulary"], (_SIZES["batch"], _SIZES["length"]), device=device)
    counted_flop = accumulation * count_flop(lambda: model(batch).backward())
    model.zero_grad()
    ranks_per_model = ranks if split == "tp" else 1
    meter = mamf.Meter(
        model=model, sequence_length=_SIZES["length"], tokens_per_step=batch.numel(), accumulation=accumulation,
        world_size=ranks, model_parallel=ranks_per_model, dtype=str(dtype).removeprefix("torch."), **_METER_OPTIONS,
    )  # fmt: skip
    model = distribute_model(model, split, ranks)
    foreach = False if split == "tp" else None  # foreach cannot update tensors and DTensors together
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=foreach)

    def step() -> None:
        for _ in range(accumulation):
            model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    figures, watch = run_metered_steps(meter, step, steps)
    tokens = accumulation * batch.numel() * ranks / ranks_per_model
    return make_row_values(figures, watch, counted_flop / ranks_per_model, tokens)


def distribute_model(model: Any, split: str, ranks: int) -> Any:
    """Distribute a model over the ranks as torchtitan does, and return it.

    ``tp`` splits attention heads, MLPs and the output layer with DTensor. ``fsdp2`` shards each block and the whole
    model.
    """
    if not split:
        return model
    mesh = init_device_mesh(_DEVICE.type, (ranks,), mesh_dim_names=("ranks",))
    for block in model.blocks:
        if split == "tp":
            parallel_styles = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
            parallel_styles |= {"attention.wo": RowwiseParallel(), "w1": ColwiseParallel(), "w3": ColwiseParallel()}
            parallelize_module(block, mesh, parallel_styles | {"w2": RowwiseParallel()})
        else:
            fully_shard(block, mesh=mesh)
    if split == "tp":
        return parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    return fully_shard(model, mesh=mesh)


def run_metered_steps(meter: mamf.Meter, step: Callable[[], None], steps: int) -> tuple[dict[str, float], Stopwatch]:
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
        self.hook = model.register_forward_pre_hook(self.record_inputs, with_kwargs=True)

    def record_inputs(self, model: Any, positional: Any, named: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and model.training:
            detached_inputs = {
                name: value.detach() if torch.is_tensor(value) else value for name, value in named.items()
            }
            self.passes[self.number].append(detached_inputs)

    def flop(self, model: Any, number: int) -> float:
        """Run the passes of a step again, with packed documents one by one. Return their FLOP."""
        total = 0.0
        for inputs in self.passes[number]:
            if inputs.pop("fused_lm_head", False):  # torch does not count TRL's fused output layer and loss
                inputs.pop("labels", None)
            for part in split_documents(inputs):
                total += count_flop(lambda part=part: get_loss(model(**part)).backward())
                model.zero_grad()
        return total

    def tokens(self, number: int) -> float:
        """Return the number of tokens in a step, or NaN if the model gets no tokens."""
        return sum(inputs["input_ids"].numel() for inputs in self.passes[number] if "input_ids" in inputs) or math.nan


def get_loss(output: Any) -> torch.Tensor:
    """Return the loss of a model's output. If there is none, return some function of the logits."""
    return output.logits.float().square().mean() if output.get("loss") is None else output.loss


def split_documents(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a packed batch into its documents. Return any other batch unchanged, as the only element of the list."""
    positions = batch.get("position_ids")
    if positions is None or batch.get("attention_mask") is not None:
        return [batch]
    begins = [*(positions[0] == 0).nonzero().flatten().tolist(), positions.shape[1]]
    names = ("input_ids", "labels", "position_ids")
    return [{name: batch[name][:, begin:end] for name in names if name in batch} for begin, end in pairwise(begins)]


#: A function that makes a trainer of transformers or TRL from the trainer's arguments.
TrainerMaker = Callable[[dict[str, Any]], Any]


def train_with_trainer(steps: int, make: TrainerMaker, accumulation: int = 1, **arguments: Any) -> dict[str, Any]:
    """Train with the Trainer of transformers, or with a class derived from it. Return the values of the row.

    ``make``: the function that makes the trainer. ``arguments``: additional arguments of the trainer.
    """
    import transformers

    from mamf.integrations.transformers import MamfuCallback

    _join_process_group()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        defaults = {"output_dir": folder, "max_steps": steps, "logging_steps": 1, "report_to": [], "bf16": True}
        defaults |= {"per_device_train_batch_size": _SIZES["batch"], "gradient_accumulation_steps": accumulation}
        defaults |= {"use_cpu": not _HAS_ACCELERATOR, "dataloader_drop_last": True, "disable_tqdm": True}
        defaults |= {"save_strategy": "no"}
        run = make(defaults | arguments)
        recorder, times = Recorder(run.model), dict[int, float]()

        class Timer(transformers.TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
                if _HAS_ACCELERATOR:
                    torch.accelerator.synchronize()
                times[state.global_step], recorder.number = time.perf_counter(), state.global_step + 1

        run.add_callback(Timer())
        MamfuCallback(**_METER_OPTIONS).attach(run)
        run.train()
    recorder.hook.remove()
    model = getattr(run.model, "_orig_mod", run.model)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch does not count grouped matmuls
    if getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()
    records = {record["step"]: record for record in run.state.log_history if "tflops" in record}
    assert records, "the callback logged no figures"
    seconds = sum(record["step_seconds"] for record in records.values())
    mean_figures = {"step_seconds": seconds / len(records)}
    for name in ("tflops", "tokens_per_second"):
        weighted = (record.get(name, math.nan) * record["step_seconds"] for record in records.values())
        mean_figures[name] = sum(weighted) / seconds
    counted_flop = sum(recorder.flop(model, number) for number in records) / len(records)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    tokens = ranks * sum(map(recorder.tokens, records)) / len(records)
    watch = Stopwatch(0, len(records))
    watch.times = {0: 0.0, len(records): sum(times[number] - times[number - 1] for number in records)}
    return make_row_values(mean_figures, watch, counted_flop, tokens)


def define_trainer(kind: str, change: Callable[[Any], Any] = lambda model: model, **more: Any) -> TrainerMaker:
    """Return a function that makes a Trainer of transformers.

    ``change``: a function that freezes or wraps the model. ``more``: additional options of the Trainer.
    """

    def make(arguments: dict[str, Any]) -> Any:
        import transformers

        options = transformers.TrainingArguments(**arguments)
        samples = [make_sample(_SIZES["length"])] * 4096
        model = change(make_model(kind, _SIZES))
        built_options = {name: value(model) if name == "optimizers" else value for name, value in more.items()}
        return transformers.Trainer(model, options, **{"train_dataset": samples} | built_options)

    return make


def add_lora(model: Any) -> Any:
    """Return the model with LoRA adapters in all linear layers."""
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))


def freeze_lower_half(model: Any) -> Any:
    """Freeze the embedding and the lower half of the layers, and return the model."""
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[: _SIZES["layers"] // 2].requires_grad_(False)
    return model


def make_muon(model: Any) -> Any:
    """Return the optimizer Muon for the matrices in the layers, and no scheduler."""
    matrices = [parameter for name, parameter in model.named_parameters() if parameter.dim() == 2 and "layers" in name]
    return torch.optim.Muon(matrices, lr=1e-4), None


def define_trainer_with_lengths(kind: str) -> TrainerMaker:
    """Return a function that makes a Trainer whose batches have different lengths.

    The shortest and the longest batch come first. If torch counts the FLOP of the model, it then counts only these two
    batches, and mamf interpolates for the others.
    """

    def sample(length: int) -> dict[str, Any]:
        if kind == "Wav2Vec2":
            return {"input_values": torch.randn(length * 320 + 80), "labels": 0}
        return make_sample(length) | {"labels": 0}

    def make(arguments: dict[str, Any]) -> Any:
        top = _SIZES["length"]
        shares = [0.25, 1.0, *(0.3 + 0.11 * (number % 7) for number in range(256))]
        data = [sample(int(top * share)) for share in shares for _ in range(_SIZES["batch"])]
        options = arguments | {"train_sampling_strategy": "sequential"}
        return define_trainer(kind, train_dataset=data)(options)

    return make


def make_packing_trainer(arguments: dict[str, Any]) -> Any:
    """Return a Trainer that packs documents of several lengths into one sequence."""
    import transformers

    data = [
        {name: tensor.tolist() for name, tensor in make_sample(8 + 29 * number % 120).items()} for number in range(512)
    ]
    collator = transformers.DataCollatorWithFlattening()
    return define_trainer("Llama", train_dataset=data, data_collator=collator)(arguments)


def make_tokenizer() -> Any:
    """Return a tokenizer whose words are numbers."""
    import tokenizers
    import transformers

    words = {word: number for number, word in enumerate(["[PAD]", "[BOS]", "[EOS]", *map(str, range(3, 512))])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[PAD]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def make_text(count: int) -> str:
    """Return a text of random words for ``make_tokenizer``."""
    return " ".join(map(str, torch.randint(3, 512, (count,)).tolist()))


def define_sft_trainer(padding_free: bool) -> TrainerMaker:
    """Return a function that makes TRL's trainer for supervised fine-tuning."""

    def make(arguments: dict[str, Any]) -> Any:
        import datasets
        import trl

        rows = [{"input_ids": torch.randint(3, 512, (8 + 29 * number % 120,)).tolist()} for number in range(512)]
        options = trl.SFTConfig(**arguments, padding_free=padding_free, max_length=None)
        data = datasets.Dataset.from_list(rows)
        return trl.SFTTrainer(
            make_model("Llama", _SIZES), options, train_dataset=data, processing_class=make_tokenizer()
        )

    return make


def make_grpo_trainer(arguments: dict[str, Any]) -> Any:
    """Return TRL's trainer for GRPO. The reward is the length of the completion."""
    import datasets
    import trl

    options = trl.GRPOConfig(**arguments, num_generations=2, max_completion_length=16)
    return trl.GRPOTrainer(
        make_model("Llama", _SIZES), lambda completions, **_: [float(len(text)) for text in completions], options,
        train_dataset=datasets.Dataset.from_list([{"prompt": make_text(24)} for _ in range(256)]),
        processing_class=make_tokenizer(),
    )  # fmt: skip


def make_dpo_trainer(arguments: dict[str, Any]) -> Any:
    """Return TRL's trainer for DPO, with a separate reference model."""
    import datasets
    import trl

    rows = [{"prompt": make_text(24), "chosen": make_text(20), "rejected": make_text(30)} for _ in range(256)]
    options = trl.DPOConfig(**arguments)
    data = datasets.Dataset.from_list(rows)
    model, teacher = make_model("Llama", _SIZES), make_model("Llama", _SIZES)
    return trl.DPOTrainer(model, teacher, options, train_dataset=data, processing_class=make_tokenizer())


def train_with_lightning(steps: int, kind: str, strategy: str = "auto") -> dict[str, Any]:
    """Train a language model of transformers with Lightning's Trainer. Return the values of the row."""
    import lightning

    device, model = _device_of_rank(), make_model(kind, _SIZES)
    sample = make_sample(_SIZES["length"]).items()
    batch = {name: tensor[None].expand(_SIZES["batch"], *tensor.shape).contiguous() for name, tensor in sample}
    model_copy, on_device = copy.deepcopy(model).to(device), {name: tensor.to(device) for name, tensor in batch.items()}
    counted_flop = count_flop(lambda: model_copy(**on_device).loss.backward())
    model_copy = None

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    figures_and_watch = fit_with_lightning(Module(), [batch] * steps, strategy=strategy, precision="bf16-mixed")
    return make_row_values(
        *figures_and_watch, counted_flop, batch["input_ids"].numel() * int(os.environ.get("WORLD_SIZE", 1))
    )


def fit_with_lightning(module: Any, batches: Sequence[Any], **options: Any) -> tuple[dict[str, float], Stopwatch]:
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
        enable_model_summary=False, callbacks=[Timer(), MamfuCallback(**_METER_OPTIONS)], **options,
    )  # fmt: skip
    # Lightning divides the batches among the ranks.
    run.fit(module, torch.utils.data.DataLoader([*batches] * ranks, batch_size=None))
    return {name: float(value) for name, value in run.callback_metrics.items()}, watch


def train_with_two_optimizers(steps: int) -> dict[str, Any]:
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
            return [torch.optim.Adam(model.parameters()) for model in (self.critic, self.generator)]

    model_copy = Gan().to(_DEVICE)
    counted_flop = count_flop(lambda: [loss.backward() for loss in model_copy.losses(noise.to(_DEVICE))])
    return make_row_values(*fit_with_lightning(Gan(), [noise] * steps), counted_flop, math.nan)


#: The function that runs a set-up with a number of steps, the number of ranks, and the first cells of the row.
Setup = tuple[Callable[[int], dict[str, Any]], int, str]


def define_setup(cells: str, make: TrainerMaker, **arguments: Any) -> Setup:
    """Return a set-up that runs a trainer in one process.

    ``cells``: the tool and the model, as the row shows them. ``arguments``: additional arguments of the trainer.
    """
    return functools.partial(train_with_trainer, make=make, **arguments), 1, f"{cells} | bf16 autocast | 1 | none"


_CHECKPOINTED = {"gradient_checkpointing": True}
_COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
#: All set-ups, by name.
SETUPS: dict[str, Setup] = {
    "loop": (lambda n: train_loop(n), 1, "mamf.Meter | Llama-like | bf16 | 1 | none"),
    "loop-float32": (lambda n: train_loop(n, "", 4, torch.float32), 1, "mamf.Meter | Llama-like | fp32 | 4 | none"),
    "trainer-llama": define_setup("Trainer | Llama", define_trainer("Llama")),
    "checkpoint": define_setup("Trainer | Llama, checkpointing", define_trainer("Llama"), **_CHECKPOINTED),
    "moe": define_setup("Trainer | Qwen 3 MoE", define_trainer("Qwen3Moe")),
    "muon": define_setup("Trainer, Muon | Llama", define_trainer("Llama", optimizers=make_muon)),
    "frozen": define_setup("Trainer | Llama, lower half frozen", define_trainer("Llama", freeze_lower_half)),
    "lora": define_setup("Trainer, PEFT | Llama, LoRA", define_trainer("Llama", add_lora)),
    "lora-checkpoint": define_setup(
        "Trainer, PEFT | Llama, LoRA, checkpointing", define_trainer("Llama", add_lora), **_CHECKPOINTED
    ),
    "lora-compile": define_setup(
        "Trainer, PEFT | Llama, LoRA, compiled", define_trainer("Llama", add_lora), **_COMPILED
    ),
    "flattened": define_setup("Trainer | Llama, packed documents", make_packing_trainer),
    "distilbert": define_setup("Trainer | DistilBERT, changing lengths", define_trainer_with_lengths("DistilBert")),
    "wav2vec2": define_setup("Trainer | wav2vec 2, changing lengths", define_trainer_with_lengths("Wav2Vec2")),
    "sft": define_setup("TRL SFT | Llama, padded", define_sft_trainer(False)),
    "sft-padding-free": define_setup("TRL SFT | Llama, packed documents", define_sft_trainer(True)),
    "grpo": define_setup("TRL GRPO | Llama", make_grpo_trainer),
    "dpo": define_setup("TRL DPO | Llama", make_dpo_trainer),
    "lightning-gpt2": (lambda n: train_with_lightning(n, "GPT2"), 1, "Lightning | GPT-2 | bf16-mixed | 1 | none"),
    "lightning-gan": (train_with_two_optimizers, 1, "Lightning, 2 optimizers | GAN | fp32 | 1 | none"),
    "lightning-ddp": (
        lambda n: train_with_lightning(n, "Bert", strategy="ddp"),
        2,
        "Lightning | BERT | bf16-mixed | 1 | DDP, 2 ranks",
    ),
    "trainer-ddp": (
        lambda n: train_with_trainer(n, define_trainer("Llama"), 2),
        2,
        "Trainer | Llama | bf16 autocast | 2 | DDP, 2 ranks",
    ),
    "loop-fsdp2": (lambda n: train_loop(n, "fsdp2"), 2, "mamf.Meter | Llama-like | bf16 | 1 | FSDP2, 2 ranks"),
    "loop-tp": (lambda n: train_loop(n, "tp"), 2, "mamf.Meter | Llama-like | bf16 | 1 | tensor parallel, 2 ranks"),
}


def _device_of_rank() -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", 0))
    return torch.device(_DEVICE.type, local) if _HAS_ACCELERATOR else _DEVICE


def _join_process_group() -> torch.device:
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
        values = SETUPS[options.one][0](options.steps)
        line = json.dumps(values | {"rank": int(os.environ.get("RANK", 0))})
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
        print(f"{name}: not run, because it needs {ranks} devices", file=sys.stderr)
        return 0
    command = [sys.executable, *launcher, __file__, "--one", name, "--steps", str(steps)]
    ran = subprocess.run(command, capture_output=True, text=True)
    rows = [json.loads(line[line.index('{"flop"') :]) for line in ran.stdout.splitlines() if '{"flop"' in line]
    if ran.returncode or not rows:
        reason = (ran.stderr.strip() or "nothing was printed").splitlines()
        error = next((line for line in reason if "Error" in line and "Module" in line), reason[-1])
        print(f"{name}: no row, because it failed: {error}", file=sys.stderr)
        return 0 if "No module named" in error else 1
    for row in sorted(rows, key=lambda row: row["rank"]):
        rank = f", rank {row['rank']}" if ranks > 1 else ""
        print(f"| {cells}{rank} | {row['flop']:.6g} | {row['counted']:.6g} | {row['flop'] / row['counted']:.4f} | "
              f"{row['rate']:.1f} tokens/s | {row['stopwatch']:.1f} | {row['rate'] / row['stopwatch']:.4f} | "
              f"{row['tflops']:.4g} |", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
