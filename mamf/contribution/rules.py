"""The rules that keep bad logs out of results/, by id, and the review of a log by all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mamf.contribution.best_rules import (
    ceilings_fit_attention,
    ceilings_recompute,
    claims_are_firm,
    kernels_are_firm,
    run_was_completed,
    summary_recomputes,
)
from mamf.contribution.collection import entries_of
from mamf.contribution.confirming import Entry, part_confirmed, shortened
from mamf.contribution.evidence import Evidence, Finding, records_of
from mamf.contribution.header_rules import (
    circumstances,
    known_device,
    legacy_findings,
    missing_fields,
    placeholders,
    plain_texts,
    sensors_were_read,
    shared_devices,
    simulated,
    structured_data,
    whole_card,
)
from mamf.contribution.placing import folder_of, legacy_name_of, lies_at, place_of, why_above_contributed
from mamf.contribution.privacy import private_findings
from mamf.contribution.row_rules import (
    possible,
    rows_recompute,
    sensors_plausible,
    times_in_order,
    verified,
)
from mamf.contribution.sampling_rules import (
    DISTINCTIVE_SAMPLES,
    rows_of_plan,
    samples_whole,
    timer_is_credible,
    timer_stayed,
)
from mamf.errors import RunLogError
from mamf.kinds.registry import kind_of
from mamf.logs.legacy import TIER, legacy_run
from mamf.logs.lines import Seen
from mamf.logs.run_log import MALFORMED, describe_error, run_log_of, why_unreadable
from mamf.measurement import group_pairs

_RULES: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    missing_fields,
    placeholders,
    plain_texts,
    sensors_were_read,
    simulated,
    structured_data,
    shared_devices,
    whole_card,
    known_device,
    rows_recompute,
    possible,
    verified,
    sensors_plausible,
    timer_is_credible,
    timer_stayed,
    samples_whole,
    rows_of_plan,
    times_in_order,
    summary_recomputes,
    ceilings_recompute,
    ceilings_fit_attention,
    claims_are_firm,
    kernels_are_firm,
    run_was_completed,
    circumstances,
)


@dataclass(frozen=True)
class Review:
    """What the rules say of a log. ``tier``: complete, interrupted or legacy; None when it cannot be read. ``place``:
    where it belongs within results/. ``samples``: what identifies the samples of its rows, within this process.
    ``entries``: the table entries of an accepted log. ``unconfirmed``: which of them no second submitter confirms.
    """

    path: Path
    findings: tuple[Finding, ...]
    tier: str | None = None
    place: Path | None = None
    samples: frozenset[int] = field(default=frozenset(), repr=False)
    entries: tuple[Entry, ...] = field(default=(), repr=False)
    unconfirmed: str = ""

    def is_rejected(self, strict: bool = False) -> bool:
        return any(strict or not finding.is_warning for finding in self.findings)


def review(path: Path, seen: Seen | None = None) -> Review:
    """All findings about a log; an unreadable log is also a finding. Never raises for the file's contents. ``seen``:
    called with the number of bytes read.
    """
    try:
        found = _review(path, seen)
        return replace(found, unconfirmed=why_above_contributed(found.entries))
    except (*MALFORMED, RecursionError) as error:
        return Review(path, (_unreadable(path, error),))


def _review(path: Path, seen: Seen | None) -> Review:
    records = records_of(path, seen)
    first = next(records)
    findings, header = list(_as_bytes(path)), first[1]
    if why := why_unreadable(path, header.get("schema")):
        return Review(path, (Finding("schema", why, 1),))
    if header.get("tier") == TIER:
        return _legacy_review(path, itertools.chain([first], records), findings)
    whole = (first, *records)
    for line, record in whole:
        findings += private_findings(line, record)
    try:
        log = run_log_of(path, whole)
    except RunLogError as error:
        return Review(path, (*findings, _unreadable(path, error)))
    if log.counter_records or not kind_of(log.plan).is_collected:
        what = f"a log of 'mamf {'counters' if log.counter_records else log.plan.kind}'"
        return Review(path, (*findings, Finding("kind", f"{what}: results/ does not collect it")))
    evidence = Evidence(whole, log)
    for rule in _RULES:
        findings += _findings_of(rule, evidence)
    samples = frozenset(hash(row.samples) for _, _, row in evidence.rows if len(row.samples) >= DISTINCTIVE_SAMPLES)
    found = Review(path, tuple(findings), evidence.log.tier, place_of(header), samples)
    return found if found.is_rejected() else replace(found, entries=tuple(entries_of(log, path)))


def _legacy_review(path: Path, records: Iterator[tuple[int, dict[str, Any]]], findings: list[Finding]) -> Review:
    """Each record is judged in passing: such a log can have a million rows."""

    def judged() -> Iterator[dict[str, Any]]:
        for line, record in records:
            findings.extend(private_findings(line, record))
            yield record

    run = legacy_run(path, judged())
    findings += legacy_findings(run)
    figures = hash((run.started, *(f"{row.shape} {row.tflops}" for row in run.rows)))
    place = Path(folder_of(run.device or ""), legacy_name_of(run))
    return Review(path, tuple(findings), TIER, place, frozenset([figures]))


def _unreadable(path: Path, error: Exception) -> Finding:
    return Finding("unreadable", describe_error(error).removeprefix(f"{path}").lstrip(",: "))


def _findings_of(rule: Callable[[Evidence], Iterator[Finding]], evidence: Evidence) -> list[Finding]:
    """A log that breaks a rule's own assumptions (a header edited by hand) yields a finding instead of a crash."""
    try:
        return list(rule(evidence))
    except MALFORMED as error:
        judged = rule.__name__.replace("_", " ")
        return [Finding("unreadable", f"whether {judged} cannot be judged: {describe_error(error)}")]


def _as_bytes(path: Path) -> Iterator[Finding]:
    data = path.read_bytes()
    if data and not data.endswith(b"\n") and b"\n" in data:
        yield Finding("truncated", "the last line is incomplete: --resume the run, or cut the line off")
    if b"\r" in data or data.startswith(b"\xef\xbb\xbf"):
        yield Finding("unreadable", "an editor changed its line ends or put a mark before it")


def review_results(root: Path, paths: Iterable[Path], seen: Seen | None = None) -> list[Review]:
    """Reviews of logs that lie in a results folder: each at its place, each once, each beside the others."""
    reviews: list[Review] = []
    holders: dict[int, Path] = {}
    for path in paths:
        found = review(path, seen)
        place, more = path.relative_to(root), []
        if found.place is not None and not lies_at(place, found.place):
            more.append(Finding("misplaced", f"belongs to {root.name}/{found.place}"))
        if copied := {holders.setdefault(each, place) for each in found.samples} - {place}:
            more.append(Finding("duplicate", f"holds samples of {min(copied)}"))
        reviews.append(replace(found, findings=(*found.findings, *more)))
    doubted = part_confirmed(entry for found in reviews for entry in found.entries)[1]
    reasons = group_pairs((entry.place, reason) for entry, reason in doubted)
    return [replace(found, unconfirmed=shortened(reasons.get(found.path, []))) for found in reviews]
