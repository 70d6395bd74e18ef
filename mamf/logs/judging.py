"""Decide whether the rows of a run agree with earlier rates. ``mamf guard`` checks that rows are not slower than in an
earlier log, the baseline. ``mamf reproduce`` checks claims, which are rates from another log or a text. This module
only reads rows; it measures nothing.

Guard: if the first measurement of a row looks slow or noisy, the run measures the row again, and only the repeated
measurements decide. The reason is the winner's curse: of many first measurements, the slowest is partly slow by chance.
The run repeats a row until the interval of the ratio between its rate and the baseline's is entirely above or entirely
below the limit 1 - tolerance, or until the maximum number of repetitions.

Claims: ``mamf find`` measures its fastest shapes again, so its ceilings need no correction. The best rows of other logs
were selected because they were fast, so their rates are partly luck. A verdict corrects for the number of rows from
which they were selected. Runs of the same kernels always differ a little (mamf.logs.compared_rows), and a verdict
allows for this. If a claim does not state the error of its rate, mamf assumes the error of the new measurement. The log
numbers the measurements of each claim and marks them with the phase ``confirm``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from msgspec import Struct, field

from mamf.ceilings.ceiling import CONFIRM_PHASE, MIN_CONFIRMING_ROUNDS, summarize_conditions
from mamf.errors import UsageError
from mamf.logs.compare import (
    MIN_INTERVAL_COVERAGE,
    Comparison,
    Difference,
    RowPair,
    find_value_differences,
    list_run_settings,
    pair_rows,
)
from mamf.logs.compared_rows import (
    CYCLES_UNIT,
    ComparedRow,
    combine_measurements,
    is_search_log,
    list_compared_rows,
    make_pairing_fields,
)
from mamf.logs.records import FieldValues
from mamf.logs.run_log import RunLog
from mamf.machine.environment import was_cpu_device_busy
from mamf.measurement import Measurement, group_pairs
from mamf.plans import COMMON_REGIMES, Claim, ReproduceOptions

# -- judging the rows of mamf guard ------------------------------------------------------------------------------------

DEFAULT_GUARD_TOLERANCE = 0.02
DEFAULT_MAX_ROUNDS = 9


#: ``mamf guard`` compares either rates, which requires the same card, or used cycles, which are comparable between all
#: cards of one architecture.
COMPARE_RATE, COMPARE_CYCLES = COMPARED_FIGURES = ("rate", "cycles")


class GuardFileKeys(Struct, kw_only=True):
    """The keys of the TOML file that ``mamf guard`` reads, with their types and default values."""

    operation: str
    kernels: list[str]
    shapes: list[str]
    baseline: str = ""
    regimes: tuple[str, ...] = COMMON_REGIMES[:1]
    tolerance: Any = DEFAULT_GUARD_TOLERANCE
    rounds: int = DEFAULT_MAX_ROUNDS
    precision: Any = None
    time_limit: Any = None
    flush: bool = True
    by: str = COMPARE_RATE
    problem: FieldValues = field(default_factory=dict)


# A row is measured again if its first measurement is slower than the baseline by more than this share of the tolerance.
# The share is below 1, because a single measurement may be a percent faster than the average of many measurements.
_REPETITION_LOSS_SHARE = 0.5
# Number of failed measurements after which a row counts as failed. After fewer failures, the row is measured again,
# because the cause may be transient.
_MAX_FAILURES = 2

#: The outcomes of a row of ``mamf guard``, worst first. ``failed``: the baseline has a rate, but this row has none.
#: ``regression``: the row is slower than the baseline. ``mamf guard`` fails if a row has one of these two outcomes.
#: ``undecided``: the row is too noisy for the tolerance or was repeated too rarely. ``new``: the row is not in the
#: baseline.
GuardOutcome = Literal["failed", "regression", "undecided", "new", "ok"]
GUARD_OUTCOMES: tuple[GuardOutcome, ...] = get_args(GuardOutcome)


def list_guarded_rows(log: RunLog, compared_figure: str) -> list[ComparedRow]:
    """Return the rows of a log with the figures that ``mamf guard`` compares. ``compared_figure``: ``rate`` or
    ``cycles``, as in COMPARED_FIGURES.
    """
    return (
        [each.convert_to_cycle_share() for each in list_compared_rows(log)]
        if compared_figure == COMPARE_CYCLES
        else list_compared_rows(log)
    )


def needs_repetition(baseline: ComparedRow, measurements: Sequence[Measurement], tolerance: float) -> bool:
    """Return whether ``mamf guard`` must measure a row again before it can judge the row.

    ``baseline``: the row in the earlier log. ``measurements``: all measurements of the row so far, in order.
    """
    now = combine_measurements(measurements)
    now = now.convert_to_cycle_share() if baseline.unit == CYCLES_UNIT else now
    before = baseline.scale_to_device_of(now)
    if before.rate is None or any(row.status == "wrong_result" for row in measurements):
        return False
    if not measurements[-1].ok:
        return sum(not row.ok for row in measurements) < _MAX_FAILURES
    pair = RowPair(before.pairing_fields, before, now)
    if not any(row.phase == CONFIRM_PHASE for row in measurements):
        return pair.ratio < 1 - _REPETITION_LOSS_SHARE * tolerance or is_interval_too_wide(pair, tolerance)
    return pair.b.repetition_count < MIN_CONFIRMING_ROUNDS or pair.interval.low <= 1 - tolerance <= pair.interval.high


@dataclass(frozen=True)
class JudgedRow:
    """A row that ``mamf guard`` measured, with its outcome.

    ``pair``: the row and its baseline (the row of the earlier log); None if one of the two has no rate.
    """

    compared_row: ComparedRow
    outcome: GuardOutcome
    pair: RowPair | None = None


@dataclass(frozen=True)
class GuardResult:
    """The result of ``mamf guard``: the log of its run compared with an earlier log, the baseline.

    - ``rows``: the rows with their outcomes, worst first.
    - ``unfinished_reason``: why the run ended early; empty if it did not.
    """

    comparison: Comparison
    rows: tuple[JudgedRow, ...]
    tolerance: float
    unfinished_reason: str

    def count_outcomes(self) -> dict[GuardOutcome, int]:
        """Return the number of rows for each outcome, including outcomes that no row has."""
        return {outcome: sum(row.outcome == outcome for row in self.rows) for outcome in GUARD_OUTCOMES}

    @property
    def has_failed(self) -> bool:
        return any(row.outcome in ("regression", "failed") for row in self.rows)

    @property
    def is_finished(self) -> bool:
        return (
            not self.unfinished_reason and not self.count_outcomes()["undecided"] and any(row.pair for row in self.rows)
        )


def judge_guard_log(
    baseline: RunLog, log: RunLog, tolerance: float, compared_figure: str = COMPARE_RATE
) -> GuardResult:
    """Compare the log of a run of ``mamf guard`` with its baseline, an earlier log. ``compared_figure``: ``rate`` or
    ``cycles``, as in COMPARED_FIGURES.
    """
    comparison = pair_rows(baseline, log, *(list_guarded_rows(each, compared_figure) for each in (baseline, log)))
    judged_rows = [
        *(JudgedRow(pair.b, judge_pair(pair, tolerance), pair) for pair in comparison.pairs),
        *(JudgedRow(now, "failed") for _, now in comparison.rows_only_in_a if now is not None),
        *(JudgedRow(now, "new") for now, _ in comparison.rows_only_in_b),
    ]
    judged_rows.sort(key=lambda row: GUARD_OUTCOMES.index(row.outcome))  # worst first
    unfinished_reason = "" if log.tier == "complete" else (log.summary or {}).get("reason") or "it was killed"
    return GuardResult(comparison, tuple(judged_rows), tolerance, unfinished_reason)


def judge_pair(pair: RowPair, tolerance: float) -> GuardOutcome:
    """Return the outcome of a row that both logs have: ``regression`` if the row is slower than its baseline with 95 %
    confidence, and by more than the tolerance.

    A slower row stays ``undecided`` until it has been measured again MIN_CONFIRMING_ROUNDS times.
    """
    if is_interval_too_wide(pair, tolerance):
        return "undecided"
    if pair.interval.high >= 1 or pair.ratio >= 1 - tolerance:
        return "ok"
    return "regression" if pair.b.repetition_count >= MIN_CONFIRMING_ROUNDS else "undecided"


def is_interval_too_wide(pair: RowPair, tolerance: float) -> bool:
    """Return whether the interval of the ratio is too wide to tell if the row is slower by more than the tolerance."""
    interval = pair.interval
    is_too_wide = interval.low < 1 - tolerance <= interval.high and pair.ratio - interval.low > tolerance * pair.ratio
    return is_too_wide or interval.coverage < MIN_INTERVAL_COVERAGE or not pair.has_known_intervals


def list_half_widths_and_rows(log: RunLog) -> list[tuple[float, ComparedRow]]:
    """Return a pair (half width, row) for each row with a rate, the widest interval first.

    The half width of the row's 95 % interval is a share of the rate, and infinite if the interval is unknown.
    """
    half_widths = [
        (each.interval.half_width / each.rate if each.interval.is_known else math.inf, each)
        for each in list_compared_rows(log)
        if each.rate and each.interval
    ]
    return sorted(half_widths, key=lambda each: -each[0])


# -- making and judging claims -----------------------------------------------------------------------------------------

UNDECIDED, NOT_MEASURED = "undecided", "not measured"
#: Maps the verdict of the comparison between the claimed and the measured rate to the verdict on the claim.
_CLAIM_VERDICT_BY_ROW_VERDICT = {"SAME": "reproduced", "FASTER": "faster", "SLOWER": "slower", "UNDECIDED": UNDECIDED}
# _NORMAL_95_HALF_WIDTH: half the width of a 95 % interval of a normal distribution, in standard deviations.
# _SAME_CLOCK_TOLERANCE: the largest relative difference of two clocks that count as equal.
_NORMAL_95_HALF_WIDTH, _SAME_CLOCK_TOLERANCE = 1.96, 0.005


def make_reproduce_options(log: RunLog, max_claims_per_group: int | None = 1) -> ReproduceOptions:
    """Turn the best rows of a log into claims: rates that another run can measure again.

    ``max_claims_per_group``: the maximum number of claims for each regime and problem; None for all rows. Raises
    UsageError for a log without a rate.
    """
    ceilings = list_compared_rows(log, as_ceilings=True) if is_search_log(log) and max_claims_per_group == 1 else []
    rows = {
        frozenset(make_pairing_fields(row.key).items()): row
        for row in log.measurements
        if row.ok and not row.is_reference
    }
    claims = [
        Claim(row.key, entry.rate, entry.interval, entry.error, row.conditions.clock_hz, entry.used_cycle_share)
        for entry in (ceilings or list_compared_rows(log) if not log.counter_records else ())
        if entry.rate and entry.interval and entry.interval.low > 0
        if (row := rows.get(frozenset({**entry.pairing_fields, "shape": entry.shape, "kernel": entry.kernel}.items())))
    ]
    groups = group_pairs((claim.step[:2], claim) for claim in sorted(claims, key=lambda each: -each.rate))
    if not claims:
        raise UsageError(f"{log.path} has no measured rate of {log.plan.operation} to reproduce: pass a log with rates")
    return ReproduceOptions(
        tuple(claim for same in groups.values() for claim in same[:max_claims_per_group]),
        source=log.path.name,
        recorded=tuple(_list_device_and_settings(log.header).items()),
        chosen_from=1 if ceilings else len(claims),
    )


def _list_device_and_settings(header: Mapping[str, Any]) -> dict[str, str]:
    """Return the device, card, software and settings of a run as texts by name, from the header of its log."""
    device, clock = header["device"], header["device"].get("max_clock_hz")
    return {
        "device": device["name"],
        "card": device.get("uuid_hash") or "unknown",
        **list_run_settings(header),
        **({"highest clock": f"{clock / 1e6:.0f} MHz"} if clock else {}),
    }


@dataclass(frozen=True)
class JudgedClaim:
    """A claim (a rate from another log or text) and its measurement on this device.

    - ``measured_row``: the measured row; None if mamf did not try to measure it.
    - ``pair``: the claim and the measured row; None if the measured row has no rate. If the claim was measured on
      another card and the cycles used are known for both cards, the pair compares cycles.
    - ``clock_hz``: the clock during the measurement on this device; None if it is unknown.
    """

    claim: Claim
    tolerance: float
    measured_row: ComparedRow | None
    pair: RowPair | None = None
    clock_hz: float | None = None

    @property
    def verdict(self) -> str:
        if self.pair is None:
            return NOT_MEASURED
        if not self.claim.interval.is_known:
            return UNDECIDED
        return _CLAIM_VERDICT_BY_ROW_VERDICT[self.pair.decide_verdict(self.tolerance)]

    @property
    def used_cycle_shares(self) -> tuple[float | None, float | None]:
        """The share of the cycles that the kernel used in the claim, and the share that it used on this device. Both
        are None unless ``pair`` compares cycles.
        """
        if self.measured_row is None or self.pair is None or self.pair.a.unit != CYCLES_UNIT:
            return None, None
        return self.claim.cycles_used, self.measured_row.used_cycle_share

    @property
    def is_slower(self) -> bool:
        """Whether the kernel is certainly slower on this device than in the claim, and by more than the tolerance."""
        return self.pair is not None and self.claim.interval.is_known and self.pair.is_regression(self.tolerance)


def judge_claims(
    options: ReproduceOptions, rows: Sequence[Measurement], header: Mapping[str, Any] | None = None
) -> list[JudgedClaim]:
    """Judge each claim, in the order of ``options.claims``. ``rows``: the rows that the run has measured so far.
    ``header``: the header of the run's log; it says whether other work used the CPU.
    """
    is_busy = header is not None and was_cpu_device_busy(header)
    return [
        _judge_claim(
            options, claim, [row for row in rows if row.phase == CONFIRM_PHASE and row.key == claim.step], is_busy
        )
        for claim in options.claims
    ]


def _judge_claim(
    options: ReproduceOptions, claim: Claim, measurements: Sequence[Measurement], is_busy: bool
) -> JudgedClaim:
    here = replace(combine_measurements(measurements), was_cpu_device_busy=is_busy) if measurements else None
    judged = JudgedClaim(claim, options.tolerance, here)
    if here is None or here.rate is None:
        return judged
    assert here.error is not None, "a figure has an error"
    scatter = math.hypot(here.error.own, claim.interval.half_width / claim.rate / _NORMAL_95_HALF_WIDTH)
    there = replace(
        here,
        kernel=claim.step.kernel,
        rate=claim.rate,
        interval=claim.interval,
        error=claim.error or replace(here.error, own=scatter),
    )
    if claim.cycles_used and here.used_cycle_share and here.cycles_error:
        there, here = (
            each.convert_to_cycle_share() for each in (replace(there, used_cycle_share=claim.cycles_used), here)
        )
    return replace(
        judged,
        pair=RowPair(here.pairing_fields, there, here, row_count=max(options.chosen_from, len(options.claims))),
        clock_hz=summarize_conditions([row for row in measurements if row.ok]).clock_hz,
    )


def find_setup_differences(
    options: ReproduceOptions, judged: Iterable[JudgedClaim], header: Mapping[str, Any]
) -> list[Difference]:
    """Find the differences in device, software, settings and clock between the run that the claims come from and the
    run on this device.
    """
    clocks = [
        Difference(f"clock in {each.claim.step[0]}", f"{then / 1e6:.0f} MHz", f"{now / 1e6:.0f} MHz")
        for each in judged
        if (then := each.claim.clock_hz) and (now := each.clock_hz) and abs(now / then - 1) > _SAME_CLOCK_TOLERANCE
    ]
    recorded = dict(options.recorded)
    return [*(find_value_differences(recorded, _list_device_and_settings(header)) if recorded else []), *clocks]
