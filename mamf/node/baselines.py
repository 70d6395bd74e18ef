"""What a healthy device should give: by logs that somebody names, or by what was contributed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mamf.contribution.contributed import contributed_ceilings
from mamf.errors import UsageError
from mamf.logs.run_log import RunLog, read_run_log
from mamf.node.comparing import Baseline
from mamf.node.figures import UNITS, Device
from mamf.node.gathering import read, with_figures


def baseline_of(paths: Sequence[Path]) -> dict[str, Baseline]:
    """What logs of find, bandwidth or copies say that a device of their kind gives, by its name."""
    found: dict[str, Baseline] = {}
    told = f"the baseline {', '.join(path.name for path in paths)}"
    for path in paths:
        log = read_run_log(path)
        plan, name = log.header["plan"], str(log.header["device"]["name"])
        is_find = plan.get("command") == "find"
        figures = with_figures(Device(0, 0, 0), "find" if is_find else "other", log).figures
        own = {figure: rate for figure, rate in figures.items() if figure in UNITS}
        if not own:
            raise UsageError(f"{path} holds no figure that devices are compared by: give the log of a find")
        before = found.get(name, Baseline({}, told))
        dtype = plan["problem"]["dtype"] if is_find else before.dtype
        found[name] = replace(before, figures={**before.figures, **own}, dtype=dtype)
    return found


def unfit(baselines: Mapping[str, Baseline], devices: Iterable[Device], headers: Mapping[str, Any]) -> dict[str, str]:
    """Why a baseline tells nothing of a run's devices, by the name of its own. ``headers``: of ``headers_of``."""
    names = {device.name for device in devices}
    found = {}
    for name, baseline in baselines.items():
        measured_in = headers.get(name, {}).get("dtype")
        if name not in names:
            found[name] = f"{baseline.told} is of {name}, and no device here is one"
        elif baseline.dtype and measured_in and baseline.dtype != measured_in:
            found[name] = f"{baseline.told} is of {baseline.dtype}, and the devices were measured in {measured_in}"
    return found


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
        log = read(path)
        if isinstance(log, RunLog):
            device, problem = log.header["device"], log.header["plan"]["problem"]
            build = (device["compute_units"], device["power_limit_watts"])
            found[str(device["name"])] = {"dtype": problem["dtype"], "build": build}
    return found
