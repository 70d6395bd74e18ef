"""The frontier of two works of a device: the rate of products against that of the work beside them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mamf.errors import UsageError
from mamf.measurement import Measurement, group_pairs
from mamf.operations.bandwidth.shapes import BandwidthShape
from mamf.operations.overlap.operation import OTHER, PRODUCTS
from mamf.report.charts.chart import Axis, Chart, Line, Panel, Point, failures, machine
from mamf.report.overlap import Pair, pairs_of


def overlap_chart(rows: Sequence[Measurement], header: Mapping[str, Any]) -> Chart:
    """A panel a product, a line for each work beside it from the one alone, over its settings, to the other alone.
    Raises UsageError if no pair has figures.
    """
    pairs = pairs_of(rows)
    if not pairs:
        raise UsageError("nothing to draw: no pair has figures of both works")
    panels = []
    for product, same in group_pairs((pair.kind[0], pair) for pair in pairs).items():
        lines = group_pairs((f"{pair.kind[1]} {BandwidthShape(pair.together.shape.nbytes)}", pair) for pair in same)
        panels.append(Panel(product, "tflops", tuple(Line(name, _points(own)) for name, own in lines.items())))
    notes = ("the ends of a line: each work alone", *failures(rows, {row.kernel for row in rows}))
    title, axis = "Products beside other work, while both run", Axis("GB/s of the other work", is_shared=False)
    return Chart(title, machine(header), axis, (tuple(panels),), notes)


def _points(pairs: Sequence[Pair]) -> tuple[Point, ...]:
    alone = pairs[0].rows
    places = [(0.0, alone[PRODUCTS, True]), *((pair.rows[OTHER, False].best_rate, pair.together) for pair in pairs)]
    points = (Point(x * 1e3, row.best_rate, row.rate_interval.low, row.rate_interval.high) for x, row in places)
    return (*sorted(points, key=lambda each: each.x), Point(alone[OTHER, True].best_rate * 1e3, 0.0, 0.0, 0.0))
