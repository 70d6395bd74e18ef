"""The user's cache of ceilings: ``mamf find`` writes its logs there and ``mamf.peak`` reads them.

File names hash the uuid, unit count, power limit, driver, torch version and dtype, so a change of any of these
invalidates the cached ceiling.
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
from mamf.ceilings.share import label_dtype
from mamf.errors import MamfError, first_line
from mamf.files import make_folder, write_whole
from mamf.logs.run_log import read_run_log
from mamf.machine.environment import version_in_use

VARIABLE = "MAMF_CACHE"


@dataclass(frozen=True)
class FoundCeiling:
    """``started``: when the find began, from its log; ``tier``: of the log."""

    ceiling: Ceiling
    started: str
    path: Path
    tier: str


def folder() -> Path:
    """The folder in MAMF_CACHE, else ``mamf`` in the platform's cache folder."""
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
        warn(f"mamf peak cannot use this ceiling: {first_line(error)}")


def _copy_to_cache(path: Path) -> None:
    log = read_run_log(path)
    info = DeviceInfo(**log.header["device"])
    plan = log.plan
    if not plan.is_search or info.backend == SIMULATED:
        return
    if plan.problem.data != "normal":
        return
    torch = log.header["environment"]["packages"].get("torch")
    make_folder(folder(), f"; name another folder by {VARIABLE}")
    content = path.read_bytes()
    for regime, ceiling in log.ceilings.items():
        path = _file(info, torch, label_dtype(ceiling.problem), regime)
        # A thorough find is replaced by no quick one, and by none that its budget ended.
        if (log.tier == "complete" and not plan.searches[0].is_quick) or not path.exists():
            write_whole(path, content)


def cached_ceiling(info: DeviceInfo, dtype: str, regime: str) -> FoundCeiling | None:
    """The cached ceiling of this device. ``dtype``: from ``label_dtype``. Raises RunLogError for a damaged log."""
    path = _file(info, version_in_use("torch"), dtype, regime)
    if not path.exists():
        return None
    log = read_run_log(path)
    ceiling = log.ceilings.get(regime)
    return None if ceiling is None else FoundCeiling(ceiling, str(log.header["started"]), path, log.tier)


def _file(info: DeviceInfo, torch: str | None, dtype: str, regime: str) -> Path:
    # A device without a uuid is identified by host and index: machines may share a home folder.
    card = info.uuid_hash or [platform.node(), info.index]
    key = [info.backend, info.name, card, info.compute_units, info.power_limit_watts, info.driver, torch, dtype]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return folder() / f"{digest}-{regime}.jsonl"
