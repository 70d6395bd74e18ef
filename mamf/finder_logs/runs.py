"""A text to its runs: cut where a run begins, read line by line, and said only as much as the log says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mamf.errors import RunLogError
from mamf.finder_logs import node
from mamf.finder_logs.grammars import Evidence, Grammar, consistent, reduction_of, version_of
from mamf.finder_logs.header import BEGINS, STARTED, HeaderReader
from mamf.finder_logs.rows import Row, RowReader, Sizes
from mamf.finder_logs.summary import Best, Summary
from mamf.finder_logs.text import Scrubber, clean_lines
from mamf.finder_logs.tried import names_the_best, repaired, requested
from mamf.logs.legacy import FinderRun, Reported
from mamf.operations.matmul.shapes import MatmulShape

_NOTHING = (
    "holds nothing that mamf-finder prints: no row, no summary; give the file named by its --output_file, "
    "or paste its output whole"
)
_WARM_UP = re.compile(r"^\s*(?:Warming up|telemetry:|accelerator warmup|Detected a situation with too few)")
_MARKS: tuple[tuple[re.Pattern[str], Evidence], ...] = (
    (re.compile(r"^\[(?:auto|grid|confirm)\] "), ("search", "prefixed")),
    (re.compile(r"^(?:Auto|Grid) search: |^(?:MSMF|MAMF) (?:\(\w+\) confirm|recall screen):"), ("search", "titled")),
    (re.compile(r"^\*\* Results:"), ("search", "titled")),
    (re.compile(r"Do you want to upload"), ("summary", "upload")),
    (re.compile(r"[Uu]sing an existing study|A new study created"), ("row", "trial")),
)
_WARNING = re.compile(r"WARNING: (.*(?:MAMF|MSMF).*)")
_SCOUTS_ONLY = re.compile(r"scout_only(?!=(?:false|0))")


def parse(text: str) -> list[FinderRun]:
    """Raises RunLogError where there is no run in it."""
    if not text.strip():
        raise RunLogError("empty; mamf-finder writes its log to the file named by its --output_file")
    lines = clean_lines(text)
    scrubber = Scrubber(lines)
    runs: list[FinderRun] = []
    for part in _parts(lines):
        if any(node.TITLE.match(line) for line in part):
            of_node = node.node_run(part)
            runs += [_scrubbed(of_node, scrubber)] if of_node else []
        else:
            runs += _runs(part, scrubber)
    if not runs:
        raise RunLogError(_NOTHING)
    return _without_repetition(runs)


def _parts(lines: Sequence[str]) -> Iterator[list[str]]:
    part: list[str] = []
    for line in lines:
        if part and (STARTED.search(line) or node.TITLE.match(line)):
            yield part
            part = []
        part.append(line)
    yield part


def _runs(lines: Sequence[str], scrubber: Scrubber) -> list[FinderRun]:
    """The runs between two heads: more than one where the later heads were cut off."""
    runs = [_Reading(scrubber)]
    read_row = RowReader()
    for line in lines:
        row = read_row(line)
        if runs[-1].ends_before(line, row):
            runs.append(_Reading(scrubber))
        runs[-1].feed(line, row)
    return [reading.run() for reading in runs if reading.rows or reading.summary.kind]


def _without_repetition(runs: Sequence[FinderRun]) -> list[FinderRun]:
    """A second Ctrl-C prints the summary a second time."""
    kept: list[FinderRun] = []
    for run in runs:
        before = kept[-1] if kept else None
        if before and not run.rows and run.started is None and (run.tried, run.best) == (before.tried, before.best):
            kept[-1] = replace(
                before,
                elapsed_seconds=before.elapsed_seconds or run.elapsed_seconds,
                remarks=(*before.remarks, "the summary is printed twice"),
            )
        else:
            kept.append(run)
    return kept


def _scrubbed(run: FinderRun, scrubber: Scrubber) -> FinderRun:
    return replace(run, notes=tuple(map(scrubber, run.notes)), remarks=tuple(map(scrubber, run.remarks)))


class _Reading:
    """One run while its lines come in."""

    def __init__(self, scrubber: Scrubber) -> None:
        self._scrub = scrubber
        self._head = HeaderReader(scrubber)
        self.rows: list[Row] = []
        self.summary = Summary()
        self._marks: list[Evidence] = []
        self._warnings: list[str] = []

    def ends_before(self, line: str, row: Row | None) -> bool:
        """Whether the line is of the next run: a head, row or summary after this summary, or a count that restarts."""
        has_summary = bool(self.summary.kind)
        if row is None:
            begins = BEGINS.match(line) and (self.rows or has_summary)
            return bool(begins) or (has_summary and self.summary.opens(line))
        is_first = row.number == 1 and not row.is_winner
        return has_summary or (is_first and any(other.number is not None for other in self.rows))

    def feed(self, line: str, row: Row | None) -> None:
        if row is not None:
            self._head.close()
            self._add(row)
        elif self.summary.read(line) or _WARM_UP.match(line):
            self._head.close()
        else:
            self._head(line)
            self._mark(line)

    def _add(self, row: Row) -> None:
        if not (row.is_winner and any(row.repeats(other) for other in self.rows)):
            self.rows.append(row)

    def _mark(self, line: str) -> None:
        self._marks += [evidence for pattern, evidence in _MARKS if pattern.search(line)]
        warning = _WARNING.search(line)
        if warning:
            self._warnings.append(self._scrub(warning[1]))

    def run(self) -> FinderRun:
        header = self._head.header
        grammars = consistent(dict.fromkeys(self._evidence()))
        rows, remarks = self._repaired(grammars)
        why_incomplete = self._interruption(grammars)
        place = _Shapes(reduction_of(grammars))
        return FinderRun(
            version=version_of(grammars),
            started=header.started,
            command=header.command,
            dtype=header.dtype,
            platform=header.platform,
            device=header.device,
            device_properties=header.device_properties,
            software=header.software,
            variables=header.variables,
            notes=tuple(header.notes),
            rows=tuple(_reported(row, place, _is_staged(grammars)) for row in rows),
            best={name: self._best(best, place, grammars) for name, best in self.summary.best.items()},
            tried=self.summary.tried,
            ranges=self._scrub(self.summary.ranges) if self.summary.ranges else None,
            means=self.summary.means,
            elapsed_seconds=self.summary.elapsed_seconds,
            is_complete=why_incomplete is None,
            remarks=(
                *_of_version(grammars, header.printed_version),
                *remarks,
                *self._remarks(why_incomplete, _are_scouts(self.summary, grammars)),
            ),
        )

    def _evidence(self) -> Iterator[Evidence]:
        for row in self.rows:
            yield from row.evidence
        if names_the_best(self.rows):
            yield "shapes", "best"
        yield from (*self._head.header.evidence, *self._marks, *self.summary.closing_evidence())

    def _repaired(self, grammars: Sequence[Grammar]) -> tuple[list[Row], list[str]]:
        if not names_the_best(self.rows) or not any(one.version == "v1c" for one in grammars):
            return self.rows, []
        rows, is_known = repaired(self.rows, requested(self._head.header.command))
        if is_known:
            return rows, ["its rows print the best shape instead of theirs; rebuilt from row number and command line"]
        return rows, ["its rows print the best shape instead of theirs; the shapes tried are not known"]

    def _interruption(self, grammars: Sequence[Grammar]) -> str | None:
        """Why the run is not complete; None when it is."""
        if not self.summary.kind:
            return "no summary: the log is cut, or the run was killed"
        if self.summary.tried == 0:
            return "interrupted before the first shape was measured"
        if not self.summary.is_whole:
            return "the summary is cut"
        command = self._head.header.command or ""
        if _are_scouts(self.summary, grammars):
            return None if _SCOUTS_ONLY.search(command) else "interrupted before the confirms"
        wanted = requested(command)
        if wanted and self.summary.tried and self.summary.tried < len(wanted) and not _is_staged(grammars):
            return f"interrupted: {self.summary.tried} of the {len(wanted)} shapes of its command line were tried"
        return None

    def _remarks(self, why_incomplete: str | None, are_scouts: bool) -> list[str]:
        remarks = [why_incomplete] if why_incomplete else []
        if are_scouts:
            remarks.append("the best figures are of scouts, 20 iterations each: no ceilings")
        counted = sum(row.stage in ("", "scout") for row in self.rows)
        if self.summary.tried and counted < self.summary.tried:
            remarks.append(f"{counted} rows are in the log of the {self.summary.tried} shapes tried")
        if self.summary.idle_siblings:
            remarks.append(self.summary.idle_siblings)
        return remarks + self._warnings

    def _best(self, best: Best, place: _Shapes, grammars: Sequence[Grammar]) -> Reported:
        stage = "confirm" if self.summary.kind == "headlines" else "scout" if _is_staged(grammars) else ""
        shape, remarks = place(best.sizes)
        return Reported(best.figures, shape, stage, "", best.watts, best.mhz, best.celsius, remarks)


class _Shapes:
    """Printed sizes to shapes, given which of the three is the reduction."""

    def __init__(self, reduction: int | None) -> None:
        self._reduction = reduction

    def __call__(self, sizes: Sizes | None) -> tuple[MatmulShape | None, tuple[str, ...]]:
        """The shape, and a remark where it is not known."""
        if sizes is None:
            return None, ()
        printed = "x".join(map(str, sizes))
        if not min(sizes):
            return None, (f"printed as {printed}: no shape has a dimension of 0",)
        first, second, third = sizes
        if self._reduction is None and second != third:
            return None, (f"printed as {printed}: the log does not tell which number is the reduction",)
        return MatmulShape(first, third, second) if self._reduction == 2 else MatmulShape(first, second, third), ()


def _reported(row: Row, place: _Shapes, is_staged: bool) -> Reported:
    # The row of a grid looks as it did before there were stages.
    stage = row.stage or ("scout" if is_staged else "")
    shape, remarks = place(row.sizes)
    return Reported(row.figures, shape, stage, "", row.watts, row.mhz, row.celsius, (*row.remarks, *remarks))


def _is_staged(grammars: Sequence[Grammar]) -> bool:
    return bool(grammars) and all(one.is_staged for one in grammars)


def _are_scouts(summary: Summary, grammars: Sequence[Grammar]) -> bool:
    return summary.kind == "many" and _is_staged(grammars)


def _of_version(grammars: Sequence[Grammar], printed: str | None) -> list[str]:
    if not grammars:
        return ["its lines belong to no single known version"]
    if printed and reduction_of(grammars) == 2:
        return [f"prints benchmark version {printed}, but its second number is the reduction, as in version 1"]
    if printed and {one.version for one in grammars} == {"v3-dev"}:
        return [f"prints benchmark version {printed} of the numbering before the published 3: older than it looks"]
    return []
