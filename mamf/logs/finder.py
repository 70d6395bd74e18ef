"""Parse the text logs of mamf-finder, versions 2 to 4, and the summaries of mamf-finder-all-gpus, for import into mamf.

These scripts have no machine-readable output, so regular expressions match their lines one by one, in any order. Lines
that contain figures but match no expression are not imported. The imported run has a remark with their number.
Values that a log does not contain stay unknown.
"""

from __future__ import annotations

import codecs
import gzip
import io
import math
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from mamf.dtypes import canonicalize_dtype_name
from mamf.errors import RunLogError, UnknownNameError
from mamf.logs.legacy import FinderRun, ReportedFigures
from mamf.logs.run_log import ReadProgressCallback
from mamf.machine.privacy import scrub_text

#: The maximum size of an unpacked log in bytes, which is about a million rows.
MAX_FINDER_LOG_BYTES = 128 << 20
_MAX_LINE_LENGTH = 4000
_GZIP_MAGIC = b"\x1f\x8b"
_UTF16_BYTE_ORDER_MARKS = (
    codecs.BOM_UTF16_LE,
    codecs.BOM_UTF16_BE,
)  # PowerShell writes UTF-16 when it redirects output to a file.
_TERMINAL_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
_MARKDOWN_MARKUP = re.compile(r"^[ \t]*```.*$|^(?:> ?)+|^(?:\^C)+|\\(?=[*_|~])", re.MULTILINE)
#: Matches the end of the last line of a log if the line is complete. A line that was cut off may end inside a number.
_COMPLETE_LINE_END = re.compile(r"(?:\)|TFLOPS|MHz|\dC|\d:\d\d:\d\d)\s*$")
_SHAPE_GROUP = r"(?P<shape>\d{1,9}x\d{1,9}x\d{1,9})"
_FIGURE_TEXT = r"(?:\d+(?:\.\d+)?|nan|inf)"
_RUN_START = re.compile(r"^(?=.*Benchmark started on \d|\s*\*\* Node results \()", re.MULTILINE)


def read_finder_logs(path: Path, on_read: ReadProgressCallback = lambda count: None) -> list[FinderRun]:
    """Read all runs in a text or gzip file with the output of mamf-finder. Usually the file has one run.

    Calls ``on_read`` with the number of characters of each part that was read. Raises RunLogError for a file without a
    run.
    """
    try:
        return parse_finder_runs(_read_finder_text(path), on_read)
    except RunLogError as error:
        raise RunLogError(f"{path}: {error}") from None


def _read_finder_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FINDER_LOG_BYTES + 1)
        if content.startswith(_GZIP_MAGIC):
            content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(MAX_FINDER_LOG_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise RunLogError(f"the file cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if len(content) > MAX_FINDER_LOG_BYTES:
        raise RunLogError(f"a log of mamf-finder has at most {MAX_FINDER_LOG_BYTES >> 20} MiB: choose another file")
    return content.decode("utf-16" if content.startswith(_UTF16_BYTE_ORDER_MARKS) else "utf-8-sig", errors="replace")


def parse_finder_runs(text: str, on_read: ReadProgressCallback = lambda count: None) -> list[FinderRun]:
    """Parse all runs in the output of mamf-finder.

    Calls ``on_read`` with the number of characters of each part that was parsed. Raises RunLogError for a text without
    a run.
    """
    text = _MARKDOWN_MARKUP.sub("", _TERMINAL_ESCAPE.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))
    if not text.endswith("\n") and not _COMPLETE_LINE_END.search(text[-_MAX_LINE_LENGTH:]):
        text = text[: text.rfind("\n") + 1]
    remove_private_texts, runs = _make_private_text_remover(text), []
    for part in _RUN_START.split(text):
        is_node = part.lstrip().startswith("** Node results")
        run = (
            _parse_node_run(part, remove_private_texts) if is_node else _RunParser(remove_private_texts).parse_run(part)
        )
        runs += [run] if run.rows or run.best or run.started or run.tried is not None else []
        on_read(len(part))
    if not any(run.rows or run.best or run.tried is not None for run in runs):
        raise RunLogError(
            "the text has no row or summary of mamf-finder 2 to 4: pass the file that mamf-finder wrote to its "
            "--output_file"
        )
    return runs


# -- removing private texts from logs of mamf-finder -------------------------------------------------------------------

#: A line that uname printed, which contains the name of the host.
_UNAME_LINE = re.compile(
    r"^[\s-]*(?:Linux|Darwin|Windows|FreeBSD) (?!\d+\.\d)(\S+)(?= .*(?:#\d|x86_64|aarch64|arm64))", re.M
)
_HOME_PATH = re.compile(r"(?:/home|[/\\]Users)[/\\]+([\w.@+-]+)")
_UUID = re.compile(r"\b(?:GPU-|MIG-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE)
_PUBLIC_NAMES = {
    "linux",
    "darwin",
    "windows",
    "localhost",
    "root",
    "user",
    "admin",
    "ubuntu",
    "runner",
    "torch",
    "cuda",
}


def _make_private_text_remover(text: str) -> Callable[[str], str]:
    """Return a function that removes private texts from a string: UUIDs, paths, and the names of hosts and users.

    ``text``: the whole log, in which the function finds these names.
    """
    names = dict.fromkeys((name for host in _UNAME_LINE.findall(text) for name in (host, host.split(".")[0])), "<host>")
    names |= dict.fromkeys(_HOME_PATH.findall(text), "<user>")
    # Sort the longest names first, because a short host name may be part of a longer one.
    private = sorted(
        (name for name in names if len(name) > 2 and name.lower() not in _PUBLIC_NAMES), key=len, reverse=True
    )
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, private)) or '(?!)'})(?!\w)")
    return lambda string: _UUID.sub("<uuid>", pattern.sub(lambda match: names[match[0]], scrub_text(string)))


# -- parsing the summary that mamf-finder-all-gpus prints --------------------------------------------------------------

_SHAPE_TEXT = r"[1-9]\d{0,8}x[1-9]\d{0,8}x[1-9]\d{0,8}"
_GPU_LINE = re.compile(
    rf"^\s*(?P<gpu>\d+)\s+(?:(?P<MAMF>\d+)\s+(?P<MAMF_shape>{_SHAPE_TEXT})|n/a)"
    rf"\s+(?:(?P<MSMF>\d+)\s+(?P<MSMF_shape>{_SHAPE_TEXT})|n/a)"
    r"\s*(?P<watts>\d+|-)?\s*(?P<mhz>\d+|-)?\s*(?P<celsius>\d+|-)?\s+\d+%\s*$"
)
_NODE_LINE = re.compile(
    rf"^\s*(?P<name>MAMF|MSMF) \(node(?: = (?P<which>[^)]*))?\):\s+(?P<value>{_FIGURE_TEXT}) TFLOPS"
    rf" @ (?P<shape>{_SHAPE_TEXT})"
)


def _parse_node_run(text: str, remove_private_texts: Callable[[str], str]) -> FinderRun:
    lines = remove_private_texts(text).split("\n")
    gpus = [match for line in lines if (match := _GPU_LINE.match(line))]
    best = {
        match["name"]: ReportedFigures(
            {match["name"]: float(match["value"])},
            match["shape"],
            "confirm",
            f"node, {match['which']}" if match["which"] else "node",
        )
        for line in lines
        if (match := _NODE_LINE.match(line))
    }
    return FinderRun(
        version="v4-node",
        rows=tuple(
            ReportedFigures(
                {name: float(gpu[name])},
                gpu[f"{name}_shape"],
                "confirm",
                f"GPU {int(gpu['gpu'])}",
                # The table contains power, clock and temperature only for the sustained ceiling (MSMF), not for the
                # burst ceiling (MAMF).
                **_parse_sensor_readings(gpu if name == "MSMF" else None),
            )
            for gpu in gpus
            for name in ("MAMF", "MSMF")
            if gpu[name]
        ),
        best=best,
        is_complete=len(best) == 2 and all(gpu["MSMF"] for gpu in gpus),
        # A warning may continue on the next line, with advice after a dash.
        remarks=tuple(
            (match[1] or match[2]).partition(" - ")[0] for line in lines if (match := _REMARK_LINE.search(line))
        ),
    )


# -- parsing the lines of one run of mamf-finder -----------------------------------------------------------------------

_POWER_AND_CLOCK = r"(?P<watts>\d+|-)\s+(?P<mhz>\d+|-)"
_NAMED_FIGURE = re.compile(rf"({_FIGURE_TEXT})\((max|median|mean)\)")
_STATISTIC_BY_LABEL = {"mean": "mean", "median": "median", "max": "fastest"}
_SENSOR_READINGS = re.compile(
    r"(?<![\w.])(?=\d+(?:W|MHz)\b)(?:(?P<watts>\d+)W)?\s*(?:(?P<mhz>\d+)MHz)?(?:\s+(?P<celsius>\d+)C)?"
)
_ROW_LINE = re.compile(
    rf"(?<![\w.])\d+ \|\s*(?P<tag>[a-z][\w-]*\s)?(?P<figures>[^@|]*)@ {_SHAPE_GROUP}\s*\|(?P<rest>.*)"
)
#: Expressions that match the rows of tables, each with the stage of mamf-finder that prints the table: ``scout`` (quick
#: first measurements), ``screen`` or ``confirm``.
_TABLE_LINE_PATTERNS = (
    (
        "scout",
        re.compile(
            rf"^\s*\d+\s+{_SHAPE_GROUP}\s+(?P<mean>{_FIGURE_TEXT})\s+(?P<median>{_FIGURE_TEXT})\s+(?P<fastest>{_FIGURE_TEXT})"
            rf"\s+{_FIGURE_TEXT}(?:\s+(?P<watts>\d+)(?:\s+(?P<mhz>\d+))?)?(?P<rest>\s+<-.*)?$"
        ),
    ),
    (
        "screen",
        re.compile(
            rf"^\s*(?:\d+|k)\s+{_SHAPE_GROUP}\s+(?P<fastest>{_FIGURE_TEXT})\s+(?P<mhz>\d+|-)(?P<rest>\s+<-.*)?$"
        ),
    ),
    ("confirm", re.compile(rf"^\s*{_SHAPE_GROUP}\s+(?P<headline>{_FIGURE_TEXT})\s+{_POWER_AND_CLOCK}(?P<rest>\s.*)$")),
    (
        "confirm",
        re.compile(
            rf"^\[\w+\] (?P<name>MAMF|MSMF) {_SHAPE_GROUP}: (?:\S+ )?\w+=(?P<headline>{_FIGURE_TEXT}) TFLOPS"
            r"(?P<rest>.*)$"
        ),
    ),
    ("confirm", re.compile(rf"^\[\w+\] (?P<name>MSMF) lock-in: (?P<headline>{_FIGURE_TEXT}) TFLOPS(?P<rest>.*)$")),
)
_LOCK_IN_TITLE = re.compile(rf"MSMF lock-in: re-measuring {_SHAPE_GROUP}")
_PHASE_TITLE = re.compile(r"^(?P<name>MSMF|MAMF) \(\w+\) confirm:|^(?P<other>Same-shape cross-check)")
_CROSS_CHECK_TITLE = "Same-shape cross-check"
_TEMPERATURE_COLUMN = re.compile(r"^\s+(\d+)\s+drop")
_CONFIRM_FLAG = re.compile(r"\((base-clock[^)]*|best available[^)]*)\)|(?<=[\d%]\s)\s*([a-z][a-z ,-]*)$")
_BEST_LINE = re.compile(
    rf"^\s*(?:(?P<statistic>mean|median|max):|(?P<name>MAMF|MSMF) \(max [^)]*\):)\s*(?:n/a|(?P<value>{_FIGURE_TEXT})"
    rf"\s*TFLOPS\w* @ ?(?:{_SHAPE_GROUP})?(?: \((?P<label>M\w+)\))?(?P<rest>.*))$"
)
_TRIED_SHAPES = re.compile(r"Tried\s+(\d{1,18}) shapes => the best outcomes were")
_MEAN_LINE = re.compile(rf"(?P<name>arithmetic mean|geometric mean|geomean):\s*(?P<value>{_FIGURE_TEXT})\s*TFLOPS")
_ELAPSED_TIME = re.compile(r"Elapsed time:\s*(?:(\d{1,9}) days?, )?(\d{1,9}):(\d\d):(\d\d)")
_REMARK_LINE = re.compile(r"(?i:WARNING): (.*(?:MAMF|MSMF).*)|(note: \d+ same-board sibling GPU\(s\) sat idle.*)")
_IGNORED_LINE = re.compile(r"MSMF ignored|re-measuring|Legend: |cross-check|top peaks|need ≥|-> \d+ scouts")
_ANY_FIGURE = re.compile(r"\d TFLOPS|\d{1,9}x\d{1,9}x\d")

_START_TIME = re.compile(r"Benchmark started on (\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d)")
_SECTION_TITLE = re.compile(r"^\s*\*\* (?P<title>[A-Z][\w /]+):\s*(?P<value>.*)$")
_DASHED_LINE = re.compile(r"^\s*-{20,}\s*$")
_FINDER_VERSION = re.compile(r"benchmark version: (\d+)")
_DEVICE_PROPERTY = re.compile(r"\b(\w+)=('[^']*'|\[[^]]*\]|\([^)]*\)|[^,)]+)")
_NAME_AND_VERSION = re.compile(r"\b(\w+)=([^,\s]+)")
_IDENTIFYING_PROPERTY = re.compile(r"^(?:uuid|pci_.*|serial.*)$")


def _parse_number(text: str | None) -> float | None:
    """Convert a printed figure to a number. Returns None if the figure is missing, nan or inf, all of which mean that
    nothing was measured.
    """
    value = math.nan if text in (None, "", "-") else float(str(text))
    return value if math.isfinite(value) else None


def _parse_sensor_readings(match: re.Match[str] | None) -> dict[str, Any]:
    groups = match.groupdict() if match else {}
    names = {"watts": "watts", "clock_mhz": "mhz", "celsius": "celsius"}
    return {name: _parse_number(groups.get(group)) for name, group in names.items()}


class _RunParser:
    """A parser that reads the lines of one mamf-finder run and collects its header, rows and summary."""

    def __init__(self, remove_private_texts: Callable[[str], str]) -> None:
        self._remove_private_texts = remove_private_texts
        self._section = ""
        self._confirmed_ceiling = ""  # the ceiling (MAMF or MSMF) that the rows of the current table confirm
        self._lock_in_shape = ""
        self._is_reduction_second = False
        self._header_and_summary: dict[str, Any] = {"device_properties": {}, "software": {}}
        self._rows: list[tuple[str, ReportedFigures]] = []
        self._best: dict[str, tuple[str, ReportedFigures]] = {}
        self._means: dict[str, float] = {}
        self._remarks: list[str] = []
        self._unmatched_count = 0

    def parse_run(self, text: str) -> FinderRun:
        for line in text.split("\n"):
            line = line.rstrip()
            if (
                line
                and len(line) <= _MAX_LINE_LENGTH
                and not self._read_result_line(line)
                and not self._read_header_line(line)
            ):
                self._unmatched_count += bool(
                    _ANY_FIGURE.search(line)
                    and self._confirmed_ceiling != _CROSS_CHECK_TITLE
                    and not _IGNORED_LINE.search(line)
                )
        is_staged, has_confirmed_ceiling = (
            any(row.stage for _, row in self._rows),
            bool({"MAMF", "MSMF"} & set(self._best)),
        )
        causes = (
            (self._header_and_summary.get("tried") == 0, "interrupted before the first shape was measured"),
            (not self._best, "no summary: the log was cut off, or the run was killed"),
            (
                is_staged and not has_confirmed_ceiling,
                "not confirmed: the best figures are quick first measurements (scouts), not ceilings",
            ),
        )
        why = next((cause for is_met, cause in causes if is_met), "")
        if self._is_reduction_second:
            self._remarks.append("the original log prints shapes as MxKxN; this log has them as MxNxK")
        if self._unmatched_count:
            self._remarks.append(
                f"lines with figures that mamf did not understand when it imported the log: {self._unmatched_count}"
            )
        stage = "confirm" if has_confirmed_ceiling else "scout" if is_staged else ""
        return FinderRun(
            **{"version": None, **self._header_and_summary},
            rows=tuple(replace(row, shape=self._convert_shape(printed)) for printed, row in self._rows),
            best={
                name: replace(row, shape=self._convert_shape(printed), stage=stage)
                for name, (printed, row) in self._best.items()
            },
            means=self._means,
            is_complete=not why,
            remarks=(*([why] if why else []), *self._remarks),
        )

    def _convert_shape(self, printed: str) -> str | None:
        """Convert a printed shape to MxNxK. Returns None if the log has no valid shape.

        The first logs of version 2 print shapes as MxKxN.
        """
        if not printed:
            return None
        first, second, third = map(int, printed.split("x"))
        if self._is_reduction_second:
            second, third = third, second
        return f"{first}x{second}x{third}" if min(first, second, third) else None

    # -- parsing rows and the summary ----------------------------------------------------------------------------------

    def _read_result_line(self, line: str) -> bool:
        """Collect the figures of a line that is a row or belongs to the summary. Return False for any other line."""
        if row := _ROW_LINE.search(line):
            return self._read_row(row)
        for stage, pattern in _TABLE_LINE_PATTERNS:
            if match := pattern.match(line):
                self._read_table_row(stage, match)
                return True
        return self._read_summary_line(line)

    def _read_row(self, match: re.Match[str]) -> bool:
        """Collect the figures of a row in the format of version 2, which early releases of version 4 also used for
        their quick first measurements (scouts).

        Return whether the line is such a row. Return False for a row of version 1, which mamf does not import.
        """
        printed = _NAMED_FIGURE.findall(match["figures"])
        if len(printed) < 3:  # Only version 1 prints fewer figures. mamf does not import it.
            return False
        self._is_reduction_second |= printed[0][1] == "max"
        tag = (match["tag"] or "").strip()
        telemetry = _SENSOR_READINGS.search(match["rest"])
        row = ReportedFigures(
            {_STATISTIC_BY_LABEL[name]: value for text, name in printed if (value := _parse_number(text)) is not None},
            stage="scout" if tag or telemetry else "",
            remarks=tuple(remark for remark in (tag, "SUSPECT" if "SUSPECT" in match["rest"] else "") if remark),
            **_parse_sensor_readings(telemetry),
        )
        self._rows.append((match["shape"], row))
        return True

    def _read_table_row(self, stage: str, match: re.Match[str]) -> None:
        groups, rest = match.groupdict(), match["rest"] or ""
        if "<-" in rest:  # The line repeats the best figure of a table, for which an earlier line made a row.
            return
        if stage != "confirm":
            figures = {
                name: value
                for name in _STATISTIC_BY_LABEL.values()
                if (value := _parse_number(groups.get(name))) is not None
            }
            self._rows.append((match["shape"], ReportedFigures(figures, stage=stage, **_parse_sensor_readings(match))))
            return
        name = groups.get("name") or self._confirmed_ceiling
        if not name:
            self._unmatched_count += 1
            return
        flag = next(filter(None, (match[1] or match[2] for match in _CONFIRM_FLAG.finditer(rest))), "")
        is_lock_in = "shape" not in groups
        telemetry = _parse_sensor_readings(
            match if "watts" in groups else _SENSOR_READINGS.search(rest.partition("(")[0])
        )
        if celsius := _TEMPERATURE_COLUMN.search(rest):
            telemetry["celsius"] = float(celsius[1])
        figure = _parse_number(match["headline"])
        row = ReportedFigures(
            {} if figure is None else {name: figure},
            # The flag ``rank`` marks a measurement that took only a second. mamf-finder used these measurements to
            # choose the shapes to confirm, so their stage is ``screen``.
            stage="screen" if flag == "rank" else "confirm",
            remarks=tuple(filter(None, (flag, "lock-in" if is_lock_in else ""))),
            **telemetry,
        )
        self._rows.append((self._lock_in_shape if is_lock_in else match["shape"], row))

    def _read_summary_line(self, line: str) -> bool:
        if phase := _PHASE_TITLE.match(line):
            self._confirmed_ceiling = phase["name"] or phase["other"]
        if locked := _LOCK_IN_TITLE.search(line):
            self._lock_in_shape = locked["shape"]
        if tried := _TRIED_SHAPES.search(line):
            self._header_and_summary["tried"] = int(tried[1])
        if (best := _BEST_LINE.match(line)) and "tried" in self._header_and_summary:
            self._read_best_figure(best)
            return True
        if mean := _MEAN_LINE.search(line):
            value = _parse_number(mean["value"])
            self._means |= {} if value is None else {mean["name"].split()[0].replace("geomean", "geometric"): value}
        if elapsed := _ELAPSED_TIME.search(line):
            days, hours, minutes, seconds = (int(part or 0) for part in elapsed.groups())
            self._header_and_summary["elapsed_seconds"] = float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
        if remark := _REMARK_LINE.search(line):
            self._remarks.append(self._remove_private_texts(remark[1] or remark[2]))
        return bool(phase or locked or tried or mean or elapsed or remark)

    def _read_best_figure(self, match: re.Match[str]) -> None:
        self._is_reduction_second |= match["label"] == "MxKxN"
        name, value = match["name"] or _STATISTIC_BY_LABEL[match["statistic"]], _parse_number(match["value"])
        if value is not None and match["shape"]:
            row = ReportedFigures({name: value}, **_parse_sensor_readings(_SENSOR_READINGS.search(match["rest"])))
            self._best[name] = match["shape"], row

    # -- parsing the header --------------------------------------------------------------------------------------------

    def _read_header_line(self, line: str) -> bool:
        if started := _START_TIME.search(line):
            self._header_and_summary["started"] = f"{started[1]}T{started[2]}"
        elif title := _SECTION_TITLE.match(line):
            self._section = title["title"]
            if self._section == "Dtype" and title["value"]:
                self._header_and_summary["dtype"] = _convert_dtype_name(title["value"])
        elif _DASHED_LINE.match(line) or self._rows:
            self._section = ""
        elif self._section:
            self._read_header_value(line.strip())
            return True
        return False

    def _read_header_value(self, line: str) -> None:
        value, known = line.removeprefix("- "), self._header_and_summary
        if self._section == "Command line":
            known.setdefault("command", self._remove_private_texts(line))
        elif self._section == "Platform/Device info":
            self._section = "Device"  # The first line of the section describes the platform, later lines the device.
        elif self._section == "Device":
            self._read_device_line(value)
        elif self._section == "Critical software versions":
            known["software"] |= {
                name: self._remove_private_texts(text)
                for name, text in _NAME_AND_VERSION.findall(value)
                if text != "None"
            }
        elif self._section == "Additional notes" and (version := _FINDER_VERSION.search(value)):
            known["version"] = f"v{version[1]}"

    def _read_device_line(self, text: str) -> None:
        values: Mapping[str, str] = {name: value.strip().strip("'") for name, value in _DEVICE_PROPERTY.findall(text)}
        if "(" in text and values:
            kept = {
                name: self._remove_private_texts(value)
                for name, value in values.items()
                if not _IDENTIFYING_PROPERTY.match(name)
            }
            self._header_and_summary["device"] = kept.pop("name", None)
            self._header_and_summary["device_properties"] |= kept
        else:
            self._header_and_summary.setdefault("device", self._remove_private_texts(text))


def _convert_dtype_name(text: str) -> str:
    """Convert the name of a dtype to its name in mamf. Returns the printed name if mamf does not know the dtype."""
    bare = text.strip().removeprefix("torch.")
    try:
        return canonicalize_dtype_name(bare)
    except UnknownNameError:
        return bare
