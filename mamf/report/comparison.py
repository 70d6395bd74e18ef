"""A comparison of two runs as table, csv, json or markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from mamf.logs.comparability import Difference
from mamf.logs.compare import Comparison, Pair
from mamf.logs.decision import FALSE_ALARMS, TOGETHER, Together
from mamf.logs.entries import Entry
from mamf.report.text import Draw, csv_text, drawing, prose, significant

# What two intervals of 95 % cover together; below, a reader should know.
_USUAL_COVERAGE = 0.9
_HOST_CLOCK = "host clock"
_FIGURES = ("A", "B", "B/A", "interval", "verdict", "remarks")
_RIGHT_ALIGNED = ("A", "B", "B/A")


def flat_alone(entry: Entry, other: Entry | None) -> dict[str, Any]:
    """A row that one log alone has a figure of; ``status``: what became of it in the other."""
    return {**entry.fields, "tflops": entry.tflops, "status_in_other": other.status if other else "missing"}


def varying(pairs: Sequence[Pair]) -> list[str]:
    """Fields that take several values, but for the shape, which is always shown."""
    names = [name for name in pairs[0].fields if name != "shape"]
    return [name for name in names if len({pair.fields[name] for pair in pairs}) > 1]


def cells(pair: Pair, names: Iterable[str], tolerance: float) -> list[str]:
    interval, a, b = pair.interval, pair.a, pair.b
    assert a.tflops is not None and b.tflops is not None
    remarks = []
    if round(interval.coverage, 9) < _USUAL_COVERAGE:
        remarks.append(f"few samples: the interval covers at least {100 * interval.coverage:.0f} %")
    if not pair.is_of_one_device:
        width = 100 * pair.correction * pair.correction_half_width
        corrected = f"corrected by {100 * (pair.correction - 1):+.2f} +-{width:.2f} %"
        remarks.append(f"two devices, {corrected if pair.is_comparable else 'never compared'}")
    return [
        *(str(pair.fields[name]) for name in names),
        a.shape if a.shape == b.shape else f"{a.shape} / {b.shape}",
        significant(a.tflops),
        significant(b.tflops),
        f"{pair.ratio:.4f}",
        f"{interval.low:.4f} to {interval.high:.4f}",
        pair.verdict(tolerance),
        ", ".join(remarks),
    ]


def title(comparison: Comparison, tolerance: float) -> list[str]:
    """What is compared, what differs beside the figures, and what all rows have in common."""
    first, common = comparison.pairs[0], set(comparison.pairs[0].fields) - set(varying(comparison.pairs)) - {"shape"}
    shared = [f"{name} {value}" for name, value in first.fields.items() if name in common]
    kernels = [each for each in comparison.dropped if each.what == "kernel"]
    lines = [
        f"{letter}: {side.name}, {side.header['device']['name']}, {side.header.get('started', 'of unknown date')}"
        + (", interrupted" if side.tier == "interrupted" else "")
        for letter, side in (("A", comparison.a), ("B", comparison.b))
    ]
    if "shape" not in first.fields:
        shared.append("the ceilings of two finds")
    lines += _line("not comparable, compared anyway: ", comparison.forced)
    lines += _line("rows are paired without the kernel, which differs: ", kernels)
    lines += _line("the runs differ in ", comparison.noted)
    if crossed := sum(not pair.is_of_one_device for pair in comparison.pairs):
        of_one = len(comparison.pairs) - crossed
        lines.append(f"rows: {of_one} of one device, {crossed} of two, corrected by the reference that both measured")
    return [
        *lines,
        f"all rows: {', '.join(shared)}",
        f"medians in {first.a.unit}; B/A above 1: B is faster; SAME: 95 % interval within 1 +- {percent(tolerance)}",
    ]


def _line(what: str, differences: Sequence[Difference]) -> list[str]:
    return [what + ", ".join(map(str, differences))] if differences else []


def percent(share: float) -> str:
    return f"{100 * share:g} %"


def summary_lines(comparison: Comparison, tolerance: float) -> list[str]:
    counts = ", ".join(f"{count} {verdict}" for verdict, count in comparison.counts(tolerance).items())
    alone = ", ".join(
        f"{len(rows)} only in {name}{_what_became(rows, other)}"
        for name, other, rows in (("A", "B", comparison.only_a), ("B", "A", comparison.only_b))
    )
    rows = "row" if len(comparison.pairs) == 1 else "rows"
    lines = [
        f"{len(comparison.pairs)} {rows}: {counts}; geometric mean B/A {comparison.geometric_mean_ratio:.4f}; {alone}"
    ]
    if regressions := comparison.regressions(tolerance):
        worst = regressions[0]
        lines.append(
            f"slower by more than {percent(tolerance)}: {len(regressions)}, the most {worst.b.shape} "
            f"by {worst.b.kernel} ({percent(round(worst.ratio - 1, 4))})"
        )
    lines += [_told_together(each, comparison, tolerance) for each in comparison.together]
    if not comparison.forced:
        is_calibrated = comparison.a.header.get("timer") != _HOST_CLOCK
        chance = f"at most {percent(FALSE_ALARMS)}" if is_calibrated else "unknown with a host clock"
        lines.append(f"chance of a false alarm (exit code 3) for the whole comparison: {chance}")
    return lines


def _told_together(each: Together, comparison: Comparison, tolerance: float) -> str:
    """What all rows of a regime say together, and the smallest loss of all that would have been found."""
    interval, counted = each.interval, f"more than {percent(TOGETHER * tolerance)}"
    figures = (
        f"{each.ratio:.4f}, {percent(round(interval.coverage, 4))} interval {interval.low:.4f} to {interval.high:.4f}"
    )
    if each.is_regression(tolerance):
        found = f"slower by {counted}"
    elif interval.high < 1:
        found = f"slower, and not by {counted}"
    elif interval.low > 1:
        found = "faster"
    else:
        smallest = percent(round(each.smallest_loss(tolerance), 4))
        found = f"no common change; a uniform loss below {smallest} could not have been found"
    return f"{each.regime}, {each.rows} rows together ({comparison.design.label}): B/A {figures}: {found}"


def _what_became(rows: Sequence[tuple[Entry, Entry | None]], other: str) -> str:
    """Statuses of rows that the other log tried and has no figure of."""
    counts = Counter(there.status for _, there in rows if there is not None)
    told = ", ".join(f"{count} {status} in {other}" for status, count in counts.items())
    return f" ({told})" if told else ""


def comparison_record(comparison: Comparison, tolerance: float) -> dict[str, Any]:
    """Everything as JSON values."""
    return {
        "a": {"log": comparison.a.name, "tier": comparison.a.tier, "header": comparison.a.header},
        "b": {"log": comparison.b.name, "tier": comparison.b.tier, "header": comparison.b.header},
        "tolerance": tolerance,
        "compared_anyway": [asdict(each) for each in comparison.forced],
        "paired_without": [asdict(each) for each in comparison.dropped],
        "differences": [asdict(each) for each in comparison.noted],
        "design": comparison.design.label,
        "chance_of_false_alarm": None if comparison.forced else FALSE_ALARMS,
        "together": [each.flat(tolerance) for each in comparison.together],
        "rows": comparison.rows(tolerance),
        "only_in_a": [flat_alone(*each) for each in comparison.only_a],
        "only_in_b": [flat_alone(*each) for each in comparison.only_b],
        "summary": {
            **comparison.counts(tolerance),
            "regressions": len(comparison.regressions(tolerance)),
            "geometric_mean_ratio": comparison.geometric_mean_ratio,
        },
    }


def drawn(comparison: Comparison, tolerance: float, draw: Draw) -> str:
    """The table of the rows."""
    names = varying(comparison.pairs)
    columns = (*names, "shape", *_FIGURES)
    lines = [cells(pair, names, tolerance) for pair in comparison.pairs]
    return draw(columns, lines, [name for name in columns if name not in _RIGHT_ALIGNED])


def render_comparison(format: str, comparison: Comparison, tolerance: float, width: int | None = None) -> str:
    """A comparison in one of mamf.report.FORMATS. ``width``: of the terminal, None for all columns."""
    if format == "json":
        return json.dumps(comparison_record(comparison, tolerance), indent=2) + "\n"
    if format == "csv":
        return csv_text(comparison.rows(tolerance))
    shown = drawn(comparison, tolerance, drawing(format, width))
    gap = "\n" if format == "markdown" else ""
    head, foot = (prose(tell(comparison, tolerance), format, gap).rstrip("\n") for tell in (title, summary_lines))
    return f"{head}\n\n{shown}\n{foot}\n"
