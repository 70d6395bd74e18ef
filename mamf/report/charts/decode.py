"""Draw runs of decode attention (few new tokens over a long cache of keys and values): rates against the cache length,
below the measured read bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mamf.ceilings.ceiling import find_row_ceiling
from mamf.ceilings.roof import COMPUTE, MEMORY, Roofs, make_roof_point
from mamf.measurement import Measurement, group_pairs
from mamf.operations.unknown import get_operation
from mamf.report.charts.lines import Axis, Chart, Line, Panel, format_in_kibi, make_labeled_ticks
from mamf.report.charts.logs import choose_regimes, describe_machine_briefly, describe_row_failures, make_point
from mamf.report.document import format_count

# Maximum number of panels side by side: more would be too narrow to read.
_MAX_PANELS_ACROSS = 4


def make_decode_chart(
    rows: Sequence[Measurement], roofs: Roofs | None, header: Mapping[str, Any], regime: str | None = None
) -> Chart:
    """Draw one regime of a run below the measured read bandwidth, of which each rate is a share (MBU). If computing
    bounds all rows, as it does for long chunks of a prompt, draw TFLOPS below the compute ceiling instead.

    Lines join rows that differ only in the cache length, or only in the number of queries if all caches are equally
    long. ``regime``: by default the first regime of the log.
    """
    regime = choose_regimes(rows, regime)[0]
    kept = [row for row in rows if row.regime == regime and not row.is_reference]
    measured = [row for row in kept if row.ok]
    by_queries = len({row.shape.cache_len for row in measured}) == 1

    def position(row: Measurement) -> float:
        return float(row.shape.queries if by_queries else row.shape.cache_len)

    def make_panel_title(row: Measurement) -> str:
        """Return what all rows of the panel of a row have in common, as the title of the panel."""
        shape, of = row.shape, get_operation(row.operation)
        queries = "whole prompts" if shape.queries == shape.cache_len else format_count(shape.queries, "new token")
        cache = "contiguous" if shape.page_size is None else f"pages of {shape.page_size}"
        lengths = "" if shape.lengths == "equal" else f"{shape.lengths} lengths"
        heads = f"{shape.heads} heads on {shape.kv_heads}, batch {shape.batch}"
        return ", ".join(
            filter(None, [heads, "" if by_queries else queries, cache, lengths, *of.describe_problem(row.problem)])
        )

    limit, unit, is_compute = roofs and roofs.bandwidth.get((MEMORY, regime)), "TB/s", False
    if roofs and all(make_roof_point(row, roofs, row.kernel).bound == COMPUTE for row in measured):
        limit, unit, is_compute = find_row_ceiling(measured[0], roofs.compute), "TFLOPS", True
    panels = []
    for title, same in group_pairs((make_panel_title(row), row) for row in measured).items():
        by_kernel = group_pairs((row.kernel, row) for row in sorted(same, key=position))
        lines = tuple(
            Line(
                name,
                tuple(make_point(row, position(row), row.work.flop / row.amount if is_compute else 1.0) for row in own),
            )
            for name, own in by_kernel.items()
        )
        panels.append(Panel(title, lines, limit.rate if limit else None, unit))
    notes = describe_row_failures(kept, {row.kernel for row in measured})
    if limit:
        name, share = ("matmul", "MAMFU") if is_compute else ("read bandwidth", "MBU")
        source = f"the {name} ({limit.shape}, {limit.kernel})"
        notes = [f"ceiling: {limit.rate:.4g} {unit}, {source}; % {share} is the share of it", *notes]
    return Chart(
        f"Attention over a cache, {regime}, {measured[0].problem.dtype}",
        describe_machine_briefly(header),
        Axis(
            "queries" if by_queries else "cache length",
            True,
            make_labeled_ticks(map(position, measured), format_in_kibi),
        ),
        tuple(tuple(panels[start : start + _MAX_PANELS_ACROSS]) for start in range(0, len(panels), _MAX_PANELS_ACROSS)),
        palette=tuple(dict.fromkeys(row.kernel for row in measured)),
        notes=tuple(notes),
    )
