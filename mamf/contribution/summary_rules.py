"""Rules about what a log claims: its summary, its ceilings, and the rows behind them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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
#: The widest half of an interval, as a share, on an accelerator and on a CPU (timed by the host clock).
#: On a CPU, the calibration alone contributes 31 % for a single visit.
WIDEST, WIDEST_OF_CPU = 0.03, 0.4
# Burst is measured at the boost clock; sensors also flag power caps without effect, so the clock decides.
_LOWEST_BURST_CLOCK = 0.97
# How far above the ceiling later measurements of the same product may be; a CPU's speed varies with its load.
_ABOVE_CEILING, _ABOVE_CEILING_OF_CPU = 1.05, 1.25
# Ceilings are written with six digits.
_same_figure = partial(same_number, relative=1e-5)
# Earlier logs have the median power of the rounds, later ones their energy divided by their time.
_same_power = partial(same_number, relative=0.05)
_POWER = {"watts", "joules_per_tflop"}
_NOT_RECOMPUTED = {"record", "time", "timer_overhead_after_seconds", "shared_after"}
_NOT_FROM_ROWS = {"elapsed_seconds", "left", "status", "reason"}


def run_was_completed(evidence: Evidence) -> Iterator[Finding]:
    """Something was measured, and the run was completed (a warning if not)."""
    if not any(evidence.counts(row) for _, row in evidence.good_rows):
        yield Finding("missing-row", "nothing was measured")
    elif evidence.plan.is_search and not evidence.log.all_ceilings:
        message = (
            "no ceiling was confirmed, and a find is known by nothing else: resume it with 'mamf find --resume LOG'"
        )
        yield Finding("missing-row", message)
    if not evidence.is_known:
        message = f"{evidence.plan.operation} is not installed here: its rows cannot be checked"
        yield Finding("unknown-operation", message, 1)
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
    """Ceilings that were searched for follow from the rounds that confirmed them. A resumed search also has the
    ceilings from before its interruption: those follow from the earlier rounds.
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
        wrong = [
            name
            for name in expected
            if name in record
            and not agree(record[name], expected[name], _same_power if name in _POWER else _same_figure)
        ]
        if wrong:
            message = ", ".join(f"{name} {record[name]} (the rounds give {expected[name]})" for name in wrong)
            yield Finding("ceiling-mismatch", f"{ceiling.regime}: {message}", line)
        known = {"record", "time", *(("dtype",) if record.get("dtype") == ceiling.problem.dtype else ())}
        for name in sorted(record.keys() - expected.keys() - known):
            yield Finding("unknown-field", f"mamf writes no field {name!r} of a ceiling: remove it", line)
    if evidence.plan.is_search and evidence.log.tier == "complete":
        for problem, regime in again.keys() - last.keys():
            yield Finding("ceiling-mismatch", f"the ceiling of {problem_title(regime, problem)} is missing")


def _key(evidence: Evidence, record: Mapping[str, Any]) -> tuple[Any, str]:
    ceiling = ceiling_from_record(record, evidence.log.header)
    return ceiling.problem, ceiling.regime


def ceilings_fit_attention(evidence: Evidence) -> Iterator[Finding]:
    """Ceilings behind the shares of attention lie in their intervals, and no row is above its ceiling."""
    if evidence.plan.operation != "attention" or evidence.plan.confirms:
        return
    ceilings = evidence.log.all_ceilings
    if not ceilings:
        message = "the log holds no ceiling: its rows have no share and stand in no table (--ceiling LOG)"
        yield Finding("missing-field", message, 1, is_warning=True)
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
        rate = max(row.best_rate, float(row.details.get("reference_tflops", 0.0))) / (row.device_speed or 1.0)
        if rate > most * own.tflops:
            message = f"{row.shape}: {rate:.4g} TFLOPS were measured, the ceiling is {own.tflops:.4g}: find it again"
            yield Finding("ceiling-mismatch", message, line)


def claims_are_firm(evidence: Evidence) -> Iterator[Finding]:
    """A log's claims have enough samples, a narrow interval and an unthrottled clock."""
    for regime, row in evidence.claims.items():
        name = f"the best of {regime}, {row.shape},"
        if len(row.samples) < _FEWEST_SAMPLES:
            message = f"{name} has {len(row.samples)} samples, fewer than {_FEWEST_SAMPLES}: raise --time-limit"
            yield Finding("few-samples", message)
        yield from _is_firm(evidence, name, _half_width(row), "--time-limit", regime, row.conditions)
    for ceiling in (*evidence.log.all_ceilings.values(), *evidence.log.own_ceilings.values()):
        name = f"the ceiling of {problem_title(ceiling.regime, ceiling.problem)}"
        if ceiling.rounds < FEWEST_ROUNDS:
            yield Finding("few-samples", f"{name} was confirmed in {ceiling.rounds} rounds, not {FEWEST_ROUNDS}")
        half = (ceiling.interval.high - ceiling.interval.low) / 2 / ceiling.rate
        yield from _is_firm(evidence, name, half, "--budget", ceiling.regime, ceiling.conditions)
    if evidence.is_of_kernels:
        widths = [_half_width(row) for _, _, row in evidence.rows if row.ok and evidence.counts(row)]
        if rough := [width for width in widths if width > _widest(evidence)]:
            message = f"{len(rough)} of {len(widths)} rows are known to worse than {_widest(evidence):.0%}"
            yield Finding("wide-interval", f"{message}, one to +-{max(rough):.0%}", is_warning=True)


def _half_width(row: Measurement) -> float:
    return row.rate_interval.half_width / row.rate(row.figure)


def _widest(evidence: Evidence) -> float:
    return WIDEST_OF_CPU if evidence.is_cpu else WIDEST


def _is_firm(
    evidence: Evidence, name: str, half_width: float, option: str, regime: str, conditions: Conditions
) -> Iterator[Finding]:
    """``option``: the option that allows more time."""
    if half_width > _widest(evidence):
        message = f"{name} is known to +-{half_width:.1%}, not {_widest(evidence):.0%}"
        yield Finding("wide-interval", f"{message}: leave the machine alone, raise {option}")
    highest, clock = evidence.header["device"]["max_clock_hz"] or 0.0, conditions.clock_hz
    if regime == "burst" and conditions.throttle_reasons and clock and clock < _LOWEST_BURST_CLOCK * highest:
        reasons = ", ".join(conditions.throttle_reasons)
        message = f"{name} ran at {clock / 1e6:.0f} of {highest / 1e6:.0f} MHz ({reasons}); see 'mamf doctor'"
        yield Finding("throttled", message)
