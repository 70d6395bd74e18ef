"""Run logs for the tests of contribution: honest ones of runs in virtual time, and what is asked of them."""

import json
import math
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from mamf.cli import main
from mamf.contribution.review import review_log
from mamf.engine.search.grid import THOROUGH_SCHEDULE
from mamf.engine.search.strategy import GridSearchStrategy
from mamf.logs.legacy import FinderRun, ReportedFigures
from mamf.logs.run_log import parse_records, read_lines
from mamf.operations.matmul.shapes import SearchOptions

SIMULATED = ["--backend", "mamf.testing:SimulatedBackend", "--kernel", "mamf.testing:SimulatedMatmul"]
RESULTS = Path(__file__).resolve().parents[2] / "results"
NORMAL = {"dtype": "bfloat16", "out_dtype": "bfloat16", "layout": "nt", "data": "normal", "seed": 0}
NORMAL["fast_accumulation"] = False
ZEROS = NORMAL | {"data": "zeros"}
# As a card of known peaks gives it.
DEVICE = {"backend": "cuda", "name": "NVIDIA H100 80GB HBM3", "vendor": "NVIDIA", "driver": "580.1", "uuid_hash": "abc"}


def measured(folder, *arguments):
    """The records of a run in virtual time, as if it had been on a card of a committed checkout."""
    path = folder / "measured.jsonl"
    assert main([*arguments, "--output", str(path)]) == 0
    records = [record for _, record in parse_records(path, read_lines(path))]
    records[0]["device"].update(DEVICE)
    records[0]["tool"]["commit"] = "0123456789ab"
    records[0]["findings"] = ["ok   sibling devices: idle or none"]
    return in_virtual_time(records)


def in_virtual_time(records):
    """The records, each written when its samples had been taken."""
    passed, begun = 0.0, datetime.fromisoformat(records[0]["started"]) - timedelta(hours=1)
    records[0]["started"] = begun.isoformat()
    for record in records[1:]:
        samples = record.get("samples_seconds", [])
        passed += record.get("launches", 0) * sum(samples) / max(len(samples), 1)
        for name in {"time", "started"} & record.keys():
            record[name] = (begun + timedelta(seconds=math.ceil(passed))).isoformat()
    return records


def search_little(patch):
    """A coarse grid, few shapes, few candidates and their next neighbours, for logs of a search; how well it searches
    is tested in test_search.py.
    """
    patch.setattr(SearchOptions, "scouts", 24)
    patch.setattr(SearchOptions, "refinements", 36)
    patch.setattr(GridSearchStrategy, "max_distant_shapes", 100)
    patch.setattr(GridSearchStrategy, "max_refinement_reach", 1)
    patch.setattr("mamf.engine.search.grid.THOROUGH_SCHEDULE", replace(THOROUGH_SCHEDULE, candidate_count=4))
    patch.setattr("mamf.engine.search.grid._SIZES_PER_DIMENSION", 8)
    patch.setattr("mamf.engine.search.grid._MAX_GRID_STEP", 2560)


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def found(path):
    """Rule ids of the errors."""
    return {finding.rule for finding in review_log(path).findings if not finding.is_warning}


def best(records):
    """The row that the summary names in burst."""
    shape = records[-1]["best"]["burst"]["shape"]
    return next(row for row in rows(records) if "x".join(map(str, row["shape"].values())) == shape)


def rows(records):
    return [record for record in records if record["record"] == "measurement"]


def legacy_run(**fields):
    shown = ReportedFigures({"MAMF": 815.5}, "3072x2816x16384")
    known = {"device": "Oldcard", "dtype": "bfloat16", "started": "2026-11-20T23:53:45", "best": {"MAMF": shown}}
    return FinderRun("v4", rows=(shown,), **known | fields)
