"""Review contributed run logs: check each log against all rules, and choose its path in results/."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from mamf.backend import DeviceInfo
from mamf.contribution.collection import MAINTAINERS_FILE, SUBMITTERS_FILE, check_submitters
from mamf.contribution.known_ceilings import PUBLISHED_FIGURES_FILE, PUBLISHED_NOTICE_FILE
from mamf.contribution.rules import (
    LOG_TIERS,
    MIN_DISTINCTIVE_SAMPLES,
    RULES,
    Finding,
    ReviewedLog,
    check_private_texts,
)
from mamf.dtypes import DTYPES
from mamf.errors import RunLogError, UsageError, shorten_value
from mamf.files import yield_numbered_paths
from mamf.kinds.registry import get_kind
from mamf.logs.legacy import FINDER_STATISTICS, LEGACY_TIER, FinderRun, build_legacy_run
from mamf.logs.run_log import (
    MALFORMED_LOG_ERRORS,
    ReadProgressCallback,
    build_run_log,
    describe_record_error,
    explain_unreadable_schema,
    find_repeated_fields,
    parse_records,
    read_lines,
)
from mamf.measurement import TERA
from mamf.operations.unknown import sets_compute_ceiling
from mamf.peaks import compute_max_flops
from mamf.plans import EXPLAIN, FIND, ROOFLINE, SWEEP
from mamf.plugins.discovery import OPERATION_GROUP, list_builtin_names
from mamf.report.document import Answer, Block, Column, Document, Lines, Table, format_count

# No folder can have these names, because Windows reserves them.
_RESERVED_NAME_PATTERN = re.compile(r"con|prn|aux|nul|(?:com|lpt)\d")

# -- the path in results/ where a log belongs --------------------------------------------------------------------------


def make_folder_name(device_name: str) -> str:
    """Return the name of the folder in results/ for a device, such as ``nvidia-h100-80gb-hbm3`` for ``NVIDIA H100 80GB
    HBM3``.
    """
    name = join_into_slug([device_name])
    if not name:
        return "unknown-accelerator"
    return f"{name}-accelerator" if _RESERVED_NAME_PATTERN.fullmatch(name) else name


def make_file_name(header: Mapping[str, Any]) -> str:
    """Return the file name of a log in results/. The name is made of the command or operation, kernel, dtypes,
    directions, regimes and start of the run.
    """
    plan = header["plan"]
    command, problems = plan["command"], plan["problems"]
    names_command = sets_compute_ceiling(plan["operation"]) and command in (SWEEP, FIND)
    parts = [
        *([] if names_command else [plan["operation"]]),
        *([command] if names_command or command in (FIND, ROOFLINE, EXPLAIN) else []),
        *([header["kernel"]] if names_command and command == SWEEP else []),
        *(problem["dtype"] + ("-fast" if problem.get("fast_accumulation") else "") for problem in problems),
        *(problem["direction"] for problem in problems if "direction" in problem),
        *plan["regimes"],
        format_start_time(header["started"]),
    ]
    return f"{join_into_slug(parts)}.jsonl"


def make_legacy_file_name(run: FinderRun) -> str:
    """Return the file name in results/ for an imported run of mamf-finder: version, dtype and start."""
    started = format_start_time(run.started) if run.started else "undated"
    return f"{join_into_slug(['mamf-finder', run.version or '', run.dtype or '', started])}.jsonl"


def is_at_expected_path(actual: Path, expected: Path) -> bool:
    """Return whether ``actual`` is the path ``expected``, or ``expected`` with a number at the end of its file name.

    The number distinguishes the logs of runs that started in the same second.
    """
    numbered = re.fullmatch(re.escape(expected.stem) + r"(-([2-9]|[1-9]\d+))?", actual.stem)
    return numbered is not None and actual.with_stem(expected.stem) == expected


def format_start_time(iso: str) -> str:
    """Format the start of a run, an ISO time, for a file name. Raises ValueError for any other text."""
    return datetime.fromisoformat(iso).strftime("%Y%m%d-%H%M%S")


def join_into_slug(parts: Iterable[str]) -> str:
    """Join texts with dashes into a name in lower case. Leaves out repeated texts and special characters."""
    return "-".join(
        filter(None, (re.sub(r"[^a-z0-9_]+", "-", part.lower()).strip("-") for part in dict.fromkeys(parts)))
    )


# -- reviewing logs by the rules ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Review:
    """The result of reviewing one log.

    - ``findings``: the problems that the rules found.
    - ``tier``: complete, interrupted or legacy; None for an unreadable log.
    - ``results_path``: the path in results/ where the log belongs; None for an unreadable log.
    - ``sample_hashes``: a hash of the samples of each row, to find copied logs. The hashes differ between processes.
    """

    path: Path
    findings: tuple[Finding, ...]
    tier: str | None = None
    results_path: Path | None = None
    sample_hashes: frozenset[int] = field(default=frozenset(), repr=False)

    def is_rejected(self) -> bool:
        return any(not finding.is_warning for finding in self.findings)


def review_log(path: Path, on_read: ReadProgressCallback | None = None) -> Review:
    """Check a log against all rules. If the log is unreadable, add a finding that says why, and raise no error.

    ``on_read``: called with the number of bytes read, for a progress bar.
    """
    try:
        return _review_by_rules(path, on_read)
    except (*MALFORMED_LOG_ERRORS, RecursionError) as error:
        return Review(path, (_make_unreadable_finding(path, error),))


def _review_by_rules(path: Path, on_read: ReadProgressCallback | None) -> Review:
    records = parse_records(path, read_lines(path, on_read))
    first = next(records)
    findings, header = list(_find_byte_errors(path)), first[1]
    if why := explain_unreadable_schema(path, header.get("schema")):
        return Review(path, (Finding("schema", why, 1),))
    if header.get("tier") == LEGACY_TIER:
        return _review_legacy_log(path, itertools.chain([first], records), findings)
    all_records = (first, *records)
    for line, record in all_records:
        findings += check_private_texts(line, record)
    plan = header.get("plan", {})  # The log of a profile has no plan.
    named = {each["operation"] for each in (plan, *(record for _, record in all_records)) if "operation" in each}
    if foreign := sorted(named - list_builtin_names(OPERATION_GROUP)):
        message = f"results/ collects only operations that are part of mamf, not {shorten_value(', '.join(foreign))}"
        return Review(path, (*findings, Finding("unknown-operation", message, 1)))
    try:
        log = build_run_log(path, all_records)
    except RunLogError as error:
        return Review(path, (*findings, _make_unreadable_finding(path, error)))
    if log.counter_records or not get_kind(log.plan).is_accepted_in_results:
        what = f"a log of 'mamf {'counters' if log.counter_records else log.plan.kind}'"
        return Review(path, (*findings, Finding("kind", f"this is {what}, which results/ does not collect")))
    reviewed_log = ReviewedLog(all_records, log)
    for rule in RULES:
        findings += rule(reviewed_log)
    sample_hashes = frozenset(
        hash(row.samples) for _, _, row in reviewed_log.rows if len(row.samples) >= MIN_DISTINCTIVE_SAMPLES
    )
    results_path = Path(make_folder_name(header["device"]["name"]), make_file_name(header))
    return Review(path, tuple(findings), log.tier, results_path, sample_hashes)


def _review_legacy_log(path: Path, records: Iterator[tuple[int, dict[str, Any]]], findings: list[Finding]) -> Review:
    """Review a log that was imported from mamf-finder, record by record, because it may have a million rows."""

    def check_and_yield_records() -> Iterator[dict[str, Any]]:
        for line, record in records:
            findings.extend(check_private_texts(line, record))
            yield record

    run = build_legacy_run(path, check_and_yield_records())
    findings += _check_legacy_run(run)
    figures = hash((run.started, *(f"{row.shape} {row.tflops}" for row in run.rows)))
    results_path = Path(make_folder_name(run.device or ""), make_legacy_file_name(run))
    return Review(path, tuple(findings), LEGACY_TIER, results_path, frozenset([figures]))


def _check_legacy_run(run: FinderRun) -> Iterator[Finding]:
    """Check that an imported run of mamf-finder names its accelerator, and that its figures are physically possible."""
    if not run.device:
        yield Finding("device", "the log does not name the accelerator", 1)
    if not run.rows and not run.best:
        yield Finding("missing-row", "the log has no figures")
    is_known = run.dtype in DTYPES and run.device
    limit = compute_max_flops(DeviceInfo("legacy", 0, run.device or "", ""), run.dtype or "") if is_known else None
    for line, row in enumerate((*run.rows, *run.best.values()), start=2):
        for name, tflops in row.tflops.items():
            if name not in FINDER_STATISTICS or not 0 < tflops < math.inf:
                yield Finding("unreadable", f"{name} {tflops!r} is not a figure that mamf-finder prints", line)
            elif limit is not None and tflops * TERA > limit:
                yield Finding("implausible", f"{tflops:g} TFLOPS is more than {run.device} can reach", line)


def _make_unreadable_finding(path: Path, error: Exception) -> Finding:
    return Finding("unreadable", describe_record_error(error).removeprefix(f"{path}").lstrip(",: "))


def _find_byte_errors(path: Path) -> Iterator[Finding]:
    data = path.read_bytes()
    if data and not data.endswith(b"\n") and b"\n" in data:
        yield Finding("truncated", "the last line is incomplete: continue the run with --resume, or delete the line")
    if b"\r" in data or data.startswith(b"\xef\xbb\xbf"):
        yield Finding(
            "unreadable",
            "an editor changed the line endings or added a byte order mark: restore the file that mamf wrote",
        )
    for number, line in enumerate(data.split(b"\n"), start=1):
        for name in find_repeated_fields(line):
            yield Finding(
                "repeated-field", f"an object has the field {name!r} more than once: keep only one of them", number
            )


def review_results(root: Path, paths: Iterable[Path], on_read: ReadProgressCallback | None = None) -> list[Review]:
    """Review the logs of a results folder: check each against all rules, and find logs at a wrong path, copied samples
    and missing submitters.

    If submitters.txt has errors, the last review is the review of submitters.txt.
    """
    reviews: dict[Path, Review] = {}
    path_by_sample_hash: dict[int, Path] = {}
    for path in paths:
        result = review_log(path, on_read)
        actual, more = path.relative_to(root), []
        if result.results_path is not None and not is_at_expected_path(actual, result.results_path):
            more.append(Finding("misplaced", f"move this log to {root.name}/{result.results_path}"))
        if copied := {path_by_sample_hash.setdefault(each, actual) for each in result.sample_hashes} - {actual}:
            more.append(Finding("duplicate", f"the log has the same samples as {min(copied)}: remove one of the two"))
        reviews[path] = replace(result, findings=(*result.findings, *more))
    for path, finding in check_submitters(root, [path.relative_to(root) for path in reviews]):
        result = reviews.get(path, Review(path, ()))
        reviews[path] = replace(result, findings=(*result.findings, finding))
    return list(reviews.values())


def review_stray_files(root: Path, files: Iterable[Path]) -> list[Review]:
    """Return a review with an error for each file in a results folder that is neither a log nor a file that mamf
    writes.
    """
    written = {
        root / each for each in (PUBLISHED_FIGURES_FILE, PUBLISHED_NOTICE_FILE, SUBMITTERS_FILE, MAINTAINERS_FILE)
    }
    strays = [path for path in files if path.suffix != ".jsonl" and path.name != "README.md" and path not in written]
    misplaced = Finding(
        "misplaced", "results/ has only run logs (*.jsonl) and files that mamf writes: remove this file"
    )
    return [Review(path, (misplaced,)) for path in strays]


def find_free_path(review: Review, root: Path) -> Path:
    """Find the first free path for a log in the results folder ``root``.

    Raises UsageError if the folder already has this run, or if the log is unreadable.
    """
    if review.results_path is None:
        raise UsageError(f"{review.path} cannot be added to {root.name}/: run 'mamf results check' to see why")
    for target in (root / path for path in yield_numbered_paths(review.results_path)):
        if not target.exists():
            break
        if review_log(target).sample_hashes & review.sample_hashes:
            raise UsageError(f"this run is already in {target}, and each run can be submitted only once")
    return target


# -- reporting reviews -------------------------------------------------------------------------------------------------


def format_findings(review: Review, include_warnings: bool = True) -> list[str]:
    """Format each finding of a review as one line of text.

    ``include_warnings``: whether to include warnings, which do not reject the log.
    """
    return [
        f"{review.path}{'' if each.line is None else f':{each.line}'}: {each.level}: {each.rule}: {each.message}"
        for each in review.findings
        if include_warnings or not each.is_warning
    ]


def make_reviews_document(reviews: Sequence[Review], named_paths: Container[Path]) -> Document:
    """Make the report of ``mamf results check``.

    ``named_paths``: the logs that the user named. Only their warnings are printed, because the warnings of a whole
    folder would hide its errors.
    """
    names = ("rule", "level", "line", "message")
    columns: list[Column[Review]] = [  # JSON has these columns; the printed report has the lines below.
        Column("path", "", lambda review: str(review.path)),
        Column("tier", "", lambda review: review.tier),
        Column("place", "", lambda review: review.results_path and review.results_path.as_posix()),
        Column("accepted", "", lambda review: not review.is_rejected()),
        Column(
            "findings", "", lambda review: [{name: getattr(each, name) for name in names} for each in review.findings]
        ),
    ]
    tiers = Counter(each.tier or "unreadable" for each in reviews)
    by_tier = ", ".join(f"{tiers[tier]} {tier}" for tier in (*LOG_TIERS, "unreadable") if tiers[tier])
    rejected = sum(each.is_rejected() for each in reviews)
    warnings = sum(finding.is_warning for each in reviews for finding in each.findings)
    verdict = f"{rejected} rejected" if rejected else "all accepted"
    blocks: list[Block] = [
        Lines([line for each in reviews for line in format_findings(each, each.path in named_paths)]),
        Table(columns, reviews, key="logs"),
        Answer(
            [
                f"{format_count(len(reviews), 'file')} checked ({by_tier}): {verdict}"
                + (f", {format_count(warnings, 'warning')}" if warnings else "")
            ]
        ),
    ]
    return Document("Logs", blocks)
