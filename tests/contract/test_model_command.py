"""Test ``mamf model`` with a tiny model on the CPU: all commands that read its log, and errors of one line."""

import json

import pytest
import torch

from mamf.logs.run_log import read_run_log
from mamf.operations.model.operation import ModelShape
from mamf.plugins.discovery import open_backend

ON_CPU = ["model", "--backend", "cpu"]
TINY = ["--dtype", "fp32", "--set", "d_model=32", "d_ff=64", "layers=1", "heads=2", "kv_heads=2", "vocabulary=97"]
QUICK = ["--time-limit", "0.01s", "--precision", "20%", "--regime", "burst"]
PROBLEM = ["--batch", "1", "--context-lengths", "8", "--phase", "forward", "forward-backward"]


def test_a_run_is_logged_resumed_shown_and_compared(run, tmp_path):
    attention = ["--attention", "sdpa-math", "eager"]
    code, out, err = run(*ON_CPU, *TINY, *QUICK, *PROBLEM, *attention, "--output", "run.jsonl", "--wide")
    assert code == 0, err
    assert "burst, float32, gpt2 32/64/1/2, forward-backward" in out
    assert "backward = forward-backward minus forward" in out
    assert "tokens/s" in out
    rows = read_run_log(tmp_path / "run.jsonl").measurements
    assert {row.kernel for row in rows} == {"torch[sdpa-math]", "torch[eager]"}
    assert {str(row.shape) for row in rows} == {"b1s8"}
    assert [row.ok for row in rows] == [True] * 4
    lines = (tmp_path / "run.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cut.jsonl").write_text("".join(lines[:3]))
    assert run(*ON_CPU, "--resume", "cut.jsonl")[0] == 0
    assert len(read_run_log(tmp_path / "cut.jsonl").measurements) == 4
    assert run(*ON_CPU, "--resume", "run.jsonl", *TINY, *QUICK, *PROBLEM, *attention)[0] == 0
    json_rows = json.loads(run("show", "run.jsonl", "--format", "json")[1])["measurements"]
    assert {row["parameters"] for row in json_rows} == {row.problem.count_parameters(row.shape) for row in rows}
    assert "4 rows: " in run("compare", "run.jsonl", "cut.jsonl")[1]
    report = run("results", "check", "run.jsonl")[1]
    assert "foreign-row" not in report and "row-mismatch" not in report and "missing-row" not in report


def test_a_run_is_drawn(run):
    pytest.importorskip("matplotlib")
    attention = ["--attention", "sdpa-math", "eager"]
    code, _, err = run(*ON_CPU, *TINY, *QUICK, *PROBLEM, *attention, "--output", "run.jsonl")
    assert code == 0, err
    code, out, err = run("plot", "run.jsonl")
    assert (code, out) == (0, "figure: run.png\n"), err


def test_a_model_that_does_not_compile_is_a_failed_row_with_its_reason(run, monkeypatch):
    def fake_compile(network, **options):
        def call(*batch):
            raise RuntimeError("backend='inductor' raised: no C++ compiler")

        return call

    monkeypatch.setattr(torch, "compile", fake_compile)
    monkeypatch.setattr(type(open_backend("cpu")), "explain_missing_compiler", lambda self: None)
    options = ["--attention", "sdpa-math", "--compile", "--dtype", "bf16", "--output", "run.jsonl"]
    code, out, err = run(*ON_CPU, *TINY[2:], "autocast=yes", *QUICK, "--batch", "1", "--context-lengths", "8", *options)
    assert code == 0, err
    eager, compiled = json.loads(run("show", "run.jsonl", "--format", "json")[1])["measurements"]
    assert (eager["status"], eager["autocast"]) == ("ok", True)
    assert compiled["status"] == "failed"
    assert "no C++ compiler" in compiled["reason"]
    assert "autocast True" in out
    assert run(*ON_CPU, "--resume", "run.jsonl")[0] == 0


def test_a_quick_run_measures_one_short_sequence(run, tmp_path):
    code, _, err = run(*ON_CPU, *TINY, "--quick", "--regime", "burst", "--output", "run.jsonl")
    assert code == 0, err
    log = read_run_log(tmp_path / "run.jsonl")
    assert (log.plan.shapes, log.plan.budget_seconds) == ((ModelShape(1, 256),), 60)


def test_a_budget_that_the_first_row_exceeds_is_refused_at_once(run, tmp_path):
    code, out, err = run(*ON_CPU, "--dtype", "fp32", "--size", "8b", "--budget", "10s")
    assert (code, out) == (2, "")
    assert "which is more than the budget: choose a smaller --batch" in err
    assert list(tmp_path.glob("*.jsonl")) == []


def test_a_profile_of_one_row_shows_its_dtypes(run, monkeypatch):
    monkeypatch.setattr("mamf.cli.reserve_stdout_for_reports", lambda: None)  # pytest's stdout has no file descriptor
    arguments = [*ON_CPU, *TINY, "--batch", "1", "--context-lengths", "8", "--dtypes", "--phase", "step"]
    code, out, err = run(*arguments)
    assert code == 0, err
    assert "outputs of Linear" in out and "loss" in out
    code, _, err = run(*arguments, "forward")
    assert (code, "profile a single row (one kernel, problem and shape), not 2" in err) == (2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "huge"], "unknown size of model 'huge'"),
        (["--set", "heads=7"], "d_model 768 must be a multiple of the number of heads (7)"),
        (
            ["--size", "1b", "--set", "kv_heads=5"],
            "the number of query heads (32) must be a multiple of the number of kv heads (5)",
        ),
        (["--attention", "sdpa-flesh"], "unknown attention kernel 'sdpa-flesh'"),
        (["--phase", "backward"], "invalid choice: 'backward'"),
        (["--phase", "step", "--set", "phase=step"], "phase is set twice"),
    ],
)
def test_a_wrong_option_is_explained_in_one_line(run, options, message):
    code, out, err = run(*ON_CPU, *options)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_a_dry_run_shows_the_memory_that_a_model_needs(run):
    code, out, _ = run(*ON_CPU, "--set", "layers=99999999", "--context-lengths", "64", "--dtype", "fp32", "--dry-run")
    assert code == 0
    assert "memory: 2.84e+06 GB for the largest row, without its activations" in out
    assert "will end as out_of_memory" in out
