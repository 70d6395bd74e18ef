"""Make the report of ``mamf counters``: one row per kernel with its hardware counters and what bounds its speed.

Some launches run several kernels on the device (device kernels). The report then also has a row for each of them.
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
    TENSOR_PIPE_PERCENT,
    Bound,
    CountersKey,
    DeviceKernelCounters,
    LaunchCounters,
    find_launch_bound,
    make_counters_key,
    read_logged_counters,
    shorten_kernel_name,
)
from mamf.report.document import (
    Answer,
    Block,
    Column,
    Document,
    Lines,
    Table,
    describe_machine,
    describe_run_end,
    make_columns_from_mappings,
    make_rate_column,
)
from mamf.report.shares import make_problem_title_in_words


class CounterLine(NamedTuple):
    """One line of the table of counters, for a launch or for one device kernel of a launch.

    - ``row``: the measurement of the launch.
    - ``counters``: the counters of the device kernel. In the line of a launch, each counter is the sum over the device
      kernels of the launch.
    - ``is_launch``: whether the line is for a whole launch.
    - ``launch_counters``: the counters of the launch; None in the line of a device kernel, or if no counters were read.
    - ``first_launch_cycles``: the cycles of the first launch in the table. The table compares all launches with it.
    - ``missing_reason``: why no counters were read; empty if they were read.
    - ``bound``: what bounds the launch; None for a device kernel, or if no counters were read.
    """

    row: Measurement
    counters: DeviceKernelCounters
    is_launch: bool = True
    launch_counters: LaunchCounters | None = None
    first_launch_cycles: float | None = None
    missing_reason: str = ""
    bound: Bound | None = None

    @property
    def cycles(self) -> float | None:
        return self.launch_counters.median_cycles if self.launch_counters else self.counters.cycles

    @property
    def bound_or_missing_reason(self) -> str:
        return f"bound by {self.bound.limiter} ({self.bound.evidence})" if self.bound else self.missing_reason


def make_counters_document(log: RunLog) -> Document:
    """Make the report of the hardware counters in a log. Raises RunLogError for an invalid record of counters."""
    counters_by_key = read_logged_counters(log)
    rows_by_problem_and_shape: dict[tuple[Any, Any], list[Measurement]] = {}
    for row in {make_counters_key(row): row for row in log.measurements if not row.is_reference}.values():
        rows_by_problem_and_shape.setdefault((row.problem, row.shape), []).append(row)
    tables = [_make_counter_table(rows, counters_by_key) for rows in rows_by_problem_and_shape.values()]
    blocks: list[Block] = [
        Lines([f"hardware counters from ncu on {describe_machine(log.header)}"]),
        *tables,
        Lines([describe_run_end(log.summary)]),
        Answer([line for table in tables for line in _yield_conclusions(table)]),
    ]
    return Document("Hardware counters", blocks, {"header": log.header, "summary": log.summary})


def _make_counter_table(
    rows: Sequence[Measurement], counters_by_key: Mapping[CountersKey, LaunchCounters]
) -> Table[CounterLine]:
    """Make the table of the kernels that ran the same problem and shape. ``rows``: the measurements of these kernels.

    If a launch ran several device kernels, the printed table has a line for each of them. csv and json contain the
    lines of all device kernels.
    """
    first_launch_cycles = next(
        (
            counters.median_cycles
            for row in rows
            if (counters := counters_by_key.get(make_counters_key(row))) and counters.median_cycles
        ),
        None,
    )
    lines = [
        line
        for row in rows
        for line in _yield_counter_lines(row, counters_by_key.get(make_counters_key(row)), first_launch_cycles)
    ]
    return Table(
        _make_counter_columns(lines),
        lines,
        title=f"{make_problem_title_in_words(rows[0].regime, rows[0].problem)}, {rows[0].shape}",
        key="counters",
        shown_rows=[
            line
            for line in lines
            if line.is_launch or len(counters_by_key[make_counters_key(line.row)].device_kernels) > 1
        ],
        get_remarks=lambda line: [line.bound_or_missing_reason] if line.is_launch else [],
        get_label=attrgetter("row.kernel"),
    )


def _yield_counter_lines(
    row: Measurement, counters: LaunchCounters | None, first_launch_cycles: float | None
) -> Iterator[CounterLine]:
    if counters is None or not counters.has_counters:
        reason = row.reason or (counters.missing_reason if counters else "the run ended before this kernel was counted")
        yield CounterLine(
            row,
            DeviceKernelCounters("", "", "", {}),
            missing_reason=f"{'not counted' if row.ok else row.status}: {reason}",
        )
        return
    yield CounterLine(
        row,
        counters.summed_counters,
        True,
        counters,
        first_launch_cycles,
        bound=find_launch_bound(counters, row.seconds if row.ok else None),
    )
    for kernel in counters.device_kernels:
        yield CounterLine(row, kernel, False)


def _make_counter_columns(lines: Sequence[CounterLine]) -> list[Column[CounterLine]]:
    """Return the columns of the table of counters. csv and json contain all metrics, named as in ncu."""
    operation = get_operation(lines[0].row.operation)
    further_metrics = dict.fromkeys(
        name for line in lines for name in line.counters.metrics if name not in _METRIC_COLUMNS
    )

    def get_rate(line: CounterLine) -> float | None:
        return line.row.best_rate if line.is_launch and line.row.ok else None

    return [
        Column(
            "",
            "kernel",
            lambda line: line.row.kernel if line.is_launch else f"  - {shorten_kernel_name(line.counters.name)}",
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
        *make_columns_from_mappings(
            lines, lambda line: operation.make_problem_record(line.row.problem), has_titles=False
        ),
        Column("shape", "", lambda line: str(line.row.shape)),
        Column("kernel", "", attrgetter("row.kernel")),
        Column("device_kernel", "", lambda line: "total" if line.is_launch else line.counters.name),
        make_rate_column("", lines[0].row.work.unit, get_rate, lines, drop_priority=1),
        Column("reason", "", attrgetter("missing_reason")),
        Column("unit", "", lambda line: line.row.work.unit if line.is_launch else None),
        Column("rate", "", get_rate),
        Column("launches", "", lambda line: line.launch_counters and len(line.launch_counters.cycles_by_launch)),
        Column("bound_by", "", lambda line: line.bound and line.bound.limiter),
        Column("bound_why", "", lambda line: line.bound and line.bound.evidence),
        Column("grid", "", attrgetter("counters.grid")),
        Column("block", "", attrgetter("counters.block")),
        Column("seconds", "us", attrgetter("counters.seconds"), lambda seconds: f"{seconds * 1e6:.4g}", 3),
        Column("dram_bytes_per_second", "DRAM TB/s", _compute_dram_rate, lambda rate: f"{rate / TERA:.3g}", 4),
        *(
            Column(name, title, _make_metric_reader(name), format_value, drop_priority)
            for name, (title, format_value, drop_priority) in _METRIC_COLUMNS.items()
        ),
        Column("dram_bytes", "DRAM MB", attrgetter("counters.dram_bytes"), lambda nbytes: f"{nbytes / 1e6:.4g}", 7),
        Column(
            "limited_by",
            "limited by",
            lambda line: ", ".join(line.counters.occupancy_limiters) or None,
            str,
            6,
            is_left_aligned=True,
        ),
        *(Column(name, "", _make_metric_reader(name)) for name in further_metrics),
        Column("", "ran", _describe_device_kernels, drop_priority=9, is_left_aligned=True),
    ]


#: For each metric in the printed table: the column's title, the function that formats its values, and the priority with
#: which a narrow terminal drops the column (the highest number first).
_METRIC_COLUMNS: Mapping[str, tuple[str, Callable[[Any], str], int]] = {
    TENSOR_PIPE_PERCENT: ("tensor %", "{:.1f}".format, 2),
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
    return lambda line: line.counters.metrics.get(name)


def _compute_dram_rate(line: CounterLine) -> float | None:
    nbytes, seconds = line.counters.dram_bytes, line.counters.seconds
    return nbytes / seconds if nbytes is not None and seconds else None


def _describe_device_kernels(line: CounterLine) -> str | None:
    """Return the names of the device kernels that a launch ran, or None in the line of a device kernel."""
    runs_single_kernel = line.launch_counters is not None and len(line.launch_counters.device_kernels) == 1
    return (
        (shorten_kernel_name(line.counters.name) if runs_single_kernel else line.counters.name)
        if line.launch_counters
        else None
    )


def _yield_conclusions(table: Table[CounterLine]) -> Iterator[str]:
    """Yield the conclusions of a table of counters, one line each.

    If several kernels have counters, yield one line that names the kernel with the fewest cycles and the kernel that is
    fastest in the burst regime. Otherwise yield a line for each kernel that says what bounds the kernel.
    """
    launches = [line for line in table.rows if line.is_launch]
    launches_with_cycles = [line for line in launches if line.row.ok and line.launch_counters and line.cycles]
    if len(launches_with_cycles) > 1:
        kernel_with_fewest_cycles = min(launches_with_cycles, key=lambda line: line.cycles or 0.0).row.kernel
        fastest_kernel_in_burst = min(launches_with_cycles, key=lambda line: line.row.seconds).row.kernel
        yield (
            f"{table.title}: {kernel_with_fewest_cycles} takes the fewest cycles, and "
            f"{'it' if fastest_kernel_in_burst == kernel_with_fewest_cycles else fastest_kernel_in_burst} "
            "is the fastest in burst"
        )
    else:
        yield from (f"{table.title}: {line.row.kernel}: {line.bound_or_missing_reason}" for line in launches)
