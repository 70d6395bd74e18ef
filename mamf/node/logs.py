"""Read the folder that ``mamf node`` writes for a machine: a run log per device and part, and ``run.json``.

``run.json`` contains information that the logs cannot contain, such as why a process died. Reports of a run use only
these files, so they can be printed again later. A part is one kind of measurement of a device: ``find`` (its ceilings,
the fastest matmul rates), ``bandwidth``, ``copies`` to and from the host, ``peers`` (copies to the next device) and
``verify`` (checks of results).
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
from mamf.machine.privacy import scrub_text
from mamf.measurement import Measurement, group_pairs
from mamf.node.verdict import BURST, FIGURE_UNITS, SUSTAINED, Baseline, NodeDevice
from mamf.peaks import find_contributed_rates

#: The names of the parts that need only one device, in the order in which they are measured.
SINGLE_DEVICE_PARTS = ("find", "bandwidth", "copies")
#: The names of the parts that all devices measure together, after each device has measured its other parts.
MULTI_DEVICE_PARTS = ("peers",)
#: The name of the optional part that verifies results. It follows the other parts of single devices.
VERIFY_PART = "verify"
#: The name of the file in which the parent process stores its information about the run.
RUN_FILE_NAME = "run.json"
# The version of the format of run.json. The file contains this number.
_RUN_FILE_SCHEMA_VERSION = 2
_LOG_NAME_PATTERN = re.compile(r"device(\d{1,6})-([a-z]+)\.jsonl")
#: If the reason for a failure begins with one of these texts, the device did not cause the failure.
UNWRITTEN_LOG_REASON, UNMEASURABLE_REASON = "its log could not be written", "the request cannot be measured"
# The summary of a log says why a run ended early. If the reason begins with one of these texts, the device did not
# cause the early end.
_FAULTLESS_END_REASONS = ("by the user", "the budget ended", "by the caller")


@dataclass
class NodeRun:
    """The information about a run that the parent process of ``mamf node`` writes to run.json.

    - ``devices``: the indices of the devices on which the parent started a child process.
    - ``is_over``: whether the parent was still watching when the last device ended. If not, the parent was
      killed or interrupted, so an incomplete log is not the fault of the device.
    - ``separate_measurement_reason``: the reason why the devices did not measure at the same time; empty if they did.
    - ``failures``: the reasons why devices failed, by device index.
    """

    devices: Sequence[int] = ()
    is_over: bool = False
    separate_measurement_reason: str = ""
    failures: dict[int, str] = field(default_factory=dict)

    def write_run_file(self, folder: Path) -> None:
        record = {
            "schema": _RUN_FILE_SCHEMA_VERSION,
            "devices": list(self.devices),
            "is_over": self.is_over,
            "not_together": scrub_text(self.separate_measurement_reason),
            "failures": {str(index): scrub_text(reason) for index, reason in self.failures.items()},
        }
        write_file_atomically(folder / RUN_FILE_NAME, json.dumps(record, indent=1) + "\n")


def read_run_file(folder: Path) -> NodeRun | None:
    """Read run.json from a folder of ``mamf node``. Returns None if there is no such file, and raises RunLogError if
    ``mamf node`` did not write it.
    """
    path = folder / RUN_FILE_NAME
    if not path.is_file():  # do not open a pipe: reading it could block forever
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
        raise RunLogError(
            f"{path} was not written by 'mamf node' ({describe_error(error)}): delete it to read only the logs"
        ) from None


def make_log_path(folder: Path, index: int, part: str) -> Path:
    return folder / f"device{index}-{part}.jsonl"


def is_node_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder with files that ``mamf node`` wrote."""
    return path.is_dir() and (
        (path / RUN_FILE_NAME).exists() or any(_LOG_NAME_PATTERN.fullmatch(each.name) for each in path.iterdir())
    )


def read_node_folders(folders: Sequence[Path]) -> tuple[str, list[NodeDevice]]:
    """Read the results of all devices of one or more machines, one folder per machine.

    Returns why the devices did not measure at the same time (empty if they did), and the devices.
    """
    reasons, devices = list[str](), list[NodeDevice]()
    for node, folder in enumerate(folders):
        run, node_devices = read_node_folder(folder, node)
        reasons += [run.separate_measurement_reason] if run.separate_measurement_reason else []
        devices += node_devices
    return "; ".join(reasons), devices


def read_node_folder(folder: Path, node: int = 0, known_run: NodeRun | None = None) -> tuple[NodeRun, list[NodeDevice]]:
    """Read a folder of ``mamf node``. Return the information about the run on this machine, and its devices with
    results.

    - ``node``: the number of the machine, for labels.
    - ``known_run``: the run to use instead of the one in run.json.

    Raises UsageError if the folder has no files of ``mamf node``.
    """
    if not is_node_folder(folder):
        raise UsageError(
            f"{folder} {'has no logs of mamf node' if folder.exists() else 'does not exist'}: give a folder that "
            "'mamf node' wrote; 'mamf report' reads a folder of any logs"
        )
    run = known_run or read_run_file(folder) or NodeRun()
    with_logs = {int(name[1]) for path in folder.iterdir() if (name := _LOG_NAME_PATTERN.fullmatch(path.name))}
    indices = dict.fromkeys([*run.devices, *sorted(with_logs)])
    return run, [
        add_logs_to_device(NodeDevice(index, node), read_device_logs(folder, index), run, len(indices))
        for index in indices
    ]


def read_device_logs(folder: Path, index: int) -> dict[str, RunLog | str]:
    """Read the logs of a device, and return them by part of the run. Parts without a log are missing. For an
    unreadable log, the value is a string that says why mamf cannot read it.
    """
    return {
        part: log
        for part in (*SINGLE_DEVICE_PARTS, VERIFY_PART, *MULTI_DEVICE_PARTS)
        if (log := _read_log(make_log_path(folder, index, part))) is not None
    }


def _read_log(path: Path) -> RunLog | str | None:
    """Read a run log. If the log is unreadable, returns a string that says why. Returns None if the file is missing or
    its first line is incomplete.
    """
    if path.exists() and not path.is_file():  # do not open a pipe: reading it could block forever
        return f"cannot read {path}: it is not a regular file"
    try:
        with path.open("rb") as file:
            return read_run_log(path) if file.readline().endswith(b"\n") else None
    except FileNotFoundError:
        return None
    except (OSError, RunLogError) as error:
        return str(error)


def add_logs_to_device(
    device: NodeDevice, logs: Mapping[str, RunLog | str], run: NodeRun, device_count: int = 1
) -> NodeDevice:
    """Return a copy of ``device`` with its measured figures, its failures and its missing results.

    - ``logs``: the logs of the device by part, from ``read_device_logs``.
    - ``device_count``: the number of devices of the machine. If the machine has only one device, mamf expects no copies
      between devices.
    """
    reason = run.failures.get(device.index, "")
    is_faultless = reason.startswith((UNWRITTEN_LOG_REASON, UNMEASURABLE_REASON))
    failures, missing_results = list[str](), list[str]()
    if reason:
        (missing_results if is_faultless else failures).append(reason)
    for part in (
        *SINGLE_DEVICE_PARTS,
        *((VERIFY_PART,) if VERIFY_PART in logs else ()),
        *(MULTI_DEVICE_PARTS if device_count > 1 and not run.separate_measurement_reason else ()),
    ):
        log = logs.get(part)
        if isinstance(log, str):
            (missing_results if is_faultless else failures).append(log)
        elif log is not None:
            device = add_figures_of_log(device, part, log)
            failures += _yield_faults(part, log)
            if not is_faultless:
                (failures if run.is_over or log.summary else missing_results).extend(_yield_early_end_reason(part, log))
            missing_results += _yield_missing_results(part, log)
        elif not reason:
            missing_results.append(f"there is no log of {part}")
    # A failure explains all missing results. So if the device caused the failure, report only the failure. If the
    # device did not cause it, report the reason for the failure as the only missing result.
    if reason:
        failures, missing_results = (failures, missing_results[:1]) if is_faultless else (failures[:1], [])
    return replace(device, failures=tuple(dict.fromkeys(failures)), lacks=tuple(missing_results))


def add_figures_of_log(device: NodeDevice, part: str, log: RunLog) -> NodeDevice:
    """Return a copy of ``device`` with the name, uuid, figures and throttling from the log of a part.

    The figures from a log of ``find`` are ceilings (confirmed matmul rates). The figures from any other log are the
    highest rates in the log.
    """
    info = log.header["device"]
    device = replace(device, name=str(info["name"]), uuid_hash=info["uuid_hash"])
    if part == "find":
        return _add_ceilings_of_log(device, log)
    fastest_rows: dict[str, Measurement] = {}
    for row in log.measurements:
        name = find_figure_name(row) if row.ok else ""
        if name and (name not in fastest_rows or row.best_rate > fastest_rows[name].best_rate):
            fastest_rows[name] = row
    merged = {
        reason: max(share, device.throttled.get(reason, 0.0))
        for reason, share in merge_throttle_shares(log.measurements).items()
    }
    return replace(
        device,
        figures={**device.figures, **{name: row.best_rate for name, row in fastest_rows.items()}},
        half_widths={
            **device.half_widths,
            **{name: row.relative_half_width for name, row in fastest_rows.items()},
        },
        throttled={**device.throttled, **merged},
        verified_problem_count=(
            sum(row.ok for row in log.measurements) if part == VERIFY_PART else device.verified_problem_count
        ),
    )


def find_figure_name(row: Measurement) -> str:
    """Return the name of the figure that a row measures, such as ``read`` or ``to_host``, or an empty string if the row
    measures no figure by which devices are compared.
    """
    name = getattr(row.problem, "pattern", None) or getattr(row.problem, "direction", None)
    return str(name) if name in FIGURE_UNITS else ""


def _add_ceilings_of_log(device: NodeDevice, log: RunLog) -> NodeDevice:
    ceilings: dict[str, Ceiling] = {name: log.ceilings[name] for name in (BURST, SUSTAINED) if name in log.ceilings}
    sensor_ceiling = ceilings.get(SUSTAINED) or ceilings.get(BURST)
    info = log.header["device"]
    return replace(
        device,
        dtype=log.plan.problem.dtype,
        build=(info["compute_units"], info["power_limit_watts"]),
        figures={**device.figures, **{name: each.rate for name, each in ceilings.items()}},
        half_widths={
            **device.half_widths,
            # As in rows: half the interval of the time, as a share of the time; 1 if the interval is unknown.
            **{
                name: each.rate * (1 / each.interval.low - 1 / each.interval.high) / 2
                if each.interval.is_known
                else 1.0
                for name, each in ceilings.items()
            },
        },
        conditions=sensor_ceiling.conditions if sensor_ceiling else device.conditions,
        throttled=merge_throttle_shares([row for row in log.measurements if row.phase == CONFIRM_PHASE]),
    )


def merge_throttle_shares(rows: Iterable[Measurement]) -> dict[str, float]:
    """Return the share of time in which the device was throttled, by reason.

    For each reason, compute the mean share over the successful measurements of each regime (burst or sustained), and
    return the larger mean.
    """
    share_by_reason: dict[str, float] = {}
    rows = [row for row in rows if row.ok]
    for regime in dict.fromkeys(row.regime for row in rows):
        regime_shares = [row.conditions.throttle_shares for row in rows if row.regime == regime]
        for reason in sorted({reason for each in regime_shares for reason in each}):
            share = sum(each.get(reason, 0.0) for each in regime_shares) / len(regime_shares)
            share_by_reason[reason] = round(max(share, share_by_reason.get(reason, 0.0)), 4)
    return share_by_reason


def _yield_faults(part: str, log: RunLog) -> Iterable[str]:
    """Yield the first fault of a device that a log shows, or nothing if it shows no fault.

    A wrong result of the default kernel is a fault, and in verification a wrong result of any kernel. A shape that no
    kernel could run is a fault too. But in a search (``find``) and in verification, some measurements fail even on
    healthy devices. There, failed measurements are a fault only if all measurements failed.
    """
    default = log.header["kernel"].split()[0]
    for row in log.measurements:
        if row.status == "wrong_result" and (row.kernel == default or part == VERIFY_PART):
            yield f"wrong results in {part}: {row.reason}"
            return
    for rows in group_pairs(
        (None if part in ("find", VERIFY_PART) else (row.problem, row.shape), row) for row in log.measurements
    ).values():
        if not any(row.ok for row in rows) and rows[0].status != "unsupported":
            yield f"{find_figure_name(rows[0]) or part}: {rows[0].status.replace('_', ' ')}, {rows[0].reason}"
            return


def _yield_early_end_reason(part: str, log: RunLog) -> Iterable[str]:
    """Yield the reason why the measurement of a part ended early if this is the fault of the device."""
    if log.summary is None:
        yield f"its process disappeared or was killed during {part}"
    elif log.summary["reason"] and log.summary["reason"] not in _FAULTLESS_END_REASONS:
        yield f"the measurement of {part} ended early: {log.summary['reason']}"


def _yield_missing_results(part: str, log: RunLog) -> Iterable[str]:
    """Yield a line that says which ceilings a part did not measure, or that the part was cut short for a reason that
    is not the fault of the device.
    """
    summary: Mapping[str, Any] = log.summary or {}
    if part == "find":
        if ceilings := " and ".join(name for name in (BURST, SUSTAINED) if name not in log.ceilings):
            reason = str(summary.get("reason") or "it was not confirmed")
            yield f"no {ceilings} ceiling: {'interrupted ' if reason.startswith('by ') else ''}{reason}"
    elif (reason := str(summary.get("reason", ""))).startswith(_FAULTLESS_END_REASONS):
        yield f"the measurement of {part} was cut short: {reason}"


# -- baselines ---------------------------------------------------------------------------------------------------------


def read_baseline(paths: Sequence[Path]) -> Baseline:
    """Read a baseline (cards with which devices are compared) from logs of find, bandwidth or copies.

    Logs with the same uuid describe one card, and the figures of later logs replace those of earlier logs. A log
    without a uuid describes a separate card. Raises UsageError for a log without a figure by which devices are
    compared, and RunLogError for an unreadable log.
    """
    cards = dict[tuple[str, str], NodeDevice]()
    for path in paths:
        log = read_run_log(path)
        info = log.header["device"]
        key = str(info["name"]), str(info["uuid_hash"] or path)
        part = "find" if log.plan.is_search else "other"
        if not any(figure in FIGURE_UNITS for figure in add_figures_of_log(NodeDevice(0), part, log).figures):
            raise UsageError(f"{path} has no figure with which mamf can compare devices: give a log of 'mamf find'")
        cards[key] = add_figures_of_log(cards.get(key, NodeDevice(0)), part, log)
    return Baseline(f"the baseline {', '.join(path.name for path in paths)}", [*cards.values()])


def make_contributed_baseline(devices: Iterable[NodeDevice]) -> Baseline:
    """Make a baseline from the contributed ceilings in results/. Use only ceilings that have the same device name,
    build (compute units and power limit) and data type as one of ``devices``.
    """
    cards = []
    for name, (units, watts), dtype in {(device.name, device.build, device.dtype) for device in devices}:
        figures = {
            row.regime: row.rate for row in find_contributed_rates(name, units, dtype) if row.power_limit_watts == watts
        }
        cards += [NodeDevice(0, name=name, dtype=dtype, figures=figures)] if figures else []
    return Baseline("the contributed ceilings of this model", cards)
