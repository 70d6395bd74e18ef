"""Which figures of results/ a second submitter confirms: the others are shown apart and ranked with none.

A second submitter is another card (``uuid_hash``) in a separate log: a log does not say who sent it. The rule reads the
logs alone, never their dates, so it gives the same answer in whatever order they came.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mamf.dtypes import DTYPES
from mamf.machine.peaks import find_bandwidth, find_peak
from mamf.measurement import TERA

# How far above its datasheet a board may be: it boosts past the datasheet's clock, but not by a quarter.
_ABOVE_DATASHEET = 1.25
# How far above its own earlier logs a card may be: the widest half interval that an accelerator's log may claim. Logs
# from before schema 4 have narrower intervals than their repeats need.
_OWN_REPEATS = 1.02


Key = tuple[Any, ...]


@dataclass(frozen=True)
class Claim:
    """A figure and what it is compared with. ``key``: equal for figures of one kind on one model of device;
    ``other_keys``: of other kinds that it confirms too. ``card``: the hash of the device's identifier, None if unknown.
    ``high``: the upper end of the figure's interval. ``is_bounded``: whether a verified datasheet bounds it. Figures in
    the operation's unit, 1e12 a second.
    """

    key: Key
    card: str | None
    place: Path
    figure: float
    high: float
    is_bounded: bool
    label: str
    other_keys: tuple[Key, ...] = ()


class Entry(Protocol):
    """What stands in a table of results/."""

    @property
    def tier(self) -> str: ...

    @property
    def claim(self) -> Claim: ...


EntryT = TypeVar("EntryT", bound=Entry)


def why_unconfirmed(claim: Claim, known: Iterable[Claim]) -> str | None:
    """Why a figure is unconfirmed, or None. Another card of its model confirms it if its interval reaches the figure.
    As long as one card of a model is known, a verified datasheet and the other logs of that card bound it.
    """
    others = [other for other in known if other.place != claim.place]
    cards = [other for other in others if other.card != claim.card]
    if not cards and not claim.is_bounded:
        return f"{claim.label}: no other card of its model is known, and no verified datasheet bounds it"
    highest = max(cards or others, key=lambda other: other.high, default=None)
    if highest is None or claim.figure <= highest.high * (1 if cards else _OWN_REPEATS):
        return None
    return f"{claim.label}: {claim.figure:.4g} is above the {highest.high:.4g} of {highest.place}"


def part_confirmed(entries: Iterable[EntryT]) -> tuple[list[EntryT], list[tuple[EntryT, str]]]:
    """Entries that are confirmed, and those that are not, with the reason. Only complete runs confirm."""
    confirmed: list[EntryT] = []
    unconfirmed: list[tuple[EntryT, str]] = []
    claims = [(entry, entry.claim) for entry in entries]
    known: dict[Key, list[Claim]] = {}
    for entry, claim in claims:
        for key in (claim.key, *claim.other_keys) if entry.tier == "complete" else ():
            known.setdefault(key, []).append(claim)
    for entry, claim in claims:
        if reason := why_unconfirmed(claim, known.get(claim.key, ())):
            unconfirmed.append((entry, reason))
        else:
            confirmed.append(entry)
    return confirmed, unconfirmed


def is_bounded(figure: float, device: Mapping[str, Any], dtype: str, peak: float | None) -> bool:
    """Whether a verified datasheet bounds a figure (in 1e12 a second) on a device. ``peak``: the datasheet's figure for
    what was measured, FLOP or bytes a second, verified or not; None if there is none.
    """
    name, units = device["name"], device["compute_units"]
    flops = find_peak(name, dtype, units) if dtype in DTYPES else None
    verified = {
        find_bandwidth(name, units, is_verified_only=True),
        flops.flops if flops and flops.is_verified else None,
    }
    return peak is not None and peak in verified and figure * TERA <= _ABOVE_DATASHEET * peak


def shortened(reasons: Sequence[str]) -> str:
    """The first of several reasons, and how many more there are."""
    return reasons[0] + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "")
