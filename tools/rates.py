"""Compute how often decisions of mamf are wrong: run mamf's own decision code on real, random or simulated rows.

    python tools/rates.py compare results    # mamf compare: 2 minutes; --count 200 is faster, but less exact
    python tools/rates.py guard              # mamf guard: several minutes; --count 1000 is faster, but less exact
    python tools/rates.py node               # mamf node: 4 minutes; prints the tables of docs/evidence/node.md
    python tools/rates.py verify             # mamf verify: 20 minutes; with --rate 1e-4 --budget 3s, 20 s

``compare`` compares three kinds of runs:

- Real runs: every two equal runs in the folder (same card, software and rows), in both orders. Each pair is compared
  twice: with the rows that mamf compare would pair, and with all rows that both runs measured. Four successive runs
  are also compared as two runs per side that alternate.
- Random runs in burst: the shift that all rows of a run share is drawn from the shifts of real pairs of runs. The
  separate error of each row is drawn from the errors of real pairs of rows, in units of the error that mamf compare
  expects. No distribution is assumed to be normal.
- Random runs in the sustained regime, for which there are too few real pairs. In each run, a row is in one of two
  states of the power controller, which differ by 1.1 %. Each row has a different probability of each state. A normal
  error with a standard deviation of 0.1 % is added. The shift of a run is normal, with a standard deviation of 0.12 %.

If random runs have a long pause between them, their shifts are 1.5 times as large.

``guard`` simulates guards of 20 rows with the noise of an H200. Each guard has a new baseline. In half of the guards,
one row is 3 % slower than in the baseline. There are three kinds of cards:

- burst: 0.1 % (standard deviation) from visit to visit, and 0.1 % from run to run.
- sustained: the same, and in each visit a row is in one of the two states of the power controller.
- stuck: like sustained, but a row stays in its state for a whole run, so that more visits do not help. This is the
  worst case.

On all of them, the speed of the card drifts by up to 0.3 % during a run, up or down.

``node`` draws the rates of the cards of a node. Burst and sustained have the standard deviation in the heading of the
column, and the correlation of 0.83 that 18 H200 have. The standard deviation of memory and of copies to the next card
is 0.3 %, that of copies to and from the host 5 %. The slow card is one of these cards, so it may have been a fast one
before it was slowed down. It is compared with the median of the others, which does not include it. A baseline is
another run of the same cards: rates differ from run to run by 0.3 % in burst and by 0.35 % in the sustained regime.

``verify`` simulates cards that flip a bit in a small share of their launches. It compares the number of cards in which
mamf verify finds a wrong result with the number that is expected for the launches that it checked. Each card has a
different seed and is verified in virtual time, with one kernel, until the budget ends.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from mamf.calibration import look_up_repeatability
from mamf.cli.terminal import parse_duration
from mamf.engine.regimes import Regime
from mamf.engine.runner import RunSetup, Step
from mamf.engine.strategies.studies import GuardStrategy, VerifyStrategy, make_verify_plan
from mamf.errors import IncomparableError
from mamf.logs.compare import (
    Comparison,
    RowPair,
    add_run_order_and_pooled_rows,
    compare_logs,
    find_setting_differences,
    pair_rows,
)
from mamf.logs.compared_rows import (
    SEPARATE_RUNS,
    ComparedRow,
    RunOrder,
    average_compared_rows,
    combine_measurements,
    compute_error_between_runs,
    group_by_key,
    list_compared_rows,
    make_pairing_fields,
)
from mamf.logs.judging import DEFAULT_GUARD_TOLERANCE, DEFAULT_MAX_ROUNDS, judge_pair
from mamf.logs.legacy import read_legacy_log_or_none
from mamf.logs.recording import make_plan_record
from mamf.logs.run_log import RunLog, read_run_log
from mamf.measurement import Measurement
from mamf.node.verdict import (
    COPY,
    CRITICAL,
    READ,
    TO_DEVICE,
    TO_HOST,
    TO_PEER,
    WARN,
    Baseline,
    NodeDevice,
    NodeVerdict,
    judge_devices,
)
from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.plans import BURST, GUARD, MATMUL, RANKING_STATISTIC_BY_REGIME, SUSTAINED, SWEEP, GuardOptions, Plan
from mamf.report.verification import count_verified_items
from mamf.statistics import Interval, SampleSummary, compute_run_error
from mamf.testing import Physics, SimulatedAttention, SimulatedBackend
from mamf.testing.simulated_kernels import SimulatedMatmul

#: The relative difference in speed between the two states of a power controller.
_STATES = 0.011


def percents(shares: Iterable[float]) -> list[str]:
    return [f"{100 * share:.3g} %" for share in shares]


def print_table(title: str, columns: Sequence[str], rows: Mapping[str, Iterable[str]]) -> None:
    """Print a table in markdown."""
    print(f"\n| {title} | {' | '.join(columns)} |\n|:--|{'--:|' * len(columns)}")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


# -- compare: real runs ------------------------------------------------------------------------------------------------

TEMPLATE = "nvidia-h200/sweep-torch-mm-bfloat16-burst-20261121-143232.jsonl"
TOLERANCE = 0.01
LOSSES = (0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02)
# Pairs of runs with fewer rows than this are not used to estimate the shift of a run, because a few rows say little
# about it.
_FEWEST_ROWS = 10
#: _BESIDE, _SHIFT: the standard deviations of a row within its state and of the shift of a run, in the sustained
#: regime. _APART: the factor by which shifts are larger if there is a long pause between the runs.
_BESIDE, _SHIFT, _APART = 0.001, 0.0012, 1.5


def in_turns(runs: int) -> RunOrder:
    return RunOrder(f"{runs} + {runs} alternating runs", math.sqrt(2 / runs), 2 * runs - 2)


def logs_below(paths: Iterable[Path]) -> Iterator[RunLog]:
    """Yield the logs among these files and in these folders, except logs that were imported from mamf-finder."""
    for path in paths:
        for file in sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]:
            if read_legacy_log_or_none(file) is None:
                yield read_run_log(file)


def logs_by_card(folder: Path) -> dict[str, list[RunLog]]:
    """Read the logs in a folder, and return them by the card that they were measured on."""
    found: dict[str, list[RunLog]] = {}
    for log in logs_below([folder]):
        if card := log.header["device"].get("uuid_hash"):
            found.setdefault(card, []).append(log)
    return found


def all_rows(log: RunLog) -> RunLog:
    """Return a copy of a log in the form of a sweep, which contains the first visit of every row."""
    first: dict[object, object] = {}
    own = log.header["device"]["index"]
    for row in log.measurements:
        if row.ok and not row.is_reference and row.device_index in (None, own):
            key = frozenset(make_pairing_fields(row.key).items())
            first.setdefault(key, replace(row, phase="", round_number=0))
    sweep = make_plan_record(Plan(SWEEP, MATMUL, (MatmulProblem(),), ("torch.mm",), (MatmulShape(1024, 1024, 1024),)))
    return replace(log, measurements=list(first.values()), header={**log.header, "plan": sweep})


def equal_pairs(cards: Iterable[Sequence[RunLog]]) -> Iterator[Comparison]:
    """Compare every two runs of a card that have the same settings and software, in both orders."""
    for a, b in itertools.chain.from_iterable(itertools.permutations(logs, 2) for logs in cards):
        if not find_setting_differences(a.header, b.header):
            with contextlib.suppress(IncomparableError):
                if not (comparison := compare_logs(a, b)).ignored_differences:
                    yield comparison


def interleaved(cards: Iterable[Sequence[RunLog]]) -> Iterator[Comparison]:
    """Compare every four successive equal runs of a card: the first and third with the second and fourth, in both
    orders.
    """
    for logs in cards:
        in_order = sorted(logs, key=lambda log: log.header["started"])
        for runs in zip(*(in_order[start:] for start in range(4)), strict=False):
            for a, b in (runs[::2], runs[1::2]), (runs[1::2], runs[::2]):
                if not any(find_setting_differences(runs[0].header, log.header) for log in runs):
                    with contextlib.suppress(IncomparableError):
                        yield compare_logs(a, b)


def with_loss(comparison: Comparison, loss: float) -> Comparison:
    """Return a comparison in which every row of B is slower by the share ``loss``."""
    measured = [pair for pair in comparison.pairs if pair.b.rate is not None]
    pairs = tuple(replace(pair, b=replace(pair.b, rate=pair.b.rate * (1 - loss))) for pair in measured)
    return add_run_order_and_pooled_rows(replace(comparison, pairs=pairs), comparison.run_order)


class Scatter(NamedTuple):
    """The differences between real pairs of equal runs in burst.

    - ``shifts``: the shift of a single run, estimated from each pair of runs.
    - ``rows``: how much the change of each row differs from the shift between its two runs, in units of its expected
      standard deviation.
    """

    shifts: list[float]
    rows: list[float]


def scatter_of(pairs: Iterable[Comparison]) -> Scatter:
    shifts, rows = [], []
    for comparison in pairs:
        changes = [pair.change for pair in comparison.pairs if pair.pairing_fields["regime"] == BURST]
        if len(changes) >= _FEWEST_ROWS and comparison.run_order.description != SEPARATE_RUNS.description:
            (together,) = (each for each in comparison.pooled_rows if each.regime == BURST)
            shift = math.log(together.ratio)
            shifts.append(shift / math.sqrt(2))
            rows += [(change.log_ratio - shift) / change.row_deviation for change in changes]
    return Scatter(shifts, rows)


# -- compare: drawn runs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DrawnRuns:
    """A generator of random comparisons, whose rows are like those of ``template``, the rows of a real log."""

    template: Sequence[ComparedRow]
    header: dict[str, object]
    scatter: Scatter
    regime: str

    def comparison(self, chooser: random.Random, rows: int, run_order: RunOrder, loss: float) -> Comparison:
        known = [self._row(number) for number in range(rows)]
        odds = [chooser.random() for _ in known]
        runs = range(run_order.extra_run_count // 2 + 1)
        apart = _APART if run_order is SEPARATE_RUNS else 1.0
        sides = [
            average_compared_rows([self._run(chooser, known, odds, apart, lost) for _ in runs]) for lost in (0.0, loss)
        ]
        log = RunLog(Path("drawn"), self.header)
        return add_run_order_and_pooled_rows(pair_rows(log, log, *sides), run_order)

    def _row(self, number: int) -> ComparedRow:
        of = self.template[number % len(self.template)]
        fields = {"regime": self.regime, "shape": number}
        if self.regime == BURST or of.error is None:
            return replace(of, pairing_fields=fields)
        known = look_up_repeatability("", SUSTAINED, MatmulProblem())
        error = compute_run_error([of.seconds_per_launch], of.seconds_per_launch, [0.0], known)
        return replace(of, pairing_fields=fields, error=compute_error_between_runs(error, SUSTAINED, 1))

    def _run(
        self, chooser: random.Random, rows: Sequence[ComparedRow], odds: Sequence[float], apart: float, loss: float
    ) -> list[ComparedRow]:
        is_burst = self.regime == BURST
        shift = apart * (chooser.choice(self.scatter.shifts) if is_burst else chooser.gauss(0, _SHIFT))
        found = []
        for row, odd in zip(rows, odds, strict=True):
            if is_burst:
                own = row.error.own * chooser.choice(self.scatter.rows)
            else:
                own = _STATES * (chooser.random() < odd) + chooser.gauss(0, _BESIDE)
            found.append(replace(row, rate=row.rate * (1 - loss) * math.exp(shift + own)))
        return found

    def exits(self, rows: int, run_order: RunOrder, count: int, loss: float = 0.0) -> float:
        """Return the share of ``count`` comparisons that end with exit code 3. ``loss``: the share by which all rows of
        B are slower.
        """
        found = (self.comparison(random.Random(seed), rows, run_order, loss) for seed in range(count))
        return sum(each.is_b_slower(TOLERANCE) for each in found) / count


def drawn_runs(folder: Path, scatter: Scatter) -> list[DrawnRuns]:
    log = read_run_log(folder / TEMPLATE)
    return [DrawnRuns(list_compared_rows(log), log.header, scatter, regime) for regime in (BURST, SUSTAINED)]


def print_compare(folder: Path, count: int) -> None:
    logs = logs_by_card(folder)
    every = [[all_rows(log) for log in each] for each in logs.values()]
    whole, fours = list(equal_pairs(every)), list(interleaved(every))
    kinds = {"as compare pairs them": list(equal_pairs(logs.values())), "all rows of both": whole}
    for what, found in (kinds | {"two runs per side in turns": fours}).items():
        wrong, rows = sum(each.is_b_slower(TOLERANCE) for each in found), sum(len(each.pairs) for each in found)
        print(f"real, {what}: {wrong} of {len(found)} comparisons of equal runs end with 3 ({rows} rows)")
    many = [each for each in fours if len(each.pairs) >= _FEWEST_ROWS]
    lost = sum(with_loss(each, 0.005).is_b_slower(TOLERANCE) for each in many)
    print(f"the same with {_FEWEST_ROWS} rows or more, all of B 0.5 % slower: {lost} of {len(many)} end with 3")
    scatter = scatter_of(whole)
    shift = math.sqrt(statistics.fmean(shift**2 for shift in scatter.shifts))
    print(f"shift of a run in burst: standard deviation {100 * shift:.3f} % ({len(scatter.shifts) // 2} pairs of runs)")
    print(f"rows beside it: {len(scatter.rows) // 2} pairs")
    for runs in drawn_runs(folder, scatter):
        sizes = {1: count, 79: count, 1279: count // 10}
        designs = (in_turns(1), in_turns(3), SEPARATE_RUNS)
        rows = {each.description: percents(runs.exits(rows, each, n) for rows, n in sizes.items()) for each in designs}
        print_table(f"{runs.regime}, no change: exit code 3", [f"{rows} rows" for rows in sizes], rows)
        rows = {}
        for run_order in (*map(in_turns, (1, 2, 3, 4)), SEPARATE_RUNS):
            (together,) = runs.comparison(random.Random(1), 79, run_order, 0.0).pooled_rows
            shares = [runs.exits(79, run_order, count // 10, loss) for loss in LOSSES]
            rows[run_order.description] = percents([*shares, together.compute_smallest_detectable_loss(TOLERANCE)])
        print_table(f"{runs.regime}, 79 rows, all slower by", [*percents(LOSSES), "found with 95 %"], rows)


# -- guard -------------------------------------------------------------------------------------------------------------

ROWS, SLOWER = 20, 0.03
_WITHIN, _DRIFT = 0.001, 0.003


@dataclass(frozen=True)
class VisitScatter:
    """How much the times of launches vary, as shares of the time.

    - ``visit``, ``run``: the standard deviations from visit to visit and from run to run.
    - ``states``: the difference between the two states of the power controller; 0 if there is only one.
    - ``is_stuck``: whether a row stays in one state for a whole run.
    """

    regime: str
    visit: float = 0.001
    run: float = 0.001
    states: float = 0.0
    is_stuck: bool = False


CARDS = {
    "burst": VisitScatter(BURST),
    "sustained": VisitScatter(SUSTAINED, states=_STATES),
    "stuck": VisitScatter(SUSTAINED, states=_STATES, is_stuck=True),
}


class Seen(NamedTuple):
    """The result of a simulated guard: the rows that failed, the number of undecided rows, and the number of visits."""

    regressions: set[AttentionShape]
    undecided: int
    visits: int


class _Run:
    """A stand-in for the runner of a guard's strategy, which the strategy only asks to prepare a regime."""

    def prepare_regime(self, regime: Regime) -> Regime:
        return regime


class Guards:
    """Simulated guards of one card. All rows are alike, except for their shapes."""

    def __init__(
        self, card: VisitScatter, rounds: int = DEFAULT_MAX_ROUNDS, tolerance: float = DEFAULT_GUARD_TOLERANCE
    ) -> None:
        self.card, self.tolerance, self.backend = card, tolerance, SimulatedBackend()
        self.shapes = tuple(AttentionShape(1, 16, 16, n, n, 128, 128) for n in range(512, 512 * (ROWS + 1), 512))
        problems, regimes, options = (AttentionProblem(),), (card.regime,), GuardOptions(rounds)
        self.plan = Plan(GUARD, "attention", problems, ("drawn",), self.shapes, regimes, options=options)

    def guard(self, seed: int, slower: float = 0.0) -> Seen:
        """Simulate a baseline and a guard in which the first row is slower by the share ``slower``."""
        chooser = random.Random(seed)
        # The probability that a visit is in the slow state: different for each row, but the same in both runs.
        odds = {shape: chooser.random() for shape in self.shapes}
        before = self._entries(self._visits(chooser, odds, None, {}))
        visits = list(self._visits(chooser, odds, before, {self.shapes[0]: slower}))
        now = self._entries(iter(visits))
        pairs = [RowPair(entry.pairing_fields, before[key], entry) for key, entry in now.items()]
        outcomes = {pair.b.shape: judge_pair(pair, self.tolerance) for pair in pairs}
        failing = {shape for shape in self.shapes if outcomes[str(shape)] == "regression"}
        return Seen(failing, list(outcomes.values()).count("undecided"), len(visits))

    def _entries(self, rows: Iterator[Measurement]) -> dict[object, ComparedRow]:
        found = (combine_measurements(visits) for visits in group_by_key(rows).values())
        return {entry.pairing_key: entry for entry in found}

    def _visits(
        self,
        chooser: random.Random,
        odds: dict[AttentionShape, float],
        baseline: dict[object, ComparedRow] | None,
        slower: dict[AttentionShape, float],
    ) -> Iterator[Measurement]:
        """Draw a result for each visit that the guard's strategy requests."""
        card, setup = self.card, RunSetup(self.plan, self.backend, [("drawn", SimulatedAttention())])
        strategy = GuardStrategy(setup, baseline, self.tolerance)
        strategy.runner = _Run()  # type: ignore[assignment]
        level, drift = chooser.gauss(0, card.run), chooser.uniform(-_DRIFT, _DRIFT)
        states = {shape: chooser.random() < odds[shape] for shape in self.shapes}
        steps, row = strategy.yield_steps(), None
        with contextlib.suppress(StopIteration):
            for number in itertools.count():
                if not isinstance(asked := steps.send(row), Step):
                    return
                shape = asked.shape
                is_slow = states[shape] if card.is_stuck else chooser.random() < odds[shape]
                share = level + drift * min(1.0, number / ROWS) + is_slow * card.states
                share += chooser.gauss(0, card.visit)
                yield (row := _visit(asked, card.regime, 1e-3 * (1 + share) / (1 - slower.get(shape, 0.0))))


def _visit(asked: Step, regime: str, seconds: float) -> Measurement:
    interval = Interval(seconds * (1 - _WITHIN), seconds * (1 + _WITHIN), 0.95)
    fields = (asked.shape, SimulatedAttention.name, asked.problem, regime, RANKING_STATISTIC_BY_REGIME[regime], "ok")
    summary, known = SampleSummary(20, *[seconds] * 4, interval), look_up_repeatability("", regime, MatmulProblem())
    where = {"phase": asked.phase, "round_number": asked.round_number}
    return Measurement(*fields, summary=summary, launch_count=20, repeatability=known, **where)


def false_alarms(name: str, count: int) -> tuple[int, int, float]:
    """Simulate guards without a change. Return how many of them fail, how many have undecided rows, and the mean number
    of visits per row.
    """
    guards = Guards(CARDS[name])
    seen = [guards.guard(seed) for seed in range(count)]
    failed, undecided = sum(bool(each.regressions) for each in seen), sum(bool(each.undecided) for each in seen)
    return failed, undecided, sum(each.visits for each in seen) / (count * ROWS)


def caught(name: str, count: int) -> int:
    """Simulate ``count`` guards in which one row became slower. Return in how many of them this row fails."""
    guards = Guards(CARDS[name])
    return sum(guards.shapes[0] in guards.guard(seed, SLOWER).regressions for seed in range(count))


def print_guard(count: int) -> None:
    for name in CARDS:
        alarms, undecided, visits = false_alarms(name, count)
        print(f"{name}: {alarms} of {count} guards of {ROWS} unchanged rows failed, {undecided} were undecided")
        share = 100 * caught(name, count) / count
        print(f"{visits:.2f} visits per row; a row {100 * SLOWER:g} % slower was caught in {share:.2f} %", flush=True)


# -- node --------------------------------------------------------------------------------------------------------------

NODE_CARDS = (2, 4, 8, 16)
SPREADS = (0.005, 0.012, 0.015, 0.02, 0.025, 0.03, 0.04)
_CEILINGS = (BURST, SUSTAINED)
_USUAL_SPREAD, _CORRELATION = 0.012, 0.83
_TYPICAL = {BURST: 855.0, SUSTAINED: 706.0, COPY: 4.22, READ: 4.24, TO_PEER: 0.388, TO_DEVICE: 0.055, TO_HOST: 0.055}
_OTHER_SPREADS = {COPY: 0.003, READ: 0.003, TO_PEER: 0.003, TO_DEVICE: 0.05, TO_HOST: 0.05}
_REPEATS = {BURST: 0.003, SUSTAINED: 0.0035}


def draw_node(chance: random.Random, cards: int, spread: float) -> list[NodeDevice]:
    """Draw the rates of the healthy cards of a node."""
    return [NodeDevice(index, 0, "drawn", f"uuid{index}", figures=_figures(chance, spread)) for index in range(cards)]


def _figures(chance: random.Random, spread: float) -> dict[str, float]:
    own, other = chance.gauss(0, 1), chance.gauss(0, 1)
    factors = {figure: chance.gauss(1, each) for figure, each in _OTHER_SPREADS.items()}
    factors[BURST] = 1 + spread * own
    factors[SUSTAINED] = 1 + spread * (_CORRELATION * own + math.sqrt(1 - _CORRELATION**2) * other)
    return {figure: value * factors[figure] for figure, value in _TYPICAL.items()}


def slow_down(devices: Sequence[NodeDevice], figures: Iterable[str], share: float) -> list[NodeDevice]:
    """Return the same cards, but with the given figures of the first card lower by ``share``."""
    changed = {figure: devices[0].figures[figure] * (1 - share) for figure in figures}
    return [replace(devices[0], figures={**devices[0].figures, **changed}), *devices[1:]]


def measure_again(chance: random.Random, devices: Sequence[NodeDevice]) -> list[NodeDevice]:
    """Draw another run of the same cards."""

    def repeat(figures: Mapping[str, float]) -> dict[str, float]:
        return {name: rate * chance.gauss(1, _REPEATS.get(name, 0.003)) for name, rate in figures.items()}

    return [replace(device, figures=repeat(device.figures)) for device in devices]


def judge_nodes(
    nodes: int, cards: int, spread: float, slower: float = 0.0, figures: Sequence[str] = _CEILINGS
) -> list[NodeVerdict]:
    """Draw and judge nodes. Each call with the same ``cards`` and ``spread`` draws the same nodes."""
    chance = random.Random(cards)
    return [judge_devices(slow_down(draw_node(chance, cards, spread), figures, slower)) for _ in range(nodes)]


def judge_by_baseline(nodes: int, cards: int, slower: float) -> list[NodeVerdict]:
    """Judge nodes by a baseline, which is an earlier run of the same cards. One card has become slower since then."""
    chance, verdicts = random.Random(cards), []
    for _ in range(nodes):
        devices = draw_node(chance, cards, _USUAL_SPREAD)
        baseline = Baseline("a log", measure_again(chance, devices))
        verdicts.append(judge_devices(slow_down(measure_again(chance, devices), _CEILINGS, slower), baseline))
    return verdicts


def found_share(verdicts: Sequence[NodeVerdict]) -> float:
    """Return the share of nodes with a finding about the slow card, which is device 0."""
    return sum(any(finding.label == "device 0" for finding in each.findings) for each in verdicts) / len(verdicts)


def print_node(nodes: int) -> None:
    columns = percents(SPREADS)
    healthy = {f"{cards} cards": [judge_nodes(nodes, cards, spread) for spread in SPREADS] for cards in NODE_CARDS}
    for title, levels in (("false alarms by spread", (WARN, CRITICAL)), ("of these CRITICAL", (CRITICAL,))):
        rows = {}
        for name, judged in healthy.items():
            rows[name] = percents(sum(each.level in levels for each in verdicts) / nodes for verdicts in judged)
        print_table(title, columns, rows)
    rows = {}
    for slower, cards in itertools.product((0.06, 0.1, 0.2), NODE_CARDS):
        shares = (found_share(judge_nodes(nodes, cards, spread, slower)) for spread in SPREADS)
        rows[f"{cards} cards, {slower:.0%} slow"] = percents(shares)
    print_table("a slow card is found, by spread", columns, rows)
    memory, changed, losses = {}, {}, (0.0, 0.01, 0.02, 0.03, 0.05)
    for cards in NODE_CARDS:
        judged_by_loss = (judge_nodes(nodes, cards, _USUAL_SPREAD, loss, (COPY, READ)) for loss in losses[1:])
        memory[f"{cards} cards"] = percents(map(found_share, judged_by_loss))
    print_table("slow memory is found, by how much slower", percents(losses[1:]), memory)
    for cards in (1, *NODE_CARDS):
        changed[f"{cards} cards"] = percents(found_share(judge_by_baseline(nodes, cards, loss)) for loss in losses)
    print_table("found against a baseline of the same cards", percents(losses), changed)


# -- verify ------------------------------------------------------------------------------------------------------------


def print_verify(count: int, rate: float, first_seed: int, budget: float) -> int:
    found = []
    for seed in range(first_seed, first_seed + count):
        card, kernel = SimulatedBackend(physics=Physics(bit_flip_probability=rate), seed=seed), SimulatedMatmul()
        plan = make_verify_plan(card, {kernel.name: kernel}, budget, ["bfloat16"], seed=1000 * seed)
        found.append(
            count_verified_items(list(VerifyStrategy(RunSetup(plan, card, [(kernel.name, kernel)])).yield_results()))
        )
    stated = [1 - (1 - rate) ** each["launches"] for each in found]
    expected, caught_cards = math.fsum(stated), sum(each["wrong"] > 0 for each in found)
    error = math.sqrt(math.fsum(each * (1 - each) for each in stated))
    launches = sum(each["launches"] for each in found) / count
    print(f"{count} cards, one wrong launch in {1 / rate:.0f}, {launches:.0f} launches checked on each")
    print(f"found: {caught_cards}; stated: {expected:.1f} +- {error:.1f}")
    return 0 if abs(caught_cards - expected) <= 3 * error else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    parsers = {}
    for name, usual in {"compare": 2000, "guard": 10_000, "node": 4000, "verify": 40}.items():
        parsers[name] = commands.add_parser(name)
        parsers[name].add_argument("--count", type=int, default=usual, help=f"number of simulations (default: {usual})")
    parsers["compare"].add_argument("folder", type=Path)
    parsers["verify"].add_argument("--rate", type=float, default=1e-6, help="share of wrong launches (default: 1e-6)")
    parsers["verify"].add_argument("--seed", type=int, default=0, help="seed of the first card (default: 0)")
    parsers["verify"].add_argument(
        "--budget", type=parse_duration, default=280.0, help="virtual time for each card (default: 280s)"
    )
    options = parser.parse_args()
    if options.command == "verify":
        return print_verify(options.count, options.rate, options.seed, options.budget)
    if options.command == "compare":
        print_compare(options.folder, options.count)
    elif options.command == "guard":
        print_guard(options.count)
    else:
        print_node(options.count)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
