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
from rates import logs_below

from mamf.calibration import AFTER_REST_STATE, look_up_repeatability
from mamf.ceilings.ceiling import CHOOSE_PHASE, CONFIRM_PHASE, combine_rounds, compute_combined_rate_error
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.plans import BURST, SUSTAINED
from mamf.statistics import CONFIDENCE, Repeatability, compute_median_ignoring_none, summarize_samples

_MIN_ROWS, _MIN_ROUNDS = 8, 6
_LENGTHS = ((25e-6, "< 25 us"), (100e-6, "25 to 100 us"), (300e-6, "0.1 to 0.3 ms"), (600e-6, "0.3 to 0.6 ms"))
_LONGEST = "> 0.6 ms"
_NORMAL = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_RUNS, _LAUNCHES = np.geomspace(3e-4, 0.3, 120), np.array([0.0, *np.geomspace(1e-8, 3e-6, 60)])


@dataclass(frozen=True)
class Figure:
    """A figure of one run: the rate of a row or of a ceiling.

    - ``key``: figures of two runs are paired if their keys are equal.
    - ``state``: the state and the operation of a row of repeatability.csv. Figures with the same state share a
      calibration.
    - ``group``: the row of the printed table.
    - ``low``, ``high``: the ends of the repeat interval of ``rate``. ``seconds``: the time of a launch.
    - ``scatter``: the relative standard error of the rate, estimated from the visits of this run only.
    - ``known``: the calibration, which says how much repeated runs differ. ``celsius``: None if unknown.
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
    known: Repeatability
    celsius: float | None


Pair = tuple[Figure, Figure]


def figures(log: RunLog) -> Iterator[Figure]:
    """Yield the figures of a run: the first row of each kernel on each shape, and the ceilings of a search.

    Leave out reference rows, and the rows of a search for a ceiling that comes before another operation: they are not
    results of the run.
    """
    of = log.plan.operation
    # Leave out the sustained rows of converted logs: they were measured in another way, and their figure is the median.
    usual = ((BURST, "median"), (SUSTAINED, "mean"))
    good = (row for row in log.measurements if row.ok and row.operation == of and not row.is_reference)
    rows = [as_today(row, log) for row in good if (row.regime, row.ranking_statistic) in usual]
    seen: set[tuple[Any, ...]] = set()
    for row in rows:
        key = (*_key(log, row), str(row.shape), row.kernel)
        if key not in seen and key[0]:
            seen.add(key)
            direction = " backward" if _state(row)[1].endswith("backward") else ""
            yield _figure(log, key, f"{_kind(row)}{direction}, {_state(row)[0]}, {_length(row.seconds)}", [row])
    for ceiling in log.ceilings.values() if log.plan.is_search else ():
        what = (CONFIRM_PHASE, ceiling.problem, ceiling.regime, ceiling.shape, ceiling.kernel)
        rounds = [row for row in rows if (row.phase, row.problem, row.regime, row.shape, row.kernel) == what]
        if rounds and (key := _key(log, rounds[0]))[0]:
            yield _figure(log, (*key, "ceiling"), f"ceilings, {ceiling.regime}", rounds)


def as_today(row: Measurement, log: RunLog) -> Measurement:
    """Return a row with the figure and the calibration that today's code computes."""
    known = look_up_repeatability(log.header["device"]["backend"], _state(row)[0], row.problem)
    by = "mean" if row.regime == SUSTAINED else "median"
    return replace(row, ranking_statistic=by, summary=summarize_samples(row.samples, by), repeatability=known)


def _figure(log: RunLog, key: tuple[Any, ...], group: str, rounds: Sequence[Measurement]) -> Figure:
    first, (rate, interval) = rounds[0], combine_rounds(rounds)
    known = first.repeatability
    assert known is not None, "as_today sets the calibration"
    exact = replace(known, run=0.0, launch_seconds=0.0)
    scatter = compute_combined_rate_error([replace(row, repeatability=exact) for row in rounds])
    celsius = compute_median_ignoring_none(row.conditions.celsius for row in rounds)
    about = (key[0], str(log.path), key, _state(first), group, group.startswith("ceilings"))
    return Figure(
        *about,
        rate,
        interval.low,
        interval.high,
        first.seconds,
        math.hypot(scatter.common, scatter.own),
        known,
        celsius,
    )


def _key(log: RunLog, row: Measurement) -> tuple[Any, ...]:
    """Return the card and everything else that must be equal in two runs, except the shape and the kernel."""
    device, problem, packages = log.get_device(row.device_index), row.problem, log.header["environment"]["packages"]
    problem = replace(problem, seed=0) if hasattr(problem, "seed") else problem
    software = (device.driver, *sorted((device.versions or {}).items()), packages.get("torch"))
    return (device.uuid_hash, software, problem, _state(row), getattr(log.plan, "flush", True))


def _state(row: Measurement) -> tuple[str, str]:
    """Return the state and the operation of a row, as repeatability.csv names them."""
    # A sustained row was measured after a rest if it has the calibration of AFTER_REST_STATE, or one that depends on
    # the temperature. For sustained matmuls, only measurements after a rest have such a calibration.
    known = row.repeatability
    is_anew = row.regime == SUSTAINED and known is not None
    is_anew = is_anew and (known.per_degree > 0 or known == look_up_repeatability("", AFTER_REST_STATE, row.problem))
    operation = f"{row.operation} backward" if getattr(row.problem, "has_backward_pass", False) else row.operation
    operation += f" {row.problem.dtype}" if operation == "matmul" else ""
    return AFTER_REST_STATE if is_anew else row.regime, operation


def _kind(row: Measurement) -> str:
    if row.operation != "matmul":
        return row.operation
    return "library matmuls" if "mm" in row.kernel or "cublas" in row.kernel else "other matmuls"


def _length(seconds: float) -> str:
    return next((name for limit, name in _LENGTHS if seconds < limit), _LONGEST)


def pairs_of(all_figures: Iterable[Figure]) -> list[Pair]:
    """Return all pairs of figures that have the same key and come from different runs, each pair in both orders."""
    by_key: dict[Any, list[Figure]] = collections.defaultdict(list)
    for figure in all_figures:
        by_key[figure.key].append(figure)
    return [(a, b) for same in by_key.values() for a, b in itertools.permutations(same, 2) if a.run != b.run]


def holds(pairs: Sequence[Pair]) -> np.ndarray:
    return np.array([a.low <= b.rate <= a.high for a, b in pairs])


def differences(pairs: Sequence[Pair]) -> np.ndarray:
    return np.array([abs(math.log(b.rate / a.rate)) for a, b in pairs])


def repeats(pairs: Iterable[Pair]) -> dict[str, int]:
    """Return the number of repeats of each card, which is the number of its runs minus one."""
    runs: dict[str, set[str]] = collections.defaultdict(set)
    for a, _ in pairs:
        runs[a.card].add(a.run)
    return {card: len(each) - 1 for card, each in sorted(runs.items())}


def weights(pairs: Sequence[Pair]) -> np.ndarray:
    """Return the weights of the pairs. Their sum is 1, and the sum for each card is its share of all repeats."""
    count, known = collections.Counter(a.card for a, _ in pairs), repeats(pairs)
    return np.array([known[a.card] / count[a.card] / sum(known.values()) for a, _ in pairs])


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a probability, given the share of successes in ``count`` independent trials."""
    middle, width = share + _NORMAL**2 / (2 * count), share * (1 - share) / count + (_NORMAL / (2 * count)) ** 2
    ends = (middle + sign * _NORMAL * math.sqrt(width) for sign in (-1, 1))
    low, high = (end / (1 + _NORMAL**2 / count) for end in ends)
    return max(0.0, low), min(1.0, high)


def terms_of(pairs: Sequence[Pair]) -> np.ndarray:
    """Return the three terms of the half-width of each pair's first figure, as arrays: its scatter, its seconds per
    launch, and how much faster the card was because it was cold.
    """
    return np.array([(a.scatter, a.seconds, a.known.compute_cold_gain(a.celsius)) for a, _ in pairs]).T


def half_widths(terms: np.ndarray, run: float, launch: float) -> np.ndarray:
    """Compute relative half-widths with the formula of mamf.statistics.compute_repeat_interval."""
    scatter, seconds, cold = terms
    return _NORMAL * math.sqrt(2) * np.sqrt(run**2 + (launch / seconds) ** 2 + scatter**2) + cold


def fit(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Fit ``run`` and ``launch_seconds``, so that the intervals contain 95 % of the repeats and are as narrow as
    possible. The method is quantile regression (Koenker & Bassett, Econometrica 46, 1978).
    """
    apart, weight, terms = differences(pairs), weights(pairs), terms_of(pairs)

    def loss(run: float, launch: float) -> float:
        beyond = apart - half_widths(terms, run, launch)
        return float(weight @ np.maximum(CONFIDENCE * beyond, (CONFIDENCE - 1) * beyond))

    launches = _LAUNCHES if pairs[0][0].known.launch_seconds else _LAUNCHES[:1]
    run, launch = min(itertools.product(_RUNS[::4], launches[::4]), key=lambda each: loss(*each))
    near_runs, near = _RUNS[abs(np.log(_RUNS / run)) < 0.25], launches[abs(launches - launch) <= 0.3 * launch]
    run, launch = min(itertools.product(near_runs, near), key=lambda each: loss(*each))
    return float(run), float(launch)


def fitting_pairs(pairs: Sequence[Pair], state: tuple[str, str]) -> list[Pair]:
    """Return the pairs to which the constants of a state are fitted: ceilings for measurements after a rest, because
    mamf makes these only for ceilings, and rows for all other states.
    """
    return [pair for pair in pairs if pair[0].state == state and pair[0].is_ceiling == (state[0] == AFTER_REST_STATE)]


def print_fit(pairs: Sequence[Pair]) -> None:
    print("state,operation,run,launch_seconds: pairs, cards")
    for state in sorted({a.state for a, _ in pairs}):
        if own := fitting_pairs(pairs, state):
            run, launch = fit(own)
            print(f"{','.join(state)},{run:.5f},{launch:.2g}: {len(own)}, {len(repeats(own))}")


def print_table(pairs: Sequence[Pair]) -> None:
    print("| figures | pairs | cards | repeats | contain the repeat (95 %) | mean half-width | needed |")
    print(f"|:--|{'--:|' * 6}")
    for name in (*sorted({a.group for a, _ in pairs}), "all"):
        own = [pair for pair in pairs if name in (pair[0].group, "all")]
        weight, known, apart = weights(own), repeats(own), differences(own)
        covered, width = float(weight @ holds(own)), float(weight @ [(a.high - a.low) / 2 / a.rate for a, _ in own])
        low, high = (100 * end for end in wilson(covered, sum(known.values())))
        order = np.argsort(apart)
        needed = apart[order][np.searchsorted(np.cumsum(weight[order]), CONFIDENCE - 1e-9)]
        counts = f"{len(own)} | {len(known)} | {sum(known.values())}"
        widths = f"+-{100 * width:.2f} % | +-{100 * needed:.2f} %"
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
        least = _MIN_ROWS if state == BURST else 1
        moments: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
        for (of, card, *_), each in changes.items():
            if of == state and len(each) >= least:
                degrees, change = statistics.fmean(x for x, _ in each), statistics.median(y for _, y in each)
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


def curse(log: RunLog) -> Iterator[float]:
    """Choose the best candidate by one half of the burst rounds of a search. Yield how much higher its rate is there
    than in the other half, as a share. Do this for each of the two halves.
    """
    rates: dict[Any, list[float]] = collections.defaultdict(list)
    for row in log.measurements:
        if row.ok and row.regime == BURST and row.phase in (CHOOSE_PHASE, CONFIRM_PHASE):
            rates[row.shape, row.kernel].append(row.best_rate)
    rounds = [each for each in rates.values() if len(each) >= _MIN_ROUNDS]
    for chosen, other in ((0, 1), (1, 0)) if len(rounds) > 1 else ():
        best = max(rounds, key=lambda each, half=chosen: statistics.median(each[half::2]))  # type: ignore[misc]
        yield statistics.median(best[chosen::2]) / statistics.median(best[other::2]) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [Path(__file__).resolve().parents[1] / "results"]
    parser.add_argument("paths", type=Path, nargs="*", default=default, metavar="LOG or FOLDER")
    parser.add_argument("--fit", action="store_true", help="print calibration constants instead of the table")
    options = parser.parse_args()
    logs = list(logs_below(options.paths))
    pairs = pairs_of(figure for log in logs for figure in figures(log))
    if not pairs:
        raise SystemExit("no two of these runs measured the same on one card: name logs of repeated runs")
    if options.fit:
        print_fit(pairs)
    else:
        print_table(pairs)
    print_temperature(pairs)
    if biases := [bias for log in logs if log.plan.is_search for bias in curse(log)]:
        print(f"the winner's curse in burst: {100 * statistics.fmean(biases):+.3f} % over {len(biases)} halves")


if __name__ == "__main__":
    main()
