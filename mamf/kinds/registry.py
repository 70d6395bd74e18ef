"""Find the kind of a run (sweep, find, guard...) by its plan. Make the title of a run and the chart of its log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mamf.ceilings.ceiling import MAX_COMPARABLE_DRIFT_SHARE, has_card_drifted
from mamf.errors import UsageError, require_known_names
from mamf.kinds.kind import FindKind, RunKind, SweepKind
from mamf.logs.run_log import RunLog
from mamf.operations.unknown import get_operation
from mamf.plans import ROOFLINE, SWEEP, VERIFY, Plan
from mamf.report.shares import LOW_CEILING_TEXT, ShareCalculator, format_drift

if TYPE_CHECKING:
    from mamf.report.charts.picture import Picture

#: The known kinds of runs by name. The kinds in studies.py are not in this dict until a plan needs one of them, because
#: importing studies.py is slow. ``get_kind`` then adds all of them.
RUN_KINDS: dict[str, RunKind] = {kind.name: kind for kind in (SweepKind(), FindKind())}


def get_kind(plan: Plan) -> RunKind:
    """Return the kind of run that a plan belongs to.

    If this version of mamf does not know the kind, return the kind of a sweep, which can show the rows of any log.
    """
    if plan.kind not in RUN_KINDS:
        from mamf.kinds.studies import STUDY_KINDS

        RUN_KINDS.update({kind.name: kind for kind in STUDY_KINDS})
    return RUN_KINDS.get(plan.kind, RUN_KINDS[SWEEP])


def make_run_title(plan: Plan) -> str:
    """Return the title of a run for reports and messages, such as ``a sweep of matmul``."""
    noun_phrase = get_kind(plan).noun_phrase
    # The operation of a plan is only one of the operations that a verification or a roofline runs.
    return (
        noun_phrase
        if plan.kind in (ROOFLINE, VERIFY) or noun_phrase.split()[-1] == plan.operation
        else f"{noun_phrase} of {plan.operation}"
    )


def make_log_chart(
    log: RunLog,
    regime: str | None = None,
    directions: Sequence[str] | None = None,
) -> Picture:
    """Make the chart of a log. Raises UsageError if the log does not have the regime or the directions to draw.

    ``regime``: the regime to draw; None: the first regime of an attention log, all regimes of other logs.
    ``directions``: the directions to draw; None: all.
    """
    from mamf.operations.attention.operation import ATTENTION_DIRECTIONS

    for name in directions or ():
        require_known_names(("direction", name, ATTENTION_DIRECTIONS))
    kind = get_kind(log.plan)
    if directions and not (kind.name == SWEEP and get_operation(log.plan.operation).chart_kind == "lengths"):
        raise UsageError(
            f"{log.path} is the log of {make_run_title(log.plan)}, whose chart has no direction: leave out --direction"
        )
    chart, shares = kind.make_chart(log, regime, directions), ShareCalculator(log.header, log.matmul_ceilings)
    # The measurements of a search for a ceiling say nothing about the shares of this ceiling.
    rows = [row for row in log.measurements if not row.phase and not row.is_reference]
    is_true_by_note = {
        f"{format_drift()} in some rows: do not compare their rates with others": any(
            has_card_drifted(row, shares.measured_ceilings, MAX_COMPARABLE_DRIFT_SHARE) for row in rows
        ),
        LOW_CEILING_TEXT: any(LOW_CEILING_TEXT in shares.yield_share_remarks(row) for row in rows),
        "the run was interrupted: measurements are missing": log.tier == "interrupted",
    }
    return replace(chart, notes=(*chart.notes, *(note for note, is_true in is_true_by_note.items() if is_true)))
