"""The head of a log: what ran where. Any part of it may be missing; names of people and machines are removed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mamf.dtypes import canonical_name
from mamf.errors import RunLogError, UnknownNameError
from mamf.logs.finder.grammars import Evidence
from mamf.machine.privacy import scrub

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


# -- the head of a log -------------------------------------------------------------------------------------------------


STARTED = re.compile(r"Benchmark started on (\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d)")
_TITLE = re.compile(r"^\s*\*\* (?P<title>[A-Z][\w /]+):\s*(?P<value>.*)$")
_DASHES = re.compile(r"^\s*-{20,}\s*$")
#: The first of these that a log with its first lines cut off still has begins a run.
BEGINS = re.compile(r"^\s*\*\* (?:Command line|Dtype|Platform/Device info):")
_VERSION = re.compile(r"benchmark version: (\d+)")
_MODE = re.compile(r"search mode: (\w+)")
# Forks say more of the device: "Power limit: 700W".
_NAMED_VALUE = re.compile(r"([A-Z][\w /-]*):\s+(\S.*)")
_REPR = re.compile(r"^\w*\(([^=]*=.*)\)$")
_PROPERTY = re.compile(r"\b(\w+)=('[^']*'|\[[^]]*\]|\([^)]*\)|[^,]+)")
_PAIR = re.compile(r"\b(\w+)=([^,\s]+)")
# Properties that identify an individual card are private.
_IDENTIFYING = re.compile(r"^(uuid|pci_.*|serial.*)$")


@dataclass
class Header:
    """As printed, but scrubbed; filled line by line."""

    started: str | None = None
    command: str | None = None
    dtype: str | None = None
    platform: str | None = None
    device: str | None = None
    device_properties: dict[str, str] = field(default_factory=dict)
    software: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    printed_version: str | None = None
    has_bullets: bool | None = None
    mode: str | None = None
    has_notes: bool = False

    @property
    def evidence(self) -> list[Evidence]:
        seen = {
            "header": {True: "bullets", False: "plain", None: None}[self.has_bullets],
            "search": ("mode" if self.mode else "none") if self.has_notes else None,
            "mode": self.mode,
            "dtype": "chosen" if "--dtype" in (self.command or "") else None,
            "printed": self.printed_version,
        }
        return [(trait, value) for trait, value in seen.items() if value]


class HeaderReader:
    """Feeds the lines of a run into its header; ``close`` when the first line of the run itself comes."""

    def __init__(self, scrubber: Scrubber, header: Header | None = None) -> None:
        self.header = header or Header()
        self._scrub = scrubber
        self._section = ""

    def close(self) -> None:
        self._section = ""

    def __call__(self, line: str) -> None:
        started = STARTED.search(line)
        title = _TITLE.match(line)
        if started:
            self.header.started = f"{started[1]}T{started[2]}"
        elif title:
            self._open(title["title"], title["value"])
        elif _DASHES.match(line):
            self.close()
        elif self._section and line.strip():
            self._value(line.strip())

    def _open(self, title: str, value: str) -> None:
        self._section = title
        self.header.has_notes |= title == "Additional notes"
        if title == "Dtype" and value:
            self.header.dtype = dtype_name(value)

    def _value(self, line: str) -> None:
        value = line.removeprefix("- ")
        named = _NAMED_VALUE.fullmatch(value)
        if self._section == "Command line" and self.header.command is None:
            self.header.command = self._scrub(line)
        elif named and self._section in ("Platform/Device info", "Critical software versions"):
            self._keep_properties({named[1]: named[2]})
        elif self._section == "Platform/Device info":
            self.header.has_bullets = line.startswith("- ")
            self._platform_or_device(value)
        elif self._section == "Critical software versions":
            self.header.software |= self._pairs(value)
        elif self._section == "Critical environment variables":
            self.header.variables |= self._pairs(value)
        elif self._section == "Additional notes":
            self._note(value)

    def _pairs(self, text: str) -> dict[str, str]:
        return {name: self._scrub(value) for name, value in _PAIR.findall(text) if value != "None"}

    def _platform_or_device(self, text: str) -> None:
        if self.header.platform is None:
            words = text.split()
            if host_of(text):
                del words[1]
            self.header.platform = self._scrub(" ".join(words))
            return
        found = _REPR.match(text)
        if found is None:
            self.header.device = self.header.device or self._scrub(text)
            return
        properties = {name: value.strip().strip("'") for name, value in _PROPERTY.findall(found[1])}
        self.header.device = properties.pop("name", None)
        self._keep_properties(properties)

    def _keep_properties(self, properties: dict[str, str]) -> None:
        self.header.device_properties |= {
            name: self._scrub(value) for name, value in properties.items() if not _IDENTIFYING.match(name.lower())
        }

    def _note(self, text: str) -> None:
        version = _VERSION.search(text)
        if mode := _MODE.search(text):
            self.header.mode = mode[1]
        if version:
            self.header.printed_version = version[1]
        elif text != "None":
            self.header.notes.append(self._scrub(text))


def dtype_name(text: str) -> str:
    """mamf's name; what mamf has no name for stays as printed."""
    bare = text.strip().removeprefix("torch.")
    try:
        return canonical_name(bare)
    except UnknownNameError:
        return bare
