"""Make one page of every kind, from logs in results/ and docs/ and from hostile logs (browsing.hostile)."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

from browsing.hostile import write_hostile_logs
from mamf.cli import main
from mamf.node.logs import make_log_path

ROOT = Path(__file__).resolve().parents[2]
H100, H200 = (ROOT / "results" / name for name in ("nvidia-h100-80gb-hbm3", "nvidia-h200"))
FIND = H100 / "find-bfloat16-burst-sustained-20261121-070105.jsonl"
ATTENTION = H200 / "attention-bfloat16-fwd-bwd-burst-20261122-165751.jsonl"
SWEEP = H200 / "sweep-torch-mm-bfloat16-burst-20261122-023716.jsonl"
EXPLANATION = H200 / "matmul-explain-bfloat16-burst-sustained-20261124-160321.jsonl"
MODEL = H200 / "model-bfloat16-sustained-20261122-022917.jsonl"
IMPORTED = H200 / "mamf-finder-v4-bfloat16-20261121-003514.jsonl"
PROFILED = ROOT / "docs" / "autoprofile-h200"
#: A short log, of which ``make_large_results`` makes many copies.
SHORT_LOG = H200 / "sweep-torch-mm-bfloat16-burst-sustained-20261121-143850.jsonl"
SIDE_BY_SIDE = (FIND, H200 / "find-bfloat16-burst-sustained-20261122-101216.jsonl")
#: The names of all pages: those of reports, of ``mamf show`` and of the site.
PAGES = ("find", "attention", "sweep", "explanation", "model", "side by side", "autoprofile", "node", "imported")
PAGES += ("hostile", "hostile find", "hostile attention", "show", "site", "device")
# Logs of four cards of one host that measured at the same time, with ``mamf find`` and with ``mamf bandwidth``.
_NODE_LOGS = {
    "find": [H200 / f"find-bfloat16-burst-sustained-20261122-101216{end}.jsonl" for end in ("", "-2", "-3", "-4")],
    "bandwidth": sorted(H200.glob("bandwidth-float32-burst-20261122-1824*.jsonl"))[:4],
}


def make_pages(folder: Path) -> dict[str, Path]:
    """Make the pages of reports and of ``mamf show``. Return their paths by name.

    Raises RuntimeError if a command fails.
    """
    hostile = write_hostile_logs(folder / "logs", FIND, ATTENTION)
    reports = {
        "find": [FIND],
        "attention": [ATTENTION],
        "sweep": [SWEEP],
        "explanation": [EXPLANATION],
        "model": [MODEL],
        "side by side": SIDE_BY_SIDE,
        "autoprofile": [PROFILED],
        "node": [_make_node_folder(folder / "node")],
        "imported": [IMPORTED],
        "hostile": hostile,
        "hostile find": hostile[:1],
        "hostile attention": hostile[1:],
    }
    pages = {name: _make_page_path(folder, name) for name in (*reports, "show")}
    for name, logs in reports.items():
        run_mamf("report", *map(str, logs), "--output", str(pages[name]))
    pages["show"].write_text(run_mamf("show", str(FIND), "--format", "html"), encoding="utf-8")
    return pages


def make_site(folder: Path, results: Path = ROOT / "results") -> dict[str, Path]:
    """Make the site of a folder of results, as it is published. Return the paths of its front page and of its largest
    device page, by name.
    """
    logs = "https://example.org/results"
    run_mamf("results", "site", "--results", str(results), "--output", str(folder), "--logs", logs)
    largest = max(folder.glob("devices/*.html"), key=lambda page: page.stat().st_size)
    return {"site": folder / "index.html", "device": largest}


def make_large_results(folder: Path, count: int) -> Path:
    """Write ``count`` logs of made-up device models into a folder, and return the folder. Each model has ten cards with
    one log each.
    """
    records = [json.loads(line) for line in SHORT_LOG.read_text(encoding="utf-8").splitlines()]
    header, rows = records[0], records[1:]
    for number in range(count):
        model = f"made-up accelerator {number // 10}"
        model_folder = folder / model.replace(" ", "-")
        model_folder.mkdir(parents=True, exist_ok=True)
        device = header["device"] | {"name": model, "uuid_hash": f"{number:012x}"}
        # Change the samples a little in each log: the site counts logs with equal samples only once, as copies.
        scaled_rows = [_scale_samples(row, 1 + number * 1e-6) for row in rows]
        lines = map(json.dumps, [header | {"device": device}, *scaled_rows])
        (model_folder / f"sweep-{number}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _scale_samples(row: dict[str, Any], factor: float) -> dict[str, Any]:
    samples = row.get("samples_seconds")
    return row | {"samples_seconds": [sample * factor for sample in samples]} if samples else row


def run_mamf(*arguments: str) -> str:
    """Run a command of mamf, and return its standard output. Raises RuntimeError if the command fails."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(arguments))
        except SystemExit as stop:
            code = stop.code
    if code:
        raise RuntimeError(f"mamf {' '.join(arguments)} failed with exit code {code}: {err.getvalue()}")
    return out.getvalue()


def _make_page_path(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '-')}.html"


def _make_node_folder(folder: Path) -> Path:
    folder.mkdir()
    for part, logs in _NODE_LOGS.items():
        for index, log in enumerate(logs):
            shutil.copy(log, make_log_path(folder, index, part))
    return folder
