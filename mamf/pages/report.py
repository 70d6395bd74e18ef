"""One page for one or more logs: ``mamf report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mamf.choices import DEFAULT_TOLERANCE, OK
from mamf.errors import MamfError, UsageError
from mamf.logs.compare import compare
from mamf.logs.shared_runs import is_shared_folder, read_run
from mamf.node.logs import contributed_baseline, is_node_folder, read_nodes
from mamf.node.report import node_chart, node_document
from mamf.node.verdict import judge
from mamf.pages.sources import Source, read_source, source_of_log, source_of_profile
from mamf.profiling.ranks import rank_log, rank_logs, ranks_document, read_rank_logs
from mamf.report.charts.ranges import RangeChart, RangeRow
from mamf.report.columns import text_table
from mamf.report.comparison import comparison_document
from mamf.report.document import Answer, Block, Lines
from mamf.report.page import Page, Part, Section


def report_of(paths: Sequence[Path]) -> Page:
    """A page for these logs and folders. Raises RunLogError for what cannot be read, UsageError for an empty folder."""
    if len(paths) == 1 and paths[0].is_dir():
        return _of_folder(paths[0])
    sources = [read_source(path) for path in paths if not path.is_dir()]
    pages = [_of_folder(path) for path in paths if path.is_dir()]
    return page_of_source(sources[0]) if not pages and len(sources) == 1 else _of_several(sources, pages)


def page_of_source(source: Source) -> Page:
    facts = [*(each.fact for each in source.figures), *source.facts]
    return Page(source.title, source.lead, facts, sections=source.sections)


def _of_several(sources: Sequence[Source], pages: Sequence[Page]) -> Page:
    """All of them together first, then a section for each."""
    rows = [(source.name, source.title, "; ".join(source.lead)) for source in sources]
    parts: list[Part] = [text_table(("log", "what", "machine and run"), rows)] if rows else []
    if chart := _side_by_side(sources):
        parts.insert(0, chart)
    compared = _compared(sources)
    sections = [
        Section("Side by side", parts),
        Section("Compared", compared),
        *(_joined(f"{source.name}: {source.title}", source.sections) for source in sources),
        *(_joined(page.title, page.sections) for page in pages),
    ]
    answers = [text for block in compared if isinstance(block, Answer) for text in block.texts]
    count = len(sources) + len(pages)
    return Page(
        f"{count} runs side by side",
        answers[1:],
        verdict=answers[0] if answers else "",
        sections=[section for section in sections if section.parts],
    )


def _joined(heading: str, sections: Sequence[Section]) -> Section:
    """What sections hold, in one that opens on a click."""
    return Section(heading, [part for section in sections for part in section.parts], is_open=False)


def _side_by_side(sources: Sequence[Source]) -> RangeChart | None:
    """The figures of all that have some; those of other units than the first are left out."""
    found = [(source, figure) for source in sources for figure in source.figures]
    unit = found[0][1].unit if found else ""
    labels = dict.fromkeys(figure.label for _, figure in found if figure.unit == unit)
    rows = [
        RangeRow(label, source.name, (figure.point,))
        for label in labels
        for source, figure in found
        if figure.label == label
    ]
    has_interval = [point.low < point.high for row in rows for point in row.points]
    intervals = "with their 95 % repeat intervals" if all(has_interval) else "lines: 95 % repeat intervals, if known"
    subtitle = intervals if any(has_interval) else ""
    return RangeChart("The figures of each log", subtitle, unit, tuple(rows)) if rows else None


def _compared(sources: Sequence[Source]) -> Sequence[Block]:
    """The comparison of two logs of one plan, or the reason why they are not compared."""
    logs = [source.log for source in sources if source.log is not None]
    if len(logs) != 2 or len(sources) != 2:
        return []
    try:
        document = comparison_document(compare(logs[:1], logs[1:], False), DEFAULT_TOLERANCE)
    except MamfError as error:
        reason = str(error).partition("; use --")[0]
        for log in logs:  # a page is passed on: it names no folder of this machine
            reason = reason.replace(str(log.path), log.path.name)
        return [Lines([f"not compared: {reason}"])]
    return document.visible_blocks


def _of_folder(path: Path) -> Page:
    if is_shared_folder(path):
        return page_of_source(source_of_log(read_run(path)))
    if is_node_folder(path):
        return _of_node(path)
    if rank_logs(path):
        return _of_ranks(path)
    logs = sorted(path.rglob("*.jsonl"))
    if not logs:
        raise UsageError(f"{path} holds no log: name a folder of run logs, of 'mamf node' or of 'mamf autoprofile'")
    return report_of(logs) if len(logs) > 1 else page_of_source(read_source(logs[0]))


def _of_node(path: Path) -> Page:
    not_together, devices = read_nodes([path])
    verdict = judge(devices, contributed_baseline(devices))
    parts: list[Part] = [node_chart(devices, verdict)] if any(device.figures for device in devices) else []
    names = ", ".join(dict.fromkeys(device.name for device in devices if device.name))
    return Page(
        f"Node of {len(devices)} x {names or 'unknown devices'}",
        verdict=verdict.reason,
        level="good" if verdict.level == OK else "bad",
        sections=[Section("Devices", [*parts, *node_document(devices, verdict, not_together).visible_blocks])],
    )


def _of_ranks(path: Path) -> Page:
    ranks = read_rank_logs(path)
    document = ranks_document(ranks, len(rank_logs(path)))
    answer = next(text for block in document.blocks if isinstance(block, Answer) for text in block.texts)
    sources = (source_of_profile(rank_log(path, rank), *read) for rank, read in ranks.items())
    sections = [_joined(f"{source.name}: {source.title}", source.sections) for source in sources]
    together = Section("", document.visible_blocks[:-1])
    return Page(document.title, verdict=answer, sections=[together, *sections])
