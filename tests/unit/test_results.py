"""Every contributed log reads, and its summary follows from its rows."""

from pathlib import Path

import pytest

from mamf.report import summary_record
from mamf.run_log import read_run_log

RESULTS = Path(__file__).resolve().parents[2] / "results"
LOGS = sorted(RESULTS.rglob("*.jsonl"))


def test_there_are_results():
    assert LOGS


@pytest.mark.parametrize("path", LOGS, ids=lambda path: str(path.relative_to(RESULTS)))
def test_a_result_is_whole_and_recomputes(path):
    log = read_run_log(path)
    assert log.summary is not None
    assert not log.is_truncated
    recomputed = summary_record(log.measurements, log.summary["status"], log.summary["reason"], 0.0, 0)
    assert recomputed["best"] == log.summary["best"]
    assert path.parent.name == "-".join(log.header["device"]["name"].lower().split())
