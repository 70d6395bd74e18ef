"""Rows of attention among those of a run."""

from __future__ import annotations

from mamf.measurement import Measurement
from mamf.operations.attention.shapes import AttentionShape


def is_attention(row: Measurement) -> bool:
    """Whether a row is of attention, and neither of a product measured for its ceiling nor a visit of a reference."""
    return isinstance(row.shape, AttentionShape) and not row.is_reference
