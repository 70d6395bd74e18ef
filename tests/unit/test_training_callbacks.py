"""Test the callbacks for training libraries: their common code in virtual time, and each callback in its trainer.

The trainers train tiny models on the CPU. The test of a trainer is skipped if its library is not installed.
"""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mamf.errors import UsageError
from mamf.integrations.metered import MeteredCallback, stop_metering_on_error
from mamf.integrations.model_flops import ModelFlops
from mamf.testing import SimulatedBackend

FIGURE_NAMES = {"tflops", "mamfu_percent", "tokens_per_second", "samples_per_second", "step_seconds"}
FLOPS = ModelFlops(weight_count=10**6, layer_count=1, attention_width=8)
VISION = ModelFlops(weight_count=10**6, layer_count=1, attention_width=8, is_causal=False, fixed_length=17)
BATCH = {"input_ids": torch.zeros(4, 128, dtype=torch.long)}
IMAGES = (torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long))


class MinimalCallback(MeteredCallback):
    """A minimal callback of a training library."""

    start_method = "begin"

    @stop_metering_on_error
    def begin(self, module=None, **defaults):
        self.start_metering(module, module, defaults)

    @stop_metering_on_error
    def train(self, batch, passes=1, work=lambda: None):
        for _ in range(passes):
            self.training.begin_pass()
            self.training.add_batch(batch)
            work()
            self.training.meter.backend.sleep(1 / passes)
        self.training.stop_counting()
        self.training.end_step()

    def compute_figures(self):
        return {name: pytest.approx(figure, rel=1e-3) for name, figure in self.training.compute_figures().items()}


def train(batch, *, module=None, steps=2, passes=1, work=lambda: None, **options):
    callback = MinimalCallback(**{"backend": SimulatedBackend(), "ceiling": 1e15, "warmup_steps": 0} | options)
    callback.begin(module)
    for _ in range(steps):
        callback.train(batch, passes, work)
    return callback.compute_figures() if callback.training else None


def count_flop(step):
    """Return the FLOP of ``step`` as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


@pytest.mark.parametrize("causal", [False, True])
def test_tokens_and_flop_are_gathered_over_the_passes_of_a_step(causal):
    figures = train(BATCH, passes=2, module=FLOPS, causal=causal)
    flop = 2 * 4 * 128 * FLOPS.compute_flop_per_token(128, causal)
    assert figures["tokens_per_second"] == 2 * 4 * 128
    assert figures["samples_per_second"] == 8
    assert figures["step_seconds"] == 1
    assert (figures["tflops"], figures["mamfu_percent"]) == (flop / 1e12, flop / 1e13)


def test_ranks_that_share_a_batch_share_its_flop():
    with pytest.warns(UserWarning, match="those of rank 0, multiplied by 2 ranks") as warned:
        figures = train(BATCH, module=FLOPS, world_size=4, model_parallel=2)
    assert len(warned) == 1
    assert figures["tflops"] == 4 * 128 * FLOPS.compute_flop_per_token(128) / 2 / 1e12
    assert figures["tokens_per_second"] == 2 * 4 * 128


def test_given_counts_replace_those_of_the_batch():
    figures = train(BATCH, passes=2, tokens=1000, flops_per_step=5e12, samples=3)
    assert (figures["tokens_per_second"], figures["tflops"], figures["samples_per_second"]) == (2000, 10, 6)


def test_images_have_flop_but_no_tokens_if_the_formula_has_a_fixed_length():
    figures = train(IMAGES, module=VISION)
    assert figures["tflops"] == 4 * 17 * VISION.compute_flop_per_token(17) / 1e12
    assert figures["samples_per_second"] == 4
    assert "tokens_per_second" not in figures


def test_torch_counts_one_step_of_an_unknown_model_and_later_steps_reuse_the_count():
    module = torch.nn.Linear(8, 16)
    with pytest.warns(UserWarning, match="no formula for 'Linear': instead, torch counts the FLOP"):
        figures = train(IMAGES, module=module, steps=3, work=lambda: module(torch.zeros(10**5, 8)).sum().backward())
    # One matmul forward and one backward, because the input of the model needs no gradient.
    assert figures["tflops"] == 2 * 2 * 10**5 * 8 * 16 / 1e12
    assert figures["step_seconds"] == 1


def test_torch_counts_the_flop_if_a_batch_has_no_tokens_for_the_formula():
    module = torch.nn.Linear(8, 16)
    with pytest.warns(UserWarning, match="mamf found no tokens in a batch"):
        figures = train(IMAGES, module=FLOPS, steps=3, work=lambda: module(torch.zeros(10**5, 8)).sum())
    assert "tokens_per_second" not in figures
    assert figures["tflops"] == 2 * 10**5 * 8 * 16 / 1e12


def test_batches_of_other_sizes_are_counted_until_their_lengths_are_known():
    """Check that mamf counts FLOP again until it can interpolate between lengths.

    The model has matmuls with weights and, as in attention, matmuls whose FLOP grow with the square of the length.
    """

    def work(sound):
        x = torch.zeros(*sound.shape, 64, requires_grad=True)
        (x @ x.transpose(1, 2)).sum().backward()
        (x @ torch.zeros(64, 256)).sum().backward()

    callback = MinimalCallback(backend=SimulatedBackend(), ceiling=1e15, warmup_steps=0)
    with pytest.warns(UserWarning, match="no formula for 'Linear'"):
        callback.begin(torch.nn.Linear(8, 8))
    metered_flop, flop_of_torch = [], []
    for rows, length in [(4, 100), (2, 100), (4, 400), (4, 200), (2, 300), (1, 400)]:
        sound = torch.zeros(rows, length)
        callback.train({"input_values": sound}, work=lambda sound=sound: work(sound))
        metered_flop.append(callback.training.compute_figures().get("tflops", 0) * 1e12)
        flop_of_torch.append(count_flop(lambda sound=sound: work(sound)))
    # torch counted the FLOP of two steps. mamf does not meter such steps, so they have no rate.
    assert metered_flop == [pytest.approx(flop, rel=1e-3) for flop in (0, flop_of_torch[1], 0, *flop_of_torch[3:])]


def test_passes_without_gradients_are_not_counted():
    callback = MinimalCallback(backend=SimulatedBackend(), ceiling=1e15, warmup_steps=0)
    callback.begin(FLOPS)
    for _ in range(2):
        with torch.no_grad(), warnings.catch_warnings(record=True):
            callback.training.add_batch({"input_ids": torch.zeros(64, 1, dtype=torch.long)})
        callback.train(BATCH)
    figures = callback.compute_figures()
    assert (figures["tokens_per_second"], figures["samples_per_second"]) == (512, 4)
    assert figures["tflops"] == 512 * FLOPS.compute_flop_per_token(128) / 1e12


PACKED = torch.tensor([[*range(100), *range(20), *range(8)]] * 4)
CUMULATIVE_LENGTHS = torch.tensor([0, 100, 120, 128, 512], dtype=torch.int32)


@pytest.mark.parametrize(
    ("fields", "documents"),
    [
        ({"position_ids": PACKED}, [100, 20, 8] * 4),
        ({"position_ids": PACKED, "attention_mask": torch.ones(4, 128)}, [128] * 4),
        ({"position_ids": PACKED.expand(3, -1, -1)}, [128] * 4),
        ({"cu_seq_lens_q": CUMULATIVE_LENGTHS, "position_ids": PACKED}, [100, 20, 8, 384]),
    ],
)
def test_packed_documents_attend_to_themselves_only(fields, documents):
    figures = train(BATCH | fields, module=FLOPS)
    assert figures["tflops"] == sum(length * FLOPS.compute_flop_per_token(length) for length in documents) / 1e12
    assert figures["tokens_per_second"] == 512


def test_the_output_layer_counts_for_the_tokens_that_it_takes():
    flops = replace(FLOPS, output_layer_weight_count=400_000)
    figures = train(BATCH | {"logits_to_keep": 28}, module=flops)
    assert figures["tflops"] == (512 * flops.compute_flop_per_token(128) - 4 * 100 * 6 * 400_000) / 1e12


class AdaptedLinear(torch.nn.Module):
    """A frozen linear layer with a trained adapter, like a layer that PEFT has wrapped."""

    def __init__(self, width):
        super().__init__()
        self.base_layer = torch.nn.Linear(width, width, bias=False).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(width, 2, bias=False), torch.nn.Linear(2, width, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


class PartlyFrozenModel(torch.nn.Module):
    """A model of three blocks with two linear layers each.

    ``frozen``: how many of the blocks are frozen, or ``"adapted"`` to freeze all blocks and add an adapter to each.
    ``reentrant``: whether checkpointing is reentrant; None for no checkpointing.
    """

    def __init__(self, frozen, reentrant):
        super().__init__()
        self.embedding, self.reentrant = torch.nn.Embedding(32, 8).requires_grad_(False), reentrant
        self.is_checkpointed = reentrant is not None
        make_first_layer = (
            (lambda: AdaptedLinear(8)) if frozen == "adapted" else (lambda: torch.nn.Linear(8, 8, bias=False))
        )
        blocks = [torch.nn.Sequential(make_first_layer(), torch.nn.Linear(8, 8, bias=False)) for _ in range(3)]
        for block in blocks[: 0 if frozen == "adapted" else frozen]:
            block.requires_grad_(False)
        if frozen == "adapted":
            [block[1].requires_grad_(False) for block in blocks]
        self.layers = torch.nn.ModuleList(blocks)

    def forward(self, ids):
        x = self.embedding(ids)
        x.requires_grad_(self.reentrant is not None)
        for block in self.layers:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.is_checkpointed else block(x)
        return x.sum()


@pytest.mark.parametrize("frozen", [0, 1, 2, "adapted"])
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_frozen_weights_count_as_torch_counts_them(frozen, reentrant, monkeypatch):
    """Check that checkpointing does not change the FLOP, because recomputation does not count."""
    model, ids = PartlyFrozenModel(frozen, reentrant), BATCH["input_ids"]
    flops = ModelFlops(weight_count=6 * 8 * 8, layer_count=3, attention_width=0)
    monkeypatch.setattr("mamf.integrations.metered.model_flops", lambda module: flops)
    figures = train(BATCH, module=model, work=lambda: model(ids).backward())
    model.is_checkpointed = False
    assert figures["tflops"] == count_flop(lambda: model(ids).backward()) / 1e12
    assert not any(each._forward_pre_hooks for each in model.modules())


def test_frozen_weights_count_as_trained_if_no_layer_runs(monkeypatch):
    monkeypatch.setattr("mamf.integrations.metered.model_flops", lambda module: FLOPS)
    with pytest.warns(UserWarning, match="frozen weights count as trained"):
        figures = train(BATCH, module=PartlyFrozenModel(1, None))
    assert figures["tflops"] == 512 * FLOPS.compute_flop_per_token(128) / 1e12


def test_attention_of_frozen_layers_runs_forward_only(monkeypatch):
    flops = ModelFlops(weight_count=1, layer_count=3, attention_width=10**6)
    monkeypatch.setattr("mamf.integrations.metered.model_flops", lambda module: flops)
    model = PartlyFrozenModel(2, None)
    figures = train(BATCH, module=model, work=lambda: model(BATCH["input_ids"]).backward())
    assert figures["tflops"] == 512 * flops.compute_flop_per_token(128) * (1 + 2 / 3) / 3 / 1e12


def test_a_compiled_model_with_adapters_has_a_formula(monkeypatch):
    model = PartlyFrozenModel("adapted", None)
    model._compiled_call_impl = lambda ids: ids
    flops = ModelFlops(weight_count=6 * 8 * 8, layer_count=3, attention_width=0)
    monkeypatch.setattr("mamf.integrations.metered.model_flops", lambda module: flops)
    assert train(BATCH, module=model)["tflops"] == 512 * (4 * flops.weight_count + 6 * 3 * 32) / 1e12


def test_a_compiled_model_is_not_counted():
    module = torch.nn.Linear(8, 16)
    module._compiled_call_impl = lambda tensor: tensor
    with pytest.warns(UserWarning, match="without compilation; give flops_per_step="):
        figures = train(IMAGES, module=module)
    assert set(figures) == {"samples_per_second", "step_seconds"}


def test_a_model_that_ranks_share_is_not_counted():
    with pytest.warns(UserWarning, match="cannot count the FLOP of one rank.*give flops_per_step="):
        figures = train(IMAGES, module=torch.nn.Linear(8, 16), world_size=2, model_parallel=2)
    assert set(figures) == {"samples_per_second", "step_seconds"}


def test_a_step_without_matmuls_has_no_flop():
    with pytest.warns(UserWarning, match="missed some or all matmuls"):
        assert set(train(IMAGES, module=torch.nn.ReLU())) == {"samples_per_second", "step_seconds"}


def test_the_first_error_is_one_warning_and_the_training_goes_on():
    callback = MinimalCallback(backend=SimulatedBackend(), ceiling=1e15, tokens=lambda batch: batch["ids"])
    callback.begin(FLOPS)
    with pytest.warns(UserWarning, match="metering has stopped, training continues: KeyError: 'ids'") as warned:
        for _ in range(3):
            callback.train(BATCH)
    assert len(warned) == 1
    assert callback.training is None


def test_a_device_that_cannot_be_opened_is_one_warning_even_if_warnings_are_errors():
    callback = MinimalCallback(backend="no such backend")
    with pytest.warns(UserWarning, match="no such backend"):
        callback.begin()
    callback.train(BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.begin()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"celling": 700e12}, "did you mean 'ceiling'"),
        ({"sequence_length": 128}, "unknown option"),
        ({"ceiling": 700}, r"ceiling 700 must be in FLOP/s: write 700 TFLOPS as 700e12"),
        ({"flops_per_step": 0}, "flops_per_step 0"),
        ({"tokens_per_step": 8}, "unknown option"),
        ({"world_size": 2.5}, "world_size must be a whole number, not 2.5"),
        ({"world_size": 4, "model_parallel": 3}, "must divide world_size"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, not -1"),
        ({"dtype": "bfloat"}, "unknown dtype"),
        ({"tokens": "many"}, "tokens many"),
        ({"samples": 0}, "samples must be at least 1, not 0"),
    ],
)
def test_options_are_checked_when_the_callback_is_made(options, message):
    with pytest.raises(UsageError, match=message):
        MeteredCallback(**options)


def test_a_trainer_of_transformers_logs_before_its_reporters(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from mamf.integrations.transformers import MamfuCallback

    all_logs = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **others):
            all_logs.append(dict(logs))

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    ids = torch.arange(8)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 16, callbacks=[Reporter()]
    )
    callback = MamfuCallback(ceiling=1e12, warmup_steps=1).attach(trainer)
    trainer.train()
    training_logs = [logs for logs in all_logs if "loss" in logs]
    assert [set(logs) >= FIGURE_NAMES for logs in training_logs] == [False, True, True]
    assert training_logs[-1]["mamfu_percent"] == pytest.approx(training_logs[-1]["tflops"] * 100)
    assert trainer.state.log_history[2]["tokens_per_second"] == training_logs[2]["tokens_per_second"]
    assert training_logs[-1]["tokens_per_second"] == pytest.approx(8 * training_logs[-1]["samples_per_second"])
    assert callback.training is None and not model._forward_pre_hooks


def test_a_trainer_of_lightning_logs(tmp_path):
    lightning = pytest.importorskip("lightning")
    from mamf.integrations.lightning import MamfuCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Embedding(32, 8)
            self.model.config = SimpleNamespace(
                model_type="gpt2", hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
            )

        def training_step(self, batch, number):
            return self.model(batch["input_ids"]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    all_logs = []

    class Logger(lightning.pytorch.loggers.logger.DummyLogger):
        def log_metrics(self, metrics, step=None):
            all_logs.append(dict(metrics))

    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=3, accumulate_grad_batches=2, logger=Logger(), log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        callbacks=[MamfuCallback(ceiling=1e12, warmup_steps=1)],
    )  # fmt: skip
    batches = [{"input_ids": torch.zeros(2, 16, dtype=torch.long)}] * 6
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Module(), torch.utils.data.DataLoader(batches, batch_size=None))
    metered_logs = [logs for logs in all_logs if "tflops" in logs]
    assert len(metered_logs) == 2
    assert set(metered_logs[-1]) >= FIGURE_NAMES
    assert metered_logs[-1]["mamfu_percent"] == pytest.approx(metered_logs[-1]["tflops"] * 100, rel=1e-4)
