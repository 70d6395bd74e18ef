"""Define the kinds of runs that study a card or a kernel: explain, guard, overlap, reproduce, roofline and verify."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mamf.backend import DeviceInfo
from mamf.errors import UsageError
from mamf.kinds.kind import AnyCeilings, FindKind, ReportOptions, RunKind
from mamf.logs.compare import Difference
from mamf.logs.compared_rows import group_by_key, select_counted_measurements
from mamf.logs.judging import UNDECIDED, JudgedClaim, find_setup_differences, judge_claims
from mamf.logs.recording import RunEnd
from mamf.logs.roofs import build_roofs_from_logs
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.plans import EXPLAIN, GUARD, OVERLAP, REPRODUCE, ROOFLINE, VERIFY, Plan, ReproduceOptions
from mamf.report.charts.picture import Picture
from mamf.report.comparison import (
    describe_differences,
    format_as_percent,
    format_change_interval,
    format_ratio_interval,
)
from mamf.report.document import (
    Answer,
    Block,
    Column,
    Document,
    Lines,
    Table,
    choose_unit,
    describe_machine,
    describe_run_end,
    format_four_digits,
    format_interval,
    format_percent,
    format_rate,
    make_interval_columns,
)
from mamf.report.explanation import make_explanation_document, make_waterfall_chart, make_waterfall_steps
from mamf.report.overlap import make_overlap_chart, make_overlap_document
from mamf.report.roofline import make_roofline_chart, make_roofline_document
from mamf.report.rows import rank_rows
from mamf.report.shares import make_problem_title_in_words
from mamf.report.verification import count_verified_items, make_verification_document

if TYPE_CHECKING:
    from mamf.engine.runner import RunSetup, Strategy


class ExplainKind(RunKind):
    """A kind of run that measures one matmul with several kinds of data, to show why the matmul is slower than the
    datasheet says.
    """

    name = EXPLAIN
    noun_phrase = "an explanation"

    def make_document(self, log: RunLog, report_options: ReportOptions) -> Document:
        rows = log.measurements
        if not rows:
            return super().make_document(log, report_options)
        first = rows[0]
        return make_explanation_document(
            make_waterfall_steps(rows, DeviceInfo(**log.header["device"])),
            rows,
            [describe_machine(log.header), f"{first.problem.dtype}, {first.shape} by {first.kernel}"],
            [describe_run_end(log.summary)],
        )

    def make_chart(self, log: RunLog, regime: str | None = None, directions: Sequence[str] | None = None) -> Picture:
        return make_waterfall_chart(
            make_waterfall_steps(log.measurements, DeviceInfo(**log.header["device"])), log.measurements, log.header
        )


class GuardKind(RunKind):
    """A kind of run that measures kernels as a baseline, or compares kernels with the baseline in an earlier log."""

    name = GUARD
    noun_phrase = "a guard"

    def format_command(self, plan: Plan) -> str:
        return f"{GUARD} FILE.toml"

    def make_document(self, log: RunLog, report_options: ReportOptions) -> Document:
        return super().make_document(select_median_rounds(log), report_options)

    def make_chart(self, log: RunLog, regime: str | None = None, directions: Sequence[str] | None = None) -> Picture:
        return super().make_chart(select_median_rounds(log), regime)


def select_median_rounds(log: RunLog) -> RunLog:
    """Return a log that has, of each row that was measured several times, only the round with the median rate."""
    counted = map(select_counted_measurements, group_by_key(log.all_rows).values())
    medians = [replace(rows[(len(rows) - 1) // 2], phase="") for rows in map(rank_rows, counted)]
    return replace(log, measurements=medians)


#: The minimum duration of a row in seconds. If a run has a time budget, rows are made shorter to fit, but not shorter
#: than this.
_MIN_OVERLAP_ROW_SECONDS = 1.0
#: mamf measures a matmul, other work, and both at once: three rows. Before each row it loads the device for up to the
#: time of a row. With the preparation of the operands, a pair takes about this many times as long as one row.
_OVERLAP_ROWS_PER_PAIR = 7


class OverlapKind(RunKind):
    """A kind of run that runs a matmul and other work at the same time, and measures how much each slows down."""

    name = OVERLAP
    noun_phrase = "an overlap"

    def make_strategy(self, setup: RunSetup) -> Strategy:
        from mamf.engine.strategies.studies import DEFAULT_ROW_SECONDS, OverlapStrategy, list_overlap_pairs
        from mamf.operations.overlap import WorkPairKernel

        plan = setup.plan
        pairs, budget_seconds = list_overlap_pairs(setup.remaining_row_keys), plan.budget_seconds or math.inf
        # Shorten the rows so that all pairs fit into the budget.
        fitting_seconds = max(_MIN_OVERLAP_ROW_SECONDS, budget_seconds / (_OVERLAP_ROWS_PER_PAIR * max(1, len(pairs))))
        row_seconds = plan.seconds or min(DEFAULT_ROW_SECONDS, fitting_seconds)
        return OverlapStrategy(setup.backend, WorkPairKernel(), pairs, row_seconds, budget_seconds, setup.report_phase)

    def make_document(self, log: RunLog, report_options: ReportOptions) -> Document:
        return make_overlap_document(log.measurements, log.header, log.summary, report_options.max_rows)

    def make_chart(self, log: RunLog, regime: str | None = None, directions: Sequence[str] | None = None) -> Picture:
        return make_overlap_chart(log.measurements, log.header)


class RooflineKind(FindKind):
    """The kind of run of old versions of ``mamf roofline``, which wrote compute and bandwidth ceilings to one log. Now
    ``mamf roofline`` writes a separate log for each search.
    """

    name = ROOFLINE
    noun_phrase = "a roofline"
    left_noun = ""

    def make_document(self, log: RunLog, report_options: ReportOptions) -> Document:
        return make_roofline_document(
            build_roofs_from_logs([log]),
            [],
            [describe_machine(log.header), describe_run_end(log.summary, left_noun=self.left_noun)],
            report_options.max_rows,
        )

    def make_chart(self, log: RunLog, regime: str | None = None, directions: Sequence[str] | None = None) -> Picture:
        return make_roofline_chart(build_roofs_from_logs([log]), [], log.header)


class VerifyKind(RunKind):
    """A kind of run that launches kernels on random problems, and checks every element of each output."""

    name = VERIFY
    noun_phrase = "a verification of kernels"
    is_accepted_in_results = False  # A verification has no rates.

    def make_strategy(self, setup: RunSetup) -> Strategy:
        from mamf.engine.strategies.studies import VerifyStrategy

        return VerifyStrategy(setup)

    def count_remaining_steps(self, setup: RunSetup) -> int:
        return 0  # A verification has no fixed number of steps: it runs until its budget ends.

    def make_document(self, log: RunLog, report_options: ReportOptions) -> Document:
        return make_verification_document(log, report_options.max_rows)

    def make_chart(self, log: RunLog, regime: str | None = None, directions: Sequence[str] | None = None) -> Picture:
        raise UsageError(f"{log.path} is a verification, which has no rates to draw: print it with 'mamf show'")

    def make_summary(
        self, plan: Plan, rows: Sequence[Measurement], ceilings: AnyCeilings, end: RunEnd
    ) -> dict[str, Any]:
        return {**end.make_summary(sum(row.ok for row in rows)), "best": {}, **count_verified_items(rows)}


class ReproduceKind(RunKind):
    """A kind of run that measures claims (rates from another log or text) again on this device, and compares the device
    and software of both measurements.
    """

    name = REPRODUCE
    noun_phrase = "a reproduction"
    is_accepted_in_results = False  # The claims selected the rows, so they do not represent the device.

    def make_strategy(self, setup: RunSetup) -> Strategy:
        from mamf.engine.strategies.studies import ReproduceStrategy

        return ReproduceStrategy(setup)

    def count_remaining_steps(self, setup: RunSetup) -> int:
        """Return the number of claims that are not measured yet."""
        return sum(each.measured_row is None for each in judge_claims(setup.plan.options, setup.rows))

    def make_chart(self, log: RunLog, regime: str | None = None, directions: Sequence[str] | None = None) -> Picture:
        raise UsageError(
            f"{log.path} is a log of 'mamf reproduce', which has no picture: print its rates with 'mamf show'"
        )

    def make_document(self, log: RunLog, report_options: ReportOptions) -> Document:
        options: ReproduceOptions = log.plan.options
        judged_claims = judge_claims(options, log.measurements, log.header)
        differences = find_setup_differences(options, judged_claims, log.header)
        data = {
            "header": log.header,
            "summary": log.summary,
            "source": options.source,
            "differences": [asdict(each) for each in differences] if options.recorded else None,
        }
        unknown_setup_lines = (
            []
            if options.recorded
            else ["the claims name no device or software, so differences between the two setups are unknown"]
        )
        blocks: list[Block] = [
            Lines(
                [
                    f"claims of {options.source}, measured on {describe_machine(log.header)}",
                    *unknown_setup_lines,
                    *describe_differences("the claims were measured under other conditions: ", differences),
                ]
            ),
            Table(
                _make_claim_columns(judged_claims),
                judged_claims,
                key="claims",
                get_remarks=_list_claim_remarks,
                get_label=_make_claim_label,
            ),
            Answer(
                [*(_format_verdict_line(each, differences) for each in judged_claims), describe_run_end(log.summary)]
            ),
        ]
        return Document("Reproduction", blocks, data)


def _make_claim_columns(judged_claims: list[JudgedClaim]) -> list[Column[JudgedClaim]]:
    unit = next((each.measured_row.unit for each in judged_claims if each.measured_row), "TFLOPS")
    title, factor = choose_unit(unit, [each.claim.rate for each in judged_claims])
    interval = partial(format_interval, factor=factor)
    return [
        Column("regime", "", lambda each: each.claim.step[0]),
        Column("problem", "problem", _make_problem_title, is_left_aligned=True),
        Column("shape", "shape", lambda each: str(each.claim.step[2]), is_left_aligned=True),
        Column("kernel", "kernel", lambda each: each.claim.step[3], drop_priority=2, is_left_aligned=True),
        Column("claimed", f"claimed {title}", lambda each: each.claim.rate, lambda it: format_four_digits(it * factor)),
        *make_interval_columns(lambda each: each.claim.interval, "claimed_{}", interval),
        Column(
            "here",
            "here",
            lambda each: each.measured_row and each.measured_row.rate,
            lambda it: format_four_digits(it * factor),
        ),
        *make_interval_columns(lambda each: each.measured_row and each.measured_row.interval, "here_{}", interval),
        Column("claimed_cycles_used", "claimed % cycles", lambda each: each.used_cycle_shares[0], format_percent),
        Column("here_cycles_used", "here", lambda each: each.used_cycle_shares[1], format_percent),
        Column("unit", "", lambda each: unit),
        Column("ratio", "here/claimed", lambda each: each.pair and each.pair.ratio, "{:.4f}".format, drop_priority=1),
        *make_interval_columns(
            lambda each: each.pair.interval if each.pair and each.pair.has_known_intervals else None,
            "ratio_{}",
            format_ratio_interval,
        ),
        Column("verdict", "verdict", lambda each: each.verdict, is_left_aligned=True),
        Column("is_slower", "", lambda each: each.is_slower),
    ]  # fmt: skip


def _make_problem_title(judged_claim: JudgedClaim) -> str:
    return make_problem_title_in_words(*judged_claim.claim.step[:2])


def _make_claim_label(judged_claim: JudgedClaim) -> str:
    return f"{_make_problem_title(judged_claim)}, {judged_claim.claim.step[2]} by {judged_claim.claim.step[3]}"


def _list_claim_remarks(judged_claim: JudgedClaim) -> list[str]:
    row, pair = judged_claim.measured_row, judged_claim.pair
    is_significant_at_95 = (
        pair is not None and pair.has_known_intervals and not pair.interval.low <= 1 <= pair.interval.high
    )
    remarks = {
        "the claim has no samples: mamf uses its rounding error as its interval, and assumes that it scatters as much "
        "as the measurement here": judged_claim.claim.error is None,
        "undecided, because other work used the CPU: measure again on a quiet machine": row and row.was_cpu_device_busy,
        f"undecided, because the {format_as_percent(pair.strict_confidence if pair else 0)} interval of here/claimed "
        "contains 1": judged_claim.verdict == UNDECIDED and is_significant_at_95,
        "the cards differ, so here/claimed compares the shares of cycles that the kernel uses, not its rates": any(
            judged_claim.used_cycle_shares
        ),
        f"{row.status}: {row.reason}" if row else "": row and row.reason,
    }
    return [text for text, is_true in remarks.items() if is_true]


def _format_verdict_line(judged_claim: JudgedClaim, differences: Sequence[Difference]) -> str:
    unit, change = judged_claim.measured_row.unit if judged_claim.measured_row else "TFLOPS", ""
    if judged_claim.pair and judged_claim.measured_row:
        change = f"{100 * (judged_claim.pair.ratio - 1):+.2f} % ({format_change_interval(judged_claim.pair)})"
        claimed_cycles, measured_cycles = judged_claim.used_cycle_shares
        cycles = (
            f"; {format_percent(claimed_cycles)} % of the units' cycles claimed, "
            f"{format_percent(measured_cycles)} % here"
            if claimed_cycles and measured_cycles
            else ""
        )
        change = f", {format_rate(judged_claim.measured_row.rate or 0.0, unit)} here{cycles}: {change}"
    beyond = f" by more than {format_as_percent(judged_claim.tolerance)}" if judged_claim.is_slower else ""
    device = ", on another device" if any(one.name == "device" for one in differences) else ""
    return (
        f"{judged_claim.verdict}{beyond}{device}: {_make_claim_label(judged_claim)}: "
        f"{format_rate(judged_claim.claim.rate, unit)} claimed{change}"
    )


STUDY_KINDS = (RooflineKind(), ExplainKind(), GuardKind(), ReproduceKind(), OverlapKind(), VerifyKind())
