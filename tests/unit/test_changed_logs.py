"""Test runs during which another program changes the log.

mamf loses no row. Commands that measure print the new name of the log and exit with code 1. The Python API issues a
warning.
"""

import os
import shutil
import signal
import warnings
from collections import Counter
from pathlib import Path

import pytest

import mamf
from mamf.errors import LogChangedWarning
from mamf.logs.run_log import read_run_log
from mamf.logs.writer import RunLogWriter
from mamf.testing import SimulatedBackend

SIMULATED = ("--backend", "mamf.testing:SimulatedBackend", "--kernel", "mamf.testing:SimulatedMatmul")
SHAPES = ("--m", "256", "512", "1024", "--n", "512", "--k", "512", "--order", "given")
LOG = Path("logs/run.jsonl")


@pytest.fixture
def sweep(run):
    """Return a function that runs ``mamf sweep`` on the simulated device. Create the folder ``logs`` for its log."""
    (run.folder / "logs").mkdir()
    return lambda *arguments: run("sweep", *SIMULATED, *arguments)


@pytest.fixture
def call_before_row(monkeypatch):
    """Return a function that makes mamf call ``change_log`` before it writes the row with the index ``row_index``."""

    def install(row_index, change_log):
        write, record_counts = RunLogWriter.write, Counter()

        def change_log_and_write(self, record, fields):
            if record_counts[record] == row_index and record == "measurement":
                change_log()
            record_counts[record] += 1
            write(self, record, fields)

        monkeypatch.setattr(RunLogWriter, "write", change_log_and_write)

    return install


def replace_log(content=b"mine"):
    Path("mine").write_bytes(content)
    Path("mine").replace(LOG)


def truncate_log(size):
    os.truncate(LOG, size)


def extend_log(content="from elsewhere\n"):
    with LOG.open("a") as file:
        file.write(content)


def replace_log_by(make):
    LOG.unlink()
    make(LOG)


def read_sizes_of_m(log):
    return sorted(row.shape.m for row in read_run_log(log).all_rows)


CHANGES = {
    "deleted": (LOG.unlink, "run.jsonl"),
    "renamed": (lambda: LOG.rename("logs/other"), "run.jsonl"),
    "folder deleted": (lambda: shutil.rmtree("logs"), "run.jsonl"),
    "replaced": (replace_log, "run-2.jsonl"),
    "replaced by a folder": (lambda: replace_log_by(Path.mkdir), "run-2.jsonl"),
    "emptied": (lambda: truncate_log(0), "run-2.jsonl"),
    "truncated": (lambda: truncate_log(LOG.stat().st_size - 9), "run-2.jsonl"),
    "extended": (extend_log, "run-2.jsonl"),
}


@pytest.mark.parametrize("row_index", [0, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_the_whole_log_is_written_again_and_named(sweep, call_before_row, run, change, row_index):
    change_log, name = CHANGES[change]
    call_before_row(row_index, change_log)
    code, out, err = sweep(*SHAPES, "--output", str(LOG))
    log = run.folder / "logs" / name
    assert (code, err) == (
        1,
        f"mamf: {LOG} was changed by another program, so mamf wrote the whole log again to {log}\n",
    )
    assert out.endswith(f"log: {log}\n")
    assert (read_sizes_of_m(log), read_run_log(log).tier) == ([256, 512, 1024], "complete")
    assert not list(run.folder.rglob("*.part"))


@pytest.mark.parametrize("change", ["replaced", "emptied", "truncated", "extended"])
def test_nothing_is_added_to_a_file_that_another_program_changed(sweep, call_before_row, change):
    contents = []
    call_before_row(1, lambda: (CHANGES[change][0](), contents.append(LOG.read_bytes())))
    assert sweep(*SHAPES, "--output", str(LOG))[0] == 1
    assert LOG.read_bytes() == contents[0]


def test_a_change_after_the_last_row_is_noticed_too(sweep, monkeypatch, run):
    write = os.write

    def write_and_delete_log(descriptor, data):
        byte_count = write(descriptor, data)
        if b'"record": "summary"' in data[:30]:
            LOG.unlink()
        return byte_count

    monkeypatch.setattr(os, "write", write_and_delete_log)
    code, out, _ = sweep(*SHAPES, "--output", str(LOG))
    assert (code, f"log: {run.folder / LOG}" in out) == (1, True)
    assert read_run_log(LOG).tier == "complete"


def test_a_resumed_log_that_was_deleted_before_the_first_row_is_written_again_after_ctrl_c(sweep, monkeypatch):
    sweep("--m", "256", *SHAPES[3:], "--output", str(LOG))
    content = LOG.read_bytes()

    def delete_log_and_interrupt(*arguments):
        LOG.unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("mamf.engine.traits.replace_assumed_traits", delete_log_and_interrupt)
    monkeypatch.setattr("mamf.logs.recording.apply_logged_traits", delete_log_and_interrupt)
    code, _, err = sweep("--resume", str(LOG))
    assert (code, "changed by another program" in err) == (130, True)
    assert LOG.read_bytes() == content


def test_an_interrupted_run_exits_with_130_even_if_its_log_was_deleted(sweep, call_before_row):
    call_before_row(1, lambda: (LOG.unlink(), signal.raise_signal(signal.SIGINT)))
    assert sweep(*SHAPES, "--output", str(LOG))[0] == 130
    assert read_sizes_of_m(LOG) == [256, 512]


def test_a_log_that_cannot_be_written_again_ends_the_run_and_is_not_named(sweep, call_before_row, run, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(run.folder / "logs"))
    call_before_row(1, lambda: (shutil.rmtree("logs"), Path("logs").write_text("mine")))
    code, out, err = sweep(*SHAPES, "--output", str(LOG))
    assert (code, "log: " in out, "was changed by another program; cannot create folder" in err) == (1, False, True)


def test_changing_the_working_directory_does_not_count_as_changing_the_log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = mamf.sweep(["256x256x256", "512x512x512"], backend=SimulatedBackend(), kernel=SIMULATED[3], log="run.jsonl")
    next(rows)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(rows)
    assert read_sizes_of_m(tmp_path / "run.jsonl") == [256, 512]
    assert not list(Path().iterdir())


@pytest.mark.parametrize("action", ["always", "error"])
def test_the_python_api_warns_and_loses_no_row_even_if_the_warning_is_an_error(tmp_path, action):
    path = tmp_path / "run.jsonl"
    rows = mamf.sweep(["256x256x256", "512x512x512"], backend=SimulatedBackend(), kernel=SIMULATED[3], log=path)
    next(rows)
    path.unlink()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        try:
            list(rows)
        except LogChangedWarning as error:
            assert action == "error"
            assert "changed by another program" in str(error)
        else:
            assert [warning.category for warning in caught] == [LogChangedWarning]
    assert read_sizes_of_m(path) == [256, 512]


# -- resuming a damaged log --------------------------------------------------------------------------------------------


@pytest.fixture
def log_lines(sweep):
    assert sweep(*SHAPES, "--output", str(LOG))[0] == 0
    return LOG.read_bytes().splitlines(keepends=True)


def test_the_error_says_how_to_save_the_lines_before_what_another_program_wrote(sweep, log_lines):
    LOG.write_bytes(b"".join([*log_lines[:3], b"from elsewhere\n", *log_lines[3:]]))
    code, _, err = sweep("--resume", str(LOG))
    advice = f"to save and resume the lines before it: head -n 3 {LOG} > NEW.jsonl"
    assert (code, err) == (2, f"mamf: {LOG}, line 4: the line is not a JSON object; {advice}\n")
    Path("NEW.jsonl").write_bytes(b"".join(LOG.read_bytes().splitlines(keepends=True)[:3]))
    assert sweep("--resume", "NEW.jsonl")[0] == 0
    assert read_sizes_of_m("NEW.jsonl") == [256, 512, 1024]


# -- other commands ----------------------------------------------------------------------------------------------------


SCRIPT = """
import os, torch
{change}
weight = torch.nn.Parameter(torch.zeros(2, 2))
optimizer = torch.optim.SGD([weight])
for _ in range({steps}):
    (weight @ weight).sum().backward()
    optimizer.step()
"""
PROFILE = ("profile", "--warmup", "1", "--steps", "1", "--output", "step.jsonl", "train.py")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("os.replace('mine', 'step.jsonl')", "step-2.jsonl"),
        ("os.mkdir('other'); os.chdir('other')", "step.jsonl"),
    ],
)
def test_a_profile_is_written_even_if_the_script_replaces_the_log_or_changes_the_folder(run, monkeypatch, change, name):
    Path(run.folder, "mine").write_text("mine")
    Path(run.folder, "train.py").write_text(SCRIPT.format(change=change, steps=3))
    code, _, err = run(*PROFILE)
    assert code == 0
    assert ("the profile is in" in err) == (name != "step.jsonl")
    monkeypatch.chdir(run.folder)
    assert run("show", name)[0] == 0
