"""What a report page can show: a log of any kind, a profile, an imported log, or a folder of runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mamf.ceilings.ceiling import MAX_SHARE, Ceiling
from mamf.contribution.known_ceilings import place_among_known
from mamf.errors import UsageError
from mamf.kinds.kind import View
from mamf.kinds.registry import chart_of, kind_of, run_title
from mamf.logs.legacy import FinderRun, read_legacy_or_none
from mamf.logs.lines import lines_of, parse_record
from mamf.logs.run_log import RunLog, read_run_log
from mamf.measurement import IDLE, Measurement
from mamf.operations.tracing.classes import COMMUNICATION
from mamf.plans import MATMUL
from mamf.profiling.counters.report import counters_document
from mamf.profiling.log import read_profile_or_none
from mamf.profiling.profile import Profile
from mamf.profiling.report import conclusion, device_of, milliseconds, profile_document
from mamf.report.charts.plotting import Picture
from mamf.report.charts.ranges import RangePoint
from mamf.report.columns import text_table
from mamf.report.document import Block, Document, Table
from mamf.report.imported import beside_chart, finder_document, shown_run
from mamf.report.own_ceilings import ceiling_title, described_title, share_of
from mamf.report.page import Command, Fact, Part, Section
from mamf.report.rows import ranked
from mamf.report.shares import WRONG_CEILING, Shares
from mamf.report.text import UNKNOWN, end_line, interval_cell, machine_line, percent, scaled_unit, significant

#: The most figures in large type, and the most rows that a page lists of one table.
_MOST_FACTS, _MOST_ROWS = 6, 500
#: More tables than this open on a click.
_MAX_OPEN_TABLES = 8
#: Operands whose figures count; others show what data cost.
NORMAL = "normal"


@dataclass(frozen=True)
class Figure:
    """A headline figure: what it is of, where it lies, and what is to be said beside it. ``unit``: of ``point``."""

    label: str
    unit: str
    point: RangePoint
    notes: Sequence[str] = ()

    @property
    def fact(self) -> Fact:
        unit, factor = scaled_unit(self.unit, [self.point.value])
        return Fact(self.label, significant(self.point.value * factor), unit, self.notes)


@dataclass(frozen=True)
class Source:
    """``name``: tells it from the others of a page. ``document``: its report. ``log``: None unless it is a run log."""

    name: str
    title: str
    lead: Sequence[str]
    document: Document
    pictures: Sequence[Picture] = ()
    figures: Sequence[Figure] = ()
    conditions: Sequence[Part] = ()
    command: str = ""
    log: RunLog | None = None
    facts: Sequence[Fact] = ()

    @property
    def sections(self) -> list[Section]:
        """Pictures, tables, conditions and the command that makes such a log."""
        figures = [_limited(block) for block in self.document.visible_blocks]
        is_short = sum(isinstance(block, Table) for block in figures) <= _MAX_OPEN_TABLES
        found = [
            Section("Pictures", self.pictures),
            Section("Figures", figures, is_open=is_short),
            Section("Conditions", self.conditions),
            Section("Reproduce it", [Command(self.command)] if self.command else []),
        ]
        return [section for section in found if section.parts]


def read_source(path: Path) -> Source:
    """A file as something to show. Raises RunLogError for what is no log."""
    if (imported := read_legacy_or_none(path)) is not None:
        return source_of_finder(path.name, imported)
    if (profiled := read_profile_or_none(path)) is not None:
        return source_of_profile(path, *profiled)
    return source_of_log(read_run_log(path))


def source_of_finder(name: str, run: FinderRun) -> Source:
    document = finder_document(run, _MOST_ROWS)
    known = {**run.software, **run.device_properties}
    conditions = [text_table(("what", "value"), [(key, str(value)) for key, value in known.items()])]
    figures = [
        Figure(
            f"mamf-finder, best {statistic}",
            "TFLOPS",
            RangePoint(row.tflops[statistic], row.tflops[statistic], row.tflops[statistic]),
            ["as printed: no samples, no checks", f"at {row.shape or 'an unknown shape'}"],
        )
        for statistic, row in run.best.items()
    ]
    return Source(
        name,
        f"{run.device or 'unknown device'}: a log of mamf-finder {run.version or ''}",
        [f"started {run.started}" if run.started else "the log does not say when it started"],
        document,
        [beside_chart([shown_run(name, run)])] if any(row.shape for row in run.rows) else [],
        figures=figures[:_MOST_FACTS],
        conditions=conditions if known else [],
        command=run.command or "",
    )


def source_of_profile(path: Path, script: str, profile: Profile) -> Source:
    """``path``: its log."""
    header = parse_record(next(lines_of(path)))
    document = profile_document(script, profile, _MOST_ROWS)
    return Source(
        path.name,
        f"{document.title} on {device_of(profile)}",
        [conclusion(profile), f"started {header['started'][:16].replace('T', ' ')}"],
        document,
        conditions=conditions_of({"device": {"name": device_of(profile)}, "timer": None, **header}),
        command=header["command"],
        facts=_facts_of_profile(profile),
    )


def _facts_of_profile(profile: Profile) -> list[Fact]:
    is_timed, whole = profile.unprofiled_step_seconds is not None, profile.whole_seconds
    took = milliseconds(profile.unprofiled_step_seconds or profile.step_seconds)
    step = Fact("a step" if profile.steps else "all", took, "ms", [f"with{'out' if is_timed else ''} the profiler"])
    is_wrong = profile.mamfu is not None and profile.mamfu > MAX_SHARE
    figure = (UNKNOWN, "", [WRONG_CEILING]) if is_wrong else (f"{100 * (profile.mamfu or 0):.1f}", "%")
    share = [Fact("MAMFU of a step", *figure)] if profile.mamfu else []
    costs = [row for row in profile.classes if row.name in (IDLE, COMMUNICATION)]
    return [step, *share, *(Fact(row.name, f"{100 * row.visible / whole:.1f}", "%") for row in costs)]


def source_of_log(log: RunLog) -> Source:
    header, kind = log.header, kind_of(log.plan)
    document = counters_document(log) if log.counter_records else kind.document(log, View(top=_MOST_ROWS))
    dtypes = ", ".join(dict.fromkeys(str(getattr(each, "dtype", "")) for each in log.plan.problems if each)) or ""
    what = " ".join(filter(None, [run_title(log.plan), f"({dtypes})" if dtypes else ""]))
    return Source(
        log.path.name,
        f"{header['device']['name']}: {what}",
        [
            machine_line(header),
            f"started {header['started'][:16].replace('T', ' ')}; {end_line(log.summary)}",
            *(["the last line of the log is incomplete and ignored"] if log.is_truncated else []),
        ],
        document,
        [] if log.counter_records else list(_pictures(log)),
        list(_figures(log)),
        conditions_of(header),
        header["command"],
        log,
    )


def _pictures(log: RunLog) -> Iterator[Picture]:
    """All regimes in one picture; attention has one for each."""
    regimes = list(dict.fromkeys(row.regime for row in log.measurements if row.ok and not row.is_reference))
    for regime in regimes if log.plan.operation == "attention" else [None]:
        with suppress(UsageError):  # the log lacks what would be drawn
            yield chart_of(log, regime)


def _figures(log: RunLog) -> Iterable[Figure]:
    """Ceilings if the run sought them; else the best row of each problem and regime."""
    ceilings = [*log.all_ceilings.values(), *log.own_ceilings.values()]
    if ceilings and log.plan.kind != "sweep":
        return [_of_ceiling(ceiling, log.header) for ceiling in ceilings[:_MOST_FACTS]]
    best: dict[tuple[Any, str], Measurement] = {}
    rows = ranked(log.measurements)
    normal = [row for row in rows if getattr(row.problem, "data", NORMAL) == NORMAL]
    for row in normal or rows:
        best.setdefault((row.problem, row.regime), row)
    shares = Shares(log.header, log.all_ceilings, log.known_ceilings)
    return [
        _of_row(row, f"best {described_title(regime, problem)}", shares)
        for (problem, regime), row in list(best.items())[:_MOST_FACTS]
    ]


def _of_ceiling(ceiling: Ceiling, header: Mapping[str, Any]) -> Figure:
    unit, factor = scaled_unit(ceiling.unit, [ceiling.rate])
    share = share_of(ceiling.rate, ceiling.problem, header)
    notes = [
        f"{interval_cell(ceiling.interval, factor)} {unit} (95 % repeat interval)",
        f"{percent(share)} % of the datasheet" if share else "",
        f"at {ceiling.shape} by {ceiling.kernel}",
        place_among_known(ceiling, header["device"]),
    ]
    point = RangePoint(ceiling.rate, ceiling.interval.low, ceiling.interval.high, f"at {ceiling.shape}")
    is_normal = getattr(ceiling.problem, "data", NORMAL) == NORMAL
    # Without the seed: finds with others stand side by side.
    of = ceiling.dtype if ceiling.problem.operation == MATMUL and is_normal else ceiling_title(ceiling)
    return Figure(f"{ceiling.regime} ceiling, {of}", ceiling.unit, point, [note for note in notes if note])


def _of_row(row: Measurement, label: str, shares: Shares) -> Figure:
    interval = row.rate_interval
    unit, factor = scaled_unit(row.work.unit, [row.best_rate])
    of_peak = shares.of_peak(row)
    is_median = row.best_by == row.figure
    notes = [
        f"{interval_cell(interval, factor)} {unit} (95 % repeat interval)" if is_median else f"by {row.best_by}",
        shares.mamfu_text(row),
        f"{percent(of_peak)} % of the datasheet" if of_peak else "",
        f"at {row.shape} by {row.kernel}",
    ]
    low, high = (interval.low, interval.high) if is_median else (row.best_rate, row.best_rate)
    point = RangePoint(row.best_rate, low, high, f"at {row.shape} by {row.kernel}")
    return Figure(label, row.work.unit, point, [note for note in notes if note])


def conditions_of(header: Mapping[str, Any]) -> list[Block]:
    """The device, the software and what the doctor found, problems first."""
    device, environment = header["device"], header["environment"]
    clock, watts = device.get("max_clock_hz"), device.get("power_limit_watts")
    rows = {
        "device": device["name"],
        "highest clock": f"{clock / 1e6:.0f} MHz" if clock else None,
        "power limit": f"{watts:.0f} W" if watts else None,
        "memory": f"{device['memory_bytes'] / 2**30:.0f} GiB" if device.get("memory_bytes") else None,
        "driver": device.get("driver"),
        **{name: str(value) for name, value in device.get("versions", {}).items()},
        **{name: str(value) for name, value in environment.get("packages", {}).items()},
        "python": environment.get("python"),
        "system": environment.get("os"),
        "timer": header["timer"],
        "mamf": header.get("tool", {}).get("version"),
        **{name: str(value) for name, value in environment.get("variables", {}).items()},
    }
    shown = [(name, value) for name, value in rows.items() if value]
    findings = [str(finding).split(maxsplit=1) for finding in header.get("findings", ())]
    findings.sort(key=lambda each: each[0].lower() == "ok")
    checks = [(each[0], each[1] if len(each) > 1 else "") for each in findings if each]
    return [text_table(("what", "value"), shown), text_table(("check", "found"), checks)]


def _limited(block: Block) -> Block:
    """A table with at most so many rows; csv and json have all."""
    if isinstance(block, Table) and (block.top is None or block.top > _MOST_ROWS):
        return replace(block, top=_MOST_ROWS)
    return block
