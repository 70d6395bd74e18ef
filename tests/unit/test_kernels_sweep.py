"""Kernels of any operation by one command, in virtual time."""

import argparse
import dataclasses
import io
import json
import sys
from types import SimpleNamespace
from typing import Literal

import pytest
from rendering import render

from mamf.cli.planning import read_fields
from mamf.cli.terminal import table_columns
from mamf.errors import UsageError
from mamf.logs.run_log import read_run_log
from mamf.report.text import label_kernel

DEVICE = ["--backend", "mamf.testing:SimulatedBackend"]
KERNEL = ["--kernel", "mamf.testing:SimulatedAttention"]
SHAPES = ["--shapes", "b1h16q512k512d64", "b1h16q1024k1024d64"]
ATTENTION = ["sweep", "--operation", "attention", *DEVICE]


def test_an_operation_of_mamf_is_measured_like_any(run, tmp_path):
    code, out, _ = run(*ATTENTION, *KERNEL, *SHAPES, "--set", "direction=fwd,bwd", "--output", "run.jsonl")
    assert code == 0
    assert "simulated-attention" in out
    log = read_run_log(tmp_path / "run.jsonl")
    assert len(log.measurements) == 4
    assert {row.problem.direction for row in log.measurements} == {"fwd", "bwd"}
    assert log.summary["status"] == "complete"


def test_a_budget_ends_it_and_the_rest_is_resumed(run, tmp_path):
    asked = [*KERNEL, "--shapes", "b8h16q4096k4096d128", "b8h16q8192k8192d128", "--regime", "burst", "sustained"]
    run(*ATTENTION, *asked, "--budget", "0.01s", "--output", "run.jsonl")
    summary = read_run_log(tmp_path / "run.jsonl").summary
    assert (summary["status"], summary["reason"]) == ("interrupted", "the budget ended")
    assert summary["left"] > 0
    assert run(*ATTENTION, *asked, "--resume", "run.jsonl")[0] == 0
    assert read_run_log(tmp_path / "run.jsonl").summary["left"] == 0


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--regime", "sustained"], "about 2 s, and more to prepare"),
        (["--time-limit", "20s"], "about 20 s, and more to prepare"),
        (["--time-limit", "20s", "--budget", "7s"], "at most 7 s, the budget"),
    ],
)
def test_a_dry_run_says_how_long_the_rows_take(run, asked, told):
    code, out, _ = run(*ATTENTION, *KERNEL, "--shapes", "b8h16q4096k4096d128", *asked, "--dry-run")
    assert (code, f"time: {told}" in out) == (0, True), out


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--operation", "atention"], "unknown operation 'atention' (did you mean 'attention'?)"),
        (["--operation"], "argument --operation: expected one argument"),
        (["--operation", "attention", *KERNEL, "--set", "direction=up"], "'up'"),
        (["--operation", "attention", "--set", "seed=x"], "attention's seed: 'x' is not a whole number"),
        (["--operation", "attention", "--set", "seed=1", "seed=2"], "--set seed=2: it is set twice"),
        (["--operation", "attention", "--regime", "classic"], "invalid choice: 'classic'"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(run, given, told):
    code, out, err = run("sweep", *DEVICE, *given)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert told in err


def test_bandwidth_measures_every_pattern_by_default(run, tmp_path):
    asked = [*DEVICE, "--kernel", "mamf.testing:SimulatedBandwidth", "--size", "1GiB"]
    assert run("bandwidth", *asked, "--output", str(tmp_path / "run.jsonl"))[0] == 0
    rows = read_run_log(tmp_path / "run.jsonl").measurements
    assert sorted(row.problem.pattern for row in rows) == ["copy", "read", "triad", "write"]


def test_kernels_of_one_operation_are_listed_alone(run):
    code, out, _ = run("kernels", *DEVICE, "--operation", "attention")
    assert code == 0
    assert "\nattention:\n" in out
    assert "matmul" not in out
    assert run("kernels", *DEVICE, "--operation", "nobodys")[0] == 2


# -- fields of a problem -----------------------------------------------------------------------------------------------


def asked(**kinds):
    """An operation whose problem has fields of these kinds."""
    problem = dataclasses.make_dataclass("Problem", kinds.items(), frozen=True)
    return SimpleNamespace(name="op", problem_type=problem)


@pytest.mark.parametrize(
    ("kind", "text", "values"),
    [
        (int, "1,2", [1, 2]),
        (float, "0.5", [0.5]),
        (str, "a,b", ["a", "b"]),
        (bool, "yes,no", [True, False]),
        (int | None, "none,3", [None, 3]),
        (Literal["copy", "read"], "read", ["read"]),
    ],
)
def test_values_are_of_the_fields_type(kind, text, values):
    assert read_fields(asked(field=kind), [f"field={text}"]) == {"field": values}


@pytest.mark.parametrize(("kind", "text"), [(bool, "maybe"), (Literal["copy"], "cpy"), (dict, "x"), (int, "1.5")])
def test_values_of_another_type_are_refused(kind, text):
    with pytest.raises(UsageError, match="op's field"):
        read_fields(asked(field=kind), [f"field={text}"])


# -- a table that never wraps ------------------------------------------------------------------------------------------


@pytest.fixture
def log(run, tmp_path):
    run(*ATTENTION, *KERNEL, *SHAPES, "--output", "run.jsonl")
    return read_run_log(tmp_path / "run.jsonl")


@pytest.mark.parametrize("width", [40, 50, 80, 200])
def test_no_line_of_a_table_is_wider_than_the_terminal(log, width):
    text = render("table", log.measurements, log.header, log.summary, None, width)
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("kernel"))
    kept = lines[begin].replace("% of peak", "peak").split()
    assert max(len(line) for line in lines[begin : begin + 2]) <= width
    left_out = next((line for line in lines if line.startswith("hidden columns")), "")
    assert bool(left_out) == ("launches" not in kept) == (width < 200)
    assert all(name not in left_out.partition(": ")[2].split(", ") for name in kept)


@pytest.mark.parametrize("form", ["table", "markdown", "html"])
def test_kernels_that_were_loaded_by_path_are_labeled_for_people(log, form):
    path = "mamf.testing:SimulatedAttention"
    text = render(form, log.measurements, log.header, log.summary)
    assert "simulated-attention (by path)" in text
    assert f"kernel by path: {path}" in text
    named = {**log.header, "plan": {**log.header["plan"], "kernels": ["simulated-attention"]}}
    assert "by path" not in render(form, log.measurements, named, log.summary)
    both = {**log.header, "plan": {**log.header["plan"], "kernels": ["torch", path, "cublaslt"]}}
    labels = [label_kernel(name, both) for name in ("torch", "cublaslt[3]", "simulated-attention")]
    assert labels == ["torch", "cublaslt[3]", "simulated-attention (by path)"]
    assert {
        row["kernel"] for row in json.loads(render("json", log.measurements, log.header, None))["measurements"]
    } == {"simulated-attention"}


def test_pipes_and_wide_show_all(log, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    assert table_columns(argparse.Namespace(wide=False)) is None
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    assert table_columns(argparse.Namespace(wide=False)) == 40
    assert table_columns(argparse.Namespace(wide=True)) is None


def test_rows_without_a_figure_are_named_below(log):
    first, *others = log.measurements
    failed = dataclasses.replace(first, status="failed", reason="it broke", summary=None, samples=())
    text = render("table", [failed, *others], log.header, log.summary)
    assert f"{first.kernel} {first.shape}: failed: it broke" in text
    alone = render("markdown", [failed], log.header, None)
    assert "it broke" in alone
    assert "killed" in alone
    flat = json.loads(render("json", [failed], log.header, None))["measurements"]
    assert (flat[0]["status"], flat[0]["rate_mean_tflops"]) == ("failed", None)
