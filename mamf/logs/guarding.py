"""Whether kernels got slower than their baseline: which rows are doubtful, and the verdict on each. Pure.

A first visit never fails a guard, it only raises a doubt. Doubtful rows are visited again, interleaved, and these fresh
visits alone decide: the slowest of many first visits is slow by chance too (the winner's curse). They go on until the
interval of their ratio to the baseline lies on one side of the tolerance, or the rounds end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from mamf.ceilings.ceiling import CONFIRM, FEWEST_ROUNDS
from mamf.logs.compare import LEAST_COVERAGE, Comparison, Pair, pair_rows
from mamf.logs.entries import Entry, entries, visited_entry
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement

DEFAULT_TOLERANCE = 0.02
DEFAULT_ROUNDS = 9
# A first visit is doubted from this share of the tolerance on: a visit may be a percent faster than its kernel is.
_DOUBT = 0.5
# A failure may be transient: it is tried once more.
_FAILURES = 2

#: failed (it has no figure any more) and regression fail a guard. undecided: the row scatters too much for the
#: tolerance, or no fresh visits confirmed a suspicion. new has no baseline. The worst first.
Outcome = Literal["failed", "regression", "undecided", "new", "ok"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


def is_in_doubt(baseline: Entry, visits: Sequence[Measurement], tolerance: float) -> bool:
    """Whether a row with these visits needs another, given its baseline."""
    now = visited_entry(visits)
    before = baseline.as_on(now)
    if before.tflops is None or any(row.status == "wrong_result" for row in visits):
        return False
    if not visits[-1].ok:
        return sum(not row.ok for row in visits) < _FAILURES
    seen = Pair(before.fields, before, now)
    if not any(row.phase == CONFIRM for row in visits):
        return seen.ratio < 1 - _DOUBT * tolerance or is_too_wide(seen, tolerance)
    return seen.b.rounds < FEWEST_ROUNDS or seen.interval.low <= 1 - tolerance <= seen.interval.high


@dataclass(frozen=True)
class Judged:
    """A guard's verdict on a row. ``pair``: None if there is nothing to compare it with."""

    entry: Entry
    outcome: Outcome
    pair: Pair | None = None


@dataclass(frozen=True)
class Guarded:
    """A guard's log compared with its baseline. ``rows``: worst first. ``unfinished``: why it ended early, if so."""

    comparison: Comparison
    rows: tuple[Judged, ...]
    tolerance: float
    unfinished: str

    def counts(self) -> dict[Outcome, int]:
        """Rows by outcome, every outcome named."""
        found = [row.outcome for row in self.rows]
        return {outcome: found.count(outcome) for outcome in OUTCOMES}

    @property
    def is_failed(self) -> bool:
        found = self.counts()
        return bool(found["regression"] + found["failed"])

    @property
    def is_finished(self) -> bool:
        return not self.unfinished and not self.counts()["undecided"] and any(row.pair for row in self.rows)


def judge_guard(baseline: RunLog, log: RunLog, tolerance: float) -> Guarded:
    """Compare a guard's log with its baseline."""
    comparison = pair_rows(baseline, log, entries(baseline), entries(log))
    found = [
        *(Judged(pair.b, outcome_of(pair, tolerance), pair) for pair in comparison.pairs),
        *(Judged(now, "failed") for _, now in comparison.only_a if now is not None),
        *(Judged(now, "new") for now, _ in comparison.only_b),
    ]
    worst_first = sorted(found, key=lambda row: OUTCOMES.index(row.outcome))
    ended = "" if log.tier == "complete" else (log.summary or {}).get("reason") or "it was killed"
    return Guarded(comparison, tuple(worst_first), tolerance, ended)


def outcome_of(pair: Pair, tolerance: float) -> Outcome:
    """The outcome of a pair, from its fresh visits or else its first visit.

    A regression is slower at 95 % confidence and by more than the tolerance.
    """
    if is_too_wide(pair, tolerance):
        return "undecided"
    if pair.interval.high >= 1 or pair.ratio >= 1 - tolerance:
        return "ok"
    return "regression" if pair.b.rounds >= FEWEST_ROUNDS else "undecided"


def is_too_wide(pair: Pair, tolerance: float) -> bool:
    """Whether a row may be slower by more than the tolerance only because its interval is wider than that."""
    interval = pair.interval
    is_open = interval.low < 1 - tolerance <= interval.high
    return (is_open and pair.ratio - interval.low > tolerance * pair.ratio) or interval.coverage < LEAST_COVERAGE


def too_wide_for_a_baseline(log: RunLog, tolerance: float) -> list[tuple[float, Entry]]:
    """Rows whose own interval is wider than the tolerance, by its half width as a share; the widest first."""
    known = [(each.interval.half_width / each.tflops, each) for each in entries(log) if each.tflops and each.interval]
    return sorted((each for each in known if each[0] > tolerance), key=lambda each: -each[0])
