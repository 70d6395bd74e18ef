"""Test ``mamf counters`` on a simulated device, with a fake ncu that prints recorded output of the real one."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusals import assert_refused

from mamf.cli import main
from mamf.engine.launching import launch_in_profiler_window
from mamf.logs.run_log import read_run_log
from mamf.plugins import discovery
from mamf.profiling.counters import ncu
from mamf.profiling.counters.ncu import Ncu, run_and_capture_output
from mamf.testing import SimulatedBackend, SimulatedMatmul

RECORDED = (Path(__file__).parent / "data" / "ncu.csv").read_text().splitlines(keepends=True)
CSV_HEADER = next(line for line in RECORDED if line.startswith('"ID"'))
NO_PERMISSION = (
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters\n"
)
CRASH = "==ERROR== The application returned an error code (139).\n"
DEVICE = ["--backend", "mamf.testing:SimulatedBackend", "--ncu", sys.executable]
SHAPE = ["--shape", "4096x4096x4096"]
LOG = ["--output", "counters.jsonl"]


class FasterMatmul(SimulatedMatmul):
    name = "faster.mm"


MM, FASTER = "mamf.testing:SimulatedMatmul", "test_counters_command:FasterMatmul"
ATTENTION = "mamf.testing:SimulatedAttention"


def printed(recorded_ids, launches=5):
    """Return what ncu prints for several launches that run some of the recorded device kernels.

    ``recorded_ids``: the recorded IDs of the device kernels of one launch.
    """
    lines = []
    for index, recorded_id in enumerate(recorded_id for _ in range(launches) for recorded_id in recorded_ids):
        for line in RECORDED:
            if line.startswith(f'"{recorded_id}",'):
                lines.append(line.replace(f'"{recorded_id}"', f'"{index}"', 1))
    return f"==PROF== Disconnected from process 1\n{CSV_HEADER}{''.join(lines)}"


@pytest.fixture
def fake_ncu(monkeypatch):
    """Provide a device with counters, and a fake ncu.

    A test may set ``answers`` for a kernel: the stdout of ncu, its stdout and stderr, or an exception to raise. The
    fixture adds each command line of ncu to ``commands``.
    """
    commands, answers = [], {}

    def answer(command):
        commands.append(command)
        name = command[command.index("run") + 1]
        output = answers.get(name, printed([0]))
        if isinstance(output, BaseException):
            raise output
        return output if isinstance(output, tuple) else (output, "")

    monkeypatch.setattr(SimulatedBackend, "explain_missing_counters", lambda self: None)
    monkeypatch.setattr(ncu, "run_and_capture_output", answer)
    return SimpleNamespace(commands=commands, answers=answers)


def test_a_table_shows_the_cycles_the_burst_rate_and_the_bound_of_a_launch(run, fake_ncu):
    code, out, _ = run("counters", MM, FASTER, *DEVICE, *SHAPE, *LOG)
    assert code == 0
    assert "simulated.mm; faster.mm: bound by tensor pipe" in out
    (row,) = [line.split() for line in out.splitlines() if line.startswith("faster.mm ") and "285,342" in line]
    assert row[:3] == ["faster.mm", "285,342", "1.000"]
    assert 700 < float(row[3]) < 850
    assert row[4:7] == ["175.2", "1.02", "90.3"]
    assert row[-1] == "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"
    assert "bound by tensor pipe (90.3 % of its peak)" in out
    first, second = fake_ncu.commands
    run_arguments = first[first.index("run") :]
    assert run_arguments[:7] == ["run", MM, "--operation", "matmul", *SHAPE, "--dtype"]
    assert "layout=nt" in run_arguments
    assert run_arguments[-2:] == ["--launches", "5"]
    assert first[1:5] == ["--clock-control", "none", "--profile-from-start", "off"]
    assert second[second.index("run") + 1] == FASTER


@pytest.mark.parametrize(
    ("operation", "kernel"),
    [
        ("matmul", MM),
        ("attention", ATTENTION),
        ("bandwidth", "mamf.testing:SimulatedBandwidth"),
        ("model", "mamf.testing:SimulatedModel"),
    ],
)
def test_mamf_run_accepts_the_command_that_ncu_starts(backend, monkeypatch, operation, kernel):
    """Check that the ``mamf run`` command that ncu starts launches the right problem and shape."""
    spec = discovery.make_operation(operation)
    problem, shape = spec.make_problem(backend, {}), spec.choose_default_shapes(backend)[0]
    command = Ncu("ncu", DEVICE[1], 0, launch_count=2).make_command(kernel, problem, shape)
    launches = []

    def launch(kernel, *arguments):
        launches.append(arguments)
        return launch_in_profiler_window(kernel, *arguments)

    monkeypatch.setattr("mamf.engine.launching.launch_in_profiler_window", launch)
    assert main(command[command.index("run") :]) == 0
    assert launches[0][:2] == (problem, shape)
    assert launches[0][3] == 2


def test_counters_are_shown_in_every_format(run, fake_ncu):
    run("counters", MM, FASTER, *DEVICE, *SHAPE, *LOG)
    table = run("show", "counters.jsonl")[1]
    assert "simulated.mm; faster.mm: bound by tensor pipe" in table
    document = json.loads(run("show", "counters.jsonl", "--format", "json")[1])
    assert [record["device_kernel"] for record in document["counters"]].count("total") == 2
    assert document["counters"][0]["smsp__inst_executed.sum"] == 16575297
    csv_lines = run("show", "counters.jsonl", "--format", "csv")[1].splitlines()
    assert len(csv_lines) == 1 + 2 * 2
    assert "gpc__cycles_elapsed.max" in csv_lines[0].split(",")
    assert "| faster.mm | 285,342 |" in run("show", "counters.jsonl", "--format", "markdown")[1]
    code, out, _ = run("results", "check", "counters.jsonl")
    assert (code, "which results/ does not collect" in out) == (1, True)


# -- failures --------------------------------------------------------------------------------------------------------


def test_without_permission_the_burst_is_measured_and_the_remedy_printed(run, fake_ncu, tmp_path):
    fake_ncu.answers[MM] = NO_PERMISSION
    code, out, _ = run("counters", MM, FASTER, *DEVICE, *SHAPE, *LOG)
    assert code == 2
    assert "ERR_NVGPUCTRPERM" in out
    assert "NVreg_RestrictProfilingToAdminUsers=0" in out
    assert len(fake_ncu.commands) == 1
    fake_ncu.answers.clear()
    assert run("counters", MM, FASTER, *DEVICE, *SHAPE, "--resume", "counters.jsonl")[0] == 0
    log = read_run_log(tmp_path / "counters.jsonl")
    assert len(log.measurements) == 2
    assert [record["record"] for record in log.counter_records] == ["counters", "counters"]


def test_a_kernel_that_crashes_is_a_row_without_counts(run, fake_ncu):
    fake_ncu.answers[MM] = CRASH, "mamf: it broke\n"
    code, out, _ = run("counters", MM, FASTER, *DEVICE, *SHAPE, *LOG)
    assert code == 0
    assert "simulated.mm: not counted: mamf: it broke / The application returned an error code (139)." in out
    assert run("counters", MM, *DEVICE, *SHAPE, "--output", "alone.jsonl")[0] == 1
    assert "not counted" in run("show", "counters.jsonl")[1]


def test_a_kernel_that_failed_is_counted_again_when_resumed(run, fake_ncu, tmp_path):
    fake_ncu.answers[MM] = CRASH
    run("counters", MM, *DEVICE, *SHAPE, *LOG)
    fake_ncu.answers[MM] = printed([0], launches=7)
    assert run("counters", MM, *DEVICE, "--launches", "7", "--resume", "counters.jsonl")[0] == 0
    assert "7" in fake_ncu.commands[-1]
    assert len(read_run_log(tmp_path / "counters.jsonl").measurements) == 1
    command_count = len(fake_ncu.commands)
    assert run("counters", MM, *DEVICE, "--resume", "counters.jsonl")[0] == 0
    assert len(fake_ncu.commands) == command_count


def test_ctrl_c_during_counting_leaves_a_log_that_can_be_resumed(run, fake_ncu, tmp_path):
    fake_ncu.answers[FASTER] = KeyboardInterrupt()
    assert run("counters", MM, FASTER, *DEVICE, *SHAPE, *LOG)[0] == 130
    assert read_run_log(tmp_path / "counters.jsonl").summary["status"] == "interrupted"
    fake_ncu.answers.clear()
    assert run("counters", MM, FASTER, *DEVICE, "--resume", "counters.jsonl")[0] == 0
    assert read_run_log(tmp_path / "counters.jsonl").summary["status"] == "complete"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"cycles": ["many"]}, "field cycles[0]: expected `float`, got `str`"),
        ({"cycles": [0]}, "the cycles of a launch must be above 0"),
        ({"kernels": [{"name": "x"}]}, "field kernels[0]: missing field `grid`"),
    ],
)
def test_a_damaged_log_is_refused_in_one_line(run, fake_ncu, tmp_path, damage, message):
    run("counters", MM, *DEVICE, *SHAPE, *LOG)
    path = tmp_path / "counters.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    (counters,) = [record for record in records if record["record"] == "counters"]
    counters.update(damage)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    code, out, err = run("show", "counters.jsonl")
    assert (code, out) == (2, "")
    assert message in err


def test_a_missing_ncu_is_refused_in_one_line(run, fake_ncu, tmp_path):
    result = run("counters", MM, *DEVICE[:2], "--ncu", "nowhere/ncu", *SHAPE, *LOG)
    assert_refused(result, "nowhere/ncu is not an executable program: install NVIDIA Nsight Compute")
    assert not (tmp_path / LOG[1]).exists()


# -- ncu as a process ------------------------------------------------------------------------------------------------


def test_counters_work_with_a_profiler_that_runs_its_program(run, fake_ncu, monkeypatch, tmp_path):
    """Check the whole path with a script in place of ncu. It runs the program and prints recorded output of ncu."""
    (tmp_path / "printed.csv").write_text(printed([0]))
    script = tmp_path / "ncu"
    lines = ["import pathlib, subprocess, sys", "program = sys.argv[sys.argv.index(sys.executable) :]"]
    lines += ["subprocess.run(program, check=True)", "print(pathlib.Path('printed.csv').read_text())"]
    script.write_text("\n".join([f"#!{sys.executable} -S", *lines]))
    script.chmod(0o755)
    monkeypatch.setattr(ncu, "run_and_capture_output", run_and_capture_output)
    code, out, _ = run("counters", MM, *DEVICE[:2], "--ncu", "./ncu", *SHAPE, *LOG)
    assert code == 0
    assert "simulated.mm: bound by tensor pipe (90.3 % of its peak)" in out


def test_an_interrupt_ends_the_profiler(monkeypatch):
    started = []

    def interrupt(self, *arguments):
        started.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_and_capture_output([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    (process,) = started
    assert process.returncode is not None
    assert process.returncode != 0
