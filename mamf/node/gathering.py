"""Builds devices from the logs of ranks. Reports use only these logs, so they can be printed again later."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mamf.ceilings.ceiling import CONFIRM, Ceiling
from mamf.errors import RunLogError, UsageError, describe_error
from mamf.files import write_whole
from mamf.limits import whole_number
from mamf.logs.run_log import RunLog, read_run_log
from mamf.machine.privacy import scrub
from mamf.measurement import Measurement, group_pairs
from mamf.node.figures import BURST, SUSTAINED, UNITS, Device, Place, place_of, places_of_all

#: The parts of a device's run in order, one log each: alone, then together with all others.
ALONE = ("find", "bandwidth", "copies", "repeated")
TOGETHER = ("peers", "collective")
#: The last part alone, on request.
VERIFIED = "verify"
RUN = "run.json"
# More than any cluster has: a file that claims more is not from mamf, and all ranks would be listed.
_MOST_RANKS = 250_000
_SCHEMA = 1
#: Beginnings of reasons for an early end that are not a fault of the device.
UNWRITTEN, UNMEASURABLE = "its log could not be written", "what was asked for cannot be measured"
# Reasons for an early end that are not a fault of the device.
_NO_FAULTS = ("by the user", "the budget ended", "by the caller")


@dataclass
class Run:
    """What the leader knows in addition to the logs: the number of ranks, why they did not measure together, and why
    some failed.
    """

    ranks: int = 0
    is_over: bool = False
    apart: str = ""
    failures: dict[int, str] = field(default_factory=dict)
    places: dict[int, Place] = field(default_factory=dict)
    #: Whether the whole run was killed (none of its logs has a summary), or interrupted while its leader watched each
    #: device. A launcher that ends all ranks because one died interrupts them as well.
    is_cut: bool = False

    def write(self, folder: Path) -> None:
        ends = {str(rank): scrub(reason) for rank, reason in self.failures.items()}
        places = [[each.rank, each.node, each.index] for each in self.places.values()]
        record = {"schema": _SCHEMA, "ranks": self.ranks, "is_over": self.is_over, "is_interrupted": self.is_cut}
        rest = {"apart": scrub(self.apart), "failures": ends, "places": places}
        write_whole(folder / RUN, json.dumps({**record, **rest}, indent=1) + "\n")


def read_run(folder: Path) -> Run | None:
    """None if no leader wrote one. Raises RunLogError for any other file."""
    path = folder / RUN
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        places = [Place(*map(int, each)) for each in record["places"]]
        failures = {int(rank): str(reason) for rank, reason in record["failures"].items()}
        by_rank = {place.rank: place for place in places}
        ranks = whole_number("ranks", record["ranks"], 0, _MOST_RANKS)
        return Run(
            ranks,
            bool(record["is_over"]),
            str(record["apart"]),
            failures,
            by_rank,
            bool(record.get("is_interrupted")),  # absent in older files
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"{path} is not what 'mamf node' writes ({describe_error(error)}): without it the logs alone are read"
        raise RunLogError(reason) from None


def devices_of(folders: Sequence[Path], known: Run | None = None) -> tuple[Run, list[Device]]:
    """The run and its devices, by rank, from the logs in these folders. ``known``: used instead of the leader's
    file. Raises UsageError if the folders hold no logs.
    """
    run, logs = known or Run(), dict[Place, dict[str, RunLog | str]]()
    for folder in folders:
        for path in sorted(folder.glob("*.jsonl")):
            if (found := place_of(path)) is not None:
                place, part = found
                of_place = logs.setdefault(place, {})
                if has_begun(path):
                    of_place[part] = read(path)
        if known is None and (written := read_run(folder)) is not None:
            run = _joined(run, written)
    if not logs and not run.places:
        raise UsageError(f"no logs of 'mamf node' in {', '.join(map(str, folders))}")
    for place, beside in itertools.pairwise(sorted(logs)):
        if place.rank == beside.rank:
            two = f"rank {place.rank} is device {place.index} and device {beside.index}"
            raise UsageError(f"{', '.join(map(str, folders))}: {two}: give the folders of one run")
    for place in logs:
        run.places[place.rank] = place
    run.ranks = max(run.ranks, len(run.places))
    run.places = places_of_all(run.places, run.ranks) | run.places
    open_ended = [
        any(isinstance(log, RunLog) and log.summary is None for log in each.values()) for each in logs.values()
    ]
    run.is_cut = not run.is_over and (run.is_cut or (bool(open_ended) and all(open_ended)))
    places = [run.places[rank] for rank in sorted(run.places)]
    return run, [device_of(place, logs.get(place, {}), run) for place in places]


def logs_of(folder: Path, place: Place) -> dict[str, RunLog | str]:
    """A rank's logs by part; for an unreadable log the reason."""
    return {part: read(log) for part in (*ALONE, VERIFIED, *TOGETHER) if has_begun(log := place.log(folder, part))}


def is_complete(folder: Path, place: Place) -> bool:
    """Whether the joint measurements are complete."""
    logs = logs_of(folder, place)
    return all(isinstance(log := logs.get(part), RunLog) and log.tier == "complete" for part in TOGETHER)


def _joined(one: Run, other: Run) -> Run:
    return Run(
        max(one.ranks, other.ranks),
        one.is_over or other.is_over,
        one.apart or other.apart,
        one.failures | other.failures,
        one.places | other.places,
        one.is_cut or other.is_cut,
    )


def has_begun(path: Path) -> bool:
    """Whether a log has content; a log without a whole line was killed before it began and counts as missing."""
    if not path.is_file():
        return path.exists()
    try:
        with path.open("rb") as file:
            return file.readline().endswith(b"\n")
    except OSError:
        return True  # reading it reports the error


def read(path: Path) -> RunLog | str:
    """A log, or why it cannot be read. A pipe with a log's name is refused, not waited for."""
    if not path.is_file():
        return f"cannot read {path}: it is no regular file"
    try:
        return read_run_log(path)
    except RunLogError as error:
        return str(error)


def device_of(place: Place, logs: Mapping[str, RunLog | str], run: Run) -> Device:
    """One device from its logs, by part."""
    device = Device(place.rank, place.node, place.index)
    reason = run.failures.get(place.rank, "")
    is_no_fault = reason.startswith((UNWRITTEN, UNMEASURABLE))
    failures, lacks = list[str](), list[str]()
    if reason:
        (lacks if is_no_fault else failures).append(reason)
    on_request = (VERIFIED,) if VERIFIED in logs else ()
    for part in ALONE + on_request + (TOGETHER if run.ranks > 1 and not run.apart else ()):
        log = logs.get(part)
        if isinstance(log, str):
            (lacks if is_no_fault else failures).append(log)
        elif log is not None:
            device = with_figures(device, part, log)
            failures += _wrong(part, log)
            if not is_no_fault:
                (lacks if run.is_cut and log.summary is None else failures).extend(_ended(part, log))
            lacks += _lacks(part, log)
        elif not reason:
            lacks.append(f"{part} was not measured")
    if reason:  # the reason explains all that is missing
        failures, lacks = (failures, lacks[:1]) if is_no_fault else (failures[:1], [])
    return replace(device, failures=tuple(dict.fromkeys(failures)), lacks=tuple(lacks))


def with_figures(device: Device, part: str, log: RunLog) -> Device:
    """The device with the figures of a log added."""
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
    """The name of a row's figure; collectives include the size."""
    problem = row.problem
    name = getattr(problem, "pattern", None) or getattr(problem, "direction", None)
    if name is None and hasattr(problem, "collective"):
        return f"{problem.collective} {row.shape}"
    return str(name) if name in UNITS else ""


def _with_ceilings(device: Device, log: RunLog) -> Device:
    found: dict[str, Ceiling] = {name: log.ceilings[name] for name in (BURST, SUSTAINED) if name in log.ceilings}
    hottest = found.get(SUSTAINED) or found.get(BURST)
    return replace(
        device,
        figures={**device.figures, **{name: each.rate for name, each in found.items()}},
        half_widths={name: each.interval.half_width / each.rate for name, each in found.items()},
        shapes={name: str(each.shape) for name, each in found.items()},
        conditions=hottest.conditions if hottest else device.conditions,
        throttled=throttled([row for row in log.measurements if row.phase == CONFIRM]),
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
    """Faults of a device: wrong results of the default kernel, or shapes that no kernel could run. In a find some
    candidates fail on any device.
    """
    default = log.header["kernel"].split()[0]
    for row in log.measurements:
        if row.status == "wrong_result" and (row.kernel == default or part == VERIFIED):
            yield f"wrong results in {part}: {row.reason}"
            return
    for rows in group_pairs(
        (None if part in ("find", VERIFIED) else (row.problem, row.shape), row) for row in log.measurements
    ).values():
        if not any(row.ok for row in rows) and rows[0].status != "unsupported":
            what = figure_name(rows[0]) or part
            yield f"{what}: {rows[0].status.replace('_', ' ')}, {rows[0].reason}"
            return


def _ended(part: str, log: RunLog) -> Iterable[str]:
    """An early end of a part that is the device's fault."""
    if log.summary is None:
        yield f"it was gone or killed while {part} was measured"
    elif log.summary["reason"] and log.summary["reason"] not in _NO_FAULTS:
        yield f"{part} ended: {log.summary['reason']}"


def _lacks(part: str, log: RunLog) -> Iterable[str]:
    summary: Mapping[str, Any] = log.summary or {}
    if part == "find":
        if ceilings := " and ".join(name for name in (BURST, SUSTAINED) if name not in log.ceilings):
            reason = str(summary.get("reason") or "it was not confirmed")
            yield f"no {ceilings} ceiling: {'interrupted ' if reason.startswith('by ') else ''}{reason}"
    elif part == "collective" and all(row.status == "unsupported" for row in log.measurements):
        yield f"no collectives: {log.measurements[0].reason if log.measurements else 'none was measured'}"
    elif str(summary.get("reason", "")).startswith("by "):
        yield f"{part} was interrupted {summary['reason']}"
