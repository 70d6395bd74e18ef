"""Rules about a log's header and the device that it names, of our own logs and of imported runs of mamf-finder."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mamf.backend import SIMULATED, DeviceInfo
from mamf.ceilings.contributed import contributed_ceilings
from mamf.contribution.evidence import Evidence, Finding, problems_of
from mamf.dtypes import DTYPES
from mamf.logs.card_sharing import describe_sharing
from mamf.logs.legacy import STATISTICS, FinderRun, Reported
from mamf.measurement import TERA
from mamf.peaks import fastest_possible_flops, listed_as
from mamf.plans import EXPLAIN

#: Known on every device.
_REQUIRED = (
    "tool.version",
    "command",
    "started",
    "device.backend",
    "device.name",
    "device.vendor",
    "timer",
    "sensors",
    "kernel",
    "environment.python",
    "environment.os",
    "environment.packages.torch",
    "findings",
)
#: Named on every device; null if its libraries do not report them.
_NAMED = (
    "device.compute_units",
    "device.memory_bytes",
    "device.cache_bytes",
    "device.max_clock_hz",
    "device.power_limit_watts",
    "device.driver",
    "device.uuid_hash",
    "device.versions",
    "settings",
    "environment.variables",
)
#: Reported by an accelerator's sensors.
_WITH_SENSORS = ("device.max_clock_hz", "device.power_limit_watts", "device.driver")
_OF_PROBLEM = ("dtype", "data", "seed")
_OF_MATMUL = (*_OF_PROBLEM, "out_dtype", "layout")
_KNOWN = {
    *(
        "record",
        "schema",
        "converted_from",
        "tool",
        "command",
        "started",
        "device",
        "timer",
        "traits",
        "sensors",
        "kernel",
        "plan",
        "settings",
        "devices",
    ),
    *("environment", "findings", "notes"),
}
# No markup, and no bracket that begins a picture or a link.
_PLAIN = re.compile(r"(?:(?!!\[|\]\()[ -;=?-~])*")
_PLACEHOLDER = re.compile(r"\W*|unknown|undefined|n/?a|none|null|to-?do|tbd|fix-?me|x{3,}|your .*|<[^>]*>", re.I)


def missing_fields(evidence: Evidence) -> Iterator[Finding]:
    """Reports required fields that are missing or empty, and fields that mamf does not write."""
    header = evidence.header
    required = {*_REQUIRED, *(_WITH_SENSORS if _has_sensors(evidence) else ())}
    for name in (*_REQUIRED, *_NAMED):
        if not is_there(header, name) or (name in required and value_at(header, name) in (None, "", [])):
            yield Finding("missing-field", f"the header says nothing of {name}: run it again with this mamf", 1)
    for name in ("device.compute_units", "device.memory_bytes"):
        if is_there(header, name) and value_at(header, name) is None:
            yield Finding("missing-field", f"{name} is not known", 1, is_warning=True)
    plan = header["plan"]
    for problem in problems_of(plan):
        for name in required_of_problem(evidence):
            if problem.get(name) in (None, ""):
                yield Finding("missing-field", f"the plan says nothing of {name}", 1)
    if not plan.get("regimes"):
        yield Finding("missing-field", "the plan names no regime", 1)
    for name in sorted(set(header) - _KNOWN):
        yield Finding("unknown-field", f"mamf writes no header field {name!r}: remove it", 1)


def required_of_problem(evidence: Evidence) -> tuple[str, ...]:
    """Fields of every problem of the plan; of an operation that mamf does not know only its dtype is sure."""
    if not evidence.is_of_kernels:
        return _OF_MATMUL
    return _OF_PROBLEM if evidence.is_attention else _OF_PROBLEM[:1]


def _has_sensors(evidence: Evidence) -> bool:
    return not evidence.is_cpu and bool(evidence.header["sensors"] == "available")


def sensors_were_read(evidence: Evidence) -> Iterator[Finding]:
    """Available sensors were read; a warning says if there were none."""
    sensors, rows = evidence.header["sensors"], [row.conditions for _, _, row in evidence.rows if row.ok]
    if sensors != "available":
        yield Finding("sensors", f"clock, power and temperature: {sensors}", 1, is_warning=True)
    elif _has_sensors(evidence) and not any(seen.clock_hz and seen.watts is not None for seen in rows):
        yield Finding("sensors", "they were available, and yet no row says its clock and power", 1)
    unread = sum(not seen.clock_hz for seen in rows)
    if 0 < unread < len(rows):
        yield Finding("sensors", f"{unread} of {len(rows)} rows have no clock, and the others have one")


def plain_texts(evidence: Evidence) -> Iterator[Finding]:
    """Names that stand in tables are plain printable ASCII, with single blanks and no markup."""
    header = evidence.header
    named = {"kernel": header["kernel"], **{f"device.{name}": value for name, value in header["device"].items()}}
    versions = {**(header["device"].get("versions") or {}), **header["environment"].get("packages", {})}
    rows = {"a row's kernel": " ".join({row.kernel for _, _, row in evidence.rows})}
    shared = enumerate(header.get("devices", ()))
    others = {f"devices.{place}.{name}": value for place, each in shared for name, value in each.items()}
    for name, value in {**others, **named, **rows, **versions}.items():
        if isinstance(value, str) and (not _PLAIN.fullmatch(value) or value != " ".join(value.split())):
            yield Finding("plain-text", f"{name} is {value!r}: letters, digits and punctuation alone", 1)
        elif not isinstance(value, str) and (name in versions or name in ("kernel", "device.name", "device.vendor")):
            yield Finding("plain-text", f"{name} is {value!r}, no text", 1)


def placeholders(evidence: Evidence) -> Iterator[Finding]:
    """Reports fields that still hold a placeholder."""
    for name in (*_REQUIRED, *_WITH_SENSORS):
        value = value_at(evidence.header, name)
        if isinstance(value, str) and value and _PLACEHOLDER.fullmatch(value.strip()):
            yield Finding("placeholder", f"{name} is {value!r}: say what it is", 1)


def circumstances(evidence: Evidence) -> Iterator[Finding]:
    """Warns of changed code and of a busy machine."""
    commit = evidence.header["tool"].get("commit")
    if commit and commit.endswith("+"):
        yield Finding("changed-code", f"mamf had uncommitted changes on top of {commit[:-1]}", 1, is_warning=True)
    for text in evidence.header.get("findings", []):
        if text.startswith("WARN"):
            yield Finding("doctor", text.removeprefix("WARN").strip(), 1, is_warning=True)


def structured_data(evidence: Evidence) -> Iterator[Finding]:
    """Zeros and patterns draw less power, so their rates are not ceilings; ``mamf explain`` varies data on purpose."""
    for problem in problems_of(evidence.header["plan"]):
        if problem.get("data") not in (None, "normal") and evidence.plan.kind != EXPLAIN:
            yield Finding("data", f"measured with {problem['data']} data: results are of --data normal", 1)


def value_at(header: Mapping[str, Any], dotted: str) -> Any:
    """The value that a dotted name leads to, or None."""
    value: Any = header
    for name in dotted.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def is_there(header: Mapping[str, Any], dotted: str) -> bool:
    parent, _, name = dotted.rpartition(".")
    holder = value_at(header, parent) if parent else header
    return isinstance(holder, Mapping) and name in holder


# -- imported runs -----------------------------------------------------------------------------------------------------


# A headline is rounded to whole TFLOPS by some versions.
_HEADLINE_ROUNDING = 0.6


def legacy_findings(run: FinderRun) -> Iterator[Finding]:
    if not run.device:
        yield Finding("missing-field", "the log names no accelerator", 1)
    if run.dtype is not None and run.dtype not in DTYPES:
        yield Finding("missing-field", f"{run.dtype!r} is no dtype of mamf: it stands in the table as printed", 1, True)
    if not run.rows and not run.best:
        yield Finding("missing-row", "the log holds no figure")
    limit = _limit(run)
    for number, row in enumerate(run.rows, start=2):
        yield from _figures(run, row, limit, number)
    for row in run.best.values():
        yield from _figures(run, row, limit, len(run.rows) + 2)
    yield from _best_of_rows(run)


def _figures(run: FinderRun, row: Reported, limit: float | None, line: int) -> Iterator[Finding]:
    for name, tflops in row.tflops.items():
        if name not in STATISTICS or not isinstance(tflops, (int, float)) or not 0 < tflops < math.inf:
            yield Finding("unreadable", f"{name} {tflops!r} is no figure of mamf-finder", line)
        elif limit is not None and tflops * TERA > limit:
            yield Finding("implausible", f"{tflops:g} TFLOPS are more than {run.device} can do", line)


def _limit(run: FinderRun) -> float | None:
    if run.dtype not in DTYPES or not run.device:
        return None
    return fastest_possible_flops(DeviceInfo("legacy", 0, run.device, ""), run.dtype)


def _best_of_rows(run: FinderRun) -> Iterator[Finding]:
    """The log's own best is among its rows, where all of them are there."""
    for name, best in run.best.items():
        seen = [row.tflops[name] for row in run.rows if name in row.tflops]
        is_whole = run.tried is not None and len(run.rows) >= run.tried
        if seen and is_whole and best.tflops[name] > max(seen) + _HEADLINE_ROUNDING:
            yield Finding("best-mismatch", f"best {name} {best.tflops[name]:g}, the rows give {max(seen):g} at most")


# -- the device --------------------------------------------------------------------------------------------------------


# More than any machine has: the largest have 16 sockets of 128 cores.
_MOST_CORES = 2048


def simulated(evidence: Evidence) -> Iterator[Finding]:
    """Simulated devices are rejected: their figures say nothing about hardware."""
    if evidence.header["device"]["backend"] == SIMULATED:
        yield Finding("simulated", "measured on the simulated backend", 1)


def shared_devices(evidence: Evidence) -> Iterator[Finding]:
    """Devices that shared a run are of one model, and each is named once."""
    shared, own = evidence.log.devices, evidence.log.device(None)
    for name in sorted({device.name for device in shared} - {own.name}):
        yield Finding(
            "shared-devices", f"{own.name} and {name} share it: devices of two models compare with nothing", 1
        )
    if len({device.index for device in shared}) < len(shared):
        yield Finding("shared-devices", "the header names a device twice", 1)


def whole_card(evidence: Evidence) -> Iterator[Finding]:
    """The run had the whole card: tables, peaks and ceilings are those of whole cards."""
    log = evidence.log
    for name in dict.fromkeys([log.header["device"]["name"], *(device.name for device in log.devices)]):
        if shared := describe_sharing(name):
            yield Finding("shared-card", f"{shared}; run it again with the card to itself", 1)


def known_device(evidence: Evidence) -> Iterator[Finding]:
    """The device is called as its model is, and has no more units, clock and power than the contributed ones."""
    by_name = {info.name: info for info in (*evidence.log.devices, evidence.log.device(None))}
    for info in by_name.values():
        if meant := _misspelled(info.name):
            yield Finding("device", f"{info.name} is written {meant} elsewhere: leave the name as torch gives it", 1)
        yield from _beyond_known(info)


def _misspelled(name: str) -> str | None:
    """The known name that differs from this one only in case, blanks and punctuation, or None."""
    known = {_folded(each.device): each.device for each in contributed_ceilings()}
    meant = known.get(_folded(name), name)
    return listed_as(name) if meant == name else meant


def _folded(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def _beyond_known(info: DeviceInfo) -> Iterator[Finding]:
    if not info.is_accelerator:
        if (info.compute_units or 0) > _MOST_CORES:
            yield Finding("device", f"{info.compute_units} cores are more than any machine has", 1)
        return
    known = [each for each in contributed_ceilings() if each.device == info.name]
    units = {each.compute_units for each in known}
    if units and info.compute_units not in units:
        listed = " or ".join(map(str, sorted(each or 0 for each in units)))
        yield Finding("device", f"{info.compute_units} compute units, but {info.name} has {listed}", 1)
    for unit, own, theirs in (
        ("MHz at most", (info.max_clock_hz or 0) / 1e6, [each.clock_mhz for each in known]),
        ("W at most", info.power_limit_watts or 0, [each.power_limit_watts for each in known]),
    ):
        most = max(filter(None, theirs), default=own)
        if own > most:
            yield Finding("device", f"{own:g} {unit}, but {info.name} has {most:g}", 1)
