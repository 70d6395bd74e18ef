"""Reports of logs keep their figures: a layout may change, but no row of a table may lose a figure.

``data/figures_of_reports.json`` holds the figures of every report, row by row, before reports became documents.
``python tests/unit/test_figures_of_reports.py`` prints the figures of today in the same form.
"""

import csv
import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from rendering import render_guard

from mamf.cli import main
from mamf.logs.judging import judge_guard
from mamf.logs.run_log import read_run_log
from mamf.measurement import Conditions
from mamf.node.report import node_document
from mamf.node.verdict import Device, judge
from mamf.report.formats import FORMATS

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).parent / "data" / "figures_of_reports.json"
H100, H200, AUTOPROFILE = "results/nvidia-h100-80gb-hbm3", "results/nvidia-h200", "docs/autoprofile-h200"
ROOFLINE = f"{H200}/bandwidth-roofline-float32-burst-sustained-20261122-000415.jsonl"
SWEEPS = [f"{H100}/sweep-torch-mm-bfloat16-burst-20261121-0409{second}.jsonl" for second in (23, 29)]
COMMANDS = {
    "explain": ["show", f"{H200}/matmul-explain-bfloat16-burst-sustained-20261121-213135.jsonl"],
    "roofs": ["show", ROOFLINE],
    "rows under the roofs": [
        *("roofline", f"{H200}/sweep-torch-mm-bfloat16-burst-20261122-000343.jsonl"),
        *("--ceiling", ROOFLINE, "--top", "all"),
    ],
    "a profile": ["show", f"{AUTOPROFILE}/step.jsonl", "--top", "all"],
    "counters": ["show", f"{AUTOPROFILE}/counters.jsonl"],
    "sweeps": ["compare", *SWEEPS, "--top", "all"],
    "finds": ["compare", *(f"{H200}/find-bfloat16-burst-sustained-20261121-05{each}.jsonl" for each in (4134, 4335))],
    "two devices": [
        "compare",
        *(f"{H200}/attention-bfloat16-fwd-burst-20261122-{each}.jsonl" for each in ("165450", "023859")),
        *("--anyway", "--top", "all"),
    ],
}
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?")


def of_node(form):
    figures = {"burst": 834.5, "sustained": 702.25, "copy": 4.125, "to_device": 0.0553}
    conditions = Conditions(clock_hz=1.455e9, watts=698.0, celsius=61.0)
    devices = [
        Device(
            *(rank % 2, rank // 2, "NVIDIA H200", f"uuid{rank}"),
            figures={name: value * (1 - 0.001 * rank) for name, value in figures.items()},
            half_widths={"burst": 0.004, "sustained": 0.0062},
            conditions=conditions,
            throttled={"power cap": 0.9},
        )
        for rank in range(4)
    ]
    return FORMATS[form](node_document(devices, judge(devices)), None)


def of_guard(form):
    return render_guard(form, judge_guard(*(read_run_log(ROOT / path) for path in SWEEPS), 0.01))


def report(name, form):
    if name in OTHERS:
        return OTHERS[name](form)
    text = io.StringIO()
    words = [str(ROOT / word) if word.endswith(".jsonl") else word for word in COMMANDS[name]]
    with redirect_stdout(text):
        main([*words, "--format", form])
    return text.getvalue().replace(str(ROOT), "")


OTHERS = {"a node": of_node, "a guard": of_guard}


def figures(text):
    """The digits of every number but zero, whatever its power of ten: 0.0157 TB/s are 15.7 GB/s."""
    digits = (number.partition("e")[0].replace(",", "").replace(".", "").strip("0") for number in _NUMBER.findall(text))
    return [each for each in digits if each]


def figures_of(name):
    """Of the rows of tables, of the lines around them, and of the rows of csv in full precision."""
    lines = report(name, "markdown").splitlines()
    rows = [figures(line) for line in lines if line.startswith("|")]
    around = [figures(line) for line in lines if not line.startswith("|")]
    held = [[figures(cell) for cell in row] for row in csv.reader(io.StringIO(report(name, "csv")))][1:]
    return {
        "rows": [row for row in rows if row],
        "around": sorted({figure for line in around for figure in line}),
        "csv": [[figure for cell in row for figure in cell] for row in held],
    }


def holds(row, before):
    """Whether a row has each figure, or more digits of it."""
    left = list(row)
    for figure in before:
        found = [each for each in left if each == figure] or [each for each in left if each.startswith(figure)]
        if not found:
            return False
        left.remove(found[0])
    return True


@pytest.mark.parametrize("name", [*COMMANDS, *OTHERS])
def test_a_report_keeps_its_figures(name):
    before, now = json.loads(RECORDED.read_text())[name], figures_of(name)
    for part in ("rows", "csv"):
        assert len(now[part]) >= len(before[part])
        # A cell may have become a line below its table.
        lost = [row for row in before[part] if not any(holds([*each, *now["around"]], row) for each in now[part])]
        assert not lost, f"{part}: {lost}"
    assert not [figure for figure in before["around"] if not holds(now["around"], [figure])]


if __name__ == "__main__":
    print(json.dumps({name: figures_of(name) for name in [*COMMANDS, *OTHERS]}))
