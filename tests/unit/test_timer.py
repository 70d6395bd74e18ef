"""The timer's overhead: what is believed, what is recomputed in early logs, and a run in which it moved."""

import dataclasses
import json
from pathlib import Path

import pytest

from mamf.ceilings.ceiling import recompute
from mamf.cli.session import RunEnd, Session
from mamf.engine.measure import measure
from mamf.engine.regimes import Burst, StoppingRule
from mamf.errors import RunLogError
from mamf.logs.run_log import read_run_log
from mamf.logs.timer_correction import describe_shift, recompute_rows
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.shapes import MatmulShape
from mamf.testing import Physics, SimulatedBackend, SimulatedMatmul
from mamf.timers import corrected_window, credible_overhead, find_timer, raw_window, relative_accuracy

RESULTS = Path(__file__).resolve().parents[2] / "results"
CUDA = find_timer("cuda")
SHAPE = MatmulShape(2048, 2048, 2048)
SWEEP = (
    *("sweep", "--backend", "mamf.testing:SimulatedBackend", "--kernel", "mamf.testing:SimulatedMatmul"),
    *("--shapes", "2048x2048x2048"),
)


@pytest.mark.parametrize("overhead", [0.0, 3e-6])
@pytest.mark.parametrize("window", [1e-6, 5.9e-6, 6.1e-6, 1e-3])
def test_a_window_can_be_had_back_from_its_sample(window, overhead):
    assert raw_window(corrected_window(window, overhead), overhead) == pytest.approx(window)


@pytest.mark.parametrize(
    ("backend", "estimate", "seconds", "refused"),
    [
        ("cuda", 2.9034e-6, 2.903e-6, False),
        ("cuda", 17.3e-6, CUDA.typical, True),
        ("cuda", 0.35e-6, CUDA.typical, True),
        ("cuda", -2e-6, CUDA.typical, True),
        ("cuda", None, 0.0, False),
        ("xpu", 9e-6, 9e-6, False),
        ("xpu", 25e-6, 0.0, True),
        ("xpu", -0.1e-6, 0.0, False),
    ],
)
def test_an_overhead_that_no_timer_has_is_refused(backend, estimate, seconds, refused):
    overhead = credible_overhead(backend, estimate)
    assert overhead.seconds == pytest.approx(seconds)
    assert ("assumed" in overhead.remark) is refused


class Hiccup(SimulatedBackend):
    """A host that stalls while the timer is calibrated, on a device whose timer is known."""

    name = "cuda"

    def timer_overhead(self):
        return 17.3e-6


def test_a_burst_says_that_it_assumed_the_overhead(monkeypatch):
    backend = Hiccup(physics=dataclasses.replace(Physics(), timer_overhead=CUDA.typical, noise=0.0))
    row = measured(backend)
    assert row.timer_overhead == pytest.approx(CUDA.typical)
    assert "implausible" in " ".join(row.remarks)
    assert row.accuracy == pytest.approx(max(CUDA.accuracy / row.seconds, 0.005))


def measured(backend):
    regime = Burst(backend)
    regime.start()
    pool = backend.operand_pool("normal", 0)
    return measure(SimulatedMatmul(), MatmulProblem(), SHAPE, regime, pool, StoppingRule())


# -- logs before schema 5 --------------------------------------------------------------------------------------------


def test_collectives_that_17_us_were_subtracted_from_read_as_other_runs_do():
    (early,) = RESULTS.rglob("collective-bfloat16-burst-20261122-094447.jsonl")
    (other,) = RESULTS.rglob("collective-bfloat16-burst-20261122-070345.jsonl")
    rows = {str(row.shape): row for row in read_run_log(early).measurements if "all_reduce" in str(row.problem)}
    seen = {str(row.shape): row for row in read_run_log(other).measurements if "all_reduce" in str(row.problem)}
    assert rows["16MiB"].best_rate == pytest.approx(seen["16MiB"].best_rate, rel=0.02)
    assert all("instead of the 17.3 us" in " ".join(row.remarks) for row in rows.values())


def test_a_ceiling_moves_with_the_rows_that_confirmed_it():
    (path,) = RESULTS.rglob("find-bfloat16-burst-sustained-20261122-101216.jsonl")
    written = json.loads(next(line for line in path.read_text().splitlines() if '"record": "ceiling"' in line))
    log = read_run_log(path)
    ceiling = log.ceilings["burst"]
    seconds = ceiling.problem.work(ceiling.shape).amount / 1e12
    logged = next(json.loads(line) for line in path.open() if '"phase": "confirm"' in line)["timer_overhead_seconds"]
    moved = seconds / ceiling.rate - seconds / written["tflops"]
    assert moved == pytest.approx(logged - CUDA.typical, rel=1e-3)
    confirmed = [row for row in log.measurements if row.phase == "confirm" and row.shape == ceiling.shape]
    assert ceiling.rate == pytest.approx(confirmed[0].best_rate, rel=0.01)
    assert log.ceilings["sustained"].rate == pytest.approx(700.82)


def test_only_burst_rows_of_a_known_timer_are_recomputed():
    row = measured(SimulatedBackend())
    sustained = dataclasses.replace(row, regime="sustained")
    without = dataclasses.replace(row, timer_overhead=0.0)
    assert recompute_rows([sustained, without], "cuda", CUDA) == [sustained, without]
    (again,) = recompute_rows([row], "cuda", CUDA)
    assert again.samples == pytest.approx([sample + row.timer_overhead - CUDA.typical for sample in row.samples])
    assert again.timer_accuracy == CUDA.early_accuracy > CUDA.accuracy


def test_a_ceiling_whose_rounds_are_elsewhere_stays_as_written():
    (path,) = RESULTS.rglob("find-bfloat16-burst-sustained-20261122-101216.jsonl")
    ceiling = read_run_log(path).ceilings["burst"]
    assert recompute(ceiling, []) is ceiling


def test_the_winner_of_an_early_find_may_be_another_shape():
    """Short launches had too much subtracted: of two shapes the longer one is the faster."""
    (path,) = RESULTS.rglob("find-fp8_1x128_128x128-burst-sustained-20261122-071037.jsonl")
    written = next(json.loads(line) for line in path.open() if '"record": "ceiling"' in line)
    ceiling = read_run_log(path).ceilings["burst"]
    assert str(ceiling.shape) != written["shape"]
    assert ceiling.shape.flop > MatmulShape.parse(written["shape"]).flop


# -- after a run -----------------------------------------------------------------------------------------------------


def test_a_run_in_which_the_overhead_moved_says_so(run, tmp_path, monkeypatch):
    estimates = iter([3e-6, 4.2e-6])
    monkeypatch.setattr(SimulatedBackend, "timer_overhead", lambda self: next(estimates))
    log = tmp_path / "log.jsonl"
    code, _, said = run(*SWEEP, "--output", str(log))
    assert code == 0
    assert "moved from 3.0 to 4.2 us" in said
    assert json.loads(log.read_text().splitlines()[-1])["timer_overhead_after_seconds"] == 4.2e-6


def test_a_run_in_which_the_overhead_stayed_says_nothing(run, tmp_path):
    code, _, said = run(*SWEEP, "--output", str(tmp_path / "log.jsonl"))
    assert code == 0
    assert "overhead" not in said


def test_a_device_is_not_asked_again_after_an_interruption(run, tmp_path, monkeypatch):
    asked, collect = [], Session._collect

    def interrupted(self, writer):
        collect(self, writer)
        return RunEnd("interrupted", "by the user", 130)

    monkeypatch.setattr(SimulatedBackend, "timer_overhead", lambda self: asked.append(1) or 3e-6)
    monkeypatch.setattr(Session, "_collect", interrupted)
    log = tmp_path / "log.jsonl"
    assert run(*SWEEP, "--output", str(log))[0] == 130
    assert len(asked) == 1  # before the first row
    assert "timer_overhead_after_seconds" not in json.loads(log.read_text().splitlines()[-1])


def test_a_run_without_a_figure_has_no_shortest_launch():
    row = dataclasses.replace(measured(SimulatedBackend()), status="implausible", summary=None)
    assert describe_shift({"timer_overhead_after_seconds": 9e-6}, [row]) == ""


@pytest.mark.parametrize(
    "change", [{"timer_overhead_seconds": -1.0}, {"details": {"reference_tflops": "fast"}}], ids=["negative", "text"]
)
def test_an_early_log_that_was_edited_is_refused_in_a_line(change, tmp_path):
    (path,) = RESULTS.rglob("attention-bfloat16-fwd-burst-20261122-023859.jsonl")
    records = [json.loads(line) for line in path.open()]
    for record in records:
        if record["record"] == "measurement" and not record["is_reference"]:
            record.update(change)
    edited = tmp_path / "edited.jsonl"
    edited.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    with pytest.raises(RunLogError, match=r"edited\.jsonl"):
        read_run_log(edited)


@pytest.mark.parametrize(("seconds", "expected"), [(4e-6, 0.25), (100e-6, 0.01), (200e-6, 0.005), (0.05, 0.005)])
def test_accuracy_is_a_microsecond_or_half_a_percent(seconds, expected):
    assert relative_accuracy(CUDA.accuracy, seconds) == pytest.approx(expected)
    assert relative_accuracy(0.0, seconds) == 0.0
