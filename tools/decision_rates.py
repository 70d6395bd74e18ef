"""How often does mamf compare call equal runs slower, and which loss of all rows does it find?

    python tools/decision_rates.py results                        # all tables: two minutes
    python tools/decision_rates.py results --comparisons 200      # fewer draws, rougher tables

The decisions are those of mamf compare, on three kinds of runs:

- real: every two equal runs below the folder (same card, same software, same rows), in both orders; by what compare
  pairs of them, and by all rows that both measured.
- drawn, burst: the shift of a run is drawn from those of real pairs, each row's own part from what real pairs of rows
  leave, in units of the error that compare gives them. No distribution is assumed to be normal.
- drawn, sustained: real pairs of rows are too few. Each visit falls into one of two states of the power controller
  1.1 % apart, how often into which is the row's own, with 0.1 % beside that; the shift of a run is normal, 0.12 %.

Runs of separate visits are drawn 1.5 times as far apart as runs of one.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from mamf.calibration import find_calibration
from mamf.errors import IncomparableError
from mamf.logs.compare import Comparison, compare, judge_rows, noted_differences, pair_rows
from mamf.logs.decision import SEPARATE, Design, decision_error
from mamf.logs.entries import Entry, entries, fields_of, mean_entries
from mamf.logs.legacy import read_legacy_or_none
from mamf.logs.plan_records import plan_record
from mamf.logs.run_log import RunLog, read_run_log
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.shapes import MatmulShape
from mamf.plans import MATMUL, SWEEP, Plan
from mamf.regime_names import BURST, SUSTAINED
from mamf.statistics import figure_error

TEMPLATE = "nvidia-h200/sweep-torch-mm-bfloat16-burst-20261121-143232.jsonl"
TOLERANCE = 0.01
LOSSES = (0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02)
# Of a shift, two rows tell little: pairs of runs with fewer rows are no calibration.
_FEWEST_ROWS = 10
_STATES, _BESIDE, _SHIFT = 0.011, 0.001, 0.0012
_APART = 1.5


def in_turns(runs: int) -> Design:
    return Design(f"{runs} + {runs} runs in turns", math.sqrt(2 / runs), 2 * runs - 2)


DESIGNS = (*(in_turns(runs) for runs in (1, 2, 3, 4)), SEPARATE)


# -- real pairs --------------------------------------------------------------------------------------------------------


def logs_below(folder: Path) -> dict[str, list[RunLog]]:
    """Logs below a folder by the card that they are of."""
    found: dict[str, list[RunLog]] = {}
    for path in sorted(folder.rglob("*.jsonl")):
        if read_legacy_or_none(path) is None:
            log = read_run_log(path)
            if card := log.header["device"].get("uuid_hash"):
                found.setdefault(card, []).append(log)
    return found


def all_rows(log: RunLog) -> RunLog:
    """A log as a sweep of every row that it measured: the first visit of each."""
    first: dict[object, object] = {}
    own = log.header["device"]["index"]
    for row in log.measurements:
        if row.ok and not row.is_reference and row.device in (None, own):
            key = frozenset(fields_of((row.regime, row.problem, row.shape, row.kernel)).items())
            first.setdefault(key, replace(row, phase="", round=0))
    rows = list(first.values())
    sweep = plan_record(Plan(SWEEP, MATMUL, (MatmulProblem(),), ("torch.mm",), (MatmulShape(1024, 1024, 1024),)))
    return replace(log, measurements=rows, header={**log.header, "plan": sweep})


def equal_pairs(cards: Iterable[Sequence[RunLog]]) -> Iterator[Comparison]:
    """Every two runs of a card, in both orders, that differ in nothing that a header says."""
    for logs in cards:
        for a, b in itertools.permutations(logs, 2):
            if not noted_differences(a.header, b.header):
                try:
                    comparison = compare(a, b)
                except IncomparableError:
                    continue
                if not comparison.dropped:
                    yield comparison


def interleaved(cards: Iterable[Sequence[RunLog]]) -> Iterator[Comparison]:
    """Every four equal runs of a card that followed one another, as two of each side in turns, both ways round."""
    for logs in cards:
        inorder = sorted(logs, key=lambda log: log.header["started"])
        for runs in zip(*(inorder[start:] for start in range(4)), strict=False):
            for a, b in (runs[::2], runs[1::2]), (runs[1::2], runs[::2]):
                if not any(noted_differences(runs[0].header, log.header) for log in runs):
                    with contextlib.suppress(IncomparableError):
                        yield compare(a, b)


def with_loss(comparison: Comparison, loss: float) -> Comparison:
    """The comparison as it would be if every row of B were slower by so much."""
    pairs = [
        replace(pair, b=replace(pair.b, tflops=pair.b.tflops * (1 - loss)))
        for pair in comparison.pairs
        if pair.b.tflops is not None
    ]
    return judge_rows(replace(comparison, pairs=tuple(pairs)), comparison.design)


class Scatter(NamedTuple):
    """What real pairs of runs differ by in burst: shifts of a run, and rows beside them in units of their error."""

    shifts: list[float]
    rows: list[float]


def scatter_of(pairs: Iterable[Comparison]) -> Scatter:
    shifts, rows = [], []
    for comparison in pairs:
        changes = [pair.change for pair in comparison.pairs if pair.fields["regime"] == BURST]
        if len(changes) >= _FEWEST_ROWS and comparison.design.label != SEPARATE.label:
            (together,) = (each for each in comparison.together if each.regime == BURST)
            shift = math.log(together.ratio)
            shifts.append(shift / math.sqrt(2))
            rows += [(change.logarithm - shift) / change.own for change in changes]
    return Scatter(shifts, rows)


# -- drawn runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Card:
    """Draws runs of rows like those of a template; a loss is of every row of B."""

    template: Sequence[Entry]
    header: dict[str, object]
    scatter: Scatter
    regime: str

    def comparison(self, chooser: random.Random, rows: int, design: Design, loss: float) -> Comparison:
        known = [self._row(number) for number in range(rows)]
        odds = [chooser.random() for _ in known]
        runs = design.spare // 2 + 1
        apart = _APART if design is SEPARATE else 1.0
        sides = [
            mean_entries([self._run(chooser, known, odds, apart, lost) for _ in range(runs)]) for lost in (0.0, loss)
        ]
        log = RunLog(Path("drawn"), self.header)
        return judge_rows(pair_rows(log, log, *sides), design)

    def _row(self, number: int) -> Entry:
        of = self.template[number % len(self.template)]
        fields = {"regime": self.regime, "shape": number}
        if self.regime == BURST or of.error is None:
            return replace(of, fields=fields)
        known = find_calibration("", SUSTAINED, MatmulProblem())
        error = figure_error([of.seconds], of.seconds, [0.0], known)
        return replace(of, fields=fields, error=decision_error(error, SUSTAINED, 1))

    def _run(
        self, chooser: random.Random, rows: Sequence[Entry], odds: Sequence[float], apart: float, loss: float
    ) -> list[Entry]:
        is_burst = self.regime == BURST
        shift = apart * (chooser.choice(self.scatter.shifts) if is_burst else chooser.gauss(0, _SHIFT))
        found = []
        for row, odd in zip(rows, odds, strict=True):
            assert row.error is not None and row.tflops is not None, "the template has figures"
            if is_burst:
                own = row.error.own * chooser.choice(self.scatter.rows)
            else:
                own = _STATES * (chooser.random() < odd) + chooser.gauss(0, _BESIDE)
            found.append(replace(row, tflops=row.tflops * (1 - loss) * math.exp(shift + own)))
        return found

    def exits(self, rows: int, design: Design, count: int, loss: float = 0.0) -> float:
        """The share of so many comparisons that end with exit code 3."""
        found = (self.comparison(random.Random(seed), rows, design, loss) for seed in range(count))
        return sum(each.is_slower(TOLERANCE) for each in found) / count


def cards(folder: Path, scatter: Scatter) -> list[Card]:
    log = read_run_log(folder / TEMPLATE)
    return [Card(entries(log), log.header, scatter, regime) for regime in (BURST, SUSTAINED)]


# -- tables ------------------------------------------------------------------------------------------------------------


def print_real(what: str, found: Sequence[Comparison]) -> None:
    wrong, rows = sum(each.is_slower(TOLERANCE) for each in found), sum(len(each.pairs) for each in found)
    print(f"real, {what}: {wrong} of {len(found)} comparisons of equal runs end with 3 ({rows} rows)")


def print_drawn(card: Card, count: int) -> None:
    print(f"\n| {card.regime}, no change: exit code 3 | 1 row | 79 rows | 1279 rows |\n|:--|--:|--:|--:|")
    for design in (in_turns(1), in_turns(3), SEPARATE):
        shares = [card.exits(rows, design, count if rows < 1000 else count // 10) for rows in (1, 79, 1279)]
        print(f"| {design.label} | {' | '.join(f'{100 * share:.2f} %' for share in shares)} |", flush=True)
    losses = " | ".join(f"{100 * loss:g} %" for loss in LOSSES)
    print(
        f"\n| {card.regime}, 79 rows, all slower by | {losses} | found with 95 % |\n|:--|{'--:|' * (len(LOSSES) + 1)}"
    )
    for design in DESIGNS:
        shares = [card.exits(79, design, count // 10, loss) for loss in LOSSES]
        (together,) = card.comparison(random.Random(1), 79, design, 0.0).together
        found = f"{100 * together.smallest_loss(TOLERANCE):.2f} %"
        print(f"| {design.label} | {' | '.join(f'{100 * share:.1f} %' for share in shares)} | {found} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--comparisons", type=int, default=2000)
    options = parser.parse_args()
    logs = logs_below(options.folder)
    print_real("as compare pairs them", list(equal_pairs(logs.values())))
    whole = list(equal_pairs([all_rows(log) for log in each] for each in logs.values()))
    print_real("all rows of both", whole)
    fours = list(interleaved([all_rows(log) for log in each] for each in logs.values()))
    print_real("two runs per side in turns", fours)
    many = [each for each in fours if len(each.pairs) >= _FEWEST_ROWS]
    lost = sum(with_loss(each, 0.005).is_slower(TOLERANCE) for each in many)
    print(
        f"real, the same with {_FEWEST_ROWS} rows or more, all of B made 0.5 % slower: {lost} of {len(many)} end with 3"
    )
    scatter = scatter_of(whole)
    own, shift = sorted(map(abs, scatter.rows)), math.sqrt(statistics.fmean(shift**2 for shift in scatter.shifts))
    within = ", ".join(
        f"{100 * share:g} % within {own[int(share * len(own))]:.2f}" for share in (0.68, 0.95, 0.99, 0.999)
    )
    print(f"shift of a run in burst: standard deviation {100 * shift:.3f} % ({len(scatter.shifts) // 2} pairs of runs)")
    print(f"rows beside it, in units of their error: {within} ({len(own) // 2} pairs of rows)")
    for card in cards(options.folder, scatter):
        print_drawn(card, options.comparisons)


if __name__ == "__main__":
    main()
