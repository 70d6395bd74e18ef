"""Run logs that somebody made up: samples changed, and every figure that follows from them computed anew."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

from mamf.contribution.best_rules import recomputed_ceilings, summary_of
from mamf.contribution.evidence import Evidence, records_of
from mamf.logs.records import ceiling_record, measurement_record
from mamf.logs.run_log import run_log_of

Records = list[dict[str, Any]]
#: Changes the records of a log; ``random`` chooses how far.
Forgery = Callable[[Random, Records], object]


def read(path: Path) -> Records:
    """The records of a log, to be changed."""
    return copy.deepcopy([record for _, record in records_of(path)])


def write(path: Path, records: Records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def rows_of(records: Records) -> Records:
    return [record for record in records if record["record"] == "measurement"]


def scale(records: Records, times: float) -> None:
    """Every sample so many times as fast."""
    for record in rows_of(records):
        record["samples_seconds"] = [round(sample / times, 9) for sample in record["samples_seconds"]]


def recompute(path: Path, records: Records) -> Records:
    """Every figure that follows from the samples, as mamf writes it."""
    evidence = _evidence(path, records)
    for _, record, row in evidence.rows:
        again = measurement_record(row)
        record.update({name: again[name] for name in record if name in again and name != "time"})
    evidence = _evidence(path, records)
    ceilings = recomputed_ceilings(evidence)
    for _, record in evidence.of_kind("ceiling"):
        again = next((ceiling_record(each) for each in ceilings.values() if each.regime == record["regime"]), {})
        record.update({name: again[name] for name in record if name in again})
    evidence = _evidence(path, records)
    if records[-1]["record"] == "summary":
        records[-1].update({"best": summary_of(evidence, records[-1])["best"]} if "best" in records[-1] else {})
    return records


def _evidence(path: Path, records: Records) -> Evidence:
    numbered = tuple(enumerate(records, start=1))
    return Evidence(numbered, run_log_of(path, numbered))


# -- forgeries that must be refused ------------------------------------------------------------------------------------


def _of_clock(random: Random, records: Records) -> None:
    """Samples, the clock and its maximum by one factor."""
    times = random.uniform(1.1, 2.0)
    scale(records, times)
    records[0]["device"]["max_clock_hz"] *= times
    for record in rows_of(records):
        record["clock_mhz"] = record["clock_mhz"] and round(record["clock_mhz"] * times)


def _of_units(random: Random, records: Records) -> None:
    scale(records, random.uniform(1.05, 1.5))
    records[0]["device"]["compute_units"] += random.randint(1, 60)


def _of_name(rename: Callable[[str], str]) -> Forgery:
    def forge(random: Random, records: Records) -> None:
        scale(records, random.uniform(1.0, 5.0))
        records[0]["device"]["name"] = rename(records[0]["device"]["name"])

    return forge


def _without_clocks(random: Random, records: Records) -> None:
    for record in random.sample(own := rows_of(records), max(1, len(own) // 2)):
        scale([record], random.uniform(1.0, 1.2))
        record["clock_mhz"] = None


def _of_time(random: Random, records: Records) -> None:
    """All of it in no time."""
    started = datetime.fromisoformat(records[0]["started"]).isoformat()
    for record in records[1:]:
        for name in {"time", "started"} & record.keys():
            record[name] = started


def _of_equal_samples(random: Random, records: Records) -> None:
    row = random.choice([record for record in rows_of(records) if len(record["samples_seconds"]) >= 5])
    row["samples_seconds"] = row["samples_seconds"][:1] * len(row["samples_seconds"])


def _of_another_row(random: Random, records: Records) -> None:
    long = [record for record in rows_of(records) if len(record["samples_seconds"]) >= 5]
    source, row = random.sample(long, 2)
    row["samples_seconds"], row["launches"] = list(source["samples_seconds"]), source["launches"]


def _dated(days: Callable[[Random], float]) -> Forgery:
    def forge(random: Random, records: Records) -> None:
        by = timedelta(days=days(random))
        for record in records:
            for name in {"time", "started"} & record.keys():
                record[name] = (datetime.fromisoformat(record[name]) + by).isoformat()

    return forge


def _of_error(random: Random, records: Records) -> None:
    for record in rows_of(records):
        record["relative_error"] = record["relative_error"] and record["relative_error"] * 10 ** -random.uniform(3, 9)


def _of_watts(random: Random, records: Records) -> None:
    records[0]["device"]["power_limit_watts"] *= (times := random.uniform(1.3, 3))
    for record in rows_of(records):
        record["watts"] = record["watts"] and record["watts"] * times


def _of_approximation(name: str, value: Callable[[Random], object]) -> Forgery:
    def forge(random: Random, records: Records) -> None:
        for record in rows_of(records):
            if record["operation"] == "attention":
                scale([record], random.uniform(1.5, 10))
                record["details"][name] = value(random)

    return forge


def _of_cores(random: Random, records: Records) -> None:
    records[0]["device"]["compute_units"] = random.randint(4096, 10**6)


def _beyond_physics(random: Random, records: Records) -> None:
    scale(records, random.uniform(1.4, 20))


#: Forgeries that no review may accept, with the kind of log that they are of.
REFUSED: dict[str, tuple[str, Forgery]] = {
    "faster than physics": ("find", _beyond_physics),
    "clock and its maximum": ("find", _of_clock),
    "compute units": ("find", _of_units),
    "name in lower case": ("find", _of_name(str.lower)),
    "name without blanks": ("find", _of_name(lambda name: name.replace(" ", ""))),
    "name with dashes": ("find", _of_name(lambda name: name.replace(" ", "-"))),
    "rows without a clock": ("find", _without_clocks),
    "no time": ("find", _of_time),
    "equal samples": ("find", _of_equal_samples),
    "samples of another row": ("find", _of_another_row),
    "from the future": ("find", _dated(lambda random: random.uniform(365, 36500))),
    "before mamf": ("find", _dated(lambda random: -random.uniform(30, 3650))),
    "errors below rounding": ("bfloat16", _of_error),
    "watts": ("find", _of_watts),
    "sparsity": ("attention", _of_approximation("sparsity", lambda random: random.uniform(0.5, 0.99))),
    "cosine similarity": ("attention", _of_approximation("cosine_similarity", lambda random: 0.999)),
    "dtypes of products": ("attention", _of_approximation("product_dtypes", lambda random: "int8 float8_e4m3fn")),
    "attention above its ceiling": ("attention", lambda random, records: _of_attention(random, records)),
    "cores": ("cpu", _of_cores),
}


def _of_attention(random: Random, records: Records) -> None:
    times = random.uniform(2.0, 10)
    scale([record for record in rows_of(records) if record["operation"] == "attention"], times)


#: A forgery that may be accepted, but never ranked: all samples by a factor that physics allows.
POSSIBLE = "possible"


def possible(random: Random, records: Records) -> None:
    scale(records, random.uniform(1.03, 1.3))


def kinds() -> Sequence[str]:
    """All of them."""
    return (*REFUSED, POSSIBLE)
