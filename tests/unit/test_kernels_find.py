"""Test ``mamf find`` for an operation other than matmul (attention), in virtual time."""

import shutil

import pytest
from contribution_logs import found

from mamf.ceilings.ceiling import CHOOSE_PHASE, CONFIRM_PHASE, find_confirmed_ceiling
from mamf.cli import main
from mamf.logs.run_log import read_run_log

FIND_COMMAND = [
    *("find", "--operation", "attention", "--backend", "mamf.testing:SimulatedBackend"),
    *("--kernel", "mamf.testing:SimulatedAttention", "--set", "direction=fwd,bwd"),
    *("--shapes", "b4h16q4096k4096d128", "b4h16q8192k8192d128", "b2h16q16384k16384d128"),
]


@pytest.fixture(scope="module")
def find_log(tmp_path_factory):
    path = tmp_path_factory.mktemp("find") / "find.jsonl"
    assert main([*FIND_COMMAND, "--output", str(path)]) == 0
    return path


@pytest.fixture
def log(run, find_log, tmp_path):
    return read_run_log(shutil.copy(find_log, tmp_path))


def test_the_ceilings_of_a_log_follow_from_its_rounds(log):
    device = log.header["device"]
    for (problem, regime), ceiling in log.other_ceilings.items():
        rows = [row for row in log.measurements if row.phase in (CHOOSE_PHASE, CONFIRM_PHASE)]
        ceiling_rows = [row for row in rows if (row.problem, row.regime) == (problem, regime)]
        recomputed = find_confirmed_ceiling(ceiling_rows, device["name"], device["uuid_hash"], "simulated-attention")
        assert (recomputed.shape, recomputed.kernel, recomputed.round_count) == (
            ceiling.shape,
            ceiling.kernel,
            ceiling.round_count,
        )
        assert ceiling.rate == pytest.approx(recomputed.rate, rel=1e-5)


def test_a_cut_off_find_is_resumed_and_measures_no_row_twice(run, log, tmp_path):
    lines = log.path.read_text().splitlines()
    row_lines = [number for number, line in enumerate(lines) if '"record": "measurement"' in line]
    for last_line in (row_lines[2], row_lines[len(row_lines) // 2], row_lines[-1]):
        path = tmp_path / f"cut{last_line}.jsonl"
        path.write_text("\n".join(lines[: last_line + 1]) + "\n")
        assert run(*FIND_COMMAND, "--resume", path.name)[0] == 0
        resumed_log = read_run_log(path)
        row_keys = [
            (row.problem, row.regime, row.shape, row.kernel, row.phase, row.round_number)
            for row in resumed_log.measurements
        ]
        assert len(row_keys) == len(set(row_keys)) == path.read_text().count('"record": "measurement"')
        assert resumed_log.other_ceilings.keys() == log.other_ceilings.keys()
        assert not found(path) & {"ceiling-mismatch", "best-mismatch", "duplicate-row", "foreign-row", "missing-row"}


def test_a_find_whose_budget_ends_says_how_many_ceilings_are_left(run, tmp_path):
    code, out, _ = run(*FIND_COMMAND, "--budget", "0.9s", "--output", "short.jsonl")
    log = read_run_log(tmp_path / "short.jsonl")
    assert code == 0
    assert (log.summary["status"], log.summary["reason"]) == ("interrupted", "the budget ended")
    assert log.summary["left"] == 4 - len(log.other_ceilings) > 0
    assert f"{log.summary['left']} ceilings left: continue with --resume" in out
