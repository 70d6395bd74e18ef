"""Every contributed log reads, and its summary follows from its rows."""

from pathlib import Path

import pytest

from mamf.attention_sweep import AttentionPlan
from mamf.ceiling import confirmed
from mamf.finding_plan import FindPlan
from mamf.report import attention_summary_record, find_summary_record, summary_record
from mamf.run_log import read_run_log

RESULTS = Path(__file__).resolve().parents[2] / "results"
LOGS = sorted(RESULTS.rglob("*.jsonl"))


def test_there_are_results():
    assert LOGS


def recomputed_best(log):
    status, reason = log.summary["status"], log.summary["reason"]
    if isinstance(log.plan, FindPlan):
        return find_summary_record(log.measurements, recomputed_ceilings(log), status, reason, 0.0)["best"]
    if isinstance(log.plan, AttentionPlan):
        return attention_summary_record(log.measurements, log.all_ceilings, status, reason, 0.0, 0)["best"]
    return summary_record(log.measurements, status, reason, 0.0, 0)["best"]


def recomputed_ceilings(log):
    """The ceilings as the rows of phase confirm give them, and so they are in the log."""
    device = log.header["device"]
    found = {}
    for regime, logged in log.ceilings.items():
        rows = [row for row in log.measurements if row.regime == regime and row.phase == "confirm"]
        ceiling = confirmed(rows, device["name"], device["uuid_hash"], log.header["kernel"])
        assert ceiling.shape == logged.shape
        assert ceiling.tflops == pytest.approx(logged.tflops, abs=1e-3)
        assert (ceiling.interval.low, ceiling.interval.high) == pytest.approx(
            (logged.interval.low, logged.interval.high), abs=1e-3
        )
        found[regime] = ceiling
    return found


@pytest.mark.parametrize("path", LOGS, ids=lambda path: str(path.relative_to(RESULTS)))
def test_a_result_is_whole_and_recomputes(path):
    log = read_run_log(path)
    assert log.summary is not None
    assert not log.is_truncated
    assert recomputed_best(log) == log.summary["best"]
    assert path.parent.name == "-".join(log.header["device"]["name"].lower().split())
