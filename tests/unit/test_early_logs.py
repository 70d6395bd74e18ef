"""The rows of early logs, as written, give the figures that the first release printed, to the last digit.

What ``mamf show`` prints of them differs by the timer's overhead, which is recomputed (test_timer.py).
"""

import hashlib
import json
from pathlib import Path

import pytest

from mamf.logs.run_log import lines_of, parsed, run_log_of

FIGURES = json.loads(Path(__file__).with_name("figures_of_early_logs.json").read_text())
RESULTS = Path(__file__).resolve().parents[2] / "results"
LOGS = {path.name: path for path in RESULTS.rglob("*.jsonl")}


def digest(path):
    """A hash of every row's figures. ``FIGURES`` holds those that the first release's reader gave."""
    log = run_log_of(path, parsed(path, lines_of(path)), as_written=True)
    lines = [
        f"{row.shape} {row.kernel} {row.regime} {row.phase} {row.status} {row.best_by} "
        + " ".join(repr(row.tflops(name)) for name in ("mean", "median", "fastest", "slowest") if row.ok)
        for row in log.measurements
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", FIGURES)
def test_an_early_log_keeps_its_figures(name, run):
    if name.startswith("mamf-finder"):  # imported, and without samples: by the hash of what is printed
        _, out, _ = run("show", str(LOGS[name]), "--format", "csv", "--top", "all")
        assert hashlib.sha256(out.encode()).hexdigest()[:16] == FIGURES[name]
    else:
        assert digest(LOGS[name]) == FIGURES[name]
