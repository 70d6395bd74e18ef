"""Damaged logs given to every command that reads one."""

from __future__ import annotations

from pathlib import Path
from random import Random

from attacks.calls import call
from attacks.counts import Counts
from attacks.damage import damaged
from attacks.honest import LEGACY, RUNS

_FORMATS = ("table", "csv", "json", "markdown")
#: Drawing takes as long as all else, and reads the same rows.
DRAWN_EVERY = 100
#: These are given an early schema.
CONVERTED_EVERY = 4


def attack(logs: dict[str, Path], folder: Path, random: Random, count: int) -> Counts:
    """``logs``: honest ones by name. The damaged one is written into ``folder``, and must stay as it is."""
    counts = Counts("damaged logs")
    honest = {name: path.read_bytes() for name, path in logs.items()}
    begins = {run.name: run for run in RUNS}
    path, converted = folder / "damaged.jsonl", folder / "converted"
    converted.mkdir()
    for number in range(count):
        name = random.choice(list(honest))
        data = damaged(random, honest[name])
        path.write_bytes(data)
        counts.of["inputs"] += 1
        call(["show", str(path), "--format", random.choice(_FORMATS), "--top", "all"], counts)
        pair = [str(path), str(logs[name])]
        call(["compare", *random.sample(pair, 2), "--format", random.choice(_FORMATS), "--anyway"], counts)
        call(["results", "check", str(path), *random.choice(([], ["--format", "json"]))], counts)
        if name != LEGACY:
            begin = begins[name].begin
            # Without a backend or a kernel on the command line, the log's own are looked up.
            given = begin if random.random() < 0.5 else [each for each in begin if not _names_code(begin, each)]
            call([*given, "--resume", str(path), "--dry-run"], counts)
        if number % DRAWN_EVERY == 0:
            call(["plot", str(path), "--output", str(folder / "drawn.png"), "--overwrite"], counts)
            call(["results", "submit", str(path), "--dry-run", "--results", str(folder / "results")], counts)
        if number % CONVERTED_EVERY == 0:
            path.write_bytes(data := data.replace(b'"schema": 5', b'"schema": 2', 1))
            call(["results", "convert", str(path), "--output", str(converted)], counts)
            (converted / path.name).unlink(missing_ok=True)
        if path.read_bytes() != data:
            counts.fault("other", f"{name}, damaged log {number}", "was changed by being read")
        if counts.of["tracebacks"] + counts.of["hangs"] + counts.of["other"] > 1000:
            break
    return counts


def _names_code(begin: tuple[str, ...], word: str) -> bool:
    return word in ("--backend", "--kernel") or word.startswith("mamf.testing:")
