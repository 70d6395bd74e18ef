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


def meter_of(card, **options):
    told = {"tokens_per_step": 1000, "flops_per_step": 50e12, "ceiling": 800e12, "warmup_steps": 0} | options
    return mamf.Meter(backend=card, **told)


def train(card, meter, steps=5, data=0.0, begin=True, **told):
    """Run steps that take STEP seconds on the device, and return their figures.

    ``data``: the seconds that the host waits for each batch.
    """
    figures = []
    for _ in range(steps):
        card.sleep(data)
        if begin:
            meter.begin()
        card.cached_operands_key = None
        card._run_on_device(STEP, 300.0)
        figures.append(meter.step(**told))
    return [each for each in [*figures, meter.finish()] if each is not None]


@pytest.mark.parametrize("causal", [False, True])
def test_of_a_model_the_whole_square_of_attention_counts_or_the_causal_half(card, causal):
    flops = ModelFlops(weight_count=10**9, layer_count=8, attention_width=4096)
    meter = meter_of(card, flops_per_step=None, model=flops, sequence_length=4096, causal=causal)
    *_, last = train(card, meter)
    per_token = 6e9 + 12 * 8 * 4096 * 4096 / (2 if causal else 1)
    assert last.tflops == pytest.approx(1000 * per_token / STEP / 1e12, rel=1e-3)


def test_a_step_is_told_in_tokens_tflops_and_shares(card):
    *_, last = train(card, meter_of(card))
    assert last.step == 5
    assert last.seconds == pytest.approx(STEP, rel=1e-3)
    assert last.tokens_per_second == pytest.approx(10_000, rel=1e-3)
    assert last.tflops == pytest.approx(500, rel=1e-3)
    assert last.mfu_percent == pytest.approx(100 * 500 / 989, rel=1e-3)
    assert last.mamfu_percent == pytest.approx(100 * 500 / 800, rel=1e-3)


def test_a_step_is_read_when_the_next_is_queued(card):
    meter = meter_of(card)
    meter.begin()
    card._run_on_device(STEP, 300.0)
    before = card.now()
    assert meter.step() is None
    assert card.now() - before < 1e-4
    card._run_on_device(STEP, 300.0)
    assert meter.step().step == 1
    # The host waited only for the first step: the second one is still running.
    assert card.device_time - card.now() == pytest.approx(STEP, rel=0.01)


def test_waiting_for_data_is_told_and_counts(card):
    *_, last = train(card, meter_of(card), data=0.15)
    assert last.seconds_between == pytest.approx(0.05, rel=0.01)
    assert last.seconds == pytest.approx(0.15, rel=0.01)
    assert last.mamfu_percent == pytest.approx(100 * 50 / 0.15 / 800, rel=0.01)


def test_warm_up_steps_are_left_out(card):
    meter = meter_of(card, warmup_steps=3)
    assert [each.step for each in train(card, meter)] == [4, 5]
    assert meter.mean().step == 2


def test_the_mean_is_work_over_time(card):
    meter = meter_of(card)
    train(card, meter, steps=2)
    train(card, meter, steps=2, data=0.3)
    mean, seconds = meter.mean(), 2 * STEP + (0.3 + STEP) + 0.3  # the device ran a step during the last wait
    assert mean.tflops == pytest.approx(4 * 50 / seconds, rel=0.01)
    assert mean.tokens_per_second == pytest.approx(4000 / seconds, rel=0.01)


def test_accumulation_and_ranks(card):
    *_, last = train(card, meter_of(card, accumulation=4, world_size=8))
    assert last.tflops == pytest.approx(4 * 500, rel=1e-3)
    assert last.tokens_per_second == pytest.approx(8 * 4 * 10_000, rel=1e-3)


def test_tokens_and_flop_of_a_step_may_be_told(card):
    *_, last = train(card, meter_of(card, accumulation=4), tokens=500, flops=10e12)
    assert last.tokens_per_second == pytest.approx(5_000, rel=1e-3)
    assert last.tflops == pytest.approx(100, rel=1e-3)


def measured(rate, dtype):
    return Rate(rate=rate, dtype=dtype, device="card", source="measured", regime="sustained")


def test_each_dtype_counts_against_its_own_ceiling(card, monkeypatch):
    flops = {"fp8": 100e12, "bf16": 20e12}
    known = {"float8_e4m3fn": 1600.0, "bfloat16": 800.0}
    monkeypatch.setattr(
        known_ceilings,
        "_find_measured_ceiling",
        lambda backend, dtype, regime: measured(known[dtype], dtype),
    )
    *_, last = train(card, meter_of(card, flops_per_step=flops, ceiling=None))
    assert last.tflops == pytest.approx(1200, rel=1e-3)
    assert last.mamfu_percent == pytest.approx(100 * (100 / 1600 + 20 / 800) / STEP, rel=1e-3)
    assert last.mfu_percent == pytest.approx(100 * (100 / 1979 + 20 / 989) / STEP, rel=1e-3)


@pytest.mark.parametrize("options", [{}, {"flops_per_step": None}])
def test_a_model_needs_its_length_and_no_other_flop(card, options):
    with pytest.raises(UsageError, match="sequence_length"):
        meter_of(card, model=ModelFlops(1, 1, 1), **options)


def test_without_a_ceiling_there_is_one_warning_and_no_share(card):
    with pytest.warns(UserWarning, match="mamf find --dtype bfloat16") as told:
        found = train(card, meter_of(card, ceiling=None))
    assert len(told) == 1
    assert all(math.isnan(each.mamfu_percent) and each.mfu_percent > 0 for each in found)


def test_a_device_that_nobody_knows_stops_nothing(card):
    card.info = replace(card.info, name="Some New Card")
    with pytest.warns(UserWarning, match="peak is known"):
        *_, last = train(card, meter_of(card, ceiling=None))
    assert math.isnan(last.mfu_percent) and math.isnan(last.mamfu_percent)
    assert last.tflops == pytest.approx(500, rel=1e-3)


def test_a_warning_recommends_a_call_that_gives_a_ceiling(card, monkeypatch):
    row = contributed(card.info.name, 66, 350.0, 700.0)
    monkeypatch.setattr(known_ceilings, "read_contributed_rates", lambda: [row])
    with pytest.warns(UserWarning, match=re.escape("mamf.peak(anyway=True)")):
        meter_of(card, ceiling=None)
    found = train(card, meter_of(card, ceiling=mamf.peak(card, anyway=True)))
    assert found[-1].mamfu_percent == pytest.approx(100 * 500 / 700, rel=1e-3)


@pytest.mark.parametrize("ceiling", [700, 0.7, 700e18, 0, -1, math.nan, math.inf, "700e12"])
def test_a_ceiling_in_another_unit_is_refused(card, ceiling):
    with pytest.raises(UsageError, match=r"ceiling .* must be"):
        meter_of(card, ceiling=ceiling)


def test_one_ceiling_is_not_that_of_several_dtypes(card):
    with pytest.raises(UsageError, match="is for one dtype"):
        meter_of(card, flops_per_step={"fp8": 1e12, "bf16": 1e12})


def test_ranks_that_share_a_batch_share_the_flop_of_its_model(card):
    flops = ModelFlops(weight_count=10**9, layer_count=8, attention_width=4096)
    options = {"flops_per_step": None, "model": flops, "sequence_length": 4096}
    *_, last = train(card, meter_of(card, world_size=8, model_parallel=4, **options), samples=4)
    assert last.tokens_per_second == pytest.approx(2 * 10_000, rel=1e-3)
    assert last.samples_per_second == pytest.approx(2 * 40, rel=1e-3)
    assert last.tflops == pytest.approx(1000 * flops.compute_flop_per_token(4096) / 4 / STEP / 1e12, rel=1e-3)


def test_a_meter_shows_its_dtype_and_steps(card):
    meter = meter_of(card)
    train(card, meter, steps=3)
    assert repr(meter) == "<Meter: bfloat16, 3 steps>"


def test_another_thread_may_read_the_mean_while_steps_are_metered(card):
    meter, seen, is_done = meter_of(card), [], threading.Event()

    def read():
        while not is_done.is_set():
            seen.append(meter.mean())

    reader = threading.Thread(target=read)
    reader.start()
    train(card, meter, steps=200)
    is_done.set()
    reader.join()
    seconds = [each.seconds for each in seen if each is not None]
    # A mean must divide the total time of some steps by the count of the same steps, whenever the thread read it.
    assert seconds == pytest.approx([STEP] * len(seconds), rel=1e-3)
    assert meter.mean().step == 200


def test_the_model_within_a_wrapper_is_found(card):
    model = SimpleNamespace(config=GPT2)
    wrapped = SimpleNamespace(module=model)  # as in DistributedDataParallel
    options = {"flops_per_step": None, "sequence_length": 1024}
    (*_, bare), (*_, found) = (train(card, meter_of(card, model=each, **options)) for each in (model, wrapped))
    assert found.tflops == pytest.approx(bare.tflops, rel=1e-3)


@pytest.mark.parametrize("flops", [-1, 0, math.nan, math.inf, {"bf16": -1.0}])
def test_what_is_no_count_is_refused_at_the_beginning(card, flops):
    with pytest.raises(UsageError, match=r"flops_per_step \S+ must be a number above 0"):
        meter_of(card, flops_per_step=flops, ceiling=None)
    with pytest.raises(UsageError, match="tokens_per_step -5"):
        meter_of(card, tokens_per_step=-5)


@pytest.mark.parametrize("flops", [-1, {"bf16": -1}, "many"])
def test_what_is_no_count_of_a_step_is_nan_and_stops_nothing(card, flops):
    *_, last = train(card, meter_of(card), tokens=-5, flops=flops)
    assert math.isnan(last.tokens_per_second) and math.isnan(last.tflops) and math.isnan(last.mamfu_percent)


def test_a_host_clock_is_read_without_synchronizing(card, monkeypatch):
    monkeypatch.setattr(SimulatedBackend, "timer", "host clock")
    meter = meter_of(card)
    monkeypatch.setattr(card, "record_mark", pytest.fail)
    for _ in range(3):
        card.sleep(STEP)
        meter.begin()
        card.sleep(STEP)
        meter.step()
    last = meter.finish()
    assert (last.seconds, last.seconds_between) == pytest.approx((2 * STEP, STEP))


def test_an_evaluation_is_no_part_of_a_step(card):
    meter = meter_of(card)
    train(card, meter, steps=2)
    meter.pause()
    card.sleep(10)
    *_, last = train(card, meter, steps=1)
    assert last.seconds == pytest.approx(STEP, rel=0.01)
