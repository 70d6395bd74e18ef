"""Test the shares of a model's step: MFU, and MAMFU with a ceiling that is given, known or unknown."""

import json
from pathlib import Path

import pytest

from mamf.cli.commands import model
from mamf.contribution import known_ceilings
from mamf.errors import IncomparableError
from mamf.logs.run_log import read_run_log
from mamf.measurement import Rate

MODEL = ["model", "--backend", "mamf.testing:SimulatedBackend"]
STEP = [*MODEL, "--context-lengths", "512", "1024", "--phase", "forward", "step"]


@pytest.fixture
def run_steps(run, monkeypatch):
    """Return a function that runs ``mamf model`` in virtual time."""
    monkeypatch.setattr(model, "make_kernel_names", lambda options: ["mamf.testing:SimulatedModel"])
    return lambda: run(*STEP, "--regime", "sustained", "--output", "run.jsonl")


def set_known_ceiling(monkeypatch, source="contributed"):
    ceiling = Rate(
        rate=500.0, regime="sustained", source=source, description="from somewhere", dtype="bfloat16", device="x"
    )
    monkeypatch.setattr(known_ceilings, "peak", lambda *arguments: ceiling)


def read_measurements(run):
    code, out, err = run("show", "run.jsonl", "--format", "json")
    assert code == 0, err
    return json.loads(out)["measurements"]


def test_mamfu_is_a_share_of_the_known_ceiling_and_the_log_names_it(run_steps, run, monkeypatch, tmp_path):
    set_known_ceiling(monkeypatch)
    code, out, err = run_steps()
    assert code == 0, err
    assert "MAMFU: share of 500.0 TFLOPS, the bfloat16 sustained ceiling: from somewhere" in out
    assert {"MFU", "MAMFU"} < set(out.split())
    assert "% peak" not in out
    ceiling = read_run_log(tmp_path / "run.jsonl").known_ceilings["bfloat16", "sustained"]
    assert (ceiling.tflops, ceiling.source) == (500.0, "contributed")
    for row in read_measurements(run):
        assert row["mamfu"] == pytest.approx(row["rate_mean_tflops"] / 500)
        assert row["share_of_peak"] == pytest.approx(row["rate_mean_tflops"] / 989)
    assert run("show", "run.jsonl", "--wide")[1].count(" 500.0 TFLOPS") == 1
    assert "known_ceiling" not in run("results", "check", "run.jsonl")[1]


def test_without_a_ceiling_there_is_no_mamfu_and_a_warning_says_why(run_steps, run, monkeypatch, tmp_path):
    set_known_ceiling(monkeypatch, "datasheet")
    code, out, err = run_steps()
    assert code == 0
    message = "rows in sustained show no MAMFU, their share of the matmul ceiling: mamf knows only "
    assert err.count(message) == 1
    assert "MAMFU: share of" not in out
    assert [row["mamfu"] for row in read_measurements(run)] == [None] * 4
    (tmp_path / "run.jsonl").unlink()

    def refuse_another_power_limit(*arguments):
        raise IncomparableError("it is of 700 W, here 350 W")

    monkeypatch.setattr(known_ceilings, "peak", refuse_another_power_limit)
    assert "their share of the matmul ceiling: it is of 700 W, here 350 W" in run_steps()[2]


def test_a_given_ceiling_is_used_and_cannot_change_when_resuming(run_steps, run, library_logs, tmp_path):
    find = str(library_logs / "find.jsonl")
    small_model = ["--size", "small", "--batch", "1", "--context-lengths", "256"]
    code, out, err = run(*MODEL, *small_model, "--regime", "burst", "--ceiling", find, "--output", "run.jsonl")
    assert code == 0, err
    ceiling = read_run_log(Path(find)).matmul_ceilings["bfloat16", "burst"]
    assert f", the bfloat16 burst ceiling: {ceiling.shape} by {ceiling.kernel}, from --ceiling" in out
    assert [row["ceiling_tflops"] for row in read_measurements(run)] == [ceiling.tflops]
    assert run(*STEP, "--regime", "sustained", "--ceiling", find)[::2] == (
        2,
        f"mamf: --ceiling {find} has no bfloat16 sustained ceiling: add a log of 'mamf find' that has one\n",
    )
    text = (tmp_path / "run.jsonl").read_text()
    resume_command = [*MODEL, "--resume", "run.jsonl", "--ceiling", find]
    assert run(*resume_command)[0] == 0
    assert (tmp_path / "run.jsonl").read_text() == text
    (tmp_path / "run.jsonl").write_text(text.replace(f'"tflops": {ceiling.tflops}', '"tflops": 1.5'))
    code, _, err = run(*resume_command)
    assert code == 2
    assert "was measured with a bfloat16 burst ceiling of 1.5 TFLOPS" in err


def test_steps_are_measured_in_sustained_unless_burst_is_asked_for(run_steps, run, tmp_path):
    one_shape = ["--phase", "forward", "step", "--batch", "1", "--context-lengths", "1024", "--size", "xl"]
    code, _, err = run(*MODEL, *one_shape, "--output", "run.jsonl")
    assert code == 0, err
    rows = read_run_log(tmp_path / "run.jsonl").measurements
    assert [(row.problem.phase, row.regime, row.ok) for row in rows] == [
        ("forward", "sustained", True),
        ("step", "sustained", True),
    ]
    text = (tmp_path / "run.jsonl").read_text()
    assert run(*MODEL, "--resume", "run.jsonl")[0] == run(*MODEL, *one_shape, "--resume", "run.jsonl")[0] == 0
    assert (tmp_path / "run.jsonl").read_text() == text
    burst_out = run(*MODEL, *one_shape, "--regime", "burst", "--output", "burst.jsonl")[1]
    assert "measure it in the sustained regime" in burst_out


@pytest.mark.parametrize("value", ["-1.0", '"many"'])
def test_an_impossible_ceiling_is_refused_with_its_line(run_steps, run, monkeypatch, tmp_path, value):
    set_known_ceiling(monkeypatch)
    run_steps()
    text = (tmp_path / "run.jsonl").read_text()
    (tmp_path / "run.jsonl").write_text(text.replace('"tflops": 500.0', f'"tflops": {value}'))
    code, _, err = run("show", "run.jsonl")
    assert code == 2
    assert "run.jsonl, line 2:" in err
