"""Rules about a log's claims: its summary, its ceilings, and the rows behind them."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from mamf.ceilings.ceiling import FEWEST_ROUNDS, confirm_ceilings
from mamf.contribution.evidence import Evidence, Finding
from mamf.contribution.row_rules import agree, is_exact, same_number, same_rate, without_interval
from mamf.kinds.registry import kind_of
from mamf.logs.recording import End
from mamf.logs.records import ceiling_from_record, ceiling_record, is_of_old_calibration
from mamf.logs.run_log import OwnCeilings, latest_rows
from mamf.measurement import Conditions, Measurement
from mamf.plans import FIND, ROOFLINE
from mamf.report.own_ceilings import problem_title

# With fewer samples the interval of a median is meaningless.
_FEWEST_SAMPLES = 5
# The largest half-width of an interval, as a share, on an accelerator and on a CPU (timed by the host clock).
# On a CPU, the calibration alone contributes 31 % for a single visit.
_WIDEST, _WIDEST_OF_CPU = 0.03, 0.4
# Burst is measured at the boost clock; sensors also flag power caps without effect, so the clock decides.
_LOWEST_BURST_CLOCK = 0.97
# How far above the ceiling later measurements of the same product may be; a CPU's speed varies with its load.
_ABOVE_CEILING, _ABOVE_CEILING_OF_CPU = 1.05, 1.25
# Ceilings are written with six digits.
_same_figure = partial(same_number, relative=1e-5)
#: A problem in a regime.
Sought = tuple[Any, str]
_NOT_RECOMPUTED = {"record", "time", "timer_overhead_after_seconds", "shared_after"}
_NOT_FROM_ROWS = {"elapsed_seconds", "left", "status", "reason"}


def run_was_completed(evidence: Evidence) -> Iterator[Finding]:
    """The run was completed (a warning if not)."""
    summary = evidence.log.summary
    if summary is None:
        yield Finding("interrupted", "the run has no summary: it was killed, or is not over", is_warning=True)
    elif evidence.log.tier == "interrupted":
        message = f"the run was interrupted ({summary['reason'] or 'no reason given'}): the best shape may be untested"
        yield Finding("interrupted", message, is_warning=True)


def summary_recomputes(evidence: Evidence) -> Iterator[Finding]:
    """The last record follows from the rows before it."""
    summary = evidence.log.summary
    if summary is None or not evidence.is_known:
        return
    line = max((number for number, _ in evidence.of_kind("summary")), default=None)
    again = summary_of(evidence, summary)
    for name in sorted(summary.keys() - again.keys() - _NOT_RECOMPUTED):
        yield Finding("unknown-field", f"mamf writes no field {name!r} of a summary: remove it", line)
    # Converted logs counted no phases.
    for name in sorted((again.keys() & summary.keys() | {"best", "measured"}) - _NOT_FROM_ROWS):
        if not agree(summary.get(name), again[name], same_rate):
            message = f"{name}: the rows give {again[name]}, the summary says {summary.get(name)}"
            yield Finding("best-mismatch", message, line)
    if evidence.log.tier == "complete" and summary["left"]:
        yield Finding("best-mismatch", f"complete, but {summary['left']} shapes are left", line)


def summary_of(evidence: Evidence, summary: dict[str, object]) -> dict[str, object]:
    rows, status, reason = evidence.log.measurements, str(summary["status"]), str(summary["reason"])
    plan = evidence.plan
    ceilings = recomputed_ceilings(evidence) if plan.kind in (FIND, ROOFLINE) else evidence.log.all_ceilings
    return kind_of(plan).summary(plan, rows, ceilings, End(status, reason))


def recomputed_ceilings(evidence: Evidence, before_line: float = math.inf) -> OwnCeilings:
    """The ceilings by problem and regime, recomputed from the last rounds above ``before_line`` of the log."""
    device = evidence.header["device"]
    rows = latest_rows(row for line, _, row in evidence.rows if line < before_line)
    return confirm_ceilings(rows, evidence.sought, device["name"], device["uuid_hash"])


def ceilings_recompute(evidence: Evidence) -> Iterator[Finding]:
    """Ceilings that were searched for follow from the rounds that confirmed them, one for each regime of the plan.

    A resumed search also has the ceilings from before its interruption: those follow from the earlier rounds.
    """
    if not evidence.sought:
        return
    again = recomputed_ceilings(evidence)
    logged = [(line, record, _key(evidence, record)) for line, record in evidence.of_kind("ceiling")]
    last = {key: line for line, _, key in logged}
    for line, record, key in logged:
        ceiling = (again if line == last[key] else recomputed_ceilings(evidence, line)).get(key)
        if ceiling is None:
            yield Finding("ceiling-mismatch", f"{record['regime']}: no rounds confirm the ceiling", line)
            continue
        expected = ceiling_record(ceiling)
        if is_of_old_calibration(record):
            record, expected = without_interval(record), without_interval(expected)
        # Earlier logs lack fields of today.
        wrong = [name for name in expected if name in record and not agree(record[name], expected[name], _same_figure)]
        if wrong:
            message = ", ".join(f"{name} {record[name]} (the rounds give {expected[name]})" for name in wrong)
            yield Finding("ceiling-mismatch", f"{ceiling.regime}: {message}", line)
        known = {"record", "time", *(("dtype",) if record.get("dtype") == ceiling.problem.dtype else ())}
        for name in sorted(record.keys() - expected.keys() - known):
            yield Finding("unknown-field", f"mamf writes no field {name!r} of a ceiling: remove it", line)
    if _repeats(evidence, logged):
        yield Finding("ceiling-mismatch", "a regime has two ceilings, and was not resumed between them")
    for title in sorted(problem_title(regime, problem) for problem, regime in _wanted(evidence, again) - last.keys()):
        yield Finding("ceiling-mismatch", f"the ceiling of {title} is not there")


def _repeats(evidence: Evidence, logged: Iterable[tuple[int, object, Sought]]) -> bool:
    """Whether one process wrote the same ceiling twice."""
    begun = [line for line, _ in evidence.of_kind("resume")]
    written = [(bisect(begun, line), key) for line, _, key in logged]
    return len(written) != len(set(written))


def _key(evidence: Evidence, record: Mapping[str, Any]) -> Sought:
    ceiling = ceiling_from_record(record, evidence.log.header)
    return ceiling.problem, ceiling.regime


def _wanted(evidence: Evidence, again: Iterable[Sought]) -> set[Sought]:
    """Ceilings that must be there. Attention does not need one: there, only those that rounds confirm."""
    if evidence.plan.confirms:
        measured = {row.problem for row in evidence.log.measurements if row.ok}
        is_whole = evidence.log.tier == "complete"
        return {(each, regime) for each, regime, _ in evidence.sought if each in measured} if is_whole else set(again)
    wanted = {(search.problem, regime) for search in evidence.plan.searches for regime in evidence.plan.regimes}
    if evidence.plan.is_search:
        return wanted if evidence.log.tier == "complete" else set(again)
    return wanted & set(again) if evidence.log.tier == "complete" else set()


def ceilings_fit_attention(evidence: Evidence) -> Iterator[Finding]:
    """Ceilings behind shares lie in their intervals, used normal data, and their products were never faster."""
    if not evidence.is_attention or evidence.plan.confirms:
        return
    ceilings = evidence.log.all_ceilings
    if not ceilings:
        yield Finding(
            "missing-field",
            "the log holds no ceiling: its rows have no share and stand in no table (--ceiling LOG)",
            1,
            is_warning=True,
        )
    for ceiling in ceilings.values():
        name = f"the {ceiling.regime} ceiling of {ceiling.problem.dtype}"
        if not ceiling.interval.low <= ceiling.tflops <= ceiling.interval.high:
            yield Finding("ceiling-mismatch", f"{name} lies outside its own interval")
        if ceiling.problem.data != "normal":
            yield Finding("data", f"{name} is of {ceiling.problem.data} data")
    most = _ABOVE_CEILING_OF_CPU if evidence.is_cpu else _ABOVE_CEILING
    for line, _, row in evidence.rows:
        own = ceilings.get((row.problem.dtype, row.regime))
        if own is None or not row.ok or row.phase or not is_exact(row):
            continue
        seen = max(row.best_rate, float(row.details.get("reference_tflops", 0.0))) / (row.device_speed or 1.0)
        if seen > most * own.tflops:
            yield Finding(
                "ceiling-mismatch",
                f"{row.shape}: {seen:.4g} TFLOPS were seen, the ceiling is {own.tflops:.4g}: find it anew",
                line,
            )
        elif evidence.counts(row) and row.rate_interval.low / (row.device_speed or 1.0) > own.interval.high:
            yield Finding(
                "ceiling-mismatch", f"{row.shape} by {row.kernel}: above the ceiling by more than both intervals", line
            )


def claims_are_firm(evidence: Evidence) -> Iterator[Finding]:
    """A log's claims have enough samples, a narrow interval and an unthrottled clock."""
    for regime, row in evidence.claims.items():
        name = f"the best of {regime}, {row.shape},"
        if len(row.samples) < _FEWEST_SAMPLES:
            message = f"{name} has {len(row.samples)} samples, fewer than {_FEWEST_SAMPLES}: raise --time-limit"
            yield Finding("few-samples", message)
        yield from _too_wide(evidence, name, _half_width(row), "--time-limit")
        yield from _throttled(evidence, name, regime, row.conditions)
    for ceiling in (*evidence.log.all_ceilings.values(), *evidence.log.own_ceilings.values()):
        name = f"the ceiling of {problem_title(ceiling.regime, ceiling.problem)}"
        if ceiling.rounds < FEWEST_ROUNDS:
            yield Finding("few-samples", f"{name} was confirmed in {ceiling.rounds} rounds, not {FEWEST_ROUNDS}")
        half = (ceiling.interval.high - ceiling.interval.low) / 2 / ceiling.rate
        yield from _too_wide(evidence, name, half, "--budget")
        yield from _throttled(evidence, name, ceiling.regime, ceiling.conditions)


def kernels_are_firm(evidence: Evidence) -> Iterator[Finding]:
    """In a log of kernels every row is a result: warns how many have wide intervals."""
    if not evidence.is_of_kernels:
        return
    rows = [row for _, _, row in evidence.rows if row.ok and evidence.counts(row)]
    if rough := [row for row in rows if _half_width(row) > _widest(evidence)]:
        worst = max(rough, key=_half_width)
        yield Finding(
            "wide-interval",
            f"{len(rough)} of {len(rows)} rows are known to worse than {_widest(evidence):.0%}, "
            f"{worst.shape} by {worst.kernel} to +-{_half_width(worst):.0%}",
            is_warning=True,
        )


def _half_width(row: Measurement) -> float:
    return row.rate_interval.half_width / row.rate(row.figure)


def _widest(evidence: Evidence) -> float:
    return _WIDEST_OF_CPU if evidence.is_cpu else _WIDEST


def _too_wide(evidence: Evidence, name: str, half_width: float, option: str) -> Iterator[Finding]:
    """``option``: the option that allows more time."""
    widest = _widest(evidence)
    if half_width > widest:
        message = f"{name} is known to +-{half_width:.1%}, not {widest:.0%}: leave the machine alone, raise {option}"
        yield Finding("wide-interval", message)


def _throttled(evidence: Evidence, name: str, regime: str, conditions: Conditions) -> Iterator[Finding]:
    highest, clock = evidence.header["device"]["max_clock_hz"], conditions.clock_hz
    if regime != "burst" or not conditions.throttle_reasons or not highest or not clock:
        return
    if clock < _LOWEST_BURST_CLOCK * highest:
        yield Finding(
            "throttled",
            f"{name} ran at {clock / 1e6:.0f} of {highest / 1e6:.0f} MHz ({', '.join(conditions.throttle_reasons)}): "
            "burst is measured unthrottled; see 'mamf doctor'",
        )
