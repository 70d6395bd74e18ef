"""Test training steps of models: parameters, FLOP and bytes, options, and measurements on the simulated device."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

import mamf
from mamf.engine.measure import measure_row
from mamf.engine.regimes import BurstRegime, StoppingRule, SustainedRegime
from mamf.errors import UnknownNameError, UsageError
from mamf.operation import MeasurementRequest, Preset
from mamf.operations.model.operation import FIELDS_BY_MODEL_SIZE, TRAINING_PHASES, ModelProblem, ModelShape
from mamf.plugins.discovery import make_kernel, make_operation
from mamf.report.kernels import yield_step_part_blocks
from mamf.testing import SimulatedModel

SHAPE = ModelShape(8, 1024)


def measure(backend, problem, shape, regime_class=BurstRegime, kernel=None):
    regime, pool = regime_class(backend), backend.make_operand_pool("normal", 0)
    regime.prepare_device()
    return measure_row(kernel or SimulatedModel(), problem, shape, regime, pool, StoppingRule(0.1))


@pytest.mark.parametrize(
    ("size", "parameter_count"),
    [
        ("small", 124_439_808),
        ("medium", 354_823_168),
        ("large", 774_030_080),
        ("xl", 1_557_611_200),
        ("1b", 1_235_814_400),
        ("3b", 3_212_749_824),
        ("8b", 8_030_261_248),
    ],
)
def test_parameters_are_those_of_the_published_models(size, parameter_count):
    """Compare the parameter counts with those of GPT-2, which has 1024 positions, and of Llama 3."""
    assert ModelProblem(**FIELDS_BY_MODEL_SIZE[size]).count_parameters(SHAPE) == parameter_count


def test_the_flop_of_matmuls_and_attention_equal_a_count_by_hand():
    problem, width, tokens = ModelProblem(), 768, 8 * 1024
    matmuls = 2 * tokens * (12 * (4 * width * width + 2 * width * 3072) + 50257 * width)
    attention = 12 * 8 * 12 * (1024 * 1025 // 2) * 4 * 64
    assert problem.compute_flop(SHAPE) == matmuls + attention
    assert replace(problem, phase="forward-backward").compute_flop(SHAPE) == 3 * (matmuls + attention)
    assert replace(problem, phase="step", checkpointing=True).compute_flop(SHAPE) == 3 * (matmuls + attention)


def test_flop_count_the_active_experts_and_parameters_count_all_experts():
    moe = ModelProblem(**FIELDS_BY_MODEL_SIZE["moe"])
    single_expert_moe = replace(moe, active_experts=1)
    expert_parameters = 3 * moe.d_model * moe.d_ff * moe.layers
    assert moe.compute_flop(SHAPE) - single_expert_moe.compute_flop(SHAPE) == 2 * SHAPE.token_count * expert_parameters
    assert moe.count_parameters(SHAPE) == single_expert_moe.count_parameters(SHAPE)
    assert SimulatedModel().explain_unsupported_shape(moe, ModelShape(1, 12))
    assert SimulatedModel().explain_unsupported_shape(moe, SHAPE) is None


@pytest.mark.parametrize(("phase", "copies"), [("forward", 1), ("forward-backward", 2), ("step", 4)])
def test_bytes_count_each_tensor_that_a_phase_must_touch(phase, copies):
    problem = ModelProblem(phase=phase)
    assert problem.compute_work(SHAPE).nbytes == copies * 2 * problem.count_parameters(SHAPE)
    assert "twice the forward" in problem.compute_work(SHAPE).counting_convention


@pytest.mark.parametrize(
    "fields",
    [
        {"layers": 0},
        {"heads": 7},
        {"kv_heads": 4},
        {"style": "llama", "kv_heads": 5},
        {"style": "llama", "d_model": 36},
        {"experts": 4},
        {"style": "moe"},
        {"style": "moe", "experts": 2, "active_experts": 3},
    ],
)
def test_an_impossible_model_is_refused_in_one_line(fields):
    with pytest.raises(UsageError) as error:
        ModelProblem(**fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("size", "fields", "architectures"),
    [
        (None, {"d_model": [256]}, ["gpt2 256/1024/12/4"]),
        (None, {"d_model": [256, 512]}, ["gpt2 256/1024/12/4", "gpt2 512/2048/12/8"]),
        (None, {"d_model": [256], "d_ff": [512]}, ["gpt2 256/512/12/4"]),
        (None, {"heads": [8]}, ["gpt2 768/3072/12/8"]),
        ("1b", {"d_model": [1024]}, ["llama 1024/4096/16/16/4"]),
        ("1b", {"d_model": [1024], "kv_heads": [1]}, ["llama 1024/4096/16/16/1"]),
        ("1b", {"layers": [1]}, ["llama 2048/8192/1/32/8"]),
    ],
)
def test_sizes_that_are_not_given_follow_those_that_are(backend, size, fields, architectures):
    model = make_operation("model")
    request = MeasurementRequest(model, fields=fields, preset=model.list_presets()[size] if size else Preset())
    assert [model.list_identifying_fields(problem)[0] for problem in request.make_problems(backend)] == architectures


@pytest.mark.parametrize("phase", TRAINING_PHASES)
def test_a_simulated_step_has_its_columns(backend, phase):
    problem, shape = ModelProblem(phase=phase), SHAPE
    row = measure(backend, problem, shape, SustainedRegime)
    assert row.ok, row.reason
    columns = make_operation("model").make_columns(row)
    assert columns["tokens/s"] == pytest.approx(SHAPE.token_count / row.seconds, abs=1)
    assert columns["parameters"] == problem.count_parameters(shape)
    assert row.compute_rate("mean") == pytest.approx(problem.compute_flop(shape) / row.seconds / 1e12)


def test_a_step_that_is_longer_than_a_burst_is_measured_only_in_the_sustained_regime(backend):
    problem = ModelProblem(**FIELDS_BY_MODEL_SIZE["xl"], phase="step")
    row = measure(backend, problem, SHAPE)
    assert row.status == "unsupported"
    assert "longer than a burst of 10 ms: measure it in the sustained regime" in row.reason
    assert measure(backend, problem, SHAPE, SustainedRegime).ok


def test_backward_and_optimizer_are_differences_with_intervals(backend):
    rows = [measure(backend, ModelProblem(phase=phase), SHAPE, SustainedRegime) for phase in TRAINING_PHASES]
    table, _ = yield_step_part_blocks(rows)
    ((step, phases),) = table.rows
    values = {column.name: column.read_value((step, phases)) for column in table.columns}
    forward_ms, forward_backward_ms, step_ms = (1e3 * row.seconds for row in rows)
    assert values["forward_ms"] == forward_ms
    assert values["backward_ms"] == pytest.approx(forward_backward_ms - forward_ms)
    assert values["optimizer_ms"] == pytest.approx(step_ms - forward_backward_ms)
    half_widths = [1e3 * row.seconds * row.relative_half_width for row in rows[:2]]
    assert values["backward_half_width_ms"] == pytest.approx(math.hypot(*half_widths))
    assert list(yield_step_part_blocks(rows[:1])) == []


class SlowFirstLaunch(SimulatedModel):
    """A kernel whose first launch takes 30 s longer, as if it compiled."""

    def prepare(self, backend, *arguments, **options):
        prepared = super().prepare(backend, *arguments, **options)
        delays = [30.0]

        def launch():
            backend.sleep(delays.pop() if delays else 0.0)
            return prepared.launches[0]()

        return replace(prepared, launches=[launch])


def test_compiling_at_the_first_launch_does_not_make_a_step_too_long_for_a_burst(backend):
    row = measure(backend, ModelProblem(), ModelShape(1, 128), kernel=SlowFirstLaunch())
    assert row.ok, row.reason
    assert row.seconds == pytest.approx(measure(backend, ModelProblem(), ModelShape(1, 128)).seconds, rel=0.01)
    row = measure(backend, ModelProblem(**FIELDS_BY_MODEL_SIZE["xl"], phase="step"), SHAPE, kernel=SlowFirstLaunch())
    assert row.status == "unsupported"
    assert "a launch takes 3" not in row.reason, "the reason must not give the time of the launch that compiles"


def test_a_kernel_is_named_with_its_attention(backend):
    model = make_operation("model")
    assert make_kernel(model, "torch").name == "torch[sdpa]"
    assert make_kernel(model, "compiled[eager]").name == "compiled[eager]"
    assert make_kernel(model, "torch[sdpa-math]").explain_unavailability(backend).reason
    with pytest.raises(UnknownNameError, match="attention kernel 'sdpa-flesh'"):
        make_kernel(model, "torch[sdpa-flesh]")
    with pytest.raises(UsageError, match="takes no argument in brackets"):
        make_kernel(make_operation("bandwidth"), "torch[sdpa]")


@pytest.mark.parametrize("size", FIELDS_BY_MODEL_SIZE)
def test_the_formula_for_a_training_loop_counts_the_same_work(size):
    """Check that mamf.model_flops agrees with the exact FLOP of a step. For causal attention, mamf.model_flops counts
    half of all pairs of tokens; the exact count is half a key per query higher.
    """
    problem = ModelProblem(**FIELDS_BY_MODEL_SIZE[size], phase="forward-backward")
    config = SimpleNamespace(
        model_type={"gpt2": "gpt2", "llama": "llama", "moe": "mixtral"}[problem.style],
        hidden_size=problem.d_model,
        intermediate_size=problem.d_ff,
        num_hidden_layers=problem.layers,
        num_attention_heads=problem.heads,
        num_key_value_heads=problem.kv_heads,
        vocab_size=problem.vocabulary,
        num_local_experts=problem.experts if problem.style == "moe" else 0,
        num_experts_per_tok=problem.active_experts,
    )
    shape = ModelShape(2, 4096)
    by_formula = mamf.model_flops(config).compute_flop_per_token(shape.context, causal=True) * shape.token_count
    assert problem.compute_flop(shape) == pytest.approx(by_formula, rel=1e-3)
