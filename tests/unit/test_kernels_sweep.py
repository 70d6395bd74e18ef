"""Kernels of any operation by one command, in virtual time."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Literal

import pytest
from rendering import render

from mamf.cli.planning import read_fields
from mamf.logs.run_log import read_run_log
from mamf.report.text import label_kernel

DEVICE = ["--backend", "mamf.testing:SimulatedBackend"]
KERNEL = ["--kernel", "mamf.testing:SimulatedAttention"]
SHAPES = ["--shapes", "b1h16q512k512d64", "b1h16q1024k1024d64"]
ATTENTION = ["sweep", "--operation", "attention", *DEVICE]


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


# -- a table that never wraps ------------------------------------------------------------------------------------------


@pytest.fixture
def log(run, tmp_path):
    run(*ATTENTION, *KERNEL, *SHAPES, "--output", "run.jsonl")
    return read_run_log(tmp_path / "run.jsonl")


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
