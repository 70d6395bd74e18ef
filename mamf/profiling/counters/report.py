"""Hardware counters: a row for each launch, one for each of its device kernels, and what bounds it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from mamf.choices import CONFIGURATION, DETERMINISM, PREPARING
from mamf.measurement import TERA, Measurement
from mamf.operations.unknown import operation_called
from mamf.profiling.counters.bounds import Bound, bound, short_name
from mamf.profiling.counters.counts import (
    BLOCKS,
    INSTRUCTIONS,
    L1_HIT,
    L2_HIT,
    MOST_WARPS,
    REGISTERS,
    SHARED_MEMORY,
    TENSOR,
    WARPS,
    Counts,
    DeviceKernel,
)
from mamf.profiling.counters.log import Counted, step_of
from mamf.profiling.counters.roofs import COMPUTE, Roof
from mamf.report.columns import interval_columns, rate_column
from mamf.report.document import Answer, Block, Column, Document, Lines, Table, columns_from
from mamf.report.own_ceilings import problem_title
from mamf.report.text import end_line, machine_line, rate_text

_MOST_PAIRS = 3


def disagreements(rows: Sequence[Measurement], counts: Mapping[str, Counts]) -> Iterator[str]:
    """The fewest cycles and the fastest burst of several kernels, and pairs that the two surely order otherwise."""
    ranked = [row for row in rows if row.ok and row.kernel in counts and counts[row.kernel].cycles]
    if len(ranked) < 2:
        return
    by_cycles = min(ranked, key=lambda row: counts[row.kernel].median_cycles or 0.0).kernel
    in_burst = min(ranked, key=lambda row: row.seconds).kernel
    pairs = [pair for pair in itertools.permutations(ranked, 2) if _is_reversed(*pair, counts)]
    yield f"fewest cycles: {by_cycles}; fastest in burst: {in_burst}; {_count_reversed(len(pairs))}"
    for a, b in pairs[:_MOST_PAIRS]:
        fewer = 1 - (counts[a.kernel].median_cycles or 0.0) / (counts[b.kernel].median_cycles or 1.0)
        slower = a.seconds / b.seconds - 1
        yield f"{a.kernel} takes {fewer:.1%} fewer cycles than {b.kernel}, and in burst {slower:.1%} more time"


def _count_reversed(pairs: int) -> str:
    return f"pairs that are surely ordered otherwise: {pairs}" if pairs else "no pair is surely ordered otherwise"


def _is_reversed(a: Measurement, b: Measurement, counts: Mapping[str, Counts]) -> bool:
    """Whether A takes surely fewer cycles than B, and surely more time."""
    cycles_a, cycles_b = counts[a.kernel].interval, counts[b.kernel].interval
    if cycles_a is None or cycles_b is None:
        return False
    return cycles_a.high < cycles_b.low and a.interval.low > b.interval.high


class Line(NamedTuple):
    """A launch, or a device kernel of it. ``kernel``: its counters, for a launch in sum; empty without counts.
    ``launch``: the counts, in the row of a counted launch. ``first``: the cycles of the first kernel, which others are
    relative to. ``reason``: why a launch was not counted. ``bound``: what bounds a counted launch.
    """

    row: Measurement
    kernel: DeviceKernel
    is_launch: bool = True
    launch: Counts | None = None
    first: float | None = None
    reason: str = ""
    bound: Bound | None = None

    @property
    def cycles(self) -> float | None:
        return self.launch.median_cycles if self.launch else self.kernel.cycles


_NO_COUNTS = DeviceKernel("", "", "", {})


def counters_document(
    rows: Sequence[Measurement],
    counted: Counted,
    header: Mapping[str, Any],
    summary: Mapping[str, Any] | None,
    columns: Collection[str] = (),
) -> Document:
    steps = {step_of(row): row for row in rows if not row.is_reference}
    groups: dict[tuple[Any, Any], list[Measurement]] = {}
    for row in steps.values():
        groups.setdefault((row.problem, row.shape), []).append(row)
    counts_flop = any(row.work.unit == "TFLOPS" for row in steps.values())
    tables = [_group(each, counted, columns) for each in groups.values()]
    blocks: list[Block] = [
        Lines(list(_head(counted, header, counts_flop))),
        *tables,
        Lines([end_line(summary)]),
        Answer([line for table in tables for line in _conclusion(table)]),
    ]
    data = {"header": header, "roofs": [vars(roof) for roof in counted.roofs], "summary": summary}
    return Document("Hardware counters", blocks, data)


def _head(counted: Counted, header: Mapping[str, Any], counts_flop: bool) -> Iterator[str]:
    yield f"hardware counters by ncu, of {machine_line(header)}"
    for roof in counted.roofs:
        unit = "TFLOPS" if roof.of == COMPUTE else "TB/s"
        yield f"{roof.of} roof: {rate_text(roof.rate / TERA, unit)}, {roof.told}"
    if counts_flop and not any(roof.of == COMPUTE for roof in counted.roofs):
        yield "no MAMFU: no ceiling was measured here ('mamf find', or --ceiling LOG)"


def _group(rows: Sequence[Measurement], counted: Counted, asked: Collection[str]) -> Table[Line]:
    """All kernels of a shape and problem. People see the device kernels of a launch if there are several."""
    what = rows[0].problem, rows[0].shape
    found = {each.kernel: each for each in counted.counts if (each.problem, each.shape) == what}
    first = next((each.median_cycles for row in rows if (each := found.get(row.kernel)) and each.cycles), None)
    lines = [line for row in rows for line in _lines(row, found.get(row.kernel), counted, first)]
    return Table(
        line_columns(lines, counted, asked),
        lines,
        title=f"{problem_title(rows[0].regime, rows[0].problem)}, {rows[0].shape}",
        key="counters",
        shown=[line for line in lines if line.is_launch or len(found[line.row.kernel].kernels) > 1],
        remarks=lambda line: [_verdict(line)] if line.is_launch else [],
        label=attrgetter("row.kernel"),
    )


def _lines(row: Measurement, counts: Counts | None, counted: Counted, first: float | None) -> Iterator[Line]:
    if counts is None or not counts.ok:
        reason = row.reason or (counts.reason if counts else "the run ended before")
        yield Line(row, _NO_COUNTS, reason=f"{'not counted' if row.ok else row.status}: {reason}")
        return
    found = bound(counts, counted.bandwidth, row.seconds if row.ok else None)
    yield Line(row, counts.total, True, counts, first, bound=found)
    for kernel in counts.kernels:
        yield Line(row, kernel, False)


def line_columns(lines: Sequence[Line], counted: Counted, asked: Collection[str]) -> list[Column[Line]]:
    """``asked``: those of COUNTER_COLUMNS that people see."""
    operation = operation_called(lines[0].row.operation)
    return [
        Column("", "kernel", _name, left=True, shortest=28),
        Column("", "cycles", lambda line: line.cycles, "{:,.0f}".format),
        Column(
            "",
            "relative",
            lambda line: line.cycles / line.first if line.cycles and line.first else None,
            "{:.3f}".format,
            1,
        ),
        Column("operation", "", attrgetter("row.operation")),
        *columns_from(lines, lambda line: operation.problem_record(line.row.problem), titled=False),
        Column("shape", "", lambda line: str(line.row.shape)),
        Column("kernel", "", attrgetter("row.kernel")),
        Column("device_kernel", "", lambda line: "total" if line.is_launch else line.kernel.name),
        *launch_columns(lines, counted, asked),
        *kernel_columns(lines, counted),
        Column("", "ran", _ran, importance=9, left=True),
    ]


def _name(line: Line) -> str:
    return line.row.kernel if line.is_launch else f"  {short_name(line.kernel.name)}"


def _ran(line: Line) -> str | None:
    is_one = line.launch is not None and len(line.launch.kernels) == 1
    return (short_name(line.kernel.name) if is_one else line.kernel.name) if line.launch else None


def launch_columns(lines: Sequence[Line], counted: Counted, asked: Collection[str]) -> list[Column[Line]]:
    """The burst of a launch, its cycles and what bounds it; a device kernel has none of them."""

    def rate(line: Line) -> float | None:
        return line.row.best_rate if line.is_launch and line.row.ok else None

    titles, words = {name: name for name in asked}, {True: "equal", False: "differ"}
    return [
        rate_column("", lines[0].row.work.unit, rate, lines, importance=1),
        Column("mamfu", "MAMFU", lambda line: counted.mamfu(line.row if line.is_launch else None), "{:.1%}".format, 1),
        Column("status", "", lambda line: line.row.status if line.is_launch else None),
        Column("reason", "", attrgetter("reason")),
        Column("unit", "", lambda line: line.row.work.unit if line.is_launch else None),
        Column("rate", "", rate),
        Column("cycles", "", lambda line: line.cycles),
        *interval_columns(lambda line: line.launch and line.launch.interval, "cycles_{}")[1:],
        Column("launches", "", lambda line: line.launch and len(line.launch.cycles)),
        *(
            Column(name, titles.get(title, ""), read, form, importance=4)
            for name, title, read, form in (
                ("preparing_seconds", PREPARING, _counted("preparing_seconds"), "{:.3g}".format),
                ("is_deterministic", DETERMINISM, _counted("is_deterministic"), words.__getitem__),
                ("configuration", CONFIGURATION, _configuration, str),
            )
        ),
        Column("bound_by", "", lambda line: line.bound and line.bound.by),
        Column("bound_why", "", lambda line: line.bound and line.bound.why),
    ]


def _counted(name: str) -> Callable[[Line], object]:
    return lambda line: line.launch and getattr(line.launch, name)


def _configuration(line: Line) -> object:
    """The configuration that a kernel chose, as its row or else its name has it."""
    found = line.row.details.get("configuration") or line.row.details.get("ran")
    return (found or line.row.kernel.partition("[")[2].removesuffix("]") or None) if line.launch else None


def kernel_columns(lines: Sequence[Line], counted: Counted) -> list[Column[Line]]:
    """The metrics of device kernels; csv and json have all of them by ncu's names."""

    def metric(name: str) -> Callable[[Line], float | None]:
        return lambda line: line.kernel.metrics.get(name)

    others = dict.fromkeys(name for line in lines for name in line.kernel.metrics if name not in _TITLED)
    tensor, *further = (
        Column(name, title, metric(name), form, importance) for name, (title, form, importance) in _TITLED.items()
    )
    rate, share = attrgetter("kernel.dram_rate"), lambda line: share_of(line.kernel.dram_rate, counted.bandwidth)
    return [
        Column("grid", "", attrgetter("kernel.grid")),
        Column("block", "", attrgetter("kernel.block")),
        Column("seconds", "us", attrgetter("kernel.seconds"), lambda seconds: f"{seconds * 1e6:.4g}", 3),
        tensor,
        Column("dram_bytes_per_second", "DRAM TB/s", rate, lambda value: f"{value / TERA:.3g}", 4),
        Column("share_of_bandwidth", "of roof", share, "{:.1%}".format, 4),
        *further,
        Column("dram_bytes", "DRAM MB", attrgetter("kernel.dram_bytes"), lambda nbytes: f"{nbytes / 1e6:.4g}", 7),
        Column("limited_by", "limited by", lambda line: ", ".join(line.kernel.limiters) or None, str, 6, left=True),
        *(Column(name, "", metric(name)) for name in others),
    ]


#: Title, format and importance of the metrics that people see.
_TITLED: Mapping[str, tuple[str, Callable[[Any], str], int]] = {
    TENSOR: ("tensor %", "{:.1f}".format, 2),
    L2_HIT: ("L2 hit %", "{:.0f}".format, 5),
    L1_HIT: ("L1 hit %", "{:.0f}".format, 5),
    WARPS: ("warps %", "{:.1f}".format, 5),
    MOST_WARPS: ("possible", "{:.1f}".format, 6),
    REGISTERS: ("registers", "{:.0f}".format, 7),
    SHARED_MEMORY: ("shared KiB", lambda nbytes: f"{nbytes / 1024:.1f}", 7),
    BLOCKS: ("blocks", "{:,.0f}".format, 7),
    INSTRUCTIONS: ("Minst", lambda count: f"{count / 1e6:.4g}", 8),
}


def share_of(rate: float | None, roof: Roof | None) -> float | None:
    return None if rate is None or roof is None else rate / roof.rate


def _verdict(line: Line) -> str:
    """What bounds a launch, or why it was not counted."""
    return f"bound by {line.bound.by}: {line.bound.why}" if line.bound and line.row.ok else line.reason


def _conclusion(table: Table[Line]) -> list[str]:
    """The kernel with the fewest cycles, and whether bursts rank kernels otherwise; for one kernel what bounds it."""
    launches = [line for line in table.rows if line.is_launch]
    counts = {line.row.kernel: line.launch for line in launches if line.launch}
    texts = list(disagreements([line.row for line in launches], counts))
    texts = texts or [f"{line.row.kernel}: {_verdict(line)}" for line in launches]
    return [f"{table.title}: {text}" for text in texts]
