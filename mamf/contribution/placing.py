"""Where a log belongs: results/<accelerator>/<what it is>-<when>.jsonl."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from mamf.contribution.evidence import problems_of
from mamf.logs.legacy import FinderRun
from mamf.plans import EXPLAIN, FIND, ROOFLINE

# Names of devices on Windows, which cannot be names of folders.
_RESERVED = re.compile(r"con|prn|aux|nul|(?:com|lpt)\d")


def folder_of(device_name: str) -> str:
    """``NVIDIA H100 80GB HBM3`` -> ``nvidia-h100-80gb-hbm3``."""
    name = slug([device_name])
    if not name:
        return "unknown-accelerator"
    return f"{name}-accelerator" if _RESERVED.fullmatch(name) else name


def name_of(header: Mapping[str, Any]) -> str:
    """The file name of a run: command or operation, kernels of matmul, dtypes, directions, regimes and start (UTC)."""
    plan = header["plan"]
    command, problems = plan.get("command", "sweep"), problems_of(plan)
    parts = [
        plan.get("operation", command),
        *([command] if "operation" in plan and command in (FIND, ROOFLINE, EXPLAIN) else []),
        *([header["kernel"]] if "problem" in plan and command == "sweep" else []),
        *(problem["dtype"] + ("-fast" if problem.get("fast_accumulation") else "") for problem in problems),
        *(problem["direction"] for problem in problems if "direction" in problem),
        *plan["regimes"],
        moment(header["started"]),
    ]
    return f"{slug(parts)}.jsonl"


def legacy_name_of(run: FinderRun) -> str:
    """The file name of an imported run of mamf-finder."""
    started = moment(run.started) if run.started else "undated"
    return f"{slug(['mamf-finder', run.version or '', run.dtype or '', started])}.jsonl"


def place_of(header: Mapping[str, Any]) -> Path:
    """Folder and name, from the results folder."""
    return Path(folder_of(header["device"]["name"]), name_of(header))


def lies_at(actual: Path, place: Path) -> bool:
    """Whether ``actual`` is this place, or the numbered place of another run that began in the same second."""
    own = re.fullmatch(re.escape(place.stem) + r"(-([2-9]|[1-9]\d+))?", actual.stem)
    return own is not None and actual.with_stem(place.stem) == place


def moment(iso: str) -> str:
    """An ISO time as in a file name; raises ValueError for any other text."""
    return datetime.fromisoformat(iso).strftime("%Y%m%d-%H%M%S")


def slug(parts: Iterable[str]) -> str:
    """Lower-case words joined by dashes; each part once."""
    texts = (re.sub(r"[^a-z0-9_]+", "-", part.lower()).strip("-") for part in dict.fromkeys(parts))
    return "-".join(text for text in texts if text)
