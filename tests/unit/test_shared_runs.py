"""Test runs with ``--devices``, which divide the rows among devices.

Each device has its own process and its own log, and mamf reads the logs as one run. If a device fails, its remaining
rows can be measured later.
"""

import csv
import io
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import inline_children
import pytest
import simulated_node
from contribution_logs import found
from forked import LONGEST_SECONDS, Child, Command
from refusals import assert_refused

from mamf.backend import SIBLING_CHECK, CheckResult
from mamf.ceilings.ceiling import compute_card_drift, compute_mamfu
from mamf.errors import UsageError
from mamf.kinds.registry import make_log_chart
from mamf.logs.compare import compare_logs
from mamf.logs.run_log import add_device_speeds, read_run_log
from mamf.logs.shared_runs import find_shared_run_logs, join_logs, read_log_or_shared_run
from mamf.operations import unknown
from mamf.operations.matmul.shapes import COMMON_MATMUL_SHAPE, MatmulShape
from mamf.plugins import discovery
from mamf.report.rows import describe_devices, select_ranked_rows
from mamf.testing import Physics, SimulatedAttention, SimulatedMatmul

SWEEP = ["sweep", "--backend", "simulated", "--output", "out", "--devices", "all"]
GRID = ["--m-range", "8192", "20480", "1024", "--n", "16384", "--k", "16384", "--precision", "20%"]
GRID_SHAPES = [MatmulShape(m, 16384, 16384) for m in range(8192, 20480, 1024)]
#: The speed of each device relative to the first.
SPEEDS = (1.0, 1.03, 0.98, 1.01)


@pytest.fixture(autouse=True)
def simulated_cards(monkeypatch):
    simulated_node.install(monkeypatch)
    monkeypatch.setitem(simulated_node.POINTS[discovery.BACKEND_GROUP], "simulated", "test_shared_runs:Card")
    unknown._get_installed_operation.cache_clear()
    yield
    unknown._get_installed_operation.cache_clear()


class Card(simulated_node.Node):
    """A simulated card with the speed that ``SPEEDS`` gives for its index."""

    def __init__(self, index=0):
        super().__init__(index)
        speed = SPEEDS[index]
        self.device_physics = replace(
            Physics(), flop_per_cycle_per_unit=round(4096 * speed), memory_bandwidth=3e12 * speed
        )
        self.info = replace(self.info, uuid_hash=f"card{index}", driver="580.1")


@pytest.fixture
def run_shared(run):
    """Return a function that runs a command on simulated devices, in this process and in virtual time.

    The function returns exit code, stdout and stderr, and the logs joined into one run. ``killed_devices``: the indices
    of devices whose process is killed at the start.
    """

    def command(*arguments, killed_devices=(), folder="out"):
        with pytest.MonkeyPatch.context() as patch:
            inline_children.install(patch, killed_devices)
            result = run(*arguments)
        return result, read_log_or_shared_run(run.folder / folder)

    return command


def select_planned_rows(log):
    """Return the rows of the plan itself, without visits of reference shapes and rows of a search for a ceiling."""
    return [row for row in log.measurements if not row.is_reference and not row.phase]


def test_shapes_are_divided_and_compared_at_the_speed_of_the_first_device(run, run_shared):
    (code, out, err), log = run_shared(*SWEEP, *GRID)
    assert (code, err, log.tier) == (0, "", "complete")
    assert sorted(row.shape for row in select_planned_rows(log)) == GRID_SHAPES
    assert [sum(row.device_index == device for row in select_planned_rows(log)) for device in range(4)] == [3, 3, 3, 3]
    for row in log.measurements:
        assert row.device_speed == pytest.approx(SPEEDS[row.device_index], rel=0.002)
    best = max(select_planned_rows(log), key=lambda row: row.comparable_rate)
    assert f"median) @ {best.shape} by simulated.mm" in out
    assert [device.uuid_hash for device in log.devices] == ["card0", "card1", "card2", "card3"]
    assert "device 2: Simulated H100, 132 compute units, 700 W limit, uuid card2" in out
    conditions = f"{best.conditions.watts:.0f} W; {best.conditions.celsius:.0f} C; device {best.device_index}"
    assert f"MHz (requested: 1980 MHz); {conditions}" in out
    for path in find_shared_run_logs(run.folder / "out"):
        log = read_run_log(path)
        assert log.measurements[0].is_reference and log.measurements[0].shape == GRID_SHAPES[6]
        assert (len(log.plan.list_row_keys()), log.tier, log.devices) == (3, "complete", [])
        assert found(path) == {"simulated"}


def test_only_a_run_on_one_device_warns_that_the_others_are_busy(run, run_shared, monkeypatch):
    busy = CheckResult(SIBLING_CHECK, "warning", "other devices of this machine that are busy: 3")
    monkeypatch.setattr(Card, "check_machine", lambda self: [busy])
    (_, out, err), log = run_shared(*SWEEP, *GRID)
    assert SIBLING_CHECK not in out + err and not any(part.header["findings"][1:] for part in log.part_logs)
    assert f"WARN {SIBLING_CHECK}: other devices" in run(*SWEEP[:3], "--shapes", "8192x8192x8192")[2]


# -- devices that fail, in virtual time --------------------------------------------------------------------------------


def test_other_devices_can_measure_the_shapes_of_a_device_that_failed(run_shared):
    (code, _, err), log = run_shared(*SWEEP, *GRID, killed_devices=(1,))
    assert (code, log.tier, log.summary["left"]) == (1, "interrupted", 3)
    assert len(select_planned_rows(log)) == 9 and 1 not in {row.device_index for row in select_planned_rows(log)}
    assert err == (
        "mamf: device 1 failed: its process ended early (phase: start): killed by SIGKILL, perhaps because memory ran "
        "out\n"
        "mamf: run 'mamf sweep --resume out' to measure the remaining rows; add --devices 0 2 3 to use only the "
        "other devices\n"
    )
    (code, _, _), log = run_shared("sweep", "--resume", "out", "--devices", "0", "2")
    assert (code, log.tier, len(select_planned_rows(log))) == (0, "complete", 12)
    assert {row.device_index for row in select_planned_rows(log)} == {0, 2, 3}
    log_of_resumed_run = run_shared("sweep", "--resume", "out")[1]
    assert len(log_of_resumed_run.all_rows) == len(log.all_rows), "resuming a complete run must measure nothing"


def test_one_device_can_measure_all_rows_that_a_budget_left_out(run_shared):
    (code, _, err), log = run_shared(*SWEEP, *GRID, "--budget", "2s")
    assert (code, err, log.summary["reason"]) == (0, "", "the budget ended")
    assert 0 < len(select_planned_rows(log)) == 12 - log.summary["left"] < 12
    (code, _, _), log = run_shared("sweep", "--resume", "out", "--devices", "3")
    assert (code, log.tier, len(select_planned_rows(log))) == (0, "complete", 12)
    assert len(log.part_logs) == 5


@pytest.mark.parametrize("devices", [["2"], ["0", "7"]])
def test_a_folder_is_resumed_only_by_the_devices_of_its_logs(run, run_shared, devices):
    run_shared(*SWEEP[:-1], "0", "1", *GRID, "--budget", "2s")
    code, _, err = run("sweep", "--resume", "out", "--devices", *devices)
    assert (code, err.count("out has no log of device")) == (2, 1)
    code, _, err = run("sweep", "--resume", "out", "--device", "0")
    assert (code, err.count("such as device0.jsonl (then leave out --device")) == (2, 1)


def test_another_command_does_not_resume_a_folder(run, run_shared):
    run_shared(*SWEEP, *GRID)
    code, out, err = run("bandwidth", "--resume", "out")
    assert (code, out) == (2, "")
    assert "device0.jsonl is the log of a sweep of matmul: resume it with 'mamf sweep --resume out'" in err


def test_the_options_of_a_run_may_be_repeated_but_not_changed(run_shared):
    resumed = ["sweep", "--backend", "simulated", "--devices", "all", "--requeue", "out"]
    (code, _, _), log = run_shared(*resumed, *GRID, "--budget", "2s")
    assert (code, log.tier) == (0, "interrupted")
    (code, _, err), _ = run_shared(*resumed, "--m", "8192", "--precision", "20%")
    assert code == 1 and "--shapes 8192x4096x4096 contradicts" in err
    (code, _, err), log = run_shared(*resumed, *GRID)
    assert (code, err, log.tier) == (0, "", "complete")


# -- processes ---------------------------------------------------------------------------------------------------------


def test_processes_share_a_sweep_without_those_whose_device_cannot_be_opened(run, monkeypatch):
    monkeypatch.setattr("mamf.node.children.start_child", Child)
    monkeypatch.setenv(simulated_node.DEVICES, "3")
    monkeypatch.setenv(simulated_node.FAULTS, json.dumps({"1": "closed", "2": "hangs"}))
    code, out, err = run(*SWEEP, *GRID, "--patience", "2s")
    log = read_log_or_shared_run(run.folder / "out")
    assert (code, len(select_planned_rows(log)), [device.index for device in log.devices]) == (1, 4, [0])
    assert "mamf: device 1 failed: the device cannot be opened\n" in err
    assert "mamf: device 2 failed: its process hangs: it sent no message for 2 s (phase: start)\n" in err
    assert "best burst" in out


class Hanging(SimulatedMatmul):
    """A kernel that hangs on device 1 until a signal arrives, but only at the first launch with M of ``m``.

    Device 1 reaches this M after its visit of the reference shape and after two rows.
    """

    name = "hanging.mm"
    m = GRID_SHAPES[5].m

    def make_launch_function(self, device, problem, shape):
        run, mark = super().make_launch_function(device, problem, shape), Path(f"hangs{device.index}")

        def launch(key):
            if shape.m == self.m and device.index == 1 and not mark.exists():
                mark.write_text(str(os.getpid()))
                time.sleep(LONGEST_SECONDS)
            run(key)

        return launch


ON_TWO = {simulated_node.DEVICES: "2"}


@pytest.fixture
def hanging_sweep(tmp_path, monkeypatch):
    """Return the process of a running sweep on two devices, and the process id of device 1.

    Device 1 hangs in a launch, and device 0 has finished its part of the sweep.
    """
    monkeypatch.setitem(simulated_node.POINTS[discovery.MATMUL_KERNEL_GROUP], "hanging.mm", "test_shared_runs:Hanging")

    def prepare():
        pytest.MonkeyPatch().setattr("mamf.node.children.start_child", Child)

    arguments = [*SWEEP, *GRID, "--order", "given", "--kernel", "hanging.mm"]
    process = Command(arguments, tmp_path, prepare, **ON_TWO)
    wait_for(lambda: (tmp_path / "hangs1").exists() and (tmp_path / "hangs1").read_text())
    log = tmp_path / "out" / "device0.jsonl"
    wait_for(lambda: log.exists() and read_run_log(log).tier == "complete")
    monkeypatch.chdir(tmp_path)
    return process, int(Path("hangs1").read_text())


def wait_for(is_reached):
    deadline = time.monotonic() + LONGEST_SECONDS
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def require_resumable(run_shared):
    """Check that both devices kept their rows, and that resuming the sweep measures the missing rows and no row twice.

    Device 1 loses only the row in which it hung.
    """
    before = read_log_or_shared_run(Path("out"))
    assert [sum(row.device_index == device for row in select_planned_rows(before)) for device in range(2)] == [6, 2]
    (code, _, err), log = run_shared("sweep", "--resume", "out")
    assert (code, err, log.tier, len(select_planned_rows(log))) == (0, "", "complete", 12)
    assert sum(not row.is_reference for row in log.all_rows) == 12


def test_ctrl_c_keeps_every_row(hanging_sweep, run_shared):
    process, child = hanging_sweep
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert (process.returncode, "best burst" in out) == (130, True)
    assert read_run_log(Path("out/device1.jsonl")).summary["reason"] == "by the user"
    assert not is_running(child)
    require_resumable(run_shared)


def test_killing_the_parent_ends_its_child_processes(hanging_sweep, run_shared):
    process, child = hanging_sweep
    process.kill()
    process.wait()
    wait_for(lambda: not is_running(child))
    assert read_run_log(Path("out/device1.jsonl")).summary["reason"] == "by the user"
    require_resumable(run_shared)


class Crashing(SimulatedMatmul):
    """A kernel that crashes the process at M = 8192, the first shape of ``GRID``."""

    name = "crashing.mm"

    def make_launch_function(self, device, problem, shape):
        run = super().make_launch_function(device, problem, shape)
        return lambda key: os.kill(os.getpid(), signal.SIGSEGV) if shape.m == 8192 else run(key)


def test_a_crash_fails_one_row_and_a_new_process_measures_the_rest(tmp_path, monkeypatch):
    monkeypatch.setitem(
        simulated_node.POINTS[discovery.MATMUL_KERNEL_GROUP], "crashing.mm", "test_shared_runs:Crashing"
    )

    def prepare():
        pytest.MonkeyPatch().setattr("mamf.cli.devices._end_run_when_parent_ends", lambda: None)

    arguments = ["sweep", "--backend", "simulated", *GRID, "--order", "given", "--kernel", "crashing.mm"]
    process = Command([*arguments, "--share", "0", "2", "--output", "device0.jsonl"], tmp_path, prepare)
    _, err = process.communicate()
    assert (process.returncode, err.count("crashed the process (SIGSEGV); a new process measures the rest")) == (0, 1)
    log = read_run_log(tmp_path / "device0.jsonl")
    assert [row.ok for row in select_planned_rows(log)] == [False, *[True] * 5]


# -- processes that a launcher starts ----------------------------------------------------------------------------------

RANKS = ["sweep", "--backend", "simulated", "--devices", "ranks", *GRID]


@pytest.mark.parametrize(
    "names", [("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")]
)
def test_ranks_share_a_run_by_the_variables_of_their_launcher(tmp_path, run, names):
    def run_ranks(*arguments):
        environments = [dict(zip(names, (str(rank), "2", str(rank)), strict=True)) for rank in range(2)]
        processes = [Command(arguments, tmp_path, **environment) for environment in environments]
        return [(*process.communicate(), process.returncode) for process in processes]

    results = run_ranks(*RANKS, "--output", "out", "--budget", "2s")
    assert [code for *_, code in results] == [0, 0]
    assert [out for out, *_ in results] == ["logs: out; run 'mamf show out' when all ranks have ended\n", ""]
    log = read_log_or_shared_run(tmp_path / "out")
    assert [part.path.name for part in log.part_logs] == ["rank0.jsonl", "rank1.jsonl"]
    assert [device.index for device in log.devices] == [0, 1]
    assert [code for *_, code in run_ranks("sweep", "--devices", "ranks", "--resume", "out")] == [0, 0]
    log = read_log_or_shared_run(tmp_path / "out")
    assert (log.tier, sorted(row.shape for row in select_planned_rows(log))) == ("complete", GRID_SHAPES)
    assert {row.device_index for row in select_planned_rows(log)} == {0, 1}
    code, _, err = run("sweep", "--resume", str(tmp_path / "out"))
    assert (code, "logs of ranks (then add --devices ranks)" in err) == (2, True)


def test_without_ranks_the_variables_of_a_launcher_mean_nothing(run, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    assert run("sweep", "--backend", "simulated", *GRID, "--output", "alone.jsonl")[0] == 0
    assert len(select_planned_rows(read_run_log(run.folder / "alone.jsonl"))) == 12


@pytest.mark.parametrize(
    ("variables", "message"),
    [({}, "--devices ranks needs RANK and WORLD_SIZE"), ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE='two'")],
)
def test_ranks_without_a_launcher_are_refused(run, monkeypatch, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert_refused(run(*RANKS, "--output", "out"), message)


def test_devices_of_several_machines_are_told_apart(run, run_shared):
    _, log = run_shared(*SWEEP, *GRID)
    logs = [
        replace(part, header=part.header | {"device": part.header["device"] | {"index": 0}}) for part in log.part_logs
    ]
    joined = join_logs(logs, run.folder)
    assert [device.index for device in joined.devices] == [0, 1, 2, 3]
    assert {row.shape: row.device_index for row in select_planned_rows(joined)} == {
        row.shape: row.device_index for row in select_planned_rows(log)
    }


# -- read as one run ---------------------------------------------------------------------------------------------------


def test_logs_are_shown_drawn_compared_and_checked_as_one_run(run, run_shared):
    run_shared(*SWEEP, *GRID, "--regime", "burst", "sustained")
    _, text, _ = run("show", "out")
    assert "sustained bfloat16: device 1 " in text and "complete; 24 measurements" in text
    assert run("show", *sorted(map(str, Path("out").iterdir())))[1] == text
    rows = list(csv.DictReader(io.StringIO(run("show", "out", "--format", "csv")[1])))
    assert {row["device"] for row in rows} == {"0", "1", "2", "3"}
    assert float(rows[0]["device_speed"]) > 0.9
    chart = make_log_chart(read_log_or_shared_run(Path("out")))
    assert "devices 0 1 2 3, figures scaled to the first" in chart.subtitle
    points = [
        point.y for panel in chart.panels for line in panel.lines for point in line.points if "burst" in line.name
    ]
    assert max(points) / min(points) < 1.06
    assert run("plot", "out")[0] == 0 and Path("out.png").exists()
    assert run("report", "out")[0] == 0 and "sustained bfloat16: device 1 " in Path("report.html").read_text()
    code, out, _ = run("compare", "out", "out")
    assert (code, "24" in out) == (0, True)
    code, out, _ = run("results", "check", "out")
    assert (code, out.count("simulated: this is a simulated device")) == (1, 4)


def test_logs_that_are_not_one_run_are_refused(run, run_shared):
    run_shared(*SWEEP, *GRID)
    run("sweep", "--backend", "simulated", "--m", "8192", "--output", "other.jsonl")
    run("sweep", "--backend", "simulated", *GRID, "--output", "alone.jsonl")
    run("sweep", "--backend", "simulated", *GRID, "--output", "again.jsonl")
    for logs, message in (
        (["out", "other.jsonl"], "their plans differ"),
        (["alone.jsonl", "again.jsonl"], "use 'mamf compare' to compare them"),
    ):
        code, _, err = run("show", *logs)
        assert (code, message in err) == (2, True)


def test_logs_of_two_models_are_not_one_run(run_shared):
    _, log = run_shared(*SWEEP, *GRID)
    log.part_logs[2].header["device"]["name"] = "Simulated H200"
    with pytest.raises(UsageError, match="their devices are Simulated H100, Simulated H200"):
        join_logs(log.part_logs, log.path)


def test_rows_of_two_devices_are_corrected_before_they_are_compared(run, run_shared):
    _, shared_log = run_shared(*SWEEP, *GRID)
    run("sweep", "--backend", "simulated", *GRID, "--output", "alone.jsonl")
    comparison = compare_logs([shared_log], [read_run_log(run.folder / "alone.jsonl")], False)
    pairs_of_two_devices = [pair for pair in comparison.pairs if not pair.is_same_device]
    assert len(comparison.pairs) == 12
    assert 0 < len(pairs_of_two_devices) < 12
    assert all(pair.ratio == pytest.approx(1.0, abs=0.004) for pair in comparison.pairs)
    code, out, _ = run("compare", "out", "alone.jsonl")
    assert code == 0
    assert "two devices measured A and B: mamf corrected A by the reference shape that both devices measured" in out
    comparison_with_itself = compare_logs([shared_log], [shared_log], False)
    assert all(pair.is_same_device and pair.ratio == 1 for pair in comparison_with_itself.pairs)


def test_rows_of_a_device_without_a_reference_visit_are_ranked_last_and_not_paired(run, run_shared):
    _, log = run_shared(*SWEEP, *GRID)
    visits = [row for row in log.measurements if row.is_reference and row.device_index != 1]
    rows = add_device_speeds([*visits, *select_planned_rows(log)])
    is_not_comparable = [row.device_speed is None for row in select_ranked_rows(rows)]
    assert is_not_comparable == sorted(is_not_comparable)
    assert is_not_comparable.count(True) == sum(row.device_index == 1 for row in select_planned_rows(log)) > 0
    assert "not compared, and ranked after the others: device 1" in describe_devices(rows, log.header)
    run("sweep", "--backend", "simulated", *GRID, "--output", "alone.jsonl")
    comparison = compare_logs([replace(log, measurements=rows)], [read_run_log(run.folder / "alone.jsonl")], False)
    assert {row.status for _, row in comparison.rows_only_in_b} == {"the device did not measure the reference shape"}
    assert len(comparison.rows_only_in_b) == is_not_comparable.count(True) and comparison.pairs


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "0", "9"], "simulated has only 4 devices, and no device 9; use --devices 0"),
        (["--devices", "all", "0"], "--devices cannot mix words and indices"),
        (["--devices", "0", "1", "--device", "1"], "--device cannot be combined with --devices"),
        (["--devices", "ranks"], "--devices ranks needs --output or --resume"),
    ],
)
def test_bad_devices_are_refused(run, monkeypatch, arguments, message):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert_refused(run("sweep", "--backend", "simulated", *arguments), message)


def test_the_message_for_a_machine_with_one_device_is_in_the_singular(run, monkeypatch):
    monkeypatch.setattr(simulated_node.Node, "count_devices", classmethod(lambda cls: 1))
    assert_refused(run("sweep", "--backend", "simulated", "--devices", "7"), "has only 1 device, and no device 7")


def test_an_operation_that_devices_cannot_share_is_refused_and_leaves_no_folder(run, monkeypatch):
    inline_children.install(monkeypatch)
    code, out, err = run("sweep", "--operation", "copies", "--backend", "simulated", "--devices", "0", "2")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("mamf: --devices cannot measure copies: all devices share their links")
    assert not list(run.folder.iterdir())


def test_a_dry_run_names_the_devices_that_share_the_run(run):
    code, out, _ = run(*SWEEP, *GRID, "--dry-run")
    assert code == 0
    assert "devices: 0 1 2 3, one process and one log each; the plan of the first device:" in out
    assert "rows left to measure: 3" in out
    assert not (run.folder / "out").exists()


# -- kernels of an operation, and ceilings -----------------------------------------------------------------------------


def test_kernels_of_any_operation_are_compared_on_a_row_of_the_plan(run_shared):
    arguments = ["bandwidth", "--size", "64MiB", "256MiB", "1GiB", "2GiB", "--pattern", "copy", "read"]
    (code, out, err), log = run_shared(*arguments, *SWEEP[1:])
    assert (code, err, len(select_planned_rows(log))) == (0, "", 8)
    visits = [row for row in log.measurements if row.is_reference]
    assert {(row.problem.pattern, str(row.shape)) for row in visits} == {("copy", "1GiB")}
    assert (
        {row.device_index for row in visits} == {row.device_index for row in select_planned_rows(log)} == {0, 1, 2, 3}
    )
    assert "by the reference 1GiB, simulated-bandwidth" in out


class SlowAttention(SimulatedAttention):
    name = "slow-attention"
    peak_share = 0.35


@pytest.fixture
def attention_kernels(monkeypatch):
    kernels = {
        "simulated-attention": "mamf.testing:SimulatedAttention",
        "slow-attention": "test_shared_runs:SlowAttention",
    }
    monkeypatch.setitem(simulated_node.POINTS, "mamf.attention_kernels", kernels)
    monkeypatch.setattr("mamf.cli.ceilings.plan_search", simulated_node.short_plan)


ATTENTION = ["attention", "--seq-lens", "1024", "2048", "4096", "8192", "--head-dims", "64", "128"]


@pytest.mark.usefixtures("attention_kernels")
def test_each_device_finds_its_own_ceiling_and_shares_are_comparable(run_shared):
    (code, out, err), log = run_shared(*ATTENTION, *SWEEP[1:], "--no-flush")
    assert "relative to device 0, by their ceilings" in out
    assert (code, err, log.tier) == (0, "", "complete")
    rates = [part.matmul_ceilings["bfloat16", "burst"].rate for part in log.part_logs]
    assert [rate / rates[0] for rate in rates] == pytest.approx(SPEEDS, rel=0.01)
    visits = [row for row in log.measurements if row.is_reference and row.shape == COMMON_MATMUL_SHAPE]
    assert {row.device_index for row in visits} == {0, 1, 2, 3}
    for row in log.measurements:
        assert row.device_speed == pytest.approx(rates[row.device_index] / rates[0], rel=1e-4)
    joined = {(row.shape, row.kernel): row for row in select_planned_rows(log)}
    for part in log.part_logs:
        for row in select_planned_rows(part):
            same = joined[row.shape, row.kernel]
            assert compute_mamfu(same, log.matmul_ceilings) == pytest.approx(
                compute_mamfu(row, part.matmul_ceilings), rel=1e-4
            )
            assert compute_card_drift(same, log.matmul_ceilings) == pytest.approx(
                compute_card_drift(row, part.matmul_ceilings), abs=1e-4
            )


@pytest.mark.usefixtures("attention_kernels")
def test_finds_of_each_device_are_its_ceilings_in_a_later_run(run, run_shared, monkeypatch):
    monkeypatch.setenv(simulated_node.DEVICES, "2")
    arguments = ["find", *SWEEP[1:3], "--regime", "burst", "--devices", "all", "--output", "finds"]
    (code, out, _), log = run_shared(*arguments, folder="finds")
    assert (code, len(log.part_logs), len(log.matmul_ceilings)) == (0, 2, 1)
    assert "burst (MAMF), bfloat16: the slowest device is " in out
    rows = list(csv.DictReader(io.StringIO(run("show", "finds", "--format", "csv")[1])))
    assert [(row["device"], row["uuid_hash"]) for row in rows] == [(str(i), f"card{i}") for i in range(2)]
    for command in (["compare", "finds", "finds"], ["plot", "finds"]):
        assert run(*command)[0] == 2
    (code, _, err), log = run_shared(*ATTENTION, *SWEEP[1:], "--ceiling", "finds")
    assert (code, err) == (0, "")
    assert [part.matmul_ceilings["bfloat16", "burst"].uuid_hash for part in log.part_logs] == [
        f"card{i}" for i in range(2)
    ]
