"""The figures of attention kernels as data: against sequence length, or against sparsity where a log sweeps it. Pure.

Whatever else takes several values parts the rows into panels. Sizes that follow from the others (batch from a constant
number of tokens, heads from a constant width) do not: a facet is added only where points would else lie on one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mamf.ceilings.ceiling import Ceilings, ceiling_of
from mamf.errors import UsageError
from mamf.measurement import Measurement
from mamf.operations.attention.operation import is_attention
from mamf.operations.attention.shapes import BACKWARD_COUNTS, DIRECTIONS
from mamf.report.charts.chart import (
    Axis,
    Chart,
    Line,
    Panel,
    chosen_regimes,
    failures,
    in_kibi,
    labelled,
    machine,
    point,
)

_DIRECTION_NAMES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}


@dataclass(frozen=True)
class Facet:
    """Something that parts rows into panels: ``of`` gives a sortable value, ``text`` says it."""

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
LENGTH = Facet(lambda row: row.shape.seqlen_k, lambda row: f"length {in_kibi(row.shape.seqlen_k)}")
QUERIES = Facet(lambda row: row.shape.seqlen_q, lambda row: f"{row.shape.seqlen_q} queries")
HEADS = Facet(lambda row: (row.shape.heads, row.shape.kv_heads), _heads)
BATCH = Facet(lambda row: row.shape.batch, lambda row: f"batch {row.shape.batch}")
#: Always a reason for separate panels.
_PARTING = (HEAD_DIM, MASK, DIRECTION, DTYPE)
#: Only where points would else lie on one another.
_IF_NEEDED = (LENGTH, HEADS, QUERIES, BATCH)
# Panels side by side that are still wide enough to read.
_MOST_ACROSS = 4


def attention_chart(
    rows: Sequence[Measurement],
    ceilings: Ceilings,
    header: Mapping[str, Any],
    regime: str | None = None,
    directions: Sequence[str] | None = None,
) -> Chart:
    """One regime (the log's first unless said) of a run of attention kernels.

    Raises UsageError where nothing is left to draw.
    """
    rows = [row for row in rows if is_attention(row)]
    regime = chosen_regimes(rows, regime)[0]
    kept = [row for row in rows if row.regime == regime]
    kept = [row for row in kept if not directions or row.problem.direction in directions]
    measured = [row for row in kept if row.ok]
    if not measured:
        held = ", ".join(dict.fromkeys(row.problem.direction for row in rows if row.ok))
        raise UsageError(f"nothing to draw in {regime} {' '.join(directions or ())}: the log holds {held}")
    label, position = _axis(measured)
    facets = needed(measured, position)
    varying = [facet for facet in facets if count(facet, measured) > 1]
    grid = _grid(measured, varying, position, ceilings)
    common = ", ".join(facet.text(measured[0]) for facet in facets if facet not in varying)
    companions = any(line.is_companion for panels in grid for panel in panels if panel for line in panel.lines)
    return Chart(
        f"Attention, {regime}" + (f", {common}" if common else ""),
        f"{machine(header)}{_sizes(measured)}",
        _ticked(label, measured, position),
        grid,
        (*_conventions(measured, ceilings), *failures(kept, {row.kernel for row in measured})),
        companion="effective (solid: dense-equivalent)" if companions else "",
        palette=tuple(dict.fromkeys(row.kernel for row in rows if row.ok)),
    )


def _axis(rows: Sequence[Measurement]) -> tuple[str, Callable[[Measurement], float]]:
    """What the figure is against: sparsity where it varies, else whichever length does."""
    if sweeps_sparsity(rows):
        return "sparsity of the inputs, %", lambda row: 100 * float(row.problem.sparsity)
    if count(LENGTH, rows) == 1 and count(QUERIES, rows) > 1:
        return "queries", lambda row: float(row.shape.seqlen_q)
    return "sequence length", lambda row: float(row.shape.seqlen_k)


def sweeps_sparsity(rows: Iterable[Measurement]) -> bool:
    return len({row.problem.sparsity for row in rows}) > 1


def count(facet: Facet, rows: Iterable[Measurement]) -> int:
    """Values that a facet takes."""
    return len({facet.of(row) for row in rows})


def _ticked(label: str, rows: Sequence[Measurement], position: Callable[[Measurement], float]) -> Axis:
    places = [position(row) for row in rows]
    if sweeps_sparsity(rows):
        return Axis(label, False, labelled(places, lambda share: f"{share:.3g}"))
    return Axis(label, True, labelled(places, in_kibi))


def needed(rows: Sequence[Measurement], position: Callable[[Measurement], float]) -> list[Facet]:
    """The facets that leave one row a kernel at each place of a panel."""
    facets = [*_PARTING, LENGTH] if sweeps_sparsity(rows) else list(_PARTING)

    def places(chosen: Iterable[Facet]) -> int:
        chosen = list(chosen)
        return len({(row.kernel, position(row), *(facet.of(row) for facet in chosen)) for row in rows})

    for facet in _IF_NEEDED:
        if places([*facets, facet]) > places(facets):
            facets.append(facet)
    return facets


def _grid(
    rows: Sequence[Measurement],
    varying: Sequence[Facet],
    position: Callable[[Measurement], float],
    ceilings: Ceilings,
) -> tuple[tuple[Panel | None, ...], ...]:
    """Panels: across go the first facets that there is room for, down the others."""
    across: tuple[Facet, ...] = ()
    for facet in varying:
        if len({values((*across, facet), row) for row in rows}) <= _MOST_ACROSS:
            across = (*across, facet)
    down = tuple(facet for facet in varying if facet not in across)

    def panel(column: Any, line: Any) -> Panel | None:
        inside = [row for row in rows if values(across, row) == column and values(down, row) == line]
        return _panel(inside, varying, position, ceilings) if inside else None

    columns = sorted({values(across, row) for row in rows})
    lines = sorted({values(down, row) for row in rows})
    return tuple(tuple(panel(column, line) for column in columns) for line in lines)


def values(facets: Iterable[Facet], row: Measurement) -> tuple[Any, ...]:
    return tuple(facet.of(row) for facet in facets)


def _panel(
    rows: Sequence[Measurement],
    varying: Sequence[Facet],
    position: Callable[[Measurement], float],
    ceilings: Ceilings,
) -> Panel:
    lines = []
    for kernel in dict.fromkeys(row.kernel for row in rows):
        own = sorted((row for row in rows if row.kernel == kernel), key=position)
        lines.append(Line(kernel, tuple(point(row, position(row)) for row in own)))
        sparse = [(row, float(row.details.get("sparsity", 0.0))) for row in own]
        if any(share for _, share in sparse):
            effective = tuple(point(row, position(row), 1 - share) for row, share in sparse)
            lines.append(Line(kernel, effective, is_companion=True))
    ceiling = ceiling_of(rows[0], ceilings)
    title = ", ".join(facet.text(rows[0]) for facet in varying)
    return Panel(title, tuple(lines), None if ceiling is None else ceiling.tflops)


def _sizes(rows: Sequence[Measurement]) -> str:
    """Sizes that are constant over all rows, though their factors may not be."""
    tokens = {row.shape.batch * row.shape.seqlen_k for row in rows}
    widths = {row.shape.heads * row.shape.head_dim for row in rows}
    sizes = [f"batch x length = {tokens.pop()}"] if len(tokens) == 1 else []
    sizes += [f"heads x head dimension = {widths.pop()}"] if len(widths) == 1 else []
    return "".join(f"; {each}" for each in sizes)


def _conventions(rows: Sequence[Measurement], ceilings: Ceilings) -> list[str]:
    """What the shares are of, and what counts as FLOP."""
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
