"""Test ``mamf counters`` on a simulated device, with a fake ncu that prints recorded output of the real one."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mamf.cli import main
from mamf.engine.launching import launch_in_profiler_window
from mamf.logs.run_log import read_run_log
from mamf.plugins import discovery
from mamf.profiling.counters import ncu
from mamf.profiling.counters.ncu import Ncu, run_and_capture_output
from mamf.testing import SimulatedBackend, SimulatedMatmul

RECORDED = (Path(__file__).parent / "data" / "ncu.csv").read_text().splitlines(keepends=True)
HEAD = next(line for line in RECORDED if line.startswith('"ID"'))
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


def printed(of, launches=5, cycles=None):
    """Return what ncu prints for several launches that run some of the recorded device kernels.

    ``of``: the recorded IDs of the device kernels of one launch. ``cycles``: the elapsed cycles of the first device
    kernel; each later one has one cycle more. By default all have their recorded cycles.
    """
    lines = []
    for place, number in enumerate(number for _ in range(launches) for number in of):
        for line in RECORDED:
            if line.startswith(f'"{number}",'):
                line = line.replace(f'"{number}"', f'"{place}"', 1)
                head, name, _ = line.partition('"gpc__cycles_elapsed.max"')
                lines.append(f'{head}{name},"cycle","{cycles + place:,}"\n' if name and cycles else line)
    return f"==PROF== Disconnected from process 1\n{HEAD}{''.join(lines)}"


@pytest.fixture
def counted(monkeypatch):
    """Provide a device with counters, and a fake ncu.

    A test may set ``answers`` for a kernel: the stdout of ncu, its stdout and stderr, or an exception to raise. The
    fixture adds each command line of ncu to ``commands``.
    """
    commands, answers = [], {}

    def answer(command):
        commands.append(command)
        name = command[command.index("run") + 1]
        said = answers.get(name, printed([0]))
        if isinstance(said, BaseException):
            raise said
        return said if isinstance(said, tuple) else (said, "")

    monkeypatch.setattr(SimulatedBackend, "explain_missing_counters", lambda self: None)
    monkeypatch.setattr(ncu, "run_and_capture_output", answer)
    return SimpleNamespace(commands=commands, answers=answers)


def test_a_launch_its_cycles_its_burst_and_what_bounds_it(run, counted):
    code, out, _ = run("counters", MM, FASTER, *DEVICE, *SHAPE, *LOG)
    assert code == 0
    assert "simulated.mm; faster.mm: bound by tensor pipe" in out
    (row,) = [line.split() for line in out.splitlines() if line.startswith("faster.mm ") and "285,342" in line]
    assert row[:3] == ["faster.mm", "285,342", "1.000"]
    assert 700 < float(row[3]) < 850
    assert row[4:7] == ["175.2", "1.02", "90.3"]
    assert row[-1] == "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"
    assert "bound by tensor pipe (90.3 % of its peak)" in out
    first, second = counted.commands
    asked = first[first.index("run") :]
    assert asked[:7] == ["run", MM, "--operation", "matmul", *SHAPE, "--dtype"]
    assert "layout=nt" in asked
    assert asked[-2:] == ["--launches", "5"]
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
def test_what_it_asks_for_is_understood_by_mamf_run(backend, monkeypatch, operation, kernel):
    """Check that the ``mamf run`` command that ncu starts launches the right problem and shape."""
    of = discovery.make_operation(operation)
    problem, shape = of.make_problem(backend, {}), of.choose_default_shapes(backend)[0]
    command = Ncu("ncu", DEVICE[1], 0, launch_count=2).make_command(kernel, problem, shape)
    launched = []

    def launch(kernel, *asked):
        launched.append(asked)
        return launch_in_profiler_window(kernel, *asked)

    monkeypatch.setattr("mamf.engine.launching.launch_in_profiler_window", launch)
    assert main(command[command.index("run") :]) == 0
    assert launched[0][:2] == (problem, shape)
    assert launched[0][3] == 2


def test_it_is_shown_in_every_format(run, counted):
    run("counters", MM, FASTER, *DEVICE, *SHAPE, *LOG)
    table = run("show", "counters.jsonl")[1]
    assert "simulated.mm; faster.mm: bound by tensor pipe" in table
    told = json.loads(run("show", "counters.jsonl", "--format", "json")[1])
    assert [each["device_kernel"] for each in told["counters"]].count("total") == 2
    assert told["counters"][0]["smsp__inst_executed.sum"] == 16575297
    csv = run("show", "counters.jsonl", "--format", "csv")[1].splitlines()
    assert len(csv) == 1 + 2 * 2
    assert "gpc__cycles_elapsed.max" in csv[0].split(",")
    assert "| faster.mm | 285,342 |" in run("show", "counters.jsonl", "--format", "markdown")[1]
    code, out, _ = run("results", "check", "counters.jsonl")
    assert (code, "which results/ does not collect" in out) == (1, True)


# -- failures --------------------------------------------------------------------------------------------------------


def test_without_permission_the_burst_is_there_and_the_remedy_told(run, counted, tmp_path):
    counted.answers[MM] = NO_PERMISSION
    code, out, _ = run("counters", MM, FASTER, *DEVICE, *SHAPE, *LOG)
    assert code == 2
    assert "ERR_NVGPUCTRPERM" in out
    assert "NVreg_RestrictProfilingToAdminUsers=0" in out
    assert len(counted.commands) == 1
    counted.answers.clear()
    assert run("counters", MM, FASTER, *DEVICE, *SHAPE, "--resume", "counters.jsonl")[0] == 0
    log = read_run_log(tmp_path / "counters.jsonl")
    assert len(log.measurements) == 2
    assert [each["record"] for each in log.counter_records] == ["counters", "counters"]


def test_a_kernel_that_crashes_is_a_row_without_counts(run, counted):
    counted.answers[MM] = CRASH, "mamf: it broke\n"
    code, out, _ = run("counters", MM, FASTER, *DEVICE, *SHAPE, *LOG)
    assert code == 0
    assert "simulated.mm: not counted: mamf: it broke / The application returned an error code (139)." in out
    assert run("counters", MM, *DEVICE, *SHAPE, "--output", "alone.jsonl")[0] == 1
    assert "not counted" in run("show", "counters.jsonl")[1]


def test_what_failed_is_counted_again_when_resumed(run, counted, tmp_path):
    counted.answers[MM] = CRASH
    run("counters", MM, *DEVICE, *SHAPE, *LOG)
    counted.answers[MM] = printed([0], launches=7)
    assert run("counters", MM, *DEVICE, "--launches", "7", "--resume", "counters.jsonl")[0] == 0
    assert "7" in counted.commands[-1]
    assert len(read_run_log(tmp_path / "counters.jsonl").measurements) == 1
    asked = len(counted.commands)
    assert run("counters", MM, *DEVICE, "--resume", "counters.jsonl")[0] == 0
    assert len(counted.commands) == asked


def test_ctrl_c_while_it_counts_leaves_a_log_that_goes_on(run, counted, tmp_path):
    counted.answers[FASTER] = KeyboardInterrupt()
    assert run("counters", MM, FASTER, *DEVICE, *SHAPE, *LOG)[0] == 130
    assert read_run_log(tmp_path / "counters.jsonl").summary["status"] == "interrupted"
    counted.answers.clear()
    assert run("counters", MM, FASTER, *DEVICE, "--resume", "counters.jsonl")[0] == 0
    assert read_run_log(tmp_path / "counters.jsonl").summary["status"] == "complete"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ({"cycles": ["many"]}, "field cycles[0]: expected `float`, got `str`"),
        ({"cycles": [0]}, "the cycles of a launch must be above 0"),
        ({"kernels": [{"name": "x"}]}, "field kernels[0]: missing field `grid`"),
    ],
)
def test_a_damaged_log_is_refused_in_a_line(run, counted, tmp_path, damage, told):
    run("counters", MM, *DEVICE, *SHAPE, *LOG)
    path = tmp_path / "counters.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    (record,) = [each for each in records if each["record"] == "counters"]
    record.update(damage)
    path.write_text("".join(f"{json.dumps(each)}\n" for each in records))
    code, out, err = run("show", "counters.jsonl")
    assert (code, out) == (2, "")
    assert told in err


# -- ncu as a process ------------------------------------------------------------------------------------------------


def test_the_whole_way_through_a_profiler_that_runs_its_program(run, counted, monkeypatch, tmp_path):
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


def test_an_interrupt_ends_the_profiler_and_what_it_started(monkeypatch):
    started = []

    def interrupted(self, *arguments):
        started.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_and_capture_output([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    (process,) = started
    assert process.returncode is not None
    assert process.returncode != 0
