"""Measure how often the 95 % repeat interval of a figure contains the figure of another run, from logs of real runs.

    python tools/coverage.py results          # print the coverage of each group, for docs/evidence/intervals.md
    python tools/coverage.py results --fit    # print constants for mamf/repeatability.csv

A pair is the same figure from two runs (separate processes) on the same card, with the same driver, kernel libraries,
torch, kernel, problem (except its seed), shape and regime. The figure is the first row of each run or, for two runs of
mamf find, the ceiling, even if the two runs found it at different shapes. Each pair counts twice, because each run
predicts the other. The intervals are computed with today's code and today's calibration; the logs may contain others.

Pairs of one card are not independent, so a card with n runs counts as n - 1 repeats, whatever the number of its rows.
The range in parentheses is Wilson's binomial interval of the coverage for this number of repeats. The column "needed"
is the half-width with which the intervals would contain 95 % of the repeats.

The last lines show how the temperature changes the rates of whole runs, and the winner's curse: the best candidate of
one half of the rounds of mamf find has a higher rate there than in the other half.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rates import read_logs

from mamf.calibration import AFTER_REST_STATE, look_up_repeatability
from mamf.ceilings.ceiling import CHOOSE_PHASE, CONFIRM_PHASE, combine_rounds, compute_combined_rate_error
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.plans import BURST, SUSTAINED
from mamf.statistics import CONFIDENCE, Repeatability, compute_median_ignoring_none, summarize_samples

_MIN_ROWS, _MIN_ROUNDS = 8, 6
_LENGTH_LIMITS = ((25e-6, "< 25 us"), (100e-6, "25 to 100 us"), (300e-6, "0.1 to 0.3 ms"), (600e-6, "0.3 to 0.6 ms"))
_LONGEST = "> 0.6 ms"
_NORMAL = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_RUN_CANDIDATES, _LAUNCH_CANDIDATES = np.geomspace(3e-4, 0.3, 120), np.array([0.0, *np.geomspace(1e-8, 3e-6, 60)])


@dataclass(frozen=True)
class Figure:
    """A figure of one run: the rate of a row or of a ceiling.

    - ``key``: figures of two runs are paired if their keys are equal.
    - ``state``: the state and the operation of a row of repeatability.csv. Figures with the same state share a
      calibration.
    - ``group``: the row of the printed table.
    - ``low``, ``high``: the ends of the repeat interval of ``rate``. ``seconds``: the time of a launch.
    - ``scatter``: the relative standard error of the rate, estimated from the visits of this run only.
    - ``calibration``: how much repeated runs differ. ``celsius``: the temperature; None if unknown.
    """

    card: str
    run: str
    key: tuple[Any, ...]
    state: tuple[str, str]
    group: str
    is_ceiling: bool
    rate: float
    low: float
    high: float
    seconds: float
    scatter: float
    calibration: Repeatability
    celsius: float | None


Pair = tuple[Figure, Figure]


def list_figures(log: RunLog) -> Iterator[Figure]:
    """Yield the figures of a run: the first row of each kernel on each shape, and the ceilings of a search.

    Leave out reference rows, and the rows of a search for a ceiling that comes before another operation: they are not
    results of the run.
    """
    operation = log.plan.operation
    # Leave out the sustained rows of converted logs: they were measured in another way, and their figure is the median.
    usual_figures = ((BURST, "median"), (SUSTAINED, "mean"))
    measured_rows = (row for row in log.measurements if row.ok and row.operation == operation and not row.is_reference)
    rows = [recompute_row(row, log) for row in measured_rows if (row.regime, row.ranking_statistic) in usual_figures]
    seen_keys: set[tuple[Any, ...]] = set()
    for row in rows:
        key = (*_make_key(log, row), str(row.shape), row.kernel)
        if key not in seen_keys and key[0]:
            seen_keys.add(key)
            state, operation_of_row = _get_state(row)
            direction = " backward" if operation_of_row.endswith("backward") else ""
            group = f"{_describe_kind(row)}{direction}, {state}, {_describe_length(row.seconds)}"
            yield _make_figure(log, key, group, [row])
    for ceiling in log.ceilings.values() if log.plan.is_search else ():
        ceiling_row_key = (CONFIRM_PHASE, ceiling.problem, ceiling.regime, ceiling.shape, ceiling.kernel)
        rounds = [row for row in rows if (row.phase, row.problem, row.regime, row.shape, row.kernel) == ceiling_row_key]
        if rounds and (key := _make_key(log, rounds[0]))[0]:
            yield _make_figure(log, (*key, "ceiling"), f"ceilings, {ceiling.regime}", rounds)


def recompute_row(row: Measurement, log: RunLog) -> Measurement:
    """Return a row with the figure and the calibration that today's code computes."""
    calibration = look_up_repeatability(log.header["device"]["backend"], _get_state(row)[0], row.problem)
    statistic = "mean" if row.regime == SUSTAINED else "median"
    summary = summarize_samples(row.samples, statistic)
    return replace(row, ranking_statistic=statistic, summary=summary, repeatability=calibration)


def _make_figure(log: RunLog, key: tuple[Any, ...], group: str, rounds: Sequence[Measurement]) -> Figure:
    first, (rate, interval) = rounds[0], combine_rounds(rounds)
    calibration = first.repeatability
    assert calibration is not None, "recompute_row sets the calibration"
    without_run_error = replace(calibration, run=0.0, launch_seconds=0.0)
    scatter = compute_combined_rate_error([replace(row, repeatability=without_run_error) for row in rounds])
    celsius = compute_median_ignoring_none(row.conditions.celsius for row in rounds)
    identity = (key[0], str(log.path), key, _get_state(first), group, group.startswith("ceilings"))
    return Figure(
        *identity,
        rate,
        interval.low,
        interval.high,
        first.seconds,
        math.hypot(scatter.common, scatter.own),
        calibration,
        celsius,
    )


def _make_key(log: RunLog, row: Measurement) -> tuple[Any, ...]:
    """Return the card and everything else that must be equal in two runs, except the shape and the kernel."""
    device, problem, packages = log.get_device(row.device_index), row.problem, log.header["environment"]["packages"]
    problem = replace(problem, seed=0) if hasattr(problem, "seed") else problem
    software = (device.driver, *sorted((device.versions or {}).items()), packages.get("torch"))
    return (device.uuid_hash, software, problem, _get_state(row), getattr(log.plan, "flush", True))


def _get_state(row: Measurement) -> tuple[str, str]:
    """Return the state and the operation of a row, as repeatability.csv names them."""
    # A sustained row was measured after a rest if it has the calibration of AFTER_REST_STATE, or one that depends on
    # the temperature. For sustained matmuls, only measurements after a rest have such a calibration.
    calibration = row.repeatability
    is_after_rest = False
    if row.regime == SUSTAINED and calibration is not None:
        after_rest = look_up_repeatability("", AFTER_REST_STATE, row.problem)
        is_after_rest = calibration.per_degree > 0 or calibration == after_rest
    operation = f"{row.operation} backward" if getattr(row.problem, "has_backward_pass", False) else row.operation
    operation += f" {row.problem.dtype}" if operation == "matmul" else ""
    return AFTER_REST_STATE if is_after_rest else row.regime, operation


def _describe_kind(row: Measurement) -> str:
    if row.operation != "matmul":
        return row.operation
    return "library matmuls" if "mm" in row.kernel or "cublas" in row.kernel else "other matmuls"


def _describe_length(seconds: float) -> str:
    return next((name for limit, name in _LENGTH_LIMITS if seconds < limit), _LONGEST)


def list_pairs(all_figures: Iterable[Figure]) -> list[Pair]:
    """Return all pairs of figures that have the same key and come from different runs, each pair in both orders."""
    by_key: dict[Any, list[Figure]] = collections.defaultdict(list)
    for figure in all_figures:
        by_key[figure.key].append(figure)
    return [(a, b) for figures in by_key.values() for a, b in itertools.permutations(figures, 2) if a.run != b.run]


def find_covered_repeats(pairs: Sequence[Pair]) -> np.ndarray:
    """Return for each pair whether the interval of the first figure contains the second figure."""
    return np.array([a.low <= b.rate <= a.high for a, b in pairs])


def compute_differences(pairs: Sequence[Pair]) -> np.ndarray:
    """Return the relative difference between the two figures of each pair."""
    return np.array([abs(math.log(b.rate / a.rate)) for a, b in pairs])


def count_repeats(pairs: Iterable[Pair]) -> dict[str, int]:
    """Return the number of repeats of each card, which is the number of its runs minus one."""
    runs: dict[str, set[str]] = collections.defaultdict(set)
    for a, _ in pairs:
        runs[a.card].add(a.run)
    return {card: len(runs_of_card) - 1 for card, runs_of_card in sorted(runs.items())}


def compute_weights(pairs: Sequence[Pair]) -> np.ndarray:
    """Return the weights of the pairs. Their sum is 1, and the sum for each card is its share of all repeats."""
    pairs_by_card, repeats_by_card = collections.Counter(a.card for a, _ in pairs), count_repeats(pairs)
    return np.array([repeats_by_card[a.card] / pairs_by_card[a.card] / sum(repeats_by_card.values()) for a, _ in pairs])


def compute_wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a probability, given the share of successes in ``count`` independent trials."""
    middle, width = share + _NORMAL**2 / (2 * count), share * (1 - share) / count + (_NORMAL / (2 * count)) ** 2
    ends = (middle + sign * _NORMAL * math.sqrt(width) for sign in (-1, 1))
    low, high = (end / (1 + _NORMAL**2 / count) for end in ends)
    return max(0.0, low), min(1.0, high)


def compute_terms(pairs: Sequence[Pair]) -> np.ndarray:
    """Return the three terms of the half-width of each pair's first figure, as arrays: its scatter, its seconds per
    launch, and how much faster the card was because it was cold.
    """
    return np.array([(a.scatter, a.seconds, a.calibration.compute_cold_gain(a.celsius)) for a, _ in pairs]).T


def compute_half_widths(terms: np.ndarray, run: float, launch: float) -> np.ndarray:
    """Compute relative half-widths with the formula of mamf.statistics.compute_repeat_interval."""
    scatter, seconds, cold = terms
    return _NORMAL * math.sqrt(2) * np.sqrt(run**2 + (launch / seconds) ** 2 + scatter**2) + cold


def fit_constants(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Fit ``run`` and ``launch_seconds``, so that the intervals contain 95 % of the repeats and are as narrow as
    possible. The method is quantile regression (Koenker & Bassett, Econometrica 46, 1978).
    """
    differences, weights, terms = compute_differences(pairs), compute_weights(pairs), compute_terms(pairs)

    def loss(run: float, launch: float) -> float:
        excess = differences - compute_half_widths(terms, run, launch)
        return float(weights @ np.maximum(CONFIDENCE * excess, (CONFIDENCE - 1) * excess))

    launches = _LAUNCH_CANDIDATES if pairs[0][0].calibration.launch_seconds else _LAUNCH_CANDIDATES[:1]
    run, launch = min(itertools.product(_RUN_CANDIDATES[::4], launches[::4]), key=lambda candidate: loss(*candidate))
    near_runs = _RUN_CANDIDATES[abs(np.log(_RUN_CANDIDATES / run)) < 0.25]
    near_launches = launches[abs(launches - launch) <= 0.3 * launch]
    run, launch = min(itertools.product(near_runs, near_launches), key=lambda candidate: loss(*candidate))
    return float(run), float(launch)


def select_fitting_pairs(pairs: Sequence[Pair], state: tuple[str, str]) -> list[Pair]:
    """Return the pairs to which the constants of a state are fitted: ceilings for measurements after a rest, because
    mamf makes these only for ceilings, and rows for all other states.
    """
    return [pair for pair in pairs if pair[0].state == state and pair[0].is_ceiling == (state[0] == AFTER_REST_STATE)]


def print_fit(pairs: Sequence[Pair]) -> None:
    print("state,operation,run,launch_seconds: pairs, cards")
    for state in sorted({a.state for a, _ in pairs}):
        if state_pairs := select_fitting_pairs(pairs, state):
            run, launch = fit_constants(state_pairs)
            print(f"{','.join(state)},{run:.5f},{launch:.2g}: {len(state_pairs)}, {len(count_repeats(state_pairs))}")


def print_table(pairs: Sequence[Pair]) -> None:
    print("| figures | pairs | cards | repeats | contain the repeat (95 %) | mean half-width | needed |")
    print(f"|:--|{'--:|' * 6}")
    for name in (*sorted({a.group for a, _ in pairs}), "all"):
        group_pairs = [pair for pair in pairs if name in (pair[0].group, "all")]
        weights, differences = compute_weights(group_pairs), compute_differences(group_pairs)
        repeats_by_card = count_repeats(group_pairs)
        covered = float(weights @ find_covered_repeats(group_pairs))
        mean_half_width = float(weights @ [(a.high - a.low) / 2 / a.rate for a, _ in group_pairs])
        low, high = (100 * end for end in compute_wilson_interval(covered, sum(repeats_by_card.values())))
        order = np.argsort(differences)
        needed = differences[order][np.searchsorted(np.cumsum(weights[order]), CONFIDENCE - 1e-9)]
        counts = f"{len(group_pairs)} | {len(repeats_by_card)} | {sum(repeats_by_card.values())}"
        widths = f"+-{100 * mean_half_width:.2f} % | +-{100 * needed:.2f} %"
        print(f"| {name} | {counts} | {100 * covered:.1f} % ({low:.0f} to {high:.0f}) | {widths} |")


def print_temperature(pairs: Sequence[Pair]) -> None:
    """Print by how much the rate of a whole run changes per degree, for each state. This is the slope of a line through
    0, fitted by least squares. Each card is weighted by about its number of repeats.
    """
    changes: dict[Any, list[tuple[float, float]]] = collections.defaultdict(list)
    for a, b in pairs:
        if a.run < b.run and a.celsius is not None and b.celsius is not None:
            changes[a.state[0], a.card, a.run, b.run].append((b.celsius - a.celsius, math.log(b.rate / a.rate)))
    for state in sorted({key[0] for key in changes}):
        min_rows = _MIN_ROWS if state == BURST else 1
        moments: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
        for (of, card, *_), degrees_and_changes in changes.items():
            if of == state and len(degrees_and_changes) >= min_rows:
                degrees = statistics.fmean(x for x, _ in degrees_and_changes)
                change = statistics.median(y for _, y in degrees_and_changes)
                moments[card].append((degrees * change, degrees**2))

        def slope(cards: Iterable[str], of: dict[str, list[tuple[float, float]]] = moments) -> float:
            # A card with n runs has n (n - 1) / 2 pairs of runs, but only n - 1 repeats. The divisor is about n, so the
            # weight of a card is about proportional to its repeats.
            sums = [np.sum(of[card], axis=0) / math.sqrt(2 * len(of[card])) for card in cards]
            above, below = np.sum(sums, axis=0) if sums else (0.0, 0.0)
            return 100 * above / below if below else math.nan

        chooser, cards = np.random.default_rng(0), list(moments)
        if len(cards) > 1:
            drawn = [slope(chooser.choice(cards, len(cards))) for _ in range(500)]
            low, high = np.nanquantile(drawn, (0.025, 0.975))
            print(
                f"temperature, {state}: {slope(cards):+.3f} % per degree ({low:+.3f} to {high:+.3f}), "
                f"{sum(map(len, moments.values()))} pairs of runs, {len(cards)} cards"
            )


def compute_winners_curse(log: RunLog) -> Iterator[float]:
    """Choose the best candidate by one half of the burst rounds of a search. Yield how much higher its rate is there
    than in the other half, as a share. Do this for each of the two halves.
    """
    rates: dict[Any, list[float]] = collections.defaultdict(list)
    for row in log.measurements:
        if row.ok and row.regime == BURST and row.phase in (CHOOSE_PHASE, CONFIRM_PHASE):
            rates[row.shape, row.kernel].append(row.best_rate)
    rounds = [rates_of_candidate for rates_of_candidate in rates.values() if len(rates_of_candidate) >= _MIN_ROUNDS]
    for chosen, other in ((0, 1), (1, 0)) if len(rounds) > 1 else ():
        best = max(rounds, key=lambda rates_of_candidate, half=chosen: statistics.median(rates_of_candidate[half::2]))  # type: ignore[misc]
        yield statistics.median(best[chosen::2]) / statistics.median(best[other::2]) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [Path(__file__).resolve().parents[1] / "results"]
    parser.add_argument(
        "paths", type=Path, nargs="*", default=default, metavar="LOG or FOLDER", help="default: results/"
    )
    parser.add_argument("--fit", action="store_true", help="print calibration constants instead of the table")
    options = parser.parse_args()
    logs = list(read_logs(options.paths))
    pairs = list_pairs(figure for log in logs for figure in list_figures(log))
    if not pairs:
        raise SystemExit("no two of these runs measured the same shape on the same card: give logs of repeated runs")
    if options.fit:
        print_fit(pairs)
    else:
        print_table(pairs)
    print_temperature(pairs)
    if biases := [bias for log in logs if log.plan.is_search for bias in compute_winners_curse(log)]:
        print(f"the winner's curse in burst: {100 * statistics.fmean(biases):+.3f} % over {len(biases)} halves")


if __name__ == "__main__":
    main()
