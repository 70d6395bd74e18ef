"""Where ``mamf find`` leaves its logs, and ``mamf.peak`` finds them again: a folder of the user's.

A file is of one card as it is set and driven now: the hashed uuid, unit count, power limit, driver, torch and dtype
make its name, so that whatever changes them makes the figure unknown again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mamf.backend import SIMULATED, DeviceInfo
from mamf.ceilings.ceiling import Ceiling
from mamf.ceilings.known import named_dtype
from mamf.errors import MamfError, first_line
from mamf.files import make_folder, write_whole
from mamf.logs.run_log import read_run_log
from mamf.machine.environment import version_in_use

VARIABLE = "MAMF_CACHE"


@dataclass(frozen=True)
class FoundCeiling:
    """``started``: of the find, as its log says it."""

    ceiling: Ceiling
    started: str
    path: Path


def folder() -> Path:
    """What MAMF_CACHE names, else ``mamf`` in the platform's folder for caches."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else _caches() / "mamf"


def _caches() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def cache_ceiling(path: Path, warn: Callable[[str], object]) -> None:
    """Copy the log of a find to where ``cached_ceiling`` looks, once for each of its ceilings. Errors become warnings.

    Interrupted finds, simulated devices and data other than normally distributed values are not cached.
    """
    try:
        _copy_to_cache(path)
    except (MamfError, OSError) as error:
        warn(f"mamf peak will not know of this: {first_line(error)}")


def _copy_to_cache(path: Path) -> None:
    log = read_run_log(path)
    info = DeviceInfo(**log.header["device"])
    plan = log.plan
    if not plan.is_search or info.backend == SIMULATED:
        return
    if log.tier != "complete" or plan.problem.data != "normal":
        return
    torch = log.header["environment"]["packages"].get("torch")
    make_folder(folder(), f"; name another folder by {VARIABLE}")
    content = path.read_bytes()
    for regime, ceiling in log.ceilings.items():
        path = _file(info, torch, named_dtype(ceiling.problem), regime)
        if not plan.searches[0].is_quick or not path.exists():  # a thorough find is not replaced by a quick one
            write_whole(path, content)


def cached_ceiling(info: DeviceInfo, dtype: str, regime: str) -> FoundCeiling | None:
    """What a find on this device left. ``dtype``: as ``named_dtype`` writes it. Raises RunLogError for a broken log."""
    path = _file(info, version_in_use("torch"), dtype, regime)
    if not path.exists():
        return None
    log = read_run_log(path)
    ceiling = log.ceilings.get(regime)
    return None if ceiling is None else FoundCeiling(ceiling, str(log.header["started"]), path)


def _file(info: DeviceInfo, torch: str | None, dtype: str, regime: str) -> Path:
    # A device without an uuid is known by its place: homes are shared by machines.
    card = info.uuid_hash or [platform.node(), info.index]
    key = [info.backend, info.name, card, info.compute_units, info.power_limit_watts, info.driver, torch, dtype]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return folder() / f"{digest}-{regime}.jsonl"
