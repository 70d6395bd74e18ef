"""Finds and removes private texts: host names, accounts, absolute paths, addresses, serial numbers."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any

from mamf.contribution.evidence import Finding
from mamf.logs.finder.grammars import GRAMMARS
from mamf.machine.environment import scrub

Field = tuple[tuple[str, ...], Any]

_PRIVATE_KEY = re.compile(
    # A copy to_host is a direction.
    r"(^|(?<!\bto)_)(host|host_?name|node|node_?name|user|user_?name|login|account|cwd|home|email|e_mail|fqdn|ip|ipv[46]"
    r"|ip_?address|mac|uuid|serial|serial_?(number|no)|sn|asset_?tag)$",
    re.I,
)
_NO_NUMBERS = frozenset((dict, list, str))
_GRAMMAR = "|".join(re.escape(one) for one in sorted({grammar.version for grammar in GRAMMARS}))
# Written by mamf in every row: shapes, and names of log grammars, of which v1c+/F1 looks like a path.
_OURS = re.compile(rf"\d+x\d+x\d+|(?:{_GRAMMAR})(?:/(?:{_GRAMMAR}))*")
# Longer texts are not searched: that would take too long, and no note is that long.
_LONGEST_TEXT = 10_000
_LABEL = r"[a-z0-9][a-z0-9-]{0,62}"
_OWN_DOMAINS = "local|localdomain|lan|internal|intra|corp|cluster|home"
_PUBLIC_DOMAINS = "com|net|org|edu|gov|io|ai|cloud|dev|at|au|be|ca|ch|cn|cz|de|dk|es|eu|fi|fr|il|in|it|jp|kr|nl|no|pl"
_PUBLIC_DOMAINS += "|ru|se|sg|tw|uk|us"
# Below 20 an address looks like a version (cuBLAS 12.1.3.1), except in private address ranges.
_ADDRESS = r"(?:10|127|(?:[2-9]\d|1\d\d|2[0-4]\d|25[0-5]))(?:\.(?:25[0-5]|2[0-4]\d|1?\d?\d)){3}"
# Addresses in use begin with a group of four digits, unlike times, slices and C++ names.
_GROUP = r"[0-9a-f]{1,4}"
_GROUPS = rf"{_GROUP}(?::{_GROUP}){{0,6}}"
_ADDRESS_6 = rf"(?:{_GROUP}:){{7}}{_GROUP}|(?=[23][0-9a-f]{{3}}:|f[cdef][0-9a-f]{{2}}:){_GROUPS}::(?:{_GROUPS})?"
_SERIAL = r"serial(?:[ _-]?(?:number|num|no)\b\.?)?|s/n|sn(?=[:#=])"
# Each with its replacement.
_PATTERNS = (
    (re.compile(rf"\b[\w.+-]{{1,64}}@(?!\d){_LABEL}(?:\.{_LABEL}){{0,8}}", re.I), "<user>@<host>"),
    (re.compile(rf"(?<![/\w.-])(?:{_LABEL}\.){{1,8}}(?:{_OWN_DOMAINS})\b(?![./(\w:-])", re.I), "<host>"),
    (re.compile(rf"(?<![/\w.-])(?:{_LABEL}\.){{2,8}}(?:{_PUBLIC_DOMAINS})\b(?![./(\w:-])", re.I), "<host>"),
    (re.compile(r"\b(?:ssh|file|smb|nfs|ftp)://\S+", re.I), "<address>"),
    (re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.I), "<uuid>"),
    (re.compile(rf"\b(?:{_SERIAL})(?: is)?[\s:#=]{{1,3}}[\w-]*\d[\w-]*", re.I), "<serial number>"),
    (re.compile(rf"(?<![\w:.])(?:{_ADDRESS_6})(?!\w|:\w)", re.I), "<address>"),
    (re.compile(r"\b[0-9a-f]{2}(?::[0-9a-f]{2}){5}\b", re.I), "<address>"),
    (re.compile(rf"(?<![\w.]){_ADDRESS}(?![\w.])"), "<address>"),
)


# A finding about a field: the text before the field's name and the text after it.
_Wording = tuple[str, str]


def private_findings(line: int, record: dict[str, Any]) -> Iterator[Finding]:
    """One finding for each field that holds something private."""
    for path, (before, behind) in _private(record):
        yield Finding("private", f"{before}{'.'.join(path)}{behind}", line)


def _private(value: Any) -> list[tuple[tuple[str, ...], _Wording]]:
    """Private fields in an object or a list, by their path of names and indices."""
    found = []
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        wording = _describe_name(key, item is not None) if isinstance(key, str) else None
        if wording is None and isinstance(item, str):
            wording = _describe_text(item)
        elif wording is None and _has_nested_objects(item):
            found += [((str(key), *path), within) for path, within in _private(item)]
        if wording is not None:
            found.append(((str(key),), wording))
    return found


@functools.lru_cache(4096)  # the same names stand in every row
def _describe_name(name: str, has_value: bool) -> _Wording | None:
    if has_value and _PRIVATE_KEY.search(name):
        return "field ", " names a host, user or device: remove it"
    found = private_part(name)
    return ("the name of field ", f" holds {found!r}") if found else None


def _describe_text(text: str) -> _Wording | None:
    if len(text) > _LONGEST_TEXT:
        return "", f" is a text of {len(text)} characters: too long to be reviewed"
    found = private_part(text)
    return ("", f" holds {found!r}") if found else None


def private_part(text: str) -> str | None:
    """The first private part of a text, or None."""
    return _private_part(text) if text and not _OURS.fullmatch(text) else None


@functools.lru_cache(4096)
def _private_part(text: str) -> str | None:
    if scrub(text) != text:
        return next((word for word in text.split() if scrub(word) != word), text)
    return next((match[0] for pattern, _ in _PATTERNS if (match := pattern.search(text))), None)


def without_private(record: Any) -> Any:
    """A record with private fields left out and private parts of texts and of names replaced."""
    if isinstance(record, dict):
        kept = {key: value for key, value in record.items() if not _PRIVATE_KEY.search(key)}
        return {_replaced(key): without_private(value) for key, value in kept.items()}
    if isinstance(record, list):
        return [without_private(value) for value in record]
    return _replaced(record) if isinstance(record, str) else record


def _replaced(text: str) -> str:
    if len(text) > _LONGEST_TEXT or _OURS.fullmatch(text):
        return text
    text = scrub(text)
    for pattern, substitute in _PATTERNS:
        text = pattern.sub(substitute, text)
    return text


def fields(record: dict[str, Any]) -> list[Field]:
    """Every value with its path: names, and indices of list elements. Lists of numbers are one value."""
    found: list[Field] = []
    _add_fields(record, (), found)
    return found


def _add_fields(value: dict[str, Any] | list[Any], path: tuple[str, ...], found: list[Field]) -> None:
    children = value.items() if isinstance(value, dict) else zip(map(str, itertools.count()), value, strict=False)
    for name, item in children:
        if _has_nested_objects(item):
            _add_fields(item, (*path, name), found)
        else:
            found.append(((*path, name), item))


def _has_nested_objects(value: Any) -> bool:
    """Whether a value has fields or elements with separate paths; a list of numbers has not."""
    return isinstance(value, dict) or (isinstance(value, list) and not _NO_NUMBERS.isdisjoint(map(type, value)))
