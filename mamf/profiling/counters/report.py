"""Make the report of ``mamf counters``: one row per kernel with its hardware counters and what bounds its speed.

A launch of a kernel may run several device kernels. Each of these then has a separate row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from mamf.logs.run_log import RunLog
from mamf.measurement import TERA, Measurement
from mamf.operations.unknown import get_operation
from mamf.profiling.counters.ncu import (
    ACTIVE_WARPS_PERCENT,
    BLOCK_COUNT,
    INSTRUCTION_COUNT,
    L1_HIT_PERCENT,
    L2_HIT_PERCENT,
    POSSIBLE_WARPS_PERCENT,
    REGISTERS_PER_THREAD,
    SHARED_BYTES_PER_BLOCK,
    TENSOR_PERCENT,
    Bound,
    DeviceKernel,
    LaunchCounts,
    find_launch_bound,
    make_step_key,
    read_counts,
    shorten_kernel_name,
)
from mamf.report.document import (
    Answer,
    Block,
    Column,
    Document,
    Lines,
    Table,
    describe_end,
    describe_machine,
    make_columns_from_mappings,
    make_rate_column,
)
from mamf.report.shares import make_problem_title


class CounterLine(NamedTuple):
    """One line of the table of counters: that of a launch, or that of one device kernel of a launch.

    - ``row``: the measurement of the launch.
    - ``kernel``: the counters of the device kernel; for a launch, their sums over its device kernels.
    - ``is_launch``: whether this is the line of a launch.
    - ``launch``: all counts of the launch; None in the line of a device kernel, or if nothing was counted.
    - ``first_launch_cycles``: the cycles of the first launch in the table, with which the table compares all launches.
    - ``reason``: why nothing was counted; empty if it was.
    - ``bound``: what bounds the launch; None in the line of a device kernel, or if nothing was counted.
    """

    row: Measurement
    kernel: DeviceKernel
    is_launch: bool = True
    launch: LaunchCounts | None = None
    first_launch_cycles: float | None = None
    reason: str = ""
    bound: Bound | None = None

    @property
    def cycles(self) -> float | None:
        return self.launch.median_cycles if self.launch else self.kernel.cycles

    @property
    def verdict(self) -> str:
        return f"bound by {self.bound.by}: {self.bound.why}" if self.bound else self.reason


def make_counters_document(log: RunLog) -> Document:
    """Make the report of the hardware counters in a log. Raises RunLogError for an invalid record of counters."""
    counts = read_counts(log)
    groups: dict[tuple[Any, Any], list[Measurement]] = {}
    for row in {make_step_key(row): row for row in log.measurements if not row.is_reference}.values():
        groups.setdefault((row.problem, row.shape), []).append(row)
    tables = [_make_counter_table(rows, counts) for rows in groups.values()]
    blocks: list[Block] = [
        Lines([f"hardware counters from ncu on {describe_machine(log.header)}"]),
        *tables,
        Lines([describe_end(log.summary)]),
        Answer([line for table in tables for line in _yield_answers(table)]),
    ]
    return Document("Hardware counters", blocks, {"header": log.header, "summary": log.summary})


def _make_counter_table(rows: Sequence[Measurement], counted: Mapping[Any, LaunchCounts]) -> Table[CounterLine]:
    """Make the table of the kernels that ran one problem with one shape.

    ``rows``: their measurements. ``counted``: counts by kernel, problem and shape. The printed table shows the device
    kernels of a launch only if it has several; csv and json always have them.
    """
    first_launch_cycles = next(
        (counts.median_cycles for row in rows if (counts := counted.get(make_step_key(row))) and counts.median_cycles),
        None,
    )
    lines = [
        line for row in rows for line in _yield_counter_lines(row, counted.get(make_step_key(row)), first_launch_cycles)
    ]
    return Table(
        _make_counter_columns(lines),
        lines,
        title=f"{make_problem_title(rows[0].regime, rows[0].problem)}, {rows[0].shape}",
        key="counters",
        shown_rows=[line for line in lines if line.is_launch or len(counted[make_step_key(line.row)].kernels) > 1],
        get_remarks=lambda line: [line.verdict] if line.is_launch else [],
        get_label=attrgetter("row.kernel"),
    )


def _yield_counter_lines(
    row: Measurement, counts: LaunchCounts | None, first_launch_cycles: float | None
) -> Iterator[CounterLine]:
    if counts is None or not counts.ok:
        reason = row.reason or (counts.reason if counts else "the run ended before this kernel was counted")
        yield CounterLine(
            row, DeviceKernel("", "", "", {}), reason=f"{'not counted' if row.ok else row.status}: {reason}"
        )
        return
    yield CounterLine(
        row,
        counts.total,
        True,
        counts,
        first_launch_cycles,
        bound=find_launch_bound(counts, row.seconds if row.ok else None),
    )
    for kernel in counts.kernels:
        yield CounterLine(row, kernel, False)


def _make_counter_columns(lines: Sequence[CounterLine]) -> list[Column[CounterLine]]:
    """Return the columns of the table of counters. csv and json have all metrics, under the names of ncu."""
    operation = get_operation(lines[0].row.operation)
    further_metrics = dict.fromkeys(
        name for line in lines for name in line.kernel.metrics if name not in _METRIC_COLUMNS
    )

    def get_rate(line: CounterLine) -> float | None:
        return line.row.best_rate if line.is_launch and line.row.ok else None

    return [
        Column(
            "",
            "kernel",
            lambda line: line.row.kernel if line.is_launch else f"  {shorten_kernel_name(line.kernel.name)}",
            is_left_aligned=True,
            min_characters=28,
        ),
        Column("cycles", "cycles", lambda line: line.cycles, "{:,.0f}".format),
        Column(
            "",
            "relative",
            lambda line: line.cycles / line.first_launch_cycles if line.cycles and line.first_launch_cycles else None,
            "{:.3f}".format,
            1,
        ),
        Column("operation", "", attrgetter("row.operation")),
        *make_columns_from_mappings(lines, lambda line: operation.make_problem_record(line.row.problem), titled=False),
        Column("shape", "", lambda line: str(line.row.shape)),
        Column("kernel", "", attrgetter("row.kernel")),
        Column("device_kernel", "", lambda line: "total" if line.is_launch else line.kernel.name),
        make_rate_column("", lines[0].row.work.unit, get_rate, lines, importance=1),
        Column("reason", "", attrgetter("reason")),
        Column("unit", "", lambda line: line.row.work.unit if line.is_launch else None),
        Column("rate", "", get_rate),
        Column("launches", "", lambda line: line.launch and len(line.launch.cycles)),
        Column("bound_by", "", lambda line: line.bound and line.bound.by),
        Column("bound_why", "", lambda line: line.bound and line.bound.why),
        Column("grid", "", attrgetter("kernel.grid")),
        Column("block", "", attrgetter("kernel.block")),
        Column("seconds", "us", attrgetter("kernel.seconds"), lambda seconds: f"{seconds * 1e6:.4g}", 3),
        Column("dram_bytes_per_second", "DRAM TB/s", _compute_dram_rate, lambda rate: f"{rate / TERA:.3g}", 4),
        *(
            Column(name, title, _make_metric_reader(name), form, rank)
            for name, (title, form, rank) in _METRIC_COLUMNS.items()
        ),
        Column("dram_bytes", "DRAM MB", attrgetter("kernel.dram_bytes"), lambda nbytes: f"{nbytes / 1e6:.4g}", 7),
        Column(
            "limited_by",
            "limited by",
            lambda line: ", ".join(line.kernel.occupancy_limiters) or None,
            str,
            6,
            is_left_aligned=True,
        ),
        *(Column(name, "", _make_metric_reader(name)) for name in further_metrics),
        Column("", "ran", _describe_device_kernels, importance=9, is_left_aligned=True),
    ]


#: For each metric in the printed table: the column's title, the function that formats its values, and its importance
#: (a narrow terminal drops the columns with the highest numbers first).
_METRIC_COLUMNS: Mapping[str, tuple[str, Callable[[Any], str], int]] = {
    TENSOR_PERCENT: ("tensor %", "{:.1f}".format, 2),
    L2_HIT_PERCENT: ("L2 hit %", "{:.0f}".format, 5),
    L1_HIT_PERCENT: ("L1 hit %", "{:.0f}".format, 5),
    ACTIVE_WARPS_PERCENT: ("warps %", "{:.1f}".format, 5),
    POSSIBLE_WARPS_PERCENT: ("possible", "{:.1f}".format, 6),
    REGISTERS_PER_THREAD: ("registers", "{:.0f}".format, 7),
    SHARED_BYTES_PER_BLOCK: ("shared KiB", lambda nbytes: f"{nbytes / 1024:.1f}", 7),
    BLOCK_COUNT: ("blocks", "{:,.0f}".format, 7),
    INSTRUCTION_COUNT: ("Minst", lambda count: f"{count / 1e6:.4g}", 8),
}


def _make_metric_reader(name: str) -> Callable[[CounterLine], float | None]:
    return lambda line: line.kernel.metrics.get(name)


def _compute_dram_rate(line: CounterLine) -> float | None:
    nbytes, seconds = line.kernel.dram_bytes, line.kernel.seconds
    return nbytes / seconds if nbytes is not None and seconds else None


def _describe_device_kernels(line: CounterLine) -> str | None:
    """Return the names of the device kernels that a launch ran, or None in the line of a device kernel."""
    is_one = line.launch is not None and len(line.launch.kernels) == 1
    return (shorten_kernel_name(line.kernel.name) if is_one else line.kernel.name) if line.launch else None


def _yield_answers(table: Table[CounterLine]) -> Iterator[str]:
    """Yield the conclusions of a table of counters, one line each.

    If several kernels were counted, say which has the fewest cycles and which is fastest in burst. Otherwise say what
    bounds each kernel.
    """
    launches = [line for line in table.rows if line.is_launch]
    ranked = [line for line in launches if line.row.ok and line.launch and line.cycles]
    if len(ranked) > 1:
        by_cycles = min(ranked, key=lambda line: line.cycles or 0.0).row.kernel
        in_burst = min(ranked, key=lambda line: line.row.seconds).row.kernel
        yield f"{table.title}: fewest cycles: {by_cycles}; fastest in burst: {in_burst}"
    else:
        yield from (f"{table.title}: {line.row.kernel}: {line.verdict}" for line in launches)
