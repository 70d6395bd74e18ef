"""Does the 95 % repeat interval contain a repeat? Pairs of separate runs, from the logs below a folder.

    python tools/coverage.py results                    # docs/verification.md shows groups of 50 pairs or more
    python tools/coverage.py results --fit              # calibration constants for mamf/repeatability.csv

A pair is the same figure from two runs (separate processes) on the same card, with the same driver, kernel libraries,
torch, kernel, problem (except its seed), shape and regime: the first row of a run for each, or the ceilings of two
finds, whichever shapes they found. Each pair counts twice, because each run predicts the other. Intervals are those of
today's code with today's calibration, whatever the log holds. The last line is the winner's curse: how much higher the
best of one half of the rounds of a find reads there than in the other half.

A card is weighted by its repeats: its runs minus one. The bootstrap resamples cards, and runs within a card. "left
out" is the coverage with constants that were fitted without the card that is tested.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mamf.calibration import ANEW, find_calibration
from mamf.ceilings.ceiling import CHOOSE, CONFIRM, combine_rounds, error_of
from mamf.logs.legacy import read_legacy_or_none
from mamf.logs.records import operation_of_plan
from mamf.logs.run_log import RunLog, read_run_log
from mamf.measurement import Measurement
from mamf.regime_names import BURST, SUSTAINED
from mamf.statistics import CONFIDENCE, Repeatability, summarize

_FEWEST_PAIRS, _RESAMPLES, _FEWEST_IN_COMMON, _FEWEST_FOR_HALVES = 50, 1000, 8, 6
_LENGTHS = ((25e-6, "< 25 us"), (100e-6, "25 to 100 us"), (300e-6, "0.1 to 0.3 ms"), (600e-6, "0.3 to 0.6 ms"))
_LONGEST = "> 0.6 ms"
_NORMAL = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_RUNS, _LAUNCHES = np.geomspace(3e-4, 0.3, 120), np.array([0.0, *np.geomspace(1e-8, 3e-6, 60)])


@dataclass(frozen=True)
class Figure:
    """What one run says of something. ``rounds``: its rows, one of a row. ``key``: what makes two figures the same."""

    card: str
    run: str
    key: tuple[Any, ...]
    state: tuple[str, str]
    group: str
    rounds: tuple[Measurement, ...]
    is_ceiling: bool = False

    def recalibrated(self, known: Repeatability) -> Figure:
        return replace(self, rounds=tuple(replace(row, repeatability=known) for row in self.rounds))


@dataclass(frozen=True)
class Pair:
    a: Figure
    b: Figure


def logs_below(paths: Iterable[Path]) -> Iterator[RunLog]:
    """The logs of mamf's own among these files and below these folders."""
    for path in paths:
        for file in sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]:
            if read_legacy_or_none(file) is None:
                yield read_run_log(file)


def as_today(row: Measurement, log: RunLog) -> Measurement:
    """A row with today's figure and calibration."""
    known = find_calibration(log.header["device"]["backend"], _state(log, row)[0], row.operation)
    by = "mean" if row.regime == SUSTAINED else "median"
    return replace(row, best_by=by, summary=summarize(row.samples, by), repeatability=known)


def figures(log: RunLog) -> Iterator[Figure]:
    """The first row of each kernel on each shape, and the ceilings of a find. No reference visits, and no rows of a
    search before another operation: they are not what a repeat of the run would print.
    """
    of = operation_of_plan(log.header["plan"])
    rows = [
        as_today(row, log)
        for row in log.measurements
        if row.ok
        and row.operation == of
        and not row.is_reference
        # Converted logs measured sustained in another way: by its median.
        and (row.regime, row.best_by) in ((BURST, "median"), (SUSTAINED, "mean"))
    ]
    first: dict[tuple[Any, ...], Figure] = {}
    for row in rows:
        key, state = (*_key(log, row), str(row.shape), row.kernel), _state(log, row)
        if key not in first and key[0]:
            group = f"{_kind(row)}, {state[0]}, {_length(row.seconds)}"
            first[key] = Figure(key[0], str(log.path), key, state, group, (row,))
    yield from first.values()
    for ceiling in log.ceilings.values() if log.plan.is_search else ():
        what = (CONFIRM, ceiling.problem, ceiling.regime, ceiling.shape, ceiling.kernel)
        own = [row for row in rows if (row.phase, row.problem, row.regime, row.shape, row.kernel) == what]
        if own and (key := _key(log, own[0]))[0]:
            group = f"ceilings, {ceiling.regime}"
            yield Figure(key[0], str(log.path), (*key, "ceiling"), _state(log, own[0]), group, tuple(own), True)


def _key(log: RunLog, row: Measurement) -> tuple[Any, ...]:
    """The card, and all that must be equal in two runs but shape and kernel."""
    device, problem, packages = log.device(row.device), row.problem, log.header["environment"]["packages"]
    problem = replace(problem, seed=0) if hasattr(problem, "seed") else problem
    software = (device.driver, *sorted((device.versions or {}).items()), packages.get("torch"))
    return (device.uuid_hash, software, problem, _state(log, row), getattr(log.plan, "flush", True))


def _state(log: RunLog, row: Measurement) -> tuple[str, str]:
    """The calibration that a row has: the state of the device and the operation. Calibrations change; those of visits
    that start anew have always had separate degrees of freedom.
    """
    known, anew = row.repeatability, find_calibration(log.header["device"]["backend"], ANEW, row.operation)
    is_anew = row.regime == SUSTAINED and known is not None and known.degrees == anew.degrees
    return ANEW if is_anew else row.regime, row.operation


def _kind(row: Measurement) -> str:
    if row.operation != "matmul":
        return row.operation
    return "library products" if "mm" in row.kernel or "cublas" in row.kernel else "other products"


def _length(seconds: float) -> str:
    return next((name for limit, name in _LENGTHS if seconds < limit), _LONGEST)


def pairs_of(found: Iterable[Figure]) -> list[Pair]:
    """Both ways round."""
    by_key: dict[Any, list[Figure]] = collections.defaultdict(list)
    for figure in found:
        by_key[figure.key].append(figure)
    return [Pair(a, b) for same in by_key.values() for a, b in itertools.permutations(same, 2) if a.run != b.run]


def holds(pair: Pair, known: Repeatability | None = None) -> bool:
    a = pair.a if known is None else pair.a.recalibrated(known)
    interval, rate = combine_rounds(a.rounds)[1], combine_rounds(pair.b.rounds)[0]
    return interval.low <= rate <= interval.high


def difference(pair: Pair) -> float:
    return abs(float(np.log(combine_rounds(pair.b.rounds)[0] / combine_rounds(pair.a.rounds)[0])))


def half_width(figure: Figure) -> float:
    rate, interval = combine_rounds(figure.rounds)
    return interval.half_width / rate


def weights(pairs: Sequence[Pair]) -> np.ndarray:
    """Sums to 1, over each card to its share of the repeats: a card with three runs gives two repeats."""
    count, runs = collections.Counter(pair.a.card for pair in pairs), _runs(pairs)
    repeats = {card: len(found) - 1 for card, found in runs.items()}
    return np.array([repeats[pair.a.card] / count[pair.a.card] / sum(repeats.values()) for pair in pairs])


def _runs(pairs: Iterable[Pair]) -> dict[str, list[str]]:
    """The runs of each card, in order."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    for pair in pairs:
        found[pair.a.card].add(pair.a.run)
    return {card: sorted(runs) for card, runs in sorted(found.items())}


def bootstrap(pairs: Sequence[Pair], held: Sequence[bool]) -> tuple[float, float]:
    """The 95 % interval of the coverage over resampled cards and, within each, resampled runs."""
    chooser, tables = np.random.default_rng(0), []
    for card, runs in _runs(pairs).items():
        table = np.zeros((2, len(runs), len(runs)))
        for pair, is_held in zip(pairs, held, strict=True):
            if pair.a.card == card:
                table[:, runs.index(pair.a.run), runs.index(pair.b.run)] += (is_held, 1)
        tables.append(table)
    drawn = []
    for _ in range(_RESAMPLES):
        shares, repeats = [], []
        for number in chooser.integers(len(tables), size=len(tables)):
            size = tables[number].shape[1]
            times = np.bincount(chooser.integers(size, size=size), minlength=size)
            hits, count = (tables[number] * np.outer(times, times)).sum(axis=(1, 2))
            if count:
                shares.append(hits / count)
                repeats.append(size - 1)
        drawn += [np.average(shares, weights=repeats)] if shares else []
    return float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975))


def quantile(values: np.ndarray, weight: np.ndarray, level: float) -> float:
    order = np.argsort(values)
    return float(values[order][np.searchsorted(np.cumsum(weight[order]), level)])


def fit(pairs: Sequence[Pair], known: Repeatability) -> Repeatability:
    """``run`` and ``launch_seconds`` of the intervals that are as narrow as possible and contain 95 % of the repeats:
    quantile regression, with everything else as it is known (Koenker & Bassett, Econometrica 46, 1978).
    """
    errors = {id(each): _apart_from_runs(each, known) for pair in pairs for each in (pair.a, pair.b)}
    between = np.array([errors[id(pair.a)] ** 2 + errors[id(pair.b)] ** 2 for pair in pairs])
    seconds = np.array([pair.a.rounds[0].seconds for pair in pairs])
    apart, weight = np.array([difference(pair) for pair in pairs]), weights(pairs)
    launches = _LAUNCHES if known.launch_seconds else _LAUNCHES[:1]

    def loss(run: float, launch: float) -> float:
        of_runs = run**2 + (launch / seconds) ** 2
        degrees = known.degrees * (1 + 2 * of_runs / between) ** 2  # as in figure_error
        t = _NORMAL + (_NORMAL**3 + _NORMAL) / 4 / degrees  # Abramowitz & Stegun, 26.7.5
        beyond = apart - t * np.sqrt(2 * of_runs + between)
        return float(weight @ np.maximum(CONFIDENCE * beyond, (CONFIDENCE - 1) * beyond))

    run, launch = min(itertools.product(_RUNS, launches), key=lambda each: loss(*each))
    return replace(known, run=float(run), launch_seconds=float(launch), common=min(known.common, float(run)))


def _apart_from_runs(figure: Figure, known: Repeatability) -> float:
    error = error_of(figure.recalibrated(replace(known, run=0.0, common=0.0, launch_seconds=0.0)).rounds)
    assert error is not None, "figures are calibrated"
    return error.own


def calibration_of(state: tuple[str, str]) -> Repeatability:
    """Of accelerators; the logs of a single CPU make no pairs."""
    return find_calibration("", *state)


def common_of(pairs: Sequence[Pair]) -> float | None:
    """The standard deviation of what all rows of a run share, by the mean difference of runs with many rows."""
    by_runs: dict[Any, list[float]] = collections.defaultdict(list)
    for pair in pairs:
        if pair.a.run < pair.b.run:
            a, b = (combine_rounds(each.rounds)[0] for each in (pair.a, pair.b))
            by_runs[pair.a.card, pair.a.run, pair.b.run].append(float(np.log(b / a)))
    by_card: dict[str, list[float]] = collections.defaultdict(list)
    for (card, _, _), found in by_runs.items():
        if len(found) >= _FEWEST_IN_COMMON:
            by_card[card].append(statistics.median(found) ** 2 - np.pi / 2 * statistics.variance(found) / len(found))
    return float(np.sqrt(max(0.0, np.mean([np.mean(each) for each in by_card.values()])) / 2)) if by_card else None


def fitting_pairs(pairs: Sequence[Pair], state: tuple[str, str]) -> list[Pair]:
    """Rows in burst; ceilings for visits that start anew, for these are only made for ceilings."""
    return [pair for pair in pairs if pair.a.state == state and pair.a.is_ceiling == (state[0] == ANEW)]


def print_fit(pairs: Sequence[Pair]) -> None:
    print("state,operation,visit,run,common,launch_seconds,degrees: pairs, cards")
    for state in sorted({pair.a.state for pair in pairs}):
        own = fitting_pairs(pairs, state)
        if not own:
            continue
        fitted, common = fit(own, calibration_of(state)), common_of(own)
        margin = "-" if common is None else f"{min(common, fitted.run):.5f}"
        values = f"{fitted.visit:g},{fitted.run:.5f},{margin},{fitted.launch_seconds:.2g},{fitted.degrees}"
        print(f"{state[0]},{state[1]},{values}: {len(own)}, {len({pair.a.card for pair in own})}")


def left_out(pairs: Sequence[Pair], group: Sequence[Pair]) -> dict[str, float]:
    """By card, the coverage with constants fitted on all other cards."""
    state, found = group[0].a.state, {}
    training = fitting_pairs(pairs, state) or fitting_pairs(pairs, (SUSTAINED, state[1]))
    for card in sorted({pair.a.card for pair in group}):
        if others := [pair for pair in training if pair.a.card != card]:
            known = _FITTED.setdefault((state, card), fit(others, calibration_of(state)))
            found[card] = statistics.fmean(holds(pair, known) for pair in group if pair.a.card == card)
    return found


_FITTED: dict[Any, Repeatability] = {}


def print_table(pairs: Sequence[Pair]) -> None:
    head = ("figures", "pairs", "cards", "contain the repeat (bootstrap)", "left out: mean (worst card)")
    print(f"| {' | '.join(head)} | mean half-width | of the empirical |")
    print("|---|---|---|---|---|---|---|")
    for name in sorted({pair.a.group for pair in pairs}):
        own = [pair for pair in pairs if pair.a.group == name]
        held, weight = [holds(pair) for pair in own], weights(own)
        covered, width = 100 * float(weight @ held), float(weight @ [half_width(pair.a) for pair in own])
        ends, out = bootstrap(own, held), left_out(pairs, own)
        low, high = (100 * end for end in ends)
        needed = quantile(np.array([difference(pair) for pair in own]), weight, 0.95)
        without = (
            f"{100 * statistics.fmean(out.values()):.1f} % ({100 * min(out.values()):.0f} %)" if out else "one card"
        )
        mark = "" if len(own) >= _FEWEST_PAIRS else " (too few)"
        print(
            f"| {name} | {len(own)}{mark} | {len(out) or 1} | {covered:.1f} % ({low:.1f} to {high:.1f}) | {without} "
            f"| +-{100 * width:.2f} % | {width / needed:.2f} |"
        )


def curse(log: RunLog) -> Iterator[float]:
    """How much higher the best of one half of a find's burst rounds reads there than in the other half, both ways."""
    found: dict[Any, list[float]] = collections.defaultdict(list)
    for row in log.measurements:
        if row.ok and row.regime == BURST and row.phase in (CHOOSE, CONFIRM):
            found[row.shape, row.kernel].append(row.best_rate)
    rounds = [each for each in found.values() if len(each) >= _FEWEST_FOR_HALVES]
    for chosen, other in ((0, 1), (1, 0)) if len(rounds) > 1 else ():
        best = max(rounds, key=lambda each, half=chosen: statistics.median(each[half::2]))  # type: ignore[misc]
        yield statistics.median(best[chosen::2]) / statistics.median(best[other::2]) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+", metavar="LOG or FOLDER")
    parser.add_argument("--fit", action="store_true", help="print calibration constants instead of the table")
    options = parser.parse_args()
    logs = list(logs_below(options.paths))
    pairs = pairs_of(figure for log in logs for figure in figures(log))
    if not pairs:
        raise SystemExit("no two of these runs measured the same on one card: name logs of repeated runs")
    if options.fit:
        print_fit(pairs)
        return
    print_table(pairs)
    if biases := [bias for log in logs if log.plan.is_search for bias in curse(log)]:
        print(f"\nthe winner's curse in burst: {100 * statistics.fmean(biases):+.3f} % over {len(biases)} halves")


if __name__ == "__main__":
    main()
