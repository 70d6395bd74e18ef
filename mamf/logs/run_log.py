"""The versioned run log: JSON Lines, ``record`` first. What people contribute, and what a killed run leaves behind.

Schema history
    1   header, measurement, resume, summary
    2   ceiling; phase, round and timer_overhead_seconds of a measurement
    3   tier legacy: header and reported figures of an imported run (legacy.py)
    4   repeatability of a measurement and a ceiling: their intervals are where a repeat lies; sustained by its mean;
        phase choose before confirm; peak_memory_bytes of the launch alone; searches of a plan of attention, and their
        rows, each with its problem

``header`` names tool, command, device, software, settings and the plan, so a log resumes by itself. Each line is
written by one system call and reaches the operating system before the next shape starts: a killed process loses at
most the shape in flight. A last line without its newline is such a loss; it is left out on reading and cut off on
resuming.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from mamf.backend import DeviceInfo
from mamf.ceilings.ceiling import Ceiling
from mamf.environment import scrub_record
from mamf.errors import MamfError, RunLogError, RunLogWriteError, UsageError
from mamf.logs.plan_records import plan_from_record
from mamf.logs.records import ceiling_from_record, measurement_from_record, measurement_record
from mamf.measurement import Measurement
from mamf.plans import FindPlan, Held, KernelsPlan, Plan

SCHEMA = 4
READABLE = (1, 2, 3, 4)
MAY_PASS = ("failed", "out_of_memory")
#: What reading values of the wrong kind, edited by hand, can raise.
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, MamfError)


@dataclass
class RunLog:
    """A log as read. ``summary`` is the last one, None if the run was killed. ``valid_bytes``: up to the last whole
    line.
    """

    path: Path
    header: dict[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    all_ceilings: dict[tuple[str, str], Ceiling] = field(default_factory=dict)
    summary: dict[str, Any] | None = None
    valid_bytes: int = 0
    is_truncated: bool = False

    @property
    def plan(self) -> Plan | FindPlan | KernelsPlan:
        return plan_from_record(self.header["plan"])

    @property
    def ceilings(self) -> dict[str, Ceiling]:
        """By regime: of a find, which is of one dtype."""
        return {regime: ceiling for (_, regime), ceiling in self.all_ceilings.items()}

    @property
    def tier(self) -> str:
        """``complete``, or ``interrupted`` by Ctrl-C, a budget or a kill: what is best may never have been tried."""
        return "complete" if self.summary is not None and self.summary["status"] == "complete" else "interrupted"

    def rows(self) -> list[dict[str, Any]]:
        """Each measurement as one flat mapping: ``pandas.DataFrame(log.rows())``."""
        return [flat(measurement_record(row)) for row in self.measurements]

    @property
    def held(self) -> set[Held]:
        """The steps that need not be measured again: a failure or exhausted memory may have been the moment's."""
        return {row.step for row in self.measurements if not row.is_reference and row.status not in MAY_PASS}

    @property
    def kept(self) -> list[Measurement]:
        """The rows that stay when the log is resumed."""
        held = self.held
        return [row for row in self.measurements if row.is_reference or row.step in held]


def flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A record without nesting: ``shape.m``, ``tflops.median``."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


class RunLogWriter:
    """Appends records to a log. Use as a context manager."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def create(cls, path: Path, header: Mapping[str, Any]) -> RunLogWriter:
        """Start a new log. Raises UsageError when the file exists or cannot be created: a log is never overwritten."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except FileExistsError:
            raise UsageError(f"{path} exists and is not overwritten: name another --output, or --resume it") from None
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}; name another --output") from None
        writer = cls(path, descriptor)
        lock(descriptor, path)
        try:
            writer.write("header", {"schema": SCHEMA, **header})
        except RunLogWriteError:
            writer.close()
            path.unlink()
            raise
        return writer

    @classmethod
    def append(cls, log: RunLog) -> RunLogWriter:
        """Continue a log, cutting off a line that a killed run did not finish. Raises UsageError when it cannot be
        written.
        """
        try:
            descriptor = os.open(log.path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise UsageError(f"cannot resume {log.path}: {error.strerror}") from None
        lock(descriptor, log.path)
        if log.is_truncated and os.fstat(descriptor).st_size >= log.valid_bytes:
            os.ftruncate(descriptor, log.valid_bytes)
        return cls(log.path, descriptor)

    def write(self, record: str, fields: Mapping[str, Any]) -> None:
        """Append one record. Raises RunLogWriteError (disk full) and leaves the log as it was before."""
        line = json.dumps({"record": record, **scrub_record(dict(fields))}, allow_nan=False) + "\n"
        data = line.encode()
        size = os.fstat(self._descriptor).st_size
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # not a regular file: nothing to take back
                os.ftruncate(self._descriptor, size)
            raise RunLogWriteError(
                f"cannot write {self.path}: {error.strerror}; it holds all shapes up to here"
            ) from None

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> RunLogWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def lock(descriptor: int, path: Path) -> None:
    """Keep a second process from writing the same log. Raises UsageError when one does."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise UsageError(f"{path} is being written by another process: wait for it to end") from None


def read_run_log(path: str | Path) -> RunLog:
    """Read and check a log. Raises RunLogError naming the line and what is wrong with it."""
    path = Path(path)
    data = read_bytes(path)
    rest = data.rpartition(b"\n")[2]
    lines = whole_lines(path, data)
    log = RunLog(path, _header(path, lines[0]), valid_bytes=len(data) - len(rest), is_truncated=bool(rest))
    for number, line in enumerate(lines[1:], start=2):
        try:
            _add(log, parse_record(line))
        except MALFORMED as error:
            raise RunLogError(f"{path}, line {number}: {what(error)}") from None
    try:
        log.measurements = _latest(log.measurements)
    except TypeError as error:
        raise RunLogError(f"{path}: {what(error)}") from None
    return log


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunLogError(f"cannot read {path}: {error.strerror}") from None


def whole_lines(path: Path, data: bytes | None = None) -> list[bytes]:
    """Raises RunLogError for a file without any."""
    whole = (read_bytes(path) if data is None else data).rpartition(b"\n")[0]
    if not whole:
        raise RunLogError(f"{path} holds no whole line: not a run log, or killed before it began")
    return whole.split(b"\n")


def what(error: Exception) -> str:
    """What is wrong with a record, in a line."""
    if isinstance(error, KeyError):
        return f"field {error} is missing"
    return str(error) if isinstance(error, (MamfError, ValueError)) else f"malformed: {error}"


def parse_record(line: bytes) -> dict[str, Any]:
    """A line of a log. Raises ValueError for what mamf never writes: no object, a key twice, NaN."""
    try:
        record = _DECODER.decode(line.removeprefix(codecs.BOM_UTF8).decode())
    except (ValueError, RecursionError):
        raise ValueError("not a JSON object") from None
    if not isinstance(record, dict) or not isinstance(record.get("record"), str):
        raise ValueError("not a record of a run log")
    return record


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Readers that keep the last of two equal keys would never see what the first one holds."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key twice")
    return found


_DECODER = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_without_repetition)


def is_readable(schema: object) -> bool:
    """Whether this mamf reads logs of a schema, a whole number."""
    return type(schema) is int and schema in READABLE


def _header(path: Path, line: bytes) -> dict[str, Any]:
    try:
        header = parse_record(line)
        if header["record"] != "header":
            raise ValueError("the first record is not a header")
        if not is_readable(header["schema"]):
            known = ", ".join(map(str, READABLE))
            raise ValueError(f"schema {header['schema']} is not known to this mamf (it reads {known}); upgrade mamf")
        if header.get("tier") == "legacy":
            raise ValueError(
                "an imported log of mamf-finder, without samples; only 'mamf show' and 'mamf results' read it"
            )
        for name in ("tool", "environment", "kernel", "timer"):
            header[name]
        DeviceInfo(**header["device"])
        plan_from_record(header["plan"])
    except MALFORMED as error:
        raise RunLogError(f"{path}, line 1: {what(error)}") from None
    return header


def _add(log: RunLog, record: dict[str, Any]) -> None:
    kind = record["record"]
    if kind == "measurement":
        log.measurements.append(measurement_from_record(record, log.header))
        log.summary = None
    elif kind == "ceiling":
        ceiling = ceiling_from_record(record, log.header)
        log.all_ceilings[ceiling.problem.dtype, ceiling.regime] = ceiling
    elif kind == "summary":
        log.summary = record
    elif kind != "resume":
        raise ValueError(f"unknown record {kind!r}")


def _latest(rows: Iterable[Measurement]) -> list[Measurement]:
    """Every visit of the reference, and of each step the last row: a failure may have been measured again."""
    kept: dict[object, Measurement] = {}
    for number, row in enumerate(rows):
        key = number if row.is_reference else (row.step, row.problem, row.phase, row.round, row.kernel)
        kept.pop(key, None)
        kept[key] = row
    return list(kept.values())
