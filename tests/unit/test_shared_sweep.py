"""``--devices``: a run that several devices share: rows name theirs, are compared by a reference, and none is lost."""

import json

import pytest
import simulated_node
from forked import Child

from mamf.logs import known
from mamf.logs.run_log import read_run_log

SWEEP = ["sweep", "--backend", "simulated", "--kernel", "simulated.mm", "--output", "log.jsonl"]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    simulated_node.install(monkeypatch)
    monkeypatch.setattr("mamf.node.children.started", Child)
    known._installed.cache_clear()
    yield
    known._installed.cache_clear()


def test_two_processes_share_a_sweep_and_its_log_is_one(run, monkeypatch):
    monkeypatch.setenv(simulated_node.DEVICES, "2")
    monkeypatch.setenv(simulated_node.FAULTS, json.dumps({"1": {"physics": {"efficiency": 0.795 * 1.03}}}))
    code, out, err = run(*SWEEP, "--m-range", "1024", "8192", "1024", "--devices", "all")
    assert code == 0, err
    log = read_run_log(run.folder / "log.jsonl")
    print(out)
    for row in log.measurements:
        print(row.device, row.is_reference, row.device_speed, row)
    assert 0
