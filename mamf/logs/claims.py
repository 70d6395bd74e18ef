"""Figures of a log as claims that can be measured again. Pure.

Confirmed ceilings of a find are claims as they are: fresh rounds gave their figures. The best rows of other logs were
chosen for being fast, so the number of rows that they were chosen from is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mamf.backend import Backend
from mamf.errors import UsageError
from mamf.logs.comparability import circumstances
from mamf.logs.entries import Entry, entries, fields_of, is_find
from mamf.logs.legacy import FinderRun
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement, group_pairs
from mamf.plans import Claim, Plan, SweepOptions
from mamf.regime_names import BURST, CLASSIC, SUSTAINED
from mamf.statistics import Interval

#: The kernel that a log of mamf-finder times: the default of the library.
DEFAULT_KERNEL = "auto"
#: The regime and the statistic for a figure of mamf-finder. ``stated``: by versions that do not say which.
_OF_FINDER = {
    "mean": (CLASSIC, "mean"),
    "median": (CLASSIC, "median"),
    "fastest": (CLASSIC, "fastest"),
    "stated": (CLASSIC, "mean"),
    "MAMF": (BURST, ""),
    "MSMF": (SUSTAINED, ""),
}


@dataclass(frozen=True)
class Asked:
    """A problem that the device has yet to complete with its defaults. ``fields``: those that the claim names."""

    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """Claims of one operation and how they were measured; ``recorded``: device, software and settings by name.

    ``plan``: of a run log, whose precision, time limit, flushes and launches are measured with.
    """

    name: str
    operation: str
    claims: tuple[Claim, ...]
    recorded: tuple[tuple[str, str], ...] = ()
    chosen_from: int = 1
    plan: Plan | None = None

    @property
    def sweep_options(self) -> SweepOptions:
        """The numbers of launches in classic."""
        options = self.plan and self.plan.options
        return options if isinstance(options, SweepOptions) else SweepOptions()


def source_of_log(log: RunLog, top: int | None = 1) -> Source:
    """``top``: how many rows of each problem and regime, best first; None: all. Raises UsageError for a log without a
    figure that can be measured again.
    """
    if log.counter_records:
        raise UsageError(f"{log.path} is a log of counters, which slow kernels down: give a log of rates")
    ceilings = entries(log, as_ceilings=True) if is_find(log) and top == 1 else []
    found = [each for each in ceilings or entries(log) if each.tflops and each.interval]
    rows = {_key(fields_of(row.step)): row for row in log.measurements if row.ok and not row.is_reference}
    pairs = ((entry, rows.get(_key({**entry.fields, "shape": entry.shape, "kernel": entry.kernel}))) for entry in found)
    groups = group_pairs(((row.regime, row.problem), (entry, row)) for entry, row in pairs if row is not None)
    best = [each for same in groups.values() for each in sorted(same, key=lambda one: -(one[0].tflops or 0.0))[:top]]
    claims = tuple(_claim_of(entry, row) for entry, row in best)
    if not claims:
        raise UsageError(f"{log.path} holds no measured row, so there is nothing to reproduce")
    known = tuple(recorded_circumstances(log.header).items())
    return Source(log.path.name, log.plan.operation, claims, known, 1 if ceilings else len(found), log.plan)


def _key(fields: Mapping[str, object]) -> object:
    return frozenset(fields.items())


def _claim_of(entry: Entry, row: Measurement) -> Claim:
    """The figure of an entry, which a row measured."""
    rate, interval = entry.tflops, entry.interval
    assert rate is not None and interval is not None, "only measured entries are claims"
    around = Interval(min(interval.low, rate), max(interval.high, rate), interval.coverage)  # of the six digits in logs
    return Claim(*row.step, rate, around, error=entry.error, clock_hz=row.conditions.clock_hz)


def source_of_finder(name: str, run: FinderRun, top: int | None = 1) -> Source:
    """The best rows of a log of mamf-finder, by the statistic that most rows have."""
    rows = [row for row in run.rows if row.shape is not None and row.stage in ("", "confirm")]
    rows = rows or [row for row in (*run.rows, *run.best.values()) if row.shape is not None]
    counts = Counter(statistic for row in rows for statistic in row.tflops if statistic in _OF_FINDER)
    if not counts:
        raise UsageError(f"{name} holds no figure with its shape, so there is nothing to reproduce")
    statistic = counts.most_common(1)[0][0]
    figures = {str(row.shape): (row.tflops[statistic], row) for row in rows if row.tflops.get(statistic, 0.0) > 0}
    best = sorted(figures.values(), key=lambda each: -each[0])[:top]
    problem = Asked({"dtype": run.dtype} if run.dtype else {})
    regime, measured = _OF_FINDER[statistic]
    claims = tuple(
        Claim(regime, problem, row.shape, DEFAULT_KERNEL, rate, printed(rate, 0.05), measured) for rate, row in best
    )
    known = {"device": run.device or "", **run.software, **run.variables}
    return Source(name, "matmul", claims, tuple((key, str(value)) for key, value in known.items() if value), len(rows))


def printed(rate: float, half_digit: float) -> Interval:
    """What a printed figure may have been rounded from."""
    return Interval(max(rate - half_digit, rate / 2), rate + half_digit, 1.0)


def recorded_circumstances(header: Mapping[str, Any]) -> dict[str, str]:
    """The device, its software, settings and limits, by name."""
    device, clock = header["device"], header["device"].get("max_clock_hz")
    named = {"device": device["name"], "card": device.get("uuid_hash"), **circumstances(header)}
    named["highest clock"] = clock and f"{clock / 1e6:.0f} MHz"
    return {name: str(value) for name, value in named.items() if value}


def completed(problem: Any, operation: Any, backend: Backend) -> Any:
    """The problem with the defaults of an open device. Raises UsageError for invalid fields."""
    return operation.problem_for(backend, problem.fields) if isinstance(problem, Asked) else problem
