"""Make the page of ``mamf report`` from run logs, profiles, logs of mamf-finder, and folders of such logs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mamf.ceilings.ceiling import MAX_SHARE_OF_CEILING, Ceiling
from mamf.contribution.known_ceilings import compare_with_known_ceilings
from mamf.errors import DEFAULT_COMPARISON_TOLERANCE, OK, MamfError, MamfWarning, RunLogError, UsageError
from mamf.kinds.kind import ReportOptions, build_confirmed_roofs
from mamf.kinds.registry import get_kind, make_log_chart, make_run_title
from mamf.logs.compare import compare
from mamf.logs.legacy import FinderRun, read_legacy_or_none
from mamf.logs.recording import PYTHON_COMMAND
from mamf.logs.run_log import RunLog, parse_record, read_lines, read_run_log
from mamf.logs.shared_runs import is_shared_folder, read_log_or_shared_run
from mamf.measurement import IDLE_LABEL, Measurement
from mamf.node.logs import is_node_folder, make_contributed_baseline, read_node_folders
from mamf.node.report import make_node_chart, make_node_document
from mamf.node.verdict import judge_devices
from mamf.operations.unknown import get_operation, is_compute_roof
from mamf.pages.conditions import format_start_time, make_conditions_blocks, make_name_value_table
from mamf.plans import OVERLAP, VERIFY
from mamf.profiling.classes import COMMUNICATION
from mamf.profiling.counters.report import make_counters_document
from mamf.profiling.log import (
    describe_device,
    describe_largest_classes,
    find_rank_logs,
    format_milliseconds,
    get_rank_log_path,
    make_profile_document,
    make_ranks_document,
    read_profile_or_none,
    read_rank_logs,
)
from mamf.profiling.profile import Profile
from mamf.report.charts.bars import RangeChart, RangePoint, RangeRow
from mamf.report.charts.picture import Picture
from mamf.report.comparison import make_comparison_document
from mamf.report.document import (
    UNKNOWN_INTERVAL,
    Answer,
    Block,
    Document,
    Lines,
    Table,
    choose_unit,
    describe_end,
    describe_machine,
    format_four_digits,
    format_interval,
    format_percent,
    format_rate,
    make_text_table,
)
from mamf.report.imported import (
    make_compared_run,
    make_finder_document,
    make_side_by_side_chart,
    make_side_by_side_document,
)
from mamf.report.page import CopyableCommand, Fact, Page, PagePart, Section
from mamf.report.rows import describe_row_interval, select_ranked_rows
from mamf.report.shares import (
    WRONG_CEILING_TEXT,
    ShareCalculator,
    divide_by_peak,
    make_ceiling_title,
    make_problem_title_in_words,
)
from mamf.report.studies import compute_kept_rate_ranges
from mamf.report.verification import yield_verdict_lines

#: Maximum number of headline figures on a page, and of rows in a table.
_MAX_HEADLINE_FIGURES, _MAX_TABLE_ROWS = 6, 500
#: A section with more tables or picture panels than these limits is collapsed until the reader clicks on it.
_MAX_OPEN_TABLES, _MAX_OPEN_PANELS = 8, 12
#: Headline figures come from rows whose operands are normally distributed random numbers. Rows that were measured on
#: other data only show how much the rate depends on the data.
NORMAL_DATA = "normal"


@dataclass(frozen=True)
class HeadlineFigure:
    """A headline figure of a log, with its interval and notes.

    - ``unit``: the unit of ``point``.
    - ``share_fact``: the figure as a share of a ceiling. If it is not None, the page shows it instead of the rate.
    """

    label: str
    unit: str
    point: RangePoint
    notes: Sequence[str] = ()
    share_fact: Fact | None = None

    @property
    def fact(self) -> Fact:
        if self.share_fact:
            return self.share_fact
        unit, factor = choose_unit(self.unit, [self.point.value])
        return Fact(self.label, format_four_digits(self.point.value * factor), unit, list(filter(None, self.notes)))


@dataclass(frozen=True)
class LogContent:
    """The content of a page for one log.

    - ``name``: identifies the log on the page.
    - ``document``: the report of the log.
    - ``figures``, ``facts``: headline figures that are rates, and headline figures that are not.
    - ``verdict``, ``verdict_color``: the verdict of a verification, and its color on the page.
    - ``condition_parts``: blocks about the device, the software and the settings.
    - ``log``: the log of a run of mamf or mamf-finder, None for a profile.
    """

    name: str
    title: str
    intro_lines: Sequence[str]
    document: Document
    pictures: Sequence[Picture] = ()
    figures: Sequence[HeadlineFigure] = ()
    condition_parts: Sequence[PagePart] = ()
    command: str = ""
    log: RunLog | FinderRun | None = None
    facts: Sequence[Fact] = ()
    verdict: str = ""
    verdict_color: str = ""

    @property
    def sections(self) -> list[Section]:
        """The sections of the log: pictures, tables, conditions, and the command that repeats the run."""
        # Limit the rows of tables to keep the page small. CSV and JSON of the log have all rows.
        figures = [
            replace(block, max_shown_rows=_MAX_TABLE_ROWS)
            if isinstance(block, Table) and (block.max_shown_rows is None or block.max_shown_rows > _MAX_TABLE_ROWS)
            else block
            for block in self.document.visible_blocks
        ]
        is_short = sum(isinstance(block, Table) for block in figures) <= _MAX_OPEN_TABLES
        panels = [panel for picture in self.pictures for row in picture.make_panel_rows() for panel in row if panel]
        return [
            Section("Pictures", self.pictures, is_open=len(panels) <= _MAX_OPEN_PANELS),
            Section("Figures", figures, is_open=is_short),
            Section("Conditions", self.condition_parts, is_open=is_short and len(panels) <= _MAX_OPEN_PANELS),
            Section("Reproduce it", [CopyableCommand(self.command)] * (self.command not in ("", PYTHON_COMMAND))),
        ]


def _join_sections(heading: str, sections: Sequence[Section]) -> Section:
    """Merge several sections into one section, which is collapsed until the reader clicks on it."""
    return Section(heading, [part for section in sections for part in section.parts], is_open=False)


# -- making pages ------------------------------------------------------------------------------------------------------


def make_report_page(paths: Sequence[Path]) -> Page:
    """Return a page for logs and folders. Raises RunLogError for an unreadable log, UsageError if there is no log."""
    folders = [path for path in paths if path.is_dir() and not is_shared_folder(path)]
    if len(paths) == len(folders) == 1:
        return _make_folder_page(paths[0])
    sources = [read_log_content(path) for path in paths if path not in folders]
    return _make_page_of_contents(sources, [_make_folder_page(path) for path in folders])


def _make_page_of_contents(sources: Sequence[LogContent], pages: Sequence[Page]) -> Page:
    """Combine the contents of single logs and the pages of folders into one page."""
    if pages or len(sources) > 1:
        return _make_comparison_page(sources, pages)
    source = sources[0]
    return Page(
        *(source.title, source.intro_lines, [*(each.fact for each in source.figures), *source.facts]),
        *(source.verdict, source.verdict_color),
        sections=source.sections,
    )


def _make_folder_page(path: Path) -> Page:
    if is_node_folder(path):
        return _make_node_page(path)
    if find_rank_logs(path):
        return _make_ranks_page(path)
    logs = sorted(path.rglob("*.jsonl"))
    if not logs:
        raise UsageError(f"{path} has no logs: give a folder that has run logs, such as that of 'mamf node'")
    return _make_page_of_contents(_read_readable_logs(logs), [])


def _read_readable_logs(paths: Sequence[Path]) -> list[LogContent]:
    """Read logs. Warn of unreadable logs and skip them. Raises RunLogError if no log is readable."""
    contents, errors = [], []
    for path in paths:
        try:
            contents.append(read_log_content(path))
        except RunLogError as error:
            errors.append(error)
    if not contents:
        raise errors[0]
    for reason in map(str, errors):
        warnings.warn(f"the page leaves out a log: {reason}", MamfWarning, stacklevel=2)
    return contents


def _make_node_page(path: Path) -> Page:
    not_together_reason, devices = read_node_folders([path])
    verdict = judge_devices(devices, make_contributed_baseline(devices))
    parts: list[PagePart] = [make_node_chart(devices, verdict)] if any(device.figures for device in devices) else []
    names = ", ".join(dict.fromkeys(device.name for device in devices if device.name))
    return Page(
        f"Node of {len(devices)} x {names or 'unknown devices'}",
        verdict=verdict.reason,
        verdict_color="good" if verdict.level == OK else "bad",
        sections=[
            Section("Devices", [*parts, *make_node_document(devices, verdict, not_together_reason).visible_blocks])
        ],
    )


def _make_ranks_page(path: Path) -> Page:
    ranks = read_rank_logs(path)
    document = make_ranks_document(ranks, len(find_rank_logs(path)))
    answer = next(text for block in document.blocks if isinstance(block, Answer) for text in block.texts)
    sources = [make_profile_content(get_rank_log_path(path, rank), *read) for rank, read in ranks.items()]
    sections = [_join_sections(f"{source.name}: {source.title}", source.sections) for source in sources]
    return Page(document.title, verdict=answer, sections=[Section("", document.visible_blocks[:-1]), *sections])


def _make_comparison_page(sources: Sequence[LogContent], pages: Sequence[Page]) -> Page:
    """Return a page with the figures of all logs side by side, and a section for each log and each folder."""
    rows = [(source.name, source.title, "; ".join(source.intro_lines)) for source in sources]
    listed = [make_text_table(("log", "what", "machine and run"), rows)] if rows else []
    compared = _make_log_comparison(sources)
    sections = [
        Section("Side by side", [*_make_side_by_side_charts(sources), *listed], len(sources) <= _MAX_OPEN_PANELS),
        Section("Compared", compared),
        *(_join_sections(f"{source.name}: {source.title}", source.sections) for source in sources),
        *(_join_sections(page.title, page.sections) for page in pages),
    ]
    answers = [text for block in compared if isinstance(block, Answer) for text in block.texts]
    facts, intro_lines = [] if answers else list(_collect_facts(sources)), answers[1:]
    if len(facts) > _MAX_HEADLINE_FIGURES:
        facts = sorted(facts, key=lambda fact: "ceiling, " not in fact.label)
        intro_lines = [f"the first {_MAX_HEADLINE_FIGURES} of {len(facts)} figures, ceilings first:"]
    devices = list(dict.fromkeys(source.title.partition(": ")[0] for source in sources))
    runs = f"{len(sources) + len(pages)} runs side by side"
    if len(sources) == 2 and not compared:
        runs = " and ".join(source.title.partition(": ")[2] or source.title for source in sources)
    return Page(
        f"{devices[0]}: {runs}" if len(devices) == 1 and not pages else runs,
        intro_lines,
        facts[:_MAX_HEADLINE_FIGURES],
        verdict=answers[0] if answers else "",
        sections=sections,
    )


def _collect_facts(sources: Sequence[LogContent]) -> Iterator[Fact]:
    """Yield each log's headline figures. Labels begin with the device if all differ, or the log if titles are equal."""
    titles = [source.title for source in sources]
    names = [title.partition(": ")[0] for title in titles]
    if len(set(names)) < len(names):
        names = _shorten_log_names(sources) if len(set(titles)) < len(titles) else [""] * len(names)
    for source, name in zip(sources, names, strict=True):
        facts = source.facts or [figure.fact for figure in source.figures]
        for fact in facts[: max(1, _MAX_HEADLINE_FIGURES // len(sources))]:
            yield replace(fact, label=f"{name}: {fact.label}") if name else fact


def _shorten_log_names(sources: Sequence[LogContent]) -> list[str]:
    """Return the file names of the logs without the leading words that they all share."""
    names = [Path(source.name).stem.split("-") for source in sources]
    while len(names) > 1 and len({name[0] for name in names}) == 1 and all(len(name) > 1 for name in names):
        names = [name[1:] for name in names]
    return ["-".join(name) for name in names]


def _make_side_by_side_charts(sources: Sequence[LogContent]) -> list[RangeChart]:
    """Draw the headline figures in the most frequent unit. Return an empty list if only one figure has this unit."""
    names = zip(sources, _shorten_log_names(sources), strict=True)
    figures = [(name, source.name, figure) for source, name in names for figure in source.figures]
    units = [figure.unit for _, _, figure in figures]
    unit = max(units, key=units.count, default="")
    if units.count(unit) < 2:
        return []
    rows = [
        RangeRow(figure.label, name, (figure.point,), style_name=log)
        for name, log, figure in figures
        if figure.unit == unit
    ]
    has_interval = [row.points[0].low < row.points[0].high for row in rows]
    intervals = "with their 95 % repeat intervals" if all(has_interval) else "lines: 95 % repeat intervals, if known"
    return [RangeChart("The figures of each log", intervals if any(has_interval) else "", unit, tuple(rows))]


def _make_log_comparison(sources: Sequence[LogContent]) -> Sequence[Block]:
    """Return the comparison of two logs of one operation, or a line that says why they cannot be compared."""
    logs = [source.log for source in sources if isinstance(source.log, RunLog)]
    if len(sources) == 2 and len(logs) < 2:
        return _make_finder_comparison(sources)
    if len(sources) != 2 or logs[0].plan.operation != logs[1].plan.operation:
        return []
    try:
        document = make_comparison_document(compare(logs[:1], logs[1:], False), DEFAULT_COMPARISON_TOLERANCE)
    except MamfError as error:
        reason = str(error).partition("; --")[0]
        for log in logs:  # readers share pages, so a page must not show folders of this machine
            reason = reason.replace(str(log.path), log.path.name)
        return [Lines([f"these logs cannot be compared: {reason}"])]
    return document.visible_blocks


def _make_finder_comparison(sources: Sequence[LogContent]) -> Sequence[Block]:
    """Compare two logs, at least one of mamf-finder. Return an empty list if they have no shape in common."""
    with suppress(UsageError):  # raised if the logs have no shape in common
        shown = [make_compared_run(source.name, source.log) for source in sources if source.log]
        if len(shown) == 2:
            return make_side_by_side_document(*shown).visible_blocks
    return []


# -- reading logs into the parts of a page -----------------------------------------------------------------------------


def read_log_content(path: Path) -> LogContent:
    """Read a log of any kind, or a folder that a run on several devices wrote. Raises RunLogError for other files."""
    if path.is_dir():
        return make_run_log_content(read_log_or_shared_run(path))
    if (imported := read_legacy_or_none(path)) is not None:
        return make_finder_content(path.name, imported)
    if (profiled := read_profile_or_none(path)) is not None:
        return make_profile_content(path, *profiled)
    return make_run_log_content(read_run_log(path))


def make_finder_content(name: str, run: FinderRun) -> LogContent:
    known = {**run.software, **run.device_properties}
    figures = [
        HeadlineFigure(
            f"mamf-finder, best {statistic}",
            "TFLOPS",
            RangePoint(row.tflops[statistic], row.tflops[statistic], row.tflops[statistic]),
            ["as printed by mamf-finder, without samples or checks", f"at {row.shape or 'an unknown shape'}"],
        )
        for statistic, row in run.best.items()
    ]
    return LogContent(
        name,
        f"{run.device or 'unknown device'}: a log of mamf-finder {run.version or ''}",
        [f"started {run.started}" if run.started else "the log does not say when it started"],
        make_finder_document(run, _MAX_TABLE_ROWS),
        [make_side_by_side_chart([make_compared_run(name, run)])] if any(row.shape for row in run.rows) else [],
        figures[:_MAX_HEADLINE_FIGURES],
        [make_name_value_table(known)] if known else [],
        run.command or "",
        run,
    )


def make_profile_content(path: Path, script: str, profile: Profile) -> LogContent:
    """Collect the page content for a profile. ``path``: the path of its log. ``script``: the name of the profiled
    script.
    """
    header = parse_record(next(read_lines(path)))
    document = make_profile_document(script, profile, _MAX_TABLE_ROWS)
    return LogContent(
        path.name,
        f"{document.title} on {describe_device(profile)}",
        [describe_largest_classes(profile), format_start_time(header)],
        document,
        condition_parts=make_conditions_blocks({"device": {"name": describe_device(profile)}, "timer": None, **header}),
        command=header["command"],
        facts=_list_profile_facts(profile),
    )


def _list_profile_facts(profile: Profile) -> list[Fact]:
    is_timed, whole = profile.unprofiled_step_seconds is not None, profile.whole_seconds
    took = format_milliseconds(profile.unprofiled_step_seconds or profile.step_seconds)
    step = Fact("a step" if profile.steps else "all", took, "ms", [f"with{'out' if is_timed else ''} the profiler"])
    is_wrong = profile.mamfu is not None and profile.mamfu > MAX_SHARE_OF_CEILING
    figure = (UNKNOWN_INTERVAL, "", [WRONG_CEILING_TEXT]) if is_wrong else (f"{100 * (profile.mamfu or 0):.1f}", "%")
    share = [Fact("MAMFU of a step", *figure)] if profile.mamfu else []
    costs = [row for row in profile.classes if row.name in (IDLE_LABEL, COMMUNICATION)]
    return [step, *share, *(Fact(row.name, f"{100 * row.visible / whole:.1f}", "%") for row in costs)]


def make_run_log_content(log: RunLog) -> LogContent:
    header = log.header
    document = (
        make_counters_document(log)
        if log.counter_records
        else get_kind(log.plan).make_document(log, ReportOptions(max_rows=_MAX_TABLE_ROWS))
    )
    dtypes = ", ".join(dict.fromkeys(str(getattr(each, "dtype", "")) for each in log.plan.problems if each))
    verdict = next(yield_verdict_lines(log.measurements, log.tier == "interrupted")) if log.plan.kind == VERIFY else ""
    left_noun = "ceiling" if get_kind(log.plan).has_ceilings else "measurement"
    return LogContent(
        log.path.name,
        f"{header['device']['name']}: {make_run_title(log.plan)}" + (f" ({dtypes})" if dtypes else ""),
        [
            describe_machine(header),
            f"{format_start_time(header)}; {describe_end(log.summary, left_noun=left_noun)}",
            *(["the last line of the log is incomplete and ignored"] if log.is_truncated else []),
        ],
        document,
        [] if log.counter_records else list(_make_pictures(log)),
        [] if log.plan.kind in (OVERLAP, VERIFY) else list(_list_headline_figures(log)),
        make_conditions_blocks(header),
        header["command"],
        log,
        [
            Fact(f"rate of {name} while both run, as a share of its rate alone", range_text, "%")
            for name, range_text in compute_kept_rate_ranges(log.measurements).items()
        ]
        if log.plan.kind == OVERLAP
        else [],
        verdict,
        "good" if verdict.startswith("verify PASSED") else "bad" if verdict.startswith("verify FAILED") else "",
    )


def _make_pictures(log: RunLog) -> Iterator[Picture]:
    """Yield a picture of all regimes of a log, or one for each regime if the horizontal axis is the sequence length."""
    regimes = list(dict.fromkeys(row.regime for row in log.measurements if row.ok and not row.is_reference))
    for regime in regimes if get_operation(log.plan.operation).chart == "lengths" else [None]:
        with suppress(UsageError):  # raised if the log has no figures to draw
            yield make_log_chart(log, regime)


def _list_headline_figures(log: RunLog) -> Iterable[HeadlineFigure]:
    """Return the ceilings that the run confirmed; if there are none, the best row of each problem and regime."""
    ceilings = [*log.matmul_ceilings.values(), *log.other_ceilings.values()][:_MAX_HEADLINE_FIGURES]
    if ceilings and log.plan.kind != "sweep":
        return [_make_ceiling_figure(ceiling, log.header) for ceiling in ceilings]
    shares = ShareCalculator(log.header, log.matmul_ceilings, log.known_ceilings, build_confirmed_roofs(log))
    return [_make_row_figure(row, shares) for row in _find_best_rows(log)]


def _find_best_rows(log: RunLog) -> list[Measurement]:
    """Return the best row of each problem and regime, on normal data if any row has normal data."""
    best_rows: dict[tuple[Any, str], Measurement] = {}
    rows = select_ranked_rows(row for row in log.measurements if row.operation == log.plan.operation)
    for row in [row for row in rows if _has_normal_data(row.problem)] or rows:
        best_rows.setdefault((row.problem, row.regime), row)
    return list(best_rows.values())[:_MAX_HEADLINE_FIGURES]


def _has_normal_data(problem: Any) -> bool:
    return getattr(problem, "data", NORMAL_DATA) == NORMAL_DATA


def _make_ceiling_figure(ceiling: Ceiling, header: Mapping[str, Any]) -> HeadlineFigure:
    _, factor = choose_unit(ceiling.unit, [ceiling.rate])
    share = divide_by_peak(ceiling.rate, ceiling.problem, header)
    interval = ceiling.interval
    low, high = (interval.low, interval.high) if interval.is_known else (ceiling.rate, ceiling.rate)
    point = RangePoint(ceiling.rate, low, high, f"at {ceiling.shape}")
    # Leave the seed out of the title, so that ceilings of searches with different seeds share a row of the chart.
    is_plain = is_compute_roof(ceiling.problem.operation) and _has_normal_data(ceiling.problem)
    notes = [
        f"95 % repeat interval: {format_interval(ceiling.interval, factor)}",
        f"{format_percent(share)} % of the datasheet" if share else "",
        f"at {ceiling.shape} by {ceiling.kernel}",
        compare_with_known_ceilings(ceiling, header["device"]),
    ]
    title = ceiling.dtype if is_plain else make_ceiling_title(ceiling)
    return HeadlineFigure(f"{ceiling.regime} ceiling, {title}", ceiling.unit, point, notes)


def _make_row_figure(row: Measurement, shares: ShareCalculator) -> HeadlineFigure:
    interval, of_peak, is_median = row.rate_interval, shares.compute_peak_share(row), row.best_by == row.figure
    low, high = (interval.low, interval.high) if is_median and interval.is_known else (row.best_rate, row.best_rate)
    notes = [
        describe_row_interval(row) if is_median else f"by {row.best_by}",
        shares.describe_share(row),
        f"{format_percent(of_peak)} % of the datasheet" if of_peak else "",
        f"at {row.shape} by {row.kernel}",
        *shares.yield_share_remarks(row),
    ]
    point = RangePoint(row.best_rate, low, high, f"at {row.shape} by {row.kernel}")
    title = make_problem_title_in_words(row.regime, row.problem)
    return HeadlineFigure(f"best {title}", row.work.unit, point, notes, _make_share_fact(row, shares, title, notes))


def _make_share_fact(row: Measurement, shares: ShareCalculator, title: str, notes: Sequence[str]) -> Fact | None:
    """Return the share of its ceiling that a row reaches, or None if it has no share or an impossibly high one."""
    name, share = shares.find_limiting_share(row) if get_operation(row.operation).has_shares else ("", 0.0)
    if not 0 < share <= MAX_SHARE_OF_CEILING:
        return None
    rest = [note for note in notes if note and note != shares.describe_share(row)]
    rate = format_rate(row.best_rate, row.work.unit)
    return Fact(f"{name} of the best {row.operation}, {title}", format_percent(share), "%", [rate, *rest])
