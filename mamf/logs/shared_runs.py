"""Join the logs of a shared run into one log. In a shared run, several devices or processes divide the shapes among
them, and each writes its own log. If a device fails during the run, its shapes are divided among the other devices.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mamf.backend import DeviceInfo
from mamf.errors import UsageError
from mamf.logs.recording import make_plan_record
from mamf.logs.records import get_utc_time, make_ceiling_record
from mamf.logs.run_log import RunLog, add_device_speeds, keep_latest_rows, read_run_log
from mamf.logs.writer import RunLogWriter
from mamf.measurement import Measurement, group_pairs
from mamf.plans import FIND, SWEEP, Plan

#: The file name of a log of a shared run, such as ``device0.jsonl``, ``rank3-2.jsonl`` or ``device0-float16.jsonl``.
#: Logs of ``mamf node`` do not match, because their names end with the name of a test, which has no digit.
_LOG_NAME_PATTERN = re.compile(r"(device|rank)(\d{1,6})(-\w*\d\w*)?\.jsonl")
#: The fields of a plan in which the logs of one shared run may differ.
_FIELDS_THAT_MAY_DIFFER = {"shapes", "layers", "searches", "budget_seconds"}


def find_shared_run_logs(folder: Path, device: int | None = None) -> list[Path]:
    """Return the paths of the logs of a shared run in a folder, sorted by device. Returns an empty list if the folder
    has no shared run.

    ``device``: return only the logs of the device or rank with this number.
    """
    named = [
        (match, path)
        for path in folder.iterdir()
        if (match := _LOG_NAME_PATTERN.fullmatch(path.name)) and device in (None, int(match[2]))
    ]
    return [path for _, path in sorted(named, key=lambda each: (int(each[0][2]), each[0][3] or ""))]


def is_shared_run_folder(path: Path) -> bool:
    return path.is_dir() and bool(find_shared_run_logs(path))


def read_log_or_shared_run(*paths: Path) -> RunLog:
    """Read one log, or read the logs and folders of a shared run and join them into one log.

    Raises RunLogError for a log that cannot be read, and UsageError for logs that do not belong to one run.
    """
    if len(paths) == 1 and not paths[0].is_dir():
        return read_run_log(paths[0])
    files = [each for path in paths for each in (find_shared_run_logs(path) if path.is_dir() else [path])]
    if not files:
        raise UsageError(
            f"{paths[0]} has no logs of a shared run, such as device0.jsonl or rank0.jsonl: pass another path"
        )
    return join_logs([read_run_log(each) for each in files], paths[0])


def join_logs(logs: Sequence[RunLog], path: Path) -> RunLog:
    """Join the logs of one run into one log, in which each row has the index and the relative speed of its device.

    The ceilings are those of the first device. ``path``: the folder of the logs, which becomes the path of the joined
    log. Raises UsageError for logs that do not belong to one run.
    """
    indices = _assign_device_numbers(logs)
    by_start = sorted(logs, key=lambda log: (log.header.get("started", ""), indices[log.path]))
    first = min(by_start, key=lambda log: indices[log.path])
    plan = _join_plans(logs, first)
    infos = {indices[log.path]: DeviceInfo(**log.header["device"]) for log in logs}
    rows = [replace(row, device_index=indices[log.path]) for log in by_start for row in log.measurements]
    if plan.kind == SWEEP:
        rows = keep_latest_rows(rows)
    return replace(
        first,
        path=path,
        header={
            **first.header,
            "plan": make_plan_record(plan),
            "devices": [asdict(replace(infos[index], index=index)) for index in sorted(infos)],
            "command": str(first.header.get("command", "")).partition(" --share ")[0],
        },
        measurements=add_device_speeds(rows),
        all_rows=add_device_speeds(
            [replace(row, device_index=indices[log.path]) for log in by_start for row in log.all_rows]
        ),
        summary=_summarize_run(logs, plan, rows),
        is_truncated=any(log.is_truncated for log in logs),
        part_logs=list(logs),
    )


def _assign_device_numbers(logs: Sequence[RunLog]) -> dict[Path, int]:
    """Choose a number for the device of each log. Returns the numbers by path of the log.

    The number is the index of the device if all indices differ. Otherwise the devices are in several machines, and get
    consecutive numbers from 0.
    """
    infos = {log.path: log.header["device"] for log in logs}
    cards = {path: (info["index"], info["uuid_hash"] or path.stem.partition("-")[0]) for path, info in infos.items()}
    distinct = list(dict.fromkeys(cards.values()))
    is_unique = len({index for index, _ in distinct}) == len(distinct)
    return {path: card[0] if is_unique else distinct.index(card) for path, card in cards.items()}


def _join_plans(logs: Sequence[RunLog], first: RunLog) -> Plan:
    """Return the plan of the whole shared run, with the shapes of all logs. Raises UsageError if the plans of the logs
    differ in more than their shapes.
    """
    models = dict.fromkeys(log.header["device"]["name"] for log in logs)
    if len(models) > 1:
        raise UsageError(
            f"the logs are not from one run: their devices are {', '.join(models)}; pass the logs of one run"
        )
    plans = [log.plan for log in logs]
    if any(_get_common_fields(plan) != _get_common_fields(first.plan) for plan in plans):
        raise UsageError(
            "the logs are not from one run, because their plans differ: show one log at a time, or use 'mamf report'"
        )
    is_shared = (
        all(plan.is_shared for plan in plans)
        if first.plan.kind == SWEEP
        # The plan of a search does not say whether the run is shared, but the names of its logs do.
        else first.plan.kind != FIND or all(_LOG_NAME_PATTERN.fullmatch(log.path.name) for log in logs)
    )
    if len(logs) > 1 and not is_shared:
        raise UsageError("the logs come from separate runs, not from one run: use 'mamf compare' to compare them")
    if first.plan.kind != SWEEP:
        return first.plan
    layers = {shape: layer for plan in plans for shape, layer in zip(plan.shapes, plan.layers, strict=False)}
    shapes = tuple(dict.fromkeys(shape for plan in plans for shape in plan.shapes))
    return replace(
        first.plan,
        shapes=shapes,
        layers=tuple(layers.get(each, "") for each in shapes if layers),
        options=replace(first.plan.options, rank=0, ranks=0),
    )


def _get_common_fields(plan: Plan) -> dict[str, Any]:
    """Return the fields of a plan, by name, that must be equal in all logs of a shared run.

    For ``mamf find``, these are only the kind and the operation, because the grid of shapes depends on the device.
    """
    if plan.kind == FIND:
        return {"kind": FIND, "operation": plan.operation}
    options = replace(plan.options, reference=None, rank=0, ranks=0) if plan.kind == SWEEP else plan.options
    return {
        **{name: value for name, value in vars(plan).items() if name not in _FIELDS_THAT_MAY_DIFFER},
        "options": options,
    }


def _summarize_run(logs: Sequence[RunLog], plan: Plan, rows: Sequence[Measurement]) -> dict[str, Any]:
    """Make the summary of the whole shared run from the summaries of its logs.

    A sweep is complete if all of its rows are measured, even if some logs were interrupted.
    """
    names_by_reason = group_pairs(
        (str(log.summary["reason"]) if log.summary else "it was killed", log.path.stem) for log in logs
    )
    if plan.kind == SWEEP:
        own = [row for row in rows if not row.is_reference and not row.phase]
        left = max(0, len(plan.list_row_keys()) - len({row.key for row in own}))
        measured, is_complete = sum(row.ok for row in own), not left
    else:
        left, measured = 0, sum(log.summary["measured"] for log in logs if log.summary)
        is_complete = all(log.tier == "complete" for log in logs)
    texts = (
        reason if len(names) == len(logs) else f"{', '.join(names)}: {reason}"
        for reason, names in names_by_reason.items()
        if reason
    )
    return {
        "status": "complete" if is_complete else "interrupted",
        "reason": "" if is_complete else "; ".join(texts),
        "measured": measured,
        "left": left,
        "elapsed_seconds": max((log.summary["elapsed_seconds"] for log in logs if log.summary), default=0.0),
        "best": {},
    }


# -- giving the shapes of lost devices to other devices ----------------------------------------------------------------


def divide_missing_shapes(folder: Path, logs: dict[int, list[RunLog]], remaining_devices: Sequence[int]) -> None:
    """Divide the shapes that failed devices did not measure among the remaining devices.

    Starts a new log for each remaining device that gets some of these shapes. ``logs``: the logs of each device, to
    which this function adds the new logs.
    """
    every = [log for each in logs.values() for log in each if log.plan.is_shared]
    owned = {
        shape
        for device in remaining_devices
        for log in logs[device]
        if log.plan.is_shared
        for shape in log.plan.list_assigned_shapes()
    }
    for log in every:
        plan, rows = log.plan, {row.key for row in log.rows_kept_on_resume if not row.is_reference and not row.phase}
        needed = len(plan.regimes) * len(plan.problems) * len(plan.kernels)
        owned |= {shape for shape in plan.list_assigned_shapes() if sum(key[2] == shape for key in rows) >= needed}
    missing = list(dict.fromkeys(shape for log in every for shape in log.plan.shapes if shape not in owned))
    for place, device in enumerate(remaining_devices):
        if shapes := missing[place :: len(remaining_devices)]:
            logs[device].append(_start_log_of_missing_shapes(folder, logs[device][0], shapes))


def _start_log_of_missing_shapes(folder: Path, device_log: RunLog, shapes: Sequence[Any]) -> RunLog:
    """Start and return a log in which a device measures ``shapes``. The log has the header and the ceilings of
    ``device_log``, an earlier log of the device.
    """
    plan = device_log.plan
    layers = dict(zip(plan.shapes, plan.layers, strict=False))
    rest = replace(
        plan,
        shapes=tuple(shapes),
        layers=tuple(layers[shape] for shape in shapes if layers),
        options=replace(plan.options, rank=0, ranks=1),
    )
    header = device_log.header | {"plan": make_plan_record(rest), "started": get_utc_time()}
    with RunLogWriter.create(
        folder / f"device{device_log.header['device']['index']}.jsonl", header, may_add_number_to_name=True
    ) as log:
        for ceiling in device_log.matmul_ceilings.values():
            log.write("ceiling", make_ceiling_record(ceiling))
    return read_run_log(log.path)
