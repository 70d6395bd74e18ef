"""The rules that keep bad logs out of results/, and the log under review.

Rules about fields and the device come first. Those about rows, ceilings and the summary follow: figures are what the
samples give, and samples are physically possible.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import cache, cached_property
from typing import Any

from msgspec.inspect import DataclassType, ListType, StructType, Type, UnionType, type_info

from mamf.backend import SIMULATED, DeviceInfo, describe_sharing
from mamf.ceilings.ceiling import CONFIRM, confirm_ceilings
from mamf.dtypes import DTYPES
from mamf.files import packaged_rows
from mamf.kinds.registry import kind_of
from mamf.logs.legacy import STATISTICS, FinderRun
from mamf.logs.recording import End, Header
from mamf.logs.records import RECORDS, ceiling_from_record, ceiling_record, is_of_old_calibration, measurement_record
from mamf.logs.run_log import (
    OwnCeilings,
    RunLog,
    latest_rows,
)
from mamf.machine.privacy import scrub_record
from mamf.measurement import TERA, Measurement
from mamf.operations.unknown import is_of_products, operation_called
from mamf.peaks import contributed_rates, fastest_possible_flops, listed_as, matching_device
from mamf.plans import BEST_BY, EXPLAIN, FIND, ROOFLINE, Plan
from mamf.plausibility import cycles_used, split_impossible, why_implausible
from mamf.timers import find_timer, is_credible

TIERS = ("complete", "interrupted", "legacy")
# What only kernels say that approximate: they skip work, or multiply in another dtype.
_OF_APPROXIMATION = ("product_dtypes", "sparsity", "cosine_similarity", "relative_l1")
_Names = dict[str, Any]
# No markup, and no bracket that begins a picture or a link.
_PLAIN = re.compile(r"(?:(?!!\[|\]\()[!-~](?: (?! ))?)*(?<! )")
# How much of the memory on the box a device reports: drivers reserve some, and a GB may be a GiB.
_MIN_MEMORY, _MAX_MEMORY = 0.86, 1.10
# The clocks of two machines may differ.
_CLOCKS_APART = timedelta(days=2)
# Rates are rounded to six digits.
_ROUNDING = 1.1e-5
# Logs with an old calibration have the median power of the rounds, later ones their energy divided by their time.
_POWER_ROUNDING = 0.05
_OF_POWER, _OF_INTERVAL = {"watts", "joules_per_tflop"}, {"interval", "interval_tflops", "repeatability"}
_OF_SAMPLES, _OF_PLAN = ("flop", "tflops", "rate", "seconds"), ("bytes", "unit", "dtype", "out_dtype")
# Verification decides by kernel; no result that passed it has a larger error.
_MAX_ERROR, _MAX_ERROR_OF_APPROXIMATION = 0.05, 0.5
# Power as a share of the limit: logs of cards under load have 0.2 to 1.1.
_MIN_POWER, _MAX_POWER = 0.1, 1.2
_MAX_CLOCK = 1.02
#: Fewer samples may agree by chance: they are written in whole nanoseconds.
DISTINCTIVE_SAMPLES = 5


@dataclass(frozen=True)
class Finding:
    """What a rule found. ``line``: of the log, counted from 1. A warning does not keep a log out."""

    rule: str
    message: str
    line: int | None = None
    is_warning: bool = False

    @property
    def level(self) -> str:
        return "warning" if self.is_warning else "error"


@dataclass(frozen=True)
class Evidence:
    """``records``: every line with its number, the header first."""

    records: tuple[tuple[int, dict[str, Any]], ...]
    log: RunLog

    @property
    def header(self) -> dict[str, Any]:
        """As written, without defaults for missing fields."""
        return self.records[0][1]

    @property
    def plan(self) -> Plan:
        return self.log.plan

    def records_of_kind(self, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
        return ((line, record) for line, record in self.records if record["record"] == kind)

    @cached_property
    def rows(self) -> tuple[tuple[int, dict[str, Any], Measurement], ...]:
        """Every measurement as written, failed and repeated ones too: line, record, and what mamf reads from it."""
        written = zip(self.records_of_kind("measurement"), self.log.every_row, strict=True)
        return tuple((line, record, row) for (line, record), row in written)

    @property
    def good_rows(self) -> Iterator[tuple[int, Measurement]]:
        return ((line, row) for line, _, row in self.rows if row.ok and row.problem.dtype in DTYPES)


def is_exact(row: Measurement) -> bool:
    """Whether all FLOP were computed in the row's dtype. Only a kernel that its operation lists may approximate,
    whatever a row says; no kernel is imported for it.
    """
    if not any(name in row.details for name in _OF_APPROXIMATION):
        return True
    return row.kernel.partition("[")[0] not in operation_called(row.operation).approximate_kernels


# -- fields and the device ---------------------------------------------------------------------------------------------


def check_fields(evidence: Evidence) -> Iterator[Finding]:
    """Records have only fields that mamf writes."""
    for line, record in evidence.records:
        for name in _unknown_fields(record, _record_fields(Header if line == 1 else RECORDS[record["record"]])):
            if name not in ("record", "time"):
                yield Finding("unknown-field", f"mamf writes no field {name!r} of such a record: remove it", line)


@cache
def _record_fields(kind: type) -> _Names:
    return _declared_names(type_info(kind))


def _declared_names(of: Type) -> _Names:
    """The fields that a type declares, each with those within it; empty where any field may be."""
    if isinstance(of, UnionType):
        return next(filter(None, map(_declared_names, of.types)), {})
    if isinstance(of, ListType):
        return _declared_names(of.item_type)
    if isinstance(of, (StructType, DataclassType)):
        return {each.encode_name: _declared_names(each.type) for each in of.fields}
    return {}


def _unknown_fields(value: Any, known: _Names, prefix: str = "") -> Iterator[str]:
    for name, each in value.items():
        if name not in known:
            yield prefix + name
        elif known[name]:
            for inner in each if isinstance(each, list) else [each]:
                yield from _unknown_fields(inner or {}, known[name], f"{prefix}{name}.")


def check_real_device(evidence: Evidence) -> Iterator[Finding]:
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


def check_device_facts(evidence: Evidence) -> Iterator[Finding]:
    """Name, vendor, backend and memory belong together, and names are plain text as they are usually spelled."""
    devices = {device.name: device for device in (*evidence.log.devices, evidence.log.device(None))}
    for text in {*devices, evidence.header["kernel"], *(row.kernel for _, _, row in evidence.rows)}:
        if not _PLAIN.fullmatch(text):
            yield Finding("device", f"{text!r} is not plain text: letters, digits, punctuation and single blanks", 1)
    for info in devices.values():
        if usual := _find_usual_spelling(info.name):
            yield Finding("device", f"{info.name} is written {usual} elsewhere: leave the name as torch gives it", 1)
        facts = _read_device_facts().get(matching_device(info.name) or "")
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
def _read_device_facts() -> dict[str, dict[str, str]]:
    """What a device of peaks.csv has: its vendor, its backends, and the sizes of its memory in GB."""
    return {row["name"]: row for row in packaged_rows("devices.csv")}


def _find_usual_spelling(name: str) -> str | None:
    """The known name that differs from this one only in case, blanks and punctuation, or None."""
    known = {_keep_letters(each.device): each.device for each in contributed_rates()}
    usual = known.get(_keep_letters(name), name)
    return listed_as(name) if usual == name else usual


def _keep_letters(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def check_data(evidence: Evidence) -> Iterator[Finding]:
    """Zeros and patterns draw less power, so their rates are not ceilings; ``mamf explain`` varies data on purpose."""
    for problem in evidence.header["plan"]["problems"]:
        if problem.get("data") not in (None, "normal") and evidence.plan.kind != EXPLAIN:
            yield Finding("data", f"measured with {problem['data']} data: results are of --data normal", 1)


def check_dates(evidence: Evidence) -> Iterator[Finding]:
    """No record is dated in the future."""
    latest = datetime.now(timezone.utc) + _CLOCKS_APART
    for line, record in evidence.records:
        text = record.get("time", record.get("started"))
        if text is not None and datetime.fromisoformat(text) > latest:
            yield Finding("future", f"written at {text}, which is in the future", line)
            return


def check_private_texts(line: int, record: dict[str, Any]) -> Iterator[Finding]:
    """mamf removes private texts when it writes a log: what is found here was written by another version or by hand."""
    clean = scrub_record(record)
    if clean != record:
        names = ", ".join(sorted({*record} ^ {*clean} | {name for name in record if clean.get(name) != record[name]}))
        yield Finding("private", f"a secret, an account, a host, an address or a path in {scrub_record(names)}", line)


def check_legacy_run(run: FinderRun) -> Iterator[Finding]:
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


# -- figures follow from samples ---------------------------------------------------------------------------------------


def check_row_figures(evidence: Evidence) -> Iterator[Finding]:
    """Work and rates of a row are what its shape, problem and samples give. Readers compute intervals again."""
    for line, record, row in evidence.rows:
        again = measurement_record(row)
        # Converted logs lack what follows from the plan.
        due = [name for name in _OF_SAMPLES if name in again] + [name for name in _OF_PLAN if name in record]
        for name in due:
            if not values_agree(record.get(name), again.get(name)):
                message = f"{row.shape}: {name} does not follow from the row's samples and plan"
                yield Finding("row-mismatch", message, line)
        seen, info = row.conditions, evidence.log.device(row.device)
        if row.ok and seen.cycles_used is not None:
            used = cycles_used(row.best_rate * TERA, info, row.problem.dtype, seen.true_clock_hz)
            if not values_agree(seen.cycles_used, used):
                message = f"{row.shape}: cycles_used does not follow from the row's rate and true clock"
                yield Finding("row-mismatch", message, line)
        # Converted logs judge sustained by its median.
        if row.best_by not in (BEST_BY[row.regime], "median"):
            yield Finding("row-mismatch", f"{row.shape}: a best of {row.regime} is not chosen by {row.best_by}", line)


def values_agree(written: Any, again: Any, relative: float = _ROUNDING) -> bool:
    """Whether two JSON values are equal, numbers up to rounding, without the interval of a rate."""
    if isinstance(again, float) and isinstance(written, (int, float)) and not isinstance(written, bool):
        return math.isclose(written, again, rel_tol=relative, abs_tol=2e-12)
    if isinstance(again, dict):
        is_alike = isinstance(written, dict) and written.keys() == again.keys()
        return is_alike and all(values_agree(written[key], again[key], relative) for key in again.keys() - _OF_INTERVAL)
    if isinstance(again, (list, tuple)):
        is_alike = isinstance(written, list) and len(written) == len(again)
        return is_alike and all(values_agree(one, other, relative) for one, other in zip(written, again, strict=True))
    return type(written) is type(again) and bool(written == again)


def recompute_ceilings(evidence: Evidence) -> OwnCeilings:
    """The ceilings of the log by problem and regime, recomputed from the rounds that it has."""
    device = evidence.header["device"]
    rows = latest_rows(row for _, _, row in evidence.rows)
    sought = dict.fromkeys((row.problem, row.regime, None) for row in rows if row.phase == CONFIRM)
    return confirm_ceilings(rows, sought, device["name"], device["uuid_hash"])


def check_ceiling_figures(evidence: Evidence) -> Iterator[Finding]:
    """Ceilings follow from the rounds that confirmed them; of a resumed search, the last of a problem and regime. Those
    that attention takes its shares of may have their rounds in another log.
    """
    again, last = recompute_ceilings(evidence), {}
    for line, record in evidence.records_of_kind("ceiling"):
        ceiling = ceiling_from_record(record, evidence.log.header)
        last[ceiling.problem, ceiling.regime] = line, record
    for key, (line, record) in last.items():
        if key not in again:
            if evidence.plan.searches or evidence.plan.kind in (FIND, ROOFLINE):
                yield Finding("ceiling-mismatch", f"{record['regime']}: no rounds confirm the ceiling", line)
            continue
        expected = ceiling_record(again[key])
        skipped = {"gain_over_default", *(_OF_INTERVAL if is_of_old_calibration(record) else ())}
        for name in sorted(expected.keys() & record.keys() - skipped):
            if not values_agree(record[name], expected[name], _POWER_ROUNDING if name in _OF_POWER else _ROUNDING):
                message = f"{record['regime']}: {name} {record[name]} (the rounds give {expected[name]})"
                yield Finding("ceiling-mismatch", message, line)


def check_summary(evidence: Evidence) -> Iterator[Finding]:
    """Something was measured, the summary follows from the rows, and the run was completed (a warning if not)."""
    log, plan = evidence.log, evidence.plan
    if not any(row.operation == plan.operation for _, row in evidence.good_rows):
        yield Finding("missing-row", "nothing was measured")
    elif plan.is_search and not log.all_ceilings:
        message = "no ceiling was confirmed, and a find is known by nothing else: resume it with 'mamf find --resume"
        yield Finding("missing-row", f"{message} LOG'")
    if log.tier == "interrupted":
        reason = log.summary["reason"] or "no reason given" if log.summary else "no summary"
        message = f"the run was interrupted ({reason}): the best shape may be untested"
        yield Finding("interrupted", message, is_warning=True)
    if log.summary is not None:
        ceilings = recompute_ceilings(evidence) if plan.kind in (FIND, ROOFLINE) else log.all_ceilings
        again = kind_of(plan).summary(plan, log.measurements, ceilings, End("complete"))
        for name in ("measured", "best"):
            if not values_agree(log.summary.get(name), again[name]):
                message = f"{name}: the rows give {again[name]}, the summary says {log.summary.get(name)}"
                yield Finding("best-mismatch", message)


# -- samples are possible ----------------------------------------------------------------------------------------------


def check_speed_limits(evidence: Evidence) -> Iterator[Finding]:
    """No sample is faster than the device or its memory allows, and no figure faster than the clock that was read."""
    for line, row in evidence.good_rows:
        info, of = evidence.log.device(row.device), operation_called(row.operation)
        # The work of a kernel that approximates is not known.
        limit = of.fastest_possible(info, row.problem, row.shape) if is_exact(row) else None
        if limit is not None and split_impossible(row.samples, row.amount, limit, row.timer_accuracy)[1]:
            fastest, most = row.amount / min(row.samples) / TERA, limit / TERA
            message = f"{row.shape}: {fastest:.4g} {row.work.unit}, more than the {most:.4g} that {info.name} can do"
            yield Finding("implausible", message, line)
        elif reason := why_implausible(row, info, limit):
            yield Finding("implausible", f"{row.shape}: {reason}", line)


def check_verification(evidence: Evidence) -> Iterator[Finding]:
    """Every good row's result was checked, with an error within its tolerance."""
    for line, row in evidence.good_rows:
        most = _MAX_ERROR if is_exact(row) else _MAX_ERROR_OF_APPROXIMATION
        bound = row.problem.tolerance if is_of_products(row.operation) else most
        if row.error is None:
            yield Finding("unverified", f"{row.shape} by {row.kernel}: its result was not checked", line)
        elif not 0 <= row.error <= bound:
            yield Finding("unverified", f"{row.shape}: relative error {row.error:.2g}, beyond {bound:.2g}", line)


def check_sensors(evidence: Evidence) -> Iterator[Finding]:
    """If the device has sensors, each good row has a clock and a power within the device's limits."""
    if (sensors := evidence.header.get("sensors")) != "available":
        yield Finding("sensors", f"clock, power and temperature: {sensors}", 1, is_warning=True)
    elif evidence.log.header["device"]["is_accelerator"]:  # CPUs have no vendor's sensors
        device, rows = evidence.header["device"], [row for _, _, row in evidence.rows if row.ok]
        if not (device.get("max_clock_hz") and device.get("power_limit_watts")):
            yield Finding("sensors", "there are sensors, but no highest clock or no power limit", 1)
        without_clock = sum(row.conditions.clock_hz is None for row in rows)
        if without_clock or (rows and all(row.conditions.watts is None for row in rows)):
            yield Finding("sensors", f"there are sensors, but {without_clock or len(rows)} rows lack clock or power")
    for line, _, row in evidence.rows:
        seen, info = row.conditions, evidence.log.device(row.device)
        limit, highest = info.power_limit_watts or math.inf, info.max_clock_hz or math.inf
        least = _MIN_POWER * limit if row.ok and limit < math.inf else 0
        if seen.watts is not None and not least <= seen.watts <= _MAX_POWER * limit:
            yield Finding("sensors", f"{row.shape}: {seen.watts:.0f} W, with a limit of {limit:.0f} W", line)
        for clock_hz in (seen.clock_hz, seen.true_clock_hz):
            if clock_hz is not None and not 0 < clock_hz <= _MAX_CLOCK * highest:
                yield Finding("sensors", f"{row.shape}: {clock_hz / 1e6:.0f} MHz, above the highest clock", line)


def check_samples_differ(evidence: Evidence) -> Iterator[Finding]:
    """Samples of a row are not all equal, and are not those of another row."""
    seen: dict[tuple[float, ...], int] = {}
    for line, _, row in evidence.rows:
        if len(row.samples) < DISTINCTIVE_SAMPLES:
            continue
        if len(set(row.samples)) == 1:
            yield Finding("equal-samples", f"{row.shape}: its {len(row.samples)} samples are all equal", line)
        if (before := seen.setdefault(row.samples, line)) != line:
            yield Finding("equal-samples", f"{row.shape}: has the samples of line {before}", line)


def check_timer(evidence: Evidence) -> Iterator[Finding]:
    """The overhead subtracted is one that the timer of its backend can have."""
    backend = evidence.header["device"]["backend"]
    timer = find_timer(backend)
    bounds = f"{timer.lowest * 1e6:.1f} to {timer.highest * 1e6:.1f}" if timer else "0 to 20"
    for line, _, row in evidence.rows:
        if row.timer_overhead and not is_credible(backend, row.timer_overhead):
            subtracted = f"{row.timer_overhead * 1e6:.1f} us subtracted"
            yield Finding("timer", f"{subtracted}, but the timer of {backend} adds {bounds} us", line)
            return


#: All rules, in the order in which findings are listed.
RULES: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    check_fields,
    check_real_device,
    check_device_facts,
    check_data,
    check_dates,
    check_row_figures,
    check_ceiling_figures,
    check_summary,
    check_speed_limits,
    check_verification,
    check_sensors,
    check_samples_differ,
    check_timer,
)
