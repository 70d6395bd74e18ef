"""The values that options of the command line accept, for code that needs only the names. Pure."""

from __future__ import annotations

from typing import Literal, get_args

#: The formats of reports; mamf.report.formats has a renderer for each.
FORMATS = ("table", "csv", "json", "markdown", "html")
#: The sources of ``mamf peak``, the best first.
PeakSource = Literal["measured", "contributed", "published", "datasheet"]
PEAK_SOURCES: tuple[PeakSource, ...] = get_args(PeakSource)
#: Tools in whose format measured roofs can be written.
EXPORTS = ("tracelens",)
#: A row that is slower by more than this share counts as a regression.
DEFAULT_TOLERANCE = 0.01
#: A device that shares a run counts as hung after this many silent seconds; compiling a kernel can take minutes.
PATIENCE_SECONDS = 300.0
OK, WARN, CRITICAL, UNKNOWN = "OK", "WARN", "CRITICAL", "UNKNOWN"
#: Exit codes of the verdict on a node.
VERDICT_EXIT_CODES = {OK: 0, WARN: 1, CRITICAL: 2, UNKNOWN: 3}
