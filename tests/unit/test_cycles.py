"""Test the two factors of a rate: the true clock, which clock stamps measure, and the share of used cycles."""

from dataclasses import replace

import pytest

from mamf.api.measuring import sweep
from mamf.backend import DeviceInfo, ElapsedTime, Unavailability
from mamf.files import read_packaged_csv_rows
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.peaks import compute_flop_per_cycle, find_datasheet_rate
from mamf.plausibility import compute_used_cycle_share, explain_implausible_row, find_flop_per_cycle
from mamf.testing import Physics, SimulatedBackend

SHAPES = [MatmulShape(4096, 4096, 4096), MatmulShape(8192, 8192, 8192), MatmulShape(2048, 2048, 2048)]
KERNEL = "mamf.testing:SimulatedMatmul"
H100 = DeviceInfo("cuda", 0, "NVIDIA H100 80GB HBM3", "NVIDIA", architecture="sm_90", compute_units=132)


def measure_rows(physics=None, **options):
    return list(sweep(SHAPES, backend=SimulatedBackend(physics=physics or Physics()), kernel=KERNEL, **options))


@pytest.mark.parametrize("regime", ["burst", "sustained"])
@pytest.mark.parametrize("true_clock", [0.83, 0.9, 1.0])
def test_the_measured_clock_is_the_true_clock_of_the_device(regime, true_clock):
    physics = replace(Physics(), true_clock_share=true_clock, hot_clock_loss_share=0.0)
    requested = physics.boost_clock_hz if regime == "burst" else physics.capped_clock_hz
    for row in measure_rows(physics, regime=regime, clock="all"):
        assert row.conditions.true_clock_hz == pytest.approx(true_clock * requested, rel=0.005)
        rate = 132 * 4096 * row.conditions.true_clock_hz
        assert row.conditions.used_cycle_share == pytest.approx(row.tflops * 1e12 / rate, rel=1e-5)


def test_cycles_used_are_the_same_in_both_regimes():
    burst, sustained = (
        {row.shape: row.conditions.used_cycle_share for row in measure_rows(regime=regime, clock="all")}
        for regime in ("burst", "sustained")
    )
    assert burst == pytest.approx(sustained, rel=0.01)


@pytest.mark.parametrize(("clock", "count"), [("best", 1), ("all", 3), ("none", 0)])
def test_the_clock_is_measured_for_the_requested_rows(clock, count):
    rows = measure_rows(clock=clock)
    rows_with_clock = [row for row in rows if row.conditions.true_clock_hz]
    assert len(rows_with_clock) >= count and (clock == "best" or len(rows_with_clock) == count)
    best = max(rows, key=lambda row: row.best_rate)
    assert (best in rows_with_clock) == (clock != "none")


def test_a_device_without_stamps_has_rates_and_no_clock():
    backend = SimulatedBackend(physics=replace(Physics(), true_clock_share=None))
    assert isinstance(backend.clock_stamps, Unavailability)
    rows = list(sweep(SHAPES, backend=backend, kernel=KERNEL, regime=["burst", "sustained"], clock="all"))
    assert all(row.ok and row.conditions.true_clock_hz is None for row in rows)


def test_clock_stamps_do_not_change_the_samples():
    with_clock, without = (measure_rows(clock=clock)[0] for clock in ("all", "none"))
    assert with_clock.samples == without.samples


#: A card of each architecture in flop_per_cycle.csv: its name, its compute units, and the boost clock in its datasheet.
CARDS = {
    "sm_70": ("Tesla V100-SXM2-16GB", 80, 1.53e9),
    "sm_80": ("NVIDIA A100-SXM4-80GB", 108, 1.41e9),
    "sm_90": ("NVIDIA H100 80GB HBM3", 132, 1.98e9),
}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn", "fp32": "float32", "fp64": "float64"}


@pytest.mark.parametrize(
    "row", read_packaged_csv_rows("flop_per_cycle.csv"), ids=lambda row: f"{row['architecture']} {row['dtypes']}"
)
def test_the_table_agrees_with_datasheets(row):
    """Compare flop_per_cycle.csv with the FLOP per cycle that follow from the peak rates in datasheets.

    peaks.csv lists a clock only for some peaks. The others are at the boost clock.
    """
    name, unit_count, boost_clock_hz = CARDS[row["architecture"]]
    for dtype in row["dtypes"].split():
        peak = find_datasheet_rate(name, DTYPES.get(dtype, dtype), unit_count)
        peak = replace(peak, clock_hz=peak.clock_hz or boost_clock_hz)
        assert compute_flop_per_cycle(peak, unit_count) == pytest.approx(float(row["flop"]), rel=0.01), dtype


def test_an_unlisted_architecture_uses_the_clock_of_its_datasheet():
    card = replace(H100, architecture="sm_99")
    assert find_flop_per_cycle(card, "bfloat16") == 4096
    assert find_flop_per_cycle(replace(card, name="Nobody's"), "bfloat16") is None
    assert compute_used_cycle_share(800e12, replace(card, name="Nobody's"), "bfloat16", 1.6e9) is None
    assert compute_used_cycle_share(800e12, H100, "bfloat16", None) is None


def test_a_rate_that_the_true_clock_excludes_is_implausible():
    (row,) = sweep([SHAPES[1]], backend=SimulatedBackend(), kernel=KERNEL, problem=MatmulProblem(), clock="all")
    assert explain_implausible_row(row, H100, 1e15) is None
    slow = replace(row, conditions=replace(row.conditions, true_clock_hz=1.2e9))
    assert "measured clock of 1200 MHz allows" in explain_implausible_row(slow, H100, 1e15)


class BrokenStamps:
    """Clock stamps that do not work. ``answer``: the time between any two stamps, or an error that a stamp raises."""

    def __init__(self, answer):
        self.answer = answer

    def record_stamp(self):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return 0

    def compute_elapsed(self, start, end):
        return self.answer


@pytest.mark.parametrize("regime", ["burst", "sustained"])
@pytest.mark.parametrize("answer", [None, ElapsedTime(0.0, 0.0), ElapsedTime(1e6, 0.0)])
def test_useless_stamps_leave_the_clock_unknown_and_the_rows_ok(monkeypatch, regime, answer):
    monkeypatch.setattr(SimulatedBackend, "clock_stamps", BrokenStamps(answer))
    assert [(row.status, row.conditions.true_clock_hz) for row in measure_rows(regime=regime, clock="all")] == [
        ("ok", None)
    ] * len(SHAPES)


@pytest.mark.parametrize("error", [RuntimeError("no clock"), SystemExit("no clock")])
def test_stamps_that_raise_an_error_fail_their_row_but_not_the_run(monkeypatch, error):
    monkeypatch.setattr(SimulatedBackend, "clock_stamps", BrokenStamps(error))
    rows = measure_rows(clock="all")
    assert [row.status for row in rows] == ["failed"] * len(SHAPES) and "no clock" in rows[0].reason
