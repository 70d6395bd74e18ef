"""Test ``mamf.Meter`` in virtual time: the figures of a step, and that the meter never delays or stops a loop."""

import math
import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from made_rates import contributed

import mamf
from mamf.contribution import known_ceilings
from mamf.errors import UsageError
from mamf.integrations.model_flops import ModelFlops
from mamf.measurement import Rate
from mamf.testing import SimulatedBackend

STEP = 0.1
GPT2 = SimpleNamespace(
    model_type="gpt2", hidden_size=768, num_hidden_layers=12, num_attention_heads=12, vocab_size=50257
)


@pytest.fixture
def card():
    """Return a simulated device without noise, so that every step takes exactly STEP."""
    return SimulatedBackend(
        physics=replace(
            SimulatedBackend.physics, launch_noise=0.0, hot_clock_loss_share=0.0, rested_time_saving_share=0.0
        )
    )


def make_meter(card, **options):
    defaults = {"tokens_per_step": 1000, "flops_per_step": 50e12, "ceiling": 800e12, "warmup_steps": 0}
    return mamf.Meter(backend=card, **defaults | options)


def train(card, meter, steps=5, data=0.0, **step_options):
    """Run steps that take STEP seconds on the device, and return their figures.

    ``data``: the seconds that the host waits for each batch.
    """
    figures = []
    for _ in range(steps):
        card.sleep(data)
        meter.begin()
        card.cached_operands_key = None
        card._run_on_device(STEP, 300.0)
        figures.append(meter.step(**step_options))
    figures.append(meter.finish())
    return [step for step in figures if step is not None]


@pytest.mark.parametrize("causal", [False, True])
def test_the_flop_of_a_model_include_all_of_attention_or_its_causal_half(card, causal):
    flops = ModelFlops(weight_count=10**9, layer_count=8, attention_width=4096)
    meter = make_meter(card, flops_per_step=None, model=flops, sequence_length=4096, causal=causal)
    *_, last = train(card, meter)
    per_token = 6e9 + 12 * 8 * 4096 * 4096 / (2 if causal else 1)
    assert last.tflops == pytest.approx(1000 * per_token / STEP / 1e12, rel=1e-3)


def test_a_step_has_tokens_tflops_and_shares(card):
    *_, last = train(card, make_meter(card))
    assert last.step == 5
    assert last.seconds == pytest.approx(STEP, rel=1e-3)
    assert last.tokens_per_second == pytest.approx(10_000, rel=1e-3)
    assert last.tflops == pytest.approx(500, rel=1e-3)
    assert last.mfu_percent == pytest.approx(100 * 500 / 989, rel=1e-3)
    assert last.mamfu_percent == pytest.approx(100 * 500 / 800, rel=1e-3)


def test_a_step_is_read_when_the_next_is_queued(card):
    meter = make_meter(card)
    meter.begin()
    card._run_on_device(STEP, 300.0)
    before = card.now()
    assert meter.step() is None
    assert card.now() - before < 1e-4
    card._run_on_device(STEP, 300.0)
    assert meter.step().step == 1
    # The host waited only for the first step: the second one is still running.
    assert card.device_time - card.now() == pytest.approx(STEP, rel=0.01)


def test_waiting_for_data_is_reported_and_counts(card):
    *_, last = train(card, make_meter(card), data=0.15)
    assert last.seconds_between == pytest.approx(0.05, rel=0.01)
    assert last.seconds == pytest.approx(0.15, rel=0.01)
    assert last.mamfu_percent == pytest.approx(100 * 50 / 0.15 / 800, rel=0.01)


def test_warm_up_steps_are_left_out(card):
    meter = make_meter(card, warmup_steps=3)
    assert [figures.step for figures in train(card, meter)] == [4, 5]
    assert meter.mean().step == 2


def test_the_mean_is_work_over_time(card):
    meter = make_meter(card)
    train(card, meter, steps=2)
    train(card, meter, steps=2, data=0.3)
    mean, seconds = meter.mean(), 2 * STEP + (0.3 + STEP) + 0.3  # the device ran a step during the last wait
    assert mean.tflops == pytest.approx(4 * 50 / seconds, rel=0.01)
    assert mean.tokens_per_second == pytest.approx(4000 / seconds, rel=0.01)


def test_figures_include_accumulation_and_ranks(card):
    *_, last = train(card, make_meter(card, accumulation=4, world_size=8))
    assert last.tflops == pytest.approx(4 * 500, rel=1e-3)
    assert last.tokens_per_second == pytest.approx(8 * 4 * 10_000, rel=1e-3)


def test_tokens_and_flop_of_a_step_may_be_given(card):
    *_, last = train(card, make_meter(card, accumulation=4), tokens=500, flops=10e12)
    assert last.tokens_per_second == pytest.approx(5_000, rel=1e-3)
    assert last.tflops == pytest.approx(100, rel=1e-3)


def make_measured_rate(rate, dtype):
    return Rate(rate=rate, dtype=dtype, device="card", source="measured", regime="sustained")


def test_each_dtype_counts_against_its_own_ceiling(card, monkeypatch):
    flops = {"fp8": 100e12, "bf16": 20e12}
    ceilings = {"float8_e4m3fn": 1600.0, "bfloat16": 800.0}
    monkeypatch.setattr(
        known_ceilings,
        "_find_measured_ceiling",
        lambda backend, dtype, regime: make_measured_rate(ceilings[dtype], dtype),
    )
    *_, last = train(card, make_meter(card, flops_per_step=flops, ceiling=None))
    assert last.tflops == pytest.approx(1200, rel=1e-3)
    assert last.mamfu_percent == pytest.approx(100 * (100 / 1600 + 20 / 800) / STEP, rel=1e-3)
    assert last.mfu_percent == pytest.approx(100 * (100 / 1979 + 20 / 989) / STEP, rel=1e-3)


@pytest.mark.parametrize("options", [{}, {"flops_per_step": None}])
def test_a_model_needs_a_sequence_length_and_excludes_flops_per_step(card, options):
    with pytest.raises(UsageError, match="sequence_length"):
        make_meter(card, model=ModelFlops(1, 1, 1), **options)


def test_without_a_ceiling_there_is_one_warning_and_no_share(card):
    with pytest.warns(UserWarning, match="mamf find --dtype bfloat16") as warnings:
        figures = train(card, make_meter(card, ceiling=None))
    assert len(warnings) == 1
    assert all(math.isnan(step.mamfu_percent) and step.mfu_percent > 0 for step in figures)


def test_an_unknown_device_stops_nothing(card):
    card.info = replace(card.info, name="Some New Card")
    with pytest.warns(UserWarning, match="peak is known"):
        *_, last = train(card, make_meter(card, ceiling=None))
    assert math.isnan(last.mfu_percent) and math.isnan(last.mamfu_percent)
    assert last.tflops == pytest.approx(500, rel=1e-3)


def test_a_warning_recommends_a_call_that_gives_a_ceiling(card, monkeypatch):
    row = contributed(card.info.name, 66, 350.0, 700.0)
    monkeypatch.setattr(known_ceilings, "read_contributed_rates", lambda: [row])
    with pytest.warns(UserWarning, match=re.escape("mamf.peak(anyway=True)")):
        make_meter(card, ceiling=None)
    figures = train(card, make_meter(card, ceiling=mamf.peak(card, anyway=True)))
    assert figures[-1].mamfu_percent == pytest.approx(100 * 500 / 700, rel=1e-3)


@pytest.mark.parametrize("ceiling", [700, 0.7, 700e18, 0, -1, math.nan, math.inf, "700e12"])
def test_a_ceiling_in_another_unit_is_refused(card, ceiling):
    with pytest.raises(UsageError, match=r"ceiling .* must be"):
        make_meter(card, ceiling=ceiling)


def test_one_ceiling_for_several_dtypes_is_refused(card):
    with pytest.raises(UsageError, match="is for one dtype"):
        make_meter(card, flops_per_step={"fp8": 1e12, "bf16": 1e12})


def test_ranks_that_share_a_batch_share_the_flop_of_its_model(card):
    flops = ModelFlops(weight_count=10**9, layer_count=8, attention_width=4096)
    options = {"flops_per_step": None, "model": flops, "sequence_length": 4096}
    *_, last = train(card, make_meter(card, world_size=8, model_parallel=4, **options), samples=4)
    assert last.tokens_per_second == pytest.approx(2 * 10_000, rel=1e-3)
    assert last.samples_per_second == pytest.approx(2 * 40, rel=1e-3)
    assert last.tflops == pytest.approx(1000 * flops.compute_flop_per_token(4096) / 4 / STEP / 1e12, rel=1e-3)


def test_a_meter_shows_its_dtype_and_steps(card):
    meter = make_meter(card)
    train(card, meter, steps=3)
    assert repr(meter) == "<Meter: bfloat16, 3 steps>"


def test_another_thread_may_read_the_mean_while_steps_are_metered(card):
    meter, means, is_done, has_read = make_meter(card), [], threading.Event(), threading.Event()

    def read():
        while not is_done.is_set():
            means.append(meter.mean())
            has_read.set()

    train(card, meter, steps=1)  # before the first step, there is no mean
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for _ in range(20):
        train(card, meter, steps=10)
        has_read.clear()
        assert has_read.wait(60), "the other thread must read a mean between two trainings"
    is_done.set()
    reader.join()
    # A mean must divide the total time of some steps by the count of the same steps, whenever the thread read it.
    assert len(means) >= 20 and None not in means
    assert [mean.seconds for mean in means] == pytest.approx([STEP] * len(means), rel=1e-3)
    assert meter.mean().step == 201


def test_the_model_within_a_wrapper_is_found(card):
    model = SimpleNamespace(config=GPT2)
    wrapped = SimpleNamespace(module=model)  # as in DistributedDataParallel
    options = {"flops_per_step": None, "sequence_length": 1024}
    (*_, bare_figures), (*_, wrapped_figures) = (
        train(card, make_meter(card, model=given_model, **options)) for given_model in (model, wrapped)
    )
    assert wrapped_figures.tflops == pytest.approx(bare_figures.tflops, rel=1e-3)


@pytest.mark.parametrize("flops", [-1, 0, math.nan, math.inf, {"bf16": -1.0}])
def test_an_invalid_count_is_refused_when_the_meter_is_made(card, flops):
    with pytest.raises(UsageError, match=r"flops_per_step \S+ must be a number above 0"):
        make_meter(card, flops_per_step=flops, ceiling=None)
    with pytest.raises(UsageError, match="tokens_per_step -5"):
        make_meter(card, tokens_per_step=-5)


@pytest.mark.parametrize("flops", [-1, {"bf16": -1}, "many"])
def test_an_invalid_count_of_a_step_gives_nan_and_stops_nothing(card, flops):
    *_, last = train(card, make_meter(card), tokens=-5, flops=flops)
    assert math.isnan(last.tokens_per_second) and math.isnan(last.tflops) and math.isnan(last.mamfu_percent)


def test_a_host_clock_is_read_without_synchronizing(card, monkeypatch):
    monkeypatch.setattr(SimulatedBackend, "timer", "host clock")
    meter = make_meter(card)
    monkeypatch.setattr(card, "record_mark", pytest.fail)
    for _ in range(3):
        card.sleep(STEP)
        meter.begin()
        card.sleep(STEP)
        meter.step()
    last = meter.finish()
    assert (last.seconds, last.seconds_between) == pytest.approx((2 * STEP, STEP))


def test_the_time_of_an_evaluation_is_not_part_of_a_step(card):
    meter = make_meter(card)
    train(card, meter, steps=2)
    meter.pause()
    card.sleep(10)
    *_, last = train(card, meter, steps=1)
    assert last.seconds == pytest.approx(STEP, rel=0.01)
