"""Test the process that watches a run.

A kernel that crashes must cost only its own row, and the watching process must pass on signals and exit codes.
"""

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest
from crashing import Lost
from forked import LONGEST_SECONDS, Command

import mamf
from mamf.cli import watching
from mamf.cli.resuming import compute_remaining_budget
from mamf.cli.watching import CrashedRun, SignalHandler
from mamf.contribution.review import review_log
from mamf.engine.runner import CrashRecord
from mamf.errors import DeviceLostError
from mamf.logs.run_log import read_run_log
from mamf.measurement import Measurement
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mamf watches processes on Linux only")
HERE = Path(__file__).parent
STREAMS = {
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
    "start_new_session": True,
}
SHAPES = ("--n", "256", "--k", "256", "--time-limit", "0.1s", "--order", "given")


def start_command(
    folder, *arguments, kernel="Crashing", backend="mamf.testing:SimulatedBackend", prefix=None, **streams
):
    """Start a command of mamf in a separate session, and return its process.

    ``prefix``: words before the command, which then runs in a new process; None: run it in a copy of this process.
    """
    command = (*arguments, "--backend", backend, "--kernel", f"crashing:{kernel}")
    if prefix is None:
        return Command(command, folder)
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "mamf", *command],
        cwd=folder,
        text=True,
        **{**STREAMS, **streams},
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parent.parent))), "OMP_NUM_THREADS": "1"},
    )


def wait_for_result(process):
    """Wait for a process. Return its exit code, its stdout, and the lines of its stderr.

    Leave out warnings, because they depend on the load of this machine.
    """
    out, err = process.communicate(timeout=LONGEST_SECONDS)
    return process.returncode, out, [line for line in err.splitlines() if " WARN " not in line]


def run_sweep(folder, *sizes, output="log.jsonl", **plugins):
    return wait_for_result(
        start_command(folder, "sweep", "--m", *map(str, sizes), *SHAPES, "--output", output, **plugins)
    )


def read_statuses(folder, name="log.jsonl"):
    return {row.shape.m: (row.status, row.reason) for row in read_run_log(folder / name).all_rows}


def make_crash_message(m, name):
    return f"mamf: crashing.mm at {m}x256x256 crashed the process ({name}); a new process measures the rest"


def count_launches(folder):
    return Counter(map(int, (folder / "launches").read_text().split()))


# -- kernels that crash ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "name", "prefix"),
    [
        pytest.param(512, "SIGSEGV", (), id="new process", marks=pytest.mark.emulated),
        (768, "SIGABRT", None),
        (1280, "SIGSEGV", None),
        (1344, "SIGKILL, perhaps because memory ran out", None),
    ],
)
def test_a_kernel_that_crashes_costs_its_own_row(tmp_path, m, name, prefix):
    code, out, err = run_sweep(tmp_path, 256, m, 1024, prefix=prefix)
    assert (code, err) == (0, [make_crash_message(m, name)])
    assert out.count("best burst") == 1
    failed = ("failed", f"crashed the process ({name})")
    assert read_statuses(tmp_path) == {256: ("ok", ""), m: failed, 1024: ("ok", "")}
    log = read_run_log(tmp_path / "log.jsonl")
    assert (log.tier, len(log.all_rows)) == ("complete", 3)
    rules = {finding.rule for finding in review_log(log.path).findings}
    allowed_rules = {"missing-field", "simulated", "wide-interval", "equal-samples", "busy-machine"}
    assert rules <= allowed_rules, "a crash must not make the log break other rules"
    launches_before = count_launches(tmp_path)
    assert launches_before[m] == 1
    assert wait_for_result(start_command(tmp_path, "sweep", "--resume", "log.jsonl"))[0] == 0
    assert count_launches(tmp_path) == launches_before


def test_a_resumed_log_without_a_summary_skips_the_crashed_row(tmp_path):
    run_sweep(tmp_path, 256, 512, 1024)
    log = tmp_path / "log.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-2]))
    launches_before = count_launches(tmp_path)
    code, _, err = wait_for_result(start_command(tmp_path, "sweep", "--resume", "log.jsonl"))
    assert (code, err) == (0, [])
    assert read_statuses(tmp_path) == {
        256: ("ok", ""),
        512: ("failed", "crashed the process (SIGSEGV)"),
        1024: ("ok", ""),
    }
    assert (count_launches(tmp_path) - launches_before).keys() == {1024}


def test_after_three_crashes_a_kernel_is_left_out(tmp_path):
    code, _, err = run_sweep(tmp_path, 512, 768, 1280, 256)
    assert (code, err) == (
        1,
        [make_crash_message(512, "SIGSEGV"), make_crash_message(768, "SIGABRT"), make_crash_message(1280, "SIGSEGV")],
    )
    assert read_statuses(tmp_path)[256] == ("failed", "ended the process three times, so mamf no longer launches it")
    assert 256 not in count_launches(tmp_path)


def test_a_crash_without_a_log_ends_the_command_with_the_code_of_a_shell(tmp_path):
    code, _, err = run_sweep(tmp_path, 256, kernel="FaultyLibrary")
    assert code == 128 + signal.SIGSEGV
    assert err == ["mamf: code outside a measurement crashed the process (SIGSEGV); no log was written"]
    assert not (tmp_path / "log.jsonl").exists()


def test_each_of_several_logs_is_resumed(tmp_path):
    find = ("find", "--dtype", "float16", "bfloat16", "--regime", "burst", "--budget", "30s", "--output", "log.jsonl")
    code, out, err = wait_for_result(start_command(tmp_path, *find, kernel="CrashingOnce"))
    assert code == 0
    assert len(err) == 1
    assert err[0].endswith("crashed the process (SIGSEGV); a new process measures the rest")
    assert out.count("log: ") == 2
    for name, count in (("float16", 0), ("bfloat16", 1)):
        log = read_run_log(tmp_path / f"log-{name}.jsonl")
        assert log.ceilings.keys() == {"burst"}
        assert sum(row.is_fatal for row in log.all_rows) == count


def test_the_time_of_crashed_processes_is_part_of_the_budget():
    options = Namespace(budget=60.0, crashed_run=None)
    assert compute_remaining_budget(options) == 60
    options.crashed_run = CrashedRun(Path("log.jsonl"), 45.0, [])
    assert compute_remaining_budget(options) == 15
    options.budget = 10.0
    assert 0 < compute_remaining_budget(options) < 1e-6
    options.budget = None
    assert compute_remaining_budget(options) is None


# -- libraries that exit -----------------------------------------------------------------------------------------------


def test_a_launch_that_exits_costs_its_own_row_and_its_output_is_on_stderr(tmp_path):
    options = ("sweep", "--m", "256", "512", "768", "1280", *SHAPES, "--output", "log.jsonl", "--format", "json")
    code, out, err = wait_for_result(start_command(tmp_path, *options, kernel="Leaving"))
    reasons = {m: f"crashed the process (exit code {code})" for m, code in ((512, 0), (768, 7), (1280, 255))}
    messages = [
        f"mamf: crashing.mm at {m}x256x256 {reason}; a new process measures the rest" for m, reason in reasons.items()
    ]
    printed = ["printed", "written", "put"]
    assert (code, err) == (0, [*printed, messages[0], *printed, *messages[1:], "log: log.jsonl"])
    assert read_statuses(tmp_path) == {256: ("ok", ""), **{m: ("failed", reason) for m, reason in reasons.items()}}
    assert [row["status"] for row in json.loads(out)["measurements"]].count("ok") == 1


def test_a_library_that_exits_outside_of_a_measurement_fails_the_command(tmp_path):
    code, out, err = run_sweep(tmp_path, 256, kernel="LeavingLibrary")
    message = "crashed the process (exit code 0); no log was written"
    assert (code, out, err) == (1, "", [f"mamf: code outside a measurement {message}"])


# -- devices that are lost ---------------------------------------------------------------------------------------------


def test_a_kernel_that_loses_the_device_costs_its_own_row(tmp_path):
    code, _, err = run_sweep(tmp_path, 256, 512, 1024, kernel="Losing", backend="crashing:Lost")
    assert (code, err) == (0, ["mamf: losing.mm at 512x256x256 lost the device; a new process measures the rest"])
    reason = "lost the device (RuntimeError: CUDA error: an illegal memory access was encountered)"
    assert read_statuses(tmp_path) == {256: ("ok", ""), 512: ("failed", reason), 1024: ("ok", "")}


def test_the_error_in_a_program_names_the_kernel_that_lost_the_device(tmp_path):
    log, shapes = tmp_path / "log.jsonl", [MatmulShape(m, 256, 256) for m in (512, 1024)]
    running = mamf.sweep(shapes, backend=Lost(), kernel="crashing:Losing", log=log)
    with pytest.raises(DeviceLostError, match=r"losing.mm at 512x256x256 lost the device .*: continue in a new"):
        list(running)
    assert {shape for shape, (status, _) in read_statuses(tmp_path).items() if status == "failed"} == {512}
    assert read_run_log(log).summary["status"] == "interrupted"


def test_a_lost_device_is_logged_in_a_run_that_is_not_watched(run):
    code, out, _ = run("sweep", "--backend", "crashing:Lost", "--kernel", "crashing:Losing", "--m", "512", *SHAPES)
    assert code == 1
    assert "lost the device" in out


# -- signals -----------------------------------------------------------------------------------------------------------


def start_waiting_sweep(folder, *prefix, **streams):
    """Start a sweep, and return its process when it has finished a row and the next launch waits for a signal."""
    command = ("sweep", "--m", "256", "512", "1024", *SHAPES, "--output", "log.jsonl")
    process = start_command(folder, *command, kernel="Waiting", prefix=prefix or None, **streams)
    while not (folder / "waits").exists():
        assert process.poll() is None
        time.sleep(0.001)
    return process


def find_child(process):
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())


def is_running(process):
    """Return whether a process is running. A zombie, which has ended but was not waited for, is not running."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["one", "both"])
def test_a_signal_ends_the_run_with_the_best_so_far(tmp_path, number, send):
    process = start_waiting_sweep(tmp_path)
    send(process.pid, number)
    code, out, err = wait_for_result(process)
    assert (code, err) == (130, [])
    assert "best burst" in out
    assert read_statuses(tmp_path) == {256: ("ok", "")}
    assert read_run_log(tmp_path / "log.jsonl").summary["status"] == "interrupted"


def read_signal_mask(process, name):
    """Return a set of signals of a process, such as SigIgn, as a bit mask from /proc."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0], 16)


@pytest.mark.emulated
def test_a_crash_because_of_a_signal_is_an_interruption(tmp_path):
    code, _, err = run_sweep(tmp_path, 256, 512, 1024, kernel="AbortedBySignal")
    assert (code, err) == (130, [])
    log = read_run_log(tmp_path / "log.jsonl")
    assert ([row.shape.m for row in log.measurements], log.tier) == ([256], "interrupted")


def test_a_run_under_nohup_ignores_that_its_terminal_hangs_up(tmp_path):
    hangup, process = 1 << signal.SIGHUP - 1, start_waiting_sweep(tmp_path, "nohup")
    child = find_child(process)
    assert read_signal_mask(child, "SigIgn") & read_signal_mask(process.pid, "SigIgn") & hangup
    assert not (read_signal_mask(child, "SigCgt") | read_signal_mask(process.pid, "SigBlk")) & hangup
    os.kill(process.pid, signal.SIGTERM)
    assert wait_for_result(process)[0] == 130


@pytest.mark.emulated
def test_a_terminal_that_hangs_up_ends_the_run_with_its_summary(tmp_path):
    """Close the terminal: only the first process of the session gets SIGHUP, and nothing can be printed any more."""
    controller, terminal = os.openpty()
    process = start_waiting_sweep(
        tmp_path, "setsid", "--ctty", stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=False
    )
    os.close(terminal)
    os.close(controller)
    process.wait(LONGEST_SECONDS)
    assert read_statuses(tmp_path) == {256: ("ok", "")}
    assert read_run_log(tmp_path / "log.jsonl").summary["status"] == "interrupted"


def test_kill_leaves_no_child_and_a_log_that_is_resumed(tmp_path):
    process = start_waiting_sweep(tmp_path)
    child = find_child(process)
    process.kill()
    process.wait(LONGEST_SECONDS)
    while is_running(child):
        time.sleep(0.001)
    assert read_statuses(tmp_path) == {256: ("ok", "")}
    code, _, err = wait_for_result(start_command(tmp_path, "sweep", "--resume", "log.jsonl", kernel="Waiting"))
    assert (code, err) == (0, [])


def test_a_signal_that_ends_the_child_sets_the_exit_code(tmp_path):
    process = start_waiting_sweep(tmp_path)
    os.kill(find_child(process), signal.SIGUSR1)
    assert wait_for_result(process)[::2] == (128 + signal.SIGUSR1, [])
    assert read_statuses(tmp_path) == {256: ("ok", "")}


def test_a_signal_that_arrives_twice_counts_once(monkeypatch):
    now = [10.0]
    exit_codes = []
    monkeypatch.setattr(watching, "time", Namespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(watching.os, "_exit", exit_codes.append)
    with SignalHandler():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        now[0] += 1
        signal.raise_signal(signal.SIGHUP)
        assert exit_codes == []
        signal.raise_signal(signal.SIGTERM)
        assert exit_codes == [130]


# -- watched commands --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [[], ["show", "log"], ["sweep", "--dry-run"], ["find", "--help"], ["sweep", "--led"], ["run", "mm"]]
)
def test_only_commands_that_measure_are_watched(monkeypatch, arguments):
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    watching.fork_watched_child(arguments)
    assert watching.CRASH_STATE is None


def test_three_crashes_of_a_kernel_do_not_affect_another_kernel():
    def row(kernel, m, reason=""):
        return Measurement(MatmulShape(m, 1, 1), kernel, MatmulProblem(), "burst", "median", "failed", reason)

    crashes = CrashRecord([row("a", m, "crashed the process (SIGBUS)") for m in (1, 2)])
    assert crashes.explain_why_not_to_launch(row("a", 1)) == "crashed the process (SIGBUS)"
    assert crashes.explain_why_not_to_launch(row("a", 3)) == crashes.explain_why_not_to_launch(row("b", 1)) == ""
    crashes.fatal_rows = [*crashes.fatal_rows, row("a", 3, "lost the device (no reason)")]
    assert (
        crashes.explain_why_not_to_launch(row("a", 4)) == "ended the process three times, so mamf no longer launches it"
    )
    assert crashes.explain_why_not_to_launch(row("b", 4)) == ""


def test_a_signal_that_arrives_again_after_the_run_prints_no_traceback(monkeypatch):
    original_handler = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt), SignalHandler():
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr("mamf.cli.watching._MAX_REPEATED_SIGNAL_SECONDS", -1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, original_handler)
