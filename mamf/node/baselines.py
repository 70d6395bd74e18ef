"""Expected figures of healthy devices, from baseline logs or from contributed ceilings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mamf.ceilings.contributed import contributed_ceilings
from mamf.errors import UsageError
from mamf.logs.run_log import RunLog, read_run_log
from mamf.node.comparing import Baseline
from mamf.node.figures import UNITS, Device
from mamf.node.gathering import read, with_figures


def baseline_of(paths: Sequence[Path]) -> dict[str, Baseline]:
    """Baselines by device name, from logs of find, bandwidth or copies: one card per uuid, or per log without a
    uuid. A later log of a card replaces the figures of an earlier one.
    """
    cards, dtypes = dict[tuple[str, str], Device](), dict[str, str]()
    for path in paths:
        log = read_run_log(path)
        plan, info = log.header["plan"], log.header["device"]
        name, key = str(info["name"]), str(info["uuid_hash"] or path)
        is_find = plan.get("command") == "find"
        own = with_figures(Device(0, 0, 0), "find" if is_find else "other", log)
        if not any(figure in UNITS for figure in own.figures):
            raise UsageError(f"{path} holds no figure that devices are compared by: give the log of a find")
        before = cards.get((name, key), Device(0, 0, 0))
        figures, half_widths = {**before.figures, **own.figures}, {**before.half_widths, **own.half_widths}
        cards[name, key] = replace(own, figures=figures, half_widths=half_widths)
        if is_find:
            dtypes[name] = plan["problem"]["dtype"]
    source = f"the baseline {', '.join(path.name for path in paths)}"
    return {
        name: Baseline({}, source, dtypes.get(name, ""), cards=[card for its, card in cards.items() if its[0] == name])
        for name in dict.fromkeys(name for name, _ in cards)
    }


def unfit(baselines: Mapping[str, Baseline], devices: Iterable[Device], headers: Mapping[str, Any]) -> dict[str, str]:
    """Why baselines do not apply to a run, by the baseline device's name. ``headers``: from ``headers_of``."""
    names = {device.name for device in devices}
    found = {}
    for name, baseline in baselines.items():
        measured_in = headers.get(name, {}).get("dtype")
        if name not in names:
            found[name] = f"{baseline.source} is of {name}, and no device here is one"
        elif baseline.dtype and measured_in and baseline.dtype != measured_in:
            found[name] = f"{baseline.source} is of {baseline.dtype}, and the devices were measured in {measured_in}"
    return found


def contributed_baselines(devices: Iterable[Device], headers: Mapping[str, Mapping[str, Any]]) -> dict[str, Baseline]:
    """Contributed figures for devices with these names, builds and settings. ``headers``: the device of a log and
    its dtype, by name.
    """
    found = {}
    for name in dict.fromkeys(device.name for device in devices):
        known = headers.get(name, {})
        rows = [row for row in contributed_ceilings() if row.device == name and row.dtype == known.get("dtype")]
        rows = [row for row in rows if (row.compute_units, row.power_limit_watts) == known.get("build")]
        if rows:
            figures = {row.regime: row.tflops for row in rows}
            found[name] = Baseline(figures, f"what was contributed for {name}", is_fastest=True)
    return found


def headers_of(folders: Sequence[Path]) -> dict[str, Mapping[str, Any]]:
    """The dtype, unit count and power limit of each device model with a find."""
    found: dict[str, Mapping[str, Any]] = {}
    for path in (path for folder in folders for path in folder.glob("*-find.jsonl")):
        log = read(path)
        if isinstance(log, RunLog):
            device, problem = log.header["device"], log.header["plan"]["problem"]
            build = (device["compute_units"], device["power_limit_watts"])
            found[str(device["name"])] = {"dtype": problem["dtype"], "build": build}
    return found
