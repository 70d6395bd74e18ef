"""Which figures of results/ are confirmed. The others stand apart: they are not ranked, and not packaged.

A figure is confirmed if a maintainer measured it, or if two submitters did within the spread of cards of one model. A
submitter is the account that opened the pull request: a log cannot say who sent it. The workflow that merges a pull
request writes the account into submitters.txt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mamf.contribution.entries import Entry
from mamf.contribution.evidence import Finding
from mamf.measurement import group_pairs

#: In results/: a line per log, its path and the account that submitted it; and the accounts of maintainers.
SUBMITTERS, MAINTAINERS = "submitters.txt", "maintainers.txt"
# Ceilings of 26 cards of one model differ by up to 4.4 %.
_SPREAD = 0.05


@dataclass(frozen=True)
class Submitters:
    """``accounts``: by the place of a log in results/."""

    accounts: Mapping[Path, str]
    maintainers: frozenset[str] = frozenset()

    def confirm(self, entry: Entry, others: Iterable[Entry]) -> bool:
        """Whether a figure is confirmed; ``others``: complete ones of its kind."""
        account = self.accounts.get(entry.place)
        if account is None or account in self.maintainers:
            return account is not None
        return any(
            self.accounts.get(other.place, account) != account
            and abs(other.figure - entry.figure) <= _SPREAD * max(other.figure, entry.figure)
            for other in others
        )


def part_confirmed(entries: Iterable[Entry], submitters: Submitters) -> tuple[list[Entry], list[Entry]]:
    """The entries that are confirmed, and those that are not. Only complete runs confirm others."""
    parts: tuple[list[Entry], list[Entry]] = ([], [])
    listed = list(entries)
    complete = group_pairs((entry.key, entry) for entry in listed if entry.tier == "complete")
    for entry in listed:
        parts[not submitters.confirm(entry, complete.get(entry.key, ()))].append(entry)
    return parts


def read_submitters(root: Path) -> Submitters:
    """Who submitted the logs of a results folder. GitHub ignores the case of accounts."""
    accounts = {Path(place): account for place, _, account in map(_parts, _lines(root / SUBMITTERS))}
    return Submitters(accounts, frozenset(line.casefold() for line in _lines(root / MAINTAINERS)))


def _parts(line: str) -> tuple[str, str, str]:
    return line.casefold().rpartition(" ")


def _lines(path: Path) -> list[str]:
    """The lines of a file, without comments; none if there is no such file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [line for line in lines if line and not line.startswith("#")]


def submitter_findings(root: Path, places: Sequence[Path]) -> list[tuple[Path, Finding]]:
    """What is wrong with submitters.txt, and which logs it does not name."""
    path, named = root / SUBMITTERS, [_parts(line) for line in _lines(root / SUBMITTERS)]
    findings = [
        (path, Finding("submitter", f"{place}: a line is the path of a log of {root.name}/ and one account"))
        for place, _, account in named
        if not account or Path(place) not in places
    ]
    listed = [Path(place) for place, _, _ in named]
    twice = sorted({place for place in listed if listed.count(place) > 1})
    findings += [(path, Finding("submitter", f"{place} is named twice")) for place in twice]
    unnamed = "nobody is named as its submitter: the workflow that merges the pull request does that"
    missing = sorted(set(places) - set(listed))
    return findings + [(root / place, Finding("submitter", unnamed, is_warning=True)) for place in missing]
