"""Logs of before schema 4 keep their figures, to the last digit: as the first release printed them."""

import hashlib
import json
from pathlib import Path

import pytest

FIGURES = json.loads(Path(__file__).with_name("figures_of_early_logs.json").read_text())
RESULTS = Path(__file__).resolve().parents[2] / "results"
LOGS = {path.name: path for path in RESULTS.rglob("*.jsonl")}


@pytest.mark.parametrize("name", FIGURES)
def test_an_early_log_keeps_its_figures(name, run):
    """By the hash of its csv, which the first release's own ``mamf show`` gave. In the float64 find one column is
    newer: the share of a peak that the first release did not list.
    """
    _, out, _ = run("show", str(LOGS[name]), "--format", "csv", "--top", "all")
    assert hashlib.sha256(out.encode()).hexdigest()[:16] == FIGURES[name]
