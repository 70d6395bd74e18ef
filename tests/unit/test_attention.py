"""Test attention: its FLOP and bytes, sweeps of its kernels in virtual time, and ``mamf attention``."""

import csv
import dataclasses
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_plans import kernels_plan, setup_of
from refusals import assert_refused

from mamf.backend import Unavailability
from mamf.ceilings.ceiling import Ceiling, compute_card_drift, compute_mamfu, require_usable_ceiling
from mamf.cli.parser import CommandParser
from mamf.cli.planning import add_operation_options, make_measurement_request
from mamf.engine.strategies.rows import RowsStrategy
from mamf.errors import IncomparableError
from mamf.logs.run_log import read_run_log
from mamf.operations.attention.operation import ATTENTION_PRESETS, AttentionOperation, AttentionProblem, AttentionShape
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.plugins.discovery import load_backend_class
from mamf.report.document import describe_counted_work
from mamf.statistics import Interval
from mamf.testing import SimulatedAttention, SimulatedBackend, SimulatedMatmul

LONG = AttentionShape(2, 16, 16, 8192, 8192, 128, 128)
SHORT = AttentionShape(16, 16, 16, 1024, 1024, 128, 128, causal=True)
REFERENCE = MatmulShape(11264, 12288, 20480)


class SlowAttention(SimulatedAttention):
    name = "slow-attention"
    peak_share = 0.35


# -- FLOP and bytes --------------------------------------------------------------------------------------------------

sizes = st.integers(1, 24)


@given(sizes, sizes, st.booleans(), st.one_of(st.none(), sizes))
def test_the_number_of_unmasked_pairs_equals_a_count_one_by_one(queries, keys, causal, window):
    shape = AttentionShape(1, 1, 1, queries, keys, 8, 8, causal, window)
    offset = keys - queries

    def sees(i, j):
        is_late_enough = window is None or j >= i + offset - window
        is_early_enough = j <= i + offset if causal else window is None or j <= i + offset + window
        return is_late_enough and is_early_enough

    assert shape.unmasked_pairs_per_head == sum(sees(i, j) for i in range(queries) for j in range(keys))


def test_flop_follow_the_convention_that_is_named():
    assert AttentionProblem().compute_flop(LONG) == 4 * 2 * 16 * 8192 * 8192 * 128
    assert AttentionProblem(direction="bwd").compute_flop(LONG) == 2.5 * LONG.flop
    assert AttentionProblem(direction="bwd", backward_count="model").compute_flop(LONG) == 2 * LONG.flop
    assert AttentionProblem(direction="fwd+bwd").compute_flop(LONG) == 3.5 * LONG.flop
    causal_share = dataclasses.replace(LONG, causal=True).flop / LONG.flop
    assert causal_share == pytest.approx(0.5, rel=2e-4)
    works = [AttentionProblem(direction=direction).compute_work(LONG) for direction in ("fwd", "bwd")]
    formulas = "4*b*h*pairs*d in fwd; 10*b*h*pairs*d in bwd"
    assert (
        describe_counted_work(works) == f"counted: each operand and result once; masked pairs not counted; {formulas}"
    )


def test_bytes_count_each_operand_once():
    shape = AttentionShape(1, 8, 2, 128, 256, 64, 64)
    assert AttentionProblem().compute_traffic_bytes(shape) == 2 * 64 * (2 * 8 * 128 + 2 * 2 * 256)


# -- the sweep -------------------------------------------------------------------------------------------------------


def make_ceiling(backend, regime="burst", tflops=None, **fields):
    clock = backend.device_physics.boost_clock_hz if regime == "burst" else backend.device_physics.capped_clock_hz
    true_tflops = REFERENCE.flop / backend.compute_matmul_cycles(REFERENCE) * clock / 1e12
    defaults = {"device": backend.info.name, "uuid_hash": None, "problem": MatmulProblem(), "kernel": "simulated.mm"}
    return Ceiling(
        **defaults | fields,
        regime=regime,
        shape=REFERENCE,
        rate=tflops or true_tflops,
        interval=Interval(0, 0, 1),
        round_count=9,
    )


def make_strategy(backend, plan, ceilings=None, rows=()):
    kernels = [SimulatedAttention(), SlowAttention()]
    references = {"simulated.mm": SimulatedMatmul()}
    return RowsStrategy(setup_of(plan, kernels, backend, rows), ceilings, references)


def make_plan(**fields):
    names = (SimulatedAttention.name, SlowAttention.name)
    return kernels_plan(
        "attention", **{"shapes": (LONG, SHORT), "problems": (AttentionProblem(),), "kernels": names} | fields
    )


@pytest.mark.parametrize("regime", ["burst", "sustained"])
def test_a_share_of_the_ceiling_is_the_kernels_true_share(regime):
    backend = SimulatedBackend()
    ceiling = make_ceiling(backend, regime)
    ceilings = {("bfloat16", regime): ceiling}
    rows = list(make_strategy(backend, make_plan(regimes=(regime,)), ceilings).yield_results())
    flop_per_cycle = backend.device_physics.compute_units * backend.device_physics.flop_per_cycle_per_unit
    peak_to_ceiling_ratio = flop_per_cycle * backend.compute_matmul_cycles(REFERENCE) / REFERENCE.flop
    for row in (row for row in rows if not row.is_reference):
        kernel_share = 0.7 if row.kernel == SimulatedAttention.name else 0.35
        assert compute_mamfu(row, ceilings) == pytest.approx(kernel_share * peak_to_ceiling_ratio, rel=0.006)
        assert abs(compute_card_drift(row, ceilings)) < 0.006


def test_the_reference_is_measured_before_and_after_every_row():
    backend = SimulatedBackend()
    rows = list(make_strategy(backend, make_plan(), {("bfloat16", "burst"): make_ceiling(backend)}).yield_results())
    assert [row.is_reference for row in rows] == [True] + [True, False] * 4
    reference_rates = [row.best_rate for row in rows if row.is_reference]
    kernel_rows = [row for row in rows if not row.is_reference]
    for index, row in enumerate(kernel_rows):
        assert row.details["reference_tflops"] == pytest.approx(sum(reference_rates[index : index + 2]) / 2, abs=1e-3)


def test_a_ratio_across_regimes_devices_or_dtypes_is_refused_or_absent():
    backend = SimulatedBackend()
    burst = make_ceiling(backend)
    with pytest.raises(IncomparableError, match="sustained"):
        burst.compute_utilization(flop=1e12, seconds=1e-3, regime="sustained")
    with pytest.raises(IncomparableError, match="find"):
        require_usable_ceiling(dataclasses.replace(burst, device="NVIDIA H200"), backend)
    float16_plan = make_plan(problems=(AttentionProblem("float16"),))
    rows = list(make_strategy(backend, float16_plan, {("bfloat16", "burst"): burst}).yield_results())
    assert all(compute_mamfu(row, {("bfloat16", "burst"): burst}) is None for row in rows)
    assert not any(row.is_reference for row in rows)


# -- the command -----------------------------------------------------------------------------------------------------

KERNELS = ["mamf.testing:SimulatedAttention", "test_attention:SlowAttention"]
SIMULATED = ["--backend", "mamf.testing:SimulatedBackend", "--kernel", *KERNELS]


@pytest.fixture
def attention(run):
    return lambda *arguments, command="attention": run(command, *arguments)


def test_a_run_ranks_the_kernels_and_its_log_prints_the_same(attention, tmp_path):
    code, out, _ = attention(
        *SIMULATED, "--seq-lens", "2048", "--no-causal", "--no-ceiling", "--output", "run.jsonl", "--format", "csv"
    )
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["kernel"] for row in rows] == [SimulatedAttention.name, SlowAttention.name]
    assert float(rows[0]["speed_up"]) == pytest.approx(2, rel=0.01)
    assert attention("run.jsonl", "--format", "csv", command="show")[1] == out
    _, top_out, _ = attention(*SIMULATED, "--seq-lens", "2048", "--no-causal", "--no-ceiling", "--top", "1")
    assert "\n1 more row (--top all shows all)\n" in top_out
    assert "\n1 more row (--top all shows all)\n" in attention("run.jsonl", "--top", "1", command="show")[1]
    assert read_run_log(tmp_path / "run.jsonl").summary["status"] == "complete"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kernel", KERNELS[0], "--heads", "6", "--kv-heads", "4"], "must be a multiple of the number of kv heads"),
        (["--preset", "fa3"], "fa3-paper"),
        (["--kernel", KERNELS[0], "--ceiling", "nothing.jsonl"], "nothing.jsonl"),
        (["--head-dims", "192/128/64"], "'128/64' is not a whole number"),
    ],
)
def test_bad_input_is_one_line(attention, arguments, message):
    assert_refused(attention(*arguments, "--backend", "mamf.testing:SimulatedBackend"), message)


def build_shapes(*options):
    parser = CommandParser()
    add_operation_options(parser, AttentionOperation())
    return list(
        make_measurement_request(AttentionOperation(), parser.parse_args(options)).make_labeled_shapes(
            SimulatedBackend()
        )
    )


@pytest.mark.parametrize("preset", ATTENTION_PRESETS)
def test_every_preset_makes_shapes(preset):
    shapes = build_shapes("--preset", preset)
    assert shapes
    if preset == "fa3-paper":
        assert len(shapes) == 3 * 6 * 2
        assert {shape.batch * shape.seqlen_k for shape in shapes} == {16384}
        assert {shape.heads * shape.head_dim for shape in shapes} == {2048}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--head-dims", "64", "192/128", "128/128"], "b4h32q4096k4096d64 b4h10q4096k4096d192v128 b4h16q4096k4096d128"),
        (["--preset", "deepseek-v3"], "b4h128q4096k4096d192v128c"),
        (["--preset", "deepseek-v3", "--head-dims", "64", "--heads", "2"], "b4h2q4096k4096d64c"),
        (["--causal", "both", "--query-lens", "1"], "b4h16q1k4096d128 b4h16q1k4096d128c"),
        (["--causal", "--kv-heads", "4", "--window", "128"], "b4h16kv4q4096k4096d128cw128"),
        (["--preset", "llama-8b", "--no-causal", "--batch", "1"], "b1h32kv8q4096k4096d128"),
    ],
)
def test_sizes_are_combined_and_replace_those_of_a_preset(options, expected):
    shapes = build_shapes(*options, "--seq-lens", "4096")
    assert list(map(str, shapes)) == expected.split()
    assert all(AttentionOperation().parse_shape(str(shape)) == shape for shape in shapes)


@pytest.mark.parametrize(
    ("options", "compiler", "kernels", "row_count"),
    [
        ([], None, "eager compiled-eager", 80),
        ([], Unavailability("no compiler", "get one"), "eager", 40),
        (["--direction", "fwd", "--head-dims", "16"], None, "eager compiled-eager", 10),
        (["--kernel", "sdpa-math"], None, "sdpa-math", 40),
    ],
)
def test_the_scaling_preset_compares_eager_with_compiled_in_both_directions(
    attention, monkeypatch, options, compiler, kernels, row_count
):
    monkeypatch.setattr(load_backend_class("cpu"), "explain_missing_compiler", lambda self: compiler)
    code, out, err = attention("--backend", "cpu", "--preset", "scaling", "--no-ceiling", "--dry-run", *options)
    assert code == 0, err
    assert f"kernels: {', '.join(kernels.split())}\n" in out
    assert f", {row_count} rows in burst" in out
    assert ("leaving out kernel compiled-eager: no compiler" in err) == (compiler is not None)
