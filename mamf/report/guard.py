"""What a guard found: lines, markdown for a pull request, and junit XML, the form that CI systems show."""

from __future__ import annotations

from xml.etree import ElementTree

from mamf.logs.guarding import Guarded, Judged
from mamf.report.comparison import percent, render_comparison
from mamf.report.text import prose, significant
from mamf.text import visible

_JUNIT = {"regression": "failure", "failed": "error", "new": "skipped", "undecided": "skipped"}


def verdict_line(found: Guarded) -> str:
    """The guard in a line."""
    counts, rows, slower = found.counts(), len(found.rows), f"slower by more than {percent(found.tolerance)}"
    told = []
    if counts["regression"]:
        told.append(f"{counts['regression']} of {rows} rows {slower}, confirmed by fresh visits")
    if counts["failed"]:
        told.append(f"{counts['failed']} of {rows} rows have no figure any more")
    if counts["undecided"]:
        told.append(
            f"{counts['undecided']} of {rows} rows undecided: they scatter too much, or too few visits were made"
        )
    if found.unfinished:
        told.append(f"not finished: {found.unfinished}")
    if not told:
        told.append(
            f"none of {rows} rows is {slower}" if found.is_finished else "no row was compared with the baseline"
        )
    verdict = "FAILED" if found.is_failed else "PASSED" if found.is_finished else "UNDECIDED"
    return f"guard {verdict}: {', '.join(told)}"


def row_lines(found: Guarded) -> list[str]:
    """What is not as it should be, a line each."""
    return [f"{row.outcome}: {name(row)}: {message(row)}" for row in found.rows if row.outcome != "ok"]


def name(row: Judged) -> str:
    """A row in words: kernel, shape, and what else it is of."""
    others = [f"{field} {value}" for field, value in row.entry.fields.items() if field not in ("shape", "kernel")]
    return f"{row.entry.kernel} {row.entry.shape} ({', '.join(others)})"


def message(row: Judged) -> str:
    """What was found of a row."""
    if row.pair is None:
        return "not in the baseline" if row.outcome == "new" else f"{row.entry.status}: {row.entry.reason}"
    a, b, interval = row.pair.a, row.pair.b, row.pair.interval
    assert a.tflops is not None and b.tflops is not None, "only measured rows are paired"
    visits = f", over {b.rounds} fresh visits" if b.rounds else ""
    return (
        f"{significant(b.tflops)} {b.unit}, was {significant(a.tflops)}: {100 * (row.pair.ratio - 1):+.2f} % "
        f"({100 * (interval.low - 1):+.2f} to {100 * (interval.high - 1):+.2f}){visits}"
    )


def render_guard(format: str, found: Guarded, width: int | None = None) -> str:
    """A guard in one of mamf.report.FORMATS: the comparison with its baseline, and for readers what is made of it."""
    shown = render_comparison(format, found.comparison, found.tolerance, width) if found.comparison.pairs else ""
    if format in ("csv", "json"):
        return shown
    gap = "\n" if format == "markdown" else ""
    return f"{prose([verdict_line(found), *row_lines(found)], format, gap).rstrip()}\n\n{shown}"


def junit(found: Guarded, suite: str, seconds: float) -> str:
    """A suite of a test a row: regressions fail, rows without a figure are errors, what was not judged is skipped."""
    counts = found.counts()
    top = ElementTree.Element(
        "testsuite",
        name=visible(suite),
        tests=str(len(found.rows)),
        failures=str(counts["regression"]),
        errors=str(counts["failed"]),
        skipped=str(counts["new"] + counts["undecided"]),
        time=f"{seconds:.3f}",
    )
    for row in found.rows:
        case = ElementTree.SubElement(top, "testcase", classname=visible(f"{suite}.{row.entry.kernel}"))
        case.set("name", visible(name(row)))
        if row.outcome in _JUNIT:
            ElementTree.SubElement(case, _JUNIT[row.outcome], message=visible(message(row)))
    ElementTree.SubElement(top, "system-out").text = visible(verdict_line(found))
    ElementTree.indent(top)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(top, encoding="unicode")}\n'
