"""Run small, seeded versions of the attacks in tools/attack.py, and test each fault that the attacks have found."""

import json
import shutil
import signal
from random import Random

import pytest
from attacks import calls, faults, inputs
from attacks.calls import Counts, call
from attacks.honest import LEGACY, RUNS, make_logs, shorten_runs
from forked import Command


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Return the paths of undamaged logs of each kind, by name."""
    with shorten_runs():
        return make_logs(tmp_path_factory.mktemp("honest"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with shorten_runs():
        yield tmp_path


def assert_survived(counts):
    assert counts.is_clean, list(counts.examples.values())


def test_damaged_logs_are_read_or_refused_in_a_line(logs, folder, monkeypatch):
    monkeypatch.setattr(inputs, "DRAWN_EVERY", 10**6)  # draws the first log only, because drawing is slow
    assert_survived(inputs.attack_logs(logs, folder, Random(0), 25))


def test_odd_command_lines_are_refused_in_a_line(logs, folder):
    assert_survived(inputs.attack_command_lines(logs, folder, Random(0), 60))


def test_a_run_that_meets_any_fault_is_resumed_without_a_row_lost_or_measured_twice(folder):
    counts = faults.attack_runs(folder, Random(0), 20)
    assert counts.totals["kills"] >= 20
    assert counts.codes[1] and counts.codes[130]
    assert_survived(counts)


@pytest.mark.emulated
def test_processes_that_are_killed_lose_nothing(folder, monkeypatch):
    sizes = "--m-range 0 6400 64 --n 64 --k 64"
    monkeypatch.setattr(faults, "PROCESSES", (faults.AttackedRun("sweep", faults.PROCESSES[0].base_arguments, sizes),))
    monkeypatch.setattr(faults, "start_process", Command)
    assert_survived(faults.attack_processes(folder, Random(0), 2))


# -- faults that the attacks have found --------------------------------------------------------------------------------


def test_a_log_can_be_resumed_after_a_signal_during_its_header(folder):
    path, run = folder / "run.jsonl", RUNS[0]
    with faults.call_at_write(0, Random(0), lambda: signal.raise_signal(signal.SIGINT)):
        assert call(run.make_new_command(path), Counts("interrupted")).code == 130
    assert call(run.make_resume_command(path), Counts("resumed")).code == 0


def change_log(path, line_index, value, *keys):
    """Replace a value in one line of a log. The new value None deletes the field ``left``.

    ``line_index``: the index of the line, from 0. ``keys``: the keys that lead to the value.
    """
    lines = path.read_text().splitlines()
    record = holder = json.loads(lines[line_index])
    for name in keys[:-1]:
        holder = holder[name]
    holder[keys[-1]] = value
    if value is None and keys[-1] == "left":
        del holder["left"]
    lines[line_index] = json.dumps(record)
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("line_index", "value", "keys", "message"),
    [
        (0, ["a"], ("device",), "field device: expected `str | null`"),
        (0, "text", ("software",), "field software: expected `object`"),
        (1, "1e5", ("watts",), "watts: expected `float | null`"),
        (1, None, ("tflops",), "tflops: expected `object`"),
        (1, [], ("tflops", "mean"), "tflops[...]: expected `float`"),
        (-1, None, ("best",), "field best: expected `object`"),
        (-1, {}, ("best", "mean", "tflops"), "missing field `best.mean.tflops.mean`"),
        (-1, {"a": {}}, ("means",), "field means[...]: expected `float`"),
    ],
)
def test_an_imported_log_with_a_wrong_type_is_refused(line_index, value, keys, message, folder, logs):
    path = folder / "imported.jsonl"
    shutil.copy(logs[LEGACY], path)
    change_log(path, line_index, value, *keys)
    counts = Counts("imported")
    result = call(["show", str(path)], counts)
    assert_survived(counts)
    assert (result.code, message in result.err) == (2, True), result.err


def test_a_summary_without_the_field_left_is_shown(folder, logs):
    path = folder / "sweep.jsonl"
    shutil.copy(logs["sweep"], path)
    change_log(path, -1, None, "left")
    assert "complete; 6 measurements" in call(["show", str(path)], Counts("left")).out


# -- inputs of unlimited size ------------------------------------------------------------------------------------------


class FixedChoice(Random):
    """A random generator that always chooses the value at ``index``. The attacks list the smallest size first."""

    index = 0

    def choice(self, values):
        return values[self.index]


@pytest.mark.parametrize(
    ("kind", "index"), [*((kind, 0) for kind in inputs.UNBOUNDED), *(("nesting", n) for n in (1, 2, 3))]
)
def test_inputs_of_unlimited_size_are_read_or_refused_in_a_line(kind, index, logs, folder, monkeypatch):
    # Lower the limits on the sizes of inputs to an eighth or a quarter, so that smaller inputs exceed them.
    monkeypatch.setattr("mamf.cli.reading.MAX_LOG_BYTES", 64 << 20)
    monkeypatch.setattr("mamf.logs.finder.MAX_FINDER_LOG_BYTES", 32 << 20)
    monkeypatch.setattr("mamf.logs.run_log.MAX_LOG_LINE_BYTES", 2 << 20)
    monkeypatch.setattr(inputs, "BOMB_BYTES", 40 << 20)
    # The sizes are about half of those in tools/attack.py. Code whose time grows with the square of the size takes a
    # quarter of the time on them, so the time limit is a quarter too.
    monkeypatch.setattr(calls, "HANG_SECONDS", calls.HANG_SECONDS / 4)
    monkeypatch.setattr(FixedChoice, "index", index)
    counts = Counts(kind)
    inputs.UNBOUNDED[kind](logs["sweep"], folder, FixedChoice(0), counts)
    assert counts.totals["calls"]
    assert_survived(counts)
