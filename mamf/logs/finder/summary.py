"""The end of a log: the best figures, the means and the time. Three generations of it, and an interrupted one;
of mamf-finder-all-gpus a table by GPU, and the median GPU as the node's figure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mamf.logs.finder.grammars import FIGURE, SHAPE, STATISTIC, UNIT, Evidence
from mamf.logs.finder.rows import Sizes, figure, sizes_of
from mamf.logs.legacy import FinderRun, Reported
from mamf.operations.matmul.shapes import MatmulShape

_LABEL = r"(?:\s*\((?P<label>M\w+)\))?"
_COUNT = r"\(tried (?P<tried>\d{1,18}) shapes\)"
_ONE = re.compile(rf"The best outcome was\s+(?P<stated>{FIGURE}){UNIT} @\s*(?P<shape>{SHAPE})?{_LABEL}\s*{_COUNT}")
_PAIR = re.compile(
    rf"The best outcome was\s+(?P<fastest>{FIGURE})\(max\)\s*/\s*(?P<median>{FIGURE})\(median\){UNIT} @\s*"
    rf"(?P<shape>{SHAPE})?{_LABEL}\s*{_COUNT}"
)
_LABEL_FIRST = re.compile(
    rf"The best outcome was\s+(?P<stated>{FIGURE}){UNIT} @ (?P<label>MxNxK): (?P<shape>{SHAPE})\s*$"
)
_TRIED = re.compile(r"Tried\s+(?P<tried>\d{1,18}) shapes => the best outcomes were")
_OPENINGS = {"one": _ONE, "pair": _PAIR, "label_first": _LABEL_FIRST, "many": _TRIED}
_BEST = re.compile(rf"^\s*(?P<name>mean|median|max):\s*(?P<value>{FIGURE}){UNIT} @\s*(?P<shape>{SHAPE})?{_LABEL}\s*$")
_HEADLINE = re.compile(
    rf"^\s*(?P<name>MAMF|MSMF) \(max [^)]*\):\s+(?:n/a|(?P<value>{FIGURE}) TFLOPS @ (?P<shape>{SHAPE}) \(MxNxK\)"
    r"(?:\s+(?P<watts>\d+)W)?(?:\s+(?P<mhz>\d+)MHz)?(?:\s+(?P<celsius>\d+)C)?)\s*$"
)
_GEOMEAN = re.compile(rf"geomean:\s*(?P<value>{FIGURE}){UNIT} for \d+ shapes in range:\s*(?P<ranges>.*)$")
_ACROSS = re.compile(r"Across \d+ shapes in range:\s*(?P<ranges>.*?) in this run:")
_MEAN = re.compile(rf"^\s*(?P<name>arithmetic|geometric) mean:\s*(?P<value>{FIGURE}){UNIT}")
_ELAPSED = re.compile(r"Elapsed time:\s*(?:(\d{1,9}) days?, )?(\d{1,9}):(\d\d):(\d\d)")
_IDLE = re.compile(r"note: \d+ same-board sibling GPU\(s\) sat idle.*")

_EXPECTED = {"one": 1, "pair": 1, "label_first": 1, "many": 3, "headlines": 2}


@dataclass(frozen=True)
class Best:
    figures: dict[str, float]
    sizes: Sizes | None
    watts: float | None = None
    mhz: float | None = None
    celsius: float | None = None


@dataclass
class Summary:
    """``kind``: one of _EXPECTED, empty at first. ``lines``: number of best lines, with or without a figure."""

    kind: str = ""
    tried: int | None = None
    best: dict[str, Best] = field(default_factory=dict)
    lines: int = 0
    means: dict[str, float] = field(default_factory=dict)
    ranges: str | None = None
    elapsed_seconds: float | None = None
    idle_siblings: str | None = None
    evidence: list[Evidence] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return self.lines >= _EXPECTED.get(self.kind, 1)

    def closing_evidence(self) -> list[Evidence]:
        """The evidence, including absent parts once the last line has been read."""
        if self.elapsed_seconds is None or self.kind != "many":
            return self.evidence
        absent = {"means", "legend"} - {name for name, _ in self.evidence}
        return self.evidence + [(name, "none") for name in absent]

    def opens(self, line: str) -> bool:
        return any(pattern.search(line) for pattern in _OPENINGS.values())

    def read(self, line: str) -> bool:
        """Take a line of the summary; False for any other line."""
        return any(take(line) for take in (self._opening, self._best, self._headline, self._means, self._rest))

    def _opening(self, line: str) -> bool:
        for kind, pattern in _OPENINGS.items():
            if found := pattern.search(line):
                groups = found.groupdict()
                self.kind = kind
                self.tried = int(groups["tried"]) if groups.get("tried") else None
                self.evidence.append(("summary", kind))
                if kind != "many":
                    names = [name for name in groups if name in STATISTIC.values() or name == "stated"]
                    printed = {name: figure(groups[name]) for name in names}
                    self._add("fastest" if kind == "pair" else "stated", printed, groups)
                return True
        return False

    def _best(self, line: str) -> bool:
        found = _BEST.match(line)
        if found is None or self.kind != "many":
            return False
        if not self.lines and found["name"] != "median":
            self.evidence.append(("order", found["name"]))
        name = STATISTIC[found["name"]]
        self._add(name, {name: figure(found["value"])}, found.groupdict())
        return True

    def _headline(self, line: str) -> bool:
        found = _HEADLINE.match(line)
        if found is None:
            return False
        self.kind = "headlines"
        self.evidence.append(("summary", "headlines"))
        if found["value"]:
            self.evidence.append(("headline", "decimal" if "." in found["value"] else "integer"))
        self._add(found["name"], {found["name"]: figure(found["value"])}, found.groupdict())
        return True

    def _add(self, name: str, printed: dict[str, float | None], groups: dict[str, str | None]) -> None:
        self.lines += 1
        if groups.get("label"):
            self.evidence.append(("label", str(groups["label"])))
        figures = {each: value for each, value in printed.items() if value is not None}
        # Nothing was measured: 0.0 TFLOPS of no shape.
        if not figures or not groups.get("shape"):
            return
        telemetry = {each: figure(groups.get(each)) for each in ("watts", "mhz", "celsius")}
        self.best[name] = Best(figures, sizes_of(groups["shape"]), **telemetry)

    def _means(self, line: str) -> bool:
        geomean, across, mean = _GEOMEAN.search(line), _ACROSS.search(line), _MEAN.match(line)
        if geomean or across:
            self.ranges = (geomean or across)["ranges"].strip()  # type: ignore[index]
            self.evidence.append(("means", "geomean" if geomean else "both"))
        found, name = (geomean, "geometric") if geomean else (mean, mean["name"] if mean else "")
        if found is not None:
            value = figure(found["value"])
            self.means |= {name: value} if value is not None else {}
        return bool(geomean or across or mean)

    def _rest(self, line: str) -> bool:
        elapsed, idle = _ELAPSED.search(line), _IDLE.search(line)
        if elapsed:
            days, hours, minutes, seconds = (int(part or 0) for part in elapsed.groups())
            self.elapsed_seconds = float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
        elif idle:
            self.idle_siblings = idle[0]
        elif "Legend: TFLOPS" in line:
            self.evidence.append(("legend", "printed"))
        return bool(elapsed or idle or "Legend: TFLOPS" in line)


TITLE = re.compile(r"^\s*\*\* Node results \((?P<how>.*)\):")
_CELL = r"(?:\d+|-)?"
_GPU = re.compile(
    rf"^\s*(?P<gpu>\d+)\s+(?:(?P<MAMF>\d+)\s+(?P<MAMF_shape>{SHAPE})|n/a)\s+(?:(?P<MSMF>\d+)\s+(?P<MSMF_shape>{SHAPE})|n/a)"
    rf"\s*(?P<watts>{_CELL})\s*(?P<mhz>{_CELL})\s*(?P<celsius>{_CELL})\s+(?P<idle>\d+)%\s*$"
)
_NODE = re.compile(
    rf"^\s*(?P<name>MAMF|MSMF) \(node(?: = (?P<which>[^)]*))?\):\s+(?P<value>\d+(?:\.\d+)?) TFLOPS @ (?P<shape>{SHAPE})"
)
_SLOWEST = re.compile(r"^\s*(?:MAMF|MSMF) slowest / spread:\s.*\d+ GPUs\s*$")
_WARNING = re.compile(r"^\s*(?:warning|note): .*")
_IDLE_PERCENT = 10


def node_run(lines: Sequence[str]) -> FinderRun | None:
    """None where the table is cut before its first figure."""
    gpus = [match for line in lines if (match := _GPU.match(line))]
    rows = [row for gpu in gpus for row in _of_gpu(gpu)]
    best = {match["name"]: _of_node(match) for line in lines if (match := _NODE.match(line))}
    if not rows and not best:
        return None
    missing = {ceiling for row in rows for ceiling in row.tflops} - set(best)
    remarks = [" ".join(line.split()) for line in lines if _SLOWEST.match(line) or _WARNING.match(line)]
    if missing or not best:
        remarks.append("the summary is cut: the node's own figures are not all there")
    measured = sum("MSMF" in row.tflops for row in rows)
    return FinderRun(
        version="v4-node",
        notes=(next(match["how"] for line in lines if (match := TITLE.match(line))),),
        rows=tuple(rows),
        best=best,
        is_complete=not missing and bool(best) and measured == len(gpus),
        remarks=tuple(remarks),
    )


def _of_gpu(gpu: re.Match[str]) -> Iterator[Reported]:
    label = f"GPU {int(gpu['gpu'])}"
    if gpu["MAMF"]:
        yield Reported({"MAMF": float(gpu["MAMF"])}, _shape(gpu["MAMF_shape"]), "confirm", label)
    if gpu["MSMF"]:
        idle = int(gpu["idle"])
        # Watts, clock and temperature of this table are the sustained ones.
        watts, mhz, celsius = (figure(gpu[name] or None) for name in ("watts", "mhz", "celsius"))
        remarks = (f"a sibling idle {idle}% of the time",) if idle >= _IDLE_PERCENT else ()
        yield Reported(
            {"MSMF": float(gpu["MSMF"])}, _shape(gpu["MSMF_shape"]), "confirm", label, watts, mhz, celsius, remarks
        )


def _of_node(match: re.Match[str]) -> Reported:
    name = match["name"]
    label = f"node, {match['which']}" if match["which"] else "node"
    return Reported({name: float(match["value"])}, _shape(match["shape"]), "confirm", label)


def _shape(text: str) -> MatmulShape | None:
    first, second, third = sizes_of(text) or (0, 0, 0)
    return MatmulShape(first, second, third) if min(first, second, third) else None
