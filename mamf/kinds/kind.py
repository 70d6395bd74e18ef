"""Define the interface of a kind of run: how it is measured, and how its logs are reported, drawn and summarized.

The module also has the kinds that measure the kernels of one operation: rows of given shapes (``SweepKind``), and a
search for confirmed ceilings (``FindKind``).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mamf.ceilings.ceiling import (
    Ceiling,
    Ceilings,
    compute_mamfu,
    copy_as_given_ceiling,
    explain_missing_ceiling,
    find_row_ceiling,
)
from mamf.ceilings.roof import Roofs, build_roofs
from mamf.errors import UsageError
from mamf.logs.recording import RunEnd
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.operations.unknown import get_operation
from mamf.plans import FIND, SWEEP, Plan
from mamf.report.ceilings import make_find_by_device_document, make_find_document, make_find_summary_record
from mamf.report.document import Document
from mamf.report.kernels import make_kernels_document, make_kernels_summary_record
from mamf.report.rows import make_device_record, make_summary_record
from mamf.report.shares import ShareCalculator

if TYPE_CHECKING:
    from mamf.engine.runner import RunSetup, Strategy
    from mamf.report.charts.picture import Picture

#: A mapping from a key, such as (problem, regime), to a ceiling.
AnyCeilings = Mapping[Any, Ceiling]


@dataclass(frozen=True)
class ReportOptions:
    """The options that the user gives to the report of a log.

    - ``max_rows``: the maximum number of rows per table; None: no limit.
    - ``roofs``: ceilings that the report compares rows with; None: the ceilings in the log.
    - ``baseline_kernel``: the name of the kernel with which the report compares the speed of the other kernels; None:
      the kernel ``eager`` (plain PyTorch functions), or the slowest kernel if ``eager`` was not measured.
    """

    max_rows: int | None = None
    roofs: Roofs | None = None
    baseline_kernel: str | None = None


class RunKind:
    """A kind of run, such as a sweep: how mamf measures such a run, and how it reports, draws and summarizes its logs.

    The default methods are for logs with several kernels of one operation, which reports compare in one table.

    - ``name``: the name of the kind in plans and logs.
    - ``noun_phrase``: what such a run is called in a sentence, with an article, such as ``a sweep``.
    - ``has_ceilings``: True if such a run confirms ceilings.
    - ``left_noun``: what reports call one step that is left to measure; empty if --resume cannot continue such a run.
    - ``is_accepted_in_results``: True if results/ accepts logs of such a run.
    """

    name: ClassVar[str]
    noun_phrase: ClassVar[str]
    has_ceilings: ClassVar[bool] = False
    left_noun: ClassVar[str] = "measurement"
    is_accepted_in_results: ClassVar[bool] = True

    def format_command(self, plan: Plan) -> str:
        """Return the mamf command, without options, that starts a run with this plan."""
        return self.name

    def make_strategy(self, setup: RunSetup) -> Strategy:
        """Make the strategy for the plan of ``setup``. The strategy chooses, one after another, the steps to measure
        (each with a shape, a kernel and a regime).
        """
        from mamf.engine.strategies.rows import RowsStrategy

        return RowsStrategy(setup)

    def count_remaining_steps(self, setup: RunSetup) -> int:
        """Return the number of planned rows that are not measured yet. For a search, return the number of ceilings that
        are not confirmed yet.
        """
        return len(setup.remaining_row_keys)

    def is_run_cut_short(self, setup: RunSetup, skipped_step_count: int) -> bool:
        """Return whether the time budget ended the run early. ``skipped_step_count``: the number of steps that were not
        measured because the budget ended.
        """
        return bool(skipped_step_count)

    def make_document(self, log: RunLog, report_options: ReportOptions) -> Document:
        """Make the report of a log, as a document that can be printed in any format."""
        # Of the given ceilings, keep only those that have the dtype and regime of at least one row, because the others
        # are not needed to compute shares.
        row_ceilings = (
            find_row_ceiling(row, report_options.roofs.matmul_ceilings if report_options.roofs else {})
            for row in log.measurements
            if row.work.has_matmul_flop
        )
        used_ceilings = {(each.dtype, each.regime): each for each in row_ceilings if each is not None}
        shares = ShareCalculator(
            log.header,
            log.matmul_ceilings,
            {**log.known_ceilings, **{key: copy_as_given_ceiling(each) for key, each in used_ceilings.items()}},
            report_options.roofs or build_confirmed_roofs(log),
        )
        return make_kernels_document(
            log.measurements,
            shares,
            log.summary,
            top=report_options.max_rows,
            confirmed_ceilings=log.other_ceilings if self.has_ceilings else None,
            baseline=report_options.baseline_kernel,
        )

    def make_chart(self, log: RunLog, regime: str | None = None, directions: Sequence[str] | None = None) -> Picture:
        """Make the chart of a log. ``regime``: the regime to draw; None: the kind of the run chooses. ``directions``:
        the directions to draw, only for logs of attention; None: all. Raises UsageError if the log lacks the regime.
        """
        from mamf.report.charts.logs import make_kernels_chart

        return make_kernels_chart(log.measurements, log.header, regime)

    def make_summary(
        self, plan: Plan, rows: Sequence[Measurement], ceilings: AnyCeilings, end: RunEnd
    ) -> dict[str, Any]:
        """Make the summary, which is the last record of a log, from the rows and from how the run ended.

        ``ceilings``: the ceilings that the rows confirm, by problem and regime, or, if this kind of run confirms none,
        the ceilings that reports compare the rows with.
        """
        return make_kernels_summary_record(rows, end, dict(ceilings) if self.has_ceilings else {})


class SweepKind(RunKind):
    """A kind of run that measures every kernel of one operation on given shapes."""

    name = SWEEP
    noun_phrase = "a sweep"

    def make_strategy(self, setup: RunSetup) -> Strategy:
        from mamf.engine.strategies.rows import OneKernelStrategy

        operation = get_operation(setup.plan.operation)
        return super().make_strategy(setup) if operation.compares_kernels else OneKernelStrategy(setup)

    def format_command(self, plan: Plan) -> str:
        return get_operation(plan.operation).command_name or f"{SWEEP} --operation {plan.operation}"

    def make_chart(self, log: RunLog, regime: str | None = None, directions: Sequence[str] | None = None) -> Picture:
        from mamf.report.charts.attention import make_attention_chart, make_decode_chart
        from mamf.report.charts.logs import make_model_chart, make_sweep_chart

        rows, header, operation = log.measurements, log.header, get_operation(log.plan.operation)
        if operation.chart_kind == "lengths":
            return make_attention_chart(rows, log.matmul_ceilings, header, regime, directions)
        if operation.chart_kind == "caches":
            return make_decode_chart(
                [row for row in rows if row.operation == operation.name], build_confirmed_roofs(log), header, regime
            )
        if operation.chart_kind == "phases":
            return make_model_chart(rows, log.known_ceilings, header, regime)
        if operation.chart_kind == "shapes":
            return make_sweep_chart(rows, header, regime)
        return super().make_chart(log, regime)

    def make_summary(
        self, plan: Plan, rows: Sequence[Measurement], ceilings: AnyCeilings, end: RunEnd
    ) -> dict[str, Any]:
        operation = get_operation(plan.operation)
        if operation.shows_ceiling_shares and not operation.shows_bandwidth_shares:
            return make_shares_summary_record(
                [row for row in rows if row.operation == operation.name], dict(ceilings), end
            )
        return (
            super().make_summary(plan, rows, ceilings, end)
            if operation.compares_kernels
            else make_summary_record(rows, end)
        )


class FindKind(RunKind):
    """A kind of run that confirms ceilings. It searches a grid of matmul shapes. For other operations, it measures each
    planned shape once, and then the fastest ones repeatedly.
    """

    name = FIND
    has_ceilings = True
    left_noun = "ceiling"
    noun_phrase = "a search for ceilings"

    def make_strategy(self, setup: RunSetup) -> Strategy:
        from mamf.engine.search.strategy import GridSearchStrategy, RowsSearchStrategy

        return GridSearchStrategy(setup) if setup.plan.is_search else RowsSearchStrategy(setup)

    def count_remaining_steps(self, setup: RunSetup) -> int:
        """Return the number of ceilings that are not confirmed yet. Problems that no kernel supports do not count."""
        plan, confirmed = setup.plan, setup.confirmed_ceilings
        if explain_missing_ceiling(setup.rows):
            return 0
        failed = {key for key, row in setup.row_by_key.items() if not row.ok}
        supported_problems = plan.problems if plan.is_search else {key.problem for key in plan.list_row_keys(failed)}
        return sum(key not in confirmed for key in itertools.product(supported_problems, plan.regimes))

    def is_run_cut_short(self, setup: RunSetup, skipped_step_count: int) -> bool:
        return bool(skipped_step_count if explain_missing_ceiling(setup.rows) else self.count_remaining_steps(setup))

    def format_command(self, plan: Plan) -> str:
        return FIND if plan.is_search else f"{FIND} --operation {plan.operation}"

    def make_document(self, log: RunLog, report_options: ReportOptions) -> Document:
        if log.part_logs:
            return make_find_by_device_document(log)
        if log.plan.is_search:
            return make_find_document(log.measurements, log.ceilings, log.header, log.summary)
        return super().make_document(log, report_options)

    def make_chart(self, log: RunLog, regime: str | None = None, directions: Sequence[str] | None = None) -> Picture:
        if log.part_logs:
            raise UsageError(f"{log.path} has a separate search for each device: draw the log of one device")
        if not log.plan.is_search:
            return super().make_chart(log, regime)
        from mamf.report.charts.logs import make_find_chart

        return make_find_chart(log.measurements, log.ceilings, log.header, regime)

    def make_summary(
        self, plan: Plan, rows: Sequence[Measurement], ceilings: AnyCeilings, end: RunEnd
    ) -> dict[str, Any]:
        if plan.is_search:
            return make_find_summary_record(rows, {regime: ceiling for (_, regime), ceiling in ceilings.items()}, end)
        return super().make_summary(plan, rows, ceilings, end)


def build_confirmed_roofs(log: RunLog) -> Roofs | None:
    """Build the roofs of a device (its highest compute rates and memory bandwidths) from the confirmed ceilings in a
    log. Return None if the log confirms no ceiling except those of matmuls, or if mamf does not compare rows of the
    log's operation with memory bandwidth.
    """
    if not get_operation(log.plan.operation).shows_bandwidth_shares or not log.other_ceilings:
        return None
    return build_roofs(
        [*log.matmul_ceilings.values(), *log.other_ceilings.values()], cache_bytes=log.header["device"]["cache_bytes"]
    )


def make_shares_summary_record(rows: Sequence[Measurement], ceilings: Ceilings, end: RunEnd) -> dict[str, Any]:
    """Make the summary, which is the last record of a log, for an operation whose reports show rates as shares of a
    ceiling.

    The summary names the best row of each regime, dtype and direction, with its share of the matmul ceiling (MAMFU).
    """
    measured_rows = [row for row in rows if row.ok and not row.is_reference]
    best_rows: dict[str, Measurement] = {}
    for row in measured_rows:
        key = f"{row.regime} {row.problem.dtype} {row.problem.direction}"
        if key not in best_rows or row.rate_sort_key > best_rows[key].rate_sort_key:
            best_rows[key] = row
    return {
        **end.make_summary(len(measured_rows)),
        "best": {
            key: {
                "kernel": row.kernel,
                "shape": str(row.shape),
                "tflops": round(row.best_rate, 3),
                "mamfu": None if (share := compute_mamfu(row, ceilings)) is None else round(share, 4),
                **make_device_record(row),
            }
            for key, row in best_rows.items()
        },
    }
