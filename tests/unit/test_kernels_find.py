"""Test ``mamf find`` for an operation other than matmul (attention), in virtual time."""

import shutil

import pytest
from contribution_logs import found

from mamf.ceilings.ceiling import CHOOSE_PHASE, CONFIRM_PHASE, find_confirmed_ceiling
from mamf.cli import main
from mamf.logs.run_log import read_run_log

ASKED = [
    *("find", "--operation", "attention", "--backend", "mamf.testing:SimulatedBackend"),
    *("--kernel", "mamf.testing:SimulatedAttention", "--set", "direction=fwd,bwd"),
    *("--shapes", "b4h16q4096k4096d128", "b4h16q8192k8192d128", "b2h16q16384k16384d128"),
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("find") / "find.jsonl"
    assert main([*ASKED, "--output", str(path)]) == 0
    return path


@pytest.fixture
def log(run, measured, tmp_path):
    return read_run_log(shutil.copy(measured, tmp_path))


def test_ceilings_are_what_fresh_rounds_give(log):
    device = log.header["device"]
    for (problem, regime), ceiling in log.other_ceilings.items():
        rows = [row for row in log.measurements if row.phase in (CHOOSE_PHASE, CONFIRM_PHASE)]
        own = [row for row in rows if (row.problem, row.regime) == (problem, regime)]
        again = find_confirmed_ceiling(own, device["name"], device["uuid_hash"], "simulated-attention")
        assert (again.shape, again.kernel, again.round_count) == (ceiling.shape, ceiling.kernel, ceiling.round_count)
        assert ceiling.rate == pytest.approx(again.rate, rel=1e-5)


def test_what_was_cut_off_goes_on_and_measures_nothing_twice(run, log, tmp_path):
    whole = log.path.read_text().splitlines()
    rows = [number for number, line in enumerate(whole) if '"record": "measurement"' in line]
    for cut in (rows[2], rows[len(rows) // 2], rows[-1]):
        path = tmp_path / f"cut{cut}.jsonl"
        path.write_text("\n".join(whole[: cut + 1]) + "\n")
        assert run(*ASKED, "--resume", path.name)[0] == 0
        again = read_run_log(path)
        steps = [
            (row.problem, row.regime, row.shape, row.kernel, row.phase, row.round_number) for row in again.measurements
        ]
        assert len(steps) == len(set(steps)) == path.read_text().count('"record": "measurement"')
        assert again.other_ceilings.keys() == log.other_ceilings.keys()
        assert not found(path) & {"ceiling-mismatch", "best-mismatch", "duplicate-row", "foreign-row", "missing-row"}


def test_a_budget_is_kept_and_says_what_is_lacking(run, tmp_path):
    code, out, _ = run(*ASKED, "--budget", "0.9s", "--output", "short.jsonl")
    log = read_run_log(tmp_path / "short.jsonl")
    assert code == 0
    assert (log.summary["status"], log.summary["reason"]) == ("interrupted", "the budget ended")
    assert log.summary["left"] == 4 - len(log.other_ceilings) > 0
    assert f"{log.summary['left']} ceilings left: continue with --resume" in out
