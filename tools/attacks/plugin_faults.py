"""Kernels that exit, raise what is no Exception, print, or end the process: a process each, seeded."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random

from attacks import faulty_kernel
from attacks.calls import EXIT_CODES
from attacks.counts import Counts
from attacks.faulty_kernel import DONE, FAULTY_M, PLACES, RAISED
from attacks.honest import BACKEND
from attacks.kills import is_complete, records
from mamf.contribution.rules import review

_HANG_SECONDS = 60.0
_SIZES = (256, FAULTY_M, 1024)
_CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
#: Places that the log does not reach: the command ends before it, with a line.
_BEFORE_A_LOG = ("import", "__init__", "unavailable", "unsupported")


def attack(folder: Path, random: Random, count: int) -> Counts:
    counts = Counts("plugin faults")
    for _ in range(count):
        counts.of["inputs"] += 1
        place, action = random.choice(PLACES), random.choice([*RAISED, *DONE])
        try_fault(folder, place, action, random.choice(("json", "csv", "table")), counts)
    return counts


def try_fault(folder: Path, place: str, action: str, form: str, counts: Counts) -> None:
    """Sweep three shapes with a kernel of one fault."""
    path, where = folder / "log.jsonl", f"{action} in {place}, {form}"
    path.unlink(missing_ok=True)
    sizes = ("--n", "256", "--k", "256", "--time-limit", "0.1s", "--order", "given")
    kernel = ("--kernel", "attacks.faulty_kernel:Faulty", "--format", form, "--output", str(path))
    command = ("sweep", *BACKEND, "--m", *map(str, _SIZES), *sizes, *kernel)
    found = [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {faulty_kernel.VARIABLE: f"{place} {action}", "PYTHONPATH": os.pathsep.join(found), "OMP_NUM_THREADS": "1"}
    counts.of["calls"] += 1
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mamf", *command],
            env=os.environ | own,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_HANG_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        counts.fault("hangs", where, "hung")
        return
    out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    counts.codes[done.returncode] += 1
    _judge_output(done.returncode, out, err, form, where, action in RAISED, counts)
    _judge_log(path, done.returncode, place, action, where, counts)


def _judge_output(code: int, out: str, err: str, form: str, where: str, is_raised: bool, counts: Counts) -> None:
    if "Traceback" in out + err:
        counts.fault("tracebacks", where, err.strip().splitlines()[-1][:300])
    if code not in EXIT_CODES:
        counts.fault("other", where, f"exit code {code}")
    if (found := _CONTROL.search(out + err)) and is_raised:  # what a kernel prints itself is its own
        counts.fault("other", where, f"{found[0]!r} on the terminal")
    said = [line for line in err.splitlines() if line.startswith("mamf: ") and " WARN " not in line]
    if code == 2 and is_raised and len(said) != 1:
        counts.fault("other", where, f"{len(said)} lines for exit code 2")
    if code == 0 and not out:
        counts.fault("other", where, "exit code 0 without a report")
    try:
        if form == "json" and out:
            json.loads(out)
        if form == "csv" and len({len(row) for row in csv.reader(io.StringIO(out))}) > 1:
            raise ValueError("rows of different lengths")
    except ValueError as error:
        counts.fault("other", where, f"{form} is broken: {error}: {out[:200]}")


def _judge_log(path: Path, code: int, place: str, action: str, where: str, counts: Counts) -> None:
    """Every shape has one row, the faulty one says why, and the log has its summary."""
    if not path.exists():
        if place not in _BEFORE_A_LOG or code == 0:
            counts.fault("lost", where, f"no log, exit code {code}")
        return
    rows = {row["shape"]["m"]: row for row in records(path) if row["record"] == "measurement"}
    times = sum(row["record"] == "measurement" for row in records(path))
    if missing := set(_SIZES) - rows.keys():
        counts.fault("lost", where, f"no rows for {sorted(missing)}, exit code {code}", len(missing))
    if times > len(rows):
        counts.fault("twice", where, f"{times} rows for {len(rows)} shapes", times - len(rows))
    if not is_complete(path):
        counts.fault("other", where, f"exit code {code} without a complete summary")
    returns = action in DONE and not action.startswith("_exit") and place != "refuses"
    expected = "ok" if returns else "failed"
    if (row := rows.get(FAULTY_M)) and row["status"] != expected:
        counts.fault("other", where, f"the faulty row is {row['status']} {row['reason'][:100]}, not {expected}")
    is_everywhere = place in ("settings", *_BEFORE_A_LOG)
    for m, row in rows.items():
        if m != FAULTY_M and row["status"] != "ok" and not is_everywhere:
            counts.fault("lost", where, f"{m} is {row['status']}: {row['reason'][:100]}")
    for finding in review(path).findings:
        if not finding.is_warning and finding.rule in ("malformed", "unreadable", "foreign-row", "duplicate-row"):
            counts.fault("other", where, f"'results check' says {finding.rule}: {finding.message}")
