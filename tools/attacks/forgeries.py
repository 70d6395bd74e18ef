"""Forged run logs given to the review of results/: what is impossible must be refused, and nothing forged be ranked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from attacks.counts import Counts
from attacks.forging import POSSIBLE, REFUSED, Records, kinds, possible, read, recompute, write
from mamf.contribution.rules import review

RESULTS = Path(__file__).resolve().parents[2] / "results"


def attack(folder: Path, random: Random, count: int) -> Counts:
    """Forge ``count`` logs of results/, every kind in turn."""
    counts, logs = Counts("forged logs"), honest_logs()
    names = list(kinds())
    for number in range(count):
        kind = names[number % len(names)]
        group, forge = REFUSED.get(kind, ("find", possible))
        honest = random.choice(logs[group])
        counts.of["inputs"] += 1
        counts.of["calls"] += 1
        if fault := _judged(kind, write(folder / honest.name, _forged(honest, forge, random))):
            counts.fault("other", f"{honest.name}, {kind}", fault)
        (folder / honest.name).unlink()
    return counts


def honest_logs() -> dict[str, list[Path]]:
    """Complete logs by what is forged in them; small ones, since each is read again and again."""
    logs = sorted((path for path in RESULTS.glob("*/*.jsonl") if path.stat().st_size < 2_000_000), key=str)
    found = {
        "find": [path for path in logs if path.name.startswith("find-") and path.parent.name.startswith("nvidia")],
        "bfloat16": [path for path in logs if path.name.startswith("find-bfloat16-")],
        "attention": [path for path in logs if path.name.startswith("attention-")],
        "cpu": [path for path in logs if path.parent.name == "amd-epyc"],
    }
    return {group: list(_accepted(paths, is_ranked=group == "find")) for group, paths in found.items()}


def _accepted(paths: list[Path], is_ranked: bool) -> Iterator[Path]:
    for path in paths:
        found = review(path)
        if found.tier == "complete" and not found.is_rejected() and not (is_ranked and found.unconfirmed):
            yield path


def _forged(honest: Path, forge: object, random: Random) -> Records:
    records = read(honest)
    forge(random, records)  # type: ignore[operator]
    return recompute(honest, records)


def _judged(kind: str, path: Path) -> str:
    """What is wrong with the judgment of a forgery; empty if nothing is."""
    found = review(path)
    if found.is_rejected():
        return ""
    if kind != POSSIBLE:
        return "was accepted"
    return "" if found.unconfirmed else "was accepted, and would be ranked"
