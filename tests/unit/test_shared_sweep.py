"""``--devices``: a run that several devices share: rows name theirs, are compared by a reference, and none is lost."""

from dataclasses import replace

import pytest
import simulated_node
import virtual_pool
from forked import Child

from mamf.logs import known
from mamf.logs.run_log import read_run_log
from mamf.testing import Physics

SWEEP = ["sweep", "--backend", "simulated", "--output", "log.jsonl", "--devices", "all"]
GRID = ["--m-range", "1024", "12288", "1024", "--precision", "20%"]
#: How fast the devices are to the first.
SPEEDS = (1.0, 1.03, 0.98, 1.01)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    simulated_node.install(monkeypatch)
    known._installed.cache_clear()
    yield
    known._installed.cache_clear()


def card(index):
    backend = simulated_node.Node(index)
    backend.world = replace(Physics(), efficiency=0.795 * SPEEDS[index])
    backend.info = replace(backend.info, uuid_hash=f"card{index}")
    return backend


@pytest.fixture
def shared(run, monkeypatch):
    """Run a command on simulated devices that share it in virtual time; returns what it said, and its log."""

    def command(*arguments, ends=None, hangs=(), log="log.jsonl"):
        command.pools = virtual_pool.install(monkeypatch, card, ends, hangs)
        said = run(*arguments)
        return said, read_run_log(run.folder / log)

    return command


def own(log):
    return [row for row in log.measurements if not row.is_reference]


def test_two_processes_share_a_sweep_and_its_log_is_one(run, monkeypatch):
    monkeypatch.setattr("mamf.node.children.started", Child)
    monkeypatch.setenv(simulated_node.DEVICES, "2")
    code, out, err = run(*SWEEP, *GRID)
    assert (code, err) == (0, "")
    log = read_run_log(run.folder / "log.jsonl")
    assert log.tier == "complete"
    assert len(own(log)) == len(log.plan.shapes) == 11
    assert {row.device for row in own(log)} <= {0, 1}
    assert [device.index for device in log.devices] == [0, 1]
    assert "burst bfloat16: device 1 " in out


def test_each_takes_the_next_shape_when_it_is_free_and_rows_are_ranked_as_of_the_first(run, shared):
    (code, out, err), log = shared(*SWEEP, *GRID)
    print(out)
    assert (code, err) == (0, "")
    assert {row.shape for row in own(log)} == set(log.plan.shapes)
    assert len(own(log)) == len(log.plan.shapes)
    assert 0
