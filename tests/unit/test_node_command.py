"""Test ``mamf node``: one process per device, several machines, devices that fail or hang, and the verdict with its
exit code.
"""

import contextlib
import csv
import io
import json
import signal
from argparse import Namespace

import pytest
import simulated_node
from forked import Child
from refusals import assert_refused

from mamf.backend import Unavailability
from mamf.cli.progress import PhaseLines
from mamf.errors import RunLogWriteError, UsageError
from mamf.logs.run_log import read_run_log
from mamf.logs.writer import RunLogWriter
from mamf.node.children import (
    FAILURE_KEY,
    PHASE_KEY,
    WAITING_PHASE,
    ChildEvent,
    ChildProcesses,
    ChildWatch,
    parse_message,
    watch_children_until_end,
)
from mamf.node.group import RankPlace, find_rank_place
from mamf.node.logs import NodeRun
from mamf.operations import unknown
from mamf.plugins.discovery import MATMUL_KERNEL_GROUP

NODE = ["node", "--backend", "simulated", "--budget", "60s", "--output-folder", "logs"]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    simulated_node.install(monkeypatch)
    monkeypatch.setattr("mamf.node.children.start_child", Child)
    unknown._get_installed_operation.cache_clear()
    yield
    unknown._get_installed_operation.cache_clear()


def set_faults(monkeypatch, devices, **faults):
    monkeypatch.setenv(simulated_node.DEVICES, str(devices))
    monkeypatch.setenv(
        simulated_node.FAULTS, json.dumps({name.removeprefix("_"): fault for name, fault in faults.items()})
    )


# -- one process per device --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "code"), [("node", 3), ("verify", 2), ("overlap", 2), ("find --devices all", 2)], ids=str
)
def test_an_unavailable_backend_is_refused_with_its_reason(run, monkeypatch, command, code):
    reason = Unavailability("no driver is loaded", "load the driver")
    monkeypatch.setattr(simulated_node.Node, "explain_unavailability", classmethod(lambda cls: reason))
    exit_code, out, err = run(*command.split(), "--backend", "simulated")
    expected = "mamf: backend simulated is not available: no driver is loaded; load the driver"
    assert (exit_code, out, " ".join(err.split())) == (code, "", expected)


@pytest.mark.parametrize("method", ["explain_unavailability", "count_devices"])
@pytest.mark.parametrize("command", ["node", "verify", "overlap"])
def test_a_backend_that_cannot_say_how_many_devices_it_has_is_broken(run, monkeypatch, command, method):
    def fail(cls):
        raise ValueError("no driver answers")

    monkeypatch.setattr(simulated_node.Node, method, classmethod(fail))
    code, out, err = run(command, "--backend", "simulated")
    expected = f"mamf: backend simulated is broken: {method} raised ValueError: no driver answers"
    assert (code, out, " ".join(err.split())) == (3 if command == "node" else 2, "", expected)


@pytest.fixture
def healthy_result(run, monkeypatch):
    """Return the exit code, stdout and stderr of ``mamf node`` on two healthy devices."""
    set_faults(monkeypatch, 2)
    return run(*NODE)


def test_a_healthy_node_is_ok_and_its_logs_give_the_same_verdict(run, healthy_result):
    code, out, _ = healthy_result
    assert code == 0, out
    assert out.startswith("OK: 2 devices, the slowest device is device ")
    assert "0000:01:00.0" in out
    for log in (run.folder / "logs").iterdir():
        assert "0000:01:00.0" not in log.read_text(), "a log must not contain the bus address of a device"
    repeated_result = run("node", "--from", "logs")
    assert repeated_result[0] == 0
    assert repeated_result[1].splitlines()[0] == out.splitlines()[0]

    code, out, err = run("node", "--from", "logs", "--format", "json")
    record = json.loads(out)
    assert (record["level"], record["exit_code"], err) == ("OK", 0, "")
    assert [device["index"] for device in record["devices"]] == [0, 1]
    rows = list(csv.DictReader(io.StringIO(run("node", "--from", "logs", "--format", "csv")[1])))
    assert float(rows[1]["burst_tflops"]) == pytest.approx(record["devices"][1]["figures"]["burst"])
    assert run("node", "--from", "logs", "--format", "markdown")[1].startswith("- OK: ")


def test_json_of_a_node_keeps_its_keys(run, healthy_result):
    record = json.loads(run("node", "--from", "logs", "--format", "json")[1])
    assert set(record) == {
        *("level", "exit_code", "reason", "findings", "not_together", "slowest", "lost_share", "pace", "devices"),
        "figures",
    }
    assert set(record["devices"][0]) == {
        *("index", "node", "name", "uuid_hash", "address", "dtype", "build", "figures", "half_widths", "conditions"),
        *("throttled", "verified_problem_count", "failures", "lacks"),
    }


def test_devices_that_cannot_be_opened_or_vanish_are_critical_and_the_rest_is_measured(run, monkeypatch):
    set_faults(monkeypatch, 3, _0="closed", _1="gone")
    code, out, _ = run(*NODE, "--format", "json")
    record = json.loads(out)
    assert (code, record["level"]) == (2, "CRITICAL")
    failures = [device["failures"] for device in record["devices"]]
    assert failures[0] == ["the device cannot be opened"]
    assert failures[1] == ["its process ended early (phase: opening the device): exit code 9"]
    assert failures[2] == []
    assert record["devices"][2]["figures"]["burst"] > 0
    assert record["not_together"] == "device 0, device 1 failed"
    repeated_record = json.loads(run("node", "--from", "logs", "--format", "json")[1])
    assert repeated_record["findings"] == [
        {**finding, "text": finding["text"].replace(" (0000:02:00.0)", "")} for finding in record["findings"]
    ]


def run_and_expect_unknown(run, monkeypatch, write):
    """Run ``mamf node`` with ``write`` in place of ``RunLogWriter.write``, and return the texts of its findings. Check
    that the verdict is UNKNOWN and that no device failed.
    """
    monkeypatch.setattr(RunLogWriter, "write", write)
    code, out, _ = run(*NODE, "--format", "json")
    record = json.loads(out)
    assert (code, record["level"]) == (3, "UNKNOWN")
    assert [device["failures"] for device in record["devices"]] == [[], []]
    return [finding["text"] for finding in record["findings"]]


@pytest.mark.parametrize("part", ["find", "bandwidth", "peers"])
def test_a_full_disk_makes_the_verdict_unknown_and_fails_no_device(run, monkeypatch, part):
    set_faults(monkeypatch, 2)
    real_write = RunLogWriter.write

    def write_until_disk_is_full(self, record, fields):
        if self.path.name.endswith(f"0-{part}.jsonl"):
            raise RunLogWriteError(f"cannot write {self.path}: No space left on device")
        real_write(self, record, fields)

    findings = run_and_expect_unknown(run, monkeypatch, write_until_disk_is_full)
    disk_findings = [text for text in findings if "No space left on device" in text]
    assert len(disk_findings) == 1
    assert "device 0" in disk_findings[0]
    assert ": its log could not be written: cannot write" in disk_findings[0]
    assert run("node", "--from", "logs")[0] == 3


def test_ctrl_c_leaves_whole_logs_and_an_unknown_verdict(run, monkeypatch):
    set_faults(monkeypatch, 2)

    def show(self, phases):
        if any("find " in phase for phase in phases.values()):
            raise KeyboardInterrupt

    monkeypatch.setattr(PhaseLines, "show_phases", show)
    code, out, err = run(*NODE)
    assert code == 130
    assert "mamf: interrupted (exit code 130): the verdict covers only what was measured; " in err
    assert out.startswith("UNKNOWN: device ")
    logs = [read_run_log(log) for log in (run.folder / "logs").glob("*.jsonl")]
    assert logs
    assert all(log.summary is not None or not log.measurements for log in logs), "each log must say how its run ended"


def test_ctrl_c_ends_node_even_if_an_import_swallows_it(run, monkeypatch):
    exit_codes, handler = [], signal.getsignal(signal.SIGINT)

    def swallow_interrupt(options):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return []

    monkeypatch.setattr("mamf.cli.devices.prepare_node_run", swallow_interrupt)
    monkeypatch.setattr("mamf.cli.watching.os._exit", exit_codes.append)
    run(*NODE)
    assert exit_codes == [130]
    assert signal.getsignal(signal.SIGINT) == handler


class FakeProcess:
    """A fake process. ``kill`` makes the end of the process the next event of the script."""

    def __init__(self, rank, script):
        self.rank, self.script, self.was_killed = rank, script, False

    def kill(self):
        self.was_killed = True
        self.script.insert(0, (0.0, ChildEvent(self.rank, None, -9)))


def watch_script(script, rank_count=3):
    """Run ``watch_children_until_end`` on a script of events. Return the watch, the ranks of the killed processes, and
    how often all processes were resumed.

    ``script``: pairs of the seconds until the next event, and the event (None if no event arrives in this time).
    """
    max_silent_seconds, clock, resume_times = 60.0, [0.0], []
    processes = {rank: FakeProcess(rank, script) for rank in range(rank_count)}
    watch = ChildWatch(range(rank_count), max_silent_seconds, read_clock=lambda: clock[0])

    def wait_for_event(seconds):
        delay_seconds, event = script.pop(0) if script else (max_silent_seconds, None)
        clock[0] += delay_seconds
        return event

    watch_children_until_end(watch, processes, wait_for_event, lambda: resume_times.append(clock[0]))
    return watch, [rank for rank, process in processes.items() if process.was_killed], len(resume_times)


def make_message(rank, text, key=PHASE_KEY):
    return 1.0, ChildEvent(rank, {key: text})


def make_end(rank, code=0, last_line=""):
    return 1.0, ChildEvent(rank, None, code, last_line)


def test_a_silent_process_is_killed_but_not_the_processes_that_wait_for_it():
    script = [
        make_message(0, WAITING_PHASE),
        make_message(1, "find scout"),
        make_message(2, WAITING_PHASE),
        (61.0, None),
        make_end(0),
        make_end(2),
    ]
    watch, killed_ranks, resume_count = watch_script(script)
    assert watch.failure_reasons == {1: "its process hangs: it sent no message for 60 s (phase: find scout)"}
    assert (killed_ranks, resume_count) == ([1], 1)


def test_a_process_that_ends_early_fails_with_its_last_line_or_its_signal():
    script = [make_end(0, 1, "CUDA error: device lost"), make_end(1, -11), make_message(2, WAITING_PHASE), make_end(2)]
    watch, killed_ranks, resume_count = watch_script(script)
    assert watch.failure_reasons[0] == "its process ended early (phase: start): CUDA error: device lost"
    assert watch.failure_reasons[1] == "its process ended early (phase: start): killed by SIGSEGV"
    assert (killed_ranks, resume_count) == ([], 1)


def test_a_device_that_fails_together_with_the_others_does_not_stop_them():
    first_part = [make_message(rank, WAITING_PHASE) for rank in range(3)]
    second_part = [make_message(0, WAITING_PHASE), make_message(2, WAITING_PHASE), make_end(0), make_end(2)]
    watch, killed_ranks, resume_count = watch_script(
        [*first_part, make_message(1, "no peer access", FAILURE_KEY), make_end(1, 1), *second_part]
    )
    assert watch.failure_reasons == {1: "no peer access"}
    assert (killed_ranks, resume_count) == ([], 2)


def test_a_hanging_process_that_cannot_be_killed_does_not_delay_the_run(monkeypatch):
    monkeypatch.setattr(FakeProcess, "kill", lambda process: None)
    watch, _, resume_count = watch_script(
        [make_message(0, WAITING_PHASE), make_message(1, "find"), (61.0, None), make_end(0)], rank_count=2
    )
    assert (list(watch.failure_reasons), resume_count) == ([1], 1)


def test_if_one_process_cannot_be_started_the_others_are_ended(monkeypatch):
    ended_commands = []

    def start_child(command, environment):
        if command == ["no such program"]:
            raise FileNotFoundError(command[0])
        return Namespace(terminate=lambda: ended_commands.append(command), wait=lambda timeout: 0)

    monkeypatch.setattr("mamf.node.children.start_child", start_child)
    with pytest.raises(FileNotFoundError):
        ChildProcesses({0: ["first"], 1: ["no such program"]}, {})
    assert ended_commands == [["first"]]


def test_lines_that_are_not_messages_are_ignored():
    script = [
        (0.1, ChildEvent(0, parse_message("Warning: something\n"))),
        (0.1, ChildEvent(0, parse_message("[1, 2]"))),
        make_message(0, WAITING_PHASE),
        make_end(0),
    ]
    assert watch_script(script, rank_count=1)[0].failure_reasons == {}


# -- several machines --------------------------------------------------------------------------------------------------


def set_task_place(monkeypatch, node, index, node_count=2):
    """Set the environment variables of a task that srun started: ``index`` on machine ``node``."""
    monkeypatch.setenv("SLURM_PROCID", str(node))
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", str(node_count))
    monkeypatch.setenv("SLURM_NODEID", str(node))
    monkeypatch.setenv("SLURM_LOCALID", str(index))


def test_machines_of_one_job_have_a_folder_each_and_are_judged_together(run, monkeypatch):
    set_faults(monkeypatch, 2)
    for node in (0, 1):
        set_task_place(monkeypatch, node, 0)
        assert run(*NODE)[0] == 0
    code, out, _ = run("node", "--from", "logs/node0", "logs/node1", "--format", "json")
    record = json.loads(out)
    assert (code, [(each["node"], each["index"]) for each in record["devices"]]) == (
        0,
        [(0, 0), (0, 1), (1, 0), (1, 1)],
    )


def test_other_tasks_on_a_machine_measure_nothing(run, monkeypatch):
    set_faults(monkeypatch, 2)
    set_task_place(monkeypatch, 0, 1, node_count=4)
    assert run(*NODE) == (
        0,
        "",
        "this process measures nothing: the first process on this machine measures all of its devices\n",
    )
    assert run(*NODE, "--overlap")[::2] == (
        3,
        "mamf: --overlap works on one machine only: start 'mamf overlap' with torchrun or srun\n",
    )
    assert not (run.folder / "logs").exists()


def test_the_place_of_a_rank_is_read_from_the_variables_of_its_launcher():
    torchrun_variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "GROUP_RANK": "1"}
    assert find_rank_place(torchrun_variables) == RankPlace(5, 8, 1, 1)
    srun_variables = {"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    assert find_rank_place(srun_variables) == RankPlace(9, 16, 1, 1)
    assert find_rank_place({}) is None
    assert find_rank_place(torchrun_variables | {"WORLD_SIZE": "1"}) is None
    assert find_rank_place(srun_variables | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    with pytest.raises(UsageError, match="SLURM_PROCID='12x' in the environment"):
        find_rank_place(srun_variables | {"SLURM_PROCID": "12x"})


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--formt", "json"], "did you mean --format"),
        (["--from", "nowhere"], "nowhere does not exist: give a folder that 'mamf node' wrote; 'mamf report'"),
        (["--backend", "simulated", "--devices", "7"], "simulated has only 4 devices, and no device 7"),
        (
            ["--backend", "simulated", "--devices", "ranks"],
            "--devices ranks does not work with this command",
        ),
        (["--backend", "simulated", "--output-folder", "full"], "full is not empty"),
    ],
)
def test_bad_options_exit_with_3_because_2_means_a_bad_device(run, arguments, complaint):
    (run.folder / "full").mkdir()
    (run.folder / "full" / "log.txt").touch()
    assert_refused(run("node", *arguments), complaint, code=3)


def test_a_request_that_cannot_be_measured_fails_no_device(run, monkeypatch):
    set_faults(monkeypatch, 2)
    code, out, _ = run(*NODE, "--dtype", "fp99")
    assert code == 3
    assert "the request cannot be measured: unknown dtype 'fp99'" in out.splitlines()[0]
    monkeypatch.setitem(
        simulated_node.POINTS, MATMUL_KERNEL_GROUP, {"torch.mm": "mamf.operations.matmul.torch_kernels:TorchMm"}
    )
    code, out, _ = run(*NODE, "--output-folder", "without-kernel")
    reason = "the request cannot be measured: no default matmul kernel runs on backend simulated"
    assert (code, reason in out.splitlines()[0]) == (3, True), out


@pytest.mark.parametrize(("options", "overlap_count"), [((), 0), (("--overlap",), 1), (("--overlap", "--dry-run"), 0)])
def test_overlap_follows_the_verdict(run, monkeypatch, options, overlap_count):
    set_faults(monkeypatch, 1)
    commands = []
    monkeypatch.setattr("mamf.cli.commands.node.run_command", commands.append)
    monkeypatch.setattr(
        "mamf.cli.devices.measure_node_devices", lambda *arguments: ("logs", NodeRun([0], is_over=True), [])
    )
    assert run("node", "--backend", "simulated", *options)[0] == (0 if "--dry-run" in options else 3)
    assert commands == [["overlap", "--backend", "simulated"]] * overlap_count
