"""Ceilings of an operation other than matmul: what was confirmed of each problem in each regime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mamf.backend import DeviceInfo
from mamf.ceilings.ceiling import Ceiling
from mamf.logs.known import operation_called
from mamf.logs.records import significant_digits
from mamf.measurement import TERA
from mamf.report.text import DASH, by_column, drawing, interval_cell, significant, whole

LEFT_ALIGNED = ("ceiling", "interval", "shape", "kernel")


def problem_title(regime: str, problem: Any) -> str:
    """A regime and what sets a problem apart."""
    return ", ".join([regime, problem.dtype, *operation_called(problem.operation).words(problem)])


def brief(ceiling: Ceiling) -> dict[str, Any]:
    """A ceiling as the summary of a log holds it."""
    rate = significant_digits(ceiling.rate)
    return {"kernel": ceiling.kernel, "shape": str(ceiling.shape), "rate": rate, "unit": ceiling.unit}


def share_of(rate: float, problem: Any, header: Mapping[str, Any]) -> float | None:
    """A rate as a share of what the datasheet gives for the problem, or None."""
    peak = operation_called(problem.operation).peak(DeviceInfo(**header["device"]), problem)
    return rate * TERA / peak if peak else None


def flat_ceiling(ceiling: Ceiling, header: Mapping[str, Any]) -> dict[str, Any]:
    """A ceiling as named columns."""
    clock = ceiling.conditions.clock_hz
    return {
        "operation": ceiling.problem.operation,
        "regime": ceiling.regime,
        **operation_called(ceiling.problem.operation).problem_record(ceiling.problem),
        **brief(ceiling),
        "interval_low": ceiling.interval.low,
        "interval_high": ceiling.interval.high,
        "interval_coverage": ceiling.interval.coverage,
        "rounds": ceiling.rounds,
        "gain_over_default": ceiling.gain_over_default,
        "tied": " ".join(f"{shape}:{kernel}" for shape, kernel in ceiling.tied),
        "clock_mhz": clock and clock / 1e6,
        "watts": ceiling.conditions.watts,
        "share_of_peak": share_of(ceiling.rate, ceiling.problem, header),
    }


def cells(ceiling: Ceiling, header: Mapping[str, Any]) -> dict[str, str]:
    """A ceiling by column, in the columns' order of importance."""
    share = share_of(ceiling.rate, ceiling.problem, header)
    return {
        "ceiling": problem_title(ceiling.regime, ceiling.problem),
        ceiling.unit: significant(ceiling.rate),
        "interval": interval_cell(ceiling.interval),
        "shape": str(ceiling.shape),
        "kernel": ceiling.kernel,
        "% of peak": DASH if share is None else f"{100 * share:.1f}",
        "rounds": str(ceiling.rounds),
        "tied": str(len(ceiling.tied)),
        "W": whole(ceiling.conditions.watts),
    }


def ceilings_text(ceilings: Sequence[Ceiling], header: Mapping[str, Any], format: str, width: int | None = None) -> str:
    """The table of them."""
    columns, lines = by_column(cells(each, header) for each in ceilings)
    return drawing(format, width)(columns, lines, LEFT_ALIGNED)
