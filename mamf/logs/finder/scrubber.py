"""Removes names of people and machines from imported logs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from mamf.errors import RunLogError
from mamf.machine.environment import scrub

_HOMES = {"/home": re.compile(r"/home[/\\]+([\w.@+-]+)"), "Users": re.compile(r"[/\\]Users[/\\]+([\w.@+-]+)")}
_SYSTEMS = ("Linux", "Darwin", "Windows", "FreeBSD")
_HOST = re.compile(rf"^(?:{'|'.join(_SYSTEMS)})\s+(\S+)(?=.*(?:#\d|x86_64|aarch64|arm64|AMD64))")
_KERNEL_RELEASE = re.compile(r"\d+\.\d")
# One with blanks in it, which the shell put in quotes.
_QUOTED_PATH = re.compile(r"(['\"])(--\w+=)?(?:~|[A-Za-z]:)?[/\\](?:[^'\"/\\]*[/\\])*([^'\"/\\]*)\1")
_UUID = re.compile(r"\b(?:GPU-|MIG-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE)
# Generic names, or words that logs contain for other reasons.
_HARMLESS = {"linux", "darwin", "windows", "localhost", "root", "user", "admin", "ubuntu", "runner", "torch", "cuda"}
_SHORTEST_NAME = 3
# Each is sought in every text.
_MOST_NAMES = 1000


def host_of(uname: str) -> str | None:
    """The second word of a uname line; None where it was cut out before."""
    found = _HOST.match(uname)
    return found[1] if found and not _KERNEL_RELEASE.match(found[1]) else None


class Scrubber:
    """Takes out of a string what the log itself shows to be private: its host's and users' names, and every path."""

    def __init__(self, texts: Iterable[str]) -> None:
        names: dict[str, str] = {}
        for text in texts:
            homes = [pattern for mark, pattern in _HOMES.items() if mark in text]
            names |= dict.fromkeys((name for pattern in homes for name in pattern.findall(text)), "<user>")
            for host in _hosts(text):
                names |= {host: "<host>", host.split(".")[0]: "<host>"}
        kept = {name: by for name, by in names.items() if len(name) >= _SHORTEST_NAME and name.lower() not in _HARMLESS}
        if len(kept) > _MOST_NAMES:
            raise RunLogError(f"names more than {_MOST_NAMES} hosts and users: not the log of one machine")
        # Longest first: a short host name is a part of the long one.
        self._names = [
            (re.compile(rf"(?<!\w){re.escape(name)}(?!\w)"), kept[name]) for name in sorted(kept, key=len, reverse=True)
        ]

    def __call__(self, text: str) -> str:
        text = scrub(_QUOTED_PATH.sub(r"'\2<path>/\3'", text))
        for pattern, substitute in self._names:
            text = pattern.sub(substitute, text)
        return _UUID.sub("<uuid>", text)


def _hosts(text: str) -> Iterator[str]:
    """Of the lines that uname printed."""
    for system in _SYSTEMS:
        at = text.find(system)
        while at >= 0:
            start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
            is_first_word = not text[start:at].strip(" \t-")
            if is_first_word and (host := host_of(text[at : len(text) if end < 0 else end])):
                yield host
            at = text.find(system, at + 1)
