"""Test that mamf imports nothing because a log names it.

mamf imports only code that the command line names or that an entry point registers.
"""

import json
import sys
from pathlib import Path

import pytest
from made_plans import search_plan
from made_rates import ceiling
from refusals import assert_refused
from test_attention import KERNELS

from mamf import load_ceiling, measure_kernels
from mamf.cli import main
from mamf.errors import MamfWarning
from mamf.logs.recording import make_plan_record
from mamf.logs.records import make_ceiling_record
from mamf.logs.run_log import read_run_log
from mamf.operations.matmul.shapes import MatmulGrid, MatmulProblem
from mamf.testing import SimulatedBackend

DEVICE = ["--backend", "mamf.testing:SimulatedBackend"]
MATMUL = ["--kernel", "mamf.testing:SimulatedMatmul"]
SMALL = ["--m", "256", "--n", "256", "--k", "256"]
ATTENTION = ["--kernel", *KERNELS, "--seq-lens", "512", "--no-ceiling"]
ATTENTION_SHAPE = ["--kernel", KERNELS[0], "--shapes", "b1h16q512k512d64"]
#: By name: a command, the options that make its log, and the options that resume this log.
RUNS = {
    "sweep": (["sweep"], [*SMALL, *MATMUL], MATMUL),
    "find": (["find"], ["--regime", "burst", "--budget", "1s", *MATMUL], MATMUL),
    "attention": (["attention"], ATTENTION, ["--kernel", *KERNELS]),
    "operation": (["sweep", "--operation", "attention"], ATTENTION_SHAPE, ["--kernel", KERNELS[0]]),
}


@pytest.fixture
def is_evil_imported(tmp_path, monkeypatch):
    """Provide a module ``evil``. Return a function that says whether it was imported."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "evil.py").write_text("import pathlib\npathlib.Path('imported').touch()\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield lambda: (tmp_path / "imported").exists()
    sys.modules.pop("evil", None)


@pytest.fixture(scope="module")
def logs_by_command(tmp_path_factory):
    """Return the text of a log of each command."""
    folder, logs = tmp_path_factory.mktemp("made"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mamf.engine.search.grid._SIZES_PER_DIMENSION", 4)
        for name, (command, options, _) in RUNS.items():
            main([*command, *DEVICE, *options, "--output", str(folder / name)])
            logs[name] = (folder / name).read_text()
    return logs


@pytest.fixture
def write_log(logs_by_command, tmp_path):
    """Return a function that writes the log of a command with changed records, and without the last record."""

    def write(name, change):
        records = [json.loads(line) for line in logs_by_command[name].splitlines()]
        for record in records:
            change(record)
        (tmp_path / "run.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records[:-1]))

    return write


def name_evil_backend(record):
    if record["record"] == "header":
        record["device"]["backend"] = "evil:X"


def name_evil_kernel(record):
    if record["record"] == "header":
        record["kernel"] = "evil:X"
        record["plan"]["kernels"] = ["evil:X"]


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]], ids=["measure", "dry-run"])
@pytest.mark.parametrize("name", RUNS)
def test_a_backend_or_kernel_that_a_log_names_is_not_imported(write_log, run, is_evil_imported, name, dry_run):
    command, _, resume_options = RUNS[name]
    write_log(name, name_evil_backend)
    message = (
        "run.jsonl uses backend evil:X, which is not an installed plugin: if you trust its code, add --backend evil:X"
    )
    assert_refused(run(*command, *resume_options, "--resume", "run.jsonl", *dry_run), message)
    (run.folder / "run.jsonl").unlink()
    write_log(name, name_evil_kernel)
    message = (
        "run.jsonl uses kernel evil:X, which is not an installed plugin: if you trust its code, add --kernel evil:X"
    )
    assert_refused(run(*command, *DEVICE, "--resume", "run.jsonl", *dry_run), message)
    assert not is_evil_imported()
    assert run(*command, *DEVICE, "--kernel", "evil:X", "--resume", "run.jsonl", *dry_run)[0] == 2
    assert is_evil_imported()


@pytest.mark.parametrize("name", RUNS)
def test_a_log_is_resumed_with_the_kernels_that_the_command_names(write_log, run, name):
    command, _, resume_options = RUNS[name]
    write_log(name, lambda record: None)
    assert run(*command, *DEVICE, *resume_options, "--resume", "run.jsonl", "--dry-run")[0] == 0


@pytest.mark.parametrize("command", [["show"], ["compare", "run.jsonl"], ["results", "check"]])
@pytest.mark.parametrize("name", RUNS)
def test_reading_a_log_imports_nothing(write_log, run, is_evil_imported, name, command):
    write_log(name, lambda record: (name_evil_backend(record), name_evil_kernel(record)))
    run(*command, "run.jsonl")
    assert not is_evil_imported()


CEILING = ["attention", *DEVICE, *ATTENTION[:-1], "--ceiling", "run.jsonl"]
DRIFT_NOT_MEASURED = "is not installed, so the drift of the device is not measured"


def write_log_with_ceiling(write_log, kernel):
    """Write a log with a ceiling that was measured with the given kernel.

    A ceiling contains the name that the class of the kernel has, not the path of the class on a command line.
    """
    write_log("find", lambda record: None)
    record = make_ceiling_record(ceiling(400.0, device="Simulated H100", kernel=kernel))
    with Path("run.jsonl").open("a") as log:
        log.write(json.dumps({"record": "ceiling", **record}) + "\n")


@pytest.mark.parametrize("kernel", ["evil:X", "simulated.mm"])
def test_a_ceiling_makes_shares_without_its_kernel_which_is_not_imported(write_log, run, is_evil_imported, kernel):
    write_log_with_ceiling(write_log, kernel)
    code, _, err = run(*CEILING, "--output", "out.jsonl")
    assert code == 0
    message = (
        f"kernel {kernel}, with which the ceiling was measured, {DRIFT_NOT_MEASURED}: name the kernel's class with "
    )
    assert err.count(f"{message}--ceiling-kernel package.module:Class\n") == 1
    rows = read_run_log("out.jsonl").measurements
    assert not [row for row in rows if row.is_reference]
    assert not [row for row in rows if "reference_tflops" in row.details]
    document = json.loads(run("show", "out.jsonl", "--format", "json")[1])
    assert all(row["mamfu"] for row in document["measurements"])
    assert not is_evil_imported()


def test_the_kernel_of_a_ceiling_is_measured_between_rows_if_the_command_names_it(write_log, run):
    write_log_with_ceiling(write_log, "simulated.mm")
    code, _, err = run(*CEILING, "--ceiling-kernel", *MATMUL[1:], "--output", "out.jsonl")
    assert (code, DRIFT_NOT_MEASURED in err) == (0, False)
    rows = read_run_log("out.jsonl").measurements
    assert {row.kernel for row in rows if row.is_reference} == {"simulated.mm"}
    assert all("reference_tflops" in row.details for row in rows if not row.is_reference)


def test_the_library_measures_the_kernel_of_a_ceiling_if_the_caller_names_it(write_log, run):
    write_log_with_ceiling(write_log, "simulated.mm")
    ceilings = {("bfloat16", "burst"): load_ceiling("run.jsonl")}

    def measure_references(**options):
        backend = SimulatedBackend()
        rows = measure_kernels(
            "attention", "b1h16q512k512d64", ceilings=ceilings, backend=backend, kernel=KERNELS, **options
        )
        return [row.kernel for row in rows if row.is_reference]

    with pytest.warns(MamfWarning, match=DRIFT_NOT_MEASURED):
        assert measure_references() == []
    assert set(measure_references(ceiling_kernel=MATMUL[1:])) == {"simulated.mm"}


def test_the_kernels_of_a_search_are_not_imported(write_log, run, is_evil_imported):
    def name_evil_kernel_in_search(record):
        if record["record"] == "header":
            search = search_plan(MatmulProblem(), ("evil:X",), MatmulGrid((64,), (64,), (64,)))
            record["plan"]["searches"] = [make_plan_record(search)]

    write_log("attention", name_evil_kernel_in_search)
    result = run("attention", *DEVICE, *ATTENTION[:3], "--resume", "run.jsonl")
    assert_refused(result, "used kernel evil:X, which is not installed")
    assert not is_evil_imported()
