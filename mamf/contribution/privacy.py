"""What names a person or a machine: host names, accounts, absolute paths, addresses, serial numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mamf.contribution.evidence import Finding
from mamf.environment import scrub, scrub_record

_PRIVATE_KEY = re.compile(
    r"(^|_)(host|hostname|node|nodename|user|username|login|account|cwd|home|email|e_mail|fqdn|ip|ip_address|mac"
    r"|uuid|serial|serial_number)$",
    re.I,
)
_SUFFIXES = "local|localdomain|lan|internal|intra|corp|cluster|home|com|net|org|edu|gov|io|ai|cloud|dev"
# Each with the text that takes its place.
_PATTERNS = (
    (re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)*"), "<user>@<host>"),
    (re.compile(rf"(?<![/\w.-])(?:[a-z0-9][\w-]*\.)+(?:{_SUFFIXES})\b(?![./(\w-])", re.I), "<host>"),
    (re.compile(r"\bGPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.I), "<uuid>"),
    (re.compile(r"(?<![\d.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\d.])"), "<address>"),
)
# Versions look like addresses.
_VERSIONED = {"versions", "packages", "driver", "tool", "importer", "software", "variables", "os", "device_properties"}


def private_findings(line: int, record: dict[str, Any]) -> Iterator[Finding]:
    """One finding for each field that holds something private."""
    for path, value in fields(record):
        if _PRIVATE_KEY.search(path[-1]) and value is not None:
            yield Finding("private", f"field {'.'.join(path)} names a host, user or device: remove it", line)
        elif isinstance(value, str) and (found := private_part(value, path)):
            yield Finding("private", f"{'.'.join(path)} holds {found!r}", line)


def private_part(text: str, path: tuple[str, ...] = ()) -> str | None:
    """The first private part of a text, or None."""
    if scrub(text) != text:
        return next((word for word in text.split() if scrub(word) != word), text)
    for pattern, _ in _patterns(path):
        if match := pattern.search(text):
            return match[0]
    return None


def without_private(record: Any, path: tuple[str, ...] = ()) -> Any:
    """A record with private fields left out and private parts of texts replaced."""
    if isinstance(record, dict):
        kept = {key: value for key, value in record.items() if not _PRIVATE_KEY.search(key)}
        return {key: without_private(value, (*path, key)) for key, value in kept.items()}
    if isinstance(record, list):
        return [without_private(value, path) for value in record]
    if not isinstance(record, str):
        return record
    text = str(scrub_record(record))
    for pattern, substitute in _patterns(path):
        text = pattern.sub(substitute, text)
    return text


def _patterns(path: tuple[str, ...]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return _PATTERNS[:-1] if _VERSIONED & set(path) else _PATTERNS


def fields(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value that holds no others, with the names that lead to it."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from fields(item, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, (dict, list, str)) for item in value):
        for item in value:
            yield from fields(item, path)
    elif path:
        yield path, value
