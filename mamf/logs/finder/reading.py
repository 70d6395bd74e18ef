"""Collects the lines of one run and turns them into a FinderRun."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from mamf.logs.finder.grammars import Evidence, Grammar, consistent, reduction_of, version_of
from mamf.logs.finder.header import BEGINS, Header, HeaderReader, Scrubber
from mamf.logs.finder.rows import Row, Sizes
from mamf.logs.finder.summary import Best, Summary
from mamf.logs.finder.tried import names_the_best, repaired, requested, requested_by
from mamf.logs.legacy import FinderRun, Reported
from mamf.operations.matmul.shapes import MatmulShape

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


class Reading:
    """``last_number``: of the rows, whose count only rises. ``goes_back``: it did not. ``mixture``: why these rows are
    those of a run among others on one console; empty where they are of one run.
    """

    def __init__(self, scrubber: Scrubber, header: Header | None = None, mixture: str = "") -> None:
        self._scrub = scrubber
        self._head = HeaderReader(scrubber, header)
        self._marks: dict[Evidence, None] = {}
        self._warnings: list[str] = []
        self._keys: set[object] = set()
        self.rows: list[Row] = []
        self.summary = Summary()
        self.last_number = 0
        self.goes_back = False
        self.mixture = mixture

    @property
    def header(self) -> Header:
        return self._head.header

    @property
    def is_measured(self) -> bool:
        return bool(self.rows or self.summary.kind)

    @property
    def has_head(self) -> bool:
        return self.header != Header()

    @property
    def is_there(self) -> bool:
        return self.is_measured or self.header.started is not None or self.header.command is not None

    def ends_before(self, line: str, row: Row | None) -> bool:
        """Whether the line is of the next run: a head, row or summary after this summary, or a count that restarts."""
        has_summary = bool(self.summary.kind)
        if row is None:
            begins = BEGINS.match(line) and self.is_measured
            return bool(begins) or (has_summary and self.summary.opens(line))
        return has_summary or (row.number == 1 and self.last_number > 0 and not row.is_winner)

    def feed(self, line: str, row: Row | None) -> None:
        if row is not None:
            self._head.close()
            self.add(row)
        elif self.summary.read(line) or _WARM_UP.match(line):
            self._head.close()
        else:
            self._head(line)
            self._mark(line)

    def add(self, row: Row) -> None:
        if row.stage:  # else its form has no winners
            if row.is_winner and row.key in self._keys:
                return
            self._keys.add(row.key)
        if row.number is not None and not row.is_winner:
            self.goes_back |= row.number <= self.last_number
            self.last_number = row.number
        self.rows.append(row)

    def _mark(self, line: str) -> None:
        self._marks |= dict.fromkeys(evidence for pattern, evidence in _MARKS if pattern.search(line))
        if warning := _WARNING.search(line):
            self._warnings.append(self._scrub(warning[1]))

    def run(self) -> FinderRun:
        header = self.header
        grammars = consistent(self._evidence())
        rows, remarks = self._repaired(grammars)
        why_incomplete = self._interruption(grammars)
        place = _Shapes(reduction_of(grammars))
        is_staged = _is_staged(grammars)
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
            rows=tuple(_reported(row, place, is_staged) for row in rows),
            best={name: self._best(best, place, is_staged) for name, best in self.summary.best.items()},
            tried=self.summary.tried,
            ranges=self._scrub(self.summary.ranges) if self.summary.ranges else None,
            means=self.summary.means,
            elapsed_seconds=self.summary.elapsed_seconds,
            is_complete=why_incomplete is None,
            remarks=(
                *_of_version(grammars, header.printed_version),
                *place.remarks,
                *remarks,
                *self._remarks(why_incomplete, _are_scouts(self.summary, grammars)),
            ),
        )

    def _evidence(self) -> dict[Evidence, None]:
        found = dict.fromkeys(
            evidence for kind in dict.fromkeys(row.evidence for row in self.rows) for evidence in kind
        )
        if names_the_best(self.rows):
            found["shapes", "best"] = None
        return found | dict.fromkeys([*self.header.evidence, *self._marks, *self.summary.closing_evidence()])

    def _repaired(self, grammars: Sequence[Grammar]) -> tuple[list[Row], list[str]]:
        if not any(one.version == "v1c" for one in grammars) or not names_the_best(self.rows):
            return self.rows, []
        rows, is_known = repaired(self.rows, requested(self.header.command))
        if is_known:
            return rows, ["its rows print the best shape instead of theirs; rebuilt from row number and command line"]
        return rows, ["its rows print the best shape instead of theirs; the shapes tried are not known"]

    def _interruption(self, grammars: Sequence[Grammar]) -> str | None:
        """Why the run is not complete; None when it is."""
        tried = self.summary.tried
        if self.mixture:
            return self.mixture
        if not self.is_measured:
            return "only its head: the run was killed before its first row, or its rows are elsewhere"
        if not self.summary.kind:
            return "no summary: the log is cut, or the run was killed"
        if tried == 0:
            return "interrupted before the first shape was measured"
        if not self.summary.is_whole:
            return "the summary is cut"
        command = self.header.command or ""
        if _are_scouts(self.summary, grammars):
            return None if _SCOUTS_ONLY.search(command) else "interrupted before the confirms"
        if _is_staged(grammars) or not tried:
            return None
        for wanted, by in (
            (requested(command), "command line"),
            (requested_by(self.summary.ranges, self.rows), "printed ranges"),
        ):
            if wanted and tried < len(wanted):
                return f"interrupted: {tried} of the {len(wanted)} shapes of its {by} were tried"
        return None

    def _remarks(self, why_incomplete: str | None, are_scouts: bool) -> Iterator[str]:
        if why_incomplete:
            yield why_incomplete
        if are_scouts:
            yield "the best figures are of scouts, 20 iterations each: no ceilings"
        counted = sum(row.stage in ("", "scout") for row in self.rows)
        if self.summary.tried and counted < self.summary.tried:
            yield f"{counted} rows are in the log of the {self.summary.tried} shapes tried"
        if self.summary.idle_siblings:
            yield self._scrub(self.summary.idle_siblings)
        yield from self._warnings

    def _best(self, best: Best, place: _Shapes, is_staged: bool) -> Reported:
        stage = "confirm" if self.summary.kind == "headlines" else "scout" if is_staged else ""
        shape, remarks = place(best.sizes)
        return Reported(best.figures, shape, stage, "", best.watts, best.mhz, best.celsius, remarks)


class _Shapes:
    """Printed sizes to shapes, given which of the three is the reduction."""

    def __init__(self, reduction: int | None) -> None:
        self._reduction = reduction
        self._example: tuple[Sizes, MatmulShape] | None = None

    def __call__(self, sizes: Sizes | None) -> tuple[MatmulShape | None, tuple[str, ...]]:
        """The shape, and a remark where it is not known."""
        if sizes is None:
            return None, ()
        first, second, third = sizes
        if 0 in sizes:
            return None, (f"printed as {_printed(sizes)}: no shape has a dimension of 0",)
        if self._reduction is None and second != third:
            return None, (f"printed as {_printed(sizes)}: the log does not say which number is the reduction",)
        if self._reduction != 2:
            return MatmulShape(first, second, third), ()
        shape = MatmulShape(first, third, second)
        if self._example is None and second != third:
            self._example = sizes, shape
        return shape, ()

    @property
    def remarks(self) -> list[str]:
        """How the shapes up to now differ from what the log prints."""
        if self._example is None:
            return []
        sizes, shape = self._example
        return [f"its second number is the reduction: {_printed(sizes)} in the log is the shape {shape} here"]


def _printed(sizes: Sizes) -> str:
    return "x".join(map(str, sizes))


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
