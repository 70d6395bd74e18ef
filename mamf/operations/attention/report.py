"""Attention kernels, ranked shape by shape, as shares of the measured ceiling."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mamf.ceilings.share import STATE_TOLERANCE, Ceilings, has_drifted, is_beyond, mamfu, share_accuracy, state
from mamf.measurement import TERA, Measurement
from mamf.operations.attention.rows import is_attention
from mamf.operations.attention.shapes import AttentionProblem, AttentionShape
from mamf.report.accuracy import accuracy_remarks, share_accuracy_line
from mamf.report.devices import device_lines, device_remark, flat_device
from mamf.report.kernels import best_first, share_of_peak
from mamf.report.text import (
    DASH,
    csv_text,
    drawing,
    end_line,
    half_width_cell,
    machine_line,
    prose,
    significant,
    whole,
    why_unknown,
)
from mamf.text import Markup

#: Rows that are compared with one another.
Group = tuple[str, AttentionProblem, AttentionShape]
COLUMNS = (
    *("kernel", "TFLOPS", "+-%", "MAMFU", "% of peak", "TB/s", "mean ms", "min", "max", "MB", "speed-up"),
    *("state", "MHz", "W", "error", "remarks"),
)
_SAVED = "Saved memory"
LEFT_ALIGNED = ("kernel", "remarks")


def grouped(rows: Iterable[Measurement]) -> dict[Group, list[Measurement]]:
    """Rows by what they can be compared within, each group best first and what has no figure last."""
    found: dict[Group, list[Measurement]] = {}
    for row in rows:
        if is_attention(row):
            found.setdefault((row.regime, row.problem, row.shape), []).append(row)
    return {group: best_first(each) for group, each in found.items()}


def baseline_of(rows: Sequence[Measurement], name: str | None) -> Measurement | None:
    """The named kernel's row; by default eager's, else the slowest's."""
    measured = [row for row in rows if row.ok]
    named = next((row for row in measured if row.kernel == (name or "eager")), None)
    return named or (None if name or not measured else min(measured, key=lambda row: row.comparable_rate))


def speed_up(row: Measurement, baseline: Measurement | None) -> float | None:
    if baseline is None or baseline.summary is None or row.summary is None:
        return None
    return baseline.comparable_seconds / row.comparable_seconds


def flat_attention(
    row: Measurement, baseline: Measurement | None, header: Mapping[str, Any], ceilings: Ceilings
) -> dict[str, Any]:
    """A row under the column names that kernel developers use; times in milliseconds, memory in MiB."""
    shape, problem, summary = row.shape, row.problem, row.summary
    times = {} if summary is None else {
        "Mean": summary.mean, "Median": summary.median, "Min": summary.fastest, "Max": summary.slowest,
        "StdDev": row.stdev,
    }  # fmt: skip
    gain, dense = speed_up(row, baseline), 1 - float(row.details.get("sparsity", 0.0))
    return {
        "Kernel": row.kernel,
        "d_head": shape.head_dim,
        "seq_len": shape.seqlen_k,
        "seq_len_q": shape.seqlen_q,
        "batch": shape.batch,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "causal": shape.causal,
        "window": shape.window,
        "direction": problem.direction,
        "dtype": problem.dtype,
        "regime": row.regime,
        **flat_device(row),
        "status": row.status,
        "reason": row.reason,
        **{name: times[name] * 1e3 if name in times else None for name in ("Mean", "Median", "Min", "Max", "StdDev")},
        "Interval low": row.interval.low * 1e3 if row.ok else None,
        "Interval high": row.interval.high * 1e3 if row.ok else None,
        "launches": row.launches,
        "Relative Performance": None if gain is None else 100 * gain,
        "Attn TFLOP/s": row.best_rate if row.ok else None,
        "Effective TFLOP/s": row.best_rate * dense if row.ok else None,
        "TB/s": problem.traffic(shape) / row.seconds / TERA if summary else None,
        "MAMFU": mamfu(row, ceilings),
        "MAMFU accuracy": share_accuracy(row, ceilings) or None,
        "Share of peak": share_of_peak(row, header),
        "Reference TFLOP/s": row.details.get("reference_tflops"),
        "Memory": None if row.peak_memory_bytes is None else row.peak_memory_bytes / 2**20,
        _SAVED: saved_mib(row),
        "Sparsity": row.details.get("sparsity"),
        "Error": row.error,
        "Cosine similarity": row.details.get("cosine_similarity"),
        "Relative L1": row.details.get("relative_l1"),
        "clock_mhz": row.conditions.clock_hz and row.conditions.clock_hz / 1e6,
        "watts": row.conditions.watts,
    }


def saved_mib(row: Measurement) -> float | None:
    """MiB that the forward pass left for a backward pass alone; None where the device does not tell."""
    held = row.details.get("held_bytes")
    return None if held is None or row.problem.direction != "bwd" else float(held) / 2**20


def cells(
    row: Measurement,
    group: Sequence[Measurement],
    baseline: Measurement | None,
    header: Mapping[str, Any],
    ceilings: Ceilings,
) -> list[str]:
    """One row of a group's table; ``group`` is best first."""
    flat = flat_attention(row, baseline, header, ceilings)

    def number(name: str, form: str = ".3g", scale: float = 1.0) -> str:
        return DASH if flat[name] is None else format(flat[name] * scale, form)

    drift, gain = state(row, ceilings), speed_up(row, baseline)
    measured = [each for each in group if each.ok]
    lean = min((each.peak_memory_bytes or 0 for each in measured), default=0)
    marks = ("*" if measured and row is measured[0] else "", "*" if lean and row.peak_memory_bytes == lean else "")
    return [
        row.kernel + marks[0],
        significant(row.best_rate) if row.ok else DASH,
        half_width_cell(row.interval, row.seconds) if row.ok else DASH,
        number("MAMFU", ".1f", 100),
        number("Share of peak", ".1f", 100),
        number("TB/s"),
        number("Mean", ".4g"),
        number("Min", ".4g"),
        number("Max", ".4g"),
        whole(flat["Memory"]) + marks[1],
        DASH if gain is None else f"{gain:.2f}x",
        DASH if drift is None else f"{100 * drift:+.1f}%",
        whole(flat["clock_mhz"]),
        whole(flat["watts"]),
        DASH if row.error is None else f"{row.error:.1e}",
        remarks(row, ceilings),
    ]


def remarks(row: Measurement, ceilings: Ceilings) -> str:
    """What a reader must know about a row beside its figures."""
    parts = [] if row.ok else [f"{row.status}: {row.reason}"]
    if device := device_remark(row):
        parts.append(device)
    if "ran" in row.details:
        parts.append(f"ran {row.details['ran']}")
    for name, text in (("sparsity", "sparsity"), ("cosine_similarity", "cosine"), ("relative_l1", "L1")):
        if name in row.details:
            parts.append(f"{text} {float(row.details[name]):.3g}")
    if (saved := saved_mib(row)) is not None:
        parts.append(f"{whole(saved)} MB saved by the forward pass")
    for name in str(row.details.get("product_dtypes", "")).split():
        other = ceilings.get((name, row.regime))
        if other is not None and row.summary is not None:
            share = other.utilization(flop=row.flop, seconds=row.comparable_seconds, regime=row.regime)
            parts.append(f"{100 * share:.0f} % of the {name} ceiling")
    if has_drifted(row, ceilings):
        parts.append(f"card speed drifted by more than {100 * STATE_TOLERANCE:.0f} % since its ceiling run")
    own = mamfu(row, ceilings)
    if own is not None and is_beyond(own, row, ceilings) and "product_dtypes" not in row.details:
        parts.append("above the ceiling: it was found on a busier device, find it anew")
    parts += why_unknown(row)
    parts += [*row.conditions.throttle_reasons, *row.remarks] if row.regime == "burst" else row.remarks
    parts += accuracy_remarks(row)
    if row.implausible_samples:
        parts.append(f"{len(row.implausible_samples)} implausible samples left out")
    return ", ".join(parts)


def title(group: Group) -> str:
    """What a group's rows have in common."""
    regime, problem, shape = group
    mask = "causal" if shape.causal else "full"
    window = "" if shape.window is None else f", window {shape.window}"
    kv = "" if shape.heads == shape.kv_heads else f" ({shape.kv_heads} kv)"
    length = f"{shape.seqlen_k}" if shape.seqlen_q == shape.seqlen_k else f"{shape.seqlen_q} on {shape.seqlen_k}"
    sparse = f", inputs {100 * problem.sparsity:.0f} % sparse" if problem.sparsity else ""
    return (
        f"{regime}, {problem.dtype}, {problem.direction}: batch {shape.batch}, {shape.heads} heads{kv}, "
        f"length {length}, head dimension {shape.head_dim}, {mask}{window}{sparse}"
    )


def ceiling_lines(ceilings: Ceilings) -> list[str]:
    """What the shares are of."""
    return [
        f"MAMFU: of {significant(ceiling.tflops)} TFLOPS, the {dtype} {regime} ceiling "
        f"({ceiling.shape}, {ceiling.kernel})"
        for (dtype, regime), ceiling in ceilings.items()
    ]


def conventions(rows: Sequence[Measurement], header: Mapping[str, Any]) -> list[str]:
    lines: list[str] = [Markup("FLOP: forward 4*b*h*pairs*d, masked pairs not counted")]
    counts = {row.problem.backward_count for row in rows if is_attention(row) and row.problem.has_backward}
    lines += [f"      backward {'2.5' if count == 'hardware' else '2'} times the forward ({count})" for count in counts]
    if "converted_from" in header and any(row.peak_memory_bytes is not None for row in rows):
        lines.append("MB: of the whole process, not of the kernel alone (log converted from an early version)")
    return [
        *lines,
        Markup("* best kernel, * least memory of a shape; state: the reference product around a row to its ceiling"),
    ]


def render_attention(
    format: str,
    rows: Sequence[Measurement],
    ceilings: Ceilings,
    header: Mapping[str, Any],
    summary: Mapping[str, Any] | None,
    baseline: str | None = None,
    width: int | None = None,
) -> str:
    """A run of attention kernels in one of mamf.report.FORMATS. ``width``: of the terminal, None for all columns."""
    groups = grouped(rows)
    bases = {group: baseline_of(each, baseline) for group, each in groups.items()}
    flat = [flat_attention(row, bases[group], header, ceilings) for group, each in groups.items() for row in each]
    if all(line[_SAVED] is None for line in flat):  # no column of logs whose device does not tell
        for line in flat:
            del line[_SAVED]
    if format == "csv":
        return csv_text(flat)
    if format == "json":
        return json.dumps({"header": header, "measurements": flat, "summary": summary}, indent=2) + "\n"
    draw = drawing(format, width)
    parts = [
        prose(
            [
                machine_line(header),
                *ceiling_lines(ceilings),
                *share_accuracy_line(rows, ceilings),
                *conventions(rows, header),
                *device_lines(rows, header),
            ],
            format,
        )
    ]
    for group, each in groups.items():
        lines = [cells(row, each, bases[group], header, ceilings) for row in each]
        base = bases[group]
        of = f"; speed-up over {base.kernel}" if base else ""
        parts.append(prose([f"{title(group)}{of}"], format) + draw(COLUMNS, lines, LEFT_ALIGNED))
    parts.append(prose([end_line(summary)], format))
    return "\n".join(parts)


def attention_summary_record(
    rows: Sequence[Measurement], ceilings: Ceilings, status: str, reason: str, elapsed_seconds: float, left: int
) -> dict[str, Any]:
    """The last record of the log: the best kernel of each regime, dtype and direction by share of the ceiling."""
    best: dict[str, Measurement] = {}
    for row in rows:
        if is_attention(row) and row.ok:
            key = f"{row.regime} {row.problem.dtype} {row.problem.direction}"
            if key not in best or row.rank > best[key].rank:
                best[key] = row
    return {
        "status": status,
        "reason": reason,
        "measured": sum(row.ok and is_attention(row) for row in rows),
        "left": left,
        "elapsed_seconds": round(elapsed_seconds, 3),
        "best": {key: _brief(row, ceilings) for key, row in best.items()},
    }


def _brief(row: Measurement, ceilings: Ceilings) -> dict[str, Any]:
    share = mamfu(row, ceilings)
    return {
        "kernel": row.kernel,
        "shape": str(row.shape),
        "tflops": round(row.best_rate, 3),
        "mamfu": None if share is None else round(share, 4),
        **flat_device(row),
    }
