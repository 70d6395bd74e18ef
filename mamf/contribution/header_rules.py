"""Rules about the fields of a log and its device, for our own logs and for imported runs of mamf-finder."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from functools import cache
from typing import Any

from msgspec.inspect import DataclassType, ListType, StructType, Type, UnionType, type_info

from mamf.backend import SIMULATED, DeviceInfo, describe_sharing
from mamf.contribution.evidence import Evidence, Finding
from mamf.dtypes import DTYPES
from mamf.files import packaged_rows
from mamf.logs.legacy import STATISTICS, FinderRun
from mamf.logs.recording import Header
from mamf.logs.records import RECORDS
from mamf.machine.privacy import scrub_record
from mamf.measurement import TERA
from mamf.peaks import contributed_rates, fastest_possible_flops, listed_as, matching_device
from mamf.plans import EXPLAIN

_Names = dict[str, Any]
# No markup, and no bracket that begins a picture or a link.
_PLAIN = re.compile(r"(?:(?!!\[|\]\()[!-~](?: (?! ))?)*(?<! )")
# How much of the memory on the box a device reports: drivers reserve some, and a GB may be a GiB.
_MIN_MEMORY, _MAX_MEMORY = 0.86, 1.10
# The clocks of two machines may differ.
_CLOCKS_APART = timedelta(days=2)


def has_known_fields(evidence: Evidence) -> Iterator[Finding]:
    """Records have only fields that mamf writes."""
    for line, record in evidence.records:
        for name in _unknown_fields(record, _declared(Header if line == 1 else RECORDS[record["record"]])):
            if name not in ("record", "time"):
                yield Finding("unknown-field", f"mamf writes no field {name!r} of such a record: remove it", line)


@cache
def _declared(kind: type) -> _Names:
    return _names_in(type_info(kind))


def _names_in(of: Type) -> _Names:
    """The fields that a type declares, each with those within it; empty where any field may be."""
    if isinstance(of, UnionType):
        return next(filter(None, map(_names_in, of.types)), {})
    if isinstance(of, ListType):
        return _names_in(of.item_type)
    if isinstance(of, (StructType, DataclassType)):
        return {each.encode_name: _names_in(each.type) for each in of.fields}
    return {}


def _unknown_fields(value: Any, known: _Names, prefix: str = "") -> Iterator[str]:
    for name, each in value.items():
        if name not in known:
            yield prefix + name
        elif known[name]:
            for inner in each if isinstance(each, list) else [each]:
                yield from _unknown_fields(inner or {}, known[name], f"{prefix}{name}.")


def is_real_device(evidence: Evidence) -> Iterator[Finding]:
    """Rejects simulated devices and shared cards, and devices of several models in one run."""
    log = evidence.log
    if log.header["device"]["backend"] == SIMULATED:
        yield Finding("simulated", "measured on the simulated backend", 1)
    names = dict.fromkeys([log.header["device"]["name"], *(device.name for device in log.devices)])
    for name in names:
        if shared := describe_sharing(name):
            yield Finding("shared-card", f"{shared}; run it again with the card to itself", 1)
    if len({device.name for device in log.devices}) > 1:
        yield Finding("shared-card", f"devices of several models share the run: {', '.join(names)}", 1)


def is_one_device(evidence: Evidence) -> Iterator[Finding]:
    """Name, vendor, backend and memory belong together, and names are plain text as they are usually spelled."""
    devices = {device.name: device for device in (*evidence.log.devices, evidence.log.device(None))}
    for text in {*devices, evidence.header["kernel"], *(row.kernel for _, _, row in evidence.rows)}:
        if not _PLAIN.fullmatch(text):
            yield Finding("device", f"{text!r} is not plain text: letters, digits, punctuation and single blanks", 1)
    for info in devices.values():
        if usual := _usual_spelling(info.name):
            yield Finding("device", f"{info.name} is written {usual} elsewhere: leave the name as torch gives it", 1)
        facts = _facts().get(matching_device(info.name) or "")
        if facts is None or not info.is_accelerator or info.backend == SIMULATED:
            continue
        if info.vendor.casefold() != facts["vendor"]:
            yield Finding("device", f"{info.name} is not of the vendor {info.vendor!r}", 1)
        if info.backend not in facts["backends"].split():
            yield Finding("device", f"{info.name} is not measured with the backend {info.backend!r}", 1)
        shares = [(info.memory_bytes or 0) / (float(size) * 1e9) for size in facts["memory_gb"].split()]
        if info.memory_bytes and not any(_MIN_MEMORY <= share <= _MAX_MEMORY for share in shares):
            has = f"{info.memory_bytes / 1e9:.0f} GB of memory, but {info.name} has {facts['memory_gb']}"
            yield Finding("device", f"the log names {has}", 1)


@cache
def _facts() -> dict[str, dict[str, str]]:
    """What a device of peaks.csv has: its vendor, its backends, and the sizes of its memory in GB."""
    return {row["name"]: row for row in packaged_rows("devices.csv")}


def _usual_spelling(name: str) -> str | None:
    """The known name that differs from this one only in case, blanks and punctuation, or None."""
    known = {_letters(each.device): each.device for each in contributed_rates()}
    usual = known.get(_letters(name), name)
    return listed_as(name) if usual == name else usual


def _letters(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def is_of_normal_data(evidence: Evidence) -> Iterator[Finding]:
    """Zeros and patterns draw less power, so their rates are not ceilings; ``mamf explain`` varies data on purpose."""
    for problem in evidence.header["plan"]["problems"]:
        if problem.get("data") not in (None, "normal") and evidence.plan.kind != EXPLAIN:
            yield Finding("data", f"measured with {problem['data']} data: results are of --data normal", 1)


def is_of_the_past(evidence: Evidence) -> Iterator[Finding]:
    """No record is dated in the future."""
    latest = datetime.now(timezone.utc) + _CLOCKS_APART
    for line, record in evidence.records:
        text = record.get("time", record.get("started"))
        if text is not None and datetime.fromisoformat(text) > latest:
            yield Finding("future", f"written at {text}, which is in the future", line)
            return


def private_findings(line: int, record: dict[str, Any]) -> Iterator[Finding]:
    """mamf removes private texts when it writes a log: what is found here was written by another version or by hand."""
    clean = scrub_record(record)
    if clean != record:
        names = ", ".join(sorted({*record} ^ {*clean} | {name for name in record if clean.get(name) != record[name]}))
        yield Finding("private", f"a secret, an account, a host, an address or a path in {scrub_record(names)}", line)


def legacy_findings(run: FinderRun) -> Iterator[Finding]:
    """Rules about an imported run: it names its accelerator, and its figures are possible."""
    if not run.device:
        yield Finding("device", "the log names no accelerator", 1)
    if not run.rows and not run.best:
        yield Finding("missing-row", "the log has no figure")
    limit = None
    if run.dtype in DTYPES and run.device:
        limit = fastest_possible_flops(DeviceInfo("legacy", 0, run.device, ""), run.dtype)
    for line, row in enumerate((*run.rows, *run.best.values()), start=2):
        for name, tflops in row.tflops.items():
            if name not in STATISTICS or not 0 < tflops < math.inf:
                yield Finding("unreadable", f"{name} {tflops!r} is not a figure of mamf-finder", line)
            elif limit is not None and tflops * TERA > limit:
                yield Finding("implausible", f"{tflops:g} TFLOPS are more than {run.device} can do", line)
