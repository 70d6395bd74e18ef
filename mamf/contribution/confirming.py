"""Which figures of results/ a second submitter confirms. The others are listed separately, without a rank.

A second submitter is another card (``uuid_hash``) in a separate log: a log does not say who sent it. The rule reads the
logs alone, never their dates, so it gives the same answer in whatever order they came.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from mamf.measurement import group_pairs

# How far above its own other logs a card may be: the widest half interval that an accelerator's log may claim.
# Converted logs have narrower intervals than their repeats need.
_OWN_REPEATS = 1.02

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Claim:
    """A figure and what it is compared with. ``key``: equal for figures of one kind on one model of device;
    ``other_keys``: of other kinds that it confirms too. ``card``: the hash of the device's identifier, None if unknown.
    ``high``: the upper end of the figure's interval. ``is_bounded``: whether the verified datasheet of an accelerator
    bounds it too. Figures in the operation's unit, 1e12 a second.
    """

    key: Key
    card: str | None
    place: Path
    figure: float
    high: float
    is_bounded: bool
    label: str
    other_keys: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A figure in a table of results/, from the log at ``place``."""

    header: dict[str, Any]
    place: Path
    tier: str

    @property
    def device(self) -> str:
        return str(self.header["device"]["name"])

    @cached_property
    def claim(self) -> Claim:
        raise NotImplementedError


EntryT = TypeVar("EntryT", bound=Entry)
Known = Mapping[Key, Sequence[Claim]]


def by_key(claims: Iterable[Claim]) -> Known:
    """The claims that can confirm one with a key."""
    return group_pairs((key, claim) for claim in claims for key in (claim.key, *claim.other_keys))


def why_unconfirmed(claim: Claim, known: Known) -> str | None:
    """Why a figure is unconfirmed, or None. Another card of its model confirms it if its interval reaches the figure.
    As long as no other card is known by its hash, a verified datasheet and the other logs bound it.
    """
    others = [other for other in known.get(claim.key, ()) if other.place != claim.place]
    cards = [other for other in others if other.card != claim.card and None not in (other.card, claim.card)]
    if not cards and not claim.is_bounded:
        return f"{claim.label}: no other card of its model is known, and no verified datasheet bounds it"
    highest = max(cards or others, key=lambda other: other.high, default=None)
    if highest is None or claim.figure <= highest.high * (1 if cards else _OWN_REPEATS):
        return None
    return f"{claim.label}: {claim.figure:.4g} is above the {highest.high:.4g} of {highest.place}"


def part_confirmed(entries: Iterable[EntryT]) -> tuple[list[EntryT], list[tuple[EntryT, str]]]:
    """Entries that are confirmed, and those that are not, with the reason. Only complete runs confirm."""
    listed = list(entries)
    known = by_key(entry.claim for entry in listed if entry.tier == "complete")
    judged = [(entry, why_unconfirmed(entry.claim, known)) for entry in listed]
    return [entry for entry, reason in judged if not reason], [(entry, reason) for entry, reason in judged if reason]


def shortened(reasons: Sequence[str]) -> str:
    """The first of several reasons, and how many more there are; empty without reasons."""
    return "".join(reasons[:1]) + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else "")
