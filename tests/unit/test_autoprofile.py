"""Test ``mamf autoprofile`` in virtual time: it fills a folder with logs, and makes SUMMARY.md from these logs."""

import re
import shutil
import signal
import sys
from pathlib import Path

import library
import pytest
from refusals import assert_refused
from test_counters_command import printed

from mamf.cli import main
from mamf.cli.commands.autoprofile import (
    HEADING_BY_LOG_FILE,
    SUMMARY_FILE_NAME,
    AutoprofileCommands,
    make_summary_markdown,
)
from mamf.errors import NothingProfiledError
from mamf.logs.run_log import read_run_log
from mamf.profiling.counters import ncu
from mamf.profiling.log import write_profile
from mamf.profiling.profile import ClassRow, Profile
from mamf.testing import SimulatedBackend

MODEL = "mamf"  # the name of the script in the profile that the stub writes
COMMAND = ["autoprofile", "--output-folder", "out"]
PROFILE = Profile(
    seconds=0.1,
    steps=2,
    device="Simulated H100",
    is_of_device=True,
    classes=(ClassRow("matmul", 0.05, 0.0, 10, {"bfloat16": 10**13}, 0.05, 0.3),),
    kernels=(),
    unprofiled_step_seconds=0.04,
)


def stub_commands(patch):
    """Replace ``mamf profile`` and ``mamf plot``, which take seconds, by functions that return at once."""

    def profile(options):
        write_profile(options.output, "mamf profile", "mamf", PROFILE)
        return 0

    patch.setattr("mamf.cli.commands.profile.run_with_options", profile)
    patch.setattr("mamf.cli.commands.plot.run_with_options", lambda options: 0)


@pytest.fixture
def stubbed(machine, monkeypatch):
    stub_commands(monkeypatch)


@pytest.fixture(scope="module")
def filled_folder(library_logs, tmp_path_factory):
    """Return a folder that ``mamf autoprofile`` has filled."""
    folder = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as patch:
        library.install(patch)
        patch.chdir(folder)
        stub_commands(patch)
        assert main(COMMAND) == 0
    return folder / "out"


@pytest.fixture
def folder(stubbed, filled_folder):
    return shutil.copytree(filled_folder, Path("out"))


def read_summary(folder):
    return (folder / SUMMARY_FILE_NAME).read_text()


def test_one_command_fills_a_folder(filled_folder):
    logs = HEADING_BY_LOG_FILE.keys() - {"counters.jsonl"}
    assert {path.name for path in filled_folder.iterdir()} == {*logs, SUMMARY_FILE_NAME}
    text = read_summary(filled_folder)
    assert text.startswith("# Simulated H100: what it can do, and what kernels reach\n")
    assert [
        heading for heading in HEADING_BY_LOG_FILE.values() if f"## {heading.format(model=MODEL)}\n" not in text
    ] == []
    assert [name for name in logs if f"`mamf show` [{name}]({name})" not in text] == []
    assert "not measured: mamf reads hardware counters with NVIDIA's ncu, which does not support" in text
    assert "| matmul | " in text


def test_the_same_command_measures_nothing_twice(folder, on_launch):
    before = {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}
    launches = []
    on_launch(launches.append)
    assert main(COMMAND) == 0
    assert not launches
    assert {path.name: path.read_bytes() for path in folder.glob("*.jsonl")} == before


def test_a_run_that_ctrl_c_ended_is_completed_by_the_same_command(stubbed, on_launch):
    def interrupt(launches):
        if launches == 40:
            signal.raise_signal(signal.SIGINT)

    on_launch(interrupt)
    assert main(COMMAND) == 130
    assert "not measured: the run ended before" in read_summary(Path("out"))
    on_launch(None)
    assert main(COMMAND) == 0
    assert "the run ended before" not in read_summary(Path("out"))


def test_a_command_that_fails_is_reported_and_the_others_run(stubbed, monkeypatch):
    def fail(options):
        raise NothingProfiledError("no optimizer of torch stepped", 0)

    monkeypatch.setattr("mamf.cli.commands.profile.run_with_options", fail)
    assert main(COMMAND) == 1
    text = read_summary(Path("out"))
    assert "not measured: nothing was profiled: no optimizer of torch stepped" in text
    assert "`mamf show` [kernels.jsonl](kernels.jsonl)" in text


def test_counters_are_of_the_fastest_kernels_on_the_shape_with_the_most_work(folder, monkeypatch):
    monkeypatch.setattr(SimulatedBackend, "explain_missing_counters", lambda self: None)
    monkeypatch.setattr(ncu.shutil, "which", lambda name: sys.executable if name == "ncu" else None)
    monkeypatch.setattr(ncu, "run_and_capture_output", lambda command: (printed([0]), ""))
    assert main(COMMAND) == 0
    log, kernels = read_run_log(folder / "counters.jsonl"), read_run_log(folder / "kernels.jsonl")
    assert {row.work_amount for row in log.measurements} == {
        max(row.work_amount for row in kernels.measurements if row.operation == "attention")
    }
    assert "bound by launch (its kernel runs for" in read_summary(folder)
    # A second run must succeed even if it would choose other kernels than those in counters.jsonl.
    monkeypatch.setattr("mamf.cli.commands.autoprofile._MAX_COUNTED_KERNELS", 1)
    assert main(COMMAND) == 0


def make_ceilings_noisy(folder):
    """Widen the intervals in ceilings.jsonl so much that they count as unknown. Return the new text of the log."""
    log = folder / "ceilings.jsonl"
    log.write_text(re.sub(r'"interval_tflops": \[[^,]+, [^]]+', '"interval_tflops": [1.0, 90000.0', log.read_text()))
    return log.read_text()


def test_figures_with_an_unknown_interval_are_measured_again(folder, capsys):
    log, noisy, bandwidth = folder / "ceilings.jsonl", make_ceilings_noisy(folder), folder / "bandwidth.jsonl"
    bandwidth.write_text(
        re.sub(r'"repeatability": \{"run": [^,]+', '"repeatability": {"run": 0.9', bandwidth.read_text())
    )
    assert not read_run_log(bandwidth).measurements[0].interval.is_known
    assert main(COMMAND) == 0
    assert all(ceiling.interval.is_known for ceiling in read_run_log(log).ceilings.values())
    assert read_run_log(bandwidth).measurements[0].interval.is_known
    assert (folder / "ceilings.noisy").read_text() == noisy, "mamf must keep the noisy log"
    assert (folder / "bandwidth.noisy").exists()
    assert "so mamf measures again; it keeps out/ceilings.noisy" in " ".join(capsys.readouterr().err.split())


def test_an_incomplete_log_with_an_unknown_interval_is_resumed(folder):
    log = folder / "ceilings.jsonl"
    lines = make_ceilings_noisy(folder).splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"record": "summary"' not in line))
    assert main(COMMAND) in (0, 1)
    assert log.read_text().startswith(lines[0]) and not (folder / "ceilings.noisy").exists()


def test_kernels_wait_for_a_ceiling_with_a_known_interval(folder, monkeypatch, capsys):
    (folder / "kernels.jsonl").unlink()
    monkeypatch.setattr(AutoprofileCommands, "_set_noisy_logs_aside", lambda self: None)
    make_ceilings_noisy(folder)
    assert main(COMMAND) == 1
    reason = "too noisy to compare rates with it: run 'mamf autoprofile' again while nothing else runs\n"
    assert reason in read_summary(folder)
    assert reason in " ".join(capsys.readouterr().err.split()) + "\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output-folder", "file"], "cannot create folder file"),
        (["--output-folder", "other"], "SUMMARY.md was not written by 'mamf autoprofile'"),
        (["--dtype", "float15"], "unknown dtype 'float15' (did you mean 'float16'?)"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(stubbed, capsys, options, message):
    Path("file").touch()
    Path("other").mkdir()
    Path("other", SUMMARY_FILE_NAME).touch()
    assert_refused((main(["autoprofile", *options]), *capsys.readouterr()), message)


def test_the_published_summary_follows_from_its_logs():
    folder = Path(__file__).parents[2] / "docs" / "autoprofile-h200"
    assert read_summary(folder) == make_summary_markdown(folder, {})
