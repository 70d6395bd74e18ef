"""Rows of attention among those of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mamf.measurement import Measurement
from mamf.operations.attention.shapes import AttentionShape
from mamf.plans import StepKey

#: The schema of the run log from which on peak memory is of the kernel alone.
_MEMORY_OF_LAUNCH = 4


def is_attention(row: Measurement) -> bool:
    """Whether a row is of attention, and neither of a product measured for its ceiling nor a visit of a reference."""
    return isinstance(row.shape, AttentionShape) and not row.is_reference


def has_memory_of_process(header: Mapping[str, Any], rows: Iterable[Measurement]) -> bool:
    """Whether the rows' memory holds everything that the process held, as in logs of before schema 4.

    ``header``: of a log, or of the run that goes on, which has no schema yet.
    """
    is_early = header.get("schema", _MEMORY_OF_LAUNCH) < _MEMORY_OF_LAUNCH
    return is_early and any(row.peak_memory_bytes is not None for row in rows)


def step_of(row: Measurement) -> StepKey:
    return row.regime, row.problem, row.shape, row.kernel
