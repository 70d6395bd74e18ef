"""Make forged logs for tests: change the samples of a log, and recompute the figures that depend on them."""

import copy
import json

from mamf.contribution.rules import ReviewedLog, recompute_ceilings
from mamf.kinds.registry import get_kind
from mamf.logs.recording import RunEnd
from mamf.logs.records import make_ceiling_record, make_measurement_record
from mamf.logs.run_log import build_run_log, parse_records, read_lines


def read(path):
    """Read the records of a log, as copies that the caller may change."""
    return copy.deepcopy([record for _, record in parse_records(path, read_lines(path))])


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def rows_of(records):
    return [record for record in records if record["record"] == "measurement"]


def scale(records, factor):
    """Divide the time of every sample by ``factor``, so that each kernel looks faster by this factor."""
    for record in rows_of(records):
        record["samples_seconds"] = [round(sample / factor, 9) for sample in record["samples_seconds"]]


def recompute(path, records):
    """Recompute all figures that depend on the samples: in rows, in ceilings and in the summary. Return the records."""
    for _, record, row in _make_reviewed_log(path, records).rows:
        new_record = make_measurement_record(row)
        record.update({name: new_record[name] for name in record if name in new_record and name != "time"})
    reviewed_log = _make_reviewed_log(path, records)
    ceilings = recompute_ceilings(reviewed_log)
    for _, record in reviewed_log.select_records("ceiling"):
        new_record = next(
            (make_ceiling_record(ceiling) for ceiling in ceilings.values() if ceiling.regime == record["regime"]), {}
        )
        record.update({name: new_record[name] for name in record if name in new_record})
    reviewed_log = _make_reviewed_log(path, records)
    if records[-1]["record"] == "summary":
        plan, log = reviewed_log.log.plan, reviewed_log.log
        new_summary = get_kind(plan).make_summary(
            plan, log.measurements, ceilings or log.matmul_ceilings, RunEnd("complete")
        )
        records[-1]["best"] = new_summary["best"]
    return records


def _make_reviewed_log(path, records):
    numbered_records = tuple(enumerate(records, start=1))
    return ReviewedLog(numbered_records, build_run_log(path, numbered_records))
