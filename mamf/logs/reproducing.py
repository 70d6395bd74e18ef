"""Figures of logs as claims that can be measured again, and the verdict on each. Pure.

The ceilings of a find are claims as they are: fresh rounds gave their figures. The best rows of other logs were chosen
for being fast, so verdicts count how many rows they were chosen from. A claim and its visits here are two runs, which
scatter as calibrated; a printed figure is taken as a run like the one here. Visits of a claim have the phase
``confirm`` and are numbered. Visits in another setting have its name as the phase, and as the round the claim's number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from mamf.ceilings.ceiling import CONFIRM, summarize_conditions
from mamf.errors import UsageError
from mamf.logs.comparability import Difference, circumstances, value_differences
from mamf.logs.compare import Pair
from mamf.logs.entries import Entry, entries, fields_of, is_find, visited_entry
from mamf.logs.legacy import FinderRun
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement, group_pairs
from mamf.plans import KERNEL_REGIMES, MATMUL, Claim, Plan, ReproduceOptions, StepKey
from mamf.regime_names import BURST, CLASSIC, SUSTAINED
from mamf.statistics import Interval

#: A step in which a claim may have been measured, whether caches are flushed, and whether classic warms up.
Setting = tuple[StepKey, bool, bool]
#: The kernel of a claim that names none: the library's own.
DEFAULT_KERNEL = "auto"
REPRODUCED, UNDECIDED, NOT_MEASURED = "reproduced", "undecided", "not measured"
#: By what ``mamf compare`` says of such a pair.
_VERDICTS = {"SAME": REPRODUCED, "FASTER": "faster", "SLOWER": "slower", "UNDECIDED": UNDECIDED}
#: How mamf-finder measured its figures, by their names. ``stated``: of versions that do not say which.
_OF_FINDER = {
    "mean": (CLASSIC, "mean"),
    "median": (CLASSIC, "median"),
    "fastest": (CLASSIC, "fastest"),
    "stated": (CLASSIC, "mean"),
    "MAMF": (BURST, ""),
    "MSMF": (SUSTAINED, ""),
}
# Half the width of a 95 % interval in standard deviations; clocks that differ by less are equal.
_NORMAL, _SAME_CLOCK = 1.96, 0.005


def claims_of_log(log: RunLog, top: int | None = 1) -> ReproduceOptions:
    """``top``: how many rows of each problem and regime, best first; None: all. Raises UsageError for a log without a
    figure to measure again.
    """
    ceilings = entries(log, as_ceilings=True) if is_find(log) and top == 1 else []
    rows = {frozenset(fields_of(row.step).items()): row for row in log.measurements if row.ok and not row.is_reference}
    claims = [
        Claim(row.step, entry.tflops, entry.interval, error=entry.error, clock_hz=row.conditions.clock_hz)
        for entry in (ceilings or entries(log) if not log.counter_records else ())
        if entry.tflops and entry.interval and entry.interval.low > 0
        if (row := rows.get(frozenset({**entry.fields, "shape": entry.shape, "kernel": entry.kernel}.items())))
    ]
    groups = group_pairs((claim.step[:2], claim) for claim in sorted(claims, key=lambda each: -each.rate))
    if not claims:
        raise UsageError(f"{log.path} holds no measured rate of {log.plan.operation}, so nothing can be reproduced")
    best = tuple(claim for same in groups.values() for claim in same[:top])
    recorded = tuple(_circumstances_of(log.header).items())
    return ReproduceOptions(best, log.path.name, recorded, 1 if ceilings else len(claims))


def claims_of_finder(name: str, run: FinderRun, top: int | None = 1) -> ReproduceOptions:
    """The best rows of a log of mamf-finder, by the statistic that most rows have. Their problems are fields that the
    device completes.
    """
    rows = [row for row in (*run.rows, *run.best.values()) if row.shape is not None and row.stage in ("", "confirm")]
    counts = Counter(each for row in rows for each in row.tflops if each in _OF_FINDER)
    if not counts:
        raise UsageError(f"{name} holds no rate with its shape, so nothing can be reproduced")
    statistic = counts.most_common(1)[0][0]
    rates = {row.shape: row.tflops[statistic] for row in rows if row.tflops.get(statistic, 0.0) > 0.05}
    (regime, measured), problem = _OF_FINDER[statistic], {"dtype": run.dtype} if run.dtype else {}
    claims = tuple(
        Claim((regime, problem, shape, DEFAULT_KERNEL), rate, Interval(rate - 0.05, rate + 0.05, 1.0), measured)
        for shape, rate in sorted(rates.items(), key=lambda each: -each[1])[:top]
    )
    recorded = {"device": run.device or "unknown", **run.software}.items()
    return ReproduceOptions(claims, name, tuple(recorded), len(rows))


def _circumstances_of(header: Mapping[str, Any]) -> dict[str, str]:
    # The device, its software, settings and limits, by name.
    device, clock = header["device"], header["device"].get("max_clock_hz")
    return {
        "device": device["name"],
        "card": device.get("uuid_hash") or "unknown",
        **circumstances(header),
        **({"highest clock": f"{clock / 1e6:.0f} MHz"} if clock else {}),
    }


def settings_of(claim: Claim, plan: Plan, kernels: Iterable[str]) -> dict[str, Setting]:
    """What may explain that a claim is not reproduced, by name; each differs from the claim in one thing.

    ``kernels``: all of the run, of which those without a claim are meant by an ambiguous name.
    """
    (regime, problem, shape, kernel), flush = claim.step, plan.flush
    data, claimed = getattr(problem, "data", None), {each.step[3] for each in plan.options.claims}
    operands: dict[str, Setting] = {}
    for each in [each for each in ("zeros", "normal") if data not in (None, each)]:
        with suppress(UsageError):  # an operation may have one kind of data
            operands[f"data {each}"] = (regime, replace(problem, data=each), shape, kernel), flush, True
    caches, loop = f"caches {'warm' if flush else 'flushed'}", [CLASSIC] if plan.operation == MATMUL else []
    return {
        **({caches: (claim.step, not flush, True)} if regime == BURST else {}),
        **operands,
        **{f"kernel {each}": ((regime, problem, shape, each), flush, True) for each in kernels if each not in claimed},
        **{each: ((each, *claim.step[1:]), flush, True) for each in (*KERNEL_REGIMES, *loop) if each != regime},
        **{f"{each} without warm-up": ((each, *claim.step[1:]), flush, False) for each in loop},
    }


@dataclass(frozen=True)
class Judged:
    """A claim and its figure here, as recorded or in another setting, by ``name``. ``here``: None if it was not tried;
    ``pair``: None without a figure. ``settings``: those that were measured too.
    """

    claim: Claim
    tolerance: float
    name: str
    settings: tuple[Judged, ...]
    here: Entry | None
    pair: Pair | None = None
    clock_hz: float | None = None

    @property
    def verdict(self) -> str:
        return NOT_MEASURED if self.pair is None else _VERDICTS[self.pair.verdict(self.tolerance)]

    @property
    def is_slower(self) -> bool:
        # Surely, and by more than the tolerance.
        return self.pair is not None and self.pair.is_regression(self.tolerance)

    @property
    def matching(self) -> list[str]:
        # The settings in which the ratio may be 1, the closest first.
        found = {
            each.name: each.pair.ratio
            for each in self.settings
            if each.pair and each.pair.interval.low <= 1 <= each.pair.interval.high
        }
        return sorted(found, key=lambda name: abs(math.log(found[name])))


def judge_claims(options: ReproduceOptions, rows: Sequence[Measurement]) -> list[Judged]:
    """The verdict on each claim, in their order. ``rows``: of a reproduction, as far as it is."""
    found = []
    for number, claim in enumerate(options.claims, start=1):
        visits = [row for row in rows if row.phase == CONFIRM and row.step == claim.step]
        others = [row for row in rows if row.phase != CONFIRM and row.round == number]
        settings = [_judge_visits(options, claim, [row], row.phase) for row in others]
        found.append(_judge_visits(options, claim, visits, "", tuple(settings)))
    return found


def _judge_visits(
    options: ReproduceOptions, claim: Claim, visits: Sequence[Measurement], name: str, settings: tuple[Judged, ...] = ()
) -> Judged:
    here = visited_entry([replace(row, phase=CONFIRM) for row in visits]) if visits else None
    judged = Judged(claim, options.tolerance, name, settings, here)
    if here is None or here.tflops is None or here.interval is None or here.error is None:
        return judged
    ok = [row for row in visits if row.ok]
    share = median(row.rate(claim.statistic or row.figure) / row.rate(row.figure) for row in ok)
    interval = replace(here.interval, low=here.interval.low * share, high=here.interval.high * share)
    scatter = math.hypot(here.error.own, claim.interval.half_width / claim.rate / _NORMAL)
    error = claim.error or replace(here.error, own=scatter)
    here = replace(here, tflops=here.tflops * share, interval=interval)
    there = replace(here, kernel=claim.step[3], tflops=claim.rate, interval=claim.interval, error=error)
    pair = Pair(here.fields, there, here, rows=max(options.chosen_from, len(options.claims)))
    return replace(judged, here=here, pair=pair, clock_hz=summarize_conditions(ok).clock_hz)


def differences_here(
    options: ReproduceOptions, judged: Iterable[Judged], header: Mapping[str, Any]
) -> list[Difference]:
    """What the claims record of their run and is different in the run here."""
    recorded, here = dict(options.recorded), _circumstances_of(header)
    # Another tool prints some of it.
    known = {name: value for name, value in here.items() if "mamf" in recorded or name in recorded}
    clocks = [
        Difference(f"clock in {each.claim.step[0]}", f"{then / 1e6:.0f} MHz", f"{now / 1e6:.0f} MHz")
        for each in judged
        if (then := each.claim.clock_hz) and (now := each.clock_hz) and abs(now / then - 1) > _SAME_CLOCK
    ]
    return [*value_differences(recorded, known), *clocks]
