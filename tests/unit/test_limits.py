"""Test that mamf refuses impossible requests. The command line prints one line, exits with 2 and leaves no files. The
library raises a MamfError.
"""

import io
import math
import os
import re
import sys
from contextlib import redirect_stderr
from dataclasses import fields
from datetime import datetime

import pytest
from made_plans import kernels_plan, search_plan, sweep_plan
from made_rates import ceiling
from refusals import assert_refused

import mamf
from mamf.backend import CheckResult
from mamf.cli import main
from mamf.errors import MAX_RUN_ROWS, MamfError, MamfWarning, UsageError, count_values, require_rows_within_limit
from mamf.logs.run_log import read_run_log
from mamf.operation import parse_range
from mamf.operations.attention.operation import AttentionProblem
from mamf.operations.bandwidth.operation import BandwidthShape
from mamf.operations.batched import BatchedShape
from mamf.operations.grouped import GroupedShape
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape, matmul_grid
from mamf.operations.model.operation import ModelShape
from mamf.testing import SimulatedBackend

DEVICE = ["--backend", "mamf.testing:SimulatedBackend"]
KERNEL = ["--kernel", "mamf.testing:SimulatedMatmul"]
SWEEP = ["sweep", *DEVICE, *KERNEL]
FIND = ["find", *DEVICE, *KERNEL]
RUN = ["run", KERNEL[1], *DEVICE, "--shape", "4096x4096x4096"]
RUN_ATTENTION = ["run", "mamf.testing:SimulatedAttention", *DEVICE]
COUNTERS = ["counters", KERNEL[1], *DEVICE, "--ncu", sys.executable, "--shape", "4096x4096x4096"]
ATTENTION = ["attention", *DEVICE, "--kernel", "mamf.testing:SimulatedAttention", "--no-ceiling"]
NINES, TOO_MANY_NINES = "9" * 400, "9" * 5000
SIZES = list(map(str, range(1, 101)))
CLOSED_STDOUT_MESSAGE = "cannot print, because stdout is closed: redirect it to a file or to /dev/null"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([*SWEEP, "--m-range", "0", "1000000000", "1"], "the run has 999999999 rows, but at most 1000000 can"),
        ([*SWEEP, "--m-range", "0", "1001", "1", "--k-range", "0", "1003", "1"], "1002000 rows"),
        ([*SWEEP, "--m-range", "0", "9" * 19, "1"], "9999999999999999998 rows"),
        ([*SWEEP, "--m-range", "0", TOO_MANY_NINES, "1"], "(5000 characters) is too large"),
        ([*SWEEP, "--m", TOO_MANY_NINES], "(5000 characters) is too large"),
        ([*SWEEP, "--seed", str(2**63)], "seed must be at most 9223372036854775807, not 9223372036854775808"),
        ([*SWEEP, "--budget", NINES], "(400 characters)' is not a duration"),
        ([*FIND, "--budget", "0.000000001s"], "is too short, because a bfloat16 matmul"),
        (
            [*ATTENTION, "--seq-lens", *SIZES, "--heads", *SIZES, "--batch", *SIZES, "--window", *SIZES],
            "rows, but at most",
        ),
        ([*ATTENTION, "--causal", "yes", "--no-causal"], "not allowed with argument --causal"),
        ([*ATTENTION, "--baseline", "nope"], "unknown baseline 'nope'; known: simulated-attention"),
        ([*SWEEP, "--output", ""], "argument --output: the value is empty"),
        (["show", ""], "argument LOG: the value is empty"),
        (["kernels", "--operation"], "argument --operation: expected one argument"),
        (["show", "a" * 5000], "File name too long"),
        ([*SWEEP, "--resume", "/dev/null"], "cannot resume /dev/null: it is not a regular file"),
        (
            [*SWEEP[:3], "--kernel", "::"],
            "'::' is not a kernel: write package.module:Class, or a name from 'mamf kernels'",
        ),
        (["sweep", "--backend", ":"], "':' is not a backend"),
        (
            ["doctor", "--backend", "mamf.backend:Backend"],
            "mamf.backend:Backend is abstract: define __init__,",
        ),
        (["doctor", "--backend", "mamf.torch_backend:TorchBackend"], "is abstract: define compute_seconds_between,"),
        ([*SWEEP, "--m-range", "0", "10", "-1"], "--m-range: the range 0 10 -1 is invalid"),
        ([*SWEEP, "--m-range", "512", "512", "256"], "--m-range: the range 512 512 256 is empty"),
        ([*SWEEP, "--", "x"], "unexpected argument 'x'"),
        ([*SWEEP, "--m", "0"], "whole number of at least 1"),
        ([*SWEEP, "--shapes", "1x2"], "write MxNxK"),
        ([*SWEEP, "--shapes", "1x2x3", "--m", "4"], "--shapes cannot be combined with --m"),
        ([*SWEEP, "--dtype", "int8"], "does not support matmuls of integers"),
        ([*SWEEP, "--regime", "brust"], "did you mean burst?"),
        ([*SWEEP, "--precison", "1%"], "did you mean --precision?"),
        ([*SWEEP, "--budget", "-5s"], "a duration must be above 0, not -5s"),
        ([*SWEEP, "--M", "512"], "unknown option '--M' (did you mean --m?)"),
        ([*SWEEP, "--seq-lens", "8"], "--seq-lens is an option of attention, not of matmul"),
        (
            ["attention", "--preset", "llama-8b-decode", "--direction", "bwd"],
            "--direction is an option of attention, not of decode",
        ),
        (["attention", "--graph"], "--graph is an option of decode, not of attention"),
        ([*SWEEP, "--output", "/proc/run.jsonl"], "cannot write /proc/run.jsonl: No such file or directory"),
        (["peak", "H100"], "unexpected argument 'H100': write --name 'H100', or see --help"),
        (["peak", "--name", "nosuch"], "no known name is similar; mamf/device_names.csv lists the names"),
        (["results"], "'mamf results' needs an action: check, submit, table or site"),
        (["show", "."], "run 'mamf report .', which makes a page of all its logs"),
        ([*SWEEP, "--precision", "-.3%"], "'-.3%' is not a share"),
        ([*SWEEP, "--output", "nowhere/run.jsonl"], "cannot write nowhere"),
        ([*SWEEP, "--device", "7"], "no device 7"),
        ([*FIND, "--regime", "classic"], "invalid choice: 'classic'"),
        (
            [*FIND, "--kernel", "mamf.testing:SimulatedMatmul", "cublaslt"],
            "kernel cublaslt is not available on simulated",
        ),
        ([*FIND, "--kernel", "torch.mm[3]"], "no algorithms to choose from"),
        ([*FIND, "--m", "4096"], "unknown option '--m'"),
        (
            [*SWEEP, "--dtype", "bf16", "int8"],
            "unexpected argument 'int8': --help shows how many values each option takes",
        ),
        (["sweep", *DEVICE, "--operation", "atention"], "unknown operation 'atention' (did you mean 'attention'?)"),
        (["sweep", *DEVICE, "--operation", "attention", *KERNEL, "--set", "direction=up"], "'up'"),
        (
            ["sweep", *DEVICE, "--operation", "attention", "--set", "seed=x"],
            "field seed of attention: 'x' is not a whole number",
        ),
        (
            ["sweep", *DEVICE, "--operation", "attention", "--set", "seed=1", "seed=2"],
            "--set seed=2: seed is set twice",
        ),
        (["sweep", "--preset", "moe"], "--operation grouped"),
        (["sweep", "--preset", "decode", "--n", "64"], "--preset decode cannot be combined with --n"),
        (["sweep", "--product", "grad-input"], "--preset"),
        (
            ["sweep", "--operation", "grouped", "--preset", "moe", "--shapes", "e1t1n1k1"],
            "--preset cannot be combined with --shapes",
        ),
        (["counters", *COUNTERS[2:6]], "no KERNEL is given: name at least one ('mamf kernels' lists the names)"),
        (
            [*COUNTERS[:4], "--ncu", "nowhere/ncu", *COUNTERS[6:]],
            "mamf reads hardware counters with NVIDIA's ncu, which does not support Simulated H100",
        ),
        ([*COUNTERS, "--shape", "4096"], "'4096'"),
        (["run", "sdpa-flsh"], "unknown kernel 'sdpa-flsh' (did you mean 'sdpa-flash'?)"),
        (
            ["run", "torch"],
            "several operations have a kernel torch (bandwidth, copies, model): choose one with --operation",
        ),
        (["run", "torch.mm", "--seq-lens", "5"], "unknown option '--seq-lens'"),
        ([*RUN_ATTENTION], "takes one shape, not 3: give --shape b1h16q4096k4096d128c"),
        ([*RUN_ATTENTION, "--seq-lens", "64", "128"], "takes one shape, not 2"),
        ([*RUN_ATTENTION, "--seq-lens", "64", "--shape", "b1h1q1k1d64"], "cannot be combined with --seq-lens"),
        ([*RUN, "--dtype", "fp16", "bf16"], "takes one problem, not 2: give one value per option"),
        ([*RUN, "--set", "direction=bwd"], "unknown field of matmul 'direction'"),
        ([*RUN, "--launches", "0"], "at least 1"),
        (["run", "nowhere:Kernel"], "kernel 'nowhere:Kernel' cannot be loaded"),
    ],
)
def test_an_impossible_request_is_refused_in_one_line_with_exit_code_2(run, tmp_path, arguments, complaint):
    assert_refused(run(*arguments), complaint)
    assert not list(tmp_path.iterdir())


def test_the_sizes_of_a_long_range_are_counted_without_listing_them():
    sizes = parse_range(0, 10**18, 1)
    assert count_values(sizes) == 10**18 - 1
    assert count_values(range(5, 6, 4)) == len(range(5, 6, 4))
    with pytest.raises(MamfError, match="rows, but at most"):
        matmul_grid(sizes, sizes, sizes)
    require_rows_within_limit(MAX_RUN_ROWS)
    with pytest.raises(MamfError, match="choose fewer sizes"):
        require_rows_within_limit(MAX_RUN_ROWS, 2)


# -- files and streams -------------------------------------------------------------------------------------------------


@pytest.fixture
def log(run, tmp_path):
    assert run(*SWEEP, "--m", "64", "--n", "64", "--k", "64", "--output", "run.jsonl")[0] == 0
    return tmp_path / "run.jsonl"


def test_a_closed_stdout_is_an_error_but_a_closed_stderr_is_not(run, log, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert run("show", "run.jsonl")[::2] == (2, f"mamf: {CLOSED_STDOUT_MESSAGE}\n")
    show_result = run("show", "run.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        assert run("show", "run.jsonl")[:2] == show_result[:2]
        assert run("show", "nothing.jsonl")[:2] == (2, "")


class ClosedPipe(io.StringIO):
    """A stream that nobody reads any longer, so each write raises BrokenPipeError."""

    def write(self, text):
        raise BrokenPipeError


def test_a_warning_that_cannot_be_printed_does_not_end_the_run(run, tmp_path, monkeypatch):
    finding = CheckResult("host load", "warning", "it is busy")
    monkeypatch.setattr("mamf.machine.environment.check_host_load", lambda: finding)
    with redirect_stderr(ClosedPipe()):
        assert main([*SWEEP, "--m", "64", "--n", "64", "--k", "64", "--output", "run.jsonl"]) == 0
    assert read_run_log(tmp_path / "run.jsonl").tier == "complete"


@pytest.mark.parametrize("format_name", ["markdown", "table"])
def test_a_warning_about_the_machine_is_in_the_report_of_the_log_once(run, monkeypatch, format_name):
    finding = CheckResult("host load", "warning", "it is busy", "rates are noisy")
    monkeypatch.setattr("mamf.machine.environment.check_host_load", lambda: finding)
    sizes = ["--m", "64", "--n", "64", "--k", "64"]
    code, out, err = run(*SWEEP, *sizes, "--output", "run.jsonl", "--format", format_name)
    assert (code, out.count("host load: it is busy"), err.count("host load: it is busy")) == (0, 1, 1)
    assert run("show", "run.jsonl", "--format", format_name)[1].count("WARN host load: it is busy") == 1
    with pytest.warns(MamfWarning, match="^WARN host load: it is busy; rates are noisy$"):
        mamf.sweep(["64x64x64"], backend=DEVICE[1], kernel=KERNEL[1], log=run.folder / "api.jsonl").close()


def test_a_log_may_come_through_a_pipe_and_is_shown_but_not_resumed(run, log):
    show_result = run("show", "run.jsonl")
    for command in (["show"], [*SWEEP, "--resume"]):
        read_end, write_end = os.pipe()
        os.write(write_end, log.read_bytes())
        os.close(write_end)
        result = run(*command, f"/dev/fd/{read_end}")
        os.close(read_end)
        if command == ["show"]:
            assert result == show_result
    assert result[0] == 2
    assert "is not a regular file" in result[2]


def test_runs_that_start_in_the_same_second_have_different_names(run, tmp_path, monkeypatch):
    class FixedTime(datetime):
        @classmethod
        def now(cls, zone=None):
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr("mamf.cli.session.datetime", FixedTime)
    for _ in range(3):
        assert run(*SWEEP, "--m", "64", "--n", "64", "--k", "64")[0] == 0
    name = "mamf-sweep-simulated-h100-bfloat16-burst-20260102-030405"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}-2.jsonl", f"{name}-3.jsonl", f"{name}.jsonl"]


# -- the library -------------------------------------------------------------------------------------------------------

SHAPE, PROBLEM = MatmulShape(64, 64, 64), MatmulProblem()
GRID = mamf.MatmulGrid((64,), (64,), (64,))
CEILING = ceiling(1.0)


def sweep_one_shape(**options):
    return mamf.sweep(["64x64x64"], backend=SimulatedBackend(), kernel="mamf.testing:SimulatedMatmul", **options)


def measure_attention(**options):
    return mamf.attention(["b1h1q64k64d64"], backend=SimulatedBackend(), **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: CEILING.compute_utilization(flop=1, seconds=0, regime="burst"),
            "seconds must be a number of seconds above 0, not 0",
        ),
        (lambda: CEILING.compute_utilization(flop=math.nan, seconds=1, regime="burst"), "of at least 0, not nan"),
        (lambda: sweep_one_shape(precision=0), r"precision must be a share between 0 and 1 \(such as 0.003\), not 0"),
        (lambda: sweep_one_shape(budget_seconds=0), "budget_seconds must be a number of seconds above 0, not 0"),
        (lambda: mamf.sweep([], backend=SimulatedBackend(), kernel="mamf.testing:SimulatedMatmul"), "no shapes"),
        (lambda: measure_attention(kernel=1), "every value of kernel must be a str, not 1"),
        (
            lambda: measure_attention(dtype="fp16", problem=mamf.AttentionProblem()),
            "problem cannot be combined with dtype",
        ),
        (lambda: measure_attention(problem="fp16"), "every value of problem must be a AttentionProblem, not 'fp16'"),
        (lambda: mamf.find(backend=SimulatedBackend(), kernel=[]), "no kernel"),
        (
            lambda: mamf.find(["bf16", "fp16"], backend=SimulatedBackend()),
            "dtype has 2 values .*, but this call takes one value",
        ),
        (
            lambda: mamf.sweep("64x64x64", kernel=["torch.mm", "triton"]),
            "kernel has 2 values .*, but this call takes one value",
        ),
        (lambda: MatmulShape(0, 1, 1), "M must be at least 1, not 0"),
        (
            lambda: MatmulShape(10**300, 1, 1),
            r"M must be at most 9223372036854775807, not 100000000000000000000000... \(301 characters\)",
        ),
        (lambda: BandwidthShape("1"), "bytes of an array must be a whole number, not 1"),
        (lambda: MatmulProblem(seed=-1), "seed must be at least 0, not -1"),
        (lambda: AttentionProblem(sparsity=math.nan), "sparsity must be .* not nan"),
        (lambda: sweep_plan((SHAPE,), PROBLEM, seconds=math.inf), "seconds must be .* not inf"),
        (lambda: sweep_plan((SHAPE,), PROBLEM, ()), "no regimes"),
        (lambda: search_plan(PROBLEM, ("torch.mm",), GRID, budget_seconds=-1), "budget_seconds must be .* not -1"),
        (
            lambda: kernels_plan("attention", (1,), (AttentionProblem(),), ("",)),
            "every value of kernels must be a str, not ''",
        ),
    ],
)
def test_an_invalid_call_raises_a_mamf_error_that_is_a_value_error(call, message):
    with pytest.raises(MamfError, match=message) as raised:
        call()
    assert isinstance(raised.value, ValueError)


def test_whole_numbers_of_other_libraries_are_accepted():
    numpy = pytest.importorskip("numpy")
    shape = MatmulShape(*numpy.array([64, 32, 16]))
    assert shape == MatmulShape(64, 32, 16)
    assert {type(size) for size in (shape.m, shape.n, shape.k)} == {int}


def test_a_text_can_contain_several_shapes():
    rows = mamf.sweep("64x64x64 128x64x64", backend=SimulatedBackend(), kernel="mamf.testing:SimulatedMatmul")
    assert {str(row.shape) for row in rows} == {"64x64x64", "128x64x64"}
    rows = mamf.sweep(SHAPE, backend=SimulatedBackend(), kernel="mamf.testing:SimulatedMatmul")
    assert [row.shape for row in rows] == [SHAPE]


@pytest.mark.parametrize("command", [["show"], ["import"], ["compare", "a"], ["plot"], ["sweep", "--resume"]])
def test_a_null_byte_is_refused_in_one_line(run, command):
    assert run(*command, "a\0b") == (2, "", "mamf: a\\x00b contains a null byte: remove this byte\n")


@pytest.mark.parametrize("shape_class", [BatchedShape, GroupedShape, ModelShape, MatmulShape])
def test_shapes_are_read_in_the_format_in_which_they_are_written(shape_class):
    shape = shape_class(*range(1, len(fields(shape_class)) + 1))
    assert shape_class.parse(f" {shape} ") == shape
    with pytest.raises(UsageError, match=f"'1x' is not {re.escape(shape_class.text_description)}"):
        shape_class.parse("1x")
    with pytest.raises(UsageError, match="must be at least 1"):
        shape_class(*([0] * len(fields(shape_class))))
