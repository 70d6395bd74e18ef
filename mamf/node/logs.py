"""Reads the folder that ``mamf node`` writes: a log per device and part, and ``run.json``.

``run.json`` has what the logs cannot have, such as why a process died. Reports use only these files, so they can be
printed again later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mamf.ceilings.ceiling import CONFIRM_PHASE, Ceiling
from mamf.errors import RunLogError, UsageError, describe_error
from mamf.files import write_file_atomically
from mamf.logs.run_log import RunLog, read_run_log
from mamf.machine.privacy import scrub
from mamf.measurement import Measurement, group_pairs
from mamf.node.verdict import BURST, SUSTAINED, UNITS, Baseline, Device
from mamf.peaks import find_contributed_rates

#: The parts of a device's run in order, with one log each: first those of a single device, then those of all together.
ALONE = ("find", "bandwidth", "copies")
TOGETHER = ("peers",)
#: An optional part, after those of ALONE.
VERIFIED = "verify"
RUN = "run.json"
_SCHEMA = 2
_LOG_NAME = re.compile(r"device(\d{1,6})-([a-z]+)\.jsonl")
#: Failures that begin with these words are not the device's fault.
UNWRITTEN, UNMEASURABLE = "its log could not be written", "the request cannot be measured"
# If the reason in a summary begins with these words, the run ended early, but the device is not at fault.
_FAULTLESS_REASONS = ("by the user", "the budget ended", "by the caller")


@dataclass
class NodeRun:
    """What the parent process knows: the devices it started, why some failed, and why they did not measure together.

    ``is_over``: whether the parent watched every device until its end. If not, the parent was killed itself, so an
    incomplete log is not the device's fault.
    """

    devices: Sequence[int] = ()
    is_over: bool = False
    not_together: str = ""
    failures: dict[int, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        record = {
            "schema": _SCHEMA,
            "devices": list(self.devices),
            "is_over": self.is_over,
            "not_together": scrub(self.not_together),
            "failures": {str(index): scrub(reason) for index, reason in self.failures.items()},
        }
        write_file_atomically(folder / RUN, json.dumps(record, indent=1) + "\n")


def read_run(folder: Path) -> NodeRun | None:
    """Read run.json; None if it does not exist. Raises RunLogError for a file that ``mamf node`` did not write."""
    path = folder / RUN
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return NodeRun(
            [int(index) for index in record["devices"]],
            bool(record["is_over"]),
            str(record["not_together"]),
            {int(index): str(reason) for index, reason in record["failures"].items()},
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{path} was not written by 'mamf node' ({describe_error(error)}): delete it to read only the logs"
        raise RunLogError(reason) from None


def log_path(folder: Path, index: int, part: str) -> Path:
    return folder / f"device{index}-{part}.jsonl"


def is_node_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder that ``mamf node`` wrote."""
    return path.is_dir() and ((path / RUN).exists() or any(_LOG_NAME.fullmatch(each.name) for each in path.iterdir()))


def read_nodes(folders: Sequence[Path]) -> tuple[str, list[Device]]:
    """Read the devices of one or more nodes. The text says why devices did not measure together, empty if they did."""
    reasons, devices = list[str](), list[Device]()
    for node, folder in enumerate(folders):
        run, node_devices = read_node(folder, node)
        reasons += [run.not_together] if run.not_together else []
        devices += node_devices
    return "; ".join(reasons), devices


def read_node(folder: Path, node: int = 0, known: NodeRun | None = None) -> tuple[NodeRun, list[Device]]:
    """Read a run and its devices from a folder. ``node``: the node's number. ``known``: the run, instead of run.json.

    Raises UsageError if the folder has no files of ``mamf node``.
    """
    if not is_node_folder(folder):
        raise UsageError(f"{folder} has no logs of 'mamf node': name a folder that 'mamf node' wrote")
    run = known or read_run(folder) or NodeRun()
    names = (_LOG_NAME.fullmatch(path.name) for path in folder.iterdir())
    indices = dict.fromkeys([*run.devices, *sorted(int(each[1]) for each in names if each)])
    return run, [
        read_device(Device(index, node), read_device_logs(folder, index), run, len(indices)) for index in indices
    ]


def read_device_logs(folder: Path, index: int) -> dict[str, RunLog | str]:
    """Read a device's logs by part. For an unreadable log the value is the reason."""
    logs = {part: _read_log(log_path(folder, index, part)) for part in (*ALONE, VERIFIED, *TOGETHER)}
    return {part: log for part, log in logs.items() if log is not None}


def _read_log(path: Path) -> RunLog | str | None:
    """Read a log. Returns the reason if it is unreadable, and None if it is missing or has not one complete line."""
    if not path.exists():
        return None
    if not path.is_file():  # reading a pipe would block forever
        return f"cannot read {path}: it is not a regular file"
    try:
        with path.open("rb") as file:
            return read_run_log(path) if file.readline().endswith(b"\n") else None
    except (OSError, RunLogError) as error:
        return str(error)


def read_device(device: Device, logs: Mapping[str, RunLog | str], run: NodeRun, count: int = 1) -> Device:
    """Add figures, failures and missing parts to a device, from its logs by part. ``count``: number of devices."""
    reason = run.failures.get(device.index, "")
    is_no_fault = reason.startswith((UNWRITTEN, UNMEASURABLE))
    failures, lacks = list[str](), list[str]()
    if reason:
        (lacks if is_no_fault else failures).append(reason)
    on_request = (VERIFIED,) if VERIFIED in logs else ()
    for part in ALONE + on_request + (TOGETHER if count > 1 and not run.not_together else ()):
        log = logs.get(part)
        if isinstance(log, str):
            (lacks if is_no_fault else failures).append(log)
        elif log is not None:
            device = add_figures(device, part, log)
            failures += _find_faults(part, log)
            if not is_no_fault:
                (failures if run.is_over or log.summary else lacks).extend(_find_early_end(part, log))
            lacks += _find_missing(part, log)
        elif not reason:
            lacks.append(f"there is no log of {part}")
    if reason:  # it explains everything that is missing
        failures, lacks = (failures, lacks[:1]) if is_no_fault else (failures[:1], [])
    return replace(device, failures=tuple(dict.fromkeys(failures)), lacks=tuple(lacks))


def add_figures(device: Device, part: str, log: RunLog) -> Device:
    """Return the device with the figures of a log added."""
    info = log.header["device"]
    device = replace(device, name=str(info["name"]), uuid_hash=info["uuid_hash"])
    if part == "find":
        return _add_ceilings(device, log)
    fastest: dict[str, Measurement] = {}
    for row in log.measurements:
        name = figure_name(row) if row.ok else ""
        if name and (name not in fastest or row.best_rate > fastest[name].best_rate):
            fastest[name] = row
    best = {name: row.best_rate for name, row in fastest.items()}
    half_widths = {name: row.relative_half_width for name, row in fastest.items()}
    shares = merge_throttle_shares(log.measurements)
    merged = {reason: max(share, device.throttled.get(reason, 0.0)) for reason, share in shares.items()}
    return replace(
        device,
        figures={**device.figures, **best},
        half_widths={**device.half_widths, **half_widths},
        throttled={**device.throttled, **merged},
    )


def figure_name(row: Measurement) -> str:
    """Return the name of the figure that a row measures, or an empty string if devices are not compared by it."""
    name = getattr(row.problem, "pattern", None) or getattr(row.problem, "direction", None)
    return str(name) if name in UNITS else ""


def _add_ceilings(device: Device, log: RunLog) -> Device:
    ceilings: dict[str, Ceiling] = {name: log.ceilings[name] for name in (BURST, SUSTAINED) if name in log.ceilings}
    hottest = ceilings.get(SUSTAINED) or ceilings.get(BURST)
    info = log.header["device"]
    return replace(
        device,
        dtype=log.plan.problem.dtype,
        build=(info["compute_units"], info["power_limit_watts"]),
        figures={**device.figures, **{name: each.rate for name, each in ceilings.items()}},
        half_widths={
            **device.half_widths,
            **{name: each.interval.half_width / each.rate for name, each in ceilings.items()},
        },
        conditions=hottest.conditions if hottest else device.conditions,
        throttled=merge_throttle_shares([row for row in log.measurements if row.phase == CONFIRM_PHASE]),
    )


def merge_throttle_shares(rows: Iterable[Measurement]) -> dict[str, float]:
    """Return the share of time that rows were throttled, by reason: the mean of a regime, of the worst regime."""
    merged: dict[str, float] = {}
    rows = [row for row in rows if row.ok]
    for regime in dict.fromkeys(row.regime for row in rows):
        regime_shares = [row.conditions.throttle_shares for row in rows if row.regime == regime]
        for reason in sorted({reason for each in regime_shares for reason in each}):
            share = sum(each.get(reason, 0.0) for each in regime_shares) / len(regime_shares)
            merged[reason] = round(max(share, merged.get(reason, 0.0)), 4)
    return merged


def _find_faults(part: str, log: RunLog) -> Iterable[str]:
    """Yield faults of a device: wrong results of the default kernel, or a shape that no kernel could run.

    In a find some candidates fail on any device, so there it is a fault only if all of them failed.
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


def _find_early_end(part: str, log: RunLog) -> Iterable[str]:
    """Yield the reason why a part ended early, if the device is at fault."""
    if log.summary is None:
        yield f"its process disappeared or was killed during {part}"
    elif log.summary["reason"] and log.summary["reason"] not in _FAULTLESS_REASONS:
        yield f"{part} ended: {log.summary['reason']}"


def _find_missing(part: str, log: RunLog) -> Iterable[str]:
    """Yield each ceiling or row that a part did not measure, with the reason, if the device is not at fault."""
    summary: Mapping[str, Any] = log.summary or {}
    if part == "find":
        if ceilings := " and ".join(name for name in (BURST, SUSTAINED) if name not in log.ceilings):
            reason = str(summary.get("reason") or "it was not confirmed")
            yield f"no {ceilings} ceiling: {'interrupted ' if reason.startswith('by ') else ''}{reason}"
    elif (reason := str(summary.get("reason", ""))).startswith(_FAULTLESS_REASONS):
        yield f"{part} was cut short: {reason}"


# -- baselines ---------------------------------------------------------------------------------------------------------


def read_baseline(paths: Sequence[Path]) -> Baseline:
    """Read a baseline from logs of find, bandwidth or copies. Logs with the same uuid describe one card: figures of
    later logs replace earlier ones. A log without a uuid is a separate card.

    Raises UsageError for a log without a figure to compare, and RunLogError for an unreadable one.
    """
    cards = dict[tuple[str, str], Device]()
    for path in paths:
        log = read_run_log(path)
        info = log.header["device"]
        key = str(info["name"]), str(info["uuid_hash"] or path)
        part = "find" if log.plan.is_search else "other"
        if not any(figure in UNITS for figure in add_figures(Device(0), part, log).figures):
            raise UsageError(f"{path} has no figure with which mamf can compare devices: give a log of 'mamf find'")
        cards[key] = add_figures(cards.get(key, Device(0)), part, log)
    return Baseline(f"the baseline {', '.join(path.name for path in paths)}", [*cards.values()])


def make_contributed_baseline(devices: Iterable[Device]) -> Baseline:
    """Return a baseline from the contributed ceilings for the names, builds and dtypes of these devices."""
    cards = []
    for name, build, dtype in {(device.name, device.build, device.dtype) for device in devices}:
        rows = find_contributed_rates(name, build[0], dtype)
        figures = {row.regime: row.rate for row in rows if row.power_limit_watts == build[1]}
        cards += [Device(0, name=name, dtype=dtype, figures=figures)] if figures else []
    return Baseline("the contributed ceilings of this model", cards)
