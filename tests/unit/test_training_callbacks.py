"""The callbacks in the trainers that they are for, with tiny models on the CPU; skipped where a library is missing."""

import math
import warnings
from types import SimpleNamespace

import pytest

from mamf.integrations.metered import LOGGED, MeteredTraining
from mamf.integrations.model_flops import ModelFlops
from mamf.testing import SimulatedBackend

FLOPS = ModelFlops(weights=10**6, layers=1, attention_width=8)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("causal", [False, True])
def test_tokens_and_flop_are_gathered_over_the_passes_of_a_step(causal):
    options = {"backend": SimulatedBackend(), "ceiling": 1e15, "warmup_steps": 0, "causal": causal}
    training = MeteredTraining(FLOPS, options)
    for _ in range(2):
        training.begin()
        training.add(4, 128)
        training.meter.backend.sleep(0.5)
    training.step()
    figures = training.figures()
    assert figures["tokens_per_second"] == pytest.approx(2 * 4 * 128, rel=1e-3)
    assert figures["tflops"] == pytest.approx(2 * 4 * 128 * FLOPS.per_token(128, causal) / 1e12, rel=1e-3)
    assert training.figures() == {}


def test_an_unknown_model_is_a_warning_and_tokens_are_counted():
    with pytest.warns(UserWarning, match="no formula"):
        training = MeteredTraining(object(), {"backend": SimulatedBackend(), "ceiling": 1e15, "warmup_steps": 0})
    training.begin()
    training.add(1, 10)
    training.step()
    figures = training.figures()
    assert figures["tokens_per_second"] > 0
    assert math.isnan(figures["tflops"])


def test_a_meter_that_cannot_be_is_a_warning():
    with pytest.warns(UserWarning, match="nothing is metered"):
        training = MeteredTraining(FLOPS, {"backend": "no such backend"})
    training.begin()
    training.step()
    training.pause()
    assert training.figures() == {}


def test_a_trainer_of_transformers_logs_before_its_reporters(torch, tmp_path):
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
    added = []
    adding = MeteredTraining.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeteredTraining, "add", lambda self, *told: (added.append(told), adding(self, *told)))
        trainer.train()
    logged = [each for each in seen if "loss" in each]
    assert [set(LOGGED) <= set(each) for each in logged] == [False, True, True]
    assert logged[-1]["mamfu_percent"] == pytest.approx(logged[-1]["tflops"] * 100)
    assert trainer.state.log_history[2]["tokens_per_second"] == logged[2]["tokens_per_second"]
    assert added == [(2, 8)] * 6
    assert callback.training is None and not model._forward_pre_hooks


def test_a_trainer_of_lightning_logs(torch, tmp_path):
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
    assert set(LOGGED) <= set(found[-1])
    assert found[-1]["mamfu_percent"] == pytest.approx(found[-1]["tflops"] * 100, rel=1e-4)
