"""Selects the attention rows of a run."""

from __future__ import annotations

from mamf.measurement import Measurement
from mamf.operations.attention.shapes import AttentionShape


def is_attention(row: Measurement) -> bool:
    """Whether a row measures attention, and neither a product for its ceiling nor a reference."""
    return isinstance(row.shape, AttentionShape) and not row.is_reference
