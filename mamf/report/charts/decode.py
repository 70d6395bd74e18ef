"""The chart of decode: rates over the cache length, under the measured read bandwidth. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mamf.ceilings.roof import MEMORY, Roofs
from mamf.measurement import Measurement, group_pairs
from mamf.operations.unknown import get_operation
from mamf.report.charts.lines import Axis, Chart, Line, Panel, in_kibi, label_ticks
from mamf.report.charts.logs import chosen_regimes, failures, machine, point
from mamf.report.document import counted

# More panels side by side would be too narrow to read.
_MAX_ACROSS = 4


def decode_chart(
    rows: Sequence[Measurement], roofs: Roofs | None, header: Mapping[str, Any], regime: str | None = None
) -> Chart:
    """Draw one regime of a run, by default the first of the log; the share of the read bandwidth is MBU. Rows that
    differ in the cache length alone are joined, or in the queries if all caches are equally long.
    """
    regime = chosen_regimes(rows, regime)[0]
    kept = [row for row in rows if row.regime == regime and not row.is_reference]
    measured = [row for row in kept if row.ok]
    by_queries = len({row.shape.cache_len for row in measured}) == 1

    def position(row: Measurement) -> float:
        return float(row.shape.queries if by_queries else row.shape.cache_len)

    def panel_of(row: Measurement) -> str:
        """Return what the rows of a panel have in common."""
        shape, of = row.shape, get_operation(row.operation)
        queries = "whole prompts" if shape.queries == shape.cache_len else counted(shape.queries, "new token")
        cache = "contiguous" if shape.page_size is None else f"pages of {shape.page_size}"
        lengths = "" if shape.lengths == "equal" else f"{shape.lengths} lengths"
        heads = f"{shape.heads} heads on {shape.kv_heads}, batch {shape.batch}"
        return ", ".join(
            filter(None, [heads, "" if by_queries else queries, cache, lengths, *of.describe_problem(row.problem)])
        )

    memory = roofs and roofs.bandwidth.get((MEMORY, regime))
    panels = []
    for title, same in group_pairs((panel_of(row), row) for row in measured).items():
        by_kernel = group_pairs((row.kernel, row) for row in sorted(same, key=position))
        lines = tuple(Line(name, tuple(point(row, position(row)) for row in own)) for name, own in by_kernel.items())
        panels.append(Panel(title, lines, memory.rate if memory else None, "TB/s"))
    notes = failures(kept, {row.kernel for row in measured})
    if memory:
        source = f"the read bandwidth ({memory.shape}, {memory.kernel})"
        notes = [f"ceiling: {memory.rate:.4g} TB/s, {source}; % MBU is the share of it", *notes]
    return Chart(
        f"Attention over a cache, {regime}, {measured[0].problem.dtype}",
        machine(header),
        Axis("queries" if by_queries else "cache length", True, label_ticks(map(position, measured), in_kibi)),
        tuple(tuple(panels[start : start + _MAX_ACROSS]) for start in range(0, len(panels), _MAX_ACROSS)),
        palette=tuple(dict.fromkeys(row.kernel for row in measured)),
        notes=tuple(notes),
    )
