"""Kinds of runs: how a kind is measured and how its logs are reported.

This module defines the interface, and the kinds that measure the kernels of one operation: rows of given shapes (sweep)
and confirmed ceilings (find).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mamf.ceilings.ceiling import Ceiling, Ceilings, compute_mamfu, explain_no_ceiling
from mamf.ceilings.roof import Roofs, build_roofs
from mamf.errors import UsageError
from mamf.logs.recording import RunEnd
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.operations.unknown import get_operation
from mamf.plans import FIND, SWEEP, Plan
from mamf.report.ceilings import make_devices_document, make_find_document, make_find_summary_record
from mamf.report.document import Document
from mamf.report.kernels import make_kernels_document, make_kernels_summary_record
from mamf.report.rows import make_device_record, make_summary_record
from mamf.report.shares import Shares

if TYPE_CHECKING:
    from mamf.engine.runner import Setup, Strategy
    from mamf.report.charts.picture import Picture

#: Ceilings by any key that identifies them.
AnyCeilings = Mapping[Any, Ceiling]


@dataclass(frozen=True)
class ReportOptions:
    """What a report shows. ``top``: the maximum number of rows per table; None: no limit. ``roofs``: show rows as
    shares of these. ``baseline``: the kernel that speed-ups are relative to.
    """

    top: int | None = None
    roofs: Roofs | None = None
    baseline: str | None = None


@dataclass(frozen=True)
class ChartOptions:
    """What to draw of a log. If a field is None, the default of the log's kind applies."""

    regime: str | None = None
    directions: Sequence[str] | None = None

    def require_no_direction(self, log: RunLog) -> None:
        if self.directions:
            raise UsageError(f"{log.path} is a log of {log.plan.operation}, which has no direction: omit it")


class Kind(ABC):
    """A kind of run. ``noun``: what such a run is called. ``has_ceilings``: whether it confirms ceilings.
    ``is_collected``: whether results/ accepts its logs.
    """

    name: ClassVar[str]
    noun: ClassVar[str]
    has_ceilings: ClassVar[bool] = False
    is_collected: ClassVar[bool] = True

    def format_command(self, plan: Plan) -> str:
        """Return the mamf command for such a run."""
        return self.name

    @abstractmethod
    def make_strategy(self, setup: Setup) -> Strategy:
        """Return the strategy that measures the plan."""

    def count_left(self, setup: Setup) -> int:
        """Count the steps without a row, or the ceilings that are not confirmed."""
        return len(setup.remaining_steps)

    def is_cut_short(self, setup: Setup, skipped_count: int) -> bool:
        """Whether the budget ended the run early. ``skipped_count``: the number of steps that were skipped."""
        return bool(skipped_count)

    @abstractmethod
    def make_document(self, log: RunLog, view: ReportOptions) -> Document:
        """Return the report of a log."""

    @abstractmethod
    def make_chart(self, log: RunLog, drawing: ChartOptions) -> Picture:
        """Return the chart of a log. Raises UsageError if the log does not have what was requested."""

    @abstractmethod
    def make_summary(
        self, plan: Plan, rows: Sequence[Measurement], ceilings: AnyCeilings, end: RunEnd
    ) -> dict[str, Any]:
        """Return the last record of a log. ``ceilings``: those that the rows confirm, or that they are shares of."""


class KernelRows(Kind):
    """Rows of kernels of one operation, ranked together."""

    def make_strategy(self, setup: Setup) -> Strategy:
        from mamf.engine.strategies.rows import RowsStrategy

        return RowsStrategy(setup)

    def make_document(self, log: RunLog, view: ReportOptions) -> Document:
        shares = Shares(log.header, log.all_ceilings, log.known_ceilings, view.roofs or _build_confirmed_roofs(log))
        own = log.own_ceilings if self.has_ceilings else None
        rows, end, baseline = log.measurements, log.summary, view.baseline
        return make_kernels_document(rows, shares, end, top=view.top, confirmed=own, baseline=baseline)

    def make_chart(self, log: RunLog, drawing: ChartOptions) -> Picture:
        from mamf.report.charts.logs import make_kernels_chart

        drawing.require_no_direction(log)
        return make_kernels_chart(log.measurements, log.header, drawing.regime)

    def make_summary(
        self, plan: Plan, rows: Sequence[Measurement], ceilings: AnyCeilings, end: RunEnd
    ) -> dict[str, Any]:
        return make_kernels_summary_record(rows, end, dict(ceilings) if self.has_ceilings else {})


class Sweep(KernelRows):
    """Rows of given shapes."""

    name = SWEEP
    noun = "a sweep"

    def make_strategy(self, setup: Setup) -> Strategy:
        from mamf.engine.strategies.rows import OneKernelStrategy

        of = get_operation(setup.plan.operation)
        return super().make_strategy(setup) if of.compares_kernels else OneKernelStrategy(setup)

    def format_command(self, plan: Plan) -> str:
        return get_operation(plan.operation).own_command or f"{SWEEP} --operation {plan.operation}"

    def make_chart(self, log: RunLog, drawing: ChartOptions) -> Picture:
        from mamf.report.charts.decode import make_decode_chart
        from mamf.report.charts.logs import make_attention_chart, make_model_chart, make_sweep_chart

        rows, header, of = log.measurements, log.header, get_operation(log.plan.operation)
        if of.chart == "lengths":
            return make_attention_chart(rows, log.all_ceilings, header, drawing.regime, drawing.directions)
        drawing.require_no_direction(log)
        if of.chart == "caches":
            own = [row for row in rows if row.operation == of.name]
            return make_decode_chart(own, _build_confirmed_roofs(log), header, drawing.regime)
        if of.chart == "phases":
            return make_model_chart(rows, log.known_ceilings, header, drawing.regime)
        if of.chart == "shapes":
            return make_sweep_chart(rows, header, drawing.regime)
        return super().make_chart(log, drawing)

    def make_summary(
        self, plan: Plan, rows: Sequence[Measurement], ceilings: AnyCeilings, end: RunEnd
    ) -> dict[str, Any]:
        of = get_operation(plan.operation)
        if of.has_shares and not of.has_memory_shares:
            return make_shares_summary_record([row for row in rows if row.operation == of.name], dict(ceilings), end)
        return (
            super().make_summary(plan, rows, ceilings, end) if of.compares_kernels else make_summary_record(rows, end)
        )


class Find(KernelRows):
    """Confirmed ceilings, from a search on a grid or from the best of given shapes."""

    name = FIND
    has_ceilings = True
    noun = "a find"

    def make_strategy(self, setup: Setup) -> Strategy:
        from mamf.engine.search.strategy import FindStrategy, KernelsFindStrategy

        return FindStrategy(setup) if setup.plan.is_search else KernelsFindStrategy(setup)

    def count_left(self, setup: Setup) -> int:
        """Return the number of unconfirmed ceilings, of problems that some kernel supports."""
        plan, found = setup.plan, setup.confirmed_ceilings
        if explain_no_ceiling(setup.rows):
            return 0
        failed = {step for step, row in setup.answered_rows.items() if not row.ok}
        hopeful = plan.problems if plan.is_search else {step.problem for step in plan.steps(failed)}
        return sum(key not in found for key in itertools.product(hopeful, plan.regimes))

    def is_cut_short(self, setup: Setup, skipped_count: int) -> bool:
        return bool(skipped_count if explain_no_ceiling(setup.rows) else self.count_left(setup))

    def format_command(self, plan: Plan) -> str:
        return FIND if plan.is_search else f"{FIND} --operation {plan.operation}"

    def make_document(self, log: RunLog, view: ReportOptions) -> Document:
        if log.parts:
            return make_devices_document(log)
        if log.plan.is_search:
            return make_find_document(log.measurements, log.ceilings, log.header, log.summary)
        return super().make_document(log, view)

    def make_chart(self, log: RunLog, drawing: ChartOptions) -> Picture:
        if log.parts:
            raise UsageError(f"{log.path} has one find per device: draw one of its logs")
        if not log.plan.is_search:
            return super().make_chart(log, drawing)
        from mamf.report.charts.logs import make_find_chart

        drawing.require_no_direction(log)
        return make_find_chart(log.measurements, log.ceilings, log.header, drawing.regime)

    def make_summary(
        self, plan: Plan, rows: Sequence[Measurement], ceilings: AnyCeilings, end: RunEnd
    ) -> dict[str, Any]:
        """Return the last record of a log. ``ceilings``: by problem and regime."""
        if plan.is_search:
            return make_find_summary_record(rows, {regime: ceiling for (_, regime), ceiling in ceilings.items()}, end)
        return super().make_summary(plan, rows, ceilings, end)


def _build_confirmed_roofs(log: RunLog) -> Roofs | None:
    """Return the roofs that a log has confirmed, if memory may limit its rows; else None."""
    if not get_operation(log.plan.operation).has_memory_shares or not log.own_ceilings:
        return None
    ceilings = [*log.all_ceilings.values(), *log.own_ceilings.values()]
    return build_roofs(ceilings, log.header["device"]["cache_bytes"])


def make_shares_summary_record(rows: Sequence[Measurement], ceilings: Ceilings, end: RunEnd) -> dict[str, Any]:
    """Return the last record of a log: the best kernel of each regime, dtype and direction, with its share of the
    ceiling.
    """
    measured = [row for row in rows if row.ok and not row.is_reference]
    best: dict[str, Measurement] = {}
    for row in measured:
        key = f"{row.regime} {row.problem.dtype} {row.problem.direction}"
        if key not in best or row.rank > best[key].rank:
            best[key] = row
    shares = {key: compute_mamfu(row, ceilings) for key, row in best.items()}
    return {
        **end.make_summary(len(measured)),
        "best": {
            key: {
                "kernel": row.kernel,
                "shape": str(row.shape),
                "tflops": round(row.best_rate, 3),
                "mamfu": None if (share := shares[key]) is None else round(share, 4),
                **make_device_record(row),
            }
            for key, row in best.items()
        },
    }
