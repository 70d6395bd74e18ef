"""One line of a log to one row of figures, by a table of forms. Shapes stay as printed until the version is known."""

from __future__ import annotations

import functools
import math
import re
from typing import NamedTuple

from mamf.logs.finder.grammars import FORMS, LOCK_IN, NAMED, STATISTIC, TELEMETRY, Evidence, Form

Sizes = tuple[int, int, int]

_FIGURES = ("mean", "median", "fastest", "stated", "MAMF", "MSMF")
_PADDED_SHAPE = 20
_TRIAL: tuple[Evidence, ...] = (("row", "trial"),)
_STATED: tuple[Evidence, ...] = (("row", "stated"),)
_PADDED, _UNPADDED = (*_STATED, ("pad", "yes")), (*_STATED, ("pad", "no"))


class Row(NamedTuple):
    """``best`` and ``best_sizes``: of the rows up to this one, where the form prints them; the figures in its order."""

    stage: str
    figures: dict[str, float]
    sizes: Sizes | None
    evidence: tuple[Evidence, ...]
    number: int | None = None
    watts: float | None = None
    mhz: float | None = None
    celsius: float | None = None
    remarks: tuple[str, ...] = ()
    best: tuple[float, ...] = ()
    best_sizes: Sizes | None = None
    is_winner: bool = False

    @property
    def key(self) -> object:
        """Equal for rows that repeat each other: the winner of a phase is printed once more when the phase ends."""
        return self.stage, self.sizes, *self.figures.items()


# Long logs print the same few thousand numbers again and again: each is kept once.
_whole = functools.lru_cache(1 << 16)(int)


@functools.lru_cache(1 << 16)
def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def sizes_of(text: str | None) -> Sizes | None:
    if not text:
        return None
    first, second, third = text.split("x")
    return _whole(first), _whole(second), _whole(third)


def figure(text: str | None) -> float | None:
    """A figure; None for nan and inf, which mean that nothing was measured."""
    return None if text in (None, "-") else _finite(text)


class _Beside(NamedTuple):
    """What stands beside the figures of a row, and in many other rows of its run: what figures they are, and so on."""

    statistics: tuple[str, ...]
    evidence: tuple[Evidence, ...]
    watts: float | None
    mhz: float | None
    remarks: tuple[str, ...]
    best: tuple[float, ...]


@functools.lru_cache(64)
def _beside(printed: tuple[str | None, ...], tag: str | None, rest: str) -> _Beside:
    """``printed``: names of the figures, None where there are less than three; ``rest``: what follows ``best:``."""
    names = [name for name in printed if name]
    tag, telemetry = (tag or "").strip(), TELEMETRY.search(rest)
    evidence = [("row", "pair")]
    if "mean" in names:
        evidence = [
            ("row", "three"),
            ("order", names[0]),
            *([("end", "tight" if ")TFLOPS" in rest else "spaced")] if "TFLOPS" in rest else []),
            *([("row", "tagged")] if telemetry or tag else []),
            ("tag", "printed" if tag else "none"),
        ]
    return _Beside(
        tuple(STATISTIC[name] for name in names),
        tuple(evidence),
        watts=figure(telemetry["watts"]) if telemetry else None,
        mhz=figure(telemetry["mhz"]) if telemetry else None,
        remarks=tuple(remark for remark in (tag, "SUSPECT" if "SUSPECT" in rest else "") if remark),
        best=tuple(value for text, _ in NAMED.findall(rest) if (value := figure(text)) is not None),
    )


class RowReader:
    """Reads row after row: a lock-in names its shape on the line before."""

    def __init__(self) -> None:
        self._locked: Sizes | None = None
        self._last = FORMS[0]

    def __call__(self, line: str) -> Row | None:
        # No line is of two forms, and nearly every one is of the form of the line before.
        found = self._last.pattern.search(line)
        if found:
            return self._row(self._last, found)
        if announced := LOCK_IN.search(line):
            self._locked = sizes_of(announced["shape"])
            return None
        for form in FORMS:
            found = form.pattern.search(line)
            if found:
                self._last = form
                return self._row(form, found)
        return None

    def _row(self, form: Form, found: re.Match[str]) -> Row:
        if form.row == "three":
            return _named_row(found)
        groups = found.groupdict()
        best = figure(groups.get("best"))
        return Row(
            stage=_stage(form, groups),
            figures=_figures(groups),
            sizes=self._locked if form.stage == "lock-in" else _sizes(groups),
            evidence=_evidence(form, groups),
            number=_number(form, groups),
            watts=figure(groups.get("watts")),
            mhz=figure(groups.get("mhz")),
            celsius=figure(groups.get("celsius")),
            remarks=_remarks(form, groups),
            best=() if best is None else (best,),
            best_sizes=sizes_of(groups.get("best_shape")),
            is_winner=bool(groups.get("winner")),
        )


def _named_row(found: re.Match[str]) -> Row:
    """Of version 2: the long logs are of it."""
    number, tag, first, first_name, second, second_name, third, third_name, shape, rest = found.groups()
    names, values = (first_name, second_name, third_name), map(_finite, filter(None, (first, second, third)))
    same = _beside(names, tag, rest)
    figures = {name: value for name, value in zip(same.statistics, values, strict=True) if value is not None}
    count = int(number) or None
    return Row("", figures, sizes_of(shape), same.evidence, count, same.watts, same.mhz, None, same.remarks, same.best)


def _stage(form: Form, groups: dict[str, str | None]) -> str:
    # A rank is a second long and only chooses who is measured properly.
    if form.stage == "lock-in":
        return "confirm"
    return "screen" if groups.get("flag") == "rank" else form.stage


def _number(form: Form, groups: dict[str, str | None]) -> int | None:
    """The number of the row; None for trials, which end in any order."""
    return None if form.row == "trial" else int(groups.get("number") or 0) or None


def _figures(groups: dict[str, str | None]) -> dict[str, float]:
    printed = {name: figure(groups.get(name)) for name in _FIGURES}
    return {name: value for name, value in printed.items() if value is not None}


def _sizes(groups: dict[str, str | None]) -> Sizes | None:
    return sizes_of(f"{groups['m']}x{groups['n']}x{groups['k']}") if groups.get("m") else sizes_of(groups.get("shape"))


def _remarks(form: Form, groups: dict[str, str | None]) -> tuple[str, ...]:
    remarks = [
        groups.get("flag"),
        *(f"{name} {groups[name]}" for name in ("drop", "spread") if groups.get(name)),
        "lock-in" if form.stage == "lock-in" else None,
    ]
    return tuple(remark.strip() for remark in remarks if remark)


def _evidence(form: Form, groups: dict[str, str | None]) -> tuple[Evidence, ...]:
    if form.row == "stated":
        return _evidence_of_stated(groups)
    seen = [("row", form.row), *(("msmf", name) for name in ("drop", "runs") if groups.get(name))]
    return tuple(seen if form.row != "tagged" else [*seen, ("search", "prefixed")])


def _evidence_of_stated(groups: dict[str, str | None]) -> tuple[Evidence, ...]:
    if groups.get("trial"):
        return _TRIAL
    # A long shape fills the column, so padding cannot be seen.
    if len(groups["shape"] or "") >= _PADDED_SHAPE:
        return _STATED
    return _PADDED if len(groups["pad"] or "") > 1 else _UNPADDED
