"""Reads the lines of one run of mamf-finder: rows, tables, summary and header."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from mamf.dtypes import canonical_name
from mamf.errors import UnknownNameError
from mamf.logs.legacy import FinderRun, Reported
from mamf.operations.matmul.shapes import MatmulShape

_MAX_CHARACTERS = 4000  # of a line
#: The line that uname printed, and the name of the host in it.
UNAME = re.compile(r"^[\s-]*(?:Linux|Darwin|Windows|FreeBSD) (?!\d+\.\d)(\S+)(?= .*(?:#\d|x86_64|aarch64|arm64))", re.M)
SHAPE = r"(?P<shape>\d{1,9}x\d{1,9}x\d{1,9})"
FIGURE = r"(?:\d+(?:\.\d+)?|nan|inf)"
_POWER = r"(?P<watts>\d+|-)\s+(?P<mhz>\d+|-)"
_NAMED = re.compile(rf"({FIGURE})\((max|median|mean)\)")
_STATISTIC = {"mean": "mean", "median": "median", "max": "fastest"}
_TELEMETRY = re.compile(
    r"(?<![\w.])(?=\d+(?:W|MHz)\b)(?:(?P<watts>\d+)W)?\s*(?:(?P<mhz>\d+)MHz)?(?:\s+(?P<celsius>\d+)C)?"
)
_ROW = re.compile(rf"(?<![\w.])\d+ \|\s*(?P<tag>[a-z][\w-]*\s)?(?P<figures>[^@|]*)@ {SHAPE}\s*\|(?P<rest>.*)")
#: Rows of tables, each with the stage that it belongs to.
_TABLES = (
    (
        "scout",
        re.compile(
            rf"^\s*\d+\s+{SHAPE}\s+(?P<mean>{FIGURE})\s+(?P<median>{FIGURE})\s+(?P<fastest>{FIGURE})"
            rf"\s+{FIGURE}(?:\s+(?P<watts>\d+)(?:\s+(?P<mhz>\d+))?)?(?P<rest>\s+<-.*)?$"
        ),
    ),
    ("screen", re.compile(rf"^\s*(?:\d+|k)\s+{SHAPE}\s+(?P<fastest>{FIGURE})\s+(?P<mhz>\d+|-)(?P<rest>\s+<-.*)?$")),
    ("confirm", re.compile(rf"^\s*{SHAPE}\s+(?P<headline>{FIGURE})\s+{_POWER}(?P<rest>\s.*)$")),
    (
        "confirm",
        re.compile(rf"^\[\w+\] (?P<name>MAMF|MSMF) {SHAPE}: (?:\S+ )?\w+=(?P<headline>{FIGURE}) TFLOPS(?P<rest>.*)$"),
    ),
    ("confirm", re.compile(rf"^\[\w+\] (?P<name>MSMF) lock-in: (?P<headline>{FIGURE}) TFLOPS(?P<rest>.*)$")),
)
_LOCK_IN = re.compile(rf"MSMF lock-in: re-measuring {SHAPE}")
_PHASE = re.compile(r"^(?P<name>MSMF|MAMF) \(\w+\) confirm:|^(?P<other>Same-shape cross-check)")
_CROSS_CHECK = "Same-shape cross-check"
_CELSIUS = re.compile(r"^\s+(\d+)\s+drop")
_FLAG = re.compile(r"\((base-clock[^)]*|best available[^)]*)\)|(?<=[\d%]\s)\s*([a-z][a-z ,-]*)$")
_BEST = re.compile(
    rf"^\s*(?:(?P<statistic>mean|median|max):|(?P<name>MAMF|MSMF) \(max [^)]*\):)\s*(?:n/a|(?P<value>{FIGURE})"
    rf"\s*TFLOPS\w* @ ?(?:{SHAPE})?(?: \((?P<label>M\w+)\))?(?P<rest>.*))$"
)
_TRIED = re.compile(r"Tried\s+(\d{1,18}) shapes => the best outcomes were")
_MEAN = re.compile(rf"(?P<name>arithmetic mean|geometric mean|geomean):\s*(?P<value>{FIGURE})\s*TFLOPS")
_ELAPSED = re.compile(r"Elapsed time:\s*(?:(\d{1,9}) days?, )?(\d{1,9}):(\d\d):(\d\d)")
_REMARK = re.compile(r"WARNING: (.*(?:MAMF|MSMF).*)|(note: \d+ same-board sibling GPU\(s\) sat idle.*)")
_EXPECTED = re.compile(r"MSMF ignored|re-measuring|Legend: |cross-check|top peaks|need ≥|-> \d+ scouts")
_FIGURE_LIKE = re.compile(r"\d TFLOPS|\d{1,9}x\d{1,9}x\d")

_STARTED = re.compile(r"Benchmark started on (\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d)")
_TITLE = re.compile(r"^\s*\*\* (?P<title>[A-Z][\w /]+):\s*(?P<value>.*)$")
_DASHES = re.compile(r"^\s*-{20,}\s*$")
_VERSION = re.compile(r"benchmark version: (\d+)")
_PROPERTY = re.compile(r"\b(\w+)=('[^']*'|\[[^]]*\]|\([^)]*\)|[^,)]+)")
_PAIR = re.compile(r"\b(\w+)=([^,\s]+)")
_IDENTIFYING = re.compile(r"^(?:uuid|pci_.*|serial.*)$")


def _number(text: str | None) -> float | None:
    """A figure; None for nan and inf, which mean that nothing was measured, and for a missing one."""
    value = math.nan if text in (None, "", "-") else float(str(text))
    return value if math.isfinite(value) else None


def telemetry_of(found: re.Match[str] | None) -> dict[str, Any]:
    groups = found.groupdict() if found else {}
    names = {"watts": "watts", "clock_mhz": "mhz", "celsius": "celsius"}
    return {name: _number(groups.get(group)) for name, group in names.items()}


class RunReader:
    """Reads the lines of one run."""

    def __init__(self, scrubber: Callable[[str], str]) -> None:
        self._scrub = scrubber
        self._section = ""
        self._headline = ""  # of the table of confirms that is being read
        self._locked_shape = ""
        self._is_reduction_second = False
        self._is_platform_known = False
        self._known: dict[str, Any] = {"device_properties": {}, "software": {}}
        self._rows: list[tuple[str, Reported]] = []
        self._best: dict[str, tuple[str, Reported]] = {}
        self._means: dict[str, float] = {}
        self._remarks: list[str] = []
        self._not_understood = 0

    def read(self, text: str) -> FinderRun:
        for line in text.split("\n"):
            line = line.rstrip()
            if line and len(line) <= _MAX_CHARACTERS and not self._take(line) and not self._take_header(line):
                is_expected = self._headline == _CROSS_CHECK or _EXPECTED.search(line)
                self._not_understood += bool(_FIGURE_LIKE.search(line) and not is_expected)
        stages = {row.stage for _, row in self._rows}
        is_staged, has_headline = bool(stages - {""}), bool({"MAMF", "MSMF"} & set(self._best))
        why = self._interruption(is_staged, has_headline)
        if self._is_reduction_second:
            self._remarks.append("the log prints the reduction second: shapes are MxNxK here")
        if self._not_understood:
            self._remarks.append(f"imported: lines with figures that were not understood: {self._not_understood}")
        stage = "confirm" if has_headline else "scout" if is_staged else ""
        return FinderRun(
            **{"version": None, **self._known},
            rows=tuple(row._replace(shape=self._shape(printed)) for printed, row in self._rows),
            best={
                name: row._replace(shape=self._shape(printed), stage=stage)
                for name, (printed, row) in self._best.items()
            },
            means=self._means,
            is_complete=not why,
            remarks=(*([why] if why else []), *self._remarks),
        )

    def _interruption(self, is_staged: bool, has_headline: bool) -> str:
        """Why the run is not complete; empty if it is."""
        if self._known.get("tried") == 0:
            return "interrupted before the first shape was measured"
        if not self._best:
            return "no summary: the log is cut, or the run was killed"
        if is_staged and not has_headline:
            return "no confirms: its best figures are of scouts, and no ceilings"
        return ""

    def _shape(self, printed: str) -> MatmulShape | None:
        """The first logs of version 2 print the reduction second."""
        if not printed:
            return None
        first, second, third = map(int, printed.split("x"))
        if self._is_reduction_second:
            second, third = third, second
        return MatmulShape(first, second, third) if min(first, second, third) else None

    # -- rows and summary ----------------------------------------------------------------------------------------------

    def _take(self, line: str) -> bool:
        """Whether a line is a row, or belongs to the summary."""
        if row := _ROW.search(line):
            return self._take_row(row)
        for stage, pattern in _TABLES:
            if found := pattern.match(line):
                self._take_table(stage, found)
                return True
        return self._take_summary(line)

    def _take_row(self, found: re.Match[str]) -> bool:
        """Of version 2, and of the scouts before version 4 had tables."""
        printed = _NAMED.findall(found["figures"])
        figures = {_STATISTIC[name]: value for text, name in printed if (value := _number(text)) is not None}
        if len(printed) < 3:  # version 1
            return False
        self._is_reduction_second |= printed[0][1] == "max"
        tag = (found["tag"] or "").strip()
        remarks = tuple(remark for remark in (tag, "SUSPECT" if "SUSPECT" in found["rest"] else "") if remark)
        telemetry = _TELEMETRY.search(found["rest"])
        row = Reported(figures, stage="scout" if tag or telemetry else "", remarks=remarks, **telemetry_of(telemetry))
        self._rows.append((found["shape"], row))
        return True

    def _take_table(self, stage: str, found: re.Match[str]) -> None:
        groups, rest = found.groupdict(), found["rest"] or ""
        if "<-" in rest:  # the winner of a phase is printed once more
            return
        if stage != "confirm":
            figures = {name: value for name in _STATISTIC.values() if (value := _number(groups.get(name))) is not None}
            self._rows.append((found["shape"], Reported(figures, stage=stage, **telemetry_of(found))))
            return
        name = groups.get("name") or self._headline
        if not name:
            self._not_understood += 1
            return
        flag = next(filter(None, (match[1] or match[2] for match in _FLAG.finditer(rest))), "")
        is_lock_in = "shape" not in groups
        telemetry = telemetry_of(found if "watts" in groups else _TELEMETRY.search(rest.partition("(")[0]))
        if celsius := _CELSIUS.search(rest):
            telemetry["celsius"] = float(celsius[1])
        figure = _number(found["headline"])
        row = Reported(
            {} if figure is None else {name: figure},
            # A rank is a second long and only chooses who is measured properly.
            stage="screen" if flag == "rank" else "confirm",
            remarks=tuple(filter(None, (flag, "lock-in" if is_lock_in else ""))),
            **telemetry,
        )
        self._rows.append((self._locked_shape if is_lock_in else found["shape"], row))

    def _take_summary(self, line: str) -> bool:
        if phase := _PHASE.match(line):
            self._headline = phase["name"] or phase["other"]
        if locked := _LOCK_IN.search(line):
            self._locked_shape = locked["shape"]
        if tried := _TRIED.search(line):
            self._known["tried"] = int(tried[1])
        if (best := _BEST.match(line)) and "tried" in self._known:
            self._take_best(best)
            return True
        if mean := _MEAN.search(line):
            value = _number(mean["value"])
            self._means |= {} if value is None else {mean["name"].split()[0].replace("geomean", "geometric"): value}
        if elapsed := _ELAPSED.search(line):
            days, hours, minutes, seconds = (int(part or 0) for part in elapsed.groups())
            self._known["elapsed_seconds"] = float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
        if remark := _REMARK.search(line):
            self._remarks.append(self._scrub(remark[1] or remark[2]))
        return bool(phase or locked or tried or mean or elapsed or remark)

    def _take_best(self, found: re.Match[str]) -> None:
        self._is_reduction_second |= found["label"] == "MxKxN"
        name, value = found["name"] or _STATISTIC[found["statistic"]], _number(found["value"])
        if value is not None and found["shape"]:
            row = Reported({name: value}, **telemetry_of(_TELEMETRY.search(found["rest"])))
            self._best[name] = found["shape"], row

    # -- header --------------------------------------------------------------------------------------------------------

    def _take_header(self, line: str) -> bool:
        if started := _STARTED.search(line):
            self._known["started"] = f"{started[1]}T{started[2]}"
        elif title := _TITLE.match(line):
            self._section = title["title"]
            if self._section == "Dtype" and title["value"]:
                self._known["dtype"] = _dtype_name(title["value"])
        elif _DASHES.match(line) or self._rows:
            self._section = ""
        elif self._section:
            self._take_value(line.strip())
            return True
        return False

    def _take_value(self, line: str) -> None:
        value, known = line.removeprefix("- "), self._known
        if self._section == "Command line":
            known.setdefault("command", self._scrub(line))
        elif self._section == "Platform/Device info" and self._is_platform_known:
            self._take_device(value)
        elif self._section == "Platform/Device info":
            self._is_platform_known = True
        elif self._section == "Critical software versions":
            known["software"] |= {name: self._scrub(text) for name, text in _PAIR.findall(value) if text != "None"}
        elif self._section == "Additional notes" and (version := _VERSION.search(value)):
            known["version"] = f"v{version[1]}"

    def _take_device(self, text: str) -> None:
        values: Mapping[str, str] = {name: value.strip().strip("'") for name, value in _PROPERTY.findall(text)}
        if "(" in text and values:
            kept = {name: self._scrub(value) for name, value in values.items() if not _IDENTIFYING.match(name)}
            self._known["device"] = kept.pop("name", None)
            self._known["device_properties"] |= kept
        else:
            self._known.setdefault("device", self._scrub(text))


def _dtype_name(text: str) -> str:
    """mamf's name of a dtype; one that mamf has no name for stays as printed."""
    bare = text.strip().removeprefix("torch.")
    try:
        return canonical_name(bare)
    except UnknownNameError:
        return bare
