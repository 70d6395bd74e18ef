"""Read run logs: files of JSON Lines with one record per line, the header first.

The header has the schema version, tool, command, device, software, settings and plan, which is all the information that
mamf needs to resume the run. A log stays readable if its run is killed: a last line without a newline was cut off and
is ignored. records.py declares the records, recording.py declares the header, and writer.py writes the log.
"""

from __future__ import annotations

import codecs
import json
import math
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from mamf.backend import DeviceInfo, add_sharing_to_name
from mamf.ceilings.ceiling import CHOOSE_PHASE, CONFIRM_PHASE, Ceiling, combine_rounds, find_confirmed_ceiling
from mamf.errors import LOG_TOO_LARGE_MESSAGE, MAX_LOG_BYTES, MAX_LOG_LINE_BYTES, MAX_SIZE, MamfError, RunLogError
from mamf.logs.recording import HeaderRecord, read_plan_record
from mamf.logs.records import (
    STRUCT_BY_RECORD,
    make_measurement_record,
    read_ceiling_record,
    read_known_ceiling_record,
    read_measurement_record,
    read_record,
)
from mamf.measurement import Measurement, NotebookTable, Rate, group_pairs
from mamf.operations.unknown import sets_compute_ceiling
from mamf.plans import Plan

#: A function that shows progress. Its argument is the number of bytes or characters read since its last call.
ReadProgressCallback = Callable[[int], object]


def read_lines(path: Path, on_read: ReadProgressCallback | None = None) -> Iterator[bytes]:
    """Yield the complete lines of a file, each without its newline, and call ``on_read`` with the size of each line in
    bytes.

    Raises RunLogError for a file without a complete line, for a file or line that is too long, and for a path that is
    not a regular file, because reading a pipe or a device may never end.
    """
    is_empty = True
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode) and not stat.S_ISDIR(state.st_mode):
            raise RunLogError(f"{path} is not a regular file: save the log to a file first")
        if state.st_size > MAX_LOG_BYTES:
            raise RunLogError(f"{path} {LOG_TOO_LARGE_MESSAGE}")
        with path.open("rb") as file:
            for line in iter(lambda: file.readline(MAX_LOG_LINE_BYTES + 1), b""):
                if len(line) > MAX_LOG_LINE_BYTES:
                    raise RunLogError(
                        f"{path} has a line of more than {MAX_LOG_LINE_BYTES >> 20} MiB, so it is not a run log: "
                        "choose another file"
                    )
                if line.endswith(b"\n"):
                    is_empty = False
                    yield line[:-1]
                if on_read:
                    on_read(len(line))
    except OSError as error:
        folder = "; give a log, or show the folder with 'mamf report'" if path.is_dir() else ""
        raise RunLogError(f"cannot read {path}: {error.strerror}{folder}") from None
    if is_empty:
        raise RunLogError(
            f"{path} has no complete line, so it is not a run log, or its run was killed at its start: give another log"
        )


def parse_records(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Parse the lines of a log, and yield each record with its line number. Raises a RunLogError that names the
    first line which is not a record.
    """
    for number, line in enumerate(lines, start=1):
        try:
            yield number, parse_record(line)
        except ValueError as error:
            raise RunLogError(f"{path}, line {number}: {error}", number - 1) from None


def parse_record(line: bytes) -> dict[str, Any]:
    """Parse a line of a log and return its fields. If an object has a field more than once, the last value counts.

    Raises ValueError unless the line is a JSON object that has a field ``record`` and only finite numbers.
    """
    text = line.removeprefix(codecs.BOM_UTF8)
    try:
        try:
            record = msgspec.json.decode(text)
        except msgspec.DecodeError:
            # If a command line was not valid UTF-8, its log contains lone surrogates. json accepts them, but msgspec
            # does not.
            record = json.loads(text.decode())
            json.dumps(record, allow_nan=False)  # Raises ValueError for NaN and infinity.
    except ValueError:
        raise ValueError("the line is not a JSON object") from None
    except RecursionError:
        raise ValueError("the values of this line are nested too deeply") from None
    if not isinstance(record, dict) or not isinstance(record.get("record"), str):
        raise ValueError("the line is not a record of a run log, because it has no text field 'record'")
    return record


def find_repeated_fields(line: bytes) -> list[str]:
    """Return the names of the fields that an object in this line has more than once. Returns an empty list for a line
    that is not JSON.
    """
    repeated_names: list[str] = []

    def collect_repeated_names(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) < len(pairs):
            repeated_names.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)

    try:
        json.loads(line, object_pairs_hook=collect_repeated_names)
    except (ValueError, RecursionError):
        return []
    return repeated_names


SCHEMA_VERSION = 5
TRANSIENT_STATUSES = ("failed", "out_of_memory")
#: The errors that mamf code may raise when it reads a log with values of the wrong type.
MALFORMED_LOG_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, MamfError)
#: Ceilings by problem and regime, for operations other than matmul.
CeilingsByProblemAndRegime = dict[tuple[Any, str], Ceiling]

#: The kinds of logs (tiers) that ``read_run_log`` cannot read, because they contain no samples. Each tier maps to a
#: message that names the commands for its logs.
_UNREADABLE_TIERS = {
    "legacy": (
        "this is an imported log of mamf-finder, which has no samples: only 'mamf show', 'compare', 'plot', 'report' "
        "and 'results' read it"
    ),
    "profile": (
        "this is a profile of a script: only 'mamf show' and 'mamf report' read it, and results/ does not collect it"
    ),
}


@dataclass
class RunLog(NotebookTable):
    """A run log that was read from a file, or the joined logs of several devices.

    - ``header``: the first record, with device, software, settings and plan.
    - ``measurements``: the last row of each step (regime, problem, shape and kernel). ``all_rows``: all rows as
      written.
    - ``matmul_ceilings``: ceilings of matmuls, by dtype (as ``make_dtype_label`` names it) and regime.
    - ``other_ceilings``: ceilings of other operations, by problem and regime.
    - ``known_ceilings``: ceilings that the run did not measure and that reports compare rows with, by dtype and regime.
    - ``counter_records``: records of hardware counters, which mamf.profiling.counters.log reads.
    - ``summary``: the last summary record; None if the run was killed before it wrote one.
    - ``valid_bytes``: the length of the file in bytes up to the end of the last complete line.
    - ``is_truncated``: True if an incomplete line follows the last complete line.
    - ``part_logs``: the logs that were joined to this one, if several devices shared the run (mamf.logs.shared_runs).
    """

    path: Path
    header: dict[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    matmul_ceilings: dict[tuple[str, str], Ceiling] = field(default_factory=dict)
    other_ceilings: CeilingsByProblemAndRegime = field(default_factory=dict)
    known_ceilings: dict[tuple[str, str], Rate] = field(default_factory=dict)
    counter_records: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] | None = None
    valid_bytes: int = 0
    is_truncated: bool = False
    all_rows: list[Measurement] = field(default_factory=list)
    part_logs: list[RunLog] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"RunLog({self.path}: {len(self.measurements)} rows, {self.tier})"

    @property
    def plan(self) -> Plan:
        return read_plan_record(self.header["plan"])

    @property
    def devices(self) -> list[DeviceInfo]:
        """The devices that shared the run; an empty list if the run used one device."""
        return [DeviceInfo(**device) for device in self.header.get("devices", ())]

    def get_device(self, index: int | None) -> DeviceInfo:
        """Return the device that has this index, or the device in the header if the run used only one device."""
        return next((device for device in self.devices if device.index == index), DeviceInfo(**self.header["device"]))

    @property
    def ceilings(self) -> dict[str, Ceiling]:
        """The matmul ceilings by regime, for a log of ``mamf find``. Such a log has only one dtype."""
        return {regime: ceiling for (_, regime), ceiling in self.matmul_ceilings.items()}

    @property
    def tier(self) -> str:
        """``complete``, or ``interrupted`` if the run ended early (Ctrl-C, time budget, kill). An interrupted run may
        have missed the best shape.
        """
        return "complete" if self.summary is not None and self.summary["status"] == "complete" else "interrupted"

    def add_ceiling(self, ceiling: Ceiling) -> None:
        if sets_compute_ceiling(ceiling.problem.operation):
            self.matmul_ceilings[ceiling.dtype, ceiling.regime] = ceiling
        else:
            self.other_ceilings[ceiling.problem, ceiling.regime] = ceiling

    def rows(self) -> list[dict[str, Any]]:
        """Return one mapping for each measurement: its values by column, for ``pandas.DataFrame(log.rows())``."""
        return [flatten_record(make_measurement_record(row)) for row in self.measurements]

    @property
    def rows_kept_on_resume(self) -> list[Measurement]:
        """The rows that a resumed run does not measure again.

        A resumed run repeats rows that failed or ran out of memory, because the cause may have been temporary. It does
        not repeat rows whose launch killed its process.
        """
        return [row for row in self.measurements if row.is_fatal or row.status not in TRANSIENT_STATUSES]


def read_run_log(path: str | Path) -> RunLog:
    """Read and check a log. Raises a RunLogError that names the invalid line and says what is wrong with it."""
    path = Path(path)
    line_sizes: list[int] = []
    lines = list(read_lines(path, line_sizes.append))
    log = build_run_log(path, parse_records(path, lines))
    log.valid_bytes, log.is_truncated = sum(line_sizes[: len(lines)]), len(line_sizes) > len(lines)
    return log


def build_run_log(path: Path, records: Iterable[tuple[int, dict[str, Any]]]) -> RunLog:
    """Build a log from the records of a file, each with its line number. Does not change the records.

    Raises a RunLogError that names the invalid line and says what is wrong with it.
    """
    numbered = iter(records)
    log = RunLog(path, _check_header(path, next(numbered)[1]))
    for number, record in numbered:
        try:
            add_record(log, record)
        except MALFORMED_LOG_ERRORS as error:
            raise RunLogError(f"{path}, line {number}: {describe_record_error(error)}", number - 1) from None
    log.header = add_sharing_to_header(log.header, log.summary)
    log.all_rows = add_device_speeds(log.measurements)
    log.measurements = add_device_speeds(keep_latest_rows(log.measurements))
    return log


def describe_record_error(error: Exception) -> str:
    """Describe in one line what is wrong with a record. ``error``: the exception that reading the record raised."""
    if isinstance(error, KeyError):
        return f"field {error} is missing"
    return str(error) if isinstance(error, (MamfError, ValueError)) else f"malformed: {error}"


def explain_unreadable_schema(path: Path, schema: object) -> str:
    """Explain in one line why this version of mamf cannot read a log of the version ``schema`` of the log format.
    Returns an empty string if mamf can read the log.
    """
    if type(schema) is int and schema == SCHEMA_VERSION:
        return ""
    if type(schema) is int and 0 < schema < SCHEMA_VERSION:
        return (
            f"{path} has schema {schema}, not {SCHEMA_VERSION}: read or convert it with mamf 0.2, the last release "
            "that can"
        )
    return f"{path}, line 1: the log has schema {schema}, but this mamf reads schema {SCHEMA_VERSION}: upgrade mamf"


def _check_header(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    header = record.copy()
    if header["record"] != "header":
        raise RunLogError(f"{path}, line 1: the first record of a run log must be a header: choose another file")
    if why := explain_unreadable_schema(path, header.get("schema")):
        raise RunLogError(why)
    try:
        if isinstance(tier := header.get("tier"), str) and tier in _UNREADABLE_TIERS:
            raise ValueError(_UNREADABLE_TIERS[tier])
        if isinstance(plan := header.get("plan"), dict) and "options" not in plan:
            raise ValueError(
                "the plan of this log has the form of mamf 0.2.0: read the log with mamf 0.2.0, or measure again"
            )
        read = read_record(header, HeaderRecord)
        devices = [asdict(each) for each in (read.device, *(read.devices or ()))]
        if any(isinstance(size, int) and abs(size) > MAX_SIZE for each in devices for size in each.values()):
            raise ValueError("a number in the device's record has more than 64 bits")
        header["device"] = devices[0]
        if read.devices:
            header["devices"] = devices[1:]
        read_plan_record(header["plan"])
    except MALFORMED_LOG_ERRORS as error:
        raise RunLogError(f"{path}, line 1: {describe_record_error(error)}") from None
    return header


def add_record(log: RunLog, record: dict[str, Any]) -> None:
    """Convert a record that follows the header, and add it to a log. Raises ValueError if the record is malformed."""
    kind = record["record"]
    if kind not in STRUCT_BY_RECORD:
        raise ValueError(f"unknown type of record {kind!r}")
    if kind == "measurement":
        plan, operation = log.header["plan"], record.get("operation")
        searched = [search["operation"] for search in plan["searches"]]
        expected = (plan["operation"], *searched, *plan["options"].get("operations", ()))
        if isinstance(operation, str) and operation not in expected and not sets_compute_ceiling(operation):
            raise ValueError(f"a row of {operation} does not belong in a log of {plan['operation']}")
        log.measurements.append(read_measurement_record(record))
        log.summary = None
    elif kind == "ceiling":
        log.add_ceiling(read_ceiling_record(record, log.header))
    elif kind == "known_ceiling":
        known = read_known_ceiling_record(record, log.header["device"]["name"])
        log.known_ceilings[known.dtype, record["regime"]] = known
    else:
        read_record(record, STRUCT_BY_RECORD[kind])
        if kind == "resume":
            add_findings_to_header(log.header, record.get("findings", ()))
        elif kind == "counters":
            log.counter_records.append(record)
        elif kind == "summary":
            log.summary = record
            add_findings_to_header(log.header, record.get("findings", ()))


def add_findings_to_header(header: dict[str, Any], findings: Iterable[str]) -> None:
    """Add findings to the header of a log, unless the header already contains them. If a check was ok at one time and
    found a problem at another time, keep only the problem.

    ``findings``: what the machine checks found after the run had begun.
    """
    texts = dict.fromkeys([*header.get("findings", ()), *findings])
    check_by_text = {text: text.partition(" ")[2].partition(":")[0].strip() for text in texts}
    problems = {check for text, check in check_by_text.items() if not text.startswith("ok ")}
    header["findings"] = [
        text for text, check in check_by_text.items() if not text.startswith("ok ") or check not in problems
    ]


def flatten_record(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the fields of a record, and of the objects in it, in one mapping with names such as ``tflops.median``."""
    flat_fields: dict[str, Any] = {}
    for name, value in record.items():
        flat_fields |= (
            flatten_record(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
        )
    return flat_fields


def keep_latest_rows(rows: Iterable[Measurement]) -> list[Measurement]:
    """Return the latest row of each step (regime, problem, shape and kernel). A step has several rows if a resumed run
    repeated it after a failure.

    Returns all rows of the reference matmul, which a run measures repeatedly to detect drift.
    """
    latest_rows: dict[object, Measurement] = {}
    for number, row in enumerate(rows):
        device = (
            row.device_index if row.phase else None
        )  # Rows with a phase belong to a search. Each device runs its own search, so keep the rows of each device.
        key = number if row.is_reference else (row.key, row.phase, row.round_number, device)
        latest_rows.pop(key, None)
        latest_rows[key] = row
    return list(latest_rows.values())


def add_sharing_to_header(header: dict[str, Any], summary: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the header of a log, changed as follows: if the summary says that the card became shared during the run,
    the name of the device says so too.
    """
    if not summary or not summary.get("shared_after"):
        return header
    device = header["device"]
    return header | {"device": device | {"name": add_sharing_to_name(device["name"], summary["shared_after"])}}


# -- relative speeds of the devices that shared a run ------------------------------------------------------------------
# Cards of one model differ by several percent, so the rows of different cards are scaled to the speed of one card
# before they are ranked.


class DeviceSpeed(NamedTuple):
    """The speed of one device relative to the first device of the run.

    - ``relative_speed``: the rate of the device divided by the rate of the first device, both on a reference kernel.
    - ``half_width``: half the width of the interval of ``relative_speed``, as a share of ``relative_speed``.
    - ``reference_work``: the FLOP or bytes of one launch of the reference kernel.
    """

    relative_speed: float
    half_width: float
    reference_work: float

    def compute_half_width(self, work: float) -> float:
        """Compute half the width of the interval of ``relative_speed`` for a launch of ``work`` FLOP or bytes.

        ``relative_speed`` was measured with launches of the reference kernel. In launches with less work, devices may
        differ less, so the interval is wider. For example, the rates of four H200 differ by 2.5 % in launches of 343
        GFLOP, by 1.8 % at 137 GFLOP, by 1.3 % at 69 GFLOP, and not at all below 34 GFLOP, where all four have the same
        clock.
        """
        return self.half_width + abs(math.log(self.relative_speed)) * max(0.0, 1 - work / self.reference_work)


#: A regime and a dtype. The speeds of two devices are compared only within one regime and dtype.
SpeedContext = tuple[str, str]
#: Speeds of devices by regime and dtype, then by index of the device.
DeviceSpeeds = Mapping[SpeedContext, Mapping[int, DeviceSpeed]]


def compute_device_speeds(rows: Sequence[Measurement]) -> DeviceSpeeds:
    """Compute the speed of each device relative to the device with the lowest index, for each regime and dtype.

    If each device searched for its own ceiling, the speed is the ratio of the ceilings. Otherwise it is the ratio of
    the median rates of the reference kernel, which every device measures between its other rows.
    """
    pairs = [(get_speed_context(row), row) for row in rows if row.device_index is not None]
    references = group_pairs(pair for pair in pairs if pair[1].is_reference and pair[1].ok)
    searches = group_pairs(pair for pair in pairs if pair[1].phase in (CHOOSE_PHASE, CONFIRM_PHASE))
    speeds = {context: _compute_speeds_by_reference(same) for context, same in references.items()}
    for context, same in searches.items():
        by_device = group_pairs((row.device_index, row) for row in same if row.device_index is not None)
        ceilings = {index: ceiling for index, own in by_device.items() if (ceiling := find_confirmed_ceiling(own, ""))}
        if context in speeds and ceilings.keys() >= speeds[context].keys():
            speeds[context] = _compute_speeds_by_ceilings(ceilings)
    return speeds


def _compute_speeds_by_ceilings(ceilings: Mapping[int, Ceiling]) -> dict[int, DeviceSpeed]:
    first = ceilings[min(ceilings)]
    of_first = first.interval.half_width / first.rate
    return {
        device: DeviceSpeed(
            relative_speed=own.rate / first.rate,
            half_width=0.0 if own is first else math.hypot(own.interval.half_width / own.rate, of_first),
            reference_work=float(own.problem.compute_work(own.shape).amount),
        )
        for device, own in ceilings.items()
    }


def get_speed_context(row: Measurement) -> SpeedContext:
    return row.regime, row.problem.dtype


def _compute_speeds_by_reference(rows: Iterable[Measurement]) -> dict[int, DeviceSpeed]:
    """Compute the speed of each device relative to the device with the lowest index, from rows of reference kernels."""
    by_reference = group_pairs(
        ((row.problem, row.shape, row.kernel), (row.device_index, row)) for row in rows if row.device_index is not None
    )
    first = min(device for same in by_reference.values() for device, _ in same)
    speeds: dict[int, DeviceSpeed] = {}
    for by_device in map(group_pairs, by_reference.values()):
        if first in by_device:
            for device, own in by_device.items():
                speeds.setdefault(device, _compute_speed(own, by_device[first]))
    return speeds


def _compute_speed(device_rows: Sequence[Measurement], first_device_rows: Sequence[Measurement]) -> DeviceSpeed:
    if device_rows is first_device_rows:
        return DeviceSpeed(1.0, 0.0, device_rows[0].work_amount)
    rate, first_device_rate = (
        median(row.best_rate for row in measurements) for measurements in (device_rows, first_device_rows)
    )
    return DeviceSpeed(
        rate / first_device_rate,
        math.hypot(_compute_combined_half_width(device_rows), _compute_combined_half_width(first_device_rows)),
        device_rows[0].work_amount,
    )


def _compute_combined_half_width(measurements: Sequence[Measurement]) -> float:
    """Combine several measurements of one kernel on one shape. Returns half the width of the interval of the combined
    rate, as a share of this rate.
    """
    if len(measurements) == 1:
        return measurements[0].relative_half_width
    rate, interval = combine_rounds(measurements)
    return interval.half_width / rate


def add_device_speeds(rows: Sequence[Measurement]) -> list[Measurement]:
    """Return the rows, each with the relative speed of its device. Rows of a run on one device are returned
    unchanged.
    """
    speeds = compute_device_speeds(rows)
    rows_with_speed = list(rows)
    for number, row in enumerate(rows):
        if row.device_index is not None:
            speed = speeds.get(get_speed_context(row), {}).get(row.device_index)
            half_width = speed.compute_half_width(row.work_amount) if speed else row.device_speed_half_width
            relative_speed = speed.relative_speed if speed else None
            rows_with_speed[number] = replace(row, device_speed=relative_speed, device_speed_half_width=half_width)
    return rows_with_speed
