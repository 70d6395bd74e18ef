"""Reads the text logs of mamf-finder, versions 2 to 4, and the node summaries of mamf-finder-all-gpus.

These scripts have no machine-readable output, so lines are matched one by one, in any order. Lines with a figure that
match no pattern are counted, and a remark of the run gives the count. What a log does not say stays unknown.
"""

from __future__ import annotations

import codecs
import gzip
import io
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from mamf.dtypes import canonicalize_dtype_name
from mamf.errors import RunLogError, UnknownNameError
from mamf.logs.legacy import FinderRun, Reported
from mamf.logs.run_log import Seen
from mamf.machine.privacy import scrub

#: The largest log, unpacked: about a million rows.
MAX_BYTES = 128 << 20
#: The most runs in one file, because each becomes a log.
MAX_RUNS = 1000
_MAX_LINE = 4000
_GZIP = b"\x1f\x8b"
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # from a redirect in PowerShell
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
_MARKDOWN = re.compile(r"^[ \t]*```.*$|^(?:> ?)+|^(?:\^C)+|\\(?=[*_|~])", re.MULTILINE)
#: The end of a line that was not cut off. A cut line may end with half a number, which is a wrong number.
_WHOLE_END = re.compile(r"(?:\)|TFLOPS|MHz|\dC|\d:\d\d:\d\d)\s*$")
_SHAPE = r"(?P<shape>\d{1,9}x\d{1,9}x\d{1,9})"
_FIGURE = r"(?:\d+(?:\.\d+)?|nan|inf)"
_RUN = re.compile(r"^(?=.*Benchmark started on \d|\s*\*\* Node results \()", re.MULTILINE)


def read_finder_logs(path: Path, seen: Seen = lambda count: None) -> list[FinderRun]:
    """Read all runs in a file, plain or gzip; usually there is one. ``seen`` is called with the number of characters
    read. Raises RunLogError for a file without a run.
    """
    try:
        return parse(_read(path), seen)
    except RunLogError as error:
        raise RunLogError(f"{path}: {error}") from None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if content.startswith(_GZIP):
            content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(MAX_BYTES + 1)
    except (EOFError, zlib.error) as error:
        raise RunLogError(f"cannot be unpacked ({error}): unpack it yourself") from None
    except OSError as error:
        raise RunLogError(f"cannot be read ({error.strerror or error})") from None
    if len(content) > MAX_BYTES:
        raise RunLogError(f"has more than {MAX_BYTES >> 20} MiB, so it is not a log of mamf-finder")
    text = content.decode("utf-16" if content.startswith(_UTF16) else "utf-8-sig", errors="replace")
    if "\0" in text:
        raise RunLogError("is binary: pass the text file that mamf-finder wrote to its --output_file")
    return text


def parse(text: str, seen: Seen = lambda count: None) -> list[FinderRun]:
    """Parse all runs in a text. ``seen`` is called with the number of characters read. Raises RunLogError without a
    run.
    """
    text = _MARKDOWN.sub("", _ESCAPE.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))
    if not text.endswith("\n") and not _WHOLE_END.search(text[-_MAX_LINE:]):
        text = text[: text.rfind("\n") + 1]
    scrubber, runs = _make_scrubber(text), []
    for part in _RUN.split(text):
        is_node = part.lstrip().startswith("** Node results")
        run = _node_run(part, scrubber) if is_node else _RunReader(scrubber).read(part)
        runs += [run] if run.rows or run.best or run.started or run.tried is not None else []
        seen(len(part))
    if not any(run.rows or run.best or run.tried is not None for run in runs):
        raise RunLogError(
            "has no row or summary of mamf-finder 2 to 4: pass the text file "
            "that mamf-finder wrote to its --output_file"
        )
    if len(runs) > MAX_RUNS:
        raise RunLogError(f"has more than {MAX_RUNS} runs: split it")
    return runs


# -- privacy -----------------------------------------------------------------------------------------------------------

#: A line printed by uname, with the name of the host.
_UNAME = re.compile(
    r"^[\s-]*(?:Linux|Darwin|Windows|FreeBSD) (?!\d+\.\d)(\S+)(?= .*(?:#\d|x86_64|aarch64|arm64))", re.M
)
_HOME = re.compile(r"(?:/home|[/\\]Users)[/\\]+([\w.@+-]+)")
_UUID = re.compile(r"\b(?:GPU-|MIG-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE)
_HARMLESS = {"linux", "darwin", "windows", "localhost", "root", "user", "admin", "ubuntu", "runner", "torch", "cuda"}
_MAX_NAMES = 1000


def _make_scrubber(text: str) -> Callable[[str], str]:
    """Return a function that removes private texts from a string: hosts and users that the log names, uuids, paths."""
    hosts = _UNAME.findall(text)
    names = dict.fromkeys((name for host in hosts for name in (host, host.split(".")[0])), "<host>")
    names |= dict.fromkeys(_HOME.findall(text), "<user>")
    if len(names) > _MAX_NAMES:
        raise RunLogError(f"names more than {_MAX_NAMES} hosts and users, so it is not the log of one machine")
    # The longest first, because a short host name is part of the long one.
    private = sorted((name for name in names if len(name) > 2 and name.lower() not in _HARMLESS), key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, private)) or '(?!)'})(?!\w)")
    return lambda string: _UUID.sub("<uuid>", pattern.sub(lambda found: names[found[0]], scrub(string)))


# -- the summary of mamf-finder-all-gpus -------------------------------------------------------------------------------

_SIZES = r"[1-9]\d{0,8}x[1-9]\d{0,8}x[1-9]\d{0,8}"
_GPU = re.compile(
    rf"^\s*(?P<gpu>\d+)\s+(?:(?P<MAMF>\d+)\s+(?P<MAMF_shape>{_SIZES})|n/a)"
    rf"\s+(?:(?P<MSMF>\d+)\s+(?P<MSMF_shape>{_SIZES})|n/a)"
    r"\s*(?P<watts>\d+|-)?\s*(?P<mhz>\d+|-)?\s*(?P<celsius>\d+|-)?\s+\d+%\s*$"
)
_NODE = re.compile(
    rf"^\s*(?P<name>MAMF|MSMF) \(node(?: = (?P<which>[^)]*))?\):\s+(?P<value>{_FIGURE}) TFLOPS @ (?P<shape>{_SIZES})"
)


def _node_run(text: str, scrubber: Callable[[str], str]) -> FinderRun:
    lines = scrubber(text).split("\n")
    gpus = [found for line in lines if (found := _GPU.match(line))]
    best = {
        found["name"]: Reported(
            {found["name"]: float(found["value"])},
            found["shape"],
            "confirm",
            f"node, {found['which']}" if found["which"] else "node",
        )
        for line in lines
        if (found := _NODE.match(line))
    }
    return FinderRun(
        version="v4-node",
        rows=tuple(row for gpu in gpus for row in _parse_gpu_rows(gpu)),
        best=best,
        is_complete=len(best) == 2 and all(gpu["MSMF"] for gpu in gpus),
    )


def _parse_gpu_rows(gpu: re.Match[str]) -> Iterator[Reported]:
    label = f"GPU {int(gpu['gpu'])}"
    if gpu["MAMF"]:
        yield Reported({"MAMF": float(gpu["MAMF"])}, gpu["MAMF_shape"], "confirm", label)
    if gpu["MSMF"]:
        # Watts, clock and temperature in this table are those of the sustained measurement.
        yield Reported(
            {"MSMF": float(gpu["MSMF"])},
            gpu["MSMF_shape"],
            "confirm",
            label,
            **_parse_telemetry(gpu),
        )


# -- the lines of a run ----------------------------------------------------------------------------------------------

_POWER = r"(?P<watts>\d+|-)\s+(?P<mhz>\d+|-)"
_NAMED = re.compile(rf"({_FIGURE})\((max|median|mean)\)")
_STATISTIC = {"mean": "mean", "median": "median", "max": "fastest"}
_TELEMETRY = re.compile(
    r"(?<![\w.])(?=\d+(?:W|MHz)\b)(?:(?P<watts>\d+)W)?\s*(?:(?P<mhz>\d+)MHz)?(?:\s+(?P<celsius>\d+)C)?"
)
_ROW = re.compile(rf"(?<![\w.])\d+ \|\s*(?P<tag>[a-z][\w-]*\s)?(?P<figures>[^@|]*)@ {_SHAPE}\s*\|(?P<rest>.*)")
#: Patterns for the rows of tables, each with the stage that it belongs to.
_TABLES = (
    (
        "scout",
        re.compile(
            rf"^\s*\d+\s+{_SHAPE}\s+(?P<mean>{_FIGURE})\s+(?P<median>{_FIGURE})\s+(?P<fastest>{_FIGURE})"
            rf"\s+{_FIGURE}(?:\s+(?P<watts>\d+)(?:\s+(?P<mhz>\d+))?)?(?P<rest>\s+<-.*)?$"
        ),
    ),
    ("screen", re.compile(rf"^\s*(?:\d+|k)\s+{_SHAPE}\s+(?P<fastest>{_FIGURE})\s+(?P<mhz>\d+|-)(?P<rest>\s+<-.*)?$")),
    ("confirm", re.compile(rf"^\s*{_SHAPE}\s+(?P<headline>{_FIGURE})\s+{_POWER}(?P<rest>\s.*)$")),
    (
        "confirm",
        re.compile(rf"^\[\w+\] (?P<name>MAMF|MSMF) {_SHAPE}: (?:\S+ )?\w+=(?P<headline>{_FIGURE}) TFLOPS(?P<rest>.*)$"),
    ),
    ("confirm", re.compile(rf"^\[\w+\] (?P<name>MSMF) lock-in: (?P<headline>{_FIGURE}) TFLOPS(?P<rest>.*)$")),
)
_LOCK_IN = re.compile(rf"MSMF lock-in: re-measuring {_SHAPE}")
_PHASE = re.compile(r"^(?P<name>MSMF|MAMF) \(\w+\) confirm:|^(?P<other>Same-shape cross-check)")
_CROSS_CHECK = "Same-shape cross-check"
_CELSIUS = re.compile(r"^\s+(\d+)\s+drop")
_FLAG = re.compile(r"\((base-clock[^)]*|best available[^)]*)\)|(?<=[\d%]\s)\s*([a-z][a-z ,-]*)$")
_BEST = re.compile(
    rf"^\s*(?:(?P<statistic>mean|median|max):|(?P<name>MAMF|MSMF) \(max [^)]*\):)\s*(?:n/a|(?P<value>{_FIGURE})"
    rf"\s*TFLOPS\w* @ ?(?:{_SHAPE})?(?: \((?P<label>M\w+)\))?(?P<rest>.*))$"
)
_TRIED = re.compile(r"Tried\s+(\d{1,18}) shapes => the best outcomes were")
_MEAN = re.compile(rf"(?P<name>arithmetic mean|geometric mean|geomean):\s*(?P<value>{_FIGURE})\s*TFLOPS")
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
    """Read a figure; None if it is missing, or nan or inf, which mean that nothing was measured."""
    value = math.nan if text in (None, "", "-") else float(str(text))
    return value if math.isfinite(value) else None


def _parse_telemetry(found: re.Match[str] | None) -> dict[str, Any]:
    groups = found.groupdict() if found else {}
    names = {"watts": "watts", "clock_mhz": "mhz", "celsius": "celsius"}
    return {name: _number(groups.get(group)) for name, group in names.items()}


class _RunReader:
    """Reads the lines of one run."""

    def __init__(self, scrubber: Callable[[str], str]) -> None:
        self._scrub = scrubber
        self._section = ""
        self._headline = ""  # MAMF or MSMF: what the table of confirms being read is about
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
            if line and len(line) <= _MAX_LINE and not self._take(line) and not self._take_header(line):
                is_expected = self._headline == _CROSS_CHECK or _EXPECTED.search(line)
                self._not_understood += bool(_FIGURE_LIKE.search(line) and not is_expected)
        stages = {row.stage for _, row in self._rows}
        is_staged, has_headline = bool(stages - {""}), bool({"MAMF", "MSMF"} & set(self._best))
        why = self._interruption(is_staged, has_headline)
        if self._is_reduction_second:
            self._remarks.append("the log prints shapes as MxKxN; they are MxNxK here")
        if self._not_understood:
            self._remarks.append(f"import: {self._not_understood} lines with figures were not understood")
        stage = "confirm" if has_headline else "scout" if is_staged else ""
        return FinderRun(
            **{"version": None, **self._known},
            rows=tuple(replace(row, shape=self._shape(printed)) for printed, row in self._rows),
            best={
                name: replace(row, shape=self._shape(printed), stage=stage)
                for name, (printed, row) in self._best.items()
            },
            means=self._means,
            is_complete=not why,
            remarks=(*([why] if why else []), *self._remarks),
        )

    def _interruption(self, is_staged: bool, has_headline: bool) -> str:
        """Return why the run is not complete; empty if it is."""
        if self._known.get("tried") == 0:
            return "interrupted before the first shape was measured"
        if not self._best:
            return "no summary: the log was cut off, or the run was killed"
        if is_staged and not has_headline:
            return "not confirmed: its best figures come from scouts and are not ceilings"
        return ""

    def _shape(self, printed: str) -> str | None:
        """Return a printed shape as MxNxK. The first logs of version 2 print MxKxN."""
        if not printed:
            return None
        first, second, third = map(int, printed.split("x"))
        if self._is_reduction_second:
            second, third = third, second
        return f"{first}x{second}x{third}" if min(first, second, third) else None

    # -- rows and summary ----------------------------------------------------------------------------------------------

    def _take(self, line: str) -> bool:
        """Take a row or a line of the summary. Return whether the line was one."""
        if row := _ROW.search(line):
            return self._take_row(row)
        for stage, pattern in _TABLES:
            if found := pattern.match(line):
                self._take_table(stage, found)
                return True
        return self._take_summary(line)

    def _take_row(self, found: re.Match[str]) -> bool:
        """Take a row of version 2, or of the scouts before version 4 had tables. Return whether it was one."""
        printed = _NAMED.findall(found["figures"])
        figures = {_STATISTIC[name]: value for text, name in printed if (value := _number(text)) is not None}
        if len(printed) < 3:  # version 1
            return False
        self._is_reduction_second |= printed[0][1] == "max"
        tag = (found["tag"] or "").strip()
        remarks = tuple(remark for remark in (tag, "SUSPECT" if "SUSPECT" in found["rest"] else "") if remark)
        telemetry = _TELEMETRY.search(found["rest"])
        row = Reported(
            figures, stage="scout" if tag or telemetry else "", remarks=remarks, **_parse_telemetry(telemetry)
        )
        self._rows.append((found["shape"], row))
        return True

    def _take_table(self, stage: str, found: re.Match[str]) -> None:
        groups, rest = found.groupdict(), found["rest"] or ""
        if "<-" in rest:  # a repetition: the winner of a phase
            return
        if stage != "confirm":
            figures = {name: value for name in _STATISTIC.values() if (value := _number(groups.get(name))) is not None}
            self._rows.append((found["shape"], Reported(figures, stage=stage, **_parse_telemetry(found))))
            return
        name = groups.get("name") or self._headline
        if not name:
            self._not_understood += 1
            return
        flag = next(filter(None, (match[1] or match[2] for match in _FLAG.finditer(rest))), "")
        is_lock_in = "shape" not in groups
        telemetry = _parse_telemetry(found if "watts" in groups else _TELEMETRY.search(rest.partition("(")[0]))
        if celsius := _CELSIUS.search(rest):
            telemetry["celsius"] = float(celsius[1])
        figure = _number(found["headline"])
        row = Reported(
            {} if figure is None else {name: figure},
            # A ``rank`` takes a second and only chooses what is confirmed.
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
            row = Reported({name: value}, **_parse_telemetry(_TELEMETRY.search(found["rest"])))
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
    """Return mamf's name of a dtype, or the printed name if mamf does not know it."""
    bare = text.strip().removeprefix("torch.")
    try:
        return canonicalize_dtype_name(bare)
    except UnknownNameError:
        return bare
