"""Make two kinds of charts of attention as data.

One kind shows the rate of each kernel by sequence length. The other kind shows the memory traffic of decode attention
(few new tokens, a long cache of keys and values) by cache length, with a line for the measured read bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mamf.ceilings.ceiling import Ceilings, find_row_ceiling
from mamf.ceilings.roof import COMPUTE_BOUND, MEMORY_LEVEL, Roofs, make_roofline_point
from mamf.errors import UsageError
from mamf.measurement import Measurement, find_rate, group_pairs
from mamf.operations.attention.operation import ATTENTION_DIRECTIONS, BACKWARD_FLOP_FACTORS, AttentionShape
from mamf.operations.unknown import get_operation
from mamf.report.charts.bars import StackedBar, StackedChart, StackedPanel
from mamf.report.charts.lines import Axis, Chart, Line, Panel, format_with_binary_prefix, make_labeled_ticks
from mamf.report.charts.logs import choose_regimes, describe_machine_briefly, describe_row_failures, make_point
from mamf.report.document import choose_unit, format_count, format_four_digits

_DIRECTION_NAMES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}


@dataclass(frozen=True)
class Facet:
    """A field that splits attention rows into panels, with a panel for each value.

    - ``read_value``: returns the value of the field in a row. The values can be sorted.
    - ``format_value``: describes the value of the field in a row, for the title of a panel.
    """

    read_value: Callable[[Measurement], Any]
    format_value: Callable[[Measurement], str]


LENGTH_FACET = Facet(
    lambda row: row.shape.seqlen_k, lambda row: f"length {format_with_binary_prefix(row.shape.seqlen_k)}"
)
QUERY_COUNT_FACET = Facet(lambda row: row.shape.seqlen_q, lambda row: f"{row.shape.seqlen_q} queries")
#: Facets whose values always get separate panels: head dimension, mask, direction and dtype.
_ALWAYS_SPLIT_FACETS = (
    Facet(lambda row: row.shape.head_dims, lambda row: f"head dim {row.shape.head_dims}"),
    Facet(lambda row: (row.shape.window or 0, row.shape.causal), lambda row: row.shape.mask_description),
    Facet(
        lambda row: ATTENTION_DIRECTIONS.index(row.problem.direction),
        lambda row: _DIRECTION_NAMES[row.problem.direction],
    ),
    Facet(lambda row: row.problem.dtype, lambda row: str(row.problem.dtype)),
)
#: Facets whose values get separate panels only if points would otherwise overlap. Sweeps often vary the number of heads
#: and the batch size together with the length or the head dimension, to keep the total size constant.
_OPTIONAL_SPLIT_FACETS = (
    Facet(lambda row: row.problem.sparsity, lambda row: f"sparsity {row.problem.sparsity:g}"),
    LENGTH_FACET,
    Facet(
        lambda row: (row.shape.heads, row.shape.kv_heads),
        lambda row: (
            f"{row.shape.heads} heads"
            + ("" if row.shape.kv_heads == row.shape.heads else f" ({row.shape.kv_heads} kv)")
        ),
    ),
    QUERY_COUNT_FACET,
    Facet(lambda row: row.shape.batch, lambda row: f"batch {row.shape.batch}"),
)
# Maximum number of panels in a row. If a row had more panels, they would be too narrow to read.
_MAX_PANELS_ACROSS = 4


def make_attention_chart(
    rows: Sequence[Measurement],
    ceilings: Ceilings,
    header: Mapping[str, Any],
    regime: str | None = None,
    directions: Sequence[str] | None = None,
) -> Chart | StackedChart:
    """Draw the rates of attention kernels in one regime. Raises UsageError if there is no rate to draw.

    The chart has lines against the sequence length, or against the number of queries if only this number varies. If
    neither varies, the chart has bars.

    - ``regime``: the regime to draw; None for the first of the log.
    - ``directions``: the directions to draw, such as "fwd"; None for all.
    """
    rows = [row for row in rows if isinstance(row.shape, AttentionShape) and not row.is_reference]
    regime = choose_regimes(rows, regime)[0]
    selected = [row for row in rows if row.regime == regime and (not directions or row.problem.direction in directions)]
    measured = [row for row in selected if row.ok]
    if not measured:
        known = ", ".join(dict.fromkeys(row.problem.direction for row in rows if row.ok))
        raise UsageError(
            f"the log has no rate in {regime} for {' or '.join(directions or ())} to draw, only for {known}: "
            "choose one of these with --direction"
        )
    is_by_queries = (
        count_facet_values(LENGTH_FACET, measured) == 1 and count_facet_values(QUERY_COUNT_FACET, measured) > 1
    )
    get_x_position = QUERY_COUNT_FACET.read_value if is_by_queries else LENGTH_FACET.read_value
    known_ceilings = {key: ceiling for key, ceiling in ceilings.items() if ceiling.interval.is_known}
    facets = choose_facets(measured, get_x_position)
    varying_facets = [facet for facet in facets if count_facet_values(facet, measured) > 1]
    common = ", ".join(facet.format_value(measured[0]) for facet in facets if facet not in varying_facets)

    def make_panel(rows: Sequence[Measurement]) -> Panel:
        by_kernel = group_pairs((row.kernel, row) for row in sorted(rows, key=get_x_position))
        lines = (
            Line(name, tuple(make_point(row, get_x_position(row)) for row in group))
            for name, group in by_kernel.items()
        )
        ceiling = find_rate(known_ceilings, rows[0].problem.dtype, regime)
        title = ", ".join(facet.format_value(rows[0]) for facet in varying_facets)
        return Panel(title, tuple(lines), None if ceiling is None else ceiling.tflops)

    title = f"{rows[0].operation.capitalize()}, {regime}" + (f", {common}" if common else "")
    subtitle = f"{describe_machine_briefly(header)}{_describe_constant_sizes(measured)}"
    grid = _arrange_panels(measured, varying_facets, make_panel)
    notes = (
        *_describe_conventions(measured, known_ceilings),
        *describe_row_failures(selected, {row.kernel for row in measured}),
    )
    if count_facet_values(LENGTH_FACET, measured) == 1 and not is_by_queries:
        bars = tuple(_make_bar_panel(panel) for panel_row in grid for panel in panel_row if panel)
        if any(bar.interval is None for panel in bars for bar in panel.bars):
            notes = (*notes, "bar without an error bar: the interval is unknown")
        return StackedChart(
            f"{title}, {LENGTH_FACET.format_value(measured[0])}", subtitle, "TFLOPS", "", bars, notes=notes
        )
    axis = Axis(
        "queries" if is_by_queries else "sequence length",
        True,
        make_labeled_ticks(map(get_x_position, measured), format_with_binary_prefix),
    )
    return Chart(
        title,
        subtitle,
        axis,
        grid,
        palette_names=tuple(dict.fromkeys(row.kernel for row in rows if row.ok)),
        notes=notes,
    )


def _make_bar_panel(panel: Panel) -> StackedPanel:
    """Replace the lines of a panel, which have one point each, by bars, the highest first.

    The label of a bar contains its MAMFU (share of the highest measured matmul rate).
    """
    bars = []
    for line in sorted(panel.lines, key=lambda line: -line.points[0].y):
        (only,) = line.points
        share = f" ({100 * only.y / panel.ceiling:.1f} % MAMFU)" if panel.ceiling else ""
        bars.append(
            StackedBar(
                f"{line.name}{share}",
                ((line.name, only.y),),
                interval=(only.low, only.high) if only.low < only.high else None,
            )
        )
    return StackedPanel(panel.title, tuple(bars))


def count_facet_values(facet: Facet, rows: Iterable[Measurement]) -> int:
    return len({facet.read_value(row) for row in rows})


def choose_facets(rows: Sequence[Measurement], get_x_position: Callable[[Measurement], float]) -> list[Facet]:
    """Choose facets that split rows into panels, so that a panel has only one row of each kernel at each position."""
    facets = list(_ALWAYS_SPLIT_FACETS)
    for facet in _OPTIONAL_SPLIT_FACETS:
        points = [(row.kernel, get_x_position(row), *read_facet_values(facets, row)) for row in rows]
        if len({*zip(points, map(facet.read_value, rows), strict=True)}) > len({*points}):
            facets.append(facet)
    return facets


def read_facet_values(facets: Iterable[Facet], row: Measurement) -> tuple[Any, ...]:
    return tuple(facet.read_value(row) for facet in facets)


def _arrange_panels(
    rows: Sequence[Measurement], facets: Sequence[Facet], make_panel: Callable[[Sequence[Measurement]], Panel]
) -> tuple[tuple[Panel | None, ...], ...]:
    """Arrange the panels in a grid. Some facets vary between the columns of the grid, and the others between its rows.

    Take the facets in order. A facet varies between columns if the grid then has at most four columns, and otherwise
    between rows. ``make_panel``: makes the panel of some rows of the log.
    """
    column_facets: tuple[Facet, ...] = ()
    for facet in facets:
        if len({read_facet_values((*column_facets, facet), row) for row in rows}) <= _MAX_PANELS_ACROSS:
            column_facets = (*column_facets, facet)
    row_facets = tuple(facet for facet in facets if facet not in column_facets)
    cells = group_pairs(
        ((read_facet_values(row_facets, row), read_facet_values(column_facets, row)), row) for row in rows
    )
    panels = {cell: make_panel(group) for cell, group in cells.items()}
    grid_rows, grid_columns = (sorted(set(values)) for values in zip(*panels, strict=True))
    return tuple(tuple(panels.get((grid_row, column)) for column in grid_columns) for grid_row in grid_rows)


def _describe_constant_sizes(rows: Sequence[Measurement]) -> str:
    """Describe two products, batch x length and heads x head dimension. Leave out a product that differs between rows.
    Example: ``; heads x head dimension = 4096``.
    """
    tokens = {row.shape.batch * row.shape.seqlen_k for row in rows}
    widths = {row.shape.heads * row.shape.head_dim for row in rows}
    sizes = [f"batch x length = {tokens.pop()}"] if len(tokens) == 1 else []
    sizes += [f"heads x head dimension = {widths.pop()}"] if len(widths) == 1 else []
    return "".join(f"; {each}" for each in sizes)


def _describe_conventions(rows: Sequence[Measurement], ceilings: Ceilings) -> list[str]:
    """Return notes that name the ceilings (highest measured matmul rates) from which MAMFU is computed, and that
    explain how the FLOP of attention are counted.
    """
    ceilings_by_key = {(row.problem.dtype, row.regime): find_row_ceiling(row, ceilings) for row in rows}
    notes = [
        f"ceiling: {format_four_digits(each.tflops)} TFLOPS, the highest confirmed rate of {dtype} matmuls in {regime} "
        f"({each.shape}, {each.kernel}); % MAMFU is the share of it"
        for (dtype, regime), each in ceilings_by_key.items()
        if each is not None
    ]
    counts = {BACKWARD_FLOP_FACTORS[row.problem.backward_count] for row in rows if row.problem.has_backward_pass}
    backward = "".join(f", a backward {count:g} times the forward" for count in counts)
    return [*notes, f"FLOP: masked pairs are not counted{backward}"]


# -- charts of decode attention ----------------------------------------------------------------------------------------


def make_decode_chart(
    rows: Sequence[Measurement], roofs: Roofs | None, header: Mapping[str, Any], regime: str | None = None
) -> Chart:
    """Draw the memory traffic per second in one regime, with a line for the measured read bandwidth. If compute limits
    all rows, as with long chunks of a prompt, draw TFLOPS and the compute ceiling instead.

    Lines join rows that differ only in the cache length, or only in the number of queries if all caches are equally
    long. ``regime``: the regime to draw; None for the first of the log.
    """
    regime = choose_regimes(rows, regime)[0]
    selected = [row for row in rows if row.regime == regime and not row.is_reference]
    measured = [row for row in selected if row.ok]
    is_by_queries = len({row.shape.cache_len for row in measured}) == 1

    def get_x_position(row: Measurement) -> float:
        return float(row.shape.queries if is_by_queries else row.shape.cache_len)

    def make_panel_title(row: Measurement) -> str:
        """Return the title of the panel that shows a row: the sizes and fields that all rows of this panel share."""
        shape, operation = row.shape, get_operation(row.operation)
        queries = "whole prompts" if shape.queries == shape.cache_len else format_count(shape.queries, "new token")
        parts = [
            f"{format_count(shape.heads, 'query head')}, {format_count(shape.kv_heads, 'KV head')}",
            f"batch {shape.batch}",
            "" if is_by_queries else queries,
            "contiguous" if shape.page_size is None else f"pages of {shape.page_size}",
            "" if shape.lengths == "equal" else f"{shape.lengths} lengths",
            *operation.describe_problem(row.problem),
        ]
        return ", ".join(filter(None, parts))

    limit, unit, is_compute = roofs and roofs.bandwidth_ceilings.get((MEMORY_LEVEL, regime)), "TB/s", False
    if roofs and all(make_roofline_point(row, roofs, row.kernel).bound == COMPUTE_BOUND for row in measured):
        limit, unit, is_compute = find_row_ceiling(measured[0], roofs.matmul_ceilings), "TFLOPS", True
    limit = limit if limit and limit.interval.is_known else None
    counted = {id(row): row.work.flop / row.work_amount if is_compute else 1.0 for row in measured}
    unit, factor = choose_unit(unit, [row.best_rate * counted[id(row)] for row in measured])
    panels = []
    for title, panel_rows in group_pairs((make_panel_title(row), row) for row in measured).items():
        by_kernel = group_pairs((row.kernel, row) for row in sorted(panel_rows, key=get_x_position))
        lines = tuple(
            Line(
                name,
                tuple(make_point(row, get_x_position(row), factor * counted[id(row)]) for row in group),
            )
            for name, group in by_kernel.items()
        )
        panels.append(Panel(title, lines, factor * limit.rate if limit else None, unit))
    notes = describe_row_failures(selected, {row.kernel for row in measured})
    if limit:
        name, share = ("matmul", "MAMFU") if is_compute else ("read bandwidth", "MBU")
        ceiling = f"{format_four_digits(factor * limit.rate)} {unit}, the {name} ({limit.shape}, {limit.kernel})"
        notes.insert(0, f"ceiling: {ceiling}; % {share} is the share of it")
    return Chart(
        f"Attention over a cache, {regime}, {measured[0].problem.dtype}",
        describe_machine_briefly(header),
        Axis(
            "queries" if is_by_queries else "cache length",
            True,
            make_labeled_ticks(map(get_x_position, measured), format_with_binary_prefix),
        ),
        tuple(tuple(panels[start : start + _MAX_PANELS_ACROSS]) for start in range(0, len(panels), _MAX_PANELS_ACROSS)),
        palette_names=tuple(dict.fromkeys(row.kernel for row in measured)),
        notes=tuple(notes),
    )
