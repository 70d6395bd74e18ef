"""Measurements as documents, and documents as text. Returns strings; the command line prints them."""

from __future__ import annotations

from mamf.report.ceilings import find_summary_record
from mamf.report.rows import Best, bests, ranked, summary_record
from mamf.report.text import significant

__all__ = [
    "Best",
    "bests",
    "find_summary_record",
    "ranked",
    "significant",
    "summary_record",
]
