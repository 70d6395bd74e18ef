"""Ceilings, how they were found and how sure they are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mamf.ceilings.ceiling import CHOOSE, Ceiling, figures, median_rate, why_hopeless
from mamf.logs.records import significant_digits
from mamf.machine.peaks import find_peak
from mamf.measurement import TERA, Measurement
from mamf.report.own_ceilings import share_of
from mamf.report.sweeps import flat_row, title_lines
from mamf.report.text import DASH, WHY_UNKNOWN, csv_text, drawing, interval_cell, prose, significant, whole

_NAMES = {"burst": "MAMF", "sustained": "MSMF"}
COLUMNS = (
    "ceiling",
    "TFLOPS",
    "interval",
    "MxNxK",
    "kernel",
    "tied",
    "MHz",
    "W",
    "J/TFLOP",
    "% of peak",
    "FLOP/cycle/unit",
)
LEFT_ALIGNED = ("ceiling", "interval", "MxNxK", "kernel")
_SHOWN_TIES = 5


def find_summary_record(
    rows: Sequence[Measurement], ceilings: Mapping[str, Ceiling], status: str, reason: str, elapsed_seconds: float
) -> dict[str, Any]:
    """The last record of a find's log: what was done, and the ceilings in short."""
    return {
        "status": status,
        "reason": reason,
        "measured": sum(row.ok for row in rows),
        "left": 0,
        "elapsed_seconds": round(elapsed_seconds, 3),
        "phases": dict(Counter(f"{row.regime} {row.phase}" for row in rows)),
        "best": {
            regime: {"shape": str(each.shape), "kernel": each.kernel, "tflops": significant_digits(each.tflops)}
            for regime, each in ceilings.items()
        },
    }


def flop_per_cycle_per_unit(ceiling: Ceiling, header: Mapping[str, Any]) -> float | None:
    """FLOP per clock cycle and compute unit at the clock seen while it was measured."""
    units, clock = header["device"]["compute_units"], ceiling.conditions.clock_hz
    return ceiling.tflops * TERA / clock / units if units and clock else None


def flat_ceiling(ceiling: Ceiling, header: Mapping[str, Any]) -> dict[str, Any]:
    """A ceiling as named columns."""
    share = share_of(ceiling.tflops, ceiling.problem, header)
    return {
        "regime": ceiling.regime,
        "dtype": ceiling.problem.dtype,
        "out_dtype": ceiling.problem.out_dtype,
        "tflops": ceiling.tflops,
        "interval_low": ceiling.interval.low,
        "interval_high": ceiling.interval.high,
        "interval_coverage": ceiling.interval.coverage,
        "rounds": ceiling.rounds,
        "m": ceiling.shape.m,
        "n": ceiling.shape.n,
        "k": ceiling.shape.k,
        "kernel": ceiling.kernel,
        "gain_over_default": ceiling.gain_over_default,
        "tied": " ".join(f"{shape}:{kernel}" for shape, kernel in ceiling.tied),
        "clock_mhz": ceiling.conditions.clock_hz and ceiling.conditions.clock_hz / 1e6,
        "watts": ceiling.conditions.watts,
        "joules_per_tflop": ceiling.joules_per_tflop,
        "share_of_peak": share,
        "flop_per_cycle_per_unit": flop_per_cycle_per_unit(ceiling, header),
    }


def cells(ceiling: Ceiling, header: Mapping[str, Any]) -> list[str]:
    share, per_cycle = share_of(ceiling.tflops, ceiling.problem, header), flop_per_cycle_per_unit(ceiling, header)
    joules = ceiling.joules_per_tflop
    clock = ceiling.conditions.clock_hz
    return [
        f"{ceiling.regime} ({name})" if (name := _NAMES.get(ceiling.regime)) else ceiling.regime,
        significant(ceiling.tflops),
        interval_cell(ceiling.interval),
        str(ceiling.shape),
        ceiling.kernel,
        str(len(ceiling.tied)),
        whole(clock and clock / 1e6),
        whole(ceiling.conditions.watts),
        DASH if joules is None else f"{joules:.3f}",
        DASH if share is None else f"{100 * share:.1f}",
        DASH if per_cycle is None else f"{per_cycle:.0f}",
    ]


def notes(ceiling: Ceiling, rows: Iterable[Measurement], header: Mapping[str, Any]) -> list[str]:
    """What stands behind a ceiling, in lines."""
    rows = list(rows)
    lines = [f"{ceiling.regime}: {_interval_note(ceiling)}"]
    if ceiling.tied:
        shown = ", ".join(f"{shape} ({kernel})" for shape, kernel in ceiling.tied[:_SHOWN_TIES])
        more = len(ceiling.tied) - _SHOWN_TIES
        lines.append(f"    tied with {shown}" + (f" and {more} more" if more > 0 else ""))
    if ceiling.gain_over_default is not None:
        lines.append(
            f"    {ceiling.kernel} gains {100 * ceiling.gain_over_default:+.1f} % over the default kernel there"
        )
    lines += _default_note(ceiling, rows)
    peak = find_peak(header["device"]["name"], ceiling.problem.dtype, header["device"]["compute_units"])
    if peak is not None:
        lines.append(f"    peak: {peak.flops / TERA:g}, dense {peak.dtype} of {peak.origin}")
    if ceiling.conditions.throttle_reasons:
        lines.append(f"    throttled by {', '.join(ceiling.conditions.throttle_reasons)}")
    phases = Counter(row.phase for row in rows if row.regime == ceiling.regime)
    told = (f"{count} {_PHASES.get(phase, phase or 'others')}" for phase, count in phases.items())
    lines.append(f"    found by {', '.join(told)}")
    return lines


def _default_note(ceiling: Ceiling, rows: Iterable[Measurement]) -> list[str]:
    """What the library's default gives at its own best, where another kernel is the ceiling's: it is what scouts."""
    rows = list(rows)
    default = next((row.kernel for row in rows if row.phase == "scout"), ceiling.kernel)
    choosing = (row for row in rows if (row.regime, row.phase, row.kernel) == (ceiling.regime, CHOOSE, default))
    rates = {shape: median_rate(rounds.values()) for (shape, _), rounds in figures(choosing).items()}
    if default == ceiling.kernel or not rates:
        return []
    best = max(rates, key=rates.__getitem__)
    return [f"    the default kernel, {default}, gives {significant(rates[best])} TFLOPS at its best, {best}"]


def _interval_note(ceiling: Ceiling) -> str:
    coverage, known = f"{100 * ceiling.interval.coverage:.0f} %", ceiling.repeatability
    if known is None:
        return f"the interval covers the median of {ceiling.rounds} rounds with {coverage}"
    if not ceiling.interval.is_known:
        return WHY_UNKNOWN
    return f"{coverage} repeat interval, from {ceiling.rounds} fresh rounds and {100 * known.run:.2g} % between runs"


_PHASES = {
    "scout": "scouts",
    "refine": "refinements",
    "algorithm": "trials of algorithms",
    "visit": "short visits",
    "choose": "trials of the best",
    "confirm": "confirmations",
}


def scouted(rows: Sequence[Measurement], ceilings: Mapping[str, Ceiling]) -> list[str]:
    """The best of a regime that was not confirmed: named as what it is."""
    lines = []
    for regime in dict.fromkeys(row.regime for row in rows):
        seen = [row for row in rows if row.regime == regime and row.ok]
        if regime not in ceilings and seen:
            best = max(seen, key=lambda row: row.best_rate)
            figure = significant(best.best_rate)
            lines.append(f"{regime}: not confirmed; scouted so far {figure} TFLOPS @ {best.shape} ({best.kernel})")
    return lines


def as_text(
    rows: Sequence[Measurement],
    ceilings: Mapping[str, Ceiling],
    header: Mapping[str, Any],
    summary: Mapping[str, Any] | None,
    format: str,
    width: int | None,
) -> str:
    lines = [cells(ceiling, header) for ceiling in ceilings.values()]
    shown = drawing(format, width)(COLUMNS, lines, LEFT_ALIGNED) if lines else ""
    told = [line for ceiling in ceilings.values() for line in notes(ceiling, rows, header)]
    failures = Counter(row.status for row in rows if not row.ok)
    if reason := why_hopeless(rows):
        told.append(f"no ceiling can be found: {reason}")
    told += [*scouted(rows, ceilings), *(f"{status}: {count}" for status, count in failures.items())]
    if summary is None:
        told.append("killed: the log has no summary; resume it")
    else:
        reason = f": {summary['reason']}" if summary["reason"] else ""
        told.append(
            f"{summary['status']}{reason}; {summary['measured']} measurements in {summary['elapsed_seconds']:.1f} s"
        )
    return f"{prose(title_lines(header), format)}\n{shown}\n{prose(told, format)}"


def render_find(
    format: str,
    rows: Sequence[Measurement],
    ceilings: Mapping[str, Ceiling],
    header: Mapping[str, Any],
    summary: Mapping[str, Any] | None,
    width: int | None = None,
) -> str:
    """A find in one of mamf.report.FORMATS; csv has a line a ceiling, json everything. ``width``: of the terminal, None
    for all columns.
    """
    if format == "csv":
        return csv_text([flat_ceiling(ceiling, header) for ceiling in ceilings.values()])
    if format == "json":
        content = {
            "header": header,
            "ceilings": [flat_ceiling(ceiling, header) for ceiling in ceilings.values()],
            "measurements": [{**flat_row(row), "phase": row.phase, "round": row.round} for row in rows],
            "summary": summary,
        }
        return json.dumps(content, indent=2) + "\n"
    return as_text(rows, ceilings, header, summary, format, width)
