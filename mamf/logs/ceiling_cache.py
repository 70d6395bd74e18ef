"""Keep the user's cache of ceilings: ``mamf find`` copies its logs to the cache, and ``mamf.peak`` reads them.

A cached ceiling is used only for the same backend, device, UUID, number of compute units, power limit, driver, torch
version, operand dtype and result dtype: its file name is a hash of these values. If two ceilings would have the same
file name, ``_rank_for_cache`` decides which of them the cache keeps.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mamf.backend import SIMULATED_BACKEND, DeviceInfo
from mamf.ceilings.ceiling import Ceiling
from mamf.errors import MamfError, get_first_message_line
from mamf.files import make_folder, write_file_atomically
from mamf.logs.run_log import RunLog, read_run_log
from mamf.machine.environment import get_package_version, list_logged_warnings
from mamf.measurement import make_dtype_label

CACHE_FOLDER_VARIABLE = "MAMF_CACHE"


def get_cache_folder() -> Path:
    """Return the folder that the environment variable MAMF_CACHE names, or ``mamf`` in the cache folder of the
    platform.
    """
    if named := os.environ.get(CACHE_FOLDER_VARIABLE):
        return Path(named)
    if sys.platform == "win32":
        caches = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "mamf"


def cache_ceilings(path: Path, warn: Callable[[str], object]) -> None:
    """Copy a log of ``mamf find`` to the cache, once for each ceiling (highest rate of the device) in the log.

    Calls ``warn`` with a message for each ceiling that is not cached. Ceilings of simulated devices are never cached,
    and cause no warning.
    """
    try:
        for reason in _copy_to_cache(path):
            warn(f"a ceiling of this run is not stored for 'mamf peak': {reason}")
    except (MamfError, OSError) as error:
        warn(f"the ceilings of this run are not stored for 'mamf peak': {get_first_message_line(error)}")


def _copy_to_cache(path: Path) -> Iterator[str]:
    """Copy a log of ``mamf find`` to the cache, once for each ceiling. Yield a reason for each ceiling not copied."""
    log = read_run_log(path)
    info = DeviceInfo(**log.header["device"])
    if not log.plan.is_search or info.backend == SIMULATED_BACKEND:
        return
    if log.plan.problem.data != "normal":
        yield f"the operands of this run are {log.plan.problem.data}, but a ceiling needs normally distributed values"
        return
    torch = log.header["environment"]["packages"].get("torch")
    make_folder(get_cache_folder(), f"; set {CACHE_FOLDER_VARIABLE} to another folder")
    for regime, ceiling in log.ceilings.items():
        target = _build_cache_path(info, torch, ceiling.problem, regime)
        new, cached, low_rate_warnings = _add_origin(ceiling, log, target), None, list[str]()
        new_rank, cached_rank = _rank_for_cache(new), None
        with contextlib.suppress(MamfError, OSError):  # The new log replaces a file that cannot be read.
            cached = _read_cached_ceiling(target, regime)
            if cached is not None and new.date == cached.date:  # the same run, resumed: warnings do not decide
                cached_rank = _rank_for_cache(cached)
            elif cached is not None:
                low_rate_warnings = list_logged_warnings(log.header, low_rates_only=True)
                cached_warnings = list_logged_warnings(read_run_log(target).header, low_rates_only=True)
                new_rank = _rank_for_cache(new, may_be_low=bool(low_rate_warnings))
                cached_rank = _rank_for_cache(cached, may_be_low=bool(cached_warnings))
        if cached is None or cached_rank is None or new_rank >= cached_rank:
            if target.is_symlink():
                target.unlink()
            write_file_atomically(target, path.read_bytes())
        else:
            reasons = (
                "has an unknown interval",
                "comes from a run with a warning ("
                + ", ".join(dict.fromkeys(each.partition(":")[0].removeprefix("WARN ") for each in low_rate_warnings))
                + ")",
                "comes from an interrupted search",
                "may be too low, like the stored one, and is lower",
                "is older",
            )
            differs = [one != other for one, other in zip(new_rank, cached_rank, strict=True)]
            stored = f"the ceiling that was stored on {cached.date[:10]} ({cached.rate:.4g} {cached.unit})"
            yield f"the {regime} ceiling {reasons[differs.index(True)]}, so mamf keeps {stored}"


def _add_origin(ceiling: Ceiling, log: RunLog, path: Path) -> Ceiling:
    return replace(ceiling, date=str(log.header["started"]), tier=log.tier, reference=str(path))


def _rank_for_cache(ceiling: Ceiling, may_be_low: bool = False) -> tuple[bool, bool, bool, float, str]:
    """Return the rank of a ceiling. Of two ceilings that would have the same file in the cache, mamf keeps the one with
    the higher rank. ``may_be_low``: whether the ceiling may be too low, because other work used the machine during the
    search, or because the search was short.

    These criteria decide, the first one first: a ceiling ranks higher if its interval is known, if nothing says that it
    may be too low, if its search was complete, if it is the higher of two ceilings that may both be too low, and if it
    is newer.
    """
    return (
        ceiling.interval.is_known,
        not may_be_low,
        ceiling.tier == "complete",
        ceiling.rate if may_be_low else 0.0,
        ceiling.date,
    )


def _read_cached_ceiling(path: Path, regime: str) -> Ceiling | None:
    """Read the ceiling of a regime from a file in the cache. Returns None if there is no such file or ceiling.

    Does not follow a symbolic link, because another user may have made it.
    """
    if path.is_symlink() or not path.exists():
        return None
    log = read_run_log(path)
    ceiling = log.ceilings.get(regime)
    return None if ceiling is None else _add_origin(ceiling, log, path)


def find_cached_ceiling(info: DeviceInfo, problem: Any, regime: str) -> Ceiling | None:
    """Find the cached ceiling of a device for the dtypes of a problem. Returns None if no such ceiling is cached.

    Raises RunLogError if the cached log is damaged.
    """
    return _read_cached_ceiling(_build_cache_path(info, get_package_version("torch"), problem, regime), regime)


def _build_cache_path(info: DeviceInfo, torch: str | None, problem: Any, regime: str) -> Path:
    key = [
        info.backend,
        info.name,
        # Identify a device without a UUID by its host and index. Several hosts may share this cache in a home folder.
        info.uuid_hash or [platform.node(), info.index],
        info.compute_units,
        info.power_limit_watts,
        info.driver,
        torch,
        make_dtype_label(problem),
        problem.out_dtype,
    ]
    return get_cache_folder() / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}-{regime}.jsonl"
