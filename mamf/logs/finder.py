"""Reads the text logs of mamf-finder, versions 2 to 4, and the node summaries of mamf-finder-all-gpus: best effort.

The script has no machine-readable output. Lines are matched one by one, wherever they stand; a line with a figure that
no pattern matches is counted, and the run says how many there were. Facts that a log lacks stay unknown.
"""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from mamf.errors import RunLogError
from mamf.logs.finder_lines import FIGURE, SHAPE, UNAME, RunReader, telemetry_of
from mamf.logs.legacy import FinderRun, Reported
from mamf.logs.lines import Seen
from mamf.machine.privacy import scrub
from mamf.operations.matmul.shapes import MatmulShape

#: The longest log, unpacked: a million rows.
MAX_BYTES = 128 << 20
#: More runs than this in one file are refused, because each becomes a log.
MAX_RUNS = 1000
_MAX_LINE = 4000
_GZIP = b"\x1f\x8b"
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # a redirect of PowerShell
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
_MARKDOWN = re.compile(r"^[ \t]*```.*$|^(?:> ?)+|^(?:\^C)+|\\(?=[*_|~])", re.MULTILINE)
#: The ends of a line that was not cut: half a number is a wrong number.
_WHOLE_END = re.compile(r"(?:\)|TFLOPS|MHz|\dC|\d:\d\d:\d\d)\s*$")
_RUN = re.compile(r"^(?=.*Benchmark started on \d|\s*\*\* Node results \()", re.MULTILINE)


def read_finder_logs(path: Path, seen: Seen = lambda count: None) -> list[FinderRun]:
    """All runs in a file, usually one; gzip is supported. ``seen`` is called with the number of characters read. Raises
    RunLogError for a file without a run.
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
        raise RunLogError(f"cannot be unpacked ({error}): give the log itself") from None
    except OSError as error:
        raise RunLogError(f"cannot be read ({error.strerror or error})") from None
    if len(content) > MAX_BYTES:
        raise RunLogError(f"has more than {MAX_BYTES >> 20} MiB: no log of mamf-finder is that long")
    text = content.decode("utf-16" if content.startswith(_UTF16) else "utf-8-sig", errors="replace")
    if "\0" in text:
        raise RunLogError("binary, not a log of mamf-finder; give the file named by its --output_file")
    return text


def parse(text: str, seen: Seen = lambda count: None) -> list[FinderRun]:
    """All runs in a text. ``seen`` is called with the number of characters read. Raises RunLogError without a run."""
    text = _MARKDOWN.sub("", _ESCAPE.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))
    if not text.endswith("\n") and not _WHOLE_END.search(text[-_MAX_LINE:]):
        text = text[: text.rfind("\n") + 1]
    scrubber, runs = _scrubber(text), []
    for part in _RUN.split(text):
        is_node = part.lstrip().startswith("** Node results")
        run = _node_run(part, scrubber) if is_node else RunReader(scrubber).read(part)
        runs += [run] if run.rows or run.best or run.started or run.tried is not None else []
        seen(len(part))
    if not any(run.rows or run.best or run.tried is not None for run in runs):
        raise RunLogError(
            "holds nothing that mamf-finder 2 to 4 prints: no row, no summary; give the file named by its --output_file"
        )
    if len(runs) > MAX_RUNS:
        raise RunLogError(f"holds more than {MAX_RUNS} runs: split it")
    return runs


# -- privacy -----------------------------------------------------------------------------------------------------------

_HOME = re.compile(r"(?:/home|[/\\]Users)[/\\]+([\w.@+-]+)")
_UUID = re.compile(r"\b(?:GPU-|MIG-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE)
_HARMLESS = {"linux", "darwin", "windows", "localhost", "root", "user", "admin", "ubuntu", "runner", "torch", "cuda"}
_MAX_NAMES = 1000


def _scrubber(text: str) -> Callable[[str], str]:
    """A function that removes the hosts and users that the log itself names, card ids and paths from a string."""
    hosts = UNAME.findall(text)
    names = dict.fromkeys((name for host in hosts for name in (host, host.split(".")[0])), "<host>")
    names |= dict.fromkeys(_HOME.findall(text), "<user>")
    if len(names) > _MAX_NAMES:
        raise RunLogError(f"names more than {_MAX_NAMES} hosts and users: not the log of one machine")
    # The longest first: a short host name is a part of the long one.
    private = sorted((name for name in names if len(name) > 2 and name.lower() not in _HARMLESS), key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, private)) or '(?!)'})(?!\w)")
    return lambda string: _UUID.sub("<uuid>", pattern.sub(lambda found: names[found[0]], scrub(string)))


# -- the summary of mamf-finder-all-gpus -------------------------------------------------------------------------------

_GPU = re.compile(
    r"^\s*(?P<gpu>\d+)\s+(?:(?P<MAMF>\d+)\s+(?P<MAMF_shape>\d+x\d+x\d+)|n/a)"
    r"\s+(?:(?P<MSMF>\d+)\s+(?P<MSMF_shape>\d+x\d+x\d+)|n/a)"
    r"\s*(?P<watts>\d+|-)?\s*(?P<mhz>\d+|-)?\s*(?P<celsius>\d+|-)?\s+\d+%\s*$"
)
_NODE = re.compile(rf"^\s*(?P<name>MAMF|MSMF) \(node(?: = (?P<which>[^)]*))?\):\s+(?P<value>{FIGURE}) TFLOPS @ {SHAPE}")


def _node_run(text: str, scrubber: Callable[[str], str]) -> FinderRun:
    lines = scrubber(text).split("\n")
    gpus = [found for line in lines if (found := _GPU.match(line))]
    best = {
        found["name"]: Reported(
            {found["name"]: float(found["value"])},
            MatmulShape.parse(found["shape"]),
            "confirm",
            f"node, {found['which']}" if found["which"] else "node",
        )
        for line in lines
        if (found := _NODE.match(line))
    }
    return FinderRun(
        version="v4-node",
        rows=tuple(row for gpu in gpus for row in _rows_of_gpu(gpu)),
        best=best,
        is_complete=len(best) == 2 and all(gpu["MSMF"] for gpu in gpus),
    )


def _rows_of_gpu(gpu: re.Match[str]) -> Iterator[Reported]:
    label = f"GPU {int(gpu['gpu'])}"
    if gpu["MAMF"]:
        yield Reported({"MAMF": float(gpu["MAMF"])}, MatmulShape.parse(gpu["MAMF_shape"]), "confirm", label)
    if gpu["MSMF"]:
        # Watts, clock and temperature of this table are the sustained ones.
        yield Reported(
            {"MSMF": float(gpu["MSMF"])},
            MatmulShape.parse(gpu["MSMF_shape"]),
            "confirm",
            label,
            **telemetry_of(gpu),
        )
