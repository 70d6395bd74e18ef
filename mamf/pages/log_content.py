"""Read a log of any kind into the parts of a page: its headline figures, pictures, tables and conditions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mamf
from mamf.ceilings.ceiling import MAX_SHARE_OF_CEILING, Ceiling, explain_missing_ceiling
from mamf.contribution.known_ceilings import compare_with_known_ceilings
from mamf.errors import UsageError
from mamf.kinds.kind import ReportOptions, build_confirmed_roofs
from mamf.kinds.registry import get_kind, make_log_chart, make_run_title
from mamf.logs.legacy import FinderRun, read_legacy_log_or_none
from mamf.logs.recording import PYTHON_COMMAND
from mamf.logs.run_log import RunLog, parse_record, read_lines, read_run_log
from mamf.logs.shared_runs import read_log_or_shared_run
from mamf.measurement import IDLE_LABEL, Measurement
from mamf.operations.unknown import get_operation, sets_compute_ceiling
from mamf.pages.conditions import format_start_time, make_conditions_blocks, make_name_value_table
from mamf.plans import GUARD, OVERLAP, REPRODUCE, ROOFLINE, VERIFY
from mamf.profiling.classes import COMMUNICATION
from mamf.profiling.counters.report import make_counters_document
from mamf.profiling.log import (
    describe_device,
    describe_largest_classes,
    format_milliseconds,
    make_profile_document,
    read_profile_or_none,
)
from mamf.profiling.profile import Profile
from mamf.report.ceilings import describe_unconfirmed_regimes
from mamf.report.charts.bars import RangePoint
from mamf.report.charts.picture import Picture
from mamf.report.document import (
    UNKNOWN_INTERVAL,
    Document,
    Lines,
    Table,
    choose_unit,
    describe_machine,
    describe_run_end,
    format_four_digits,
    format_interval,
    format_percent,
    format_rate,
    list_warnings,
)
from mamf.report.imported import (
    make_compared_run,
    make_finder_document,
    make_side_by_side_chart,
)
from mamf.report.overlap import format_kept_rate_ranges
from mamf.report.page import CopyableCommand, Fact, PagePart, Section
from mamf.report.rows import describe_cache_doubt, describe_row_interval, make_group_title, select_ranked_rows
from mamf.report.shares import (
    LOW_CEILING_TEXT,
    ShareCalculator,
    divide_by_peak,
    make_problem_title_in_words,
)
from mamf.report.verification import yield_verdict_lines

#: Maximum number of headline figures on a page, and of rows in a table.
MAX_HEADLINE_FIGURES, _MAX_TABLE_ROWS = 6, 500
#: A section with more tables or picture panels than these limits is collapsed until the reader clicks on it.
_MAX_OPEN_TABLES, MAX_OPEN_PANELS = 8, 12
#: Headline figures come from rows whose operands are normally distributed random numbers. Rows that were measured on
#: other data only show how much the rate depends on the data.
NORMAL_DATA = "normal"
#: The option in a logged command that names the log of the run. A path with blanks has quotes.
_OUTPUT_OPTION_PATTERN = re.compile(r" --(?:output|requeue)(?:=| +)(?:'[^']*'|\S+)")


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
    def headline_fact(self) -> Fact:
        if self.share_fact:
            return self.share_fact
        unit, factor = choose_unit(self.unit, [self.point.value])
        return Fact(self.label, format_four_digits(self.point.value * factor), unit, list(filter(None, self.notes)))


@dataclass(frozen=True)
class LogContent:
    """The content of a page for one log.

    - ``name``: identifies the log on the page.
    - ``document``: the report of the log.
    - ``headline_figures``: the headline figures that are rates.
    - ``facts``: other headline figures, such as the duration of a training step in a profile.
    - ``verdict``, ``verdict_color``: the verdict of a verification, and its color on the page.
    - ``condition_parts``: blocks about the device, the software and the settings.
    - ``log``: the log of a run of mamf or mamf-finder, None for a profile.
    - ``mamf_version``: the version of mamf that ran ``command``; empty for a log of mamf-finder.
    """

    name: str
    title: str
    intro_lines: Sequence[str]
    document: Document
    pictures: Sequence[Picture] = ()
    headline_figures: Sequence[HeadlineFigure] = ()
    condition_parts: Sequence[PagePart] = ()
    command: str = ""
    log: RunLog | FinderRun | None = None
    mamf_version: str = ""
    facts: Sequence[Fact] = ()
    verdict: str = ""
    verdict_color: str = ""

    @property
    def headline_facts(self) -> Sequence[Fact]:
        return [*(figure.headline_fact for figure in self.headline_figures), *self.facts]

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
            Section("Pictures", self.pictures, is_open=len(panels) <= MAX_OPEN_PANELS),
            Section("Figures", figures, is_open=is_short),
            Section("Conditions", self.condition_parts, is_open=is_short and len(panels) <= MAX_OPEN_PANELS),
            Section("Reproduce it", _make_command_parts(self.command, self.mamf_version)),
        ]


def read_log_content(path: Path) -> LogContent:
    """Read a log of any kind, or a folder that a run on several devices wrote. Raises RunLogError for other files."""
    if path.is_dir():
        return make_run_log_content(read_log_or_shared_run(path))
    if (imported := read_legacy_log_or_none(path)) is not None:
        return make_finder_content(path.name, imported)
    if (profiled := read_profile_or_none(path)) is not None:
        return make_profile_content(path, *profiled)
    return make_run_log_content(read_run_log(path))


def _make_command_parts(command: str, mamf_version: str) -> list[PagePart]:
    """Show the command that repeats a run, without the option that names its log. If another version of mamf ran it,
    name this version. Return an empty list if the run was started from Python.
    """
    if command in ("", PYTHON_COMMAND):
        return []
    command = _OUTPUT_OPTION_PATTERN.sub("", command)
    return [
        CopyableCommand(command),
        *(
            [Lines([f"mamf {mamf_version} ran this command: in other versions, options can have other names."])]
            if mamf_version not in ("", mamf.__version__)
            else []
        ),
        *(
            [Lines(["The log leaves out the author's folders: replace each <path> with a path on your machine."])]
            if "<path>" in command
            else []
        ),
    ]


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
        [f"started {run.started[:16].replace('T', ' ')}" if run.started else "the log does not say when it started"],
        make_finder_document(run, _MAX_TABLE_ROWS),
        [make_side_by_side_chart([make_compared_run(name, run)])] if any(row.shape for row in run.rows) else [],
        figures,
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
        mamf_version=header["tool"]["version"],
        facts=_list_profile_facts(profile, document.title),
    )


def _list_profile_facts(profile: Profile, title: str) -> list[Fact]:
    is_timed, whole = profile.unprofiled_step_seconds is not None, profile.whole_seconds
    step = Fact(
        "a step" if profile.steps else "all",
        format_milliseconds(profile.unprofiled_step_seconds or profile.step_seconds),
        "ms",
        [title, f"measured with{'out' if is_timed else ''} the profiler"],
    )
    is_ceiling_too_low = profile.mamfu is not None and profile.mamfu > MAX_SHARE_OF_CEILING
    ceilings = [
        f"share of {format_rate(each.tflops, 'TFLOPS')}, {each.dtype} {each.regime}" for each in profile.ceilings
    ]
    share = (
        Fact("MAMFU of a step", UNKNOWN_INTERVAL, "", [LOW_CEILING_TEXT])
        if is_ceiling_too_low
        else Fact("MAMFU of a step", f"{100 * (profile.mamfu or 0):.1f}", "%", ceilings)
    )
    costs = [row for row in profile.classes if row.name in (IDLE_LABEL, COMMUNICATION)]
    return [
        step,
        *([share] if profile.mamfu else []),
        *(
            Fact(
                row.name,
                f"{100 * row.visible / whole:.1f}",
                "%",
                ["at most"] if profile.is_uneven and row.name == IDLE_LABEL else [],
            )
            for row in costs
        ),
    ]


def make_run_log_content(log: RunLog) -> LogContent:
    header = log.header
    document = (
        make_counters_document(log)
        if log.counter_records
        else get_kind(log.plan).make_document(log, ReportOptions(max_rows=_MAX_TABLE_ROWS))
    )
    dtypes = ", ".join(dict.fromkeys(str(getattr(each, "dtype", "")) for each in log.plan.problems if each))
    verdict = next(yield_verdict_lines(log.measurements, log.tier == "interrupted")) if log.plan.kind == VERIFY else ""
    title = (
        f"hardware counters of {log.plan.operation}"
        if log.counter_records
        else make_run_title(log.plan).partition(" ")[2]
    )
    return LogContent(
        log.path.name,
        f"{header['device']['name']}: {title}"
        + (f" ({dtypes})" if dtypes and log.plan.kind not in (ROOFLINE, VERIFY) else ""),
        [
            describe_machine(header),
            f"{format_start_time(header)}; "
            # A verification counts its problems, and not the rows with a rate.
            + describe_run_end(log.summary, log.plan.kind != VERIFY, get_kind(log.plan).left_noun),
            *(["the last line of the log is incomplete and ignored"] if log.is_truncated else []),
            *_list_unconfirmed_ceilings(log),
            *list_warnings(log),
        ],
        document,
        [] if log.counter_records else list(_make_pictures(log)),
        # Guard and reproduce measure a row several times, and the best of these rounds is too high by chance. The rates
        # in a log of counters are also in the log whose fastest kernels it explains.
        []
        if log.counter_records or log.plan.kind in (GUARD, OVERLAP, REPRODUCE, VERIFY)
        else list(_list_headline_figures(log)),
        make_conditions_blocks(header),
        header["command"],
        log,
        header["tool"]["version"],
        [
            Fact(
                f"rate of {name} while both run, as a share of its rate alone",
                range_text,
                "%",
                [] if all(row.interval.is_known for row in log.measurements if row.ok) else ["some intervals unknown"],
            )
            for name, range_text in format_kept_rate_ranges(log.measurements).items()
        ]
        if log.plan.kind == OVERLAP
        else [],
        verdict,
        "good" if verdict.startswith("verify PASSED") else "bad" if verdict.startswith("verify FAILED") else "",
    )


def _list_unconfirmed_ceilings(log: RunLog) -> Sequence[str]:
    """Return a line for each regime whose ceiling a search did not confirm."""
    return (
        list(describe_unconfirmed_regimes(log.measurements, log.ceilings, log.plan.regimes))
        if log.plan.is_search and not log.part_logs and not explain_missing_ceiling(log.measurements)
        else []
    )


def _make_pictures(log: RunLog) -> Iterator[Picture]:
    """Yield a picture of all regimes of a log, or one for each regime if the horizontal axis is the sequence length."""
    regimes = list(dict.fromkeys(row.regime for row in log.measurements if row.ok and not row.is_reference))
    for regime in regimes if get_operation(log.plan.operation).chart_kind == "lengths" else [None]:
        with suppress(UsageError):  # raised if the log has no figures to draw
            yield make_log_chart(log, regime)


def _list_headline_figures(log: RunLog) -> Iterable[HeadlineFigure]:
    """Return the ceilings that the run confirmed; if there are none, the best row of each problem and regime."""
    ceilings = [*log.matmul_ceilings.values(), *log.other_ceilings.values()]
    if ceilings and log.plan.kind != "sweep":
        return [_make_ceiling_figure(ceiling, log.header) for ceiling in ceilings]
    shares = ShareCalculator(log.header, log.matmul_ceilings, log.known_ceilings, build_confirmed_roofs(log))
    return [_make_row_figure(row, shares) for row in _find_best_rows(log)]


def _find_best_rows(log: RunLog) -> list[Measurement]:
    """Return the best row of each problem and regime. If any rows have normal data, ignore all other rows. Ignore rows
    that a search measured again, as tables do, unless there are no other rows.
    """
    best_rows: dict[tuple[Any, str], Measurement] = {}
    operation = log.plan.operation  # Read it once: a log parses its plan again on each access.
    candidates = [row for row in log.measurements if row.operation == operation]
    rows = select_ranked_rows([row for row in candidates if not row.phase] or candidates)
    for row in [row for row in rows if _has_normal_data(row.problem)] or rows:
        best_rows.setdefault((row.problem, row.regime), row)
    return list(best_rows.values())


def _has_normal_data(problem: Any) -> bool:
    return getattr(problem, "data", NORMAL_DATA) == NORMAL_DATA


def _make_ceiling_figure(ceiling: Ceiling, header: Mapping[str, Any]) -> HeadlineFigure:
    _, factor = choose_unit(ceiling.unit, [ceiling.rate])
    share = divide_by_peak(ceiling.rate, ceiling.problem, header)
    interval = ceiling.interval
    low, high = (interval.low, interval.high) if interval.is_known else (ceiling.rate, ceiling.rate)
    # If the title of a matmul ceiling contained the seed, ceilings of searches with different seeds would not share a
    # row of the chart.
    is_plain = sets_compute_ceiling(ceiling.problem.operation) and _has_normal_data(ceiling.problem)
    notes = [
        f"95 % repeat interval: {format_interval(ceiling.interval, factor)}",
        f"{format_percent(share)} % of the datasheet" if share else "",
        f"at {ceiling.shape} by {ceiling.kernel}",
        compare_with_known_ceilings(ceiling, header["device"]),
    ]
    title = (
        f"{ceiling.regime} ceiling, {ceiling.dtype}"
        if is_plain
        else make_problem_title_in_words(f"{ceiling.regime} ceiling", ceiling.problem)
    )
    return HeadlineFigure(title, ceiling.unit, RangePoint(ceiling.rate, low, high, f"at {ceiling.shape}"), notes)


def _make_row_figure(row: Measurement, shares: ShareCalculator) -> HeadlineFigure:
    interval, of_peak, is_median = (
        row.rate_interval,
        shares.compute_share_of_peak(row),
        row.ranking_statistic == row.statistic,
    )
    low, high = (
        (interval.low, interval.high)
        if is_median and interval.is_known and row.repeatability  # otherwise it is not a repeat interval
        else (row.best_rate, row.best_rate)
    )
    notes = [
        describe_row_interval(row) if is_median else f"the {row.ranking_statistic} launch",
        shares.describe_share(row),
        f"{format_percent(of_peak)} % of the {'' if row.work.unit == 'TFLOPS' else 'bandwidth in the '}datasheet"
        if of_peak
        else "",
        f"at {row.shape} by {row.kernel}",
        describe_cache_doubt(row, shares.header),
        *shares.yield_share_remarks(row),
    ]
    title = make_group_title(row, shares.header)
    return HeadlineFigure(
        f"best {row.operation}, {title}{'' if is_median else f', {row.ranking_statistic} launch'}",
        row.work.unit,
        RangePoint(row.best_rate, low, high, f"at {row.shape} by {row.kernel}"),
        notes,
        _make_share_fact(row, shares, title, notes),
    )


def _make_share_fact(row: Measurement, shares: ShareCalculator, title: str, notes: Sequence[str]) -> Fact | None:
    """Return a row's rate as a share of the ceiling. Return None if the share is unknown or impossibly high."""
    name, share = shares.find_limiting_share(row) if get_operation(row.operation).shows_ceiling_shares else ("", 0.0)
    if not 0 < share <= MAX_SHARE_OF_CEILING:
        return None
    rest, ceiling = (
        [each for each in notes if each and each != shares.describe_share(row)],
        shares.find_ceiling_tflops(row),
    )
    used = "share of " if row.work.unit == "TFLOPS" else f"{format_four_digits(share * (ceiling or 0.0))} of "
    return Fact(
        f"{name} of the best {row.operation}, {title}",
        format_percent(share),
        "%",
        [
            ", ".join([format_rate(row.best_rate, row.work.unit), *rest[:1]]),
            *([f"{used}{format_rate(ceiling, 'TFLOPS')}"] if name == "MAMFU" and ceiling else []),
            *rest[1:],
        ],
    )
