"""SUMMARY.md of a folder of ``mamf autoprofile``: what an engineer would report of it, from its logs alone. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mamf.ceilings.ceiling import Ceiling
from mamf.ceilings.share import Ceilings, mamfu
from mamf.counters.bounds import bound
from mamf.counters.log import counted_in, step_of
from mamf.operations.attention.report import baseline_of, speed_up
from mamf.profiling.advice import advice
from mamf.profiling.folder import LOGS, SUMMARY, TABLE, Folder
from mamf.profiling.groups import groups_of
from mamf.profiling.report import mamfu_cell, milliseconds, time_lines
from mamf.profiling.roofs import best_bandwidth, roofs
from mamf.report.own_ceilings import share_of
from mamf.report.shares import known_ceiling_lines
from mamf.report.text import DASH, interval_cell, machine_line, markdown, prose, significant, whole
from mamf.text import Markup, markdown_text

_TOP_CLASSES = 6


def summary(folder: Folder) -> str:
    """The report as markdown. Every figure is of a log that is linked beside it."""
    parts = [_head(folder), _card(folder), _kernels(folder), _bounds(folder), _step(folder)]
    notes = enumerate(advice(folder, groups_of(folder.kernels)), start=1)
    parts.append(_section("What to try next", _lines(f"{number}. {markdown_text(text)}." for number, text in notes)))
    parts.append(_section("How this was made", _made(folder)))
    return "\n".join(f"{part.rstrip()}\n" for part in parts if part)


def _lines(lines: Iterable[str]) -> str:
    """Lines whose foreign parts are markdown already."""
    return prose(map(Markup, lines), "markdown")


def _section(name: str, body: str) -> str:
    return f"## {name}\n\n{body}"


def _link(name: str) -> str:
    return f"[{LOGS[name]}]({LOGS[name]})"


def _head(folder: Folder) -> str:
    device = folder.headers[0]["device"]["name"] if folder.headers else folder.step[1].device if folder.step else ""
    lines: list[str] = [Markup(f"# {markdown_text(device or 'A device')}: what it can do, and what is reached")]
    unfinished = [end for end in folder.ends.values() if end.status != "complete" and end.name != "counters"]
    missing = [name for name in ("ceilings", "kernels", "step") if getattr(folder, name) is None]
    if unfinished or missing:
        told = [f"{end.name} {end.status}: {end.reason}" for end in unfinished]
        told += [f"{name} not measured" for name in missing if name not in folder.ends]
        lines.append(f"This is not all: {'; '.join(told)}. The same command again goes on with what is missing.")
    return prose([*lines, *folder.remarks], "markdown", "\n")


def _card(folder: Folder) -> str:
    """The machine, and what it can do at most."""
    if not folder.headers:
        return ""
    header = folder.headers[0]
    rows = [_ceiling_cells(each, header) for each in _ceilings(folder).values()]
    best = best_bandwidth(folder.bandwidth)
    if best is not None:
        share = share_of(best.best_rate, best.problem, folder.headers[0])
        rows.append(
            [
                f"memory ({best.problem.pattern} of {best.shape})",
                f"{significant(best.best_rate)} TB/s",
                interval_cell(best.rate_interval),
                DASH if share is None else f"{share:.0%}",
                best.kernel,
                Markup(_link("bandwidth")),
            ]
        )
    columns = ("what", "at most", "95 % repeat interval", "of the datasheet", "by", "log")
    findings = [line for line in header.get("findings", ()) if not line.startswith("ok")]
    body = prose([machine_line(header)], "markdown", "\n")
    body += (markdown(columns, rows, columns) + "\n") if rows else ""
    body += prose(findings or ["mamf doctor found nothing to mend."], "markdown", "\n")
    return _section("What the card can do", body)


def _ceilings(folder: Folder) -> Ceilings:
    """Of the find, else those that the rows of kernels were measured against."""
    log = folder.ceilings or folder.kernels
    return log.all_ceilings if log else {}


def _ceiling_cells(ceiling: Ceiling, header: Mapping[str, Any]) -> list[str]:
    share = share_of(ceiling.rate, ceiling.problem, header)
    return [
        f"{ceiling.problem.dtype} products, {ceiling.regime}",
        f"{significant(ceiling.rate)} {ceiling.unit}",
        interval_cell(ceiling.interval),
        DASH if share is None else f"{share:.0%}",
        f"{ceiling.kernel} at {ceiling.shape}",
        Markup(_link("ceilings")),
    ]


def _kernels(folder: Folder) -> str:
    """The fastest and the leanest of each shape."""
    log, lines = folder.kernels, []
    for group in groups_of(log):
        if not group.rows:
            continue
        best, base, lean = group.rows[0], baseline_of(group.rows, None), group.leanest
        share, gain = mamfu(best, _ceilings(folder)) if best.work.unit == "TFLOPS" else None, speed_up(best, base)
        lines.append(
            [
                group.title,
                best.kernel,
                f"{significant(best.best_rate)} {best.work.unit}",
                DASH if share is None else f"{share:.0%}",
                milliseconds(best.seconds),
                DASH if gain is None or base is None or base is best else f"{gain:.2f}x {base.kernel}",
                DASH if lean is None else f"{lean.kernel}, {whole((lean.peak_memory_bytes or 0) / 2**20)} MB",
                str(len(group.rows)),
            ]
        )
    if log is None or not lines:
        return ""
    columns = ("shape", "fastest", "reaches", "of the ceiling", "ms", "speed-up", "least memory", "measured")
    body = markdown(columns, lines, columns)
    body += f"\nEvery kernel: [{TABLE}]({TABLE}); log: {_link('kernels')}.\n"
    body += "".join(f"\n![{name}]({name})\n" for name in folder.pictures)
    return _section(f"What {log.header['plan'].get('operation', 'kernels')} reaches", body)


def _bounds(folder: Folder) -> str:
    """Of the best kernel of each shape, which roof it runs into."""
    fastest = best_bandwidth(folder.bandwidth)
    bandwidth = None if fastest is None else fastest.best_rate
    lines = [
        f"- {markdown_text(group.title)}, {markdown_text(row.kernel)}: "
        f"{markdown_text(roofs(row, _ceilings(folder), bandwidth).told)}."
        for group in groups_of(folder.kernels)
        for row in group.rows[:1]
    ]
    if not lines:
        return ""
    return _section("What bounds the best of them", _lines([*lines, *_counters(folder)]))


def _counters(folder: Folder) -> list[str]:
    """What hardware counters say bounds the best kernels, or why there are none."""
    end = folder.ends.get("counters")
    if folder.counters is None:
        return [f"- Hardware counters: none, {markdown_text(end.reason)}."] if end and end.status != "complete" else []
    held, rows = counted_in(folder.counters), {step_of(row): row for row in folder.counters.measurements if row.ok}
    lines = []
    for counts in held.counts:
        row = rows.get(step_of(counts))
        by = bound(counts, held.bandwidth, row.seconds if row else None) if counts.ok else None
        told = f"bound by {by.by}: {by.why}" if by else counts.reason or "not counted"
        what = f"{counts.kernel}, {counts.shape}"
        lines.append(
            f"- By its hardware counters ({_link('counters')}), {markdown_text(what)} is {markdown_text(told)}."
        )
    return lines


def _step(folder: Folder) -> str:
    """Where a model's step goes."""
    if folder.step is None:
        return ""
    _, profile = folder.step
    classes = sorted(profile.classes, key=lambda row: -row.share)[:_TOP_CLASSES]
    rows = [
        [
            row.name,
            f"{row.share:.1%}",
            milliseconds(row.visible / (profile.steps or 1)),
            DASH if row.tflops is None else significant(row.tflops),
            mamfu_cell(row, profile),
        ]
        for row in classes
        if row.share
    ]
    took = milliseconds(profile.unprofiled_step_seconds or profile.step_seconds)
    head = f"{took} ms a step of GPT-2 small, forward, backward and AdamW; log: {_link('step')}."
    lines = [Markup(head), *known_ceiling_lines(profile.ceilings)]
    return _section(
        "Where a model's step goes",
        prose(lines, "markdown", "\n")
        + markdown(("class", "share", "ms", "TFLOPS", "of the ceiling"), rows, ("class",))
        + "\n"
        + prose(time_lines(profile), "markdown", "\n"),
    )


def _made(folder: Folder) -> str:
    columns = ("step", "status", "why", "command")
    lines = [[end.name, end.status, end.reason or DASH, end.command or DASH] for end in folder.ends.values()]
    table = markdown(columns, lines, columns) + "\n" if lines else ""
    return f"{table}By `mamf autoprofile`; `mamf autoprofile --from DIR` writes {SUMMARY} again from the logs.\n"
