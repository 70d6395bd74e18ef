"""Define the rules for logs in results/. Each rule is a function that yields the problems that it finds in a log.

The first rules check the names of fields, the device, the data of the operands and the dates. The next rules recompute
rows, ceilings and summary from the samples. The last rules check whether samples, sensor readings and errors are
physically possible.
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

from mamf.backend import SIMULATED_BACKEND, format_sharing_warning
from mamf.ceilings.ceiling import CONFIRM_PHASE, find_confirmed_ceilings
from mamf.dtypes import DTYPES
from mamf.files import read_packaged_csv_rows
from mamf.kinds.registry import get_kind
from mamf.logs.recording import HeaderRecord, RunEnd
from mamf.logs.records import STRUCT_BY_RECORD, make_ceiling_record, make_measurement_record, read_ceiling_record
from mamf.logs.run_log import CeilingsByProblemAndRegime, RunLog, keep_latest_rows
from mamf.machine.environment import list_logged_warnings
from mamf.machine.privacy import scrub_record
from mamf.measurement import TERA, Measurement, find_timer_calibration, is_plausible_overhead
from mamf.operations.unknown import get_operation, sets_compute_ceiling
from mamf.peaks import (
    find_device_by_misspelled_name,
    find_device_by_name,
    read_contributed_rates,
)
from mamf.plans import EXPLAIN, FIND, RANKING_STATISTIC_BY_REGIME, ROOFLINE
from mamf.plausibility import compute_used_cycle_share, explain_implausible_row, separate_impossible_samples

LOG_TIERS = ("complete", "interrupted", "legacy")
# Only rows of approximate kernels have these details. Approximate kernels skip work or multiply in another dtype.
_APPROXIMATION_DETAILS = ("product_dtypes", "sparsity", "cosine_similarity", "relative_l1")
_FieldTree = dict[str, Any]
# Match printable ASCII with single blanks and without the brackets of a Markdown link or picture.
_PLAIN_TEXT_PATTERN = re.compile(r"(?:(?!!\[|\]\()[!-~](?: (?! ))?)*(?<! )")
# The memory that a device reports must be between these shares of its advertised memory. It is less if the driver
# reserves a part, and more if the advertised "GB" means GiB.
_MIN_MEMORY_SHARE, _MAX_MEMORY_SHARE = 0.86, 1.10
# A date in a log may be at most this far in the future, because the clock of a machine may be wrong.
_MAX_TIME_AHEAD = timedelta(days=2)
# Maximum relative rounding error of the rates in a log, which have six digits.
_RATE_ROUNDING_SHARE = 1.1e-5
# The power of a ceiling in a log may differ by this share from the recomputed power, because old logs contain a median.
_MAX_POWER_DIFFERENCE_SHARE = 0.05
_POWER_FIELDS, _INTERVAL_FIELDS = {"watts", "joules_per_tflop"}, {"interval", "interval_tflops", "repeatability"}
_FIELDS_FROM_SAMPLES, _FIELDS_FROM_PLAN = ("flop", "tflops", "rate", "seconds"), ("bytes", "unit", "dtype", "out_dtype")
# The maximum relative error of exact and of approximate kernels. For matmuls, the problem's tolerance is the limit.
_MAX_ERROR, _MAX_APPROXIMATE_ERROR = 0.05, 0.5
# The measured power must be between these shares of the card's power limit. In results/, the shares are 0.2 to 1.1.
_MIN_POWER_SHARE, _MAX_POWER_SHARE = 0.1, 1.2
_MAX_CLOCK_SHARE = 1.02
#: Two rows with fewer samples than this may have equal samples by chance, because logs round to nanoseconds.
MIN_DISTINCTIVE_SAMPLES = 5


@dataclass(frozen=True)
class Finding:
    """A problem that a rule found in a log.

    - ``rule``: the name of the rule. ``message``: what is wrong and what to do.
    - ``line``: the line of the log, counted from 1; None if the problem is not in one line.
    - ``is_warning``: True if the problem does not reject the log.
    """

    rule: str
    message: str
    line: int | None = None
    is_warning: bool = False

    @property
    def level(self) -> str:
        return "warning" if self.is_warning else "error"


@dataclass(frozen=True)
class ReviewedLog:
    """A contributed log, in the two forms that rules check.

    - ``records``: the line number and the fields of each record as written, the header first.
    - ``log``: the log that mamf builds from these records.
    """

    records: tuple[tuple[int, dict[str, Any]], ...]
    log: RunLog

    @property
    def header(self) -> dict[str, Any]:
        """The header as it is in the file. Fields that the file lacks are missing here too."""
        return self.records[0][1]

    def select_records(self, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
        return ((line, record) for line, record in self.records if record["record"] == kind)

    @cached_property
    def rows(self) -> tuple[tuple[int, dict[str, Any], Measurement], ...]:
        """All measurements, including failed and repeated ones: the line number, the record, and the row
        read from it.
        """
        written = zip(self.select_records("measurement"), self.log.all_rows, strict=True)
        return tuple((line, record, row) for (line, record), row in written)

    @property
    def valid_rows(self) -> Iterator[tuple[int, Measurement]]:
        return ((line, row) for line, _, row in self.rows if row.ok and row.problem.dtype in DTYPES)


def has_exact_kernel(row: Measurement) -> bool:
    """Return whether the kernel computed all FLOP of a row in the row's dtype.

    A kernel counts as approximate only if its operation lists it as approximate and the row's details agree.
    """
    if not any(name in row.details for name in _APPROXIMATION_DETAILS):
        return True
    return row.kernel.partition("[")[0] not in get_operation(row.operation).approximate_kernels


# -- rules for fields, device, data and dates --------------------------------------------------------------------------


def check_field_names(reviewed_log: ReviewedLog) -> Iterator[Finding]:
    """Find unknown fields, which mamf never writes, in the records of a log."""
    for line, record in reviewed_log.records:
        known = _get_record_fields(HeaderRecord if line == 1 else STRUCT_BY_RECORD[record["record"]])
        for name in _yield_unknown_fields(record, known | {"record": {}, "time": {}}):
            yield Finding("unknown-field", f"mamf writes no field {name!r} in this record: remove it", line)


@cache
def _get_record_fields(kind: type) -> _FieldTree:
    return _list_declared_fields(type_info(kind))


def _list_declared_fields(declared_type: Type) -> _FieldTree:
    """Return the fields that a type declares, as a nested dict: it maps the name of each field to the dict of the
    fields inside that field.

    For a type that declares no fields, the dict is empty, and the caller accepts any field.
    """
    if isinstance(declared_type, UnionType):
        return next(filter(None, map(_list_declared_fields, declared_type.types)), {})
    if isinstance(declared_type, ListType):
        return _list_declared_fields(declared_type.item_type)
    if isinstance(declared_type, (StructType, DataclassType)):
        return {each.encode_name: _list_declared_fields(each.type) for each in declared_type.fields}
    return {}


def _yield_unknown_fields(value: Any, known: _FieldTree, prefix: str = "") -> Iterator[str]:
    for name, each in value.items():
        if name not in known:
            yield prefix + name
        elif known[name]:
            for inner in each if isinstance(each, list) else [each]:
                yield from _yield_unknown_fields(inner or {}, known[name], f"{prefix}{name}.")


def check_device_is_real(reviewed_log: ReviewedLog) -> Iterator[Finding]:
    """Reject a log of a simulated device, of a card that other programs may have used, or of several device models."""
    log = reviewed_log.log
    if log.header["device"]["backend"] == SIMULATED_BACKEND:
        yield Finding("simulated", "this is a simulated device: measure a real one", 1)
    names = dict.fromkeys([log.header["device"]["name"], *(device.name for device in log.devices)])
    for name in names:
        if shared := format_sharing_warning(name):
            yield Finding("shared-card", f"{shared}: measure again while nothing else uses the card", 1)
    if len({device.name for device in log.devices}) > 1:
        yield Finding(
            "shared-card",
            f"the run has several models of device ({', '.join(names)}): measure each in a separate run",
            1,
        )


def check_device_facts(reviewed_log: ReviewedLog) -> Iterator[Finding]:
    """Check that vendor, backend and memory match the device, and that the names of devices and kernels are plain text.
    Names of known devices must also have the usual spelling.
    """
    devices = {device.name: device for device in (*reviewed_log.log.devices, reviewed_log.log.get_device(None))}
    for text in {*devices, reviewed_log.header["kernel"], *(row.kernel for _, _, row in reviewed_log.rows)}:
        if not _PLAIN_TEXT_PATTERN.fullmatch(text):
            yield Finding(
                "device", f"the name {text!r} may have only ASCII letters, digits, punctuation and single blanks", 1
            )
    for info in devices.values():
        if usual := _find_usual_spelling(info.name):
            yield Finding("device", f"{info.name} is usually spelled {usual}: restore the name that torch reported", 1)
        facts = _read_device_facts().get(find_device_by_name(info.name) or "")
        if facts is None or not info.is_accelerator or info.backend == SIMULATED_BACKEND:
            continue
        if info.vendor.casefold() != facts["vendor"]:
            yield Finding("device", f"{info.name} is not made by {info.vendor!r}: restore the vendor's name", 1)
        if info.backend not in facts["backends"].split():
            yield Finding(
                "device",
                f"{info.name} does not work with the backend {info.backend!r}: restore the backend's name",
                1,
            )
        shares = [(info.memory_bytes or 0) / (float(size) * 1e9) for size in facts["memory_gb"].split()]
        if info.memory_bytes and not any(_MIN_MEMORY_SHARE <= share <= _MAX_MEMORY_SHARE for share in shares):
            has = f"{info.memory_bytes / 1e9:.0f} GB of memory, but {info.name} has {facts['memory_gb']} GB"
            yield Finding("device", f"the log reports {has}", 1)


@cache
def _read_device_facts() -> dict[str, dict[str, str]]:
    """Read devices.csv, and return the vendor, backends and memory sizes (in GB) of each device by its name."""
    return {row["name"]: row for row in read_packaged_csv_rows("devices.csv")}


def _find_usual_spelling(name: str) -> str | None:
    """Find the known device name that differs from ``name`` only in case, blanks and punctuation. Returns None if no
    known name does.
    """
    known = {_keep_letters_and_digits(each.device): each.device for each in read_contributed_rates()}
    usual = known.get(_keep_letters_and_digits(name), name)
    return find_device_by_misspelled_name(name) if usual == name else usual


def _keep_letters_and_digits(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def check_operand_data(reviewed_log: ReviewedLog) -> Iterator[Finding]:
    """Reject logs measured with zeros or patterns. With such data the device draws less power and runs faster than
    usual.

    Logs of ``mamf explain`` are allowed, because ``mamf explain`` compares different data.
    """
    for problem in reviewed_log.header["plan"]["problems"]:
        if problem.get("data") not in (None, "normal") and reviewed_log.log.plan.kind != EXPLAIN:
            yield Finding(
                "data", f"the log was measured with --data {problem['data']}: results/ needs --data normal", 1
            )


def check_dates(reviewed_log: ReviewedLog) -> Iterator[Finding]:
    """Report the first record whose date is in the future."""
    latest = datetime.now(timezone.utc) + _MAX_TIME_AHEAD
    for line, record in reviewed_log.records:
        text = record.get("time", record.get("started"))
        if text is not None and datetime.fromisoformat(text) > latest:
            yield Finding("future", f"the time {text} is in the future: correct the clock and measure again", line)
            return


def check_private_texts(line: int, record: dict[str, Any]) -> Iterator[Finding]:
    """Find private texts, such as host names, user names and paths, in a record. mamf removes them from its logs, so
    any that remain come from an older version of mamf or were added later.
    """
    clean = scrub_record(record)
    if clean != record:
        names = ", ".join(sorted({*record} ^ {*clean} | {name for name in record if clean.get(name) != record[name]}))
        yield Finding("private", f"remove the secret, account, host, address or path from {scrub_record(names)}", line)


# -- rules that compute figures again from samples ---------------------------------------------------------------------


def check_row_figures(reviewed_log: ReviewedLog) -> Iterator[Finding]:
    """Recompute the work, the rates and ``cycles_used`` (the rate as a share of the peak at the true clock) of each
    row, and find values in the log that differ.

    Intervals are not checked, because mamf computes them again whenever it reads a log.
    """
    for line, record, row in reviewed_log.rows:
        recomputed_record = make_measurement_record(row)
        # Logs that were converted from an older schema may lack the fields that mamf computes from the plan. Check such
        # a field only if the record has it.
        checked_names = [name for name in _FIELDS_FROM_SAMPLES if name in recomputed_record] + [
            name for name in _FIELDS_FROM_PLAN if name in record
        ]
        for name in checked_names:
            if not values_agree(record.get(name), recomputed_record.get(name)):
                message = f"{row.shape}: {name} differs from the value that follows from the row's samples and plan"
                yield Finding("row-mismatch", message, line)
        seen, info = row.conditions, reviewed_log.log.get_device(row.device_index)
        if row.ok and seen.used_cycle_share is not None:
            used = compute_used_cycle_share(row.best_rate * TERA, info, row.problem.dtype, seen.true_clock_hz)
            if not values_agree(seen.used_cycle_share, used):
                message = (
                    f"{row.shape}: cycles_used differs from the value that follows from the row's rate and true clock"
                )
                yield Finding("row-mismatch", message, line)
        # Logs that were converted from an older schema rank sustained rows by their median.
        if row.ranking_statistic not in (RANKING_STATISTIC_BY_REGIME[row.regime], "median"):
            yield Finding(
                "row-mismatch", f"{row.shape}: {row.regime} rows are not ranked by {row.ranking_statistic}", line
            )


def values_agree(written: Any, recomputed: Any, relative: float = _RATE_ROUNDING_SHARE) -> bool:
    """Return whether two JSON values are equal up to rounding errors. Do not compare the intervals of rates.

    ``written``: the value in the log. ``recomputed``: the value computed from samples. ``relative``: the allowed
    relative difference of numbers.
    """
    if isinstance(recomputed, float) and isinstance(written, (int, float)) and not isinstance(written, bool):
        return math.isclose(written, recomputed, rel_tol=relative, abs_tol=2e-12)
    if isinstance(recomputed, dict):
        is_alike = isinstance(written, dict) and written.keys() == recomputed.keys()
        return is_alike and all(
            values_agree(written[key], recomputed[key], relative) for key in recomputed.keys() - _INTERVAL_FIELDS
        )
    if isinstance(recomputed, (list, tuple)):
        is_alike = isinstance(written, list) and len(written) == len(recomputed)
        return is_alike and all(
            values_agree(one, other, relative) for one, other in zip(written, recomputed, strict=True)
        )
    return type(written) is type(recomputed) and bool(written == recomputed)


def recompute_ceilings(reviewed_log: ReviewedLog) -> CeilingsByProblemAndRegime:
    """Recompute the ceilings (highest rates) in a log from the rows that confirm them. Return them by problem and
    regime.
    """
    device = reviewed_log.header["device"]
    rows = keep_latest_rows(row for _, _, row in reviewed_log.rows)
    sought = dict.fromkeys((row.problem, row.regime, None) for row in rows if row.phase == CONFIRM_PHASE)
    return find_confirmed_ceilings(rows, sought, device["name"], device["uuid_hash"])


def check_ceiling_figures(reviewed_log: ReviewedLog) -> Iterator[Finding]:
    """Recompute the ceilings of a log from the measurements that confirm them, and find values in the log that differ.

    A resumed search may have written several ceilings for the same problem and regime. Check only the last of them.
    Skip the matmul ceilings in a log of attention if another log confirms them, and intervals of old versions.
    """
    ceilings, plan = recompute_ceilings(reviewed_log), reviewed_log.log.plan
    last = {
        (ceiling.problem, ceiling.regime): (line, record)
        for line, record in reviewed_log.select_records("ceiling")
        for ceiling in [read_ceiling_record(record, reviewed_log.header)]
    }
    for key, (line, record) in last.items():
        regime, expected = record["regime"], make_ceiling_record(ceilings[key]) if key in ceilings else {}
        if not expected and (plan.searches or plan.kind in (FIND, ROOFLINE)):
            yield Finding("ceiling-mismatch", f"the log lacks the measurements that confirm its {regime} ceiling", line)
        is_old = record["repeatability"] is None and "converted_from" in reviewed_log.header
        skipped_names = {"interval_coverage", *_INTERVAL_FIELDS} if is_old else set()
        for name in sorted(expected.keys() & record.keys() - {"gain_over_default"} - skipped_names):
            rounding = _MAX_POWER_DIFFERENCE_SHARE if name in _POWER_FIELDS else _RATE_ROUNDING_SHARE
            if not values_agree(record[name], expected[name], rounding):
                message = f"{regime}: {name} is {record[name]}, but the confirming measurements give {expected[name]}"
                yield Finding("ceiling-mismatch", message, line)


def check_summary(reviewed_log: ReviewedLog) -> Iterator[Finding]:
    """Check that something was measured and that the summary agrees with the rows. Warn if the run was interrupted."""
    log, plan = reviewed_log.log, reviewed_log.log.plan
    if not any(row.operation == plan.operation for _, row in reviewed_log.valid_rows):
        yield Finding("missing-row", "the log has no measured row")
    elif plan.is_search and not log.matmul_ceilings:
        yield Finding("missing-row", "the search confirmed no ceiling: complete it with 'mamf find --resume LOG'")
    if log.tier == "interrupted":
        reason = log.summary["reason"] or "reason unknown" if log.summary else "no summary"
        message = f"the run was interrupted ({reason}), so it may have missed the best shape"
        yield Finding("interrupted", message, is_warning=True)
    if log.summary is not None:
        ceilings = recompute_ceilings(reviewed_log) if plan.kind in (FIND, ROOFLINE) else log.matmul_ceilings
        recomputed_summary = get_kind(plan).make_summary(plan, log.measurements, ceilings, RunEnd("complete"))
        for name in ("measured", "best"):
            if not values_agree(log.summary.get(name), recomputed_summary[name]):
                message = (
                    f"{name} is {log.summary.get(name)} in the summary, but the rows give {recomputed_summary[name]}"
                )
                yield Finding("best-mismatch", message)


# -- rules for possible samples, errors and sensor readings ------------------------------------------------------------


def check_speed_limits(reviewed_log: ReviewedLog) -> Iterator[Finding]:
    """Find samples that are faster than the device or its memory allows, and rates that are too high for the measured
    clock.
    """
    for line, row in reviewed_log.valid_rows:
        info, operation = reviewed_log.log.get_device(row.device_index), get_operation(row.operation)
        # There is no limit for an approximate kernel, because mamf does not know how much work the kernel does.
        limit = operation.find_max_possible_rate(info, row.problem, row.shape) if has_exact_kernel(row) else None
        if (
            limit is not None
            and separate_impossible_samples(row.samples, row.work_amount, limit, row.timer_error_seconds)[1]
        ):
            fastest, unit = row.work_amount / min(row.samples) / TERA, row.work.unit
            message = f"{row.shape}: {fastest:.4g} {unit} is more than {info.name} can reach ({limit / TERA:.4g})"
            yield Finding("implausible", message, line)
        elif reason := explain_implausible_row(row, info, limit):
            yield Finding("implausible", f"{row.shape}: {reason}", line)


def check_verification(reviewed_log: ReviewedLog) -> Iterator[Finding]:
    """Find rows whose result was not verified, or whose result has an error above the tolerance."""
    for line, row in reviewed_log.valid_rows:
        max_error = _MAX_ERROR if has_exact_kernel(row) else _MAX_APPROXIMATE_ERROR
        bound = row.problem.tolerance if sets_compute_ceiling(row.operation) else max_error
        if row.relative_error is None:
            yield Finding("unverified", f"{row.shape} by {row.kernel}: the result was not verified", line)
        elif not 0 <= row.relative_error <= bound:
            yield Finding(
                "unverified", f"{row.shape}: relative error {row.relative_error:.2g} exceeds {bound:.2g}", line
            )


def check_sensor_readings(reviewed_log: ReviewedLog) -> Iterator[Finding]:
    """Check that all rows have clock and power readings, and that these are physically possible.

    Yields a warning if the device has no sensors. Readings are possible if they are within the device's limits.
    """
    if (sensors := reviewed_log.header.get("sensors")) != "available":
        yield Finding(
            "sensors", f"the log has no readings of clock, power and temperature: {sensors}", 1, is_warning=True
        )
    elif reviewed_log.log.header["device"]["is_accelerator"]:  # CPUs report no power.
        device, rows = reviewed_log.header["device"], [row for _, _, row in reviewed_log.rows if row.ok]
        if not (device.get("max_clock_hz") and device.get("power_limit_watts")):
            yield Finding("sensors", "the device has sensors, but the log lacks its maximum clock or power limit", 1)
        unclocked = sum(row.conditions.clock_hz is None for row in rows)
        if unclocked or (rows and all(row.conditions.watts is None for row in rows)):
            yield Finding("sensors", f"the device has sensors, but {unclocked or len(rows)} rows lack clock or power")
    for line, _, row in reviewed_log.rows:
        seen, info = row.conditions, reviewed_log.log.get_device(row.device_index)
        limit, max_clock_hz = info.power_limit_watts or math.inf, info.max_clock_hz or math.inf
        min_watts = _MIN_POWER_SHARE * limit if row.ok and limit < math.inf else 0
        if seen.watts is not None and not min_watts <= seen.watts <= _MAX_POWER_SHARE * limit:
            yield Finding(
                "sensors", f"{row.shape}: {seen.watts:.0f} W is impossible with a power limit of {limit:.0f} W", line
            )
        for clock_hz in (seen.clock_hz, seen.true_clock_hz):
            if clock_hz is not None and not 0 < clock_hz <= _MAX_CLOCK_SHARE * max_clock_hz:
                yield Finding(
                    "sensors", f"{row.shape}: {clock_hz / 1e6:.0f} MHz exceeds the maximum clock of the device", line
                )


def check_machine_load(reviewed_log: ReviewedLog) -> Iterator[Finding]:
    """Warn if other work used the CPU of the machine before or during the run."""
    for text in list_logged_warnings(reviewed_log.log.header, low_rates_only=True):
        if " load: " in text:  # The rule ``shared-card`` finds other processes that use the device.
            yield Finding(
                "busy-machine", f"{text.removeprefix('WARN ')}: measure again on a quiet machine", is_warning=True
            )


def check_for_equal_samples(reviewed_log: ReviewedLog) -> Iterator[Finding]:
    """Find rows whose samples are all equal, or equal to the samples of another row."""
    line_by_samples: dict[tuple[float, ...], int] = {}
    for line, _, row in reviewed_log.rows:
        if len(row.samples) < MIN_DISTINCTIVE_SAMPLES:
            continue
        if len(set(row.samples)) == 1:
            yield Finding(
                "equal-samples", f"{row.shape}: all {len(row.samples)} samples are equal: measure again", line
            )
        if (before := line_by_samples.setdefault(row.samples, line)) != line:
            yield Finding(
                "equal-samples", f"{row.shape}: the samples equal those of line {before}: measure again", line
            )


def check_timer_overhead(reviewed_log: ReviewedLog) -> Iterator[Finding]:
    """Find the first row whose timer overhead is impossible for the backend's timer. mamf subtracted this overhead from
    the samples of the row.
    """
    backend = reviewed_log.header["device"]["backend"]
    timer = find_timer_calibration(backend)
    bounds = f"{timer.min_overhead_seconds * 1e6:.1f} to {timer.max_overhead_seconds * 1e6:.1f}" if timer else "0 to 20"
    for line, _, row in reviewed_log.rows:
        if row.timer_overhead_seconds and not is_plausible_overhead(backend, row.timer_overhead_seconds):
            subtracted = f"{row.timer_overhead_seconds * 1e6:.1f} us of timer overhead was subtracted"
            yield Finding("timer", f"{subtracted}, but the timer of {backend} adds {bounds} us: measure again", line)
            return


#: All rules of a log, in the order in which their findings are reported.
RULES: tuple[Callable[[ReviewedLog], Iterator[Finding]], ...] = (
    check_field_names,
    check_device_is_real,
    check_device_facts,
    check_operand_data,
    check_dates,
    check_row_figures,
    check_ceiling_figures,
    check_summary,
    check_speed_limits,
    check_verification,
    check_sensor_readings,
    check_machine_load,
    check_for_equal_samples,
    check_timer_overhead,
)
