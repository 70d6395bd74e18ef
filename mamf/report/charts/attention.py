"""Charts of attention kernels against the sequence length, as data. Pure.

Every other field with several values splits the rows into panels. Sizes that follow from the others (batch from a
constant number of tokens, heads from a constant width) do not, unless points would otherwise overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mamf.ceilings.ceiling import Ceilings, ceiling_of
from mamf.errors import UsageError
from mamf.measurement import Measurement, group_pairs
from mamf.operations.attention.shapes import BACKWARD_COUNTS, DIRECTIONS, AttentionShape
from mamf.rate import find_rate
from mamf.report.charts.lines import Axis, Chart, Line, Panel, in_kibi, labelled
from mamf.report.charts.logs import chosen_regimes, failures, machine, point

_DIRECTION_NAMES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}


@dataclass(frozen=True)
class Facet:
    """A field that splits rows into panels: ``of`` gives a sortable value, ``text`` its name in a title."""

    of: Callable[[Measurement], Any]
    text: Callable[[Measurement], str]


def _heads(row: Measurement) -> str:
    kv = "" if row.shape.kv_heads == row.shape.heads else f" ({row.shape.kv_heads} kv)"
    return f"{row.shape.heads} heads{kv}"


HEAD_DIM = Facet(lambda row: row.shape.head_dims, lambda row: f"head dim {row.shape.head_dims}")
MASK = Facet(lambda row: (row.shape.window or 0, row.shape.causal), lambda row: row.shape.mask)
DIRECTION = Facet(
    lambda row: DIRECTIONS.index(row.problem.direction), lambda row: _DIRECTION_NAMES[row.problem.direction]
)
DTYPE = Facet(lambda row: row.problem.dtype, lambda row: str(row.problem.dtype))
SPARSITY = Facet(lambda row: row.problem.sparsity, lambda row: f"sparsity {row.problem.sparsity:g}")
LENGTH = Facet(lambda row: row.shape.seqlen_k, lambda row: f"length {in_kibi(row.shape.seqlen_k)}")
QUERIES = Facet(lambda row: row.shape.seqlen_q, lambda row: f"{row.shape.seqlen_q} queries")
HEADS = Facet(lambda row: (row.shape.heads, row.shape.kv_heads), _heads)
BATCH = Facet(lambda row: row.shape.batch, lambda row: f"batch {row.shape.batch}")
#: Values of these always get separate panels.
_PARTING = (HEAD_DIM, MASK, DIRECTION, DTYPE)
#: Values of these do only where points would otherwise overlap.
_IF_NEEDED = (SPARSITY, LENGTH, HEADS, QUERIES, BATCH)
# More panels side by side would be too narrow to read.
_MAX_ACROSS = 4
Grid = tuple[tuple[Panel | None, ...], ...]


def attention_chart(
    rows: Sequence[Measurement],
    ceilings: Ceilings,
    header: Mapping[str, Any],
    regime: str | None = None,
    directions: Sequence[str] | None = None,
) -> Chart:
    """Draw one regime of a run of attention kernels, by default the first of the log.

    Raises UsageError where nothing is left to draw.
    """
    rows = [row for row in rows if isinstance(row.shape, AttentionShape) and not row.is_reference]
    regime = chosen_regimes(rows, regime)[0]
    kept = [row for row in rows if row.regime == regime and (not directions or row.problem.direction in directions)]
    measured = [row for row in kept if row.ok]
    if not measured:
        known = ", ".join(dict.fromkeys(row.problem.direction for row in rows if row.ok))
        raise UsageError(f"nothing to draw in {regime} {' '.join(directions or ())}: the log holds {known}")
    is_by_queries = count_values(LENGTH, measured) == 1 and count_values(QUERIES, measured) > 1
    position = QUERIES.of if is_by_queries else LENGTH.of
    facets = needed(measured, position)
    varying = [facet for facet in facets if count_values(facet, measured) > 1]
    common = ", ".join(facet.text(measured[0]) for facet in facets if facet not in varying)

    def panel(rows: Sequence[Measurement]) -> Panel:
        by_kernel = group_pairs((row.kernel, row) for row in sorted(rows, key=position))
        lines = (Line(name, tuple(point(row, position(row)) for row in same)) for name, same in by_kernel.items())
        ceiling = find_rate(ceilings, rows[0].problem.dtype, regime)
        title = ", ".join(facet.text(rows[0]) for facet in varying)
        return Panel(title, tuple(lines), None if ceiling is None else ceiling.tflops)

    label = "queries" if is_by_queries else "sequence length"
    return Chart(
        f"{rows[0].operation.capitalize()}, {regime}" + (f", {common}" if common else ""),
        f"{machine(header)}{_sizes(measured)}",
        Axis(label, True, labelled(map(position, measured), in_kibi)),
        _grid(measured, varying, panel),
        palette=tuple(dict.fromkeys(row.kernel for row in rows if row.ok)),
        notes=(*_conventions(measured, ceilings), *failures(kept, {row.kernel for row in measured})),
    )


def count_values(facet: Facet, rows: Iterable[Measurement]) -> int:
    return len({facet.of(row) for row in rows})


def needed(rows: Sequence[Measurement], position: Callable[[Measurement], float]) -> list[Facet]:
    """Choose the facets so that each kernel has one row at each place of a panel."""
    facets = list(_PARTING)

    def places(chosen: Sequence[Facet]) -> int:
        return len({(row.kernel, position(row), values(chosen, row)) for row in rows})

    for facet in _IF_NEEDED:
        if places([*facets, facet]) > places(facets):
            facets.append(facet)
    return facets


def values(facets: Iterable[Facet], row: Measurement) -> tuple[Any, ...]:
    return tuple(facet.of(row) for facet in facets)


def _grid(
    rows: Sequence[Measurement], varying: Sequence[Facet], panel: Callable[[Sequence[Measurement]], Panel]
) -> Grid:
    """Arrange the panels: the first facets that fit go across, the others down."""
    across: tuple[Facet, ...] = ()
    for facet in varying:
        if len({values((*across, facet), row) for row in rows}) <= _MAX_ACROSS:
            across = (*across, facet)
    down = tuple(facet for facet in varying if facet not in across)
    inside = group_pairs(((values(down, row), values(across, row)), row) for row in rows)
    panels = {place: panel(alike) for place, alike in inside.items()}
    lines, columns = (sorted(set(places)) for places in zip(*panels, strict=True))
    return tuple(tuple(panels.get((line, column)) for column in columns) for line in lines)


def _sizes(rows: Sequence[Measurement]) -> str:
    """Name products of sizes that are constant over all rows, though their factors may not be."""
    tokens = {row.shape.batch * row.shape.seqlen_k for row in rows}
    widths = {row.shape.heads * row.shape.head_dim for row in rows}
    sizes = [f"batch x length = {tokens.pop()}"] if len(tokens) == 1 else []
    sizes += [f"heads x head dimension = {widths.pop()}"] if len(widths) == 1 else []
    return "".join(f"; {each}" for each in sizes)


def _conventions(rows: Sequence[Measurement], ceilings: Ceilings) -> list[str]:
    """Say which ceiling the shares refer to, and what counts as FLOP."""
    found = {(row.problem.dtype, row.regime): ceiling_of(row, ceilings) for row in rows}
    notes = [
        f"ceiling: {each.tflops:.4g} TFLOPS, the highest {dtype} matmul measured in {regime} "
        f"({each.shape}, {each.kernel}); % MAMFU is the share of it"
        for (dtype, regime), each in found.items()
        if each is not None
    ]
    counts = {BACKWARD_COUNTS[row.problem.backward_count] for row in rows if row.problem.has_backward}
    backward = "".join(f", a backward {count:g} times the forward" for count in counts)
    return [*notes, f"FLOP: masked pairs are not counted{backward}"]
