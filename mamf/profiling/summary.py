"""SUMMARY.md of a folder of ``mamf autoprofile``, from its logs alone. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mamf.ceilings.ceiling import Ceiling
from mamf.ceilings.share import Ceilings, mamfu
from mamf.profiling.advice import Group, advice, groups_of
from mamf.profiling.counters.bounds import bound
from mamf.profiling.counters.log import counted_in, step_of
from mamf.profiling.folder import LOGS, SUMMARY, TABLE, Folder
from mamf.profiling.report import class_columns, milliseconds, time_lines
from mamf.profiling.roofs import best_bandwidth, roofs
from mamf.report.columns import text_table
from mamf.report.document import Block, Document, Lines, Table
from mamf.report.formats.markdown import render
from mamf.report.kernels import baseline_of, speed_up
from mamf.report.own_ceilings import share_of
from mamf.report.shares import known_ceiling_lines
from mamf.report.text import interval_cell, machine_line, rate_text, whole
from mamf.text import Markup, markdown_text

_TOP_CLASSES = 6
Cells = Sequence[str | None]


def summary(folder: Folder) -> str:
    """The report as markdown. Every figure has a link to its log."""
    sections = summary_sections(folder).items()
    parts = (f"## {name}\n\n{render(Document(name, blocks))}" for name, blocks in sections if blocks)
    return "\n".join(f"{part.rstrip()}\n" for part in (_head(folder), *parts))


def summary_sections(folder: Folder) -> dict[str, list[Block]]:
    """The blocks of the report by their headings."""
    operation = folder.kernels.header["plan"].get("operation") if folder.kernels else None
    notes = enumerate(advice(folder, groups_of(folder.kernels)), start=1)
    return {
        "What the card can do": _card(folder),
        f"What {operation or 'kernels'} reaches": _kernels(folder),
        "What bounds the best kernels": _bounds(folder),
        "Where a model's step goes": _step(folder),
        "What to try next": [Lines([Markup(f"{number}. {markdown_text(text)}.") for number, text in notes])],
        "How this was made": _made(folder),
    }


def _link(name: str) -> str:
    return f"[{LOGS[name]}]({LOGS[name]})"


def _head(folder: Folder) -> str:
    device = folder.headers[0]["device"]["name"] if folder.headers else folder.step[1].device if folder.step else ""
    unfinished = [end for end in folder.ends.values() if end.status != "complete" and end.name != "counters"]
    missing = [name for name in ("ceilings", "kernels", "step") if getattr(folder, name) is None]
    lines = list(folder.remarks)
    if unfinished or missing:
        gaps = [f"{end.name} {end.status}: {end.reason}" for end in unfinished]
        gaps += [f"{name} not measured" for name in missing if name not in folder.ends]
        lines.insert(0, f"This is not all: {'; '.join(gaps)}. The same command again resumes with what is missing.")
    title = f"# {markdown_text(device or 'A device')}: what it can do, and what is reached"
    return f"{title}\n\n{render(Document(title, [Lines(lines)]))}"


def _card(folder: Folder) -> list[Block]:
    """The machine, and what it can do at most."""
    if not folder.headers:
        return []
    header = folder.headers[0]
    best = best_bandwidth(folder.bandwidth)
    rows = [_ceiling_cells(each, header) for each in _ceilings(folder).values()]
    if best is not None:
        what = f"memory ({best.problem.pattern} of {best.shape})"
        share = _percent(share_of(best.best_rate, best.problem, header))
        rate, interval = rate_text(best.best_rate, "TB/s"), interval_cell(best.rate_interval)
        rows.append((what, rate, interval, share, best.kernel, Markup(_link("bandwidth"))))
    findings = [line for line in header.get("findings", ()) if not line.startswith("ok")]
    return [
        Lines([machine_line(header)]),
        text_table(("what", "at most", "95 % repeat interval", "of the datasheet", "by", "log"), rows),
        Lines(findings or ["mamf doctor found nothing to fix."]),
    ]


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.0%}"


def _ceilings(folder: Folder) -> Ceilings:
    """From the find, or else those that the rows of kernels were measured against."""
    log = folder.ceilings or folder.kernels
    return log.all_ceilings if log else {}


def _ceiling_cells(ceiling: Ceiling, header: Mapping[str, Any]) -> Cells:
    return (
        f"{ceiling.problem.dtype} products, {ceiling.regime}",
        rate_text(ceiling.rate, ceiling.unit),
        interval_cell(ceiling.interval),
        _percent(share_of(ceiling.rate, ceiling.problem, header)),
        f"{ceiling.kernel} at {ceiling.shape}",
        Markup(_link("ceilings")),
    )


def _kernels(folder: Folder) -> list[Block]:
    """The fastest kernel and the one with the least memory for each shape."""
    rows = [_group_cells(group, _ceilings(folder)) for group in groups_of(folder.kernels) if group.rows]
    if not rows:
        return []
    titles = ("shape", "fastest", "reaches", "of the ceiling", "ms", "speed-up", "least memory", "measured")
    links = f"Every kernel: [{TABLE}]({TABLE}); log: {_link('kernels')}."
    pictures = [f"![{name}]({name})" for name in folder.pictures]
    return [text_table(titles, rows), *(Lines([Markup(line)]) for line in (links, *pictures))]


def _group_cells(group: Group, ceilings: Ceilings) -> Cells:
    best, base, lean = group.rows[0], baseline_of(group.rows, None), group.leanest
    share, gain = mamfu(best, ceilings) if best.work.unit == "TFLOPS" else None, speed_up(best, base)
    return (
        group.title,
        best.kernel,
        rate_text(best.best_rate, best.work.unit),
        _percent(share),
        milliseconds(best.seconds),
        None if gain is None or base is None or base is best else f"{gain:.2f}x {base.kernel}",
        None if lean is None else f"{lean.kernel}, {whole((lean.peak_memory_bytes or 0) / 2**20)} MiB",
        str(len(group.rows)),
    )


def _bounds(folder: Folder) -> list[Block]:
    """The roof that the best kernel of each shape runs into."""
    fastest = best_bandwidth(folder.bandwidth)
    bandwidth = None if fastest is None else fastest.best_rate
    lines = [
        f"{group.title}, {row.kernel}: {roofs(row, _ceilings(folder), bandwidth).verdict}."
        for group in groups_of(folder.kernels)
        for row in group.rows[:1]
    ]
    return [Lines(lines), Lines(list(_counters(folder)))] if lines else []


def _counters(folder: Folder) -> Iterator[str]:
    """What bounds the best kernels by their hardware counters, or why there are no counters."""
    end = folder.ends.get("counters")
    if folder.counters is None and end and end.status != "complete":
        yield f"Hardware counters: none, {end.reason}."
    elif folder.counters is not None:
        yield Markup(f"By hardware counters ({_link('counters')}):\n")
        found, rows = counted_in(folder.counters), {step_of(row): row for row in folder.counters.measurements if row.ok}
        for counts in found.counts:
            row = rows.get(step_of(counts))
            by = bound(counts, found.bandwidth, row.seconds if row else None) if counts.ok else None
            what = f"bound by {by.by}: {by.why}" if by else counts.reason or "not counted"
            yield f"{counts.kernel}, {counts.shape}: {what}."


def _step(folder: Folder) -> list[Block]:
    """Where a model's step goes."""
    if folder.step is None:
        return []
    _, profile = folder.step
    classes = [row for row in sorted(profile.classes, key=lambda row: -row.share)[:_TOP_CLASSES] if row.share]
    took = milliseconds(profile.unprofiled_step_seconds or profile.step_seconds)
    return [
        Lines([Markup(f"{took} ms a step of GPT-2 small, forward, backward and AdamW; log: {_link('step')}.")]),
        Lines(known_ceiling_lines(profile.ceilings)),
        Table(class_columns(profile), classes),
        Lines(list(time_lines(profile))),
    ]


def _made(folder: Folder) -> list[Block]:
    rows = [(end.name, end.status, end.reason, end.command) for end in folder.ends.values()]
    how = f"By `mamf autoprofile`; `mamf autoprofile --from DIR` writes {SUMMARY} again from the logs."
    return [text_table(("step", "status", "why", "command"), rows), Lines([Markup(how)])]
