"""Reproductions: claims beside what was measured here, what differs, and the settings that explain it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from mamf.kinds.kind import KernelRows, View
from mamf.logs.comparability import Difference
from mamf.logs.reproducing import Judged, differences_here, judge_claims
from mamf.logs.run_log import RunLog
from mamf.operations.unknown import operation_called
from mamf.plans import REPRODUCE, ReproduceOptions
from mamf.report.comparison import difference_lines, percent_of, ratio_interval_cell
from mamf.report.document import Answer, Block, Column, Document, Lines, Table
from mamf.report.text import end_line, interval_cell, machine_line, rate_text, scaled_unit, significant


class Reproduce(KernelRows):
    name = REPRODUCE
    noun = "a reproduction"

    def document(self, log: RunLog, view: View) -> Document:
        options: ReproduceOptions = log.plan.options
        judged = judge_claims(options, log.measurements)
        settings = [setting for each in judged for setting in each.settings]
        found = differences_here(options, judged, log.header)
        data = {
            "header": log.header,
            "summary": log.summary,
            "source": options.source,
            "differences": [asdict(each) for each in found] if options.recorded else None,
        }
        head = [
            f"claims of {options.source}, measured on {machine_line(log.header)}",
            *difference_lines("the claims were measured otherwise: ", found),
            *([] if options.recorded else ["the claims name no device or software, so what differs is unknown"]),
        ]
        blocks: list[Block] = [
            Lines(head),
            Table(_columns(judged), judged, key="claims", remarks=_remarks, label=_label),
            Table(_columns(settings), settings, "in other settings", key="settings"),
            Answer([*(_verdict_line(each, found) for each in judged), end_line(log.summary)]),
        ]
        return Document("Reproduction", blocks if settings else [*blocks[:2], blocks[3]], data)


def _columns(judged: list[Judged]) -> list[Column[Judged]]:
    unit = next((each.here.unit for each in judged if each.here), "TFLOPS")
    title, factor = scaled_unit(unit, [each.claim.rate for each in judged])
    interval = partial(interval_cell, factor=factor)
    return [
        Column("setting", "setting", lambda each: each.name or None, left=True),
        Column("regime", "", lambda each: each.claim.step[0]),
        Column("problem", "problem", _title, importance=2, left=True),
        Column("shape", "shape", lambda each: str(each.claim.step[2]), left=True),
        Column("kernel", "kernel", lambda each: each.claim.step[3], importance=1, left=True),
        Column("statistic", "statistic", lambda each: each.claim.statistic or None, importance=6, left=True),
        Column("claimed", f"claimed {title}", lambda each: each.claim.rate, lambda rate: significant(rate * factor)),
        Column("claimed_low", "", lambda each: each.claim.interval.low),
        Column("claimed_high", "", lambda each: each.claim.interval.high),
        Column("", "interval", lambda each: each.claim.interval, interval, 3, True),
        Column("here", "here", lambda each: each.here and each.here.tflops, lambda rate: significant(rate * factor)),
        Column("here_low", "", lambda each: each.pair and each.pair.b.interval and each.pair.b.interval.low),
        Column("here_high", "", lambda each: each.pair and each.pair.b.interval and each.pair.b.interval.high),
        Column("", "interval", lambda each: each.pair and each.pair.b.interval, interval, 3, True),
        Column("unit", "", lambda each: unit),
        Column("ratio", "here/claimed", lambda each: each.pair and each.pair.ratio, "{:.4f}".format),
        Column("ratio_low", "", lambda each: each.pair and each.pair.interval.low),
        Column("ratio_high", "", lambda each: each.pair and each.pair.interval.high),
        Column("", "interval", lambda each: each.pair and each.pair.interval, ratio_interval_cell, 4, True),
        Column("verdict", "verdict", lambda each: each.verdict, left=True),
        Column("is_slower", "", lambda each: each.is_slower),
        Column("matches", "matches", lambda each: ", ".join(each.matching) or None, left=True),
    ]  # fmt: skip


def _title(each: Judged) -> str:
    regime, problem = each.claim.step[:2]
    return ", ".join([regime, problem.dtype, *operation_called(problem.operation).describe_problem(problem)])


def _label(each: Judged) -> str:
    return f"{_title(each)}, {each.claim.step[2]} by {each.claim.step[3]}"


def _remarks(each: Judged) -> list[str]:
    printed = "the claim has no samples: its interval is its rounding, it is assumed to scatter as the run here"
    failed = [f"{each.here.status}: {each.here.reason}"] if each.here and each.here.reason else []
    return failed if each.claim.error else [printed, *failed]


def _verdict_line(each: Judged, found: Sequence[Difference]) -> str:
    unit, change = each.here.unit if each.here else "TFLOPS", ""
    if each.pair:
        interval = each.pair.interval
        here = f"{rate_text(each.pair.b.tflops or 0.0, unit)} here: {100 * (each.pair.ratio - 1):+.2f} %"
        change = f", {here} ({100 * (interval.low - 1):+.2f} to {100 * (interval.high - 1):+.2f})"
    verdict = f"{each.verdict} by more than {percent_of(each.tolerance)}" if each.is_slower else each.verdict
    matches = f"; matches: {', or '.join(each.matching) or 'no other setting'}" if each.settings else ""
    verdict += ", on another device" if any(one.what == "device" for one in found) else ""
    return f"{verdict}: {_label(each)}: {rate_text(each.claim.rate, unit)} claimed{change}{matches}"
