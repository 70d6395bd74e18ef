"""Test ``Rate``, the common type of all rates, and the lookup of a rate by dtype label and regime."""

from dataclasses import replace
from pathlib import Path

import pytest
from made_rates import ceiling
from test_compare import make_attention_row

from mamf.ceilings.ceiling import compute_mamfu, compute_share_of_known_ceiling, find_row_ceiling
from mamf.errors import UsageError
from mamf.integrations.meter import convert_ceiling_to_flops
from mamf.logs.run_log import RunLog
from mamf.measurement import Rate, find_rate, make_dtype_label
from mamf.operations.attention.operation import AttentionProblem
from mamf.operations.bandwidth.operation import BandwidthProblem, BandwidthShape
from mamf.operations.matmul.shapes import MatmulProblem

PLAIN = ceiling(1000.0, problem=MatmulProblem("int8", "int32"))
WITH_INT8_OUTPUT = ceiling(1500.0, problem=MatmulProblem("int8", "int8"))
FAST = ceiling(1400.0, problem=MatmulProblem("float8_e4m3fn", fast_accumulation=True))


@pytest.mark.parametrize(
    ("problem", "label"),
    [
        (MatmulProblem("int8", "int32"), "int8"),
        (MatmulProblem("int8", "int8"), "int8, int8 output"),
        (AttentionProblem("float8_e4m3fn"), "float8_e4m3fn"),  # only labels of matmuls have an output dtype
        (MatmulProblem("bfloat16", "float32"), "bfloat16, float32 output"),
        (MatmulProblem("float8_e4m3fn", fast_accumulation=True), "float8_e4m3fn, fast accumulation"),
        (
            MatmulProblem("float8_e4m3fn", "float16", fast_accumulation=True),
            "float8_e4m3fn, float16 output, fast accumulation",
        ),
    ],
)
def test_an_unusual_output_dtype_is_part_of_the_label(problem, label):
    assert make_dtype_label(problem) == label


def make_log_of_ceilings(*ceilings):
    log = RunLog(Path("log.jsonl"), {})
    for rate in ceilings:
        log.add_ceiling(rate)
    return log


@pytest.mark.parametrize("ceilings", [(PLAIN, WITH_INT8_OUTPUT), (WITH_INT8_OUTPUT, PLAIN)])
def test_the_ceiling_with_int8_output_is_never_that_of_int8(ceilings):
    ceilings_by_key = make_log_of_ceilings(*ceilings).matmul_ceilings
    assert ceilings_by_key == {("int8", "burst"): PLAIN, ("int8, int8 output", "burst"): WITH_INT8_OUTPUT}
    row = replace(make_attention_row(), problem=AttentionProblem("int8"))
    assert compute_mamfu(row, ceilings_by_key) == pytest.approx(row.tflops / PLAIN.tflops)
    assert find_row_ceiling(row, make_log_of_ceilings(WITH_INT8_OUTPUT).matmul_ceilings) is None
    assert find_rate(ceilings_by_key, "int8, int8 output", "burst") is WITH_INT8_OUTPUT


def test_a_ceiling_with_fast_accumulation_is_used_if_there_is_no_other():
    ceilings_by_key = make_log_of_ceilings(FAST).matmul_ceilings
    assert find_rate(ceilings_by_key, "float8_e4m3fn", "burst") is FAST
    exact = ceiling(1300.0, problem=MatmulProblem("float8_e4m3fn"))
    assert find_rate(make_log_of_ceilings(FAST, exact).matmul_ceilings, "float8_e4m3fn", "burst") is exact
    assert find_rate(ceilings_by_key, "float8_e4m3fn", "sustained") is None


def test_a_contributed_rate_gives_the_same_share_as_a_measured_one():
    row = make_attention_row()
    measured = {("bfloat16", "burst"): ceiling(800.0)}
    contributed = {("bfloat16", "burst"): Rate(rate=800.0, dtype="bfloat16", device="card", source="contributed")}
    assert compute_share_of_known_ceiling(row, contributed) == pytest.approx(compute_mamfu(row, measured))


def test_a_meter_refuses_a_ceiling_in_bytes():
    copy = ceiling(4.0, problem=BandwidthProblem(), shape=BandwidthShape(2**30))
    assert copy.unit == "TB/s"
    with pytest.raises(UsageError, match="TB/s"):
        convert_ceiling_to_flops(copy)
    assert convert_ceiling_to_flops(PLAIN) == 1000e12
