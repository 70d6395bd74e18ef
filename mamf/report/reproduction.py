"""Claims beside what was measured here: what differs, the verdict on each, and the settings that explain it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from mamf.logs.reproducing import Explained, Judged, Reproduction
from mamf.measurement import group_pairs
from mamf.operations.unknown import operation_called
from mamf.report.columns import interval_columns, rate_column
from mamf.report.comparison import percent_of, ratio_interval_cell
from mamf.report.document import Answer, Block, Column, Document, Lines, Table
from mamf.report.text import end_line, interval_cell, machine_line, rate_text, scaled_unit, significant
from mamf.statistics import Interval

_UNDECIDED = "cannot be decided"
#: The most differences that the first lines name; json has all.
_MOST_NAMED = 12


def reproduction_document(
    found: Reproduction, header: Mapping[str, Any], summary: Mapping[str, Any] | None = None
) -> Document:
    """What differs comes first, then each claim, then the verdict. ``header``, ``summary``: of the run here."""
    explained = [each for one in found.judged for each in one.explained]
    unit = next((one.here.unit for one in found.judged if one.here), "TFLOPS")
    tables: list[Block] = [Table(_columns(found, unit), found.judged, key="claims", remarks=_remarks, label=_label)]
    tables += [Table(_setting_columns(explained, unit), explained, "other settings", "settings")] if explained else []
    data = {
        "header": header,
        "summary": summary,
        "source": found.options.source,
        "differences": None if found.differences is None else [asdict(each) for each in found.differences],
        "verdicts": found.counts,
        "tolerance": found.options.tolerance,
    }
    lines = [*(claim_line(each, found) for each in found.judged), verdict_line(found), end_line(summary)]
    return Document("Reproduction", [Lines(list(_head(found, header))), *tables, Answer(lines)], data)


def _head(found: Reproduction, header: Mapping[str, Any]) -> Iterator[str]:
    yield f"claims of {found.options.source}, measured on {machine_line(header)}"
    if found.differences is None:
        yield "the claim names no device, software or limits, so what differs here is unknown"
        return
    if other := found.other_device:
        yield f"another device: {other.a} in the claim, {other.b} here"
    rest = [str(each) for each in found.differences if each is not found.other_device]
    if rest:
        hidden = [f"and {len(rest) - _MOST_NAMED} more"] if len(rest) > _MOST_NAMED else []
        yield f"the claim and this run differ in {', '.join(rest[:_MOST_NAMED] + hidden)}"
    if not found.differences:
        yield "nothing that the claim records differs here"


def _columns(found: Reproduction, unit: str) -> list[Column[Judged]]:
    judged = found.judged
    _, factor = scaled_unit(unit, [each.claim.rate for each in judged])
    return [
        Column("regime", "regime", lambda each: each.claim.regime, importance=1, left=True),
        Column("problem", "problem", _problem, importance=2, left=True),
        Column("shape", "shape", lambda each: str(each.claim.shape), left=True),
        Column("kernel", "kernel", lambda each: each.claim.kernel, importance=1, left=True),
        Column("statistic", "statistic", lambda each: each.claim.statistic or None, importance=5, left=True),
        Column("claimed", "claimed", lambda each: each.claim.rate, lambda rate: significant(rate * factor)),
        *_interval("claimed", lambda each: each.claim.interval, factor),
        Column("here", "here", _here, lambda rate: significant(rate * factor)),
        *_interval("here", lambda each: each.here and each.here.interval, factor),
        Column("unit", "", lambda each: unit),
        Column("ratio", "here/claimed", lambda each: each.pair and each.pair.ratio, "{:.4f}".format),
        Column("", "interval", lambda each: each.pair and each.pair.interval, ratio_interval_cell, 3, True),
        Column("ratio_low", "", lambda each: each.pair and each.pair.interval.low),
        Column("ratio_high", "", lambda each: each.pair and each.pair.interval.high),
        Column("verdict", "verdict", _said, left=True),
        Column("is_slower", "", lambda each: each.is_slower),
        Column("matches", "matches", lambda each: ", ".join(one.name for one in each.matching) or None, left=True),
    ]


def _interval(name: str, read: Any, factor: float) -> list[Column[Judged]]:
    def cell(interval: Interval) -> str:
        return interval_cell(interval, factor)

    return interval_columns(read, f"{name}_{{}}", cell)


def _setting_columns(explained: list[Explained], unit: str) -> list[Column[Explained]]:
    return [
        Column("setting", "setting", lambda each: each.name, left=True),
        Column("claim", "claim", lambda each: f"{each.claim.shape} by {each.claim.kernel}", importance=1, left=True),
        rate_column("here", unit, lambda each: each.here.tflops, explained),
        *interval_columns(lambda each: each.here.interval, "here_{}"),
        Column("ratio", "here/claimed", lambda each: each.pair and each.pair.ratio, "{:.4f}".format),
        Column("matches", "", lambda each: each.matches),
        Column("", "", lambda each: each.here.reason or ("matches" if each.matches else "no match"), left=True),
    ]


def _problem(each: Judged) -> str:
    problem = each.claim.problem
    return ", ".join([problem.dtype, *operation_called(problem.operation).describe_problem(problem)])


def _here(each: Judged) -> float | None:
    return None if each.here is None else each.here.tflops


def _said(each: Judged) -> str:
    return _UNDECIDED if each.verdict == "undecided" else each.verdict


def _label(each: Judged) -> str:
    return f"{each.claim.regime} {each.claim.shape} by {each.claim.kernel}"


def _remarks(each: Judged) -> Iterator[str]:
    if each.claim.error is None:
        yield "the claim has no samples: its interval is its rounding, its scatter is assumed as that of the run here"
    if each.here is not None and each.here.reason:
        yield f"{each.here.status}: {each.here.reason}"


def claim_line(each: Judged, found: Reproduction) -> str:
    """The verdict on a claim, with both figures and what explains it."""
    claimed = each.claim
    unit = each.here.unit if each.here else "TFLOPS"
    figures = f"{rate_text(claimed.rate, unit)} claimed"
    if each.pair is not None and each.here is not None and each.here.tflops is not None:
        interval = each.pair.interval
        figures += (
            f", {rate_text(each.here.tflops, unit)} here: {100 * (each.pair.ratio - 1):+.2f} % "
            f"({100 * (interval.low - 1):+.2f} to {100 * (interval.high - 1):+.2f})"
        )
    return f"{_said(each)}: {_label(each)}: {figures}{_explanation(each, found)}"


def _explanation(each: Judged, found: Reproduction) -> str:
    if not found.options.explains or each.verdict == "reproduced":
        return ""
    if each.matching:
        return f"; the setting that matches: {', or '.join(one.name for one in each.matching)}"
    return "; no other setting matches" if each.explained else "; no other setting was measured"


def verdict_line(found: Reproduction) -> str:
    """The run in a line."""
    names = group_pairs((_said(each), each) for each in found.judged)
    counts = ", ".join(f"{len(same)} {name}" for name, same in names.items())
    where = f", on another device ({found.other_device.b})" if found.other_device else ""
    tolerance = percent_of(found.options.tolerance)
    slower = f"; slower by more than {tolerance}" if found.is_slower else ""
    return f"of {len(found.judged)} claimed: {counts}{where}{slower}"
