"""Early logs, which were converted, keep what they held and the figures that the first release printed.

What ``mamf show`` prints of them differs by the timer's overhead, which is recomputed (test_timer.py).
"""

import hashlib
import json
from pathlib import Path

import pytest

from mamf.logs.lines import lines_of, parse_records
from mamf.logs.run_log import run_log_of

FIGURES = json.loads(Path(__file__).with_name("figures_of_early_logs.json").read_text())
#: Hashes of ``held``, taken from the logs before they were converted.
SAMPLES = json.loads(Path(__file__).with_name("samples_of_early_logs.json").read_text())
RESULTS = Path(__file__).resolve().parents[2] / "results"
LOGS = {path.name: path for path in RESULTS.rglob("*.jsonl")}


def digest(path):
    """A hash of every row's figures. ``FIGURES`` holds those that the first release's reader gave."""
    log = run_log_of(path, parse_records(path, lines_of(path)), as_written=True)
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


def held(path):
    """A hash of what a conversion leaves as it is: device, start, and the samples and times of all records."""
    header, *records = map(json.loads, path.read_text().splitlines())
    names = ["shape", "kernel", "samples_seconds", "implausible_samples_seconds", "launches", "time"]
    names.append("tflops" if header.get("tier") else "time")  # logs of mamf-finder hold figures in place of samples
    kept = [header["device"], header["started"], *([record.get(name) for name in names] for record in records)]
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", SAMPLES)
def test_a_converted_log_keeps_samples_device_and_times(name):
    assert held(LOGS[name]) == SAMPLES[name]
