"""Test which samples and rows mamf accepts as plausible. The same rules apply while mamf measures and in ``mamf results
check``.
"""

import dataclasses
from pathlib import Path

import pytest
from contribution_logs import RESULTS

from mamf.backend import DeviceInfo
from mamf.contribution.rules import ReviewedLog, has_exact_kernel
from mamf.logs.run_log import build_run_log, parse_records, read_lines
from mamf.measurement import Conditions, Measurement
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.peaks import FALLING_CLOCK_HEADROOM, READ_CLOCK_HEADROOM, compute_max_flops, compute_max_flops_at_clock
from mamf.plausibility import explain_implausible_row, separate_impossible_samples
from mamf.statistics import summarize_samples

H100 = DeviceInfo("cuda", 0, "NVIDIA H100 80GB HBM3", "NVIDIA", compute_units=132, max_clock_hz=1980e6)
UNLISTED = dataclasses.replace(H100, name="Some New Card")
CPU = DeviceInfo("cpu", 0, "Some CPU", "x", compute_units=2, is_accelerator=False)
SHAPE = MatmulShape(4096, 4096, 4096)


def make_row(
    samples, implausible=(), regime="burst", ranking_statistic="median", dtype="bfloat16", clock_hz=None, reasons=()
):
    problem = MatmulProblem(dtype, dtype)
    return Measurement(
        SHAPE,
        "torch.mm",
        problem,
        regime,
        ranking_statistic,
        "ok",
        summary=summarize_samples(list(samples), ranking_statistic),
        samples=tuple(samples),
        implausible_samples=tuple(implausible),
        conditions=Conditions(clock_hz=clock_hz, throttle_reasons=tuple(reasons)),
    )


def compute_seconds(tflops):
    return SHAPE.flop / tflops / 1e12


# -- samples -----------------------------------------------------------------------------------------------------------


def test_the_samples_of_a_quiet_moment_on_a_busy_cpu_are_kept():
    quiet, busy = [0.010] * 9, [0.025 + 0.001 * number for number in range(20)]
    limit = compute_max_flops(CPU, "float32")
    assert separate_impossible_samples([*busy, *quiet], SHAPE.flop / 100, limit) == ([*busy, *quiet], [])
    assert explain_implausible_row(make_row([*busy, *[0.001] * 9]), CPU, None) is None


@pytest.mark.parametrize(("impossible_count", "is_ok"), [(0, True), (2, True), (3, False), (10, False)])
def test_more_than_a_tenth_of_impossible_samples_gives_no_figure(impossible_count, is_ok):
    row = make_row([compute_seconds(700)] * (20 - impossible_count), [compute_seconds(7000)] * impossible_count)
    reason = explain_implausible_row(row, H100, compute_max_flops(H100, "bfloat16"))
    assert (reason is None) is is_ok
    assert is_ok or reason == f"{impossible_count} of 20 samples are faster than the device can be (up to 7000 TFLOPS)"


@pytest.mark.parametrize(
    ("suspect_count", "ranking_statistic", "device", "is_ok"),
    [
        (2, "median", UNLISTED, True),
        (3, "median", UNLISTED, False),
        (1, "fastest", UNLISTED, False),
        (0, "fastest", UNLISTED, True),
        (9, "fastest", CPU, True),
    ],
)
def test_too_many_suspect_samples_give_no_figure_if_no_peak_is_known(suspect_count, ranking_statistic, device, is_ok):
    samples = [1e-3] * (20 - suspect_count) + [2e-6] * suspect_count
    assert separate_impossible_samples(samples, SHAPE.flop, None) == (samples, [])
    reason = explain_implausible_row(make_row(samples, ranking_statistic=ranking_statistic), device, None)
    assert (reason is None) is is_ok
    assert is_ok or "without a known peak of Some New Card" in reason


# -- the clock ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share_of_bound", "is_ok"), [(0.99, True), (1.01, False)])
def test_no_figure_is_more_than_its_clock_allows(share_of_bound, is_ok):
    bound = 989 * 1320 / 1830 * READ_CLOCK_HEADROOM
    row = make_row([compute_seconds(bound * share_of_bound)] * 20, clock_hz=1320e6)
    reason = explain_implausible_row(row, H100, compute_max_flops(H100, "bfloat16"))
    assert (reason is None) is is_ok
    assert is_ok or "that the measured clock of 1320 MHz allows" in reason


@pytest.mark.parametrize(
    ("reasons", "is_ok"), [((), False), (("power cap",), False), (("hardware thermal slowdown", "power cap"), True)]
)
def test_a_device_that_switches_between_clocks_is_not_bounded_by_one_of_them(reasons, is_ok):
    row = make_row([compute_seconds(989 * 990 / 1830 * 1.2)] * 20, clock_hz=990e6, reasons=reasons)
    assert (explain_implausible_row(row, H100, compute_max_flops(H100, "bfloat16")) is None) is is_ok


def test_the_clock_of_a_classic_loop_bounds_nothing():
    row = make_row([compute_seconds(900)] * 20, regime="classic", ranking_statistic="fastest", clock_hz=1000e6)
    assert explain_implausible_row(row, H100, compute_max_flops(H100, "bfloat16")) is None


def test_float64_has_its_own_bound_or_the_bound_of_float32():
    a10g = dataclasses.replace(H100, name="NVIDIA A10G", max_clock_hz=None)  # its float64 peak is not listed
    assert compute_max_flops(H100, "float64") == pytest.approx(67e12, rel=0.03)
    assert compute_max_flops(a10g, "float64") == compute_max_flops(a10g, "float32")
    assert compute_max_flops_at_clock(H100, "float64", 990e6) == pytest.approx(67e12 / 2 * READ_CLOCK_HEADROOM)
    row = make_row([compute_seconds(70)] * 20, dtype="float64", clock_hz=1980e6)
    plausible, impossible = separate_impossible_samples(
        row.samples, row.work_amount, compute_max_flops(H100, "float64")
    )
    assert (len(plausible), len(impossible)) == (0, 20)


def test_the_headroom_holds_for_every_row_in_results():
    """Recompute the evidence in the docstring of ``compute_max_flops_at_clock`` from two logs: the log with the largest
    excess, and a log with sustained rows.
    """
    names = ("find-float64-burst-sustained-20261121-052457", "find-bfloat16-burst-sustained-20261121-065802")
    ratios = {name: max(yield_clock_ratios(RESULTS / "nvidia-h100-80gb-hbm3" / f"{name}.jsonl")) for name in names}
    assert ratios[names[0]] == pytest.approx(1.0512, abs=1e-4)
    assert ratios[names[1]] == pytest.approx(0.9954, abs=1e-4)
    assert pytest.approx(2 * (ratios[names[0]] - 1), rel=0.05) == FALLING_CLOCK_HEADROOM - 1


def yield_clock_ratios(path: Path):
    """Yield the rate of each row in a log, relative to the peak at the clock that mamf read during the row."""
    records = tuple(parse_records(path, read_lines(path)))
    reviewed_log = ReviewedLog(records, build_run_log(path, records))
    for _, row in reviewed_log.valid_rows:
        clock = row.conditions.clock_hz
        bound = (
            compute_max_flops_at_clock(reviewed_log.log.get_device(row.device_index), row.problem.dtype, clock)
            if clock
            else None
        )
        if bound and has_exact_kernel(row):
            yield row.best_rate * 1e12 / bound * READ_CLOCK_HEADROOM
