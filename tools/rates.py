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
_STATE_DIFFERENCE = 0.011


def format_percents(shares: Iterable[float]) -> list[str]:
    """Return shares as texts in percent, with three digits."""
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
_MIN_ROWS = 10
#: _ROW_DEVIATION, _SHIFT_DEVIATION: the standard deviations of a row within its state and of the shift of a run, in
#: the sustained regime. _PAUSE_FACTOR: how many times larger shifts are if there is a long pause between the runs.
_ROW_DEVIATION, _SHIFT_DEVIATION, _PAUSE_FACTOR = 0.001, 0.0012, 1.5


def make_alternating_order(runs: int) -> RunOrder:
    """Return the order in which ``runs`` runs of each side alternate."""
    return RunOrder(f"{runs} + {runs} alternating runs", math.sqrt(2 / runs), 2 * runs - 2)


def read_logs(paths: Iterable[Path]) -> Iterator[RunLog]:
    """Yield the logs among these files and in these folders, except logs that were imported from mamf-finder."""
    for path in paths:
        for file in sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]:
            if read_legacy_log_or_none(file) is None:
                yield read_run_log(file)


def read_logs_by_card(folder: Path) -> dict[str, list[RunLog]]:
    """Read the logs in a folder, and return them by the card that they were measured on."""
    logs_by_card: dict[str, list[RunLog]] = {}
    for log in read_logs([folder]):
        if card := log.header["device"].get("uuid_hash"):
            logs_by_card.setdefault(card, []).append(log)
    return logs_by_card


def convert_to_sweep(log: RunLog) -> RunLog:
    """Return a copy of a log in the form of a sweep, which contains the first visit of every row."""
    first_visits: dict[object, object] = {}
    device_index = log.header["device"]["index"]
    for row in log.measurements:
        if row.ok and not row.is_reference and row.device_index in (None, device_index):
            key = frozenset(make_pairing_fields(row.key).items())
            first_visits.setdefault(key, replace(row, phase="", round_number=0))
    sweep = make_plan_record(Plan(SWEEP, MATMUL, (MatmulProblem(),), ("torch.mm",), (MatmulShape(1024, 1024, 1024),)))
    return replace(log, measurements=list(first_visits.values()), header={**log.header, "plan": sweep})


def compare_equal_runs(cards: Iterable[Sequence[RunLog]]) -> Iterator[Comparison]:
    """Compare every two runs of a card that have the same settings and software, in both orders."""
    for a, b in itertools.chain.from_iterable(itertools.permutations(logs, 2) for logs in cards):
        if not find_setting_differences(a.header, b.header):
            with contextlib.suppress(IncomparableError):
                if not (comparison := compare_logs(a, b)).ignored_differences:
                    yield comparison


def compare_alternating_runs(cards: Iterable[Sequence[RunLog]]) -> Iterator[Comparison]:
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


def slow_down_side_b(comparison: Comparison, loss: float) -> Comparison:
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


def compute_scatter(pairs: Iterable[Comparison]) -> Scatter:
    """Compute the scatter of real comparisons. Leave out comparisons with few rows or with a pause between the runs."""
    shifts, rows = [], []
    for comparison in pairs:
        changes = [pair.change for pair in comparison.pairs if pair.pairing_fields["regime"] == BURST]
        if len(changes) >= _MIN_ROWS and comparison.run_order.description != SEPARATE_RUNS.description:
            (pooled,) = (row for row in comparison.pooled_rows if row.regime == BURST)
            shift = math.log(pooled.ratio)
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

    def draw_comparison(self, chooser: random.Random, row_count: int, run_order: RunOrder, loss: float) -> Comparison:
        """Draw a comparison with ``row_count`` rows. ``loss``: the share by which all rows of B are slower."""
        rows = [self._make_row(number) for number in range(row_count)]
        slow_probabilities = [chooser.random() for _ in rows]
        run_count = run_order.extra_run_count // 2 + 1
        shift_factor = _PAUSE_FACTOR if run_order is SEPARATE_RUNS else 1.0
        sides = []
        for side_loss in (0.0, loss):
            runs = [
                self._draw_run(chooser, rows, slow_probabilities, shift_factor, side_loss) for _ in range(run_count)
            ]
            sides.append(average_compared_rows(runs))
        log = RunLog(Path("drawn"), self.header)
        return add_run_order_and_pooled_rows(pair_rows(log, log, *sides), run_order)

    def _make_row(self, number: int) -> ComparedRow:
        template_row = self.template[number % len(self.template)]
        fields = {"regime": self.regime, "shape": number}
        if self.regime == BURST or template_row.error is None:
            return replace(template_row, pairing_fields=fields)
        calibration = look_up_repeatability("", SUSTAINED, MatmulProblem())
        seconds = template_row.seconds_per_launch
        error = compute_run_error([seconds], seconds, [0.0], calibration)
        return replace(template_row, pairing_fields=fields, error=compute_error_between_runs(error, SUSTAINED, 1))

    def _draw_run(
        self,
        chooser: random.Random,
        rows: Sequence[ComparedRow],
        slow_probabilities: Sequence[float],
        shift_factor: float,
        loss: float,
    ) -> list[ComparedRow]:
        is_burst = self.regime == BURST
        shift = shift_factor * (chooser.choice(self.scatter.shifts) if is_burst else chooser.gauss(0, _SHIFT_DEVIATION))
        drawn_rows = []
        for row, slow_probability in zip(rows, slow_probabilities, strict=True):
            if is_burst:
                row_error = row.error.own * chooser.choice(self.scatter.rows)
            else:
                row_error = _STATE_DIFFERENCE * (chooser.random() < slow_probability) + chooser.gauss(0, _ROW_DEVIATION)
            drawn_rows.append(replace(row, rate=row.rate * (1 - loss) * math.exp(shift + row_error)))
        return drawn_rows

    def compute_exit_share(self, row_count: int, run_order: RunOrder, count: int, loss: float = 0.0) -> float:
        """Return the share of ``count`` comparisons that end with exit code 3. ``loss``: the share by which all rows of
        B are slower.
        """
        comparisons = (self.draw_comparison(random.Random(seed), row_count, run_order, loss) for seed in range(count))
        return sum(comparison.is_b_slower(TOLERANCE) for comparison in comparisons) / count


def make_drawn_runs(folder: Path, scatter: Scatter) -> list[DrawnRuns]:
    """Return a generator for burst and one for the sustained regime. ``folder``: the folder that contains TEMPLATE."""
    log = read_run_log(folder / TEMPLATE)
    return [DrawnRuns(list_compared_rows(log), log.header, scatter, regime) for regime in (BURST, SUSTAINED)]


def print_compare(folder: Path, count: int) -> None:
    logs = read_logs_by_card(folder)
    sweeps_by_card = [[convert_to_sweep(log) for log in logs_of_card] for logs_of_card in logs.values()]
    all_row_comparisons = list(compare_equal_runs(sweeps_by_card))
    alternating_comparisons = list(compare_alternating_runs(sweeps_by_card))
    kinds = {
        "rows that mamf compare pairs": list(compare_equal_runs(logs.values())),
        "all rows that both runs have": all_row_comparisons,
        "two alternating runs per side": alternating_comparisons,
    }
    for kind, comparisons in kinds.items():
        wrong_count = sum(comparison.is_b_slower(TOLERANCE) for comparison in comparisons)
        row_count = sum(len(comparison.pairs) for comparison in comparisons)
        print(f"equal real runs, {kind}: exit code 3 in {wrong_count} of {len(comparisons)}, {row_count} rows")
    large_comparisons = [comparison for comparison in alternating_comparisons if len(comparison.pairs) >= _MIN_ROWS]
    slowed_comparisons = [slow_down_side_b(comparison, 0.005) for comparison in large_comparisons]
    slower_count = sum(comparison.is_b_slower(TOLERANCE) for comparison in slowed_comparisons)
    print(
        f"two alternating runs per side, at least {_MIN_ROWS} rows, all of B 0.5 % slower: "
        f"exit code 3 in {slower_count} of {len(large_comparisons)}"
    )
    scatter = compute_scatter(all_row_comparisons)
    shift = math.sqrt(statistics.fmean(shift**2 for shift in scatter.shifts))
    print(f"shift of a run in burst: standard deviation {100 * shift:.3f} % ({len(scatter.shifts) // 2} pairs of runs)")
    print(f"errors of rows, without the shift of their run: {len(scatter.rows) // 2} pairs of rows")
    for runs in make_drawn_runs(folder, scatter):
        sizes = {1: count, 79: count, 1279: count // 10}
        designs = (make_alternating_order(1), make_alternating_order(3), SEPARATE_RUNS)
        rows = {}
        for run_order in designs:
            shares = [runs.compute_exit_share(size, run_order, repeats) for size, repeats in sizes.items()]
            rows[run_order.description] = format_percents(shares)
        print_table(f"{runs.regime}, no change: exit code 3", [f"{size} rows" for size in sizes], rows)
        rows = {}
        for run_order in (*map(make_alternating_order, (1, 2, 3, 4)), SEPARATE_RUNS):
            (pooled,) = runs.draw_comparison(random.Random(1), 79, run_order, 0.0).pooled_rows
            shares = [runs.compute_exit_share(79, run_order, count // 10, loss) for loss in LOSSES]
            rows[run_order.description] = format_percents([*shares, pooled.compute_smallest_detectable_loss(TOLERANCE)])
        print_table(f"{runs.regime}, 79 rows, all slower by", [*format_percents(LOSSES), "found with 95 %"], rows)


# -- guard -------------------------------------------------------------------------------------------------------------

ROWS, SLOWER = 20, 0.03
_INTERVAL_HALF_WIDTH, _MAX_DRIFT = 0.001, 0.003


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
    "sustained": VisitScatter(SUSTAINED, states=_STATE_DIFFERENCE),
    "stuck": VisitScatter(SUSTAINED, states=_STATE_DIFFERENCE, is_stuck=True),
}


class GuardOutcome(NamedTuple):
    """The result of a simulated guard: the rows that failed, the number of undecided rows, and the number of visits."""

    regressions: set[AttentionShape]
    undecided: int
    visits: int


class _RunnerStandIn:
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

    def simulate(self, seed: int, slower: float = 0.0) -> GuardOutcome:
        """Simulate a baseline and a guard in which the first row is slower by the share ``slower``."""
        chooser = random.Random(seed)
        # The probability that a visit is in the slow state: different for each row, but the same in both runs.
        slow_probabilities = {shape: chooser.random() for shape in self.shapes}
        before = self._combine_visits(self._draw_visits(chooser, slow_probabilities, None, {}))
        visits = list(self._draw_visits(chooser, slow_probabilities, before, {self.shapes[0]: slower}))
        now = self._combine_visits(iter(visits))
        pairs = [RowPair(entry.pairing_fields, before[key], entry) for key, entry in now.items()]
        outcomes = {pair.b.shape: judge_pair(pair, self.tolerance) for pair in pairs}
        failing = {shape for shape in self.shapes if outcomes[str(shape)] == "regression"}
        return GuardOutcome(failing, list(outcomes.values()).count("undecided"), len(visits))

    def _combine_visits(self, rows: Iterator[Measurement]) -> dict[object, ComparedRow]:
        entries = (combine_measurements(visits) for visits in group_by_key(rows).values())
        return {entry.pairing_key: entry for entry in entries}

    def _draw_visits(
        self,
        chooser: random.Random,
        slow_probabilities: dict[AttentionShape, float],
        baseline: dict[object, ComparedRow] | None,
        slower: dict[AttentionShape, float],
    ) -> Iterator[Measurement]:
        """Draw a result for each visit that the guard's strategy requests."""
        card, setup = self.card, RunSetup(self.plan, self.backend, [("drawn", SimulatedAttention())])
        strategy = GuardStrategy(setup, baseline, self.tolerance)
        strategy.runner = _RunnerStandIn()  # type: ignore[assignment]
        level, drift = chooser.gauss(0, card.run), chooser.uniform(-_MAX_DRIFT, _MAX_DRIFT)
        states = {shape: chooser.random() < slow_probabilities[shape] for shape in self.shapes}
        steps, row = strategy.yield_steps(), None
        with contextlib.suppress(StopIteration):
            for number in itertools.count():
                if not isinstance(step := steps.send(row), Step):
                    return
                shape = step.shape
                is_slow = states[shape] if card.is_stuck else chooser.random() < slow_probabilities[shape]
                share = level + drift * min(1.0, number / ROWS) + is_slow * card.states
                share += chooser.gauss(0, card.visit)
                yield (row := _make_visit(step, card.regime, 1e-3 * (1 + share) / (1 - slower.get(shape, 0.0))))


def _make_visit(step: Step, regime: str, seconds: float) -> Measurement:
    interval = Interval(seconds * (1 - _INTERVAL_HALF_WIDTH), seconds * (1 + _INTERVAL_HALF_WIDTH), 0.95)
    fields = (step.shape, SimulatedAttention.name, step.problem, regime, RANKING_STATISTIC_BY_REGIME[regime], "ok")
    summary = SampleSummary(20, *[seconds] * 4, interval)
    calibration = look_up_repeatability("", regime, MatmulProblem())
    where = {"phase": step.phase, "round_number": step.round_number}
    return Measurement(*fields, summary=summary, launch_count=20, repeatability=calibration, **where)


def count_false_alarms(name: str, count: int) -> tuple[int, int, float]:
    """Simulate guards without a change. Return how many of them fail, how many have undecided rows, and the mean number
    of visits per row.
    """
    guards = Guards(CARDS[name])
    outcomes = [guards.simulate(seed) for seed in range(count)]
    failed = sum(bool(outcome.regressions) for outcome in outcomes)
    undecided = sum(bool(outcome.undecided) for outcome in outcomes)
    return failed, undecided, sum(outcome.visits for outcome in outcomes) / (count * ROWS)


def count_caught_regressions(name: str, count: int) -> int:
    """Simulate ``count`` guards in which one row became slower. Return in how many of them this row fails."""
    guards = Guards(CARDS[name])
    return sum(guards.shapes[0] in guards.simulate(seed, SLOWER).regressions for seed in range(count))


def print_guard(count: int) -> None:
    for name in CARDS:
        alarms, undecided, visits = count_false_alarms(name, count)
        print(f"{name}: {alarms} of {count} guards of {ROWS} unchanged rows failed, {undecided} were undecided")
        share = 100 * count_caught_regressions(name, count) / count
        print(f"{visits:.2f} visits per row; a row {100 * SLOWER:g} % slower was caught in {share:.2f} %", flush=True)


# -- node --------------------------------------------------------------------------------------------------------------

NODE_CARDS = (2, 4, 8, 16)
SPREADS = (0.005, 0.012, 0.015, 0.02, 0.025, 0.03, 0.04)
_CEILING_FIGURES = (BURST, SUSTAINED)
_USUAL_SPREAD, _CORRELATION = 0.012, 0.83
_TYPICAL = {BURST: 855.0, SUSTAINED: 706.0, COPY: 4.22, READ: 4.24, TO_PEER: 0.388, TO_DEVICE: 0.055, TO_HOST: 0.055}
_OTHER_SPREADS = {COPY: 0.003, READ: 0.003, TO_PEER: 0.003, TO_DEVICE: 0.05, TO_HOST: 0.05}
_REPEATS = {BURST: 0.003, SUSTAINED: 0.0035}


def draw_node(chance: random.Random, cards: int, spread: float) -> list[NodeDevice]:
    """Draw the rates of the healthy cards of a node."""
    all_figures = [_draw_figures(chance, spread) for _ in range(cards)]
    return [NodeDevice(index, 0, "drawn", f"uuid{index}", figures=figures) for index, figures in enumerate(all_figures)]


def _draw_figures(chance: random.Random, spread: float) -> dict[str, float]:
    burst_deviation, independent_deviation = chance.gauss(0, 1), chance.gauss(0, 1)
    factors = {figure: chance.gauss(1, spread_of_figure) for figure, spread_of_figure in _OTHER_SPREADS.items()}
    factors[BURST] = 1 + spread * burst_deviation
    factors[SUSTAINED] = 1 + spread * (
        _CORRELATION * burst_deviation + math.sqrt(1 - _CORRELATION**2) * independent_deviation
    )
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
    nodes: int, cards: int, spread: float, slower: float = 0.0, figures: Sequence[str] = _CEILING_FIGURES
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
        verdicts.append(judge_devices(slow_down(measure_again(chance, devices), _CEILING_FIGURES, slower), baseline))
    return verdicts


def compute_found_share(verdicts: Sequence[NodeVerdict]) -> float:
    """Return the share of nodes with a finding about the slow card, which is device 0."""
    return sum(any(finding.label == "device 0" for finding in verdict.findings) for verdict in verdicts) / len(verdicts)


def print_node(nodes: int) -> None:
    columns = format_percents(SPREADS)
    healthy = {f"{cards} cards": [judge_nodes(nodes, cards, spread) for spread in SPREADS] for cards in NODE_CARDS}
    for title, levels in (("false alarms by spread", (WARN, CRITICAL)), ("of these CRITICAL", (CRITICAL,))):
        rows = {}
        for name, judged in healthy.items():
            rows[name] = format_percents(
                sum(verdict.level in levels for verdict in verdicts) / nodes for verdicts in judged
            )
        print_table(title, columns, rows)
    rows = {}
    for slower, cards in itertools.product((0.06, 0.1, 0.2), NODE_CARDS):
        shares = (compute_found_share(judge_nodes(nodes, cards, spread, slower)) for spread in SPREADS)
        rows[f"{cards} cards, {slower:.0%} slow"] = format_percents(shares)
    print_table("a slow card is found, by spread", columns, rows)
    memory, changed, losses = {}, {}, (0.0, 0.01, 0.02, 0.03, 0.05)
    for cards in NODE_CARDS:
        judged_by_loss = (judge_nodes(nodes, cards, _USUAL_SPREAD, loss, (COPY, READ)) for loss in losses[1:])
        memory[f"{cards} cards"] = format_percents(map(compute_found_share, judged_by_loss))
    print_table("slow memory is found, by how much slower", format_percents(losses[1:]), memory)
    for cards in (1, *NODE_CARDS):
        judged_by_loss = (judge_by_baseline(nodes, cards, loss) for loss in losses)
        changed[f"{cards} cards"] = format_percents(map(compute_found_share, judged_by_loss))
    print_table("found against a baseline of the same cards", format_percents(losses), changed)


# -- verify ------------------------------------------------------------------------------------------------------------


def print_verify(count: int, rate: float, first_seed: int, budget: float) -> int:
    results = []
    for seed in range(first_seed, first_seed + count):
        card, kernel = SimulatedBackend(physics=Physics(bit_flip_probability=rate), seed=seed), SimulatedMatmul()
        plan = make_verify_plan(card, {kernel.name: kernel}, budget, ["bfloat16"], seed=1000 * seed)
        strategy = VerifyStrategy(RunSetup(plan, card, [(kernel.name, kernel)]))
        results.append(count_verified_items(list(strategy.yield_results())))
    find_probabilities = [1 - (1 - rate) ** result["launches"] for result in results]
    expected, found_cards = math.fsum(find_probabilities), sum(result["wrong"] > 0 for result in results)
    error = math.sqrt(math.fsum(probability * (1 - probability) for probability in find_probabilities))
    launches = sum(result["launches"] for result in results) / count
    print(f"{count} cards, one wrong launch in {1 / rate:.0f}, {launches:.0f} launches checked on each")
    print(f"cards with a wrong result: {found_cards}; expected: {expected:.1f} +- {error:.1f}")
    return 0 if abs(found_cards - expected) <= 3 * error else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    parsers = {}
    for name, count in {"compare": 2000, "guard": 10_000, "node": 4000, "verify": 40}.items():
        parsers[name] = commands.add_parser(name, help=f"error rates of mamf {name}")
        parsers[name].add_argument("--count", type=int, default=count, help=f"number of simulations (default: {count})")
    parsers["compare"].add_argument("folder", type=Path, metavar="FOLDER", help="folder of results, such as results/")
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
