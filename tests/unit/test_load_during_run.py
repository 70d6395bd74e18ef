"""Test that a run's log and its report warn if other processes used the CPU during the run."""

import json
import time

import pytest

from mamf.logs.run_log import read_run_log
from mamf.machine.environment import CpuUse

SIMULATED = "mamf.testing:SimulatedBackend", "mamf.testing:SimulatedMatmul"
SWEEP = ("sweep", "--backend", SIMULATED[0], "--kernel", SIMULATED[1], "--shapes", "2048x2048x2048")
START = CpuUse(time=100.0, all_seconds=1000.0, own_seconds=50.0, capacity_seconds=4000.0)
WARNING = "WARN host load: other processes used 60 % of the CPU during the run"


def use_cpu(seconds, others_share):
    """Return the use of a CPU with 4 cores ``seconds`` after START. In this time, this process used one core, and other
    processes used the share ``others_share`` of all cores.
    """
    return CpuUse(100.0 + seconds, 1000.0 + seconds * (1 + 4 * others_share), 50.0 + seconds, 4000.0 + 4 * seconds)


@pytest.mark.parametrize(
    ("seconds", "others_share", "is_busy"), [(60.0, 0.6, True), (60.0, 0.1, False), (1.0, 0.6, False)]
)
def test_load_that_begins_during_a_run_is_in_the_log_and_in_its_report(
    run, tmp_path, monkeypatch, seconds, others_share, is_busy
):
    uses = iter([START, use_cpu(seconds, others_share)])
    monkeypatch.setattr(CpuUse, "read", lambda: next(uses))
    path = tmp_path / "log.jsonl"
    code, out, _ = run(*SWEEP, "--output", str(path))
    assert code == 0
    assert (WARNING in " ".join(out.split())) is is_busy
    assert ("findings" in json.loads(path.read_text().splitlines()[-1])) is is_busy
    assert any(line.startswith(WARNING) for line in read_run_log(path).header["findings"]) is is_busy


def test_a_run_works_on_a_system_that_does_not_report_the_load(run, tmp_path, monkeypatch):
    monkeypatch.setattr(CpuUse, "read", lambda: None)
    assert run(*SWEEP, "--output", str(tmp_path / "log.jsonl"))[0] == 0


def test_the_cpu_time_of_this_process_counts_as_own_use():
    before = CpuUse.read()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    after = CpuUse.read()
    assert after.own_seconds - before.own_seconds > 0.15
    assert after.all_seconds - before.all_seconds > 0.15
    assert after.capacity_seconds - before.capacity_seconds > 0.15
