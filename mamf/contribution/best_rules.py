"""Rules about what a log is known by: its summary, its ceilings, and the rows that they rest on."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mamf.ceiling import FEWEST_ROUNDS, Ceiling, confirmed
from mamf.contribution.evidence import Evidence, Finding
from mamf.measure import Conditions
from mamf.report import attention_summary_record, find_summary_record, summary_record

# A median of fewer samples has no interval to speak of.
_FEWEST_SAMPLES = 5
# Half the width of an interval, as a share: what an accelerator stays within, and what a host's clock does.
_WIDEST = {"device events": 0.02}
_WIDEST_ELSE = 0.10
# Burst is measured at the boost clock; sensors also flag a cap that costs nothing, so the clock decides.
_LOWEST_BURST_CLOCK = 0.97
_TFLOPS_ROUNDING = 2e-3


def summary_recomputes(evidence: Evidence) -> Iterator[Finding]:
    """The last record follows from the rows before it."""
    summary = evidence.log.summary
    if summary is None:
        yield Finding("interrupted", "the run has no summary: it was killed, or is not over", is_warning=True)
        return
    line = max((number for number, _ in evidence.of_kind("summary")), default=None)
    if evidence.tier == "interrupted":
        told = f"the run was interrupted ({summary['reason'] or 'no reason given'}): its best may never have been tried"
        yield Finding("interrupted", told, line, is_warning=True)
    again = _summary(evidence, summary)
    if summary["measured"] != again["measured"]:
        told = f"the summary counts {summary['measured']} measured rows, the log holds {again['measured']}"
        yield Finding("best-mismatch", told, line)
    if summary["best"] != again["best"]:
        yield Finding("best-mismatch", f"the rows give best {again['best']}, the summary says {summary['best']}", line)


def _summary(evidence: Evidence, summary: dict[str, object]) -> dict[str, object]:
    rows, status, reason = evidence.log.measurements, str(summary["status"]), str(summary["reason"])
    if evidence.is_search:
        return find_summary_record(rows, recomputed_ceilings(evidence), status, reason, 0.0)
    if evidence.is_attention:
        return attention_summary_record(rows, evidence.log.all_ceilings, status, reason, 0.0, 0)
    return summary_record(rows, status, reason, 0.0, 0)


def recomputed_ceilings(evidence: Evidence) -> dict[str, Ceiling]:
    """The ceilings of a find as its confirming rows give them."""
    device = evidence.header["device"]
    found = {}
    for regime in evidence.plan.regimes:
        rows = [row for row in evidence.log.measurements if row.regime == regime and row.phase == "confirm"]
        ceiling = confirmed(rows, device["name"], device["uuid_hash"], evidence.header["kernel"])
        if ceiling is not None:
            found[regime] = ceiling
    return found


def ceilings_recompute(evidence: Evidence) -> Iterator[Finding]:
    """The ceiling records of a find follow from the rounds that confirmed them."""
    if not evidence.is_search:
        return
    again, logged = recomputed_ceilings(evidence), evidence.log.ceilings
    for regime in again.keys() | logged.keys():
        if regime not in again or regime not in logged:
            told = f"{regime}: {'no rounds confirm the ceiling' if regime in logged else 'the ceiling is not recorded'}"
            yield Finding("ceiling-mismatch", told)
        elif not _same(again[regime], logged[regime]):
            told = f"{regime}: the rounds give {_text(again[regime])}, the log says {_text(logged[regime])}"
            yield Finding("ceiling-mismatch", told)


def _same(one: Ceiling, other: Ceiling) -> bool:
    return (one.shape, one.kernel, one.rounds) == (other.shape, other.kernel, other.rounds) and all(
        math.isclose(a, b, rel_tol=1e-5, abs_tol=_TFLOPS_ROUNDING)
        for a, b in (
            (one.tflops, other.tflops),
            (one.interval.low, other.interval.low),
            (one.interval.high, other.interval.high),
        )
    )


def _text(ceiling: Ceiling) -> str:
    return f"{ceiling.tflops:.6g} @ {ceiling.shape} by {ceiling.kernel} in {ceiling.rounds} rounds"


def claims_are_firm(evidence: Evidence) -> Iterator[Finding]:
    """What a log is known by rests on enough samples, a narrow interval and an unthrottled clock."""
    for regime, row in evidence.claims.items():
        name = f"the best of {regime}, {row.shape},"
        if len(row.samples) < _FEWEST_SAMPLES:
            told = f"{name} has {len(row.samples)} samples, fewer than {_FEWEST_SAMPLES}: raise --time-limit"
            yield Finding("few-samples", told)
        low, high = row.tflops_interval
        yield from _too_wide(evidence, name, (high - low) / 2 / row.tflops("median"))
        yield from _throttled(evidence, name, regime, row.conditions)
    for ceiling in evidence.log.all_ceilings.values():
        name = f"the {ceiling.regime} ceiling of {ceiling.problem.dtype}"
        if ceiling.rounds < FEWEST_ROUNDS:
            yield Finding("few-samples", f"{name} was confirmed in {ceiling.rounds} rounds, not {FEWEST_ROUNDS}")
        half = (ceiling.interval.high - ceiling.interval.low) / 2 / ceiling.tflops
        yield from _too_wide(evidence, name, half)
        yield from _throttled(evidence, name, ceiling.regime, ceiling.conditions)


def _too_wide(evidence: Evidence, name: str, half_width: float) -> Iterator[Finding]:
    widest = _WIDEST.get(evidence.header["timer"], _WIDEST_ELSE)
    if half_width > widest:
        told = f"{name} is known to +-{half_width:.1%}, not {widest:.0%}: leave the machine alone, raise --time-limit"
        yield Finding("wide-interval", told)


def _throttled(evidence: Evidence, name: str, regime: str, conditions: Conditions) -> Iterator[Finding]:
    highest, clock = evidence.header["device"]["max_clock_hz"], conditions.clock_hz
    if regime != "burst" or not conditions.throttle_reasons or not highest or not clock:
        return
    if clock < _LOWEST_BURST_CLOCK * highest:
        told = f"{name} ran at {clock / 1e6:.0f} of {highest / 1e6:.0f} MHz ({', '.join(conditions.throttle_reasons)})"
        yield Finding("throttled", f"{told}: burst is measured unthrottled; see 'mamf doctor'")
