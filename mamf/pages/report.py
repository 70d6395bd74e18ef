"""Make the page of ``mamf report`` from run logs, profiles, logs of mamf-finder, and folders of such logs."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mamf.errors import DEFAULT_COMPARISON_TOLERANCE, OK, MamfError, MamfWarning, RunLogError, UsageError
from mamf.logs.compare import compare_logs
from mamf.logs.roofs import build_roofs_from_logs
from mamf.logs.run_log import RunLog
from mamf.logs.shared_runs import is_shared_run_folder
from mamf.node.logs import is_node_folder, make_contributed_baseline, read_node_folders
from mamf.node.report import make_node_chart, make_node_document
from mamf.node.verdict import judge_devices
from mamf.pages.log_content import (
    MAX_HEADLINE_FIGURES,
    MAX_OPEN_PANELS,
    LogContent,
    make_profile_content,
    read_log_content,
)
from mamf.plans import FIND
from mamf.profiling.log import find_rank_logs, get_rank_log_path, make_ranks_document, read_rank_logs
from mamf.report.charts.bars import RangeChart, RangeRow
from mamf.report.comparison import make_comparison_document
from mamf.report.document import Answer, Block, Lines, choose_unit, describe_machine, make_text_table
from mamf.report.imported import make_compared_run, make_side_by_side_document
from mamf.report.page import Fact, Page, PagePart, Section
from mamf.report.roofline import make_roofline_chart, make_roofline_document, select_roofline_points


def _join_sections(heading: str, sections: Sequence[Section]) -> Section:
    """Merge several sections into one section, which is collapsed until the reader clicks on it."""
    return Section(heading, [part for section in sections for part in section.parts], is_open=False)


def make_report_page(paths: Sequence[Path], track_logs: Callable[[Sequence[Path]], Iterable[Path]] = iter) -> Page:
    """Return a page for logs and folders. Raises RunLogError for an unreadable log, UsageError if there is no log.

    ``track_logs``: a function that wraps the iteration over the logs, for example to show a progress bar.
    """
    folders = [path for path in paths if path.is_dir() and not is_shared_run_folder(path)]
    if len(paths) == len(folders) == 1:
        return _make_folder_page(paths[0], track_logs)
    sources = [read_log_content(path) for path in track_logs([path for path in paths if path not in folders])]
    return _combine_into_page(sources, [_make_folder_page(path, track_logs) for path in folders])


def _combine_into_page(sources: Sequence[LogContent], pages: Sequence[Page]) -> Page:
    """Combine the contents of single logs and the pages of folders into one page."""
    if pages or len(sources) > 1:
        return _make_comparison_page(sources, pages)
    source, facts = sources[0], sources[0].headline_facts
    return Page(
        source.title,
        [
            *source.intro_lines,
            *(
                [f"the first {MAX_HEADLINE_FIGURES} of {len(facts)} figures (the tables below have all of them):"]
                if len(facts) > MAX_HEADLINE_FIGURES
                else []
            ),
        ],
        facts[:MAX_HEADLINE_FIGURES],
        *(source.verdict, source.verdict_color),
        sections=source.sections,
    )


def _make_folder_page(path: Path, track_logs: Callable[[Sequence[Path]], Iterable[Path]]) -> Page:
    if is_node_folder(path):
        return _make_node_page(path)
    if find_rank_logs(path):
        return _make_ranks_page(path)
    logs = sorted(path.rglob("*.jsonl"))
    if not logs:
        raise UsageError(f"{path} has no logs: give a folder that has run logs, such as that of 'mamf node'")
    return _combine_into_page(_read_readable_logs(track_logs(logs)), [])


def _read_readable_logs(paths: Iterable[Path]) -> list[LogContent]:
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
    separate_measurement_reason, devices = read_node_folders([path])
    verdict = judge_devices(devices, make_contributed_baseline(devices))
    parts: list[PagePart] = [make_node_chart(devices, verdict)] if any(device.figures for device in devices) else []
    names = dict.fromkeys(device.name for device in devices if device.name)
    return Page(
        f"Node of {len(devices)} x {', '.join(names) or 'unknown devices'}",
        verdict=verdict.reason,
        verdict_color="good" if verdict.level == OK else "bad",
        sections=[
            Section(
                "Devices", [*parts, *make_node_document(devices, verdict, separate_measurement_reason).visible_blocks]
            )
        ],
    )


def _make_ranks_page(path: Path) -> Page:
    ranks = read_rank_logs(path)
    document = make_ranks_document(ranks, len(find_rank_logs(path)))
    sources = [make_profile_content(get_rank_log_path(path, rank), *read) for rank, read in ranks.items()]
    sections = [_join_sections(f"{source.name}: {source.title}", source.sections) for source in sources]
    return Page(
        document.title,
        verdict=next(text for block in document.blocks if isinstance(block, Answer) for text in block.texts),
        sections=[Section("", document.visible_blocks[:-1]), *sections],
    )


def _make_comparison_page(sources: Sequence[LogContent], pages: Sequence[Page]) -> Page:
    """Return a page with the figures of all logs side by side, and a section for each log and each folder."""
    rows = [
        *((each.name, each.title, "; ".join(filter(None, (each.verdict, *each.intro_lines)))) for each in sources),
        *((page.title, page.verdict, "; ".join(page.intro_lines)) for page in pages),
    ]
    compared = _make_log_comparison(sources)
    roofline_parts = _make_roofline_parts(sources)
    sections = [
        *([Section("Roofline", roofline_parts)] if roofline_parts else []),
        Section(
            "Side by side",
            [
                *_make_side_by_side_charts(sources),
                *([make_text_table(("log", "what", "machine and run"), rows)] if rows else []),
            ],
            len(sources) <= MAX_OPEN_PANELS,
        ),
        Section("Compared", compared),
        *(_join_sections(f"{source.name}: {source.title}", source.sections) for source in sources),
        *(_join_sections(page.title, page.sections) for page in pages),
    ]
    answers = [text for block in compared if isinstance(block, Answer) for text in block.texts]
    failures = [f"{source.name}: {source.verdict}" for source in sources if source.verdict_color == "bad"]
    facts, intro_lines = [] if answers else _collect_headline_facts(sources), answers[1:]
    if len(facts) > MAX_HEADLINE_FIGURES:
        facts = _choose_highest_facts(sources)
        intro_lines = [
            "the highest rate or share of each kind, one of each log first"
            + (
                f" ({MAX_HEADLINE_FIGURES} of {len(facts)} figures; the logs below have all of them)"
                if len(facts) > MAX_HEADLINE_FIGURES
                else ""
            )
            + ":"
        ]
    cards = [  # A CPU has no hash; machines of one CPU model can differ in their memory.
        device.get("uuid_hash") or (not device.get("is_accelerator", True) and device.get("memory_bytes"))
        for source in sources
        if isinstance(source.log, RunLog)
        for device in [source.log.header["device"]]
    ]
    devices = list(dict.fromkeys(source.title.partition(": ")[0] for source in sources))
    runs = f"{len(sources) + len(pages)} runs side by side"
    if len(sources) == 2 and not compared:
        runs = " and ".join(source.title.partition(": ")[2] or source.title for source in sources)
    return Page(
        f"{devices[0]}: {runs}" if len(devices) == 1 and not pages else runs,
        [
            *(
                ["the logs are from different cards or machines"]
                if len(set(filter(None, cards))) > 1 and not answers
                else []
            ),
            *intro_lines,
        ],
        facts[:MAX_HEADLINE_FIGURES],
        verdict="; ".join(failures) or (answers[0] if answers else ""),
        verdict_color="bad" if failures else "",
        sections=sections,
    )


def _collect_headline_facts(sources: Sequence[LogContent]) -> list[Fact]:
    """List each log's headline figures. If all logs are from different devices, labels begin with the device.
    Otherwise, if two logs have the same title, labels begin with the name of the log.
    """
    titles = [source.title for source in sources]
    names = [title.partition(": ")[0] for title in titles]
    if len(set(names)) < len(names):
        names = _shorten_log_names(sources) if len(set(titles)) < len(titles) else [""] * len(names)
    return [
        replace(fact, label=f"{name}: {fact.label}") if name else fact
        for source, name in zip(sources, names, strict=True)
        for fact in source.headline_facts
    ]


def _choose_highest_facts(sources: Sequence[LogContent]) -> list[Fact]:
    """Return the highest headline figure of each label, such as "burst ceiling, bfloat16". A note names its device and
    log.

    The first figure of each log comes first, then the second of each, and so on. Within these groups, ceilings come
    first, then other rates, the most frequent label first. Headline figures that are not rates come last.
    """
    figures = [(figure, source) for source in sources for figure in source.headline_figures]
    highest_by_label: dict[str, tuple[str, Fact]] = {}
    for figure, source in sorted(figures, key=lambda each: -each[0].point.value):
        notes = [*figure.headline_fact.notes, f"{source.title.partition(': ')[0]}, {source.name}"]
        highest_by_label.setdefault(figure.label, (source.name, replace(figure.headline_fact, notes=notes)))
    counts = Counter(figure.label for figure, _ in figures)
    labels = sorted(highest_by_label, key=lambda label: ("ceiling, " not in label, -counts[label]))
    ranked = [
        *(highest_by_label[label] for label in labels),
        *(
            (source.name, replace(fact, notes=[*fact.notes, source.name]))
            for source in sources
            for fact in source.facts
        ),
    ]
    places_by_log: dict[str, Iterator[int]] = defaultdict(itertools.count)
    return [fact for _, fact in sorted(ranked, key=lambda each: next(places_by_log[each[0]]))]


def _shorten_log_names(sources: Sequence[LogContent]) -> list[str]:
    """Return the file names of the logs without the leading words that they all share."""
    names = [Path(source.name).stem.split("-") for source in sources]
    while len(names) > 1 and len({name[0] for name in names}) == 1 and all(len(name) > 1 for name in names):
        names = [name[1:] for name in names]
    return ["-".join(name) for name in names]


def _make_side_by_side_charts(sources: Sequence[LogContent]) -> list[RangeChart]:
    """Draw the headline figures in the most frequent unit. Return an empty list if only one figure has this unit."""
    names = zip(sources, _shorten_log_names(sources), strict=True)
    figures = [(name, source.name, figure) for source, name in names for figure in source.headline_figures]
    units = [figure.unit for _, _, figure in figures]
    unit = max(units, key=units.count, default="")
    if units.count(unit) < 2:
        return []
    shown_unit, factor = choose_unit(unit, [figure.point.value for *_, figure in figures if figure.unit == unit])
    rows = [
        RangeRow(
            figure.label,
            name,
            (replace(point, value=factor * point.value, low=factor * point.low, high=factor * point.high),),
            style_name=log,
        )
        for name, log, figure in figures
        if figure.unit == unit
        for point in [figure.point]
    ]
    has_interval = [row.points[0].low < row.points[0].high for row in rows]
    intervals = "with their 95 % repeat intervals" if all(has_interval) else "lines: 95 % repeat intervals, if known"
    return [
        RangeChart(
            f"The figures of each log in {shown_unit}", intervals if any(has_interval) else "", shown_unit, tuple(rows)
        )
    ]


def _make_roofline_parts(sources: Sequence[LogContent]) -> list[PagePart]:
    """Draw the roofline of the logs, with the rows of the other logs, if the logs have the ceilings of compute and of
    memory bandwidth of one card. Otherwise return an empty list.
    """
    logs = [source.log for source in sources if isinstance(source.log, RunLog) and not source.log.part_logs]
    ceiling_logs = [log for log in logs if log.plan.kind == FIND]
    if not any(log.matmul_ceilings for log in ceiling_logs) or not any(log.other_ceilings for log in ceiling_logs):
        return []
    try:
        roofs = build_roofs_from_logs(ceiling_logs)
    except MamfError:  # The logs are from several cards, or a ceiling is missing.
        return []
    points = [
        point
        for log in logs
        if log.plan.kind != FIND
        and (log.header["device"]["name"], log.header["device"]["uuid_hash"]) == (roofs.device, roofs.uuid_hash)
        for point in select_roofline_points(log.measurements, roofs, log.matmul_ceilings)
    ]
    return [
        make_roofline_chart(roofs, points, ceiling_logs[0].header),
        *make_roofline_document(
            roofs, points, [describe_machine(ceiling_logs[0].header)], MAX_OPEN_PANELS
        ).visible_blocks,
    ]


def _make_log_comparison(sources: Sequence[LogContent]) -> Sequence[Block]:
    """Return the comparison of two logs of one operation, or a line that says why they cannot be compared."""
    # Readers share pages, so a page must not show folders of this machine.
    logs = [replace(each.log, path=Path(each.name)) for each in sources if isinstance(each.log, RunLog)]
    if len(sources) == 2 and len(logs) < 2:
        return _make_finder_comparison(sources)
    if len(sources) != 2 or logs[0].plan.operation != logs[1].plan.operation:
        return []
    try:
        document = make_comparison_document(compare_logs(logs[:1], logs[1:], False), DEFAULT_COMPARISON_TOLERANCE)
    except MamfError as error:
        return [
            Lines([f"these logs cannot be compared: {str(error).partition('; add --anyway')[0].partition('; --')[0]}"])
        ]
    return document.visible_blocks


def _make_finder_comparison(sources: Sequence[LogContent]) -> Sequence[Block]:
    """Compare two logs, of which at least one is from mamf-finder. Return an empty list if they share no shape."""
    with suppress(UsageError):  # raised if the logs have no shape in common
        shown = [make_compared_run(source.name, source.log) for source in sources if source.log]
        if len(shown) == 2:
            return make_side_by_side_document(*shown).visible_blocks
    return []
