"""``mamf counters``: kernels counted under a profiler that prints what the real one printed, on a simulated device."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from mamf.cli import main
from mamf.errors import UnavailableError
from mamf.logs.run_log import read_run_log
from mamf.plugins import discovery
from mamf.profiling.counters import counting
from mamf.profiling.counters.counting import Counter
from mamf.profiling.counters.running import Output, output_of
from mamf.testing import SimulatedBackend, SimulatedMatmul

RECORDED = (Path(__file__).parent / "data" / "ncu.csv").read_text().splitlines(keepends=True)
HEAD = next(line for line in RECORDED if line.startswith('"ID"'))
PREPARED = '{"preparing_seconds": 1.5, "is_deterministic": true}\n'
NO_PERMISSION = (
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters\n"
)
CRASH = "==ERROR== The application returned an error code (139).\n"
DEVICE = ["--backend", "mamf.testing:SimulatedBackend", "--ncu", sys.executable]
SHAPE = ["--shape", "4096x4096x4096"]
LOG = ["--output", "counters.jsonl"]


class FasterMatmul(SimulatedMatmul):
    name = "faster.mm"


class Algorithm(SimulatedMatmul):
    """One of three, as cuBLASLt has them."""

    def __init__(self, rank=None):
        self.name = "ranked" if rank is None else f"ranked[{rank}]"

    def variants(self, backend, problem, shape):
        return [Algorithm(rank) for rank in range(3)]


MM, FASTER = "mamf.testing:SimulatedMatmul", "test_counters_command:FasterMatmul"
ATTENTION = "mamf.testing:SimulatedAttention"


def printed(of, launches=5, cycles=None):
    """What ncu prints of some of the recorded kernels, launched several times; ``cycles``: of the first, then one more
    each.
    """
    lines = []
    for place, number in enumerate(number for _ in range(launches) for number in of):
        for line in RECORDED:
            if line.startswith(f'"{number}",'):
                line = line.replace(f'"{number}"', f'"{place}"', 1)
                head, name, _ = line.partition('"gpc__cycles_elapsed.max"')
                lines.append(f'{head}{name},"cycle","{cycles + place:,}"\n' if name and cycles else line)
    return f"{PREPARED}==PROF== Disconnected from process 1\n{HEAD}{''.join(lines)}"


@pytest.fixture
def counted(monkeypatch):
    """The device has counters, and ncu answers what a test says by kernel; returns the commands that it was given."""
    commands, answers = [], {}

    def answer(command):
        commands.append(command)
        if "--import" in command:
            return Output(answers["report"], "")
        name = command[command.index("run") + 1]
        said = answers.get(name, printed([0]))
        if isinstance(said, BaseException):
            raise said
        return said if isinstance(said, Output) else Output(said, "")

    monkeypatch.setattr(SimulatedBackend, "without_counters", lambda self: None)
    monkeypatch.setattr(counting, "output_of", answer)
    return SimpleNamespace(commands=commands, answers=answers)


def test_a_launch_its_cycles_its_burst_and_what_bounds_it(run, counted):
    code, out, _ = run("counters", MM, FASTER, *DEVICE, *SHAPE, *LOG)
    assert code == 0
    assert "bandwidth roof: 3.350 TB/s, datasheet" in out
    assert "no MAMFU: no ceiling was measured here" in out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert lines["simulated.mm"][:5] == ["simulated.mm", "and", "1", "more:", "bound"]
    (row,) = [line.split() for line in out.splitlines() if line.startswith("faster.mm ") and "285,342" in line]
    assert row[:3] == ["faster.mm", "285,342", "1.000"]
    assert 700 < float(row[3]) < 850
    assert row[4:7] == ["175.2", "90.3", "1.02"]
    assert row[-1] == "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"
    assert "bound by tensor pipe: 90.3 % of its peak" in out
    first, second = counted.commands
    asked = first[first.index("run") :]
    assert asked[:7] == ["run", MM, "--operation", "matmul", *SHAPE, "--dtype"]
    assert "layout=nt" in asked
    assert asked[-4:] == ["--launches", "5", "--format", "json"]
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
def test_what_it_asks_for_is_understood_by_mamf_run(backend, capsys, operation, kernel):
    """Every field of a problem, of every operation."""
    of = discovery.operation(operation)
    problem, shape = of.problem_for(backend, {}), of.default_shapes(backend)[0]
    command = Counter("ncu", DEVICE[1], 0, launches=2).command(kernel, problem, shape)
    assert main(command[command.index("run") :]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["operation"], told["shape"], len(told["seconds"])) == (operation, str(shape), 2)
    assert told["problem"] == of.problem_record(problem)


def test_attention_is_asked_for_by_its_sizes(run, counted):
    sizes = ["--seq-lens", "1024", "--heads", "2", "--causal", "--direction", "fwd", "bwd"]
    assert run("counters", ATTENTION, *DEVICE, *sizes, *LOG)[0] == 0
    assert [command[command.index("--shape") + 1] for command in counted.commands] == ["b16h2q1024k1024d128c"] * 2
    assert ["direction=fwd" in command for command in counted.commands] == [True, False]


def test_a_budget_ends_it_and_the_rest_is_resumed(run, counted, tmp_path):
    asked = [MM, FASTER, *DEVICE, *SHAPE]
    assert run("counters", *asked, "--budget", "0.01s", *LOG)[0] in (0, 1)
    summary = read_run_log(tmp_path / "counters.jsonl").summary
    assert (summary["status"], summary["reason"]) == ("interrupted", "the budget ended")
    assert run("counters", *asked, "--resume", "counters.jsonl")[0] == 0
    assert len(counted.commands) == 2


def test_a_launch_of_several_kernels_has_a_line_for_each(run, counted):
    counted.answers[ATTENTION] = printed(range(3, 8))
    code, out, _ = run("counters", ATTENTION, *DEVICE, "--seq-lens", "4096", "--direction", "bwd", *LOG)
    assert code == 0
    (total,) = [line for line in out.splitlines() if "1,442,759" in line]
    assert total.startswith("simulated-attention ")
    assert total.endswith("5 kernels")
    assert "  flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel  1,287,427" in out
    assert "simulated-attention: bound by launch: its 5 kernels are at work for" in out


def test_it_is_shown_in_every_format_compared_and_drawn(run, counted, tmp_path):
    run("counters", MM, FASTER, *DEVICE, *SHAPE, *LOG)
    table = run("show", "counters.jsonl")[1]
    assert "and 1 more: bound by tensor pipe" in table
    told = json.loads(run("show", "counters.jsonl", "--format", "json")[1])
    assert [each["device_kernel"] for each in told["counters"]].count("total") == 2
    assert told["counters"][0]["smsp__inst_executed.sum"] == 16575297
    csv = run("show", "counters.jsonl", "--format", "csv")[1].splitlines()
    assert len(csv) == 1 + 2 * 2
    assert "gpc__cycles_elapsed.max" in csv[0].split(",")
    assert "| faster.mm | 285,342 |" in run("show", "counters.jsonl", "--format", "markdown")[1]
    assert run("plot", "counters.jsonl", "--output", "cycles.svg")[0] == 0
    assert (tmp_path / "cycles.svg").stat().st_size > 5000
    code, out, _ = run("results", "check", "counters.jsonl")
    assert (code, "results/ does not collect it" in out) == (1, True)


@pytest.mark.parametrize(
    ("cycles", "verdict", "code"), [(285_342, "SAME", 0), (300_000, "SLOWER", 3), (270_000, "FASTER", 0)]
)
def test_two_logs_are_compared_by_cycles(run, counted, cycles, verdict, code):
    run("counters", MM, *DEVICE, *SHAPE, "--output", "a.jsonl")
    counted.answers[MM] = printed([0], cycles=cycles)
    run("counters", MM, *DEVICE, *SHAPE, "--output", "b.jsonl")
    found, out, _ = run("compare", "a.jsonl", "b.jsonl")
    assert found == code
    assert verdict in out
    (row,) = json.loads(run("compare", "a.jsonl", "b.jsonl", "--format", "json")[1])["rows"]
    assert (row["verdict"], row["cycles_b"]) == (verdict, cycles + 2)
    assert run("compare", "a.jsonl", "b.jsonl", "--format", "csv")[1].count("\n") == 2


def test_logs_without_a_kernel_in_common_are_not_compared(run, counted):
    run("counters", MM, *DEVICE, *SHAPE, "--output", "a.jsonl")
    run("counters", FASTER, *DEVICE, *SHAPE, "--output", "b.jsonl")
    code, _, err = run("compare", "a.jsonl", "b.jsonl")
    assert (code, "no kernel was counted on the same shape" in err) == (2, True)


def test_mamfu_is_of_a_given_ceiling_and_bandwidth_of_a_measured_one(run, counted, library_logs):
    ceiling = ["--ceiling", str(library_logs / "find.jsonl")]
    code, out, _ = run("counters", MM, *DEVICE, *SHAPE, *ceiling, *LOG)
    assert code == 0
    assert "compute roof: " in out
    assert "TFLOPS, measured: bfloat16 at" in out
    share = float(next(line for line in out.splitlines() if "285,342" in line).split()[4].removesuffix("%"))
    assert 80 < share < 110
    assert f"{share:.1f}%" in run("show", "counters.jsonl")[1]
    code, _, err = run("counters", MM, *DEVICE, *SHAPE, "--bandwidth-ceiling", ceiling[1])
    assert (code, "holds no bandwidth in burst" in err) == (2, True)


def test_algorithms_are_counted_each_by_its_name(run, counted, monkeypatch):
    others = discovery.entry_points
    point = EntryPoint("ranked", "test_counters_command:Algorithm", discovery.KERNELS)
    own = {discovery.KERNELS: [point]}
    monkeypatch.setattr(discovery, "entry_points", lambda group: [*others(group=group), *own.get(group, [])])
    counted.answers |= {f"ranked[{rank}]": printed([0], cycles=280_000 - 9000 * rank) for rank in range(3)}
    code, out, _ = run("counters", "ranked", "--operation", "matmul", "--variants", *DEVICE, *SHAPE, *LOG)
    assert code == 0
    assert [command[command.index("run") + 1] for command in counted.commands] == [
        f"ranked[{rank}]" for rank in range(3)
    ]
    assert "fewest cycles: ranked[2]; fastest in burst: " in out
    err = run("counters", MM, "--variants", *DEVICE, *SHAPE, "--output", "b.jsonl")[2]
    assert "no variants to choose from: mamf.testing:SimulatedMatmul" in err


def test_bytes_a_second_of_a_burst_are_not_those_of_the_dram(run, counted):
    kernel = "mamf.testing:SimulatedBandwidth"
    counted.answers[kernel] = printed([8])
    code, out, _ = run("counters", kernel, *DEVICE, "--shape", "1GiB", *LOG)
    assert code == 0
    assert "no MAMFU" not in out
    (row,) = [line.split() for line in out.splitlines() if "360,148" in line]
    assert (row[3][:3], row[6]) == ("3.0", "4.28")


# -- what goes wrong -------------------------------------------------------------------------------------------------


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
    assert [each["record"] for each in log.counter_records] == ["roof", "counters", "counters"]


def test_a_kernel_that_crashes_is_a_row_without_counts(run, counted):
    counted.answers[MM] = Output(CRASH, "mamf: it broke\n")
    code, out, _ = run("counters", MM, FASTER, *DEVICE, *SHAPE, *LOG)
    assert code == 0
    assert "simulated.mm: not counted: mamf: it broke / The application returned an error code (139)." in out
    assert run("counters", MM, *DEVICE, *SHAPE, "--output", "alone.jsonl")[0] == 1
    code, _, err = run("plot", "alone.jsonl")
    assert (code, "no cycles were counted" in err) == (2, True)
    assert "not counted" in run("show", "counters.jsonl")[1]


def test_what_failed_is_counted_again_when_resumed(run, counted, tmp_path):
    counted.answers[MM] = CRASH
    run("counters", MM, *DEVICE, *SHAPE, *LOG)
    counted.answers.clear()
    assert run("counters", MM, *DEVICE, "--resume", "counters.jsonl")[0] == 0
    assert len(read_run_log(tmp_path / "counters.jsonl").measurements) == 1
    asked = len(counted.commands)
    assert run("counters", MM, *DEVICE, "--resume", "counters.jsonl")[0] == 0
    assert len(counted.commands) == asked


def test_how_it_counts_is_no_part_of_the_plan(run, counted):
    counted.answers[MM] = CRASH
    run("counters", MM, *DEVICE, *SHAPE, *LOG)
    counted.answers[MM] = printed([0], launches=7)
    how = ["--launches", "7", "--metrics", "no_such__metric.sum", "--set", "full"]
    assert run("counters", MM, *DEVICE, *how, "--resume", "counters.jsonl")[0] == 0
    assert {"no_such__metric.sum", "full"} <= set(" ".join(counted.commands[-1]).replace(",", " ").split())


def test_a_missing_log_begins_when_queued(run, counted, tmp_path):
    for _ in range(2):
        assert run("counters", MM, *DEVICE, *SHAPE, "--resume", "queued.jsonl")[0] == 0
    assert len(read_run_log(tmp_path / "queued.jsonl").counter_records) == 2


def test_launches_that_differ_are_not_added_up(run, counted):
    counted.answers[MM] = printed([0, 1, 2], launches=1)
    assert "3 kernels of 5 launches are not the same in each of them" in run("counters", MM, *DEVICE, *SHAPE, *LOG)[1]


def test_ctrl_c_while_it_counts_leaves_a_log_that_goes_on(run, counted, tmp_path):
    counted.answers[FASTER] = KeyboardInterrupt()
    assert run("counters", MM, FASTER, *DEVICE, *SHAPE, *LOG)[0] == 130
    assert read_run_log(tmp_path / "counters.jsonl").summary["status"] == "interrupted"
    counted.answers.clear()
    assert run("counters", MM, FASTER, *DEVICE, "--resume", "counters.jsonl")[0] == 0
    assert read_run_log(tmp_path / "counters.jsonl").summary["status"] == "complete"


def test_further_metrics_all_of_them_and_the_report(run, counted, tmp_path):
    counted.answers["report"] = printed([0])
    asked = ["--metrics", "no_such__metric.sum", "--set", "full", "layout=nn", "--report", "mm"]
    code, _, err = run("counters", MM, *DEVICE, *SHAPE, *asked, *LOG)
    assert code == 0
    assert "ncu has no figure of no_such__metric.sum on this device" in err
    counting_command, reading_command = counted.commands
    assert counting_command[counting_command.index("--set") + 1] == "full"
    assert counting_command[counting_command.index("--export") + 1] == "mm.ncu-rep"
    assert "layout=nn" in counting_command
    assert reading_command[1:3] == ["--import", "mm.ncu-rep"]
    (tmp_path / "mm.ncu-rep").write_text("")
    code, _, err = run("counters", MM, *DEVICE, *SHAPE, "--report", "mm", "--output", "b.jsonl")
    assert (code, "mm.ncu-rep exists: name another --report" in err) == (2, True)


def test_columns_that_are_asked_for(run, counted):
    code, out, _ = run("counters", MM, *DEVICE, *SHAPE, "--columns", "preparing", "determinism", *LOG)
    assert code == 0
    columns, row = (line.split() for line in out.splitlines() if "preparing" in line or "285,342" in line)
    assert "--determinism" in counted.commands[0]
    assert (row[4], row[5], columns[4], columns[5]) == ("1.5", "equal", "preparing", "determinism")
    (told, _) = json.loads(run("show", "counters.jsonl", "--format", "json")[1])["counters"]
    assert (told["preparing_seconds"], told["is_deterministic"], told["configuration"]) == (1.5, True, None)


def test_which_of_its_own_ways_a_kernel_ran(run, counted, tmp_path):
    assert run("counters", MM, *DEVICE, *SHAPE, *LOG)[0] == 0
    lines = []
    for line in (tmp_path / "counters.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["record"] == "measurement":
            record["details"] = {**record.get("details", {}), "configuration": "128x256x64/8w3s"}
        lines.append(json.dumps(record) + "\n")
    (tmp_path / "tuned.jsonl").write_text("".join(lines))
    (told, _) = json.loads(run("show", "tuned.jsonl", "--format", "json")[1])["counters"]
    assert told["configuration"] == "128x256x64/8w3s"


def test_a_dry_run_says_the_commands(run, counted, tmp_path):
    code, out, _ = run("counters", MM, *DEVICE, *SHAPE, "--dry-run")
    assert (code, counted.commands, list(tmp_path.iterdir())) == (0, [], [])
    assert "counted by: " in out
    assert "--clock-control none --profile-from-start off" in out


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            [MM, *SHAPE, "--ncu", "nowhere/ncu"],
            "nowhere/ncu is not an executable program: install NVIDIA Nsight Compute",
        ),
        ([*DEVICE], "nothing to count: name a KERNEL of 'mamf kernels'"),
        (
            [MM, *DEVICE, *SHAPE],
            "mamf reads hardware counters with NVIDIA's ncu, which does not support Simulated H100",
        ),
        ([MM, *DEVICE, "--shape", "4096"], "'4096'"),
        ([MM, *DEVICE, "--set", "everything"], "unknown field of matmul 'everything'"),
        (["--resume", "nowhere.jsonl", *DEVICE], "cannot read nowhere.jsonl"),
    ],
)
def test_bad_input_is_told_in_a_line(run, given, told):
    code, out, err = run("counters", *given)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert told in err


def test_without_ncu_it_is_told_what_can_be_had(run, monkeypatch):
    monkeypatch.setenv("PATH", "")
    code, _, err = run("counters", MM, *SHAPE)
    assert code == 2
    assert "ncu, which reads the counters, is not on PATH" in err
    assert "rates need none ('mamf sweep', 'mamf attention')" in err


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ({"cycles": ["many"]}, "field cycles[0]: a finite number is due, not 'many'"),
        ({"cycles": [0]}, "cycles of a launch that are not a positive number"),
        ({"kernels": [{"name": "x"}]}, "field kernels[0].grid is missing"),
        ({"shape": {"m": "wide"}}, "counters"),
    ],
)
def test_a_damaged_log_is_refused_in_a_line(run, counted, tmp_path, damage, told):
    run("counters", MM, *DEVICE, *SHAPE, *LOG)
    path = tmp_path / "counters.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    (record,) = [each for each in records if each["record"] == "counters"]
    record.update(damage)
    path.write_text("".join(f"{json.dumps(each)}\n" for each in records))
    for command in (["show"], ["plot"], ["compare", "counters.jsonl"]):
        code, out, err = run(*command, "counters.jsonl")
        assert (code, out) == (2, "")
        assert told in err


# -- the profiler as a process ---------------------------------------------------------------------------------------


def test_a_profiler_is_run_and_read(tmp_path):
    fake = "import sys; print(sys.argv[1:]); print('==ERROR== no', file=sys.stderr)"
    assert output_of([sys.executable, "-S", "-c", fake, "--csv"]) == Output("['--csv']\n", "==ERROR== no\n")
    with pytest.raises(UnavailableError, match="cannot run"):
        output_of([str(tmp_path / "nothing")])


def test_the_whole_way_through_a_profiler_that_runs_its_program(run, counted, monkeypatch, tmp_path):
    """ncu is a script here that runs what it is told to, and prints what the real one did."""
    (tmp_path / "printed.csv").write_text(printed([0]).removeprefix(PREPARED))
    script = tmp_path / "ncu"
    lines = ["import pathlib, subprocess, sys", "program = sys.argv[sys.argv.index(sys.executable) :]"]
    lines += ["subprocess.run(program, check=True)", "print(pathlib.Path('printed.csv').read_text())"]
    script.write_text("\n".join([f"#!{sys.executable} -S", *lines]))
    script.chmod(0o755)
    monkeypatch.setattr(counting, "output_of", output_of)
    code, out, _ = run("counters", MM, *DEVICE[:2], "--ncu", "./ncu", *SHAPE, *LOG)
    assert code == 0
    assert "simulated.mm: bound by tensor pipe: 90.3 % of its peak" in out


def test_an_interrupt_ends_the_profiler_and_what_it_started(monkeypatch):
    started = []

    def interrupted(self, *arguments):
        started.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        output_of([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    (process,) = started
    assert process.returncode is not None
    assert process.returncode != 0
