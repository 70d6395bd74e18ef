"""Matmul measurements of a sweep."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mamf.ceilings.roof import Roofs
from mamf.logs.records import significant_digits
from mamf.machine.peaks import find_peak
from mamf.measurement import Measurement
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.report.accuracy import accuracy_remarks
from mamf.report.devices import device_cells, device_lines, device_remark, drift_lines, flat_device
from mamf.report.layers import layer_column
from mamf.report.shares import flat_share, share_cells
from mamf.report.text import (
    DASH,
    WHY_UNKNOWN,
    by_column,
    csv_text,
    drawing,
    end_line,
    half_width_cell,
    interval_cell,
    prose,
    significant,
    whole,
    why_unknown,
)
from mamf.statistics import arithmetic_mean, geometric_mean


@dataclass(frozen=True)
class Best:
    """The best of a regime, and what the regime's shapes give on the whole; of several devices as the first does."""

    row: Measurement
    arithmetic_mean: float
    geometric_mean: float
    shapes: int


def ranked(rows: Iterable[Measurement]) -> list[Measurement]:
    """Rows that count, best first: measured, and no reference visits."""
    return sorted((row for row in rows if row.ok and not row.is_reference), key=lambda row: row.rank, reverse=True)


def bests(rows: Sequence[Measurement]) -> dict[str, Best]:
    """The best of each regime, in the order the regimes were measured."""
    found: dict[str, Best] = {}
    for regime in dict.fromkeys(row.regime for row in rows):
        if best_first := ranked(row for row in rows if row.regime == regime):
            figures = [row.comparable_rate for row in best_first]
            found[regime] = Best(best_first[0], arithmetic_mean(figures), geometric_mean(figures), len(figures))
    return found


def summary_record(
    rows: Sequence[Measurement], status: str, reason: str, elapsed_seconds: float, left: int
) -> dict[str, Any]:
    """The last record of a run log: everything in it can be recomputed from the measurements before it."""
    return {
        "status": status,
        "reason": reason,
        "measured": sum(row.ok and not row.is_reference for row in rows),
        "left": left,
        "elapsed_seconds": round(elapsed_seconds, 3),
        "best": {
            regime: {
                "shape": str(best.row.shape),
                "tflops": significant_digits(best.row.best_rate),
                **flat_device(best.row),
                "best_by": best.row.best_by,
                "arithmetic_mean_tflops": significant_digits(best.arithmetic_mean),
                "geometric_mean_tflops": significant_digits(best.geometric_mean),
                "shapes": best.shapes,
            }
            for regime, best in bests(rows).items()
        },
    }


def flat_row(row: Measurement, roofs: Roofs | None = None) -> dict[str, Any]:
    """One measurement as columns with their units in the name; None where there is no figure. ``roofs``: that it is a
    share of.
    """
    measured = row.summary is not None
    interval = row.rate_interval if measured else None
    return {
        "regime": row.regime,
        "m": row.shape.m,
        "n": row.shape.n,
        "k": row.shape.k,
        "kernel": row.kernel,
        **flat_device(row),
        "dtype": row.problem.dtype,
        "out_dtype": row.problem.out_dtype,
        "layout": row.problem.layout,
        "data": row.problem.data,
        "status": row.status,
        "reason": row.reason,
        "tflops_mean": row.tflops("mean") if measured else None,
        "tflops_median": row.tflops("median") if measured else None,
        "tflops_fastest": row.tflops("fastest") if measured else None,
        "tflops_interval_low": interval and interval.low,
        "tflops_interval_high": interval and interval.high,
        **flat_share(row, roofs),
        "launches": row.launches,
        "clock_mhz": None if row.conditions.clock_hz is None else row.conditions.clock_hz / 1e6,
        "watts": row.conditions.watts,
        "celsius": row.conditions.celsius,
        "throttle_reasons": " ".join(row.conditions.throttle_reasons),
        "implausible_samples": len(row.implausible_samples),
        "relative_error": row.error,
        "is_reference": row.is_reference,
        **{name: row.details[name] for name in ("quantization_error",) if name in row.details},
    }


def flat_rows(
    rows: Sequence[Measurement], header: Mapping[str, Any], roofs: Roofs | None = None
) -> list[dict[str, Any]]:
    """Rows of equal columns, with the layer of each in a run that has layers."""
    found = [{**flat_row(row, roofs), **layer_column(row, header)} for row in rows]
    names = dict.fromkeys(name for row in found for name in row)
    return [{name: row.get(name) for name in names} for row in found]


COLUMNS = ("regime", "MxNxK", "median", "+-%", "mean", "fastest", "launches", "MHz", "W", "C", "error", "remarks")
LEFT_ALIGNED = ("regime", "MxNxK", "remarks")


def cells(row: Measurement) -> list[str]:
    """One measurement as the cells of COLUMNS."""
    conditions = row.conditions
    median, half_width, mean, fastest = [DASH] * 4
    if row.summary is not None:
        median, mean, fastest = (significant(row.tflops(name)) for name in ("median", "mean", "fastest"))
        half_width = half_width_cell(row.interval, row.seconds)
    return [
        row.regime,
        str(row.shape),
        median,
        half_width,
        mean,
        fastest,
        str(row.launches),
        whole(conditions.clock_hz and conditions.clock_hz / 1e6),
        whole(conditions.watts),
        whole(conditions.celsius),
        DASH if row.error is None else f"{row.error:.1e}",
        remarks(row),
    ]


def columns_of(
    rows: Iterable[Measurement], header: Mapping[str, Any], roofs: Roofs | None
) -> tuple[Sequence[str], list[list[str]]]:
    """Columns and cells; devices and shares of roofs, where there are, stand after the interval, layers last."""
    place = COLUMNS.index("mean")
    found = []
    for row in rows:
        named = list(zip(COLUMNS, cells(row), strict=True))
        named[place:place] = [*device_cells(row).items(), *share_cells(row, roofs).items()]
        found.append(dict(named) | layer_column(row, header))
    return by_column(found)


def remarks(row: Measurement) -> str:
    """What a reader must know about a row beside its figures."""
    parts = [] if row.ok else [f"{row.status}: {row.reason}"]
    parts += [*row.conditions.throttle_reasons, *row.remarks, *accuracy_remarks(row), *why_unknown(row)]
    if row.is_reference:
        parts.append("reference")
    if "quantization_error" in row.details:
        parts.append(f"quantization error {row.details['quantization_error']:.1e}")
    if row.implausible_samples:
        parts.append(f"{len(row.implausible_samples)} implausible samples left out")
    return ", ".join(parts)


def title_lines(header: Mapping[str, Any]) -> list[str]:
    """What was measured on what."""
    device, problem = header["device"], MatmulProblem(**header["plan"]["problem"])
    known = [
        f"{device['compute_units']} compute units" if device["compute_units"] else "",
        f"{device['power_limit_watts']:.0f} W limit" if device["power_limit_watts"] else "",
        f"driver {device['driver']}" if device["driver"] else "",
        f"torch {header['environment']['packages'].get('torch', 'unknown')}",
        f"timed by {header['timer']}",
    ]
    fast = ", fast accumulation" if problem.fast_accumulation else ""
    return [
        f"{device['name']} ({device['backend']}:{device['index']}): {', '.join(filter(None, known))}",
        f"{header['kernel']} {problem.dtype} -> {problem.out_dtype}{fast}, layout {problem.layout}, "
        f"{problem.data} data, seed {problem.seed}",
    ]


def summary_lines(
    rows: Sequence[Measurement], header: Mapping[str, Any], summary: Mapping[str, Any] | None
) -> list[str]:
    """The best by regime with what it was taken under, means over shapes, drift, and how the run ended."""
    lines: list[str] = []
    for regime, best in bests(rows).items():
        means = f"arithmetic {significant(best.arithmetic_mean)}, geometric {significant(best.geometric_mean)} TFLOPS"
        lines += [*_best_lines(regime, best, header), f"mean {regime} over {best.shapes} shapes: {means}"]
        lines += drift_lines([row for row in rows if row.regime == regime and row.is_reference])
    if not lines:
        lines.append("nothing was measured")
    return [*lines, *_failure_lines(rows), end_line(summary)]


def _best_lines(regime: str, best: Best, header: Mapping[str, Any]) -> list[str]:
    row, device = best.row, header["device"]
    lines = [f"best {regime}: {significant(row.best_rate)} TFLOPS ({row.best_by}) @ {row.shape}, {interval_text(row)}"]
    peak = find_peak(device["name"], row.problem.dtype, device["compute_units"])
    shares = []
    if peak is not None:
        share = 100 * row.best_rate * 1e12 / peak.flops
        shares.append(f"{share:.1f} % of {peak.flops / 1e12:g}, the dense {peak.dtype} peak of {peak.origin}")
    conditions = row.conditions
    shares += [f"{whole(conditions.clock_hz / 1e6)} MHz"] if conditions.clock_hz else []
    shares += [f"{whole(conditions.watts)} W"] if conditions.watts else []
    shares += [f"{whole(conditions.celsius)} C"] if conditions.celsius else []
    shares += filter(None, (device_remark(row), remarks(row)))
    return lines + ([f"    {'; '.join(shares)}"] if shares else [])


def interval_text(row: Measurement) -> str:
    """The interval, and what it is of."""
    interval = row.rate_interval
    bounds, coverage = interval_cell(interval), f"{100 * interval.coverage:.0f} %"
    if row.repeatability is None:
        return f"{coverage} interval of the {row.figure} {bounds}, within this visit"
    return f"{coverage} repeat interval: {bounds}" if interval.is_known else WHY_UNKNOWN


def _failure_lines(rows: Sequence[Measurement]) -> list[str]:
    """How many shapes have no figure, by status, with the first's reason."""
    first = {row.status: row for row in reversed(rows) if not row.ok}
    counts = Counter(row.status for row in rows if not row.ok)
    return [
        f"{status}: {count} {'shape' if count == 1 else 'shapes'}, {first[status].shape}: {first[status].reason}"
        for status, count in counts.items()
    ]


def render(
    format: str,
    rows: Sequence[Measurement],
    header: Mapping[str, Any],
    summary: Mapping[str, Any] | None,
    top: int | None = None,
    width: int | None = None,
    roofs: Roofs | None = None,
) -> str:
    """A run in one of mamf.report.FORMATS. ``top``: so many of the best rows of each regime (table, markdown);
    ``width``: of the terminal, None for all columns; ``roofs``: that rows are shares of.
    """
    if format == "csv":
        return csv_text(flat_rows(rows, header, roofs))
    if format == "json":
        content = {"header": header, "measurements": flat_rows(rows, header, roofs), "summary": summary}
        return json.dumps(content, indent=2) + "\n"
    shown = list(rows) if top is None else chosen(rows, top)
    names, lines = columns_of(shown, header, roofs)
    table = drawing(format, width)(names, lines, (*LEFT_ALIGNED, "bound by", "layer")) if shown else ""
    hidden = sum(not row.is_reference for row in rows) - len(shown)
    more = f"... and {hidden} more in the log (--top all shows them)\n" if hidden > 0 else ""
    head, foot = (
        prose([*title_lines(header), *device_lines(rows, header)], format),
        prose(summary_lines(rows, header, summary), format),
    )
    return f"{head}\n{table}{more}\n{foot}"


def chosen(rows: Sequence[Measurement], top: int) -> list[Measurement]:
    """The best ``top`` rows of each regime, best first."""
    return [row for regime in bests(rows) for row in ranked(r for r in rows if r.regime == regime)[:top]]
