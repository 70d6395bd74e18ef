"""Run logs that somebody made up: samples change, and every figure that follows from them. None may be accepted."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from attacks.calls import Counts
from mamf.contribution.evidence import Evidence, records_of
from mamf.contribution.rules import recomputed_ceilings, review
from mamf.kinds.registry import kind_of
from mamf.logs.recording import End
from mamf.logs.records import ceiling_record, measurement_record
from mamf.logs.run_log import run_log_of

RESULTS = Path(__file__).resolve().parents[2] / "results"
Records = list[dict[str, Any]]


def read(path: Path) -> Records:
    """Read the records of a log, to be changed."""
    return copy.deepcopy([record for _, record in records_of(path)])


def write(path: Path, records: Records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def rows_of(records: Records) -> Records:
    return [record for record in records if record["record"] == "measurement"]


def scale(records: Records, times: float) -> None:
    """Make every sample so many times as fast."""
    for record in rows_of(records):
        record["samples_seconds"] = [round(sample / times, 9) for sample in record["samples_seconds"]]


def recompute(path: Path, records: Records) -> Records:
    """Recompute every figure that follows from the samples, as mamf writes it."""
    for _, record, row in _evidence(path, records).rows:
        again = measurement_record(row)
        record.update({name: again[name] for name in record if name in again and name != "time"})
    evidence = _evidence(path, records)
    ceilings = recomputed_ceilings(evidence)
    for _, record in evidence.of_kind("ceiling"):
        again = next((ceiling_record(each) for each in ceilings.values() if each.regime == record["regime"]), {})
        record.update({name: again[name] for name in record if name in again})
    evidence = _evidence(path, records)
    if records[-1]["record"] == "summary":
        plan, log = evidence.plan, evidence.log
        again = kind_of(plan).summary(plan, log.measurements, ceilings or log.all_ceilings, End("complete"))
        records[-1]["best"] = again["best"]
    return records


def _evidence(path: Path, records: Records) -> Evidence:
    numbered = tuple(enumerate(records, start=1))
    return Evidence(numbered, run_log_of(path, numbered))


# -- forgeries ---------------------------------------------------------------------------------------------------------


def _rename(rename: Callable[[str], str], random: Random, records: Records) -> None:
    scale(records, random.uniform(1.0, 1.3))
    records[0]["device"]["name"] = rename(records[0]["device"]["name"])


def _without_clocks(random: Random, records: Records) -> None:
    for record in random.sample(rows := rows_of(records), max(1, len(rows) // 2)):
        scale([record], random.uniform(1.0, 1.2))
        record["clock_mhz"] = None


def _with_equal_samples(random: Random, records: Records) -> None:
    row = random.choice([record for record in rows_of(records) if len(record["samples_seconds"]) >= 5])
    row["samples_seconds"] = row["samples_seconds"][:1] * len(row["samples_seconds"])


def _from_the_future(random: Random, records: Records) -> None:
    by = timedelta(days=random.uniform(365, 36500))
    for record in records:
        for name in {"time", "started"} & record.keys():
            record[name] = (datetime.fromisoformat(record[name]) + by).isoformat()


def _with_sparsity(random: Random, records: Records) -> None:
    for record in rows_of(records):
        if record["operation"] == "attention":
            scale([record], random.uniform(1.5, 10))
            record["details"]["sparsity"] = random.uniform(0.5, 0.99)


def _set_watts(random: Random, records: Records) -> None:
    for record in rows_of(records):
        record["watts"] = random.choice([1.0, 5000.0])


def _add_memory(random: Random, records: Records) -> None:
    records[0]["device"]["memory_bytes"] *= random.randint(2, 4)


#: Forgeries that no review may accept, with the kind of log that they are of.
REFUSED: dict[str, tuple[str, Callable[[Random, Records], object]]] = {
    "faster than physics": ("find", lambda random, records: scale(records, random.uniform(1.4, 20))),
    "name in lower case": ("find", partial(_rename, str.lower)),
    "name without blanks": ("find", partial(_rename, lambda name: name.replace(" ", ""))),
    "memory": ("find", _add_memory),
    "rows without a clock": ("find", _without_clocks),
    "equal samples": ("find", _with_equal_samples),
    "from the future": ("find", _from_the_future),
    "watts": ("find", _set_watts),
    "sparsity": ("attention", _with_sparsity),
}


def attack(folder: Path, random: Random, count: int) -> Counts:
    """Forge ``count`` complete logs of results/, every kind in turn; small ones, since each is read again and again."""
    counts = Counts("forged logs")
    small = sorted(path for path in RESULTS.glob("nvidia-*/*.jsonl") if path.stat().st_size < 2_000_000)
    complete = [path for path in small if review(path).tier == "complete"]
    for number in range(count):
        kind, (group, forge) = list(REFUSED.items())[number % len(REFUSED)]
        honest = random.choice([path for path in complete if path.name.startswith(group)])
        counts.of.update(inputs=1, calls=1)
        records = read(honest)
        forge(random, records)
        path = write(folder / honest.name, recompute(honest, records))
        if not review(path).is_rejected():
            counts.fault("other", f"{honest.name}, {kind}", "was accepted")
        path.unlink()
    return counts
