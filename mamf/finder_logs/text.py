"""From the bytes of a log to clean lines, and no name of a person or machine in what is kept."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

from mamf.environment import scrub
from mamf.errors import RunLogError

# A redirect of PowerShell writes UTF-16.
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# An erased line has ended; a colour is nothing.
_ERASE = re.compile(r"\x1b\[[0-9;?]*[A-K]")
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# What an issue or a README adds: escapes, and the mark of a quotation.
_MARKDOWN_ESCAPE = re.compile(r"\\([*_|~])")
_QUOTATION = re.compile(r"^(?:> ?)+")
_ECHO = re.compile(r"^(?:\^C)+")
# The ends of a line behind which nothing is missing that would change what it says.
_WHOLE_END = re.compile(r"(?:\)|TFLOPS\w*|\(MxNxK\).*(?:W|MHz|\dC)|\d:\d\d:\d\d|Best is trial.*)$")

_HOME = re.compile(r"(?:/home|[/\\]Users)[/\\]+([\w.@+-]+)")
_HOST = re.compile(r"^(?:Linux|Darwin|Windows|FreeBSD)\s+(\S+)(?=.*(?:#\d|x86_64|aarch64|arm64|AMD64))")
_KERNEL_RELEASE = re.compile(r"\d+\.\d")
# One with blanks in it, which the shell put in quotes.
_QUOTED_PATH = re.compile(r"(['\"])(--\w+=)?(?:~|[A-Za-z]:)?[/\\](?:[^'\"/\\]*[/\\])*([^'\"/\\]*)\1")
_UUID = re.compile(r"\b(?:GPU-|MIG-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE)
# Names that name nobody, or stand in a log for other reasons.
_HARMLESS = {"linux", "darwin", "windows", "localhost", "root", "user", "admin", "ubuntu", "runner", "torch", "cuda"}
_SHORTEST_NAME = 3


def decode(content: bytes) -> str:
    """Raises RunLogError for what is no text."""
    if content.startswith(_UTF16):
        return content.decode("utf-16", errors="replace")
    if b"\0" in content:
        raise RunLogError("binary, not a log of mamf-finder; give the file named by its --output_file")
    return content.decode("utf-8-sig", errors="replace")


def clean_lines(text: str) -> list[str]:
    """The lines without the residue of terminals and markdown. A carriage return ends a line, as rows end in one.

    A last line that breaks off is left out where more may have followed: half a number is a wrong number.
    """
    text = _ESCAPE.sub("", _ERASE.sub("\n", text)).replace("\r", "\n")
    lines = [_clean(line) for line in text.split("\n")]
    if lines[-1].strip() and not _WHOLE_END.search(lines[-1]):
        lines.pop()
    return [line for line in lines if not line.lstrip().startswith("```")]


def _clean(line: str) -> str:
    line = _ECHO.sub("", _QUOTATION.sub("", line))
    return _MARKDOWN_ESCAPE.sub(r"\1", line).rstrip()


def host_of(uname: str) -> str | None:
    """The second word of a uname line; None where it was cut out before."""
    found = _HOST.match(uname)
    return found[1] if found and not _KERNEL_RELEASE.match(found[1]) else None


class Scrubber:
    """Takes out of a string what the log itself shows to be private: its host's and users' names, and every path."""

    def __init__(self, lines: Iterable[str]) -> None:
        names: dict[str, str] = {}
        for line in lines:
            names |= dict.fromkeys(_HOME.findall(line), "<user>")
            host = host_of(line.strip().removeprefix("- "))
            if host:
                names |= {host: "<host>", host.split(".")[0]: "<host>"}
        kept = {name: by for name, by in names.items() if len(name) >= _SHORTEST_NAME and name.lower() not in _HARMLESS}
        # Longest first: a short host name is a part of the long one.
        self._names = [
            (re.compile(rf"(?<!\w){re.escape(name)}(?!\w)"), kept[name]) for name in sorted(kept, key=len, reverse=True)
        ]

    def __call__(self, text: str) -> str:
        text = scrub(_QUOTED_PATH.sub(r"'\2<path>/\3'", text))
        for pattern, substitute in self._names:
            text = pattern.sub(substitute, text)
        return _UUID.sub("<uuid>", text)
