"""Test the command line as users see it, with a simulated accelerator and, where necessary, in a separate process."""

import contextlib
import importlib
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import warnings

import psutil
import pytest

from mamf.cli import COMMAND_DESCRIPTIONS, COMMANDS_BY_HEADING, main
from mamf.cli.progress import ProgressBar, add_phase_listener
from mamf.cli.terminal import parse_duration, print_line, warn
from mamf.errors import MamfWarning
from mamf.logs.run_log import read_run_log
from mamf.logs.writer import RunLogWriter
from mamf.measurement import Measurement
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape, matmul_grid
from mamf.testing import SimulatedBackend, SimulatedMatmul

SIMULATED = ["--backend", "mamf.testing:SimulatedBackend", "--kernel", "mamf.testing:SimulatedMatmul"]


@pytest.fixture
def sweep(run):
    return lambda *arguments: run("sweep", *SIMULATED, *arguments)


def test_a_sweep_prints_the_best_and_leaves_a_log(sweep, tmp_path):
    code, out, _ = sweep("--m-range", "0", "2048", "512", "--output", "run.jsonl")
    assert code == 0
    assert "best burst, bfloat16: " in out
    assert "log: run.jsonl" in out
    log = read_run_log(tmp_path / "run.jsonl")
    assert sorted(row.shape for row in log.measurements) == matmul_grid([512, 1024, 1536], [4096], [4096])
    assert log.summary["status"] == "complete"


def test_options_in_the_spelling_of_mamf_finder_work(sweep):
    code, out, _ = sweep(
        *("--m_range", "0", "1024", "256", "--n", "65536", "--k", "65536", "--regime", "classic"),
        *("--num_warmup_iterations", "5", "--num_iterations", "10", "--output", "x"),
    )
    assert code == 0
    assert "best classic" in out
    assert "(fastest)" in out


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ("--versoin", "unknown option '--versoin' (did you mean --version?)"),
        ("--vers", "unknown option '--vers' (did you mean --version?)"),
        ("swep", "there is no command 'swep' (did you mean sweep?)"),
        ("decode", "there is no command 'decode'; measure this operation with 'mamf attention --operation decode'"),
        ("grouped", "there is no command 'grouped'; measure this operation with 'mamf sweep --operation grouped'"),
        ("quux", "there is no command 'quux'; mamf --help lists all commands"),
    ],
)
def test_an_unknown_command_or_option_is_refused_with_a_hint(run, argument, complaint):
    assert run(argument) == (2, "", f"mamf: {complaint}\n")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["find", "--shapes", "1x2x3"], "unknown option '--shapes': use 'mamf sweep' to measure sizes that you choose"),
        (["sweep", "--shar"], "unknown option '--shar' (did you mean --shapes?)"),  # The help has no --share.
    ],
)
def test_an_unknown_option_leads_to_one_that_the_help_lists(run, options, complaint):
    assert run(*options) == (2, "", f"mamf {options[0]}: {complaint}\n")


def test_mamf_without_arguments_lists_the_commands_in_groups(run):
    code, out, err = run()
    assert (code, err) == (0, "")
    assert sorted(name for names in COMMANDS_BY_HEADING.values() for name in names) == sorted(COMMAND_DESCRIPTIONS)
    for heading, names in COMMANDS_BY_HEADING.items():
        assert f"\n\n{heading}:\n  {names[0]} " in out
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("command", COMMAND_DESCRIPTIONS)
def test_help_begins_with_examples(run, command):
    _, out, _ = run(command, "--help")
    intro = out.partition("\nusage: ")[0]
    assert sum("mamf " in line for line in intro.partition("examples:\n")[2].splitlines()) >= 3, intro


def test_rare_options_are_only_in_the_whole_help(run):
    _, short, _ = run("sweep", "--help")
    _, whole, _ = run("sweep", "--help-all")
    assert "--num-warmup-iterations" not in short
    assert "--num-warmup-iterations COUNT" in whole
    assert "more options: --help-all" in short
    assert "more options" not in whole


def test_an_existing_file_is_never_clobbered(sweep, tmp_path):
    (tmp_path / "mine").write_text("precious")
    code, _, err = sweep("--m", "512", "--output", "mine")
    assert code == 2
    assert "already exists" in err
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(sweep, tmp_path):
    code, out, _ = sweep("--m-range", "0", "20480", "256", "--dry-run")
    assert code == 0
    assert "shapes: 79" in out
    assert "GB for the largest" in out
    assert "time: about" in out
    assert list(tmp_path.iterdir()) == []


def interrupt_at_launch(launch_number):
    return lambda launch_count: os.kill(os.getpid(), signal.SIGINT) if launch_count == launch_number else None


# Launches 2 and 33 come before the end of the first row. The launch ``last_launch`` is part of the third row.
@pytest.mark.parametrize(
    ("regime", "launch_number"),
    [
        (regime, launch_number)
        for regime, last_launch in (("burst", 55), ("sustained", 4000), ("classic", 7470))
        for launch_number in (2, 33, last_launch)
    ],
)
def test_ctrl_c_prints_the_best_so_far_and_the_run_can_be_resumed(sweep, on_launch, launch_number, regime, tmp_path):
    iterations = ["--num-iterations", "5", "--num-warmup-iterations", "1"] if regime == "classic" else []
    shapes = ["--m-range", "0", "2048", "256", "--n", "32768", "--k", "32768", "--regime", regime, *iterations]
    on_launch(interrupt_at_launch(launch_number))
    code, out, _ = sweep(*shapes, "--output", "run.jsonl")
    assert code == 130
    assert "interrupted: by the user" in out
    before = read_run_log(tmp_path / "run.jsonl")
    assert before.summary["status"] == "interrupted"
    assert len(before.measurements) == (2 if launch_number > 33 else 0)
    assert len(before.measurements) + before.summary["left"] == 7
    assert ("best" in out) == bool(before.measurements)
    on_launch(lambda launch_count: None)
    code, out, _ = sweep("--resume", "run.jsonl")
    assert code == 0
    after = read_run_log(tmp_path / "run.jsonl")
    assert after.summary["status"] == "complete"
    assert after.measurements[: len(before.measurements)] == before.measurements
    assert sorted(row.shape for row in after.measurements) == matmul_grid(range(256, 2048, 256), [32768], [32768])


def test_a_signal_in_the_middle_of_a_record_waits_until_it_is_written(sweep, monkeypatch, tmp_path):
    real_write = os.write

    def interrupted_write(descriptor, data):
        if b'"measurement"' in data[:40]:
            os.kill(os.getpid(), signal.SIGTERM)
        return real_write(descriptor, data)

    monkeypatch.setattr(os, "write", interrupted_write)
    code, _, _ = sweep("--m", "256", "512", "--output", "run.jsonl")
    assert code == 130
    log = read_run_log(tmp_path / "run.jsonl")
    assert len(log.measurements) == 1
    assert log.summary["status"] == "interrupted"


def test_a_kernel_that_writes_nothing_fails_its_rows_but_not_the_run(sweep, tmp_path):
    """Check a kernel with the relative error NaN. JSON cannot represent NaN, so the row contains null and a reason."""
    (tmp_path / "nothing.py").write_text(
        textwrap.dedent("""
            from mamf.kernel import PreparedKernel, Verdict
            from mamf.testing import SimulatedMatmul

            class Nothing(SimulatedMatmul):
                def prepare(self, *arguments, **options):
                    return PreparedKernel([lambda: None], lambda index, result: Verdict(float("nan"), 1.0))
        """)
    )
    sys.path.insert(0, str(tmp_path))
    try:
        code, out, _ = sweep("--kernel", "nothing:Nothing", "--m", "256", "512", "--output", "run.jsonl")
    finally:
        sys.path.remove(str(tmp_path))
    assert code == 1
    assert " and 1 more: wrong_result: " in out
    rows = read_run_log(tmp_path / "run.jsonl").measurements
    assert [(row.relative_error, "relative error nan" in row.reason) for row in rows] == [(None, True)] * 2


def test_a_failure_is_measured_again_when_resumed(sweep, tmp_path, monkeypatch):
    shape = MatmulShape(256, 4096, 4096)
    prepare = SimulatedMatmul.prepare

    def fail_on_one_shape(self, backend, problem, prepared_shape, *arguments):
        if prepared_shape == shape:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return prepare(self, backend, problem, prepared_shape, *arguments)

    monkeypatch.setattr(SimulatedMatmul, "prepare", fail_on_one_shape)
    code, out, _ = sweep("--m", "256", "512", "--output", "run.jsonl")
    assert code == 0
    assert "simulated.mm 256x4096x4096: failed: RuntimeError: CUDA error" in out
    monkeypatch.setattr(SimulatedMatmul, "prepare", prepare)
    code, out, _ = sweep("--resume", "run.jsonl")
    assert code == 0
    assert "failed" not in out
    assert all(row.ok for row in read_run_log(tmp_path / "run.jsonl").measurements)


def test_the_warnings_of_a_resumed_run_are_in_its_log(sweep, run, monkeypatch):
    sweep("--m", "256", "512", "--output", "run.jsonl", "--budget", "1.0001s")
    assert "host load" not in run("show", "run.jsonl")[1]
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 90.0)
    code, out, _ = sweep("--resume", "run.jsonl")
    assert (code, out.count("host load")) == (0, 1)
    assert run("show", "run.jsonl")[1].count("host load") == 1


def test_a_log_that_is_being_written_is_not_resumed(sweep, tmp_path):
    sweep("--m", "256", "512", "--output", "run.jsonl", "--budget", "1.0001s")
    log = read_run_log(tmp_path / "run.jsonl")
    with RunLogWriter.resume(log.path)[1]:
        code, _, err = sweep("--resume", "run.jsonl")
    assert code == 2
    assert "another process is writing" in err


def test_resuming_a_complete_log_shows_it_and_leaves_it_unchanged(sweep, tmp_path):
    sweep("--m", "256", "--output", "run.jsonl")
    before = (tmp_path / "run.jsonl").read_bytes()
    code, out, err = sweep("--resume", "run.jsonl")
    assert code == 0
    assert "run.jsonl is complete, so this run measures nothing" in err
    assert "complete; 1 measurement in" in out
    assert (tmp_path / "run.jsonl").read_bytes() == before


def test_an_option_that_agrees_with_the_log_to_resume_does_not_change_its_shapes(sweep, tmp_path):
    sweep("--m", "256", "512", "--output", "run.jsonl", "--budget", "1.0001s")
    code, _, err = sweep("--resume", "run.jsonl", "--dtype", "bfloat16")
    assert (code, err) == (0, "")
    assert len(read_run_log(tmp_path / "run.jsonl").measurements) == 2
    code, _, err = sweep("--resume", "run.jsonl", "--dtype", "float16")
    assert (code, "--dtype float16 contradicts run.jsonl" in err) == (2, True)


def test_a_budget_within_the_warm_up_of_classic_is_refused(sweep):
    code, _, err = sweep("--m", "256", "--regime", "classic", "--budget", "12s", "--output", "x")
    assert code == 2
    assert "warms up for 30 s" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["sweep", "--shapes", "64x64x64,128x64x64"],
        ["sweep", "--dtype", "float32,bfloat16"],
        ["attention", "--kernel", "eager,sdpa"],
        ["attention", "--shapes", "b1h4q64d64,b1h4q128d64"],
        ["attention", "--operation", "decode", "--shapes", "b1h8kv8q1c64d64,b1h8kv8q1c128d64"],
    ],
)
def test_commas_between_values_are_refused_with_advice(run, arguments):
    code, out, err = run(*arguments, "--backend", SIMULATED[1])
    assert (code, out) == (2, "")
    assert "separate several values with spaces, not commas" in err


@pytest.mark.parametrize("has_room_for_summary", [False, True])
def test_a_full_disk_ends_the_run_but_keeps_its_rows(sweep, monkeypatch, tmp_path, has_room_for_summary):
    real_write = os.write
    writes = []

    def write_until_disk_is_full(descriptor, data):
        writes.append(data)
        if len(writes) > 2 and not (has_room_for_summary and b'"summary"' in data[:30]):
            raise OSError(28, "No space left on device")
        return real_write(descriptor, data)

    monkeypatch.setattr(os, "write", write_until_disk_is_full)
    code, out, err = sweep("--m", "256", "512", "768", "1024", "--output", "run.jsonl")
    assert code == 1
    assert "best burst" in out
    assert "No space left" in out + err
    assert len(read_run_log(tmp_path / "run.jsonl").measurements) == 2


def test_a_full_disk_after_the_last_row_does_not_hide_the_ceilings(run, monkeypatch):
    real_write = os.write

    def fail_to_write_ceilings(descriptor, data):
        if b'"ceiling"' in data[:30]:
            raise OSError(28, "No space left on device")
        return real_write(descriptor, data)

    find = ["find", *SIMULATED, "--budget", "20s"]
    code, complete_out, _ = run(*find, "--output", "whole.jsonl")
    assert code == 0
    monkeypatch.setattr(os, "write", fail_to_write_ceilings)
    code, out, err = run(*find, "--output", "full.jsonl")
    assert code == 1
    assert "No space left" in err
    assert out.replace("full.jsonl", "whole.jsonl") == complete_out


def test_a_run_that_its_budget_ended_can_be_resumed(sweep, tmp_path):
    shapes = ["--m-range", "0", "8192", "256", "--n", "8192", "--k", "8192"]
    code, out, _ = sweep(*shapes, "--budget", "1.3s", "--output", "run.jsonl")
    assert code == 0
    assert "the budget ended" in out
    assert "measurements left: continue with --resume" in out
    code, out, _ = sweep("--resume", "run.jsonl")
    assert code == 0
    counts = re.search(r"complete; (\d+) measurements in [\d.]+ s since the run continued, 31 in total", out)
    assert counts and 0 < int(counts[1]) < 31
    assert len(read_run_log(tmp_path / "run.jsonl").measurements) == 31


def test_a_log_of_another_device_is_not_resumed(sweep, tmp_path, monkeypatch):
    sweep("--m", "256", "--output", "run.jsonl")
    monkeypatch.setattr(SimulatedBackend, "physics", SimulatedBackend.physics.__class__(compute_units=108))
    code, _, err = sweep("--resume", "run.jsonl")
    assert code == 2
    assert "compute_units 132, not 108" in err


def test_when_no_shape_can_be_measured_the_exit_code_says_so(sweep):
    code, out, _ = sweep("--m", "900000", "--n", "900000", "--output", "x")
    assert code == 1
    assert "simulated.mm 900000x900000x4096: out of memory\n" in out


def test_backends_lists_each_backend_with_its_devices_or_how_to_enable_it(run):
    code, out, _ = run("backends")
    assert code == 0
    for name in ("cpu", "cuda", "rocm", "xpu", "hpu", "mps", "tpu"):
        assert any(line.startswith(name) for line in out.splitlines())
    assert out.count("unavailable:") == out.count("to enable it:")


@pytest.mark.parametrize("command", [["backends"], ["kernels", "--backend", "cpu"]])
def test_a_list_on_a_terminal_of_80_columns_keeps_every_word(run, monkeypatch, command):
    _, wide_out, _ = run(*command)
    monkeypatch.setattr("mamf.cli.terminal.find_terminal_width", lambda stream=None: 80)
    _, narrow_out, _ = run(*command)
    assert max(map(len, wide_out.splitlines())) > 80 >= max(map(len, narrow_out.splitlines()))
    assert wide_out.split() == narrow_out.split()


@pytest.mark.parametrize(("backend", "check"), [("cpu", "cpu load"), (SIMULATED[1], "host load")])
def test_doctor_checks_the_load_of_the_machine(run, monkeypatch, looked_at_load, backend, check):
    monkeypatch.setattr(psutil, "cpu_percent", looked_at_load)
    code, out, _ = run("doctor", "--backend", backend)
    assert code == 0
    assert check in out


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("1.5h", 5400)])
def test_a_duration_is_converted_to_seconds(text, seconds):
    assert parse_duration(text) == seconds


def warn_twice(options):
    for _ in range(2):
        warnings.warn("not used: a broken file", MamfWarning, stacklevel=1)
        warnings.warn_explicit("not used:\nall of it", UserWarning, "library.py", 3, registry={})
    return 0


def test_a_repeated_warning_is_printed_once_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr("mamf.cli.commands.backends.run_with_options", warn_twice)
    assert main(["backends"]) == 0
    assert capsys.readouterr().err == "mamf: not used: a broken file\nmamf: UserWarning: not used:\n"


def test_warnings_of_a_script_are_printed_as_python_does(monkeypatch, capsys):
    monkeypatch.setattr("mamf.cli.commands.profile.run_with_options", warn_twice)
    with warnings.catch_warnings(record=True) as recorded_warnings:
        warnings.simplefilter("always")
        assert main(["profile", "train.py"]) == 0
    assert capsys.readouterr().err == "mamf: not used: a broken file\n"
    assert [(each.filename, each.lineno, str(each.message)) for each in recorded_warnings] == 2 * [
        ("library.py", 3, "not used:\nall of it")
    ]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("variables", "has_colors"),
    [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({}, False)],
)
def test_verdicts_have_colors_only_on_a_terminal_with_colors(monkeypatch, variables, has_colors):
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    print_line("row is SLOWER than \x1b[32mOK", stream)
    assert stream.getvalue() == (
        "row is \x1b[31mSLOWER\x1b[0m than \\x1b[32mOK\n" if has_colors else "row is SLOWER than \\x1b[32mOK\n"
    )
    stream = io.StringIO()
    print_line("OK", stream)
    assert stream.getvalue() == "OK\n"


def test_a_warning_clears_the_progress_line_which_then_appears_below_it(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with ProgressBar(None) as progress:
        progress.show_phase("warming up")
        warn("the card is hot")
        *_, line, blanks, warning, line_below = sys.stderr.getvalue().split("\r")
    assert (line, warning) == (line_below, "mamf: the card is hot\n")
    assert "warming up" in line
    assert blanks == " " * len(line)


def test_the_progress_line_shows_the_budget_of_a_run(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with ProgressBar(79, budget_seconds=60.0) as progress:
        progress.show_phase("measuring")
    assert "0/79 [00:00 of 01:00]" in sys.stderr.getvalue()
    with ProgressBar(None, budget_seconds=60.0) as progress:
        progress.show_phase("searching")
    assert "0 [00:00 of 01:00]  searching" in sys.stderr.getvalue()


def test_the_progress_line_shows_no_remaining_time_if_rows_differ_in_length(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with ProgressBar(79, is_steady=False) as progress:
        progress.show_phase("measuring")
    assert "0/79 [00:00]" in sys.stderr.getvalue()


def test_the_progress_line_shows_which_step_is_prepared_and_then_the_phase_again(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    phases = []
    with ProgressBar(None) as progress, add_phase_listener(phases.append):
        progress.show_phase("burst: a coarse grid")
        progress.show_step("8x8x8 torch.mm", False)
        progress.show_step("8x8x8 torch.mm", True)
        lines = [line.removeprefix("0 [00:00]  ").strip() for line in sys.stderr.getvalue().split("\r")]
    assert lines[-3:] == ["burst: a coarse grid", "preparing 8x8x8 torch.mm", "burst: a coarse grid"]
    assert phases == ["burst: a coarse grid", "preparing 8x8x8 torch.mm", "measuring 8x8x8 torch.mm"]


def test_the_progress_of_a_verification_counts_wrong_results_in_place_of_the_best_row(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    wrong_row = Measurement(
        MatmulShape(8, 8, 8), "mine", MatmulProblem(), "loaded", "median", "wrong_result", "0.5 off"
    )
    with ProgressBar(None, shows_best_rows=False) as progress:
        progress.add_row(wrong_row)
        progress.show_phase("next problem")
    assert "1 [00:00], 1 wrong  next problem" in sys.stderr.getvalue()


@pytest.mark.parametrize(
    ("typed", "completion"),
    [
        ("mamf fi", "find "),
        ("mamf find --dtype bfl", "bfloat16 "),
        ("mamf find --operation ban", "bandwidth "),
        ("mamf attention --operation dec", "decode "),
        ("mamf attention --preset llama-70b-d", "llama-70b-decode "),
        ("mamf attention --preset fa3-p", "fa3-paper "),
    ],
)
def test_a_shell_completes_commands_and_names(typed, completion, tmp_path):
    shell_variables = {"_ARGCOMPLETE": "1", "COMP_LINE": typed, "COMP_POINT": str(len(typed))}
    shell_variables["_ARGCOMPLETE_STDOUT_FILENAME"] = str(tmp_path / "words")
    subprocess.run([sys.executable, "-m", "mamf"], env=os.environ | shell_variables, check=True)
    assert (tmp_path / "words").read_text() == completion


def test_a_command_ends_although_a_plugin_left_a_thread_running():
    code = (
        "import sys, threading, mamf.cli as cli\n"
        "threading.Thread(target=threading.Event().wait, name='worker').start()\n"
        "cli._MAX_THREAD_WAIT_SECONDS, sys.argv = 0.0, ['mamf', '--version']\n"
        "sys.exit(cli.main())"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stdout[:5]) == (0, "mamf ")
    assert process.stderr == "mamf: mamf ends now, although a plugin has left these threads running: worker\n"


def test_a_process_that_continues_after_a_command_may_have_running_threads():
    code = (
        "import sys, threading, mamf.cli as cli\n"
        "done = threading.Event()\n"
        "worker = threading.Thread(target=done.wait)\n"
        "worker.start()\n"
        "cli._MAX_THREAD_WAIT_SECONDS, sys.argv = 0.0, ['mamf', '--version']\n"
        "cli.main()\n"
        "[each.join(0.1) for each in threading.enumerate() if each.daemon]\n"
        "print('goes on')\n"
        "done.set()\n"
        "worker.join()"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert process.stderr == "goes on\n"  # mamf redirects it, because stdout is for reports only


def test_ctrl_c_that_a_library_catches_during_an_import_still_ends_the_command(run, monkeypatch):
    import_module, imported_names = importlib.import_module, []

    def import_and_catch_ctrl_c(name):
        if name.startswith("mamf.cli.commands."):
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            imported_names.append(name)
        return import_module(name)

    monkeypatch.setattr(importlib, "import_module", import_and_catch_ctrl_c)
    assert run("kernels", "--operation", "matmul") == (130, "", "")
    assert imported_names


def test_a_command_works_in_another_thread(capsys):
    exit_codes = []
    thread = threading.Thread(target=lambda: exit_codes.append(main(["kernels", "--operation", "matmul"])))
    thread.start()
    thread.join()
    assert exit_codes == [0] and "torch.mm" in capsys.readouterr().out
