"""The rules that keep bad logs out of results/, by id, and the review of a log by all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mamf.contribution.best_rules import ceilings_recompute, claims_are_firm, summary_recomputes
from mamf.contribution.evidence import Evidence, Finding, has_known_schema, read_evidence, read_records
from mamf.contribution.header_rules import (
    circumstances,
    missing_fields,
    placeholders,
    simulated,
    structured_data,
    value_at,
)
from mamf.contribution.placing import legacy_place_of, place_of
from mamf.contribution.privacy import private_findings
from mamf.contribution.row_rules import possible, rows_of_plan, rows_recompute, verified
from mamf.errors import RunLogError
from mamf.legacy import FinderRun, is_legacy, read_legacy_log
from mamf.run_log import read_bytes

#: Every rule and what it asks.
RULES = {
    "unreadable": "the file is a run log, every line of it a record",
    "schema": "its schema is known",
    "truncated": "its last line is whole",
    "missing-field": "the header says what a reader needs to judge a figure",
    "unknown-field": "the header holds what mamf writes, and nothing else",
    "placeholder": "no field waits to be filled in",
    "changed-code": "mamf ran as committed (warning)",
    "doctor": "the machine was in order and left alone (warning)",
    "simulated": "figures are of a device, not of virtual time",
    "data": "operands were normal random data",
    "flop-count": "FLOP are 2*M*N*K, of attention without the masked pairs",
    "row-mismatch": "a row's figures follow from its samples",
    "implausible": "no sample is faster than the device can multiply",
    "unverified": "every result was checked and is right",
    "foreign-row": "rows are of the run's plan",
    "missing-row": "no row of a complete run is missing",
    "best-mismatch": "the summary follows from the rows",
    "ceiling-mismatch": "ceilings follow from the rounds that confirmed them",
    "few-samples": "what the log is known by rests on enough samples",
    "wide-interval": "and is known narrowly enough",
    "throttled": "a burst was not throttled",
    "interrupted": "the run was completed (warning: tier interrupted)",
    "private": "no host, user, path or serial number stands in it",
    "misplaced": "in results/ it is at its place",
    "duplicate": "in results/ it is there once",
}
_RULES: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    missing_fields,
    placeholders,
    simulated,
    structured_data,
    rows_recompute,
    possible,
    verified,
    rows_of_plan,
    summary_recomputes,
    ceilings_recompute,
    claims_are_firm,
    circumstances,
)


@dataclass(frozen=True)
class Review:
    """What the rules say of a log. ``tier``: complete, interrupted or legacy; None when it cannot be read. ``place``:
    where it belongs within results/. ``run_id``: the same for copies of one run.
    """

    path: Path
    findings: tuple[Finding, ...]
    tier: str | None = None
    place: Path | None = None
    run_id: tuple[str, ...] = ()

    def is_rejected(self, strict: bool = False) -> bool:
        return any(strict or not finding.is_warning for finding in self.findings)


def review(path: Path) -> Review:
    """All findings about a log; an unreadable one is a finding too. Never raises for what the file holds."""
    try:
        records = read_records(path)
        header = records[0][1]
        if not has_known_schema(header):
            return Review(path, (Finding("schema", f"schema {header.get('schema')} is not known to this mamf", 1),))
        if is_legacy(header):
            return _review_of_legacy(path, read_legacy_log(path))
        evidence = read_evidence(path)
    except RunLogError as error:
        return Review(path, (*_truncation(path), Finding("unreadable", str(error).removeprefix(f"{path}, "))))
    findings = [*_truncation(path)]
    for rule in _RULES:
        findings += _findings_of(rule, evidence)
    for line, record in evidence.records:
        findings += private_findings(line, record)
    identity = ("started", "device.uuid_hash", "command")
    run_id = tuple(str(value_at(evidence.header, name)) for name in identity)
    try:
        place = place_of(evidence.header)
    except (KeyError, TypeError, ValueError) as error:
        findings.append(Finding("unreadable", f"the header cannot be understood: {error!r}", 1))
        return Review(path, tuple(findings), evidence.tier)
    return Review(path, tuple(findings), evidence.tier, place, run_id)


def _findings_of(rule: Callable[[Evidence], Iterator[Finding]], evidence: Evidence) -> list[Finding]:
    """A log that breaks a rule's own assumptions (a header edited by hand) is found wrong, and not a crash."""
    try:
        return list(rule(evidence))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        return [Finding("unreadable", f"{rule.__name__.replace('_', ' ')} cannot be judged: {error!r}")]


def _truncation(path: Path) -> list[Finding]:
    try:
        whole = read_bytes(path).endswith(b"\n")
    except RunLogError:
        return []
    return [] if whole else [Finding("truncated", "the last line is incomplete: --resume the run, or cut the line off")]


def _review_of_legacy(path: Path, run: FinderRun) -> Review:
    findings = [found for line, record in read_records(path) for found in private_findings(line, record)]
    if not run.device:
        findings.append(Finding("missing-field", "the log names no accelerator", 1))
    run_id = ("legacy", str(run.device), str(run.started), str(run.version), str(run.command))
    return Review(path, tuple(findings), "legacy", legacy_place_of(run), run_id)


def review_results(root: Path, paths: Iterable[Path]) -> list[Review]:
    """Reviews of logs that lie in a results folder: each at its place, each once."""
    reviews: list[Review] = []
    seen: dict[tuple[str, ...], Path] = {}
    for path in paths:
        found = review(path)
        more = []
        if found.place is not None and path.relative_to(root) != found.place:
            more.append(Finding("misplaced", f"belongs to {root.name}/{found.place}"))
        if found.run_id and found.run_id in seen:
            more.append(Finding("duplicate", f"is the run of {seen[found.run_id]}"))
        seen[found.run_id] = path.relative_to(root)
        reviews.append(Review(path, (*found.findings, *more), found.tier, found.place, found.run_id))
    return reviews
