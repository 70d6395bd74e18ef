"""Finds and removes private texts: host names, accounts, absolute paths, addresses, serial numbers."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from mamf.contribution.evidence import Finding
from mamf.machine.environment import scrub

Field = tuple[tuple[str, ...], Any]

# Names of fields, and of variables in texts, whose values are private.
_SECRET = (
    r"token|passw(?:or)?d|pass_?phrase|pwd|secret|credentials?"
    r"|(?:api|auth|access|secret|private|ssh|account|license)[_-]?key"
)
_PRIVATE = r"host_?name|node_?(?:name|list)|user_?name|log_?name|user|master_addr|fqdn"
_PRIVATE_KEY = re.compile(
    # A copy to_host is a direction.
    r"(?:^|(?<!\bto)[_-]|(?<=[a-z])(?=[A-Z]))(?i:host|node|login|account|cwd|home|e_?mail|ip|ipv[46]|ip_?address|mac|uuid"
    rf"|serial|serial_?(?:number|no)|sn|asset_?tag|key|key_?id|{_PRIVATE}|{_SECRET})$|(?i:PASSWORD)$"
)
_SEARCHED = frozenset((dict, list, str))
# Shapes, which mamf writes in every row.
_OURS = re.compile(r"\d+x\d+x\d+")
# Longer texts are not searched: that would take too long, and no note is that long.
_LONGEST_TEXT, _LONG = 10_000, "<long text>"
_LABEL = r"[a-z0-9][a-z0-9-]{0,62}"
_OWN_DOMAINS = "local|localdomain|lan|internal|intra|corp|cluster|home"
_PUBLIC_DOMAINS = (
    "com|net|org|edu|gov|io|ai|cloud|dev|at|au|be|ca|ch|cn|cz|de|dk|es|eu|fi|fr|il|in|it|jp|kr|nl|no|pl"
    "|ru|se|sg|tw|uk|us"
)
_OCTET = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
# Below 20 an address looks like a version (cuBLAS 12.1.3.1), except in private ranges, behind a word of networks, or
# with a number that no version has.
_ADDRESS = rf"(?:10|127|[2-9]\d|1\d\d|2[0-4]\d|25[0-5]|1?\d(?=[\d.]*\.[12]\d\d))(?:\.{_OCTET}){{3}}"
# Addresses in use begin with a group of four digits, unlike times, slices and C++ names.
_GROUP = r"[0-9a-f]{1,4}"
_GROUPS = rf"{_GROUP}(?::{_GROUP}){{0,6}}"
_ADDRESS_6 = rf"(?:{_GROUP}:){{7}}{_GROUP}|(?=[23][0-9a-f]{{3}}:|f[cdef][0-9a-f]{{2}}:){_GROUPS}::(?:{_GROUPS})?"
_SERIAL = r"serial(?:[ _-]?(?:number|num|no)\b\.?)?|s/n|sn(?=[:#=])|(?:service|asset)[ _-]?tag"
# What services give away; each begins as its service says.
_FORMATS = (
    r"gh[opsur]_\w{16,}|github_pat_\w{16,}|gl[a-z]{2,5}-[\w-]{16,}|hf_\w{16,}|sk-[\w-]{16,}|[srp]k_(?:live|test)_\w{8,}",
    r"(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}|AIza[\w-]{20,}|ya29\.[\w-]{16,}|GOCSPX-[\w-]{16,}|xox[a-z]-[\w-]{8,}",
    r"xapp-[\w-]{8,}|npm_\w{20,}|pypi-[\w-]{20,}|nvapi-[\w-]{16,}|r8_\w{16,}|gsk_\w{16,}|xai-\w{16,}|dapi[0-9a-f]{24,}",
    r"SG\.[\w-]{8,}\.[\w-]{8,}|hv[sb]\.[\w-]{16,}|do[opr]_v1_\w{16,}|dckr_pat_[\w-]{16,}|tskey-[\w-]{12,}",
    r"AGE-SECRET-KEY-\w+|\d{8,10}:AA[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?|ssh-(?:rsa|dss|ed25519) AAAA\S+",
)
# Each with what replaces it.
_RULES = (
    (r"-{5}BEGIN [A-Z ]{0,30}PRIVATE KEY-{5}[\w+/=\s\\-]*", "<secret>"),
    (rf"\b(?-i:{'|'.join(_FORMATS)})", "<secret>"),
    (r"\bhttps://(?:hooks\.slack|discord(?:app)?)\.com/\S+", "<secret>"),
    (rf"(?:--?|\b)[\w-]{{0,60}}(?:{_SECRET})['\"]?(?: is|\s?[=:])\s?['\"]?[^\s,;'\"&]+['\"]?", "<secret>"),
    (rf"(?<![\w-])--?[\w-]{{0,60}}(?:{_SECRET})\s+[^\s-]\S*|\bbearer\s+[\w.=+/-]{{8,}}", "<secret>"),
    (rf"\b(?-i:(?:[A-Z]+_)*(?i:{_PRIVATE}))=[^\s,;]+", "<private>"),
    (
        r"\b(?:s[sm][hb]|file|nfs|s?ftps?|s3[an]?|gc?s|azb?|abfss?|wasbs?|hdfs|git|svn|rsync|ldaps?)(?:\+\w+)?://\S+",
        "<address>",
    ),
    (r"\b[a-z][a-z0-9+.]{1,20}://[^\s/@]+@\S+", "<address>"),
    (rf"\b[\w.+-]{{1,64}}@(?!\d){_LABEL}(?:\.{_LABEL}){{0,8}}(?::[\w~./-]+)?", "<user>@<host>"),
    (rf"(?<![/\w.-])(?:{_LABEL}\.){{1,8}}(?:{_OWN_DOMAINS})\b(?![./(\w:-])", "<host>"),
    (rf"(?<![/\w.-])(?:{_LABEL}\.){{2,8}}(?:{_PUBLIC_DOMAINS})\b(?![./(\w:-])", "<host>"),
    (r"\bip(?:-\d{1,3}){4}\b|\b[a-z][a-z0-9-]{0,62}\[\d+-\d+(?:,\d+(?:-\d+)?)*\]", "<host>"),
    (r"\b(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "<uuid>"),
    (rf"(?<![a-z])(?:{_SERIAL})(?: is)?[\s:#=]{{1,40}}[\w-]*\d[\w-]*", "<serial number>"),
    (rf"(?<![\w:.])(?:{_ADDRESS_6})(?!\w|:\w)|\b[0-9a-f]{{2}}(?:[:-][0-9a-f]{{2}}){{5}}\b", "<address>"),
    (
        rf"(?<![\w.]){_ADDRESS}(?![\w.])"
        rf"|\b(?:ip|host|server|addr|address|ssh|ping|dns)[ :=]{{1,3}}{_OCTET}(?:\.{_OCTET}){{3}}(?![\w.])",
        "<address>",
    ),
)
_ANY = re.compile("|".join(f"({pattern})" for pattern, _ in _RULES), re.I)
_SUBSTITUTE = re.compile(
    "|".join(sorted({*(by for _, by in _RULES), "<path>", "<user>", _LONG}, key=len, reverse=True))
)


def private_findings(line: int, record: dict[str, Any]) -> Iterator[Finding]:
    """One finding for each field that holds something private."""
    if (clean := without_private(record)) != record:
        for name, what in removals(record, clean):
            yield Finding("private", f"{name} holds {what}: 'mamf results submit' removes it", line)


def removals(record: dict[str, Any], clean: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each field of a record that is not in its clean copy as it was, and the kinds of what was removed: not what."""
    kept = dict(fields(clean))
    for path, value in fields(record):
        if path not in kept:
            yield ".".join(map(cleaned, path)), "a private name"
        elif (left := kept[path]) != value:
            before, after = (Counter(_SUBSTITUTE.findall(text)) for text in (value, left))
            yield ".".join(path), ", ".join(after - before) or "a private text"


@functools.lru_cache(4096)
def cleaned(text: str) -> str:
    """A text with its private parts replaced, or a longer text than is searched."""
    if not text or _OURS.fullmatch(text):
        return text
    if len(text) > _LONGEST_TEXT:
        return _LONG
    return _ANY.sub(lambda found: _RULES[(found.lastindex or 1) - 1][1], scrub(text))


# The same names stand in every row.
_is_private = functools.lru_cache(4096)(_PRIVATE_KEY.search)


def without_private(record: Any, clean: Callable[[str], str] = cleaned) -> Any:
    """A record with private fields left out and private parts of texts and of names replaced."""
    if isinstance(record, dict):
        return {
            clean(key): without_private(value, clean) if type(value) in _SEARCHED else value
            for key, value in record.items()
            if value is None or not _is_private(key)
        }
    if isinstance(record, list) and _has_nested_objects(record):
        return [without_private(value, clean) for value in record]
    return clean(record) if isinstance(record, str) else record


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
    return isinstance(value, dict) or (isinstance(value, list) and not _SEARCHED.isdisjoint(map(type, value)))
