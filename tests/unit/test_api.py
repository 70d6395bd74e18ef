"""Test the Python API: rows arrive one by one, logs are written, and arguments may be text as on the command line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import mamf
from mamf.errors import DeviceError, IncomparableError, RunLogError, UnavailableError, UsageError
from mamf.logs.writer import RunLogWriter
from mamf.testing import SimulatedBackend

KERNEL = "mamf.testing:SimulatedMatmul"


@pytest.fixture
def backend():
    return SimulatedBackend()


def sweep_two_shapes(backend, **options):
    return mamf.sweep(["2048x2048x2048", "4096x4096x4096"], backend=backend, kernel=KERNEL, **options)


def test_a_sweep_that_the_caller_ends_early_leaves_an_interrupted_log(backend, tmp_path):
    rows = sweep_two_shapes(backend, log=tmp_path / "run.jsonl")
    next(rows)
    rows.close()
    log = mamf.read_log(tmp_path / "run.jsonl")
    assert (len(log.measurements), log.tier, log.summary["reason"]) == (1, "interrupted", "by the caller")


def test_closing_a_sweep_whose_rows_were_never_read_unlocks_its_log(backend, tmp_path):
    rows = sweep_two_shapes(backend, log=tmp_path / "run.jsonl")
    with pytest.raises(UsageError, match="is writing"):
        RunLogWriter.resume(tmp_path / "run.jsonl")
    rows.close()
    log, writer = RunLogWriter.resume(tmp_path / "run.jsonl")
    writer.close()
    assert (log.measurements, log.tier) == ([], "interrupted")


def test_rows_are_flat(backend, tmp_path):
    list(sweep_two_shapes(backend, log=tmp_path / "run.jsonl"))
    row = mamf.read_log(tmp_path / "run.jsonl").rows()[0]
    assert {"shape.m", "tflops.median", "kernel", "regime"} <= row.keys()
    assert not [name for name, value in row.items() if isinstance(value, dict)]


def test_an_argument_is_one_value_or_a_list_of_values(backend):
    kernel = "mamf.testing:SimulatedAttention"
    rows = mamf.attention("b1h1q64k64d64", dtype=["bf16", "fp16"], kernel=kernel, regime="burst", backend=backend)
    assert [row.problem.dtype for row in rows] == ["bfloat16", "float16"]
    rows = mamf.sweep("2048x2048x2048", dtype="fp16", kernel=[KERNEL], regime=["burst", "sustained"], backend=backend)
    assert [(row.problem.dtype, row.regime) for row in rows] == [("float16", "burst"), ("float16", "sustained")]
    (row,) = mamf.sweep(kernel=KERNEL, backend=backend)
    assert str(row.shape) == "4096x4096x4096"


def test_a_dtype_may_be_a_dtype_of_torch(backend):
    class TorchDtype:  # str(torch.bfloat16) returns the same text
        def __str__(self):
            return "torch.bfloat16"

    (row,) = mamf.sweep(["64x64x64"], dtype=TorchDtype(), kernel=KERNEL, backend=backend)
    assert row.problem.dtype == "bfloat16"


def test_wrong_arguments_are_refused_before_anything_is_measured(backend):
    with pytest.raises(UsageError, match="not an attention shape"):
        mamf.attention(["nonsense"], backend=backend)
    with pytest.raises(UnavailableError, match="flash-attn-4"):
        mamf.attention(["b1h1q64k64d64"], backend=backend, kernel=["flash-attn-4"])
    with pytest.raises(UsageError, match="unknown operation 'nope'"):
        mamf.measure_kernels("nope", backend=backend)


def test_the_options_of_an_operation_are_keywords(backend):
    call = {"kernel": "mamf.testing:SimulatedAttention", "backend": backend}
    rows = mamf.attention(seq_lens=[64, "128"], head_dims="64/32", direction=["fwd", "bwd"], **call)
    assert [(row.problem.direction, str(row.shape)) for row in rows] == [
        (direction, f"b{16384 // keys}h32q{keys}k{keys}d64v32") for direction in ("fwd", "bwd") for keys in (64, 128)
    ]
    (row,) = mamf.sweep(m=1024, k=2048, layout="nn", kernel=KERNEL, backend=backend)
    assert (str(row.shape), row.problem.layout) == ("1024x4096x2048", "nn")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shapes": "8x8x8", "m": 4}, "shapes cannot be combined with m: give one or the other"),
        (
            {"problem": mamf.MatmulProblem(), "layout": "nn"},
            "problem cannot be combined with layout: give one or the other",
        ),
        ({"layout": "nx"}, "unknown layout 'nx'"),
        ({"layout": ["nt", "nn"]}, "this call takes one value"),
        ({"m": "4k"}, "'4k' is not a whole number"),
    ],
)
def test_a_keyword_with_a_wrong_value_is_refused(backend, options, message):
    with pytest.raises(UsageError, match=message):
        mamf.sweep(kernel=KERNEL, backend=backend, **options)


def test_a_find_without_a_confirmed_ceiling_leaves_an_interrupted_log(backend, tmp_path):
    with pytest.raises(DeviceError, match="no sustained ceiling"):
        mamf.find(
            backend=backend, kernel=[KERNEL], regime="sustained", budget_seconds=12.0, log=tmp_path / "find.jsonl"
        )
    log = mamf.read_log(tmp_path / "find.jsonl")
    assert (log.tier, log.summary["reason"]) == ("interrupted", "the budget ended")


def test_a_search_yields_its_rows_and_then_has_a_ceiling(machine):
    search = mamf.search("bfloat16", log="run.jsonl")
    with pytest.raises(DeviceError, match="no burst ceiling was confirmed"):
        assert search.ceiling
    rows = list(search)
    assert search.ceiling == mamf.find("bfloat16")
    assert [row.samples for row in mamf.read_log("run.jsonl").measurements] == [row.samples for row in rows]
    assert list(search) == []


@pytest.mark.parametrize("interrupted_round", [4, 5, 8])
def test_ctrl_c_in_a_callback_keeps_what_was_confirmed(machine, interrupted_round):
    def on_row(row):
        if (row.phase, row.round_number) == ("confirm", interrupted_round):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mamf.find("bfloat16", on_row=on_row, log="run.jsonl")
    log = mamf.read_log("run.jsonl")
    assert log.tier == "interrupted"
    assert log.ceilings["burst"].round_count in (interrupted_round - 1, interrupted_round)
    rules = {finding.rule for finding in mamf.check("run.jsonl").findings}
    assert not rules & {"ceiling-mismatch", "best-mismatch"}


def test_a_log_of_the_python_api_contains_the_findings_of_the_checks(machine):
    list(mamf.sweep(["2048x2048x2048"], log="run.jsonl"))
    assert "ok   host load: idle" in mamf.read_log("run.jsonl").header["findings"]
    assert not [finding for finding in mamf.check("run.jsonl").findings if "findings" in finding.message]


def test_compare_takes_logs_and_paths_of_logs(machine):
    before, after = mamf.read_log("before.jsonl"), mamf.read_log("after.jsonl")
    assert mamf.compare(before, "after.jsonl").rows() == mamf.compare("before.jsonl", after).rows()
    assert mamf.compare(before, after).rows()[0]["verdict"] == "SAME"
    with pytest.raises(IncomparableError):
        mamf.compare("sweep.jsonl", "attention.jsonl")


def test_an_imported_run_is_written_and_read_back(machine):
    (run,) = mamf.import_logs("finder.txt")
    mamf.write_imported(run, "finder.jsonl")
    assert mamf.read_log("finder.jsonl") == run
    assert mamf.check("finder.jsonl").tier == "legacy"
    with pytest.raises(RunLogError, match="no samples"):
        mamf.plot("finder.jsonl")


def test_the_version_is_the_one_in_pyproject():
    pyproject = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert f'\nversion = "{mamf.__version__}"\n' in pyproject


def test_importing_and_reading_load_no_torch(machine):
    code = "import sys, mamf; mamf.read_log('find.jsonl')._repr_html_(); print({'torch', 'numpy'} & set(sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mamf.find(budget="1s"), "did you mean 'budget_seconds'?"),
        (lambda: mamf.attention(seqlens=[4]), "did you mean 'seq_lens'?"),
        (lambda: mamf.sweep(num_iterations=5), "sweep() takes backend, budget_seconds, "),
    ],
)
def test_a_wrong_keyword_names_the_right_one(call, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        call()
