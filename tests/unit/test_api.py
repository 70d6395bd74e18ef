"""The library as calls: rows stream, logs are kept, text is taken where the command line takes it."""

import pytest

import mamf
from mamf.contribution.rules import review
from mamf.errors import DeviceError, UnavailableError, UsageError
from mamf.testing import SimulatedBackend

KERNEL = "mamf.testing:SimulatedMatmul"


@pytest.fixture
def backend():
    return SimulatedBackend()


def sweep_of(backend, **options):
    return mamf.sweep(["2048x2048x2048", "4096x4096x4096"], backend=backend, kernel=KERNEL, **options)


def test_a_sweep_takes_text_and_streams(backend):
    rows = sweep_of(backend)
    assert next(rows).ok
    assert [row.ok for row in rows] == [True]


def test_a_log_holds_what_the_call_gave(backend, tmp_path):
    rows = list(sweep_of(backend, log=tmp_path / "run.jsonl"))
    log = mamf.read_run_log(tmp_path / "run.jsonl")
    assert [row.samples for row in log.measurements] == [row.samples for row in rows]
    assert log.tier == "complete"
    assert not {finding.rule for finding in review(tmp_path / "run.jsonl").findings} & {"row-mismatch", "best-mismatch"}


def test_a_call_that_is_broken_off_leaves_a_log_that_says_so(backend, tmp_path):
    rows = sweep_of(backend, log=tmp_path / "run.jsonl")
    next(rows)
    rows.close()
    log = mamf.read_run_log(tmp_path / "run.jsonl")
    assert (len(log.measurements), log.tier, log.summary["reason"]) == (1, "interrupted", "by the caller")


def test_a_budget_that_ends_is_said_in_the_log(backend, tmp_path):
    shapes = [f"16384x16384x{1024 * number}" for number in range(1, 17)]
    list(mamf.sweep(shapes, backend=backend, kernel=KERNEL, budget_seconds=1.5, log=tmp_path / "run.jsonl"))
    log = mamf.read_run_log(tmp_path / "run.jsonl")
    assert (log.tier, log.summary["reason"]) == ("interrupted", "the budget ended")


def test_rows_are_flat(backend, tmp_path):
    list(sweep_of(backend, log=tmp_path / "run.jsonl"))
    row = mamf.read_run_log(tmp_path / "run.jsonl").rows()[0]
    assert {"shape.m", "tflops.median", "kernel", "regime"} <= row.keys()
    assert not [name for name, value in row.items() if isinstance(value, dict)]


def test_a_find_tells_each_row_and_keeps_a_log(backend, tmp_path, monkeypatch):
    monkeypatch.setattr("mamf.ceilings.strategy.FindStrategy.fine_shapes", 100)
    seen = []
    ceiling = mamf.find(
        backend=backend, kernels=[KERNEL], budget_seconds=12.0, on_row=seen.append, log=tmp_path / "find.jsonl"
    )
    assert {"scout", "refine", "choose", "confirm"} == {row.phase for row in seen}
    assert mamf.load_ceiling(tmp_path / "find.jsonl").tflops == pytest.approx(ceiling.tflops, rel=1e-5)


def test_attention_takes_text(backend):
    rows = list(mamf.attention(["b1h16q1024k1024d128"], backend=backend, kernels=["mamf.testing:SimulatedAttention"]))
    assert [(row.operation, row.ok) for row in rows] == [("attention", True)]


def test_what_cannot_be_measured_is_said_before_anything_is(backend):
    with pytest.raises(UsageError, match="not an attention shape"):
        mamf.attention(["nonsense"], backend=backend)
    with pytest.raises(UnavailableError, match="flash-attn-4"):
        mamf.attention(["b1h1q64k64d64"], backend=backend, kernels=["flash-attn-4"])
    with pytest.raises(UsageError, match="unknown operation 'nope'"):
        mamf.measure_kernels("nope", backend=backend)


def test_a_file_that_exists_is_not_overwritten(backend, tmp_path):
    (tmp_path / "run.jsonl").write_text("mine")
    with pytest.raises(UsageError, match="not overwritten"):
        sweep_of(backend, log=tmp_path / "run.jsonl")


def test_a_log_of_any_operation_adds_up(backend, tmp_path):
    rows = mamf.measure_kernels(
        "bandwidth", ["64MiB"], backend=backend, kernels=["mamf.testing:SimulatedBandwidth"], log=tmp_path / "run.jsonl"
    )
    assert [row.ok for row in rows] == [True]
    assert mamf.read_run_log(tmp_path / "run.jsonl").summary["measured"] == 1
    assert "best-mismatch" not in {finding.rule for finding in review(tmp_path / "run.jsonl").findings}


def test_a_find_that_confirms_too_little_is_no_complete_log(backend, tmp_path):
    with pytest.raises(DeviceError, match="no sustained ceiling"):
        mamf.find(
            backend=backend, kernels=[KERNEL], regime="sustained", budget_seconds=12.0, log=tmp_path / "find.jsonl"
        )
    log = mamf.read_run_log(tmp_path / "find.jsonl")
    assert (log.tier, log.summary["reason"]) == ("interrupted", "the budget ended")
