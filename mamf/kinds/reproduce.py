"""Reproductions: claims beside what was measured here, and what differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial

from mamf.kinds.kind import KernelRows, View
from mamf.logs.compare import Difference
from mamf.logs.judging import JudgedClaim, differences_here, judge_claims
from mamf.logs.run_log import RunLog
from mamf.plans import REPRODUCE, ReproduceOptions
from mamf.report.columns import interval_columns
from mamf.report.comparison import change_interval, difference_lines, percent_of, ratio_interval_cell
from mamf.report.document import Answer, Block, Column, Document, Lines, Table
from mamf.report.own_ceilings import described_title
from mamf.report.text import end_line, interval_cell, machine_line, rate_text, scaled_unit, significant


class Reproduce(KernelRows):
    name = REPRODUCE
    noun = "a reproduction"
    is_collected = False  # its rows were chosen by a claim

    def document(self, log: RunLog, view: View) -> Document:
        options: ReproduceOptions = log.plan.options
        judged = judge_claims(options, log.measurements)
        found = differences_here(options, judged, log.header)
        data = {
            "header": log.header,
            "summary": log.summary,
            "source": options.source,
            "differences": [asdict(each) for each in found] if options.recorded else None,
        }
        unknown = [] if options.recorded else ["the claims name no device or software, so what differs is unknown"]
        shown: list[Block] = [
            Lines(
                [
                    f"claims of {options.source}, measured on {machine_line(log.header)}",
                    *unknown,
                    *difference_lines("the claims were measured otherwise: ", found),
                ]
            ),
            Table(_columns(judged), judged, key="claims", remarks=_remarks, label=_label),
            Answer([*(_verdict_line(each, found) for each in judged), end_line(log.summary)]),
        ]
        return Document("Reproduction", shown, data)


def _columns(judged: list[JudgedClaim]) -> list[Column[JudgedClaim]]:
    unit = next((each.here.unit for each in judged if each.here), "TFLOPS")
    title, factor = scaled_unit(unit, [each.claim.rate for each in judged])
    interval = partial(interval_cell, factor=factor)
    return [
        Column("regime", "", lambda each: each.claim.step[0]),
        Column("problem", "problem", _title, importance=2, left=True),
        Column("shape", "shape", lambda each: str(each.claim.step[2]), left=True),
        Column("kernel", "kernel", lambda each: each.claim.step[3], importance=1, left=True),
        Column("claimed", f"claimed {title}", lambda each: each.claim.rate, lambda rate: significant(rate * factor)),
        *interval_columns(lambda each: each.claim.interval, "claimed_{}", interval),
        Column("here", "here", lambda each: each.here and each.here.tflops, lambda rate: significant(rate * factor)),
        *interval_columns(lambda each: each.pair and each.pair.b.interval, "here_{}", interval),
        Column("unit", "", lambda each: unit),
        Column("ratio", "here/claimed", lambda each: each.pair and each.pair.ratio, "{:.4f}".format),
        *interval_columns(lambda each: each.pair and each.pair.interval, "ratio_{}", ratio_interval_cell),
        Column("verdict", "verdict", lambda each: each.verdict, left=True),
        Column("is_slower", "", lambda each: each.is_slower),
    ]  # fmt: skip


def _title(each: JudgedClaim) -> str:
    return described_title(*each.claim.step[:2])


def _label(each: JudgedClaim) -> str:
    return f"{_title(each)}, {each.claim.step[2]} by {each.claim.step[3]}"


def _remarks(each: JudgedClaim) -> Iterator[str]:
    if each.claim.error is None:
        yield "the claim has no samples: its interval is its rounding, it is assumed to scatter as the run here"
    yield f"{each.here.status}: {each.here.reason}" if each.here and each.here.reason else ""


def _verdict_line(each: JudgedClaim, found: Sequence[Difference]) -> str:
    unit, change = each.here.unit if each.here else "TFLOPS", ""
    if each.pair:
        change = f"{100 * (each.pair.ratio - 1):+.2f} % ({change_interval(each.pair.interval)})"
        change = f", {rate_text(each.pair.b.tflops or 0.0, unit)} here: {change}"
    beyond = f" by more than {percent_of(each.tolerance)}" if each.is_slower else ""
    device = ", on another device" if any(one.what == "device" for one in found) else ""
    return f"{each.verdict}{beyond}{device}: {_label(each)}: {rate_text(each.claim.rate, unit)} claimed{change}"
