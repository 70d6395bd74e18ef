"""A folder of ``mamf autoprofile``: one log per part, their pictures, and the status of the parts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mamf.errors import RunLogError, UsageError
from mamf.files import write_whole
from mamf.logs.run_log import RunLog, read_run_log
from mamf.logs.validator import require
from mamf.machine.privacy import scrub_record
from mamf.profiling.log import read_profile_or_none
from mamf.profiling.profile import Profile

#: The parts, in their order, and their logs.
LOGS = {
    "ceilings": "ceilings.jsonl",
    "bandwidth": "bandwidth.jsonl",
    "kernels": "kernels.jsonl",
    "counters": "counters.jsonl",
    "step": "step.jsonl",
}
SUMMARY, TABLE, _STEPS = "SUMMARY.md", "kernels.md", "steps.json"
_OWN = {SUMMARY, TABLE, _STEPS, *LOGS.values(), *(f"{name}.png" for name in LOGS)}
_END: Mapping[str, type] = {"name": str, "command": str, "status": str, "reason": str}
_SCHEMA = {"steps": [_END], "remarks": [str]}


@dataclass(frozen=True)
class StepEnd:
    """The end of a part. ``status``: complete, interrupted, failed or left out; ``reason`` where not complete."""

    name: str
    command: str
    status: str
    reason: str = ""


@dataclass(frozen=True)
class Folder:
    """The measured parts; None for those that were not measured. ``step``: the script's name and its profile."""

    ceilings: RunLog | None
    bandwidth: RunLog | None
    kernels: RunLog | None
    counters: RunLog | None
    step: tuple[str, Profile] | None
    pictures: tuple[str, ...]
    ends: Mapping[str, StepEnd]
    remarks: tuple[str, ...]

    @property
    def headers(self) -> list[Mapping[str, Any]]:
        """Of the logs of one device, the first of them first."""
        return [log.header for log in (self.ceilings, self.bandwidth, self.kernels) if log]


def require_own(path: Path) -> None:
    """Raises UsageError for a folder with files that autoprofile did not write."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is not a folder: name another --output-folder")
    foreign = sorted(each.name for each in path.iterdir() if each.name not in _OWN) if path.exists() else []
    if foreign:
        raise UsageError(f"{path} holds {foreign[0]}, which is not from autoprofile: name another --output-folder")


def read_folder(path: Path) -> Folder:
    """Raises RunLogError for a log that cannot be read, UsageError without any log."""
    if not path.is_dir():
        raise UsageError(f"there is no folder {path}")
    held = {name: path / log for name, log in LOGS.items() if (path / log).exists()}
    if not held:
        raise UsageError(f"{path} holds no log of autoprofile: {', '.join(LOGS.values())}")
    logs = {name: read_run_log(held[name]) for name in ("ceilings", "bandwidth", "kernels", "counters") if name in held}
    ends, remarks = _read_ends(path / _STEPS)
    return Folder(
        logs.get("ceilings"),
        logs.get("bandwidth"),
        logs.get("kernels"),
        logs.get("counters"),
        read_profile_or_none(held["step"]) if "step" in held else None,
        tuple(f"{name}.png" for name in LOGS if (path / f"{name}.png").exists()),
        {end.name: end for end in ends},
        remarks,
    )


def write_ends(path: Path, ends: Sequence[StepEnd], remarks: Sequence[str]) -> None:
    record = scrub_record({"steps": [asdict(end) for end in ends], "remarks": list(remarks)})
    write_whole(path / _STEPS, json.dumps(record, indent=1) + "\n")


def _read_ends(path: Path) -> tuple[list[StepEnd], tuple[str, ...]]:
    if not path.exists():
        return [], ()
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        require(record, _SCHEMA)
    except ValueError as error:
        raise RunLogError(f"{path}: {error}; remove it, it only says how the steps ended") from None
    return [StepEnd(**{name: each[name] for name in _END}) for each in record["steps"]], tuple(record["remarks"])
