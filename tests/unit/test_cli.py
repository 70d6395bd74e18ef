"""Test the command line as users see it, with a simulated accelerator and, where necessary, in a separate process."""

import io
import os
import re
import signal
import subprocess
import sys
import textwrap
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


def test_mamf_finders_spelling_works(sweep):
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
        ("swep", "there is no command 'swep' (did you mean sweep?)"),
        ("decode", "there is no command 'decode'; measure this operation with 'mamf attention --operation decode'"),
        ("grouped", "there is no command 'grouped'; measure this operation with 'mamf sweep --operation grouped'"),
        ("quux", "there is no command 'quux'; mamf --help lists all commands"),
    ],
)
def test_what_is_wrong_before_any_command_is_named(run, argument, complaint):
    assert run(argument) == (2, "", f"mamf: {complaint}\n")


def test_mamf_alone_lists_the_commands_in_groups(run):
    code, out, err = run()
    assert (code, err) == (0, "")
    assert sorted(name for names in COMMANDS_BY_HEADING.values() for name in names) == sorted(COMMAND_DESCRIPTIONS)
    for group, names in COMMANDS_BY_HEADING.items():
        assert f"\n\n{group}:\n  {names[0]} " in out
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("command", COMMAND_DESCRIPTIONS)
def test_help_begins_with_examples(run, command):
    _, out, _ = run(command, "--help")
    above = out.partition("\nusage: ")[0]
    assert sum("mamf " in line for line in above.partition("examples:\n")[2].splitlines()) >= 3, above


def test_rare_options_are_in_the_whole_help_alone(run):
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


def interrupt_at(count):
    return lambda launches: os.kill(os.getpid(), signal.SIGINT) if launches == count else None


# Launches 2 and 33 come before the end of the first row. The launch ``last`` is part of the third row.
@pytest.mark.parametrize(
    ("regime", "at"),
    [(regime, at) for regime, last in (("burst", 55), ("sustained", 4000), ("classic", 7470)) for at in (2, 33, last)],
)
def test_ctrl_c_prints_the_best_so_far_and_the_rest_resumes(sweep, on_launch, at, regime, tmp_path):
    iterations = ["--num-iterations", "5", "--num-warmup-iterations", "1"] if regime == "classic" else []
    shapes = ["--m-range", "0", "2048", "256", "--n", "32768", "--k", "32768", "--regime", regime, *iterations]
    on_launch(interrupt_at(at))
    code, out, _ = sweep(*shapes, "--output", "run.jsonl")
    assert code == 130
    assert "interrupted: by the user" in out
    before = read_run_log(tmp_path / "run.jsonl")
    assert before.summary["status"] == "interrupted"
    assert len(before.measurements) == (2 if at > 33 else 0)
    assert len(before.measurements) + before.summary["left"] == 7
    assert ("best" in out) == bool(before.measurements)
    on_launch(lambda launches: None)
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


def test_a_kernel_that_writes_nothing_is_a_row_and_not_the_end(sweep, tmp_path):
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

    def failing(self, backend, problem, wanted, *arguments):
        if wanted == shape:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return prepare(self, backend, problem, wanted, *arguments)

    monkeypatch.setattr(SimulatedMatmul, "prepare", failing)
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


def test_resuming_a_complete_log_shows_it_and_leaves_it(sweep, tmp_path):
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


@pytest.mark.parametrize("room_for_a_summary", [False, True])
def test_a_full_disk_ends_the_run_with_what_there_is(sweep, monkeypatch, tmp_path, room_for_a_summary):
    real_write = os.write
    written = []

    def disk_of_two_rows(descriptor, data):
        written.append(data)
        if len(written) > 2 and not (room_for_a_summary and b'"summary"' in data[:30]):
            raise OSError(28, "No space left on device")
        return real_write(descriptor, data)

    monkeypatch.setattr(os, "write", disk_of_two_rows)
    code, out, err = sweep("--m", "256", "512", "768", "1024", "--output", "run.jsonl")
    assert code == 1
    assert "best burst" in out
    assert "No space left" in out + err
    assert len(read_run_log(tmp_path / "run.jsonl").measurements) == 2


def test_a_full_disk_after_the_last_row_hides_no_ceiling(run, monkeypatch):
    real_write = os.write

    def disk_of_rows(descriptor, data):
        if b'"ceiling"' in data[:30]:
            raise OSError(28, "No space left on device")
        return real_write(descriptor, data)

    find = ["find", *SIMULATED, "--budget", "20s"]
    code, whole, _ = run(*find, "--output", "whole.jsonl")
    assert code == 0
    monkeypatch.setattr(os, "write", disk_of_rows)
    code, out, err = run(*find, "--output", "full.jsonl")
    assert code == 1
    assert "No space left" in err
    assert out.replace("full.jsonl", "whole.jsonl") == whole


def test_the_budget_leaves_the_rest_for_resuming(sweep, tmp_path):
    shapes = ["--m-range", "0", "8192", "256", "--n", "8192", "--k", "8192"]
    code, out, _ = sweep(*shapes, "--budget", "1.3s", "--output", "run.jsonl")
    assert code == 0
    assert "the budget ended" in out
    assert "measurements left: continue with --resume" in out
    code, out, _ = sweep("--resume", "run.jsonl")
    assert code == 0
    counts = re.search(r"complete; (\d+) measurements in [\d.]+ s since the last interruption, 31 in total", out)
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


def test_backends_lists_each_with_devices_or_the_way_to_get_them(run):
    code, out, _ = run("backends")
    assert code == 0
    for name in ("cpu", "cuda", "rocm", "xpu", "hpu", "mps", "tpu"):
        assert any(line.startswith(name) for line in out.splitlines())
    assert out.count("unavailable:") == out.count("to enable it:")


@pytest.mark.parametrize("command", [["backends"], ["kernels", "--backend", "cpu"]])
def test_a_terminal_of_80_columns_cuts_no_word_of_a_list(run, monkeypatch, command):
    _, whole, _ = run(*command)
    monkeypatch.setattr("mamf.cli.terminal.find_terminal_width", lambda stream=None: 80)
    _, broken, _ = run(*command)
    assert max(map(len, whole.splitlines())) > 80 >= max(map(len, broken.splitlines()))
    assert whole.split() == broken.split()


@pytest.mark.parametrize(("backend", "check"), [("cpu", "cpu load"), (SIMULATED[1], "host load")])
def test_doctor_gives_verdicts(run, monkeypatch, looked_at_load, backend, check):
    monkeypatch.setattr(psutil, "cpu_percent", looked_at_load)
    code, out, _ = run("doctor", "--backend", backend)
    assert code == 0
    assert check in out


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("1.5h", 5400)])
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


def warn_twice(options):
    for _ in range(2):
        warnings.warn("not used: a broken file", MamfWarning, stacklevel=1)
        warnings.warn_explicit("not used:\nall of it", UserWarning, "library.py", 3, registry={})
    return 0


def test_a_warning_is_a_line_once(monkeypatch, capsys):
    monkeypatch.setattr("mamf.cli.commands.backends.run_with_options", warn_twice)
    assert main(["backends"]) == 0
    assert capsys.readouterr().err == "mamf: not used: a broken file\nmamf: UserWarning: not used:\n"


def test_warnings_of_a_script_are_printed_as_python_does(monkeypatch, capsys):
    monkeypatch.setattr("mamf.cli.commands.profile.run_with_options", warn_twice)
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        assert main(["profile", "train.py"]) == 0
    assert capsys.readouterr().err == "mamf: not used: a broken file\n"
    assert [(each.filename, each.lineno, str(each.message)) for each in recorded] == 2 * [
        ("library.py", 3, "not used:\nall of it")
    ]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("variables", "colored"),
    [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({}, False)],
)
def test_verdicts_have_colors_on_a_terminal_that_has_them(monkeypatch, variables, colored):
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    print_line("row is SLOWER than \x1b[32mOK", stream)
    assert stream.getvalue() == (
        "row is \x1b[31mSLOWER\x1b[0m than \\x1b[32mOK\n" if colored else "row is SLOWER than \\x1b[32mOK\n"
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


def test_the_line_shows_the_budget_of_a_run_that_has_one(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with ProgressBar(79, budget_seconds=60.0) as progress:
        progress.show_phase("measuring")
    assert "0/79 [00:00 of 01:00]" in sys.stderr.getvalue()
    with ProgressBar(None, budget_seconds=60.0) as progress:
        progress.show_phase("searching")
    assert "0 [00:00 of 01:00]  searching" in sys.stderr.getvalue()


def test_the_line_shows_no_remaining_time_if_rows_differ_in_length(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with ProgressBar(79, is_steady=False) as progress:
        progress.show_phase("measuring")
    assert "0/79 [00:00]" in sys.stderr.getvalue()


def test_the_line_says_which_step_is_prepared_and_then_shows_the_phase_again(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    heard = []
    with ProgressBar(None) as progress, add_phase_listener(heard.append):
        progress.show_phase("burst: a coarse grid")
        progress.show_step("8x8x8 torch.mm", False)
        progress.show_step("8x8x8 torch.mm", True)
        lines = [line.removeprefix("0 [00:00]  ").strip() for line in sys.stderr.getvalue().split("\r")]
    assert lines[-3:] == ["burst: a coarse grid", "preparing 8x8x8 torch.mm", "burst: a coarse grid"]
    assert heard == ["burst: a coarse grid", "preparing 8x8x8 torch.mm", "measuring 8x8x8 torch.mm"]


def test_the_progress_of_a_verification_counts_wrong_results_in_place_of_the_best_row(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    wrong = Measurement(MatmulShape(8, 8, 8), "mine", MatmulProblem(), "loaded", "median", "wrong_result", "0.5 off")
    with ProgressBar(None, shows_best_rows=False) as progress:
        progress.add_row(wrong)
        progress.show_phase("next problem")
    assert "1 [00:00], 1 wrong  next problem" in sys.stderr.getvalue()


@pytest.mark.parametrize(("typed", "follows"), [("mamf fi", "find "), ("mamf find --dtype bfl", "bfloat16 ")])
def test_a_shell_completes_commands_and_names(typed, follows, tmp_path):
    shell = {"_ARGCOMPLETE": "1", "COMP_LINE": typed, "COMP_POINT": str(len(typed))}
    shell["_ARGCOMPLETE_STDOUT_FILENAME"] = str(tmp_path / "words")
    subprocess.run([sys.executable, "-m", "mamf"], env=os.environ | shell, check=True)
    assert (tmp_path / "words").read_text() == follows


def test_a_thread_that_a_plugin_left_running_keeps_no_command_from_ending():
    code = (
        "import sys, threading, mamf.cli as cli\n"
        "threading.Thread(target=threading.Event().wait, name='worker').start()\n"
        "cli._MAX_THREAD_WAIT_SECONDS, sys.argv = 0.0, ['mamf', '--version']\n"
        "sys.exit(cli.main())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout[:5]) == (0, "mamf ")
    assert ended.stderr == "mamf: mamf ends now, although a plugin has left these threads running: worker\n"


def test_a_process_that_goes_on_after_a_command_is_not_ended_for_its_threads():
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
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stderr == "goes on\n"  # mamf redirects it, because stdout is for reports only
