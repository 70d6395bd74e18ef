"""Make the reports of runs of kernels of any operation: a ranked table for each regime and problem, and the best kernel
of each shape.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mamf.ceilings.ceiling import MAX_COMPARABLE_DRIFT_SHARE, has_card_drifted
from mamf.logs.recording import RunEnd
from mamf.logs.records import round_to_six_digits
from mamf.logs.run_log import CeilingsByProblemAndRegime
from mamf.measurement import Measurement, group_pairs
from mamf.operations.unknown import get_operation
from mamf.report.ceilings import describe_interval
from mamf.report.document import (
    Answer,
    Block,
    Column,
    Document,
    Lines,
    Table,
    describe_counted_work,
    describe_machine,
    describe_run_end,
    format_count,
    format_four_digits,
    format_percent,
    format_rate,
    label_kernel,
    make_rate_column,
    make_rate_key,
    split_shared_parts,
)
from mamf.report.rows import (
    GetSpeedUp,
    RowGroupKey,
    describe_best_rows,
    describe_devices,
    describe_drift,
    describe_failures,
    format_row_label,
    get_half_width_percent,
    group_rows,
    list_row_remarks,
    make_device_record,
    make_group_title,
    make_row_columns,
    rank_rows,
)
from mamf.report.shares import (
    ShareCalculator,
    format_drift,
    make_ceiling_table,
    make_ceiling_title,
    make_problem_title,
    summarize_ceiling,
)


def choose_baselines(rows: Iterable[Measurement], name: str | None) -> dict[RowGroupKey, Measurement | None]:
    """Choose the baseline of each shape that has rows of several kernels. Speed-ups are relative to the baseline.

    The baseline is the row of kernel ``name``, or None if this kernel has no row. If ``name`` is None, the baseline is
    the row of ``eager``, or the slowest row if ``eager`` has none.
    """
    baselines: dict[RowGroupKey, Measurement | None] = {}
    for key, group in group_rows(rows, has_group_per_shape=True).items():
        if len({row.kernel for row in group}) > 1:
            measured = [row for row in group if row.ok]
            named = next((row for row in measured if row.kernel == (name or "eager")), None)
            slowest = min(measured, key=lambda row: row.comparable_rate, default=None)
            baselines[key] = named or (None if name else slowest)
    return baselines


def compute_speed_up(row: Measurement, baseline: Measurement | None) -> float | None:
    if baseline is None or baseline.summary is None or row.summary is None:
        return None
    return baseline.comparable_seconds / row.comparable_seconds


@dataclass(frozen=True)
class BestKernel:
    """The best kernel of a shape.

    - ``row``: the row of the best kernel.
    - ``runner_up``: the row of the second-best kernel, None if no other kernel has a rate.
    - ``ranked``: the rows of all kernels that have a rate, the fastest first.
    """

    row: Measurement
    runner_up: Measurement | None
    ranked: Sequence[Measurement]

    @property
    def is_lead_unknown(self) -> bool:
        """Whether there is a second-best kernel, but its interval or that of the best kernel is unknown."""
        return self.runner_up is not None and not (self.row.interval.is_known and self.runner_up.interval.is_known)

    @property
    def lead(self) -> float | None:
        """By which share of the second-best kernel's rate the best kernel is faster. None if there is no second-best
        kernel, or if the kernels are tied: their intervals overlap, or one is unknown.
        """
        if (
            self.runner_up is None
            or self.is_lead_unknown
            or self.row.comparable_interval.overlaps(self.runner_up.comparable_interval)
        ):
            return None
        return self.row.comparable_rate / self.runner_up.comparable_rate - 1


def find_best_kernels(rows: Iterable[Measurement], min_kernel_count: int = 2) -> list[BestKernel]:
    """Return the best kernel of each shape for which the log has rows of at least ``min_kernel_count`` kernels."""
    best_kernels = []
    for group in group_rows(rows, has_group_per_shape=True).values():
        ranked = rank_rows({row.kernel: row for row in reversed(group) if row.ok}.values())
        if ranked and len({row.kernel for row in group}) >= min_kernel_count:
            best_kernels.append(BestKernel(ranked[0], ranked[1] if len(ranked) > 1 else None, ranked))
    return best_kernels


def make_best_kernel_table(
    best_kernels: Sequence[BestKernel], shares: ShareCalculator, top: int | None
) -> Table[BestKernel]:
    """Return a table of the best kernel of each shape.

    ``best_kernels``: must not be empty. ``top``: the maximum number of rows that people see; None for all.
    """
    names, shared = split_shared_parts([make_group_title(each.row, shares.header) for each in best_kernels])
    name_by_id = dict(zip(map(id, best_kernels), names, strict=True))
    unit = best_kernels[0].row.work.unit
    columns: list[Column[BestKernel]] = [
        Column("problem", "", lambda each: make_group_title(each.row, shares.header)),
        Column(
            "", "problem", lambda each: name_by_id[id(each)] or ("default" if any(names) else ""), is_left_aligned=True
        ),
        Column("shape", "shape", lambda each: str(each.row.shape), is_left_aligned=True),
        Column(
            "kernel",
            "best kernel",
            lambda each: each.row.kernel,
            lambda name: label_kernel(name, shares.header),
            is_left_aligned=True,
        ),
        make_rate_column(make_rate_key("rate", unit), unit, lambda each: each.row.best_rate, best_kernels),
        Column(
            "half_width_percent", "+-%", lambda each: get_half_width_percent(each.row), lambda value: f"{value:.2f}", 3
        ),
        Column("mbu", "MBU", lambda each: shares.compute_row_mbu(each.row), format_percent, 1),
        Column("mamfu", "MAMFU", lambda each: shares.compute_row_mamfu(each.row), format_percent, 1),
        Column("ahead", "", lambda each: each.lead),
        Column(
            "",
            "ahead %",
            lambda each: (
                each.runner_up
                and ("unknown" if each.is_lead_unknown else "tied" if each.lead is None else format_percent(each.lead))
            ),
            drop_priority=2,
        ),
        Column(
            "second",
            "second",
            lambda each: each.runner_up and each.runner_up.kernel,
            lambda name: label_kernel(name, shares.header),
            2,
            True,
        ),
    ]
    return Table(
        columns,
        best_kernels,
        f"best kernel per shape: {shared}",
        "best_kernels",
        max_shown_rows=top,
        get_remarks=lambda each: (
            "ahead % is unknown, because the interval of one of the two kernels is unknown"
            if each.is_lead_unknown
            else "",
            f"{format_drift()}: another kernel may be best"
            if any(has_card_drifted(row, shares.measured_ceilings, MAX_COMPARABLE_DRIFT_SHARE) for row in each.ranked)
            else "",
        ),
        get_label=lambda each: ", ".join(filter(None, (str(each.row.shape), name_by_id[id(each)]))),
    )


def describe_best_kernel_counts(best_kernels: Sequence[BestKernel]) -> str:
    """Return a line that says in how many rows of the table of best kernels each kernel stands."""
    counts = Counter(each.row.kernel for each in best_kernels).most_common()
    return "how often each kernel is first in this table, tied (the intervals overlap) or not: " + ", ".join(
        f"{kernel} {count}" for kernel, count in counts
    )


def make_ranking_table(
    rows: Sequence[Measurement],
    shares: ShareCalculator,
    get_speed_up: GetSpeedUp,
    top: int | None = None,
    baseline: Measurement | None = None,
    has_one_shape: bool = False,
) -> Table[Measurement]:
    """Return the table of rows that are ranked together.

    - ``get_speed_up``: returns the rate of a row divided by the rate of its baseline.
    - ``baseline``: the row to which speed-ups are relative. The title names its kernel if ``has_one_shape``.
    - ``has_one_shape``: whether all rows have the same shape. Then the table ranks kernels.
    """
    shape = ""
    if has_one_shape:
        over = f"; speed-up over {baseline.kernel}" if baseline else ""
        shape = f": {get_operation(rows[0].operation).describe_shape(rows[0].shape)}{over}"
    return Table(
        make_row_columns(rows, shares, get_speed_up, has_one_shape),
        rows,
        f"{make_group_title(rows[0], shares.header)}{shape}",
        "measurements",
        [row for row in rows if row.ok],
        top,
        lambda row: list_row_remarks(row, shares),
        format_row_label,
    )


def make_group_tables(
    rows: Sequence[Measurement], shares: ShareCalculator, top: int | None = None, baseline: str | None = None
) -> Iterator[Block]:
    """Yield a table for each group of rows that are ranked together, and after each table lines about the failures in
    the group. Last, yield a table of the reference rows, which only CSV and JSON show. (A run measures a reference
    repeatedly to see how the speed of the device drifts.)

    By default, all rows of a regime and problem form one group. If the operation ranks each shape separately, each
    shape is a group, unless there are several shapes and ``top`` limits the rows.

    - ``top``: the maximum number of rows that each table shows to people (csv and json have all rows); None for all.
    - ``baseline``: the kernel to which speed-ups are relative.
    """
    baselines = choose_baselines(rows, baseline)

    def get_speed_up(row: Measurement) -> float | None:
        return compute_speed_up(row, baselines.get((row.regime, row.problem, row.shape)))

    operation = find_operation_name(rows, shares.header)
    has_one_shape = len({(row.regime, row.problem, row.shape) for row in rows if not row.is_reference}) == 1
    has_group_per_shape = get_operation(operation).ranks_by_shape and (top is None or has_one_shape)
    for key, group in group_rows(rows, has_group_per_shape).items():
        yield make_ranking_table(group, shares, get_speed_up, top, baselines.get(key), has_group_per_shape)
        yield Lines(describe_failures(group))
    if references := [row for row in rows if row.is_reference and row.operation == operation]:
        hidden = [replace(each, title="") for each in make_row_columns(references, shares, get_speed_up)]
        yield Table(hidden, references, key="measurements")


_RowsByPhase = Mapping[str, Measurement]


#: How the time of each part of a training step is computed: the time of the first phase minus the time of the second
#: phase, if there is a second. A run measures three phases, which all begin at the start of a step: the forward pass,
#: the forward and backward passes, and the whole step.
_PHASES_BY_STEP_PART: Mapping[str, tuple[str, ...]] = {
    "forward": ("forward",),
    "backward": ("forward-backward", "forward"),
    "optimizer": ("step", "forward-backward"),
}


def _make_step_part_columns(name: str, phases: Sequence[str]) -> list[Column[tuple[Any, _RowsByPhase]]]:
    """Return two columns: the time of a part of a step, and the half-width of its interval. The rows of the table are
    pairs of a step and its measured phases.
    """

    def compute_milliseconds(pair: tuple[Any, _RowsByPhase]) -> float | None:
        seconds = [pair[1][phase].seconds for phase in phases if phase in pair[1]]
        return 1e3 * (seconds[0] - sum(seconds[1:])) if len(seconds) == len(phases) else None

    def compute_half_width_milliseconds(pair: tuple[Any, _RowsByPhase]) -> float | None:
        rows = [pair[1][phase] for phase in phases if phase in pair[1]]
        if len(rows) < len(phases) or not all(row.interval.is_known for row in rows):
            return None
        # The phases are independent measurements, so combine their half-widths as the root of the sum of squares.
        return 1e3 * math.hypot(*(row.seconds * row.relative_half_width for row in rows))

    return [
        Column(f"{name}_ms", f"{name} ms", compute_milliseconds, format_four_digits),
        Column(
            f"{name}_half_width_ms",
            "+-ms",
            compute_half_width_milliseconds,
            lambda milliseconds: f"{float(f'{milliseconds:.2g}'):g}",  # 150, not 1.5e+02
            2,
        ),
    ]


def yield_step_part_blocks(rows: Sequence[Measurement]) -> Iterator[Block]:
    """Yield a table with the times of the forward pass, the backward pass and the optimizer, and a line that explains
    the columns. Each training step has a row. Yield nothing if no step has several measured phases.
    """
    steps = group_pairs(
        ((row.kernel, str(row.shape), row.regime, replace(row.problem, phase="step")), row)
        for row in rows
        if row.ok and getattr(row.problem, "phase", None)
    )
    steps_with_phases = ((step, {row.problem.phase: row for row in group}) for step, group in steps.items())
    with_several_phases = [each for each in steps_with_phases if len(each[1]) > 1]
    if not with_several_phases:
        return
    columns: list[Column[tuple[Any, _RowsByPhase]]] = [
        Column("kernel", "kernel", lambda each: each[0][0], is_left_aligned=True),
        Column("shape", "shape", lambda each: each[0][1], is_left_aligned=True),
        Column("regime", "regime", lambda each: each[0][2], drop_priority=3, is_left_aligned=True),
        *(column for part in _PHASES_BY_STEP_PART.items() for column in _make_step_part_columns(*part)),
    ]
    yield Table(
        columns,
        with_several_phases,
        key="parts",
        get_remarks=lambda each: (
            ["+-ms of a part is unknown if the interval of one of its phases is unknown"]
            if any(not row.interval.is_known for row in each[1].values())
            else []
        ),
        get_label=lambda each: f"{each[0][0]} {each[0][1]}",
    )
    yield Lines(["backward = forward-backward minus forward; optimizer = step minus forward-backward"])


def make_kernels_document(
    rows: Sequence[Measurement],
    shares: ShareCalculator,
    summary: Mapping[str, Any] | None,
    *,
    top: int | None = None,
    confirmed_ceilings: CeilingsByProblemAndRegime | None = None,
    baseline: str | None = None,
) -> Document:
    """Return the report of a run of kernels.

    - ``summary``: the last record of the log, None if the run was killed.
    - ``top``: the maximum number of rows that each table shows to people (csv and json have all rows); None for all.
    - ``confirmed_ceilings``: the ceilings that the run itself found.
    - ``baseline``: the kernel to which speed-ups are relative.
    """
    header, operation = shares.header, find_operation_name(rows, shares.header)
    # If a run was interrupted, some kernels may have no row of the last shapes, so the best kernel is unknown.
    best = find_best_kernels(rows, max(2, len(header["plan"].get("kernels", ()))))
    unranked_count = len(group_rows([row for row in rows if row.ok], has_group_per_shape=True)) - len(best)
    shown = [row for group in group_rows(rows).values() for row in group]
    has_process_memory = "converted_from" in header and any(row.peak_memory_bytes is not None for row in shown)
    head = [
        f"{operation} on {describe_machine(header)}",
        *([describe_counted_work(row.work for row in shown)] if shown else []),
        *(
            ["'memory MiB' counts the whole process, not only the kernel, because an old mamf wrote this log"]
            if has_process_memory
            else []
        ),
        *(describe_devices(rows, header) if header.get("devices") else ()),
        *shares.describe_ceilings(rows),
    ]
    with_ceiling = {(each.regime, each.problem) for each in (confirmed_ceilings or {}).values()}
    answers = [
        f"{make_ceiling_title(each)}: {describe_interval(each, rows)}"
        for each in (confirmed_ceilings or {}).values()
        if not each.interval.is_known
    ]
    for (regime, problem, _), group in group_rows(rows).items():
        answers += describe_best_rows(group, shares) if group[0].ok and (regime, problem) not in with_ceiling else []
    for regime in dict.fromkeys(row.regime for row in rows):
        answers += describe_drift([row for row in rows if row.is_reference and row.regime == regime])
    search_note = next(
        (
            f": the run ended while it searched for the ceiling; the best rate so far is "
            f"{format_rate(row.best_rate, row.work.unit)} @ {row.shape}"
            for row in rank_rows(row for row in rows if row.ok and row.phase and not shown)
        ),
        "",
    )
    blocks: list[Block] = [
        Lines(head),
        *([make_ceiling_table(list(confirmed_ceilings.values()), header)] if confirmed_ceilings else []),
        *([make_best_kernel_table(best, shares, top)] if best else []),
        Lines(
            [
                *(
                    ["tables of rows show the first measurement of each row; ceilings come from later measurements"]
                    if confirmed_ceilings
                    else []
                ),
                *([describe_best_kernel_counts(best)] if len(best) > 1 else []),
                *(
                    [
                        f"not all kernels were measured in {format_count(unranked_count, 'other case')} (a shape with "
                        "its regime, dtype and options such as the direction)"
                    ]
                    if best and unranked_count and confirmed_ceilings is None
                    else []
                ),
            ]
        ),
        *make_group_tables(rows, shares, top, baseline),
        *yield_step_part_blocks(rows),
        Answer(
            [
                *answers,
                *([] if answers or with_ceiling else [f"no row of {operation} was measured{search_note}"]),
                describe_run_end(summary, left_noun="measurement" if confirmed_ceilings is None else "ceiling"),
            ]
        ),
    ]
    return Document(
        f"{operation} on {header['device']['name']}", blocks, {"header": header, "summary": summary}, "measurements"
    )


def find_operation_name(rows: Sequence[Measurement], header: Mapping[str, Any]) -> str:
    """Return the name of the operation of the first ranked row, or of the plan if the log has no ranked row."""
    ranked = (row.operation for row in rows if not row.is_reference and not row.phase)
    return next(ranked, None) or str(header["plan"]["operation"])


def make_kernels_summary_record(
    rows: Sequence[Measurement], end: RunEnd, ceilings: CeilingsByProblemAndRegime | None = None
) -> dict[str, Any]:
    """Return the last record of the log of a run of kernels: how it ended, the best row of each regime and problem, and
    its ceilings.
    """
    best = [each[0] for each in group_rows(rows).values() if each[0].ok]
    confirmed = {
        make_problem_title(each.regime, each.problem): summarize_ceiling(each) for each in (ceilings or {}).values()
    }
    return {
        **end.make_summary(sum(row.ok and not row.is_reference for row in rows)),
        "best": {
            make_problem_title(row.regime, row.problem): {
                "kernel": row.kernel,
                "shape": str(row.shape),
                "rate": round_to_six_digits(row.best_rate),
                "unit": row.work.unit,
                "best_by": row.ranking_statistic,
                **make_device_record(row),
            }
            for row in best
        },
        **({"ceilings": confirmed} if confirmed else {}),
    }
