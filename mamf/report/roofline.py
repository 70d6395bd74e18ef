"""Roofs, the balance points between them, and how far rows lie below; roofs in the GPU format of TraceLens.

Its format (``--gpu_arch_json_path``): docs of github.com/AMD-AGI/TraceLens, GPU Architecture Specifications.
``matrix_*`` are products; what it calls ``vector_*`` is not measured here. Bytes are counted alike there: each operand
read, each result written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from mamf.ceilings.ceiling import Ceiling
from mamf.ceilings.roof import LEVELS, MEMORY, NEAR, RoofPoint, Roofs, make_roof_point
from mamf.dtypes import DTYPES
from mamf.measurement import Measurement
from mamf.operations.matmul.shapes import MatmulShape, name_layers
from mamf.operations.unknown import operation_called
from mamf.rate import find_rate
from mamf.regime_names import BURST, SUSTAINED
from mamf.report.document import Answer, Block, Column, Document, Lines, Table, interval_columns
from mamf.report.text import counted, percent, rate_text, significant


class Named(NamedTuple):
    """A ceiling with the dtype, or the level of memory, that it is the roof of."""

    name: str
    ceiling: Ceiling


def points_of(rows: Iterable[Measurement], roofs: Roofs) -> list[RoofPoint]:
    """Measured rows under their roofs, without references and the rows of a search."""
    kept = [row for row in rows if row.ok and not row.is_reference and not row.phase]
    layers = name_layers(row.shape for row in kept if isinstance(row.shape, MatmulShape))
    return [make_roof_point(row, roofs, named(row), layers.get(row.shape, "")) for row in kept]


def named(row: Measurement | Ceiling) -> str:
    """Its shape, and what sets its problem apart."""
    return ", ".join([str(row.shape), *operation_called(row.problem.operation).words(row.problem)])


def roofline_document(roofs: Roofs, points: Sequence[RoofPoint], head: str, top: int | None = None) -> Document:
    """``top``: how many rows people see, those nearest to their roof first; None for all. Csv holds the rows, or the
    roofs if there are no rows.
    """
    best_first = sorted(points, key=lambda point: -1.0 if point.share is None else point.share, reverse=True)
    ceilings = [Named(name, each) for kind in (roofs.compute, roofs.bandwidth) for (name, _), each in kind.items()]
    blocks: list[Block] = [
        Lines([head]),
        Table(roof_columns(roofs), ceilings, key="roofs"),
        Table(POINT_COLUMNS, best_first, top=top),
        Answer(list(conclusion(roofs, best_first))),
    ]
    return Document(f"Roofs of {roofs.device}", blocks, {"device": roofs.device}, main="rows" if points else "roofs")


def roof_columns(roofs: Roofs) -> list[Column[Named]]:
    """``balance_*``: the FLOP per byte at which a level of bandwidth meets a ceiling of computing."""

    def balance(level: str) -> Callable[[Named], float | None]:
        return lambda roof: balance_point(roofs, roof.ceiling, level)

    return [
        Column("roof", "roof", lambda roof: roof.name, left=True),
        Column("regime", "regime", lambda roof: roof.ceiling.regime, left=True),
        Column("", "rate", lambda roof: rate_text(roof.ceiling.rate, roof.ceiling.unit)),
        Column("rate", "", lambda roof: roof.ceiling.rate),
        Column("unit", "", lambda roof: roof.ceiling.unit),
        *(
            Column(f"balance_{level}_flop_per_byte", f"FLOP/byte of {level}", balance(level), significant, importance=1)
            for level in LEVELS
        ),
        *interval_columns(lambda roof: roof.ceiling.interval, "rate_{}"),
        Column("at", "at", lambda roof: named(roof.ceiling), importance=3, left=True),
        Column("kernel", "kernel", lambda roof: roof.ceiling.kernel, importance=2, left=True),
    ]


def balance_point(roofs: Roofs, ceiling: Ceiling, level: str) -> float | None:
    bandwidth = roofs.bandwidth.get((level, ceiling.regime))
    return ceiling.rate / bandwidth.rate if bandwidth and ceiling.unit == "TFLOPS" else None


POINT_COLUMNS: list[Column[RoofPoint]] = [
    Column("row", "row", lambda point: point.name, left=True, shortest=40),
    Column("kernel", "kernel", lambda point: point.kernel, left=True),
    Column("regime", "regime", lambda point: point.regime, importance=3, left=True),
    Column("dtype", "dtype", lambda point: point.dtype, importance=3, left=True),
    Column("intensity_flop_per_byte", "FLOP/byte", lambda point: point.intensity, significant, importance=2),
    Column("", "rate", lambda point: rate_text(point.rate, point.unit), importance=1),
    Column("rate", "", lambda point: point.rate),
    Column("unit", "", lambda point: point.unit),
    Column("compute_rate_tflops", "", lambda point: point.tflops),
    Column("", "roof", lambda point: point.roof and rate_text(point.roof, point.unit), importance=2),
    Column("roof", "", lambda point: point.roof),
    Column("share_of_roof", "% of roof", lambda point: point.share, percent),
    Column("", "bound by", lambda point: point.bound_text, importance=1, left=True),
    Column("bound_by", "", lambda point: point.bound),
]


def conclusion(roofs: Roofs, best_first: Sequence[RoofPoint]) -> Iterable[str]:
    """How many rows are near their limit, and the nearest; without rows the balance points of memory."""
    known = [point for point in best_first if point.share is not None]
    if known:
        near, most = sum((point.share or 0.0) >= NEAR for point in known), known[0]
        yield (
            f"near the limit ({100 * NEAR:.0f} % of the roof and more): {near} of {counted(len(known), 'row')}; "
            f"nearest: {most.name} by {most.kernel}, {percent(most.share or 0.0)} % of the {most.bound} roof"
        )
    for (dtype, regime), ceiling in () if best_first else roofs.compute.items():
        balance = balance_point(roofs, ceiling, MEMORY)
        if balance is not None:
            yield f"{dtype} in {regime} is bound by memory below {significant(balance)} FLOP/byte, by computing above"


# -- the format of TraceLens -------------------------------------------------------------------------------------------


def tracelens_arch(roofs: Roofs, memory_bytes: int | None) -> dict[str, Any]:
    """``max_achievable_tflops`` in TFLOPS, ``mem_bw_gbps`` in GB/s, ``memory_gb`` in GiB as its own files have it.

    A trace is of a device at work: sustained where that is known, else burst; ``_regimes`` says which.
    """
    tflops: dict[str, float] = {}
    regimes: dict[str, str] = {}
    for dtype, regime in dict.fromkeys((each.problem.dtype, each.regime) for each in roofs.compute.values()):
        ceiling = find_rate(roofs.compute, dtype, regime)
        if ceiling is None:  # only one with an unusual output is known
            continue
        name = f"matrix_{DTYPES[dtype].peak_name}"
        is_better = (regime == SUSTAINED, ceiling.rate) > (regimes.get(name) == SUSTAINED, tflops.get(name, 0.0))
        if is_better:
            tflops[name], regimes[name] = _rounded(ceiling.rate), regime
    found: dict[str, Any] = {"name": roofs.device}
    memory = roofs.bandwidth.get((MEMORY, SUSTAINED)) or roofs.bandwidth.get((MEMORY, BURST))
    if memory is not None:
        found["mem_bw_gbps"] = _rounded(1e3 * memory.rate)
        regimes["mem_bw_gbps"] = memory.regime
    if memory_bytes is not None:
        found["memory_gb"] = round(memory_bytes / 2**30)
    return {**found, "max_achievable_tflops": tflops, "_regimes": regimes, "_reference": "measured by mamf roofline"}


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")
