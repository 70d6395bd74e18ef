"""Make reports and summaries of `mamf find`, which searches for the fastest matmul of a device (its ceiling).

``mamf find`` measures in phases. The field ``phase`` of a row in the log names the phase. The phases ``scout`` and
``refine`` measure many shapes briefly. The phase ``choose`` measures the fastest shapes and kernels again, and chooses
the best of them. The phase ``confirm`` then measures the best one again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mamf.ceilings.ceiling import (
    CHOOSE_PHASE,
    CONFIRM_PHASE,
    Ceiling,
    compute_median_rate,
    explain_missing_ceiling,
    group_rounds_by_candidate,
    has_faster_visit,
)
from mamf.logs.recording import RunEnd
from mamf.logs.records import round_to_six_digits
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement, group_pairs
from mamf.peaks import find_datasheet_rate
from mamf.report.document import (
    UNKNOWN_INTERVAL_REASON,
    Answer,
    Block,
    Column,
    Details,
    Document,
    Lines,
    Table,
    choose_unit,
    describe_machine,
    describe_run_end,
    format_count,
    format_four_digits,
    format_interval,
    format_rate,
    format_whole_number,
    make_clock_columns,
    make_rate_key,
)
from mamf.report.rows import describe_failures, make_row_columns, select_ranked_rows
from mamf.report.shares import (
    CEILING_TITLE_SUFFIXES,
    ShareCalculator,
    describe_clock,
    make_ceiling_table,
    make_ceiling_title,
)

#: Smallest gain over the default kernel that reports print, as a share of the rate of the default kernel.
_MIN_SHOWN_GAIN_SHARE = 0.0005
#: Maximum number of shapes that reports list as equally fast.
_MAX_SHOWN_TIED_SHAPES = 5
#: The names of the search phases in reports and pictures, by the name of the phase in the log.
PHASE_NAMES = {
    "scout": "first measurement",
    "refine": "refining measurement",
    "algorithm": "algorithm trial",
    "visit": "short measurement",
    "choose": "finalist measurement",
    "confirm": "confirming measurement",
}


def make_find_summary_record(
    rows: Sequence[Measurement], ceilings: Mapping[str, Ceiling], end: RunEnd
) -> dict[str, Any]:
    """Return the last record of a log of ``mamf find``: how the run ended, how many rows each phase measured, and the
    ceiling of each regime.
    """
    return {
        **end.make_summary(sum(row.ok for row in rows)),
        "phases": dict(Counter(f"{row.regime} {row.phase}" for row in rows)),
        "best": {
            regime: {"shape": str(each.shape), "kernel": each.kernel, "tflops": round_to_six_digits(each.tflops)}
            for regime, each in ceilings.items()
        },
    }


def describe_ceiling_accuracy(ceiling: Ceiling, rows: Sequence[Measurement], header: Mapping[str, Any]) -> list[str]:
    """Return lines that say how accurate a ceiling is, how it compares with the default kernel and the datasheet, which
    clock, temperature or throttling limited it, and the remarks about the measurements that confirm it.
    """
    device, gain, conditions = header["device"], ceiling.gain_over_default, ceiling.conditions
    peak = find_datasheet_rate(device["name"], ceiling.problem.dtype, device["compute_units"])
    remarks = [
        remark
        for row in rows
        if (row.regime, row.phase, row.shape, row.kernel)
        == (ceiling.regime, CONFIRM_PHASE, ceiling.shape, ceiling.kernel)
        for remark in row.remarks
    ]
    details = [
        f"{ceiling.kernel} gains {100 * gain:+.1f} % over the default kernel on this shape, compared round by round"
        if gain and abs(gain) >= _MIN_SHOWN_GAIN_SHARE
        else "",
        _describe_default_kernel(ceiling, rows),
        f"datasheet: {peak.tflops:g} TFLOPS, dense {peak.dtype}, of {peak.device_label}" if peak else "",
        describe_clock(conditions) if conditions.true_clock_hz else "",
        _describe_temperature(ceiling),
        f"throttled by {', '.join(conditions.throttle_reasons)}" if conditions.throttle_reasons else "",
        f"remarks about the confirming measurements: {'; '.join(dict.fromkeys(remarks))}" if remarks else "",
    ]
    return [
        f"{ceiling.regime}{CEILING_TITLE_SUFFIXES[ceiling.regime]}: {describe_interval(ceiling, rows)}",
        *(f"    {line}" for line in details if line),
    ]


def describe_ties_and_phases(ceiling: Ceiling, rows: Iterable[Measurement]) -> list[str]:
    """Return one or two lines. The first lists other shapes and kernels that may be as fast as the ceiling within the
    accuracy of the run, if there are any. The last says how many rows each phase of the search measured.
    """
    tied, more = ceiling.tied_candidates[:_MAX_SHOWN_TIED_SHAPES], len(ceiling.tied_candidates) - _MAX_SHOWN_TIED_SHAPES
    shown = ", ".join(f"{shape} ({kernel})" for shape, kernel in tied) + (f" and {more} more" if more > 0 else "")
    phases = Counter(row.phase for row in rows if row.regime == ceiling.regime)
    counts = (format_count(count, PHASE_NAMES.get(phase, phase or "other row")) for phase, count in phases.items())
    ties = [f"{ceiling.regime}: as fast as the best within the accuracy of this run: {shown}"] if tied else []
    return [*ties, f"{ceiling.regime}: the search measured {', '.join(counts)}"]


def _describe_default_kernel(ceiling: Ceiling, rows: Sequence[Measurement]) -> str:
    """Return a line with the highest rate of the library's default kernel, or an empty string if the default kernel
    has the ceiling. The first measurements of a search (phase ``scout``) run the default kernel.

    This rate is of the finalist measurements, and the best of them can exceed a ceiling, which is confirmed.
    """
    default = next((row.kernel for row in rows if row.phase == "scout"), ceiling.kernel)
    choosing = (row for row in rows if (row.regime, row.phase, row.kernel) == (ceiling.regime, CHOOSE_PHASE, default))
    rates = {
        shape: compute_median_rate(rounds.values())
        for (shape, _), rounds in group_rounds_by_candidate(choosing).items()
    }
    if default == ceiling.kernel or not rates:
        return ""
    best = max(rates, key=rates.__getitem__)
    return (
        f"the default kernel, {default}, reaches at most {format_rate(rates[best], ceiling.unit)} @ {best}"
        if rates[best] < ceiling.rate
        else f"the default kernel, {default}, is as fast @ {best}"
    )


def _describe_temperature(ceiling: Ceiling) -> str:
    celsius, known = ceiling.conditions.celsius, ceiling.repeatability
    if celsius is None or known is None or not known.is_cold(celsius):
        return "" if celsius is None else f"at {celsius:.0f} C"
    return (
        f"the card was cold ({celsius:.0f} C): at the usual {known.usual_celsius:.0f} C the card may be "
        f"{100 * known.compute_cold_gain(celsius):.1f} % slower, so the interval is wider by this share"
    )


def describe_interval(ceiling: Ceiling, rows: Iterable[Measurement]) -> str:
    """Say from which measurements the interval of a ceiling follows, or why it is unknown."""
    if has_faster_visit(ceiling, rows):
        return (
            "the interval is unknown: one measurement of this shape was much faster than the ceiling, so something "
            "probably slowed the device during the others; run 'mamf find' again"
        )
    if not ceiling.interval.is_known or ceiling.repeatability is None:
        return UNKNOWN_INTERVAL_REASON
    return (
        f"{100 * ceiling.interval.coverage:.0f} % repeat interval, from {ceiling.round_count} confirming measurements "
        f"of this shape and kernel, and {100 * ceiling.repeatability.run:.2g} % of scatter between runs"
    )


def describe_unconfirmed_regimes(
    rows: Sequence[Measurement], ceilings: Mapping[str, Ceiling], regimes: Iterable[str] = ()
) -> Iterator[str]:
    """Yield a line for each regime without a confirmed ceiling. The line names the fastest row so far, or says that the
    run did not measure the regime. ``regimes``: the regimes that the run planned to measure.
    """
    for regime in dict.fromkeys((*regimes, *(row.regime for row in rows))):
        measured = select_ranked_rows(row for row in rows if row.regime == regime)
        # Name the dtype only if there is no table of ceilings, because the title of this table names the dtype.
        dtype = "" if ceilings or not rows else f", {rows[0].problem.dtype}"
        if regime not in ceilings and measured:
            best = measured[0]
            yield (
                f"{regime}{dtype}: not confirmed; best measurement so far: "
                f"{format_rate(best.best_rate, best.work.unit)} @ {best.shape} ({best.kernel})"
            )
        elif regime not in ceilings and rows:
            yield f"{regime}{dtype}: not measured yet; if the run has ended, --resume LOG continues it"


def make_find_document(
    rows: Sequence[Measurement],
    ceilings: Mapping[str, Ceiling],
    header: Mapping[str, Any],
    summary: Mapping[str, Any] | None,
) -> Document:
    """Return the report of ``mamf find``. CSV has a row for each ceiling; JSON also has all measurements."""
    hidden = [replace(each, title="") for each in make_row_columns(rows, ShareCalculator(header), lambda row: None)]
    reason = explain_missing_ceiling(rows)
    is_complete = summary is not None and summary["status"] == "complete"
    is_unsupported = bool(rows) and rows[0].status == "unsupported"
    blocks: list[Block] = [
        Lines([describe_machine(header)]),
        make_ceiling_table(list(ceilings.values()), header),
        Lines([line for ceiling in ceilings.values() for line in describe_ceiling_accuracy(ceiling, rows, header)]),
        Details([line for ceiling in ceilings.values() for line in describe_ties_and_phases(ceiling, rows)]),
        Table(hidden, rows, key="measurements"),
        Lines(describe_failures(rows)),
        Answer(
            [
                f"no ceiling can be found: {reason.rstrip('.')}"
                + ("; choose another --dtype, or a kernel that 'mamf kernels' lists" if is_unsupported else "")
            ]
            if reason and is_complete
            else [
                *([f"no ceiling can be found: {reason}"] if reason else []),
                *describe_unconfirmed_regimes(rows, ceilings, [] if reason else header["plan"]["regimes"]),
                describe_run_end(summary, left_noun="ceiling"),
            ]
        ),
    ]
    return Document(f"Ceilings of {header['device']['name']}", blocks, {"header": header, "summary": summary})


def make_find_by_device_document(log: RunLog) -> Document:
    """Return the report of ``mamf find`` on several devices: the ceilings of each device, and by how much the slowest
    device is slower than the fastest.
    """
    rows = [
        (part.header["device"], ceiling)
        for part in log.part_logs
        for ceiling in (*part.matmul_ceilings.values(), *part.other_ceilings.values())
    ]
    unit, factor = choose_unit(rows[0][1].unit, [each.rate for _, each in rows]) if rows else ("TFLOPS", 1.0)
    columns: list[Column[tuple[dict[str, Any], Ceiling]]] = [
        Column("device", "device", lambda row: row[0]["index"]),
        Column("uuid_hash", "", lambda row: row[0]["uuid_hash"]),
        Column("ceiling", "ceiling", lambda row: make_ceiling_title(row[1]), is_left_aligned=True),
        Column(make_rate_key("rate", unit), unit, lambda row: row[1].rate * factor, format_four_digits),
        Column(
            "",
            "interval",
            lambda row: row[1].interval,
            lambda interval: format_interval(interval, factor),
            is_left_aligned=True,
        ),
        Column("shape", "shape", lambda row: str(row[1].shape), is_left_aligned=True),
        Column("kernel", "kernel", lambda row: row[1].kernel, is_left_aligned=True),
        *make_clock_columns(lambda row: row[1].conditions, 3),
        Column("power_watts", "W", lambda row: row[1].conditions.watts, format_whole_number, 4),
    ]
    spreads = [
        f"{title}: the slowest device is {100 * (1 - min(rates) / max(rates)):.1f} % below the fastest"
        for title, rates in group_pairs((make_ceiling_title(each), each.rate) for _, each in rows).items()
        if len(rates) > 1
    ]
    blocks: list[Block] = [
        Lines([describe_machine(log.header)]),
        Table(columns, rows, key="ceilings"),
        Answer([*spreads, describe_run_end(log.summary, left_noun="ceiling")]),
    ]
    return Document(
        f"Ceilings of {log.header['device']['name']}", blocks, {"header": log.header, "summary": log.summary}
    )
