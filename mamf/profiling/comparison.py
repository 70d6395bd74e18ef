"""Two profiles side by side: what a step of each takes, class by class."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mamf.errors import IncomparableError
from mamf.measurement import IDLE
from mamf.operations.tracing.classes import ADDITIONS, CLASSES
from mamf.profiling.breakdown import ClassRow
from mamf.profiling.profile import Profile
from mamf.profiling.report import device_of, milliseconds
from mamf.report.document import Answer, Block, Column, Document, Lines, Table
from mamf.report.text import plain

_STEP = "step"
Row = Mapping[str, Any]


def profiles_document(a: tuple[str, Profile], b: tuple[str, Profile], anyway: bool = False) -> Document:
    """Each with its script, per step, or in all if the steps of the traces are unknown.

    Raises IncomparableError for profiles of two devices, unless ``anyway``, and if the steps of one alone are known.
    """
    devices = [device_of(profile) for _, profile in (a, b)]
    if len(set(devices)) > 1 and not anyway:
        raise IncomparableError(f"profiles of two devices, {' and '.join(devices)}: --anyway compares them")
    if (a[1].steps is None) != (b[1].steps is None):
        raise IncomparableError("the steps of one of the profiles are unknown: there is no step to compare")
    rows = _rows(a[1].without_added_waiting(), b[1].without_added_waiting())
    titles = [f"{name}: {script} on {device}" for name, (script, _), device in zip("AB", (a, b), devices, strict=True)]
    notes = ["a profile has no samples: differences may be chance"] + [
        f"{name}: no step without the profiler was timed, so idle is an upper bound"
        for name, (_, profile) in zip("AB", (a, b), strict=True)
        if profile.unprofiled_step_seconds is None
    ]
    blocks: list[Block] = [Lines(titles), Table(_COLUMNS, rows), Lines(notes), Answer([_conclusion(rows)])]
    return Document("Two profiles", blocks, {"a": a[0], "b": b[0]})


def _column(
    name: str, title: str, format: Callable[[Any], str], importance: int = 0, left: bool = False
) -> Column[Row]:
    return Column(name, title, lambda row: row[name], format, importance, left)


_COLUMNS = [
    _column("class", "class", str, left=True),
    _column("a_seconds", "A ms", milliseconds),
    _column("b_seconds", "B ms", milliseconds),
    _column("b_to_a", "B/A", "{:.3f}".format),
    _column("a_share", "A share", "{:.1%}".format, 1),
    _column("b_share", "B share", "{:.1%}".format, 1),
    _column("a_calls", "A calls", plain, 2),
    _column("b_calls", "B calls", plain, 2),
]


def _conclusion(rows: Sequence[Row]) -> str:
    """The ratio of the steps, and the class whose time changed most."""
    step, *classes = rows
    changes = {row["class"]: 1e3 * (row["b_seconds"] - row["a_seconds"]) for row in classes}
    most = max(changes, key=lambda name: abs(changes[name]))
    return f"B takes {step['b_to_a']:.3f} times as long as A; the largest change: {most}, {changes[most]:+.4g} ms"


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
    """Additions, which attention comparisons list beside the copies: residuals and gradients that are summed."""
    rows = [row for row in profile.kernels if row.class_name == "elementwise" and re.search(ADDITIONS, row.name)]
    seconds, steps = sum(row.seconds for row in rows), profile.steps or 1
    return _figures(side, seconds / steps, seconds / profile.whole_seconds, sum(row.calls for row in rows) / steps)


def _figures(side: str, seconds: float, share: float, calls: float) -> dict[str, Any]:
    return {f"{side}_seconds": seconds, f"{side}_share": share, f"{side}_calls": calls}
