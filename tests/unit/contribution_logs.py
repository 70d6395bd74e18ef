"""Make valid run logs in virtual time for the tests of contributed results, and read parts of logs."""

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
# The device fields of a real card whose peak rates mamf knows.
DEVICE = {"backend": "cuda", "name": "NVIDIA H100 80GB HBM3", "vendor": "NVIDIA", "driver": "580.1", "uuid_hash": "abc"}


def measured(folder, *arguments):
    """Run a command on the simulated device and return the records of its log, in virtual time.

    The records are changed so that the run seems to come from a real card and from a checkout without uncommitted
    changes.
    """
    path = folder / "measured.jsonl"
    assert main([*arguments, "--output", str(path)]) == 0
    records = [record for _, record in parse_records(path, read_lines(path))]
    records[0]["device"].update(DEVICE)
    records[0]["tool"]["commit"] = "0123456789ab"
    records[0]["findings"] = ["ok   sibling devices: idle or none"]
    return in_virtual_time(records)


def in_virtual_time(records):
    """Set the times in the records to when a real device would have taken their samples, and return the records.

    The start moves one hour back, so that no record is in the future.
    """
    elapsed_seconds, start = 0.0, datetime.fromisoformat(records[0]["started"]) - timedelta(hours=1)
    records[0]["started"] = start.isoformat()
    for record in records[1:]:
        samples = record.get("samples_seconds", [])
        elapsed_seconds += record.get("launches", 0) * sum(samples) / max(len(samples), 1)
        for name in {"time", "started"} & record.keys():
            record[name] = (start + timedelta(seconds=math.ceil(elapsed_seconds))).isoformat()
    return records


def search_little(patch):
    """Make searches short: a coarse grid, few shapes, and few candidates with only their nearest neighbors.

    This is enough for tests that only need the log of a search. test_search.py tests how well mamf searches.
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
    """Return the rules that reject a log. Warnings do not count."""
    return {finding.rule for finding in review_log(path).findings if not finding.is_warning}


def best(records):
    """Return the row that the summary names as the best of the burst regime."""
    shape = records[-1]["best"]["burst"]["shape"]
    return next(row for row in rows(records) if "x".join(map(str, row["shape"].values())) == shape)


def rows(records):
    return [record for record in records if record["record"] == "measurement"]


def legacy_run(**fields):
    figures = ReportedFigures({"MAMF": 815.5}, "3072x2816x16384")
    defaults = {"device": "Oldcard", "dtype": "bfloat16", "started": "2026-11-20T23:53:45", "best": {"MAMF": figures}}
    return FinderRun("v4", rows=(figures,), **defaults | fields)
