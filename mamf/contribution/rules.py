"""The rules that keep bad logs out of results/, the review of a log by all of them, and where a log belongs.

Rules about fields and the device are in header_rules.py. Those here are about rows, ceilings and the summary: they
follow from the samples, and samples are physically possible.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from mamf.ceilings.ceiling import CONFIRM, confirm_ceilings
from mamf.contribution import header_rules
from mamf.contribution.collection import submitter_findings
from mamf.contribution.evidence import Evidence, Finding, is_exact, records_of
from mamf.errors import RunLogError, UsageError
from mamf.files import numbered
from mamf.kinds.registry import kind_of
from mamf.limits import shorten
from mamf.logs.legacy import TIER, FinderRun, legacy_run
from mamf.logs.lines import Seen, repeated_fields
from mamf.logs.recording import End
from mamf.logs.records import ceiling_from_record, ceiling_record, is_of_old_calibration, measurement_record
from mamf.logs.run_log import MALFORMED, OwnCeilings, describe_error, latest_rows, run_log_of, why_unreadable
from mamf.measurement import TERA
from mamf.operations.unknown import operation_called
from mamf.plans import EXPLAIN, FIND, MATMUL, ROOFLINE, SWEEP
from mamf.plausibility import split_impossible, why_implausible
from mamf.plugins.discovery import own_operations
from mamf.regime_names import BEST_BY
from mamf.timers import find_timer, is_credible

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
# Fewer samples may agree by chance: they are written in whole nanoseconds.
DISTINCTIVE_SAMPLES = 5
# Names of devices on Windows, which cannot be names of folders.
_RESERVED = re.compile(r"con|prn|aux|nul|(?:com|lpt)\d")


# -- figures follow from samples ---------------------------------------------------------------------------------------


def rows_recompute(evidence: Evidence) -> Iterator[Finding]:
    """Work and rates of a row are what its shape, problem and samples give. Readers compute intervals again."""
    for line, record, row in evidence.rows:
        again = measurement_record(row)
        # Converted logs lack what follows from the plan.
        due = [name for name in _OF_SAMPLES if name in again] + [name for name in _OF_PLAN if name in record]
        for name in due:
            if not agree(record.get(name), again.get(name)):
                message = f"{row.shape}: {name} does not follow from the row's samples and plan"
                yield Finding("row-mismatch", message, line)
        # Converted logs judge sustained by its median.
        if row.best_by not in (BEST_BY[row.regime], "median"):
            yield Finding("row-mismatch", f"{row.shape}: a best of {row.regime} is not chosen by {row.best_by}", line)


def agree(written: Any, again: Any, relative: float = _ROUNDING) -> bool:
    """Whether two JSON values are equal, numbers up to rounding, without the interval of a rate."""
    if isinstance(again, float) and isinstance(written, (int, float)) and not isinstance(written, bool):
        return math.isclose(written, again, rel_tol=relative, abs_tol=2e-12)
    if isinstance(again, dict):
        is_alike = isinstance(written, dict) and written.keys() == again.keys()
        return is_alike and all(agree(written[key], again[key], relative) for key in again.keys() - _OF_INTERVAL)
    if isinstance(again, (list, tuple)):
        is_alike = isinstance(written, list) and len(written) == len(again)
        return is_alike and all(agree(one, other, relative) for one, other in zip(written, again, strict=True))
    return type(written) is type(again) and bool(written == again)


def recomputed_ceilings(evidence: Evidence) -> OwnCeilings:
    """The ceilings of the log by problem and regime, recomputed from the rounds that it has."""
    device = evidence.header["device"]
    rows = latest_rows(row for _, _, row in evidence.rows)
    sought = dict.fromkeys((row.problem, row.regime, None) for row in rows if row.phase == CONFIRM)
    return confirm_ceilings(rows, sought, device["name"], device["uuid_hash"])


def ceilings_recompute(evidence: Evidence) -> Iterator[Finding]:
    """Ceilings follow from the rounds that confirmed them; of a resumed search, the last of a problem and regime. Those
    that attention takes its shares of may have their rounds in another log.
    """
    again, last = recomputed_ceilings(evidence), {}
    for line, record in evidence.of_kind("ceiling"):
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
            if not agree(record[name], expected[name], _POWER_ROUNDING if name in _OF_POWER else _ROUNDING):
                message = f"{record['regime']}: {name} {record[name]} (the rounds give {expected[name]})"
                yield Finding("ceiling-mismatch", message, line)


def run_was_completed(evidence: Evidence) -> Iterator[Finding]:
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
        ceilings = recomputed_ceilings(evidence) if plan.kind in (FIND, ROOFLINE) else log.all_ceilings
        again = kind_of(plan).summary(plan, log.measurements, ceilings, End("complete"))
        for name in ("measured", "best"):
            if not agree(log.summary.get(name), again[name]):
                message = f"{name}: the rows give {again[name]}, the summary says {log.summary.get(name)}"
                yield Finding("best-mismatch", message)


# -- samples are possible ----------------------------------------------------------------------------------------------


def rows_are_possible(evidence: Evidence) -> Iterator[Finding]:
    """No sample is faster than the device or its memory allows, and no figure faster than the clock that was read."""
    for line, row in evidence.good_rows:
        info, of = evidence.device_of(row), operation_called(row.operation)
        # The work of a kernel that approximates is not known.
        limit = of.fastest_possible(info, row.problem, row.shape) if is_exact(row) else None
        if limit is not None and split_impossible(row.samples, row.amount, limit, row.timer_accuracy)[1]:
            fastest, most = row.amount / min(row.samples) / TERA, limit / TERA
            message = f"{row.shape}: {fastest:.4g} {row.work.unit}, more than the {most:.4g} that {info.name} can do"
            yield Finding("implausible", message, line)
        elif reason := why_implausible(row, info, limit):
            yield Finding("implausible", f"{row.shape}: {reason}", line)


def rows_are_verified(evidence: Evidence) -> Iterator[Finding]:
    """Every good row's result was checked, with an error within its tolerance."""
    for line, row in evidence.good_rows:
        most = _MAX_ERROR if is_exact(row) else _MAX_ERROR_OF_APPROXIMATION
        bound = row.problem.tolerance if row.operation == MATMUL else most
        if row.error is None:
            yield Finding("unverified", f"{row.shape} by {row.kernel}: its result was not checked", line)
        elif not 0 <= row.error <= bound:
            yield Finding("unverified", f"{row.shape}: relative error {row.error:.2g}, beyond {bound:.2g}", line)


def sensors_are_plausible(evidence: Evidence) -> Iterator[Finding]:
    """If the device has sensors, each good row has a clock and a power within the device's limits."""
    if (sensors := evidence.header.get("sensors")) != "available":
        yield Finding("sensors", f"clock, power and temperature: {sensors}", 1, is_warning=True)
    elif evidence.has_sensors:
        device, rows = evidence.header["device"], [row for _, _, row in evidence.rows if row.ok]
        if not (device.get("max_clock_hz") and device.get("power_limit_watts")):
            yield Finding("sensors", "there are sensors, but no highest clock or no power limit", 1)
        without_clock = sum(row.conditions.clock_hz is None for row in rows)
        if without_clock or (rows and all(row.conditions.watts is None for row in rows)):
            yield Finding("sensors", f"there are sensors, but {without_clock or len(rows)} rows lack clock or power")
    for line, _, row in evidence.rows:
        seen, info = row.conditions, evidence.device_of(row)
        limit, highest = info.power_limit_watts or math.inf, info.max_clock_hz or math.inf
        least = _MIN_POWER * limit if row.ok and limit < math.inf else 0
        if seen.watts is not None and not least <= seen.watts <= _MAX_POWER * limit:
            yield Finding("sensors", f"{row.shape}: {seen.watts:.0f} W, with a limit of {limit:.0f} W", line)
        if seen.clock_hz is not None and not 0 < seen.clock_hz <= _MAX_CLOCK * highest:
            yield Finding("sensors", f"{row.shape}: {seen.clock_hz / 1e6:.0f} MHz, above the highest clock", line)


def samples_differ(evidence: Evidence) -> Iterator[Finding]:
    """Samples of a row are not all equal, and are not those of another row."""
    seen: dict[tuple[float, ...], int] = {}
    for line, _, row in evidence.rows:
        if len(row.samples) < DISTINCTIVE_SAMPLES:
            continue
        if len(set(row.samples)) == 1:
            yield Finding("equal-samples", f"{row.shape}: its {len(row.samples)} samples are all equal", line)
        if (before := seen.setdefault(row.samples, line)) != line:
            yield Finding("equal-samples", f"{row.shape}: has the samples of line {before}", line)


def timer_is_credible(evidence: Evidence) -> Iterator[Finding]:
    """The overhead subtracted is one that the timer of its backend can have."""
    backend = evidence.header["device"]["backend"]
    timer = find_timer(backend)
    bounds = f"{timer.lowest * 1e6:.1f} to {timer.highest * 1e6:.1f}" if timer else "0 to 20"
    for line, _, row in evidence.rows:
        if row.timer_overhead and not is_credible(backend, row.timer_overhead):
            subtracted = f"{row.timer_overhead * 1e6:.1f} us subtracted"
            yield Finding("timer", f"{subtracted}, but the timer of {backend} adds {bounds} us", line)
            return


# -- where a log belongs -----------------------------------------------------------------------------------------------


def folder_of(device_name: str) -> str:
    """``NVIDIA H100 80GB HBM3`` -> ``nvidia-h100-80gb-hbm3``."""
    name = slug([device_name])
    if not name:
        return "unknown-accelerator"
    return f"{name}-accelerator" if _RESERVED.fullmatch(name) else name


def name_of(header: Mapping[str, Any]) -> str:
    """The file name of a run: command or operation, kernels of matmul, dtypes, directions, regimes and start (UTC)."""
    plan = header["plan"]
    command, problems = plan["command"], plan["problems"]
    is_of_products = plan["operation"] == MATMUL and command in (SWEEP, FIND)
    parts = [
        *([] if is_of_products else [plan["operation"]]),
        *([command] if is_of_products or command in (FIND, ROOFLINE, EXPLAIN) else []),
        *([header["kernel"]] if is_of_products and command == SWEEP else []),
        *(problem["dtype"] + ("-fast" if problem.get("fast_accumulation") else "") for problem in problems),
        *(problem["direction"] for problem in problems if "direction" in problem),
        *plan["regimes"],
        moment(header["started"]),
    ]
    return f"{slug(parts)}.jsonl"


def legacy_name_of(run: FinderRun) -> str:
    """The file name of an imported run of mamf-finder."""
    started = moment(run.started) if run.started else "undated"
    return f"{slug(['mamf-finder', run.version or '', run.dtype or '', started])}.jsonl"


def place_of(header: Mapping[str, Any]) -> Path:
    """Folder and name, from the results folder."""
    return Path(folder_of(header["device"]["name"]), name_of(header))


def lies_at(actual: Path, place: Path) -> bool:
    """Whether ``actual`` is this place, or the numbered place of another run that began in the same second."""
    own = re.fullmatch(re.escape(place.stem) + r"(-([2-9]|[1-9]\d+))?", actual.stem)
    return own is not None and actual.with_stem(place.stem) == place


def moment(iso: str) -> str:
    """An ISO time as in a file name; raises ValueError for any other text."""
    return datetime.fromisoformat(iso).strftime("%Y%m%d-%H%M%S")


def slug(parts: Iterable[str]) -> str:
    """Lower-case words joined by dashes; each part once."""
    texts = (re.sub(r"[^a-z0-9_]+", "-", part.lower()).strip("-") for part in dict.fromkeys(parts))
    return "-".join(text for text in texts if text)


# -- the review --------------------------------------------------------------------------------------------------------


_RULES: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    header_rules.has_known_fields,
    header_rules.is_real_device,
    header_rules.is_one_device,
    header_rules.is_of_normal_data,
    header_rules.is_of_the_past,
    rows_recompute,
    ceilings_recompute,
    run_was_completed,
    rows_are_possible,
    rows_are_verified,
    sensors_are_plausible,
    samples_differ,
    timer_is_credible,
)


@dataclass(frozen=True)
class Review:
    """What the rules say of a log. ``tier``: complete, interrupted or legacy; None when it cannot be read. ``place``:
    where it belongs within results/. ``samples``: what identifies the samples of its rows, within this process.
    """

    path: Path
    findings: tuple[Finding, ...]
    tier: str | None = None
    place: Path | None = None
    samples: frozenset[int] = field(default=frozenset(), repr=False)

    def is_rejected(self) -> bool:
        return any(not finding.is_warning for finding in self.findings)


def review(path: Path, seen: Seen | None = None) -> Review:
    """All findings about a log; an unreadable log is also a finding. Never raises for the file's contents. ``seen``:
    called with the number of bytes read.
    """
    try:
        return _review(path, seen)
    except (*MALFORMED, RecursionError) as error:
        return Review(path, (_unreadable(path, error),))


def _review(path: Path, seen: Seen | None) -> Review:
    records = records_of(path, seen)
    first = next(records)
    findings, header = list(_as_bytes(path)), first[1]
    if why := why_unreadable(path, header.get("schema")):
        return Review(path, (Finding("schema", why, 1),))
    if header.get("tier") == TIER:
        return _legacy_review(path, itertools.chain([first], records), findings)
    whole = (first, *records)
    for line, record in whole:
        findings += header_rules.private_findings(line, record)
    plan = header.get("plan", {})  # a profile has none
    named = {plan.get("operation", MATMUL)}
    named |= {record["operation"] for _, record in whole if "operation" in record}
    if foreign := sorted(named - own_operations()):
        message = f"{shorten(', '.join(foreign))}: results/ collects mamf's own operations, and no other is imported"
        return Review(path, (*findings, Finding("unknown-operation", message, 1)))
    try:
        log = run_log_of(path, whole)
    except RunLogError as error:
        return Review(path, (*findings, _unreadable(path, error)))
    if log.counter_records or not kind_of(log.plan).is_collected:
        what = f"a log of 'mamf {'counters' if log.counter_records else log.plan.kind}'"
        return Review(path, (*findings, Finding("kind", f"{what}: results/ does not collect it")))
    evidence = Evidence(whole, log)
    for rule in _RULES:
        findings += rule(evidence)
    samples = frozenset(hash(row.samples) for _, _, row in evidence.rows if len(row.samples) >= DISTINCTIVE_SAMPLES)
    return Review(path, tuple(findings), log.tier, place_of(header), samples)


def _legacy_review(path: Path, records: Iterator[tuple[int, dict[str, Any]]], findings: list[Finding]) -> Review:
    """Each record is judged in passing: such a log can have a million rows."""

    def judged() -> Iterator[dict[str, Any]]:
        for line, record in records:
            findings.extend(header_rules.private_findings(line, record))
            yield record

    run = legacy_run(path, judged())
    findings += header_rules.legacy_findings(run)
    figures = hash((run.started, *(f"{row.shape} {row.tflops}" for row in run.rows)))
    place = Path(folder_of(run.device or ""), legacy_name_of(run))
    return Review(path, tuple(findings), TIER, place, frozenset([figures]))


def _unreadable(path: Path, error: Exception) -> Finding:
    return Finding("unreadable", describe_error(error).removeprefix(f"{path}").lstrip(",: "))


def _as_bytes(path: Path) -> Iterator[Finding]:
    data = path.read_bytes()
    if data and not data.endswith(b"\n") and b"\n" in data:
        yield Finding("truncated", "the last line is incomplete: --resume the run, or cut the line off")
    if b"\r" in data or data.startswith(b"\xef\xbb\xbf"):
        yield Finding("unreadable", "an editor changed its line ends or put a mark before it")
    for number, line in enumerate(data.split(b"\n"), start=1):
        for name in repeated_fields(line):
            yield Finding("repeated-field", f"an object has the field {name!r} more than once: leave one", number)


def review_results(root: Path, paths: Iterable[Path], seen: Seen | None = None) -> list[Review]:
    """Reviews of logs in a results folder: each in its place, each once, each with its submitter. The last review is of
    submitters.txt, if something is wrong with it.
    """
    reviews: dict[Path, Review] = {}
    owners: dict[int, Path] = {}
    for path in paths:
        found = review(path, seen)
        place, more = path.relative_to(root), []
        if found.place is not None and not lies_at(place, found.place):
            more.append(Finding("misplaced", f"belongs to {root.name}/{found.place}"))
        if copied := {owners.setdefault(each, place) for each in found.samples} - {place}:
            more.append(Finding("duplicate", f"has samples of {min(copied)}"))
        reviews[path] = replace(found, findings=(*found.findings, *more))
    for path, finding in submitter_findings(root, [path.relative_to(root) for path in reviews]):
        found = reviews.get(path, Review(path, ()))
        reviews[path] = replace(found, findings=(*found.findings, finding))
    return list(reviews.values())


def find_free_place(found: Review, root: Path) -> Path:
    """The first free place for a log in the results folder. Raises UsageError if this run is already there, or if the
    log does not say where it belongs.
    """
    if found.place is None:
        raise UsageError(f"{found.path} cannot be placed: 'mamf results check' says why")
    for target in (root / place for place in numbered(found.place)):
        if not target.exists():
            break
        if review(target).samples & found.samples:
            raise UsageError(f"{target} is there already: a run is submitted once")
    return target
