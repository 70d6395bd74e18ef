"""Test the timer's overhead: which estimates mamf accepts, and what it says if the overhead changes in a run."""

import dataclasses
import json

import pytest

from mamf.engine.measure import measure_row
from mamf.engine.regimes import BurstRegime, StoppingRule
from mamf.measurement import choose_timer_overhead, find_timer_calibration
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.testing import Physics, SimulatedBackend, SimulatedMatmul

CUDA = find_timer_calibration("cuda")
SHAPE = MatmulShape(2048, 2048, 2048)
SWEEP = (
    *("sweep", "--backend", "mamf.testing:SimulatedBackend", "--kernel", "mamf.testing:SimulatedMatmul"),
    *("--shapes", "2048x2048x2048"),
)


@pytest.mark.parametrize(
    ("backend", "estimate", "seconds", "is_refused"),
    [
        ("cuda", 2.9034e-6, 2.903e-6, False),
        ("cuda", 17.3e-6, CUDA.typical_overhead_seconds, True),
        ("cuda", 0.35e-6, CUDA.typical_overhead_seconds, True),
        ("cuda", -2e-6, CUDA.typical_overhead_seconds, True),
        ("cuda", None, 0.0, False),
        ("xpu", 9e-6, 9e-6, False),
        ("xpu", 25e-6, 0.0, True),
        ("xpu", -0.1e-6, 0.0, False),
    ],
)
def test_an_overhead_that_no_timer_has_is_refused(backend, estimate, seconds, is_refused):
    overhead = choose_timer_overhead(backend, estimate)
    assert overhead.seconds == pytest.approx(seconds)
    assert ("assumed" in overhead.remark) is is_refused


class StallingHost(SimulatedBackend):
    """A device with a known timer, whose host stalls while mamf estimates the overhead."""

    name = "cuda"

    def estimate_timer_overhead(self):
        return 17.3e-6


def test_a_burst_says_that_it_assumed_the_overhead():
    backend = StallingHost(
        physics=dataclasses.replace(Physics(), timer_overhead_seconds=CUDA.typical_overhead_seconds, launch_noise=0.0)
    )
    row = measure(backend)
    assert row.timer_overhead_seconds == pytest.approx(CUDA.typical_overhead_seconds)
    assert "implausible" in " ".join(row.remarks)
    assert row.relative_timing_error == pytest.approx(max(CUDA.error_seconds / row.seconds, 0.005))


def measure(backend):
    regime = BurstRegime(backend)
    regime.prepare_device()
    pool = backend.make_operand_pool("normal", 0)
    return measure_row(SimulatedMatmul(), MatmulProblem(), SHAPE, regime, pool, StoppingRule())


# -- after a run -----------------------------------------------------------------------------------------------------


def test_a_run_in_which_the_overhead_changed_says_so(run, tmp_path, monkeypatch):
    estimates = iter([3e-6, 4.2e-6])
    monkeypatch.setattr(SimulatedBackend, "estimate_timer_overhead", lambda self: next(estimates))
    log = tmp_path / "log.jsonl"
    code, _, err = run(*SWEEP, "--output", str(log))
    assert code == 0
    assert "changed from 3.0 to 4.2 us" in err
    assert json.loads(log.read_text().splitlines()[-1])["timer_overhead_after_seconds"] == 4.2e-6
