"""Numbers, lines and tables as text: what every report shares. Foreign text is made harmless here (mamf.text)."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from mamf.text import csv_cell, markdown_line, markdown_text, visible

DASH = "-"
_GAP = "  "


def significant(value: float) -> str:
    """Four significant digits: what repeats, from a CPU's 0.1336 to an accelerator's 841.3 TFLOPS."""
    return f"{value:#.4g}".rstrip(".")


def whole(value: float | None) -> str:
    return DASH if value is None else f"{value:.0f}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], left_aligned: Collection[str]) -> str:
    """Aligned columns for a terminal."""
    lines = [[visible(cell) for cell in line] for line in (columns, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]

    def aligned(line: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if name in left_aligned else cell.rjust(width)
            for name, cell, width in zip(columns, line, widths, strict=True)
        )
        return _GAP.join(padded).rstrip()

    return "\n".join(map(aligned, lines)) + "\n"


def fitting(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> int:
    """How many of the columns, the most important first, a line of ``width`` holds: at least one, None holds all."""
    if width is None:
        return len(columns)
    taken = -len(_GAP)
    for number, name in enumerate(columns):
        taken += len(_GAP) + max(len(visible(cell)) for cell in (name, *(row[number] for row in rows)))
        if taken > width:
            return max(1, number)
    return len(columns)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], left_aligned: Collection[str]) -> str:
    """A GitHub table, whose cells are plain text but for Markup."""
    rule = [":--" if name in left_aligned else "--:" for name in columns]
    lines = [list(map(_cell, columns)), rule, *(list(map(_cell, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(markdown_text(text).split())


def prose(texts: Iterable[str], format: str, gap: str = "") -> str:
    """Lines around tables, each ended and followed by ``gap``."""
    written = markdown_line if format == "markdown" else visible
    return "".join(f"{written(text)}\n{gap}" for text in texts)


def end_line(summary: Mapping[str, Any] | None) -> str:
    """How a run ended: its status and why, what was measured and what is left."""
    if summary is None:
        return "killed: the log has no summary; resume it"
    end = f"{summary['status']}: {summary['reason']}" if summary["reason"] else summary["status"]
    left = f", {summary['left']} left to resume" if summary.get("left") else ""
    return f"{end}; {summary['measured']} measured{left} in {summary['elapsed_seconds']:.1f} s"


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of equal keys, with a line of them first; nothing for no rows."""
    text = io.StringIO()
    if rows:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(map(csv_cell, rows[0]))
        writer.writerows([csv_cell(row.get(name)) for name in rows[0]] for row in rows)
    return text.getvalue()
