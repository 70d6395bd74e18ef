"""Counters as table, csv, json and markdown: a line a launch, one for each of its kernels, and what bounds it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mamf.counters.bounds import bound, short_name
from mamf.counters.counts import Counts, DeviceKernel
from mamf.counters.log import Counted, step_of
from mamf.counters.metrics import (
    BLOCKS,
    INSTRUCTIONS,
    L1_HIT,
    L2_HIT,
    MOST_WARPS,
    REGISTERS,
    SHARED_MEMORY,
    TENSOR,
    WARPS,
)
from mamf.counters.ranking import disagreements
from mamf.counters.roofs import COMPUTE, Roof
from mamf.logs.known import operation_called
from mamf.measurement import TERA, Measurement
from mamf.report.own_ceilings import problem_title
from mamf.report.text import DASH, by_column, csv_text, drawing, end_line, machine_line, prose, significant, told_once

_LEFT = ("kernel", "limited by", "ran")
PREPARING, DETERMINISM, CONFIGURATION = "preparing", "determinism", "configuration"
#: What a table has where it is asked for; csv and json have it always.
COLUMNS = (PREPARING, DETERMINISM, CONFIGURATION)


def render_counters(
    format: str,
    rows: Sequence[Measurement],
    counted: Counted,
    header: Mapping[str, Any],
    summary: Mapping[str, Any] | None,
    width: int | None = None,
    columns: Collection[str] = (),
) -> str:
    """A run in one of mamf.report.FORMATS. ``rows``: its bursts. ``width``: of the terminal, None for all columns;
    ``columns``: of COLUMNS, in tables too.
    """
    steps = {step_of(row): row for row in rows if not row.is_reference}
    if format == "csv":
        return csv_text(flat_rows(steps, counted))
    if format == "json":
        told = {"roofs": [vars(roof) for roof in counted.roofs], "counters": flat_rows(steps, counted)}
        return json.dumps({"header": header, **told, "summary": summary}, indent=2) + "\n"
    groups: dict[tuple[Any, Any], list[Measurement]] = {}
    for row in steps.values():
        groups.setdefault((row.problem, row.shape), []).append(row)
    parts = [_group(format, each, counted, width, columns) for each in groups.values()]
    counts_flop = any(row.work.unit == "TFLOPS" for row in steps.values())
    parts = [part.rstrip("\n") + "\n" for part in parts]
    return "\n".join([prose(_head(counted, header, counts_flop), format), *parts, prose([end_line(summary)], format)])


def _head(counted: Counted, header: Mapping[str, Any], counts_flop: bool) -> Iterator[str]:
    yield f"hardware counters by ncu, of {machine_line(header)}"
    for roof in counted.roofs:
        rate = f"{significant(roof.rate / TERA)} {'TFLOPS' if roof.of == COMPUTE else 'TB/s'}"
        yield f"{roof.of} roof: {rate}, {roof.told}"
    if counts_flop and not any(roof.of == COMPUTE for roof in counted.roofs):
        yield "no MAMFU: no ceiling was measured here ('mamf find', or --ceiling LOG)"


def _group(
    format: str, rows: Sequence[Measurement], counted: Counted, width: int | None, asked: Collection[str]
) -> str:
    """All kernels of a shape and problem."""
    found = {each.kernel: each for each in counted.counts if (each.problem, each.shape) == _what(rows[0])}
    reference = next((each.median_cycles for row in rows if (each := found.get(row.kernel)) and each.cycles), None)
    lines = [line for row in rows for line in _lines(row, found.get(row.kernel), counted, reference, asked)]
    columns, cells = by_column(lines)
    title = f"{problem_title(rows[0].regime, rows[0].problem)}, {rows[0].shape}"
    notes = [*_bounds(rows, found, counted), *disagreements(rows, found)]
    gap = "\n" if format == "markdown" else ""
    body = drawing(format, width)(columns, cells, _LEFT)
    return f"{prose([title], format, gap)}{body}{gap}{prose(notes, format, gap)}"


def _what(row: Measurement) -> tuple[Any, Any]:
    return row.problem, row.shape


def _lines(
    row: Measurement, counts: Counts | None, counted: Counted, reference: float | None, asked: Collection[str]
) -> Iterator[dict[str, str]]:
    mamfu = counted.mamfu(row)
    burst = {
        row.work.unit: significant(row.best_rate) if row.ok else DASH,
        "MAMFU": DASH if mamfu is None else f"{mamfu:.1%}",
    }
    if counts is None or not counts.ok:
        yield {"kernel": row.kernel, "cycles": DASH, **burst}
        return
    cycles, total = counts.median_cycles, counts.total
    relative = {"relative": f"{cycles / reference:.3f}" if cycles and reference else DASH}
    ran = short_name(total.name) if len(counts.kernels) == 1 else total.name
    own = _cells(total, counted, cycles)
    further = {name: text for name, text in _further(row, counts).items() if name in asked}
    yield {"kernel": row.kernel, "cycles": own.pop("cycles"), **relative, **burst, **further, **own, "ran": ran}
    for kernel in counts.kernels if len(counts.kernels) > 1 else ():
        yield {"kernel": f"  {short_name(kernel.name)}", **_cells(kernel, counted, kernel.cycles)}


def _further(row: Measurement, counts: Counts) -> dict[str, str]:
    words = {None: DASH, True: "equal", False: "differ"}
    return {
        PREPARING: _figure(counts.preparing_seconds, ".3g"),
        DETERMINISM: words[counts.is_deterministic],
        CONFIGURATION: _configuration(row) or DASH,
    }


def _configuration(row: Measurement) -> str | None:
    """Which of a kernel's own ways ran, where it tells: in its row, else in its name."""
    told = row.details.get("configuration") or row.details.get("ran")
    return str(told) if told else row.kernel.partition("[")[2].removesuffix("]") or None


def _cells(kernel: DeviceKernel, counted: Counted, cycles: float | None) -> dict[str, str]:
    """Of one kernel of the device, or of all that a launch runs, in the columns' order of importance."""
    metrics, rate = kernel.metrics, kernel.dram_rate
    return {
        "cycles": _figure(cycles, ",.0f"),
        "us": _figure(kernel.seconds, ".4g", 1e6),
        "tensor %": _figure(metrics.get(TENSOR), ".1f"),
        "DRAM TB/s": _figure(rate, ".3g", 1 / TERA),
        "of roof": _figure(share_of(rate, counted.bandwidth), ".1%"),
        "L2 hit %": _figure(metrics.get(L2_HIT), ".0f"),
        "L1 hit %": _figure(metrics.get(L1_HIT), ".0f"),
        "warps %": _figure(metrics.get(WARPS), ".1f"),
        "possible": _figure(metrics.get(MOST_WARPS), ".1f"),
        "limited by": ", ".join(kernel.limiters) or DASH,
        "registers": _figure(metrics.get(REGISTERS), ".0f"),
        "shared KiB": _figure(metrics.get(SHARED_MEMORY), ".1f", 1 / 1024),
        "blocks": _figure(metrics.get(BLOCKS), ",.0f"),
        "DRAM MB": _figure(kernel.dram_bytes, ".4g", 1e-6),
        "Minst": _figure(metrics.get(INSTRUCTIONS), ".4g", 1e-6),
    }


def share_of(rate: float | None, roof: Roof | None) -> float | None:
    return None if rate is None or roof is None else rate / roof.rate


def _figure(value: float | None, form: str, scale: float = 1.0) -> str:
    return DASH if value is None else f"{value * scale:{form}}"


def _bounds(rows: Iterable[Measurement], found: Mapping[str, Counts], counted: Counted) -> Iterator[str]:
    """What bounds each, and why there are no counts."""
    failed = []
    for row in rows:
        counts = found.get(row.kernel)
        if not row.ok:
            failed.append((f"{row.status}: {row.reason}", row.kernel))
        elif counts is None or not counts.ok:
            failed.append((f"not counted: {counts.reason if counts else 'the run ended before'}", row.kernel))
        else:
            by = bound(counts, counted.bandwidth, row.seconds)
            yield f"{row.kernel} is bound by {by.by}: {by.why}"
    yield from told_once(failed)


def flat_rows(steps: Mapping[Any, Measurement], counted: Counted) -> list[dict[str, Any]]:
    """Rows of equal columns, one a launch and one for each of its kernels, a column a metric."""
    by_step = {step_of(each): each for each in counted.counts}
    found = [line for step, row in steps.items() for line in _flat(row, by_step.get(step), counted)]
    names = dict.fromkeys(name for line in found for name in line)
    return [{name: line.get(name) for name in names} for line in found]


def _flat(row: Measurement, counts: Counts | None, counted: Counted) -> Iterator[dict[str, Any]]:
    what = {
        "operation": row.operation,
        **operation_called(row.operation).problem_record(row.problem),
        "shape": str(row.shape),
        "kernel": row.kernel,
    }
    has_counts = counts is not None and counts.ok
    burst = {
        "status": row.status,
        "reason": row.reason or (counts.reason if counts else ""),
        "unit": row.work.unit,
        "rate": row.best_rate if row.ok else None,
        "mamfu": counted.mamfu(row),
    }
    if counts is None or not has_counts:
        yield {**what, "device_kernel": "total", **burst}
        return
    by, interval = bound(counts, counted.bandwidth, row.seconds if row.ok else None), counts.interval
    own = {
        "cycles": counts.median_cycles,
        "cycles_low": interval and interval.low,
        "cycles_high": interval and interval.high,
        "launches": len(counts.cycles),
        "preparing_seconds": counts.preparing_seconds,
        "is_deterministic": counts.is_deterministic,
        "configuration": _configuration(row),
        "bound_by": by.by,
        "bound_why": by.why,
    }
    yield {**what, "device_kernel": "total", **burst, **own, **_flat_metrics(counts.total, counted)}
    for kernel in counts.kernels:
        yield {**what, "device_kernel": kernel.name, "cycles": kernel.cycles, **_flat_metrics(kernel, counted)}


def _flat_metrics(kernel: DeviceKernel, counted: Counted) -> dict[str, Any]:
    return {
        "grid": kernel.grid,
        "block": kernel.block,
        "seconds": kernel.seconds,
        "dram_bytes_per_second": kernel.dram_rate,
        "share_of_bandwidth": share_of(kernel.dram_rate, counted.bandwidth),
        "limited_by": ", ".join(kernel.limiters),
        **kernel.metrics,
    }
