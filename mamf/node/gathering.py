"""Logs of ranks -> devices: all that is printed of a run is read from them, so it can be printed again."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mamf.ceilings.ceiling import CONFIRM, Ceiling
from mamf.contribution.contributed import contributed_ceilings
from mamf.errors import RunLogError, UsageError, fault
from mamf.files import write_whole
from mamf.logs.run_log import RunLog, read_run_log
from mamf.measurement import Measurement
from mamf.node.figures import BURST, SUSTAINED, UNITS, Device
from mamf.node.places import Place, place_of
from mamf.node.verdict import Baseline

#: What a device does, in order, a log each: alone, then together with all others.
ALONE = ("find", "bandwidth", "copies", "repeated")
TOGETHER = ("peers", "collective")
_RUN = "run.json"
_SCHEMA = 1
#: How it begins why a rank ended early that ran out of disk: nothing is known of its device, and nothing bad.
UNWRITTEN = "its log could not be written"
# Why a run ended early that is no fault of a device.
_NO_FAULTS = ("by the user", "the budget ended", "by the caller")


@dataclass
class Run:
    """What the leader knows beside the logs: how many ranks there were to be, whether they were to meet, and why some
    ended.
    """

    ranks: int = 0
    is_over: bool = False
    apart: str = ""
    failures: dict[int, str] = field(default_factory=dict)
    places: dict[int, Place] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        ends = {str(rank): reason for rank, reason in self.failures.items()}
        places = [[each.rank, each.node, each.index] for each in self.places.values()]
        record = {"schema": _SCHEMA, "ranks": self.ranks, "is_over": self.is_over, "apart": self.apart}
        write_whole(folder / _RUN, json.dumps({**record, "failures": ends, "places": places}, indent=1) + "\n")


def read_run(folder: Path) -> Run | None:
    """None where no leader wrote. Raises RunLogError for what no leader writes."""
    path = folder / _RUN
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        places = [Place(*map(int, each)) for each in record["places"]]
        failures = {int(rank): str(reason) for rank, reason in record["failures"].items()}
        by_rank = {place.rank: place for place in places}
        return Run(int(record["ranks"]), bool(record["is_over"]), str(record["apart"]), failures, by_rank)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"{path} is not what 'mamf node' writes ({fault(error)}): without it the logs alone are read"
        raise RunLogError(reason) from None


def devices_of(folders: Sequence[Path]) -> tuple[Run, list[Device]]:
    """The run and its devices, by rank, as the logs in these folders tell. Raises UsageError where there is none."""
    run, logs = Run(), dict[Place, dict[str, RunLog | str]]()
    for folder in folders:
        for path in sorted(folder.glob("*.jsonl")):
            if (found := place_of(path)) is not None:
                place, part = found
                of_place = logs.setdefault(place, {})
                if has_begun(path):
                    of_place[part] = _read(path)
        if (told := read_run(folder)) is not None:
            run = _joined(run, told)
    if not logs and not run.places:
        raise UsageError(f"no logs of 'mamf node' in {', '.join(map(str, folders))}")
    for place, beside in itertools.pairwise(sorted(logs)):
        if place.rank == beside.rank:
            two = f"rank {place.rank} is device {place.index} and device {beside.index}"
            raise UsageError(f"{', '.join(map(str, folders))}: {two}: give the folders of one run")
    for place in logs:
        run.places[place.rank] = place
    run.ranks = max(run.ranks, len(run.places))
    for rank in range(run.ranks):
        run.places.setdefault(rank, Place(rank, 0, rank))
    places = [run.places[rank] for rank in sorted(run.places)]
    return run, [device_of(place, logs.get(place, {}), run) for place in places]


def logs_of(folder: Path, place: Place) -> dict[str, RunLog | str]:
    """What a rank wrote, by part; why it cannot be read, of what cannot."""
    return {part: _read(log) for part in (*ALONE, *TOGETHER) if has_begun(log := place.log(folder, part))}


def is_complete(folder: Path, place: Place) -> bool:
    """Whether what is measured together needs not be measured again."""
    logs = logs_of(folder, place)
    return all(isinstance(log := logs.get(part), RunLog) and log.tier == "complete" for part in TOGETHER)


def _joined(one: Run, other: Run) -> Run:
    return Run(
        max(one.ranks, other.ranks),
        one.is_over or other.is_over,
        one.apart or other.apart,
        one.failures | other.failures,
        one.places | other.places,
    )


def has_begun(path: Path) -> bool:
    """Whether there is anything in a log: one without a whole line was killed before it began, and is as none."""
    if not path.is_file():
        return path.exists()
    try:
        with path.open("rb") as file:
            return file.readline().endswith(b"\n")
    except OSError:
        return True  # who reads it says why it cannot be read


def _read(path: Path) -> RunLog | str:
    """A log, or why it cannot be read. Nobody waits for a pipe that bears a log's name."""
    if not path.is_file():
        return f"cannot read {path}: it is no regular file"
    try:
        return read_run_log(path)
    except RunLogError as error:
        return str(error)


def device_of(place: Place, logs: Mapping[str, RunLog | str], run: Run) -> Device:
    """One device, as its logs tell. ``logs``: by part."""
    device = Device(place.rank, place.node, place.index)
    reason = run.failures.get(place.rank, "")
    is_unwritten = reason.startswith(UNWRITTEN)
    failures, lacks = list[str](), list[str]()
    if reason:
        (lacks if is_unwritten else failures).append(reason)
    for part in ALONE + (TOGETHER if run.ranks > 1 and not run.apart else ()):
        log = logs.get(part)
        if isinstance(log, str):
            failures.append(log)
        elif log is not None:
            device = _with(device, part, log)
            failures += [*_wrong(part, log), *(() if is_unwritten else _ended(part, log))]
            lacks += _lacks(part, log)
        elif not reason:
            lacks.append(f"{part} was not measured")
    if reason:  # which is why it lacks what it lacks
        failures, lacks = (failures, lacks[:1]) if is_unwritten else (failures[:1], [])
    return replace(device, failures=tuple(dict.fromkeys(failures)), lacks=tuple(lacks))


def _with(device: Device, part: str, log: RunLog) -> Device:
    """A device and what a log tells of it."""
    info = log.header["device"]
    device = replace(device, name=str(info["name"]), uuid_hash=info["uuid_hash"])
    if part == "find":
        return _with_ceilings(device, log)
    fastest: dict[str, Measurement] = {}
    for row in log.measurements:
        name = figure_name(row) if row.ok else ""
        if name and (name not in fastest or row.best_rate > fastest[name].best_rate):
            fastest[name] = row
    best = {name: row.best_rate for name, row in fastest.items()}
    if part == "collective":
        return replace(device, collectives=best)
    half_widths = {name: row.relative_half_width for name, row in fastest.items()}
    shares = throttled(log.measurements)
    merged = {reason: max(share, device.throttled.get(reason, 0.0)) for reason, share in shares.items()}
    return replace(
        device,
        figures={**device.figures, **best},
        half_widths={**device.half_widths, **half_widths},
        throttled={**device.throttled, **merged},
    )


def figure_name(row: Measurement) -> str:
    """What a row's figure is called: that of a device by its kind, that of all together with its size."""
    problem = row.problem
    name = getattr(problem, "pattern", None) or getattr(problem, "direction", None)
    if name is None and hasattr(problem, "collective"):
        return f"{problem.collective} {row.shape}"
    return str(name) if name in UNITS else ""


def _with_ceilings(device: Device, log: RunLog) -> Device:
    found: dict[str, Ceiling] = {name: log.ceilings[name] for name in (BURST, SUSTAINED) if name in log.ceilings}
    hottest = found.get(SUSTAINED) or found.get(BURST)
    confirmed = [row for row in log.measurements if row.phase == CONFIRM]
    return replace(
        device,
        figures={**device.figures, **{name: each.rate for name, each in found.items()}},
        half_widths={name: each.interval.half_width / each.rate for name, each in found.items()},
        shapes={name: str(each.shape) for name, each in found.items()},
        conditions=hottest.conditions if hottest else device.conditions,
        throttled=throttled(confirmed),
    )


def throttled(rows: Iterable[Measurement]) -> dict[str, float]:
    """The share of time by reason, over rows of one regime at a time: the larger of them."""
    found: dict[str, float] = {}
    rows = [row for row in rows if row.ok]
    for regime in dict.fromkeys(row.regime for row in rows):
        own = [row.conditions.throttle_shares for row in rows if row.regime == regime]
        for reason in sorted({reason for each in own for reason in each}):
            share = sum(each.get(reason, 0.0) for each in own) / len(own)
            found[reason] = round(max(share, found.get(reason, 0.0)), 4)
    return found


def _wrong(part: str, log: RunLog) -> Iterable[str]:
    """What makes a device bad: wrong results of what every model calls, or nothing that ran."""
    default = log.header["kernel"].split()[0]
    for row in log.measurements:
        if row.status == "wrong_result" and row.kernel == default:
            yield f"wrong results in {part}: {row.reason}"
            return
    if log.measurements and not any(row.ok for row in log.measurements):
        row = log.measurements[0]
        if row.status != "unsupported":
            yield f"{part}: {row.status.replace('_', ' ')}, {row.reason}"


def _ended(part: str, log: RunLog) -> Iterable[str]:
    """An end of a part that is a device's fault."""
    if log.summary is None:
        yield f"it was gone or killed while {part} was measured"
    elif log.summary["reason"] and log.summary["reason"] not in _NO_FAULTS:
        yield f"{part} ended: {log.summary['reason']}"


def _lacks(part: str, log: RunLog) -> Iterable[str]:
    summary: Mapping[str, Any] = log.summary or {}
    if part == "find":
        missing = [name for name in (BURST, SUSTAINED) if name not in log.ceilings]
        told = " and ".join(missing)
        if missing:
            reason = str(summary.get("reason") or "it was not confirmed")
            yield f"no {told} ceiling: {'interrupted ' if reason.startswith('by ') else ''}{reason}"
    elif part == "collective" and all(row.status == "unsupported" for row in log.measurements):
        yield f"no collectives: {log.measurements[0].reason if log.measurements else 'none was measured'}"
    elif str(summary.get("reason", "")).startswith("by "):
        yield f"{part} was interrupted {summary['reason']}"


# -- baselines ---------------------------------------------------------------------------------------------------------


def baseline_of(paths: Sequence[Path]) -> dict[str, Baseline]:
    """What logs of find, bandwidth or copies say that a device of their kind gives, by its name."""
    found: dict[str, Device] = {}
    for path in paths:
        log = read_run_log(path)
        name = str(log.header["device"]["name"])
        part = "find" if log.header["plan"].get("command") == "find" else "other"
        found[name] = _with(found.get(name, Device(0, 0, 0)), part, log)
        if not found[name].figures:
            raise UsageError(f"{path} holds no figure that devices are compared by: give the log of a find")
    told = ", ".join(path.name for path in paths)
    return {name: Baseline(device.figures, f"the baseline {told}") for name, device in found.items()}


def contributed_baselines(devices: Iterable[Device], headers: Mapping[str, Mapping[str, Any]]) -> dict[str, Baseline]:
    """What was contributed for devices of these names, as they are built and set. ``headers``: the device of a log and
    its dtype, by name.
    """
    found = {}
    for name in dict.fromkeys(device.name for device in devices):
        known = headers.get(name, {})
        rows = [row for row in contributed_ceilings() if row.device == name and row.dtype == known.get("dtype")]
        rows = [row for row in rows if (row.compute_units, row.power_limit_watts) == known.get("build")]
        if rows:
            figures = {row.regime: row.tflops for row in rows}
            found[name] = Baseline(figures, f"what was contributed for {name}")
    return found


def headers_of(folders: Sequence[Path]) -> dict[str, Mapping[str, Any]]:
    """Of each kind of device that a find was of: its dtype, unit count and power limit."""
    found: dict[str, Mapping[str, Any]] = {}
    for path in (path for folder in folders for path in folder.glob("*-find.jsonl")):
        log = _read(path)
        if isinstance(log, RunLog):
            device, problem = log.header["device"], log.header["plan"]["problem"]
            build = (device["compute_units"], device["power_limit_watts"])
            found[str(device["name"])] = {"dtype": problem["dtype"], "build": build}
    return found
