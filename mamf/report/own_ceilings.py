"""Ceilings as columns: what was confirmed for a problem in a regime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mamf.backend import DeviceInfo
from mamf.ceilings.ceiling import Ceiling
from mamf.logs.records import significant_digits
from mamf.measurement import TERA, Conditions
from mamf.operations.unknown import operation_called
from mamf.report.document import Column, Table, clock_columns, columns_from
from mamf.report.text import interval_cell, label_kernel, percent, rate_name, scaled_unit, significant, whole
from mamf.statistics import Interval

_NAMES = {("matmul", "burst"): " (MAMF)", ("matmul", "sustained"): " (MSMF)"}


def problem_title(regime: str, problem: Any) -> str:
    """A regime and the fields that set a problem apart."""
    return ", ".join([regime, problem.dtype, *operation_called(problem.operation).words(problem)])


def described_title(regime: str, problem: Any) -> str:
    """The same, phrased for reports."""
    return ", ".join([regime, problem.dtype, *operation_called(problem.operation).describe_problem(problem)])


def ceiling_title(ceiling: Ceiling) -> str:
    """``burst (MAMF), bfloat16``."""
    name = _NAMES.get((ceiling.problem.operation, ceiling.regime), "")
    return problem_title(f"{ceiling.regime}{name}", ceiling.problem)


def brief(ceiling: Ceiling) -> dict[str, Any]:
    """A ceiling as the summary of a log holds it."""
    rate = significant_digits(ceiling.rate)
    return {"kernel": ceiling.kernel, "shape": str(ceiling.shape), "rate": rate, "unit": ceiling.unit}


def share_of(rate: float, problem: Any, header: Mapping[str, Any]) -> float | None:
    """A rate as a share of the datasheet's rate for the problem, or None."""
    peak = operation_called(problem.operation).peak(DeviceInfo(**header["device"]), problem)
    return rate * TERA / peak if peak else None


def ceiling_table(ceilings: Sequence[Ceiling], header: Mapping[str, Any]) -> Table[Ceiling]:
    """A row for each ceiling."""
    unit = ceilings[0].unit if ceilings else "TFLOPS"
    shown, factor = scaled_unit(unit, [each.rate for each in ceilings])

    def rate(value: float) -> str:
        return significant(value * factor)

    def interval(of: Interval) -> str:
        return interval_cell(of, factor)

    columns: list[Column[Ceiling]] = [
        Column("ceiling", "ceiling", ceiling_title, left=True),
        Column("operation", "", lambda each: each.problem.operation),
        Column("regime", "", lambda each: each.regime),
        *columns_from(
            ceilings, lambda each: operation_called(each.problem.operation).problem_record(each.problem), titled=False
        ),
        Column(rate_name("rate", unit), shown, lambda each: each.rate, rate),
        Column("", "interval", lambda each: each.interval, interval, 1, True),
        Column(rate_name("rate_low", unit), "", lambda each: each.interval.low),
        Column(rate_name("rate_high", unit), "", lambda each: each.interval.high),
        Column("interval_coverage", "", lambda each: each.interval.coverage),
        Column("shape", "shape", lambda each: str(each.shape), importance=1, left=True),
        *columns_from(
            ceilings, lambda each: operation_called(each.problem.operation).shape_record(each.shape), titled=False
        ),
        Column("kernel", "kernel", lambda each: each.kernel, lambda name: label_kernel(name, header), 2, True),
        Column("share_of_peak", "% of peak", lambda each: share_of(each.rate, each.problem, header), percent, 3),
        Column("rounds", "rounds", lambda each: each.rounds, importance=6),
        Column("ties", "tied", lambda each: len(each.tied), importance=6),
        Column("tied", "", lambda each: " ".join(f"{shape}:{kernel}" for shape, kernel in each.tied)),
        Column("gain_over_default", "", lambda each: each.gain_over_default),
        *clock_columns(lambda each: each.conditions, 3),
        Column("power_watts", "W", lambda each: each.conditions.watts, whole, 4),
        Column("joules_per_tflop", "J/TFLOP", joules_per_tflop, lambda joules: f"{joules:.3f}", 5),
    ]
    return Table(columns, ceilings, key="ceilings", label=ceiling_title)


def clock_text(conditions: Conditions) -> str:
    """The two factors of a rate in words, as far as they are known: ``98 % of the tensor cycles at 1629 MHz``."""
    requested = f"{whole(in_mhz(conditions.clock_hz))} MHz" if conditions.clock_hz else ""
    if not conditions.true_clock_hz:
        return requested and f"{requested} requested"
    used = f"{100 * conditions.cycles_used:.1f} % of the units' cycles at " if conditions.cycles_used else ""
    beside = f" (requested: {requested})" if requested else ""
    return f"{used}{whole(in_mhz(conditions.true_clock_hz))} MHz{beside}"


def joules_per_tflop(ceiling: Ceiling) -> float | None:
    return ceiling.joules_per_tflop if ceiling.unit == "TFLOPS" else None


def in_mhz(clock_hz: float | None) -> float | None:
    return clock_hz and clock_hz / 1e6
