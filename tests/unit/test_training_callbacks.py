"""The callbacks: shared behavior in virtual time, and in the trainers that they are for, with tiny models on the CPU
(skipped where a library is missing).
"""

import warnings
from types import SimpleNamespace

import pytest

from mamf.errors import UsageError
from mamf.integrations.model_flops import ModelFlops
from mamf.testing import SimulatedBackend

torch = pytest.importorskip("torch")
from mamf.integrations.metered import MeteredCallback, never_raises  # noqa: E402

LOGGED = {"tflops", "mamfu_percent", "tokens_per_second", "samples_per_second", "step_seconds"}
FLOPS = ModelFlops(weights=10**6, layers=1, attention_width=8)
VISION = ModelFlops(weights=10**6, layers=1, attention_width=8, is_causal=False, positions=17)
BATCH = {"input_ids": torch.zeros(4, 128, dtype=torch.long)}
IMAGES = (torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long))


class Callback(MeteredCallback):
    """A trainer's callback with the least that one has."""

    starts = "begin"

    @never_raises
    def begin(self, module=None, **defaults):
        self.start(module, module, defaults)

    @never_raises
    def train(self, batch, passes=1, work=lambda: None):
        for _ in range(passes):
            self.training.begin()
            self.training.add(batch)
            work()
            self.training.meter.backend.sleep(1 / passes)
        self.training.stop()
        self.training.step()

    def figures(self):
        return {name: pytest.approx(each, rel=1e-2) for name, each in self.training.figures().items()}


def trained(batch, *, module=None, steps=2, passes=1, work=lambda: None, **options):
    callback = Callback(**{"backend": SimulatedBackend(), "ceiling": 1e15, "warmup_steps": 0} | options)
    callback.begin(module)
    for _ in range(steps):
        callback.train(batch, passes, work)
    return callback.figures() if callback.training else None


@pytest.mark.parametrize("causal", [False, True])
def test_tokens_and_flop_are_gathered_over_the_passes_of_a_step(causal):
    found = trained(BATCH, passes=2, module=FLOPS, causal=causal)
    flop = 2 * 4 * 128 * FLOPS.per_token(128, causal)
    assert found["tokens_per_second"] == 2 * 4 * 128
    assert found["samples_per_second"] == 8
    assert found["step_seconds"] == 1
    assert (found["tflops"], found["mamfu_percent"]) == (flop / 1e12, flop / 1e13)


def test_ranks_that_share_a_batch_share_its_flop():
    found = trained(BATCH, module=FLOPS, world_size=4, model_parallel=2)
    assert found["tflops"] == 4 * 128 * FLOPS.per_token(128) / 2 / 1e12
    assert found["tokens_per_second"] == 2 * 4 * 128


def test_what_is_given_replaces_what_is_found():
    found = trained(BATCH, passes=2, tokens=1000, flops_per_step=5e12, samples=3)
    assert (found["tokens_per_second"], found["tflops"], found["samples_per_second"]) == (2000, 10, 6)


def test_images_of_a_formula_that_knows_their_length_have_flop_and_no_tokens():
    found = trained(IMAGES, module=VISION)
    assert found["tflops"] == 4 * 17 * VISION.per_token(17) / 1e12
    assert found["samples_per_second"] == 4
    assert "tokens_per_second" not in found


def test_a_step_of_an_unknown_model_is_counted_and_those_after_it_are_as_many_flop():
    module = torch.nn.Linear(8, 16)
    with pytest.warns(UserWarning, match="torch counts the FLOP of one step.*no formula for 'Linear'"):
        found = trained(IMAGES, module=module, steps=3, work=lambda: module(torch.zeros(10**6, 8)).sum().backward())
    # Its input needs no gradient.
    assert found["tflops"] == 2 * 2 * 10**6 * 8 * 16 / 1e12
    assert found["step_seconds"] == 1


def test_a_formula_without_tokens_gives_way_to_a_count():
    module = torch.nn.Linear(8, 16)
    with pytest.warns(UserWarning, match="no tokens were found in a batch"):
        found = trained(IMAGES, module=FLOPS, steps=4, work=lambda: module(torch.zeros(10**6, 8)).sum())
    assert "tokens_per_second" not in found
    # The first step is metered without FLOP, and the second is counted: FLOP of one step are not those of all.
    assert "tflops" not in found


def test_frozen_layers_are_counted():
    model = torch.nn.Linear(8, 16).requires_grad_(False)
    model.config = SimpleNamespace(
        model_type="gpt2", hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    with pytest.warns(UserWarning, match="some layers are frozen"):
        trained(BATCH, module=model, steps=1)


def test_a_compiled_model_is_not_counted():
    module = torch.nn.Linear(8, 16)
    module._compiled_call_impl = lambda tensor: tensor
    with pytest.warns(UserWarning, match="uncompiled; give flops_per_step="):
        found = trained(IMAGES, module=module)
    assert set(found) == {"samples_per_second", "step_seconds"}


def test_a_model_that_ranks_share_is_not_counted():
    with pytest.warns(UserWarning, match="share of this rank.*give flops_per_step="):
        found = trained(IMAGES, module=torch.nn.Linear(8, 16), world_size=2, model_parallel=2)
    assert set(found) == {"samples_per_second", "step_seconds"}


def test_a_step_without_products_has_no_flop():
    with pytest.warns(UserWarning, match="saw no products"):
        assert set(trained(IMAGES, module=torch.nn.ReLU())) == {"samples_per_second", "step_seconds"}


def test_the_first_error_is_one_warning_and_the_training_goes_on():
    callback = Callback(backend=SimulatedBackend(), ceiling=1e15, tokens=lambda batch: batch["ids"])
    callback.begin(FLOPS)
    with pytest.warns(UserWarning, match="nothing is metered, and the training goes on: KeyError: 'ids'") as warned:
        for _ in range(3):
            callback.train(BATCH)
    assert len(warned) == 1
    assert callback.training is None


def test_a_device_that_cannot_be_opened_is_one_warning_even_if_warnings_are_errors():
    callback = Callback(backend="no such backend")
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
        ({"ceiling": 700}, r"ceiling 700: it must be in FLOP/s; 700 TFLOPS are 700e12"),
        ({"flops_per_step": 0}, "flops_per_step 0"),
        ({"tokens_per_step": 8}, "unknown option"),
        ({"world_size": 2.5}, "world_size 2.5"),
        ({"world_size": 4, "model_parallel": 3}, "must divide world_size"),
        ({"warmup_steps": -1}, "warmup_steps -1"),
        ({"dtype": "bfloat"}, "unknown dtype"),
        ({"tokens": "many"}, "tokens many"),
        ({"samples": 0}, "samples 0"),
    ],
)
def test_options_are_checked_when_the_callback_is_made(options, message):
    with pytest.raises(UsageError, match=message):
        MeteredCallback(**options)


def test_a_trainer_of_transformers_logs_before_its_reporters(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from mamf.integrations.transformers import MamfuCallback

    seen = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **others):
            seen.append(dict(logs))

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
    logged = [each for each in seen if "loss" in each]
    assert [set(each) >= LOGGED for each in logged] == [False, True, True]
    assert logged[-1]["mamfu_percent"] == pytest.approx(logged[-1]["tflops"] * 100)
    assert trainer.state.log_history[2]["tokens_per_second"] == logged[2]["tokens_per_second"]
    assert logged[-1]["tokens_per_second"] == pytest.approx(8 * logged[-1]["samples_per_second"])
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

    logged = []

    class Logger(lightning.pytorch.loggers.logger.DummyLogger):
        def log_metrics(self, metrics, step=None):
            logged.append(dict(metrics))

    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=3, accumulate_grad_batches=2, logger=Logger(), log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        callbacks=[MamfuCallback(ceiling=1e12, warmup_steps=1)],
    )  # fmt: skip
    batches = [{"input_ids": torch.zeros(2, 16, dtype=torch.long)}] * 6
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Module(), torch.utils.data.DataLoader(batches, batch_size=None))
    found = [each for each in logged if "tflops" in each]
    assert len(found) == 2
    assert set(found[-1]) >= LOGGED
    assert found[-1]["mamfu_percent"] == pytest.approx(found[-1]["tflops"] * 100, rel=1e-4)
