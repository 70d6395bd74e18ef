"""What options of the command line let one choose from, for whoever needs the names alone. Pure."""

from __future__ import annotations

from typing import Literal, get_args

#: The formats of reports; mamf.report.formats has a renderer for each.
FORMATS = ("table", "csv", "json", "markdown", "html")
#: Where ``mamf peak`` knows a figure from, the best first.
PeakSource = Literal["measured", "contributed", "published", "datasheet"]
PEAK_SOURCES: tuple[PeakSource, ...] = get_args(PeakSource)
#: Other tools that measured roofs are written for.
EXPORTS = ("tracelens",)
#: A row that is slower by more than this share is a regression.
DEFAULT_TOLERANCE = 0.01
#: Seconds without a word after which a device that shares a run counts as hung: kernels compile for minutes.
PATIENCE_SECONDS = 300.0
OK, WARN, CRITICAL, UNKNOWN = "OK", "WARN", "CRITICAL", "UNKNOWN"
#: Exit codes of the verdict on a node.
VERDICT_EXIT_CODES = {OK: 0, WARN: 1, CRITICAL: 2, UNKNOWN: 3}
