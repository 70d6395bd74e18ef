"""Measurements -> tables, csv, json and markdown. Returns strings; the command line prints them."""

from __future__ import annotations

from mamf.report.ceilings import find_summary_record, render_find
from mamf.report.sweeps import Best, bests, ranked, render, summary_record
from mamf.report.text import significant

FORMATS = ("table", "csv", "json", "markdown")

__all__ = [
    "FORMATS",
    "Best",
    "bests",
    "find_summary_record",
    "ranked",
    "render",
    "render_find",
    "significant",
    "summary_record",
]
