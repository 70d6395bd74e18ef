"""Measurements -> tables, csv, json and markdown. Returns strings; the command line prints them."""

from __future__ import annotations

from mamf.operations.attention.report import attention_summary_record, render_attention
from mamf.report.ceilings import find_summary_record, render_find
from mamf.report.sweeps import Best, bests, ranked, render, summary_record
from mamf.report.text import significant

FORMATS = ("table", "csv", "json", "markdown")

__all__ = [
    "FORMATS",
    "Best",
    "attention_summary_record",
    "bests",
    "find_summary_record",
    "ranked",
    "render",
    "render_attention",
    "render_find",
    "significant",
    "summary_record",
]
