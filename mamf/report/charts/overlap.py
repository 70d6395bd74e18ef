"""The frontier of two works of a device: the rate of products against that of the work beside them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mamf.errors import UsageError
from mamf.measurement import Measurement, group_pairs
from mamf.operations.bandwidth.shapes import BandwidthShape
from mamf.operations.overlap import OTHER, PRODUCTS
from mamf.report.charts.chart import Axis, Chart, Line, Panel, Point, failures, machine
from mamf.report.overlap import Pair, pairs_of


def overlap_chart(rows: Sequence[Measurement], header: Mapping[str, Any]) -> Chart:
    """A panel a product, a line for each work beside it from the one alone, over its settings, to the other alone.
    Raises UsageError if no pair has figures.
    """
    pairs = pairs_of(rows)
    if not pairs:
        raise UsageError("nothing to draw: no pair has figures of both works")
    products = group_pairs((pair.kind[0], pair) for pair in pairs)
    panels = tuple(Panel(product, tuple(_lines(same))) for product, same in products.items())
    return Chart(
        "Products beside other work, while both run",
        machine(header),
        Axis("GB/s of the other work", is_shared=False),
        (panels,),
        ("the ends of a line: each work alone", *failures(rows, {row.kernel for row in rows})),
    )


def _lines(pairs: Sequence[Pair]) -> Iterator[Line]:
    named = group_pairs((f"{pair.kind[1]} {BandwidthShape(pair.together.shape.nbytes)}", pair) for pair in pairs)
    for name, same in named.items():
        places = [(pair.rows[OTHER, False].best_rate, pair.together) for pair in same]
        places.append((0.0, same[0].rows[PRODUCTS, True]))
        points = [Point(x * 1e3, row.best_rate, row.rate_interval.low, row.rate_interval.high) for x, row in places]
        most = max(pair.rows[OTHER, True].best_rate for pair in same)
        yield Line(name, (*sorted(points, key=lambda each: each.x), Point(most * 1e3, 0.0, 0.0, 0.0)))
