"""Numbers, lines and tables as text, for every report. Foreign text is made harmless here (mamf.text)."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from mamf.backend import describe_sharing
from mamf.measurement import group_pairs
from mamf.statistics import Interval
from mamf.text import csv_cell, markdown_text, visible
from mamf.work import Work

DASH = "-"
#: In place of an interval that is wider than +-50 %.
UNKNOWN = "unknown"
WHY_UNKNOWN = "interval unknown: the samples scatter so much that a repeat may be more than 50 % off"
_GAP = "  "


def significant(value: float) -> str:
    """Four significant digits without an exponent, from a CPU's 0.1336 to an accelerator's 841.3 TFLOPS."""
    return f"{value:#.4g}".rstrip(".") if value < 9999.5 else f"{value:.0f}"


#: Prefixes of units, each with what a value in 1e12 is multiplied by.
_SCALES = {"T": 1.0, "G": 1e3, "M": 1e6, "k": 1e9}
#: A largest value below this is shown in a smaller unit.
_SMALLEST = 0.1


def scaled_unit(unit: str, values: Iterable[float]) -> tuple[str, float]:
    """Return the unit in which the largest of ``values`` (in ``unit``: TFLOPS, TB/s) reads well, and its factor."""
    largest = max(values, default=0.0) or 1.0
    if not unit.startswith("T"):
        return unit, 1.0
    prefix, factor = next((each for each in _SCALES.items() if largest * each[1] >= _SMALLEST), ("k", 1e9))
    return prefix + unit[1:], factor


def rate_text(rate: float, unit: str) -> str:
    """A rate with its unit: ``841.3 TFLOPS``, ``78.70 MB/s``."""
    name, factor = scaled_unit(unit, [rate])
    return f"{significant(rate * factor)} {name}"


def work_line(works: Iterable[Work]) -> str:
    """What the works count, each part once: ``counted: 2*M*N*K; A and B read, C written, once each``."""
    return "counted: " + "; ".join(dict.fromkeys(part for work in works for part in work.convention.split("; ")))


def rate_name(name: str, unit: str) -> str:
    """A name in csv and json with the unit of a rate: ``rate_tflops``, ``rate_tb_per_s``."""
    return f"{name}_{snake_case(unit)}"


def plain(value: object) -> str:
    """A value of any type; text as it is, floats with four digits and without an exponent."""
    if not isinstance(value, float):
        return value if isinstance(value, str) else str(value)
    return f"{value:.4g}" if abs(value) < 9999.5 else f"{value:.0f}"


def percent(share: float) -> str:
    """A share in percent, without the sign: 81.3."""
    return f"{100 * share:.1f}"


def counted(number: int, noun: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shortened(text: str) -> str:
    """The first 100 characters of a text, in one line."""
    return textwrap.shorten(visible(text), 100, placeholder=" ...")


def split_shared(titles: Sequence[str]) -> tuple[list[str], str]:
    """Split titles such as ``burst, bfloat16`` into what each has for itself, and what all of them share."""
    parts = [title.split(", ") for title in titles]
    shared = [part for part in parts[0] if all(part in each for each in parts)] if parts else []
    return [", ".join(part for part in each if part not in shared) for each in parts], ", ".join(shared)


def snake_case(title: str) -> str:
    """A heading as a name in csv and json: ``FLOP/byte`` as ``flop_per_byte``."""
    spelled = title.replace("/", " per ").replace("%", " percent ")
    return re.sub(r"\W+", "_", spelled.lower()).strip("_")


def interval_cell(interval: Interval, factor: float = 1.0) -> str:
    """From low to high, each times ``factor``; ``unknown`` if it reaches further than 50 % from its middle."""
    low, high = significant(interval.low * factor), significant(interval.high * factor)
    return f"{low} to {high}" if interval.is_known else UNKNOWN


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


def list_once(remarks: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each remark, with the first row that it applies to and the number of others."""
    labels = group_pairs(remark for remark in remarks if remark[0])
    return [
        f"{first}{f' and {len(others)} more' if others else ''}: {text}" for text, (first, *others) in labels.items()
    ]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], left_aligned: Collection[str]) -> str:
    """A GitHub table, whose cells are plain text but for Markup."""
    rule = [":--" if name in left_aligned else "--:" for name in columns]
    lines = [list(map(_cell, columns)), rule, *(list(map(_cell, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(markdown_text(text).split())


def label_kernel(name: str, header: Mapping[str, Any]) -> str:
    """A kernel's name for people, with a label if the plan of its log knows it by its path alone."""
    planned = _planned_kernels(header)
    is_by_path = any(":" in each for each in planned) and {name, name.partition("[")[0]}.isdisjoint(planned)
    return f"{name} (by path)" if is_by_path else name


def _planned_kernels(header: Mapping[str, Any]) -> Sequence[str]:
    # As they were asked for: by name, or by path (package.module:Class).
    return header.get("plan", {}).get("kernels") or [header.get("kernel", "")]


def machine_line(header: Mapping[str, Any]) -> str:
    """The device, the software and the timer of a run, and the kernels that it was given by path."""
    device = header["device"]
    known = [
        counted(device["compute_units"], "compute unit") if device.get("compute_units") else "",
        f"{device['power_limit_watts']:.0f} W limit" if device.get("power_limit_watts") else "",
        f"driver {device['driver']}" if device.get("driver") else "",
        f"torch {header['environment']['packages'].get('torch', 'unknown')}",
        f"timed by {header['timer']}",
    ]
    machine = f"{device['name']} ({device['backend']}:{device['index']}), {', '.join(filter(None, known))}"
    by_path = (f"kernel by path: {name}" for name in _planned_kernels(header) if ":" in name)
    return "; ".join(filter(None, [machine, describe_sharing(device["name"]), *by_path]))


def end_line(summary: Mapping[str, Any] | None, has_count: bool = True) -> str:
    """How a run ended: its status and why, what was measured and what is left."""
    if summary is None:
        return "killed: the log has no summary; resume it"
    end = f"{summary['status']}: {summary['reason']}" if summary["reason"] else summary["status"]
    left = f"; {summary['left']} left, --resume continues" if summary.get("left") else ""
    measured = f"; {summary['measured']} measured" if has_count else ""
    return f"{end}{measured} in {summary['elapsed_seconds']:.1f} s{left}"


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of equal keys, with a line of them first; nothing for no rows."""
    text = io.StringIO()
    if rows:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(map(csv_cell, rows[0]))
        writer.writerows([csv_cell(row.get(name)) for name in rows[0]] for row in rows)
    return text.getvalue()
