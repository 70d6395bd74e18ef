"""Two profiles side by side: what a step of each takes, class by class."""

from __future__ import annotations

import json
import re
from typing import Any

from mamf.errors import IncomparableError
from mamf.measurement import IDLE
from mamf.profiling.classes import ADDITIONS, CLASSES
from mamf.profiling.profile import ClassRow, Profile
from mamf.profiling.report import milliseconds
from mamf.report.text import DASH, csv_text, drawing, prose

_STEP = "step"
_COLUMNS = ("class", "A ms", "B ms", "B/A", "A share", "B share", "A calls", "B calls")


def render_profiles(
    form: str, a: tuple[str, Profile], b: tuple[str, Profile], anyway: bool = False, width: int | None = None
) -> str:
    """Each with its script, per step; where a trace does not tell its steps, in all. ``form``: of mamf.report.FORMATS.

    Raises IncomparableError for profiles of two devices, unless ``anyway``, and where one tells its steps alone.
    """
    devices = [_device(profile) for _, profile in (a, b)]
    if len(set(devices)) > 1 and not anyway:
        raise IncomparableError(f"profiles of two devices, {' and '.join(devices)}: --anyway compares them")
    if (a[1].steps is None) != (b[1].steps is None):
        raise IncomparableError("one of the profiles does not tell its steps: there is no step to compare")
    rows = _rows(a[1], b[1])
    if form == "csv":
        return csv_text(rows)
    if form == "json":
        return json.dumps({"a": a[0], "b": b[0], "rows": rows}, indent=1) + "\n"
    titles = [f"{name}: {script} on {device}" for name, (script, _), device in zip("AB", (a, b), devices, strict=True)]
    drawn = drawing(form, width)(_COLUMNS, [_cells(row) for row in rows], {"class"})
    end = ["a profile has no samples: what differs by chance is not told apart"] + [
        f"{name}: no step without the profiler was timed, so idle is an upper bound"
        for name, (_, profile) in zip("AB", (a, b), strict=True)
        if profile.unprofiled_step_seconds is None
    ]
    return f"{prose(titles, form)}\n{drawn}\n{prose(end, form)}"


def _device(profile: Profile) -> str:
    return profile.device or ("an unknown device" if profile.is_of_device else "the CPU")


def _rows(a: Profile, b: Profile) -> list[dict[str, Any]]:
    of_a, of_b = ({row.name: row for row in profile.classes} for profile in (a, b))
    names = [name for name in (*CLASSES, IDLE) if name in of_a or name in of_b]
    whole = {"class": _STEP, **_whole("a", a), **_whole("b", b)}
    classes = [{"class": name, **_one("a", a, of_a.get(name)), **_one("b", b, of_b.get(name))} for name in names]
    added = {"class": "additions, of elementwise", **_additions("a", a), **_additions("b", b)}
    rows = [whole, *classes, *([added] if added["a_calls"] or added["b_calls"] else [])]
    return [{**row, "b_to_a": _ratio(row["b_seconds"], row["a_seconds"])} for row in rows]


def _ratio(b: float, a: float) -> float | None:
    return b / a if a else None


def _whole(side: str, profile: Profile) -> dict[str, Any]:
    calls = sum(row.calls for row in profile.classes if row.name != IDLE)
    return _figures(side, profile.whole_seconds / (profile.steps or 1), 1.0, calls / (profile.steps or 1))


def _one(side: str, profile: Profile, row: ClassRow | None) -> dict[str, Any]:
    if row is None:
        return _figures(side, 0.0, 0.0, 0.0)
    steps = profile.steps or 1
    return _figures(side, row.visible / steps, row.share, row.calls / steps)


def _additions(side: str, profile: Profile) -> dict[str, Any]:
    """What comparisons of attention kernels name beside the copies: residuals and gradients that are summed."""
    rows = [row for row in profile.kernels if row.class_name == "elementwise" and re.search(ADDITIONS, row.name)]
    seconds, steps = sum(row.seconds for row in rows), profile.steps or 1
    return _figures(side, seconds / steps, seconds / profile.whole_seconds, sum(row.calls for row in rows) / steps)


def _figures(side: str, seconds: float, share: float, calls: float) -> dict[str, Any]:
    return {f"{side}_seconds": seconds, f"{side}_share": share, f"{side}_calls": calls}


def _cells(row: dict[str, Any]) -> list[str]:
    ratio = row["b_to_a"]
    return [
        row["class"],
        *(milliseconds(row[f"{side}_seconds"]) for side in "ab"),
        DASH if ratio is None else f"{ratio:.3f}",
        *(f"{row[f'{side}_share']:.1%}" for side in "ab"),
        *(f"{row[f'{side}_calls']:.4g}" for side in "ab"),
    ]
