"""Rows that are ranked together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mamf.measurement import Measurement
from mamf.operations.unknown import operation_called

#: What rows are ranked within: a regime, a problem and, of operations that compare kernels shape by shape, a shape.
Group = tuple[str, Any, Any]


def best_first(rows: Iterable[Measurement]) -> list[Measurement]:
    """Rows that are ranked together; those without a figure last."""
    return sorted(rows, key=lambda row: (row.ok, row.rank if row.ok else ()), reverse=True)


def grouped(rows: Iterable[Measurement], by_shape: bool = False) -> dict[Group, list[Measurement]]:
    """Rows by what they are ranked within, each group best first. References and rows of a search are left out."""
    found: dict[Group, list[Measurement]] = {}
    for row in rows:
        if not row.is_reference and not row.phase:
            found.setdefault((row.regime, row.problem, row.shape if by_shape else None), []).append(row)
    return {group: best_first(each) for group, each in found.items()}


def group_title(row: Measurement) -> str:
    """What rows of a regime and a problem have in common."""
    described = operation_called(row.operation).describe_problem(row.problem)
    return ", ".join([row.regime, row.problem.dtype, *described])


def shape_title(row: Measurement) -> str:
    """The same with the shape."""
    return f"{group_title(row)}: {operation_called(row.operation).describe_shape(row.shape)}"


def label(row: Measurement) -> str:
    return f"{row.kernel} {row.shape}"
