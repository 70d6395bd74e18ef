"""The versioned run log: JSON Lines, ``record`` first. It survives a killed run, and users contribute it.

``header`` names tool, command, device, software, settings and the plan: all that is needed to resume. writer.py writes
the log. A last line without a newline was cut by a kill and is ignored. records.py declares the records, so a log as
read is well-typed.
"""

from __future__ import annotations

import codecs
import json
import math
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from mamf.backend import DeviceInfo, shared_name
from mamf.ceilings.ceiling import CHOOSE, CONFIRM, Ceiling, combine_rounds, confirm_ceiling
from mamf.errors import LARGEST_SIZE, MAX_LINE_BYTES, MAX_LOG_BYTES, MAX_NESTED, TOO_LONG, MamfError, RunLogError
from mamf.logs.recording import Header, plan_from_record
from mamf.logs.records import (
    RECORDS,
    as_logged,
    ceiling_from_record,
    is_of_old_calibration,
    known_ceiling_from_record,
    measurement_from_record,
    measurement_record,
    read_record,
)
from mamf.measurement import Measurement, Rate, Tabular
from mamf.operations.unknown import is_of_products
from mamf.plans import Plan

_TOO_DEEP = f"nested more than {MAX_NESTED} deep"
#: Receives how many bytes or characters more were read, for a progress bar.
Seen = Callable[[int], object]


def lines_of(path: Path, seen: Seen | None = None) -> Iterator[bytes]:
    """The whole lines of a regular file, one at a time. Raises RunLogError for a file without any, for a longer file or
    line than a log has, and for a pipe or a device, which may never end.
    """
    is_empty = True
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode) and not stat.S_ISDIR(state.st_mode):
            raise RunLogError(f"cannot read {path}: it is not a regular file: save the log first")
        if state.st_size > MAX_LOG_BYTES:
            raise RunLogError(f"{path} {TOO_LONG}")
        with path.open("rb") as file:
            for line in iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""):
                if len(line) > MAX_LINE_BYTES:
                    raise RunLogError(f"{path} has a line of more than {MAX_LINE_BYTES >> 20} MiB: not a run log")
                if line.endswith(b"\n"):
                    is_empty = False
                    yield line[:-1]
                if seen:
                    seen(len(line))
    except OSError as error:
        folder = ": 'mamf report' takes folders" if path.is_dir() else ""
        raise RunLogError(f"cannot read {path}: {error.strerror}{folder}") from None
    if is_empty:
        raise RunLogError(f"{path} holds no whole line: not a run log, emptied, or killed before it began")


def parse_records(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each record with its line, one at a time. Raises RunLogError naming the line that is no record."""
    for number, line in enumerate(lines, start=1):
        try:
            yield number, parse_record(line)
        except ValueError as error:
            raise RunLogError(f"{path}, line {number}: {error}", number - 1) from None


def parse_record(line: bytes) -> dict[str, Any]:
    """Parse a line of a log; of a repeated field, the last one counts. Raises ValueError for anything but one object
    with finite numbers.
    """
    text = line.removeprefix(codecs.BOM_UTF8)
    try:
        try:
            record = msgspec.json.decode(text)
        except msgspec.DecodeError:
            # A command line that is not UTF-8 is written with halves of surrogate pairs, which msgspec refuses.
            record = _DECODER.decode(text.decode())
    except ValueError:
        raise ValueError("not a JSON object, as in a run log") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if not isinstance(record, dict) or not isinstance(record.get("record"), str):
        raise ValueError("not a record of a run log")
    if line.count(b"{") + line.count(b"[") > MAX_NESTED and _is_nested_deeper(record, MAX_NESTED):
        raise ValueError(_TOO_DEEP)
    return record


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _is_nested_deeper(record: object, depth: int) -> bool:
    """Whether objects and lists are nested more than ``depth`` deep: recursive functions would fail."""
    level = [record]
    for _ in range(depth):
        values = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list)))
        level = [value for value in chain.from_iterable(values) if isinstance(value, (dict, list))]
    return bool(level)


def repeated_fields(line: bytes) -> list[str]:
    """The names that an object of this line has more than once; none in a line that is not JSON."""
    found: list[str] = []

    def note_repeated(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) < len(pairs):
            found.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)

    try:
        json.loads(line, object_pairs_hook=note_repeated)
    except (ValueError, RecursionError):
        return []
    return found


SCHEMA = 5
TRANSIENT_STATUSES = ("failed", "out_of_memory")
#: Errors from reading values of the wrong type in logs edited by hand.
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, MamfError)
#: Ceilings of an operation by problem and regime.
OwnCeilings = dict[tuple[Any, str], Ceiling]

#: Tiers of logs without samples, and the commands that read them.
_WITHOUT_SAMPLES = {
    "legacy": (
        "an imported log of mamf-finder, without samples; only 'mamf show', 'compare', 'plot', 'report' and 'results' "
        "read it"
    ),
    "profile": "a profile of a script; only 'mamf show' and 'mamf report' read it, and results/ does not collect it",
}


@dataclass
class RunLog(Tabular):
    """A log as read. ``summary`` is the last one, None if the run was killed. ``valid_bytes``: up to the last whole
    line. ``measurements``: of each step the last; ``every_row`` as written. ``all_ceilings``: of products, by dtype (as
    ``label_dtype`` names it) and regime; ``own_ceilings``: of the operation that the run is of. ``known_ceilings``:
    what rows are shares of that the run did not measure itself. ``counter_records``: as mamf.profiling.counters.log
    reads them. ``parts``: the logs of the devices that shared the run, if each has its own (mamf.logs.shared_runs).
    """

    path: Path
    header: dict[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    all_ceilings: dict[tuple[str, str], Ceiling] = field(default_factory=dict)
    own_ceilings: OwnCeilings = field(default_factory=dict)
    known_ceilings: dict[tuple[str, str], Rate] = field(default_factory=dict)
    counter_records: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] | None = None
    valid_bytes: int = 0
    is_truncated: bool = False
    every_row: list[Measurement] = field(default_factory=list)
    parts: list[RunLog] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"RunLog({self.path}: {len(self.measurements)} rows, {self.tier})"

    @property
    def plan(self) -> Plan:
        return plan_from_record(self.header["plan"])

    @property
    def devices(self) -> list[DeviceInfo]:
        """The devices that shared the run; empty for a run on one device."""
        return [DeviceInfo(**device) for device in self.header.get("devices", ())]

    def device(self, index: int | None) -> DeviceInfo:
        """The one of this index of those that shared the run; else the run's own."""
        return next((device for device in self.devices if device.index == index), DeviceInfo(**self.header["device"]))

    @property
    def ceilings(self) -> dict[str, Ceiling]:
        """By regime: of a find, which is of one dtype."""
        return {regime: ceiling for (_, regime), ceiling in self.all_ceilings.items()}

    @property
    def tier(self) -> str:
        """``complete``, or ``interrupted`` by Ctrl-C, a budget or a kill: the best may be missing."""
        return "complete" if self.summary is not None and self.summary["status"] == "complete" else "interrupted"

    def add_ceiling(self, ceiling: Ceiling) -> None:
        if is_of_products(ceiling.problem.operation):
            self.all_ceilings[ceiling.dtype, ceiling.regime] = ceiling
        else:
            self.own_ceilings[ceiling.problem, ceiling.regime] = ceiling

    def rows(self) -> list[dict[str, Any]]:
        """Each measurement as one flat mapping: ``pandas.DataFrame(log.rows())``."""
        return [flat(measurement_record(row)) for row in self.measurements]

    @property
    def lasting(self) -> list[Measurement]:
        """The rows that need not be measured again: all but failures and exhausted memory, which may be transient.
        Launches that ended their process are not tried again.
        """
        return [row for row in self.measurements if row.is_fatal or row.status not in TRANSIENT_STATUSES]


def read_run_log(path: str | Path) -> RunLog:
    """Read and check a log. Raises RunLogError naming the line and what is wrong with it."""
    path = Path(path)
    sizes: list[int] = []
    lines = list(lines_of(path, sizes.append))
    log = run_log_of(path, parse_records(path, lines))
    log.valid_bytes, log.is_truncated = sum(sizes[: len(lines)]), len(sizes) > len(lines)
    return log


def run_log_of(path: Path, records: Iterable[tuple[int, dict[str, Any]]]) -> RunLog:
    """The log of the records in a file, each with its line, and each left as it is. Raises RunLogError likewise."""
    numbered = iter(records)
    header = _header(path, next(numbered)[1])
    log, has_old_ceilings = RunLog(path, header), False
    for number, record in numbered:
        try:
            add_record(log, record)
            has_old_ceilings |= record["record"] == "ceiling" and is_of_old_calibration(record)
        except MALFORMED as error:
            raise RunLogError(f"{path}, line {number}: {describe_error(error)}", number - 1) from None
    if has_old_ceilings:
        log.all_ceilings = _calibrated_today(log.all_ceilings, log.measurements)
        log.own_ceilings = _calibrated_today(log.own_ceilings, log.measurements)
    log.header = with_sharing(log.header, log.summary)
    every_row = log.measurements
    log.every_row = with_device_speeds(every_row)
    log.measurements = with_device_speeds(latest_rows(every_row))
    return log


def _calibrated_today(ceilings: Mapping[Any, Ceiling], rows: Iterable[Measurement]) -> dict[Any, Ceiling]:
    """Ceilings with the intervals of today's calibration, computed from their rounds among ``rows``. As recorded if the
    rounds are in another log, or the interval is unknown.
    """
    latest = latest_rows(rows)

    def calibrated(ceiling: Ceiling) -> Ceiling:
        own = [row for row in latest if (row.problem, row.regime) == (ceiling.problem, ceiling.regime)]
        again = confirm_ceiling(own, ceiling.device, ceiling.uuid_hash)
        is_same = again and (again.shape, again.kernel) == (ceiling.shape, ceiling.kernel)
        if again is None or not is_same or ceiling.repeatability is None or not ceiling.interval.is_known:
            return ceiling
        return replace(ceiling, interval=as_logged(again).interval)

    return {key: calibrated(ceiling) for key, ceiling in ceilings.items()}


def describe_error(error: Exception) -> str:
    """One line on what is wrong with a record."""
    if isinstance(error, KeyError):
        return f"field {error} is missing"
    return str(error) if isinstance(error, (MamfError, ValueError)) else f"malformed: {error}"


def why_unreadable(path: Path, schema: object) -> str:
    """Why no reader takes a log with this schema in its header, in one line; empty if readers do."""
    if type(schema) is int and schema == SCHEMA:
        return ""
    if type(schema) is int and 0 < schema < SCHEMA:
        return f"{path} has schema {schema}; the last release that reads or converts it is mamf 0.2"
    return f"{path}, line 1: schema {schema} is not known to this mamf (it reads {SCHEMA}); upgrade mamf"


def _header(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    header = record.copy()
    if header["record"] != "header":
        raise RunLogError(f"{path}, line 1: the first record is not a header")
    if why := why_unreadable(path, header.get("schema")):
        raise RunLogError(why)
    try:
        if isinstance(tier := header.get("tier"), str) and tier in _WITHOUT_SAMPLES:
            raise ValueError(_WITHOUT_SAMPLES[tier])
        if isinstance(plan := header.get("plan"), dict) and "options" not in plan:
            raise ValueError(
                "the plan is in the form of release 0.2.0: read the log with that release, or measure again"
            )
        read = read_record(header, Header)
        devices = [asdict(each) for each in (read.device, *(read.devices or ()))]
        if any(isinstance(size, int) and abs(size) > LARGEST_SIZE for each in devices for size in each.values()):
            raise ValueError("a device with a number of more than 64 bits")
        header["device"] = devices[0]
        if read.devices:
            header["devices"] = devices[1:]
        plan_from_record(header["plan"])
    except MALFORMED as error:
        raise RunLogError(f"{path}, line 1: {describe_error(error)}") from None
    return header


def add_record(log: RunLog, record: dict[str, Any]) -> None:
    """Add a record after the header to a log. Raises ValueError for one that is malformed."""
    kind = record["record"]
    if kind not in RECORDS:
        raise ValueError(f"unknown record {kind!r}")
    if kind == "measurement":
        plan, operation = log.header["plan"], record.get("operation")
        searched = [search["operation"] for search in plan["searches"]]
        expected = (plan["operation"], *searched, *plan["options"].get("operations", ()))
        if isinstance(operation, str) and operation not in expected and not is_of_products(operation):
            raise ValueError(f"a row of {operation} in a log of {plan['operation']}")
        log.measurements.append(measurement_from_record(record, log.header))
        log.summary = None
    elif kind == "ceiling":
        log.add_ceiling(ceiling_from_record(record, log.header))
    elif kind == "known_ceiling":
        known = known_ceiling_from_record(record, log.header["device"]["name"])
        log.known_ceilings[known.dtype, record["regime"]] = known
    else:
        read_record(record, RECORDS[kind])
        if kind == "counters":
            log.counter_records.append(record)
        elif kind == "summary":
            log.summary = record


def flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A record without nesting: ``shape.m``, ``tflops.median``."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def latest_rows(rows: Iterable[Measurement]) -> list[Measurement]:
    """Every visit of the reference, and of each step the last row: a failure may have been measured again."""
    kept: dict[object, Measurement] = {}
    for number, row in enumerate(rows):
        device = row.device if row.phase else None  # each device searches for its own ceiling
        key = number if row.is_reference else (row.step, row.phase, row.round, device)
        kept.pop(key, None)
        kept[key] = row
    return list(kept.values())


def with_sharing(header: dict[str, Any], summary: Mapping[str, Any] | None) -> dict[str, Any]:
    """The header, with a device's name that says how the card was shared after the run."""
    if not summary or not summary.get("shared_after"):
        return header
    device = header["device"]
    return header | {"device": device | {"name": shared_name(device["name"], summary["shared_after"])}}


# -- several devices --------------------------------------------------------------------------------------------------
# Cards of the same model differ by several percent, so rows from different cards are corrected before they are ranked.


class DeviceSpeed(NamedTuple):
    """``factor``: speed relative to the run's first device. ``half_width``: of its interval, as a share. ``work``: of
    the reference, in FLOP or bytes.
    """

    factor: float
    half_width: float
    work: float

    def half_width_at(self, work: float) -> float:
        """The half width for less work than the reference, where devices differ as much or less. Four H200 that differ
        by 2.5 % at 343 GFLOP differ by 1.8 % at 137, by 1.3 % at 69, and not at all below 34, at the same clock.
        """
        return self.half_width + abs(math.log(self.factor)) * max(0.0, 1 - work / self.work)


#: Regime and dtype, within which devices are compared.
Context = tuple[str, str]
#: Speeds by context and device, for the devices that were compared.
DeviceSpeeds = Mapping[Context, Mapping[int, DeviceSpeed]]
#: Visits by reference product and device.
_Visits = dict[Any, dict[int, list[Measurement]]]


def device_speeds(rows: Iterable[Measurement]) -> DeviceSpeeds:
    """Speeds from these rows, each device's relative to that of the lowest index: by their ceilings if each found its
    own, else by the median of the reference visits.
    """
    visits: dict[Context, _Visits] = {}
    searched: dict[Context, dict[int, list[Measurement]]] = {}
    for row in rows:
        if row.device is not None and row.is_reference and row.ok:
            of = visits.setdefault(context_of(row), {}).setdefault((row.problem, row.shape, row.kernel), {})
            of.setdefault(row.device, []).append(row)
        elif row.device is not None and row.phase in (CHOOSE, CONFIRM):
            searched.setdefault(context_of(row), {}).setdefault(row.device, []).append(row)
    found = {context: _speeds(each) for context, each in visits.items()}
    for context, by_device in searched.items():
        ceilings = {device: ceiling for device, own in by_device.items() if (ceiling := confirm_ceiling(own, ""))}
        if context in found and ceilings.keys() >= found[context].keys():
            found[context] = _speeds_by_ceilings(ceilings)
    return found


def _speeds_by_ceilings(ceilings: Mapping[int, Ceiling]) -> dict[int, DeviceSpeed]:
    first = ceilings[min(ceilings)]
    found = {}
    for device, own in ceilings.items():
        half_widths = (0.0, 0.0) if own is first else (each.interval.half_width / each.rate for each in (own, first))
        work = float(own.problem.work(own.shape).amount)
        found[device] = DeviceSpeed(own.rate / first.rate, math.hypot(*half_widths), work)
    return found


def context_of(row: Measurement) -> Context:
    return row.regime, row.problem.dtype


def _speeds(visits: _Visits) -> dict[int, DeviceSpeed]:
    first = min(device for of in visits.values() for device in of)
    found: dict[int, DeviceSpeed] = {}
    for of in visits.values():
        if first in of:
            for device, own in of.items():
                found.setdefault(device, _speed(own, of[first]))
    return found


def _speed(own: Sequence[Measurement], firsts: Sequence[Measurement]) -> DeviceSpeed:
    if own is firsts:
        return DeviceSpeed(1.0, 0.0, own[0].amount)
    rate, of_first = (median(row.best_rate for row in visits) for visits in (own, firsts))
    return DeviceSpeed(rate / of_first, math.hypot(_half_width(own), _half_width(firsts)), own[0].amount)


def _half_width(visits: Sequence[Measurement]) -> float:
    """Half width of the combined interval of these visits, as a share."""
    if len(visits) == 1:
        return visits[0].relative_half_width
    rate, interval = combine_rounds(visits)
    return interval.half_width / rate


def with_device_speeds(rows: Sequence[Measurement]) -> list[Measurement]:
    """The rows, each with the speed of its device. Rows of a run on one device are unchanged."""
    if all(row.device is None for row in rows):
        return list(rows)
    speeds = device_speeds(rows)
    return [with_speed(row, speeds) for row in rows]


def with_speed(row: Measurement, speeds: DeviceSpeeds) -> Measurement:
    if row.device is None:
        return row
    speed = speeds.get(context_of(row), {}).get(row.device)
    if speed is None:
        return replace(row, device_speed=None)
    return replace(row, device_speed=speed.factor, device_speed_half_width=speed.half_width_at(row.amount))
