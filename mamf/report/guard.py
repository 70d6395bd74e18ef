"""What a guard found: its verdict, row by row, and junit XML for CI systems."""

from __future__ import annotations

from xml.etree import ElementTree

from mamf.logs.guarding import Guarded, Judged, Outcome
from mamf.report.comparison import comparison_document, percent_of
from mamf.report.document import Answer, Document, Lines
from mamf.report.text import counted, significant
from mamf.text import visible

_JUNIT = {"regression": "failure", "failed": "error", "new": "skipped", "undecided": "skipped"}


def verdict_line(found: Guarded) -> str:
    """The guard in a line."""
    counts, rows = found.counts(), counted(len(found.rows), "row")
    slower = f"slower by more than {percent_of(found.tolerance)}"
    outcomes: dict[Outcome, str] = {
        "regression": f"{slower}, confirmed by fresh visits",
        "failed": "without a figure now",
        "undecided": "undecided: they scatter too much, or too few visits were made",
    }
    reasons = [f"{counts[name]} of {rows} {text}" for name, text in outcomes.items() if counts[name]]
    reasons += [f"not finished: {found.unfinished}"] if found.unfinished else []
    good = f"none of {rows} is {slower}" if found.is_finished else "no row was compared with the baseline"
    verdict = "FAILED" if found.is_failed else "PASSED" if found.is_finished else "UNDECIDED"
    return f"guard {verdict}: {', '.join(reasons) or good}"


def row_lines(found: Guarded) -> list[str]:
    """A line for each row that is not ok."""
    return [f"{row.outcome}: {name(row)}: {message(row)}" for row in found.rows if row.outcome != "ok"]


def name(row: Judged) -> str:
    """A row in words: kernel, shape, and its other fields."""
    others = [f"{field} {value}" for field, value in row.entry.fields.items() if field not in ("shape", "kernel")]
    return f"{row.entry.kernel} {row.entry.shape} ({', '.join(others)})"


def message(row: Judged) -> str:
    """What was found for a row."""
    if row.pair is None:
        return "not in the baseline" if row.outcome == "new" else f"{row.entry.status}: {row.entry.reason}"
    a, b, interval = row.pair.a, row.pair.b, row.pair.interval
    assert a.tflops is not None and b.tflops is not None, "only measured rows are paired"
    visits = f", over {b.rounds} fresh visits" if b.rounds else ""
    return (
        f"{significant(b.tflops)} {b.unit}, was {significant(a.tflops)}: {100 * (row.pair.ratio - 1):+.2f} % "
        f"({100 * (interval.low - 1):+.2f} to {100 * (interval.high - 1):+.2f}){visits}"
    )


def guard_document(found: Guarded) -> Document:
    """The comparison with the baseline, and the verdict."""
    answer = Answer([*row_lines(found), verdict_line(found)])
    data = {"guard": {"verdict": verdict_line(found), "rows": found.counts()}}
    if not found.comparison.pairs:
        return Document("Guard", [answer], data)
    compared = comparison_document(found.comparison, found.tolerance)
    blocks = [Lines(each.texts) if isinstance(each, Answer) else each for each in compared.blocks]
    return Document("Guard", [*blocks, answer], {**compared.data, **data})


def junit(found: Guarded, suite: str, seconds: float) -> str:
    """A suite with a test for each row: regressions fail, rows without a figure are errors, undecided and new rows are
    skipped.
    """
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
