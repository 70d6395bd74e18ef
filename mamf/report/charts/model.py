"""Charts of training steps: milliseconds by phase, and the share of the ceiling. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mamf.measurement import Measurement
from mamf.operations.model.operation import Model
from mamf.operations.model.shapes import PHASES, ModelProblem
from mamf.rate import Rates, find_rate
from mamf.report.charts.chart import (
    Axis,
    Chart,
    Line,
    Panel,
    chosen_regimes,
    failures,
    in_kibi,
    labelled,
    machine,
    point,
)
from mamf.report.charts.stacked import Stack, StackedChart, StackedPanel

#: What a phase holds, in the order that it runs.
_CONTENT: Mapping[str, tuple[str, ...]] = {
    "forward": ("forward",),
    "forward-backward": ("forward", "backward"),
    "step": ("forward", "backward", "optimizer step"),
}
#: Rows of the phases of one step: regime, problem without its phase, kernel and batch.
_Key = tuple[str, ModelProblem, str, int]
_Phases = Mapping[str, Measurement]
_Steps = Mapping[_Key, Mapping[int, _Phases]]
#: Of a bar, in milliseconds.
_Parts = tuple[tuple[str, float], ...]
_DIFFERENCES = "parts above the lowest are differences: of a phase and the one that it holds, each measured separately"


def model_chart(
    rows: Sequence[Measurement], known: Rates, header: Mapping[str, Any], regime: str | None = None
) -> StackedChart:
    """Bars of the phases by context length, a panel a kernel and model; beneath, MAMFU against context length (TFLOPS
    where no ceiling is known). Of one context length bars stand side by side in one panel, each with its MAMFU. Raises
    UsageError where nothing was measured.
    """
    regimes = chosen_regimes(rows, regime)
    steps: dict[_Key, dict[int, dict[str, Measurement]]] = {}
    for row in rows:
        if row.ok and row.regime in regimes:
            steps.setdefault(_key(row), {}).setdefault(row.shape.context, {})[row.problem.phase] = row
    first = next(iter(steps))
    common = set(_words(first)).intersection(*map(_words, steps))
    titles = {key: ", ".join(word for word in _words(key) if word not in common) or first[2] for key in steps}
    lines = _shares(steps, titles, known)
    contexts = {context for found in steps.values() for context in found}
    panels = tuple(
        StackedPanel(titles[key], tuple(Stack(in_kibi(context), stacked(found[context])) for context in sorted(found)))
        for key, found in steps.items()
    )
    if len(contexts) == 1:
        panels = (StackedPanel("", tuple(_bars(steps, titles, lines))),)
    notes = [_DIFFERENCES] if any(len(bar.parts) > 1 for panel in panels for bar in panel.bars) else []
    if faster := [title for key, found in steps.items() for title in _faster(titles[key], found)]:
        notes.append(f"a phase took no longer than the one that it holds: {'; '.join(faster)}")
    title = f"A model's step by phase: {', '.join(word for word in _words(first) if word in common)}"
    notes += failures(rows, dict.fromkeys(row.kernel for row in rows))
    if len(contexts) == 1:
        title += f", context length {in_kibi(*contexts)}"
        return StackedChart(title, machine(header), "milliseconds", "", panels, None, (lines.title, *notes))
    return StackedChart(title, machine(header), "milliseconds", "context length", panels, lines, tuple(notes))


def _bars(steps: _Steps, titles: Mapping[_Key, str], shares: Chart) -> Iterator[Stack]:
    """A bar a step of the one context length, the longest first, with the share of the longest phase."""
    (panel,) = shares.panels
    share_of = {line.name: f"{line.points[0].y:.1f} {panel.unit}" for line in panel.lines}
    bars = []
    for key, found in steps.items():
        (by_phase,) = found.values()
        longest = [phase for phase in PHASES if phase in by_phase][-1]
        bars.append(Stack(f"{titles[key]} {share_of[f'{titles[key]}, {longest}']}", stacked(by_phase)))
    return iter(sorted(bars, key=lambda bar: -bar.height))


def _key(row: Measurement) -> _Key:
    return row.regime, replace(row.problem, phase=PHASES[0]), row.kernel, row.shape.batch


def _words(key: _Key) -> list[str]:
    regime, problem, kernel, batch = key
    words = [word for word in Model().words(problem) if word not in PHASES]
    return [kernel, *words, f"batch {batch}", problem.dtype, regime]


def stacked(by_phase: _Phases) -> _Parts:
    """The phases of a step as parts, in milliseconds: the shortest that was measured whole, of each longer one what it
    takes more. A part that chance makes less than nothing is nothing.
    """
    parts, held, before = [], 0, 0.0
    for phase in (each for each in PHASES if each in by_phase):
        content, milliseconds = _CONTENT[phase], by_phase[phase].seconds * 1e3
        parts.append((" and ".join(content[held:]), max(0.0, milliseconds - before)))
        held, before = len(content), max(before, milliseconds)
    return tuple(parts)


def _faster(title: str, found: Mapping[int, _Phases]) -> Iterator[str]:
    """Where a phase took less than the one that it holds."""
    for context, by_phase in found.items():
        if any(height == 0 for _, height in stacked(by_phase)):
            yield f"{title}, {in_kibi(context)}"


def _shares(steps: _Steps, titles: Mapping[_Key, str], known: Rates) -> Chart:
    """MAMFU of every phase, or TFLOPS where a row has no ceiling to be a share of."""
    keys = dict.fromkeys((problem.dtype, regime) for regime, problem, _, _ in steps)
    ceilings = {key: each for key in keys if (each := find_rate(known, *key))}
    has_all = ceilings.keys() == keys.keys()
    lines = []
    for key, found in steps.items():
        regime, problem, _, _ = key
        scale = 100 / ceilings[problem.dtype, regime].tflops if has_all else 1.0
        for phase in PHASES:
            points = [point(found[x][phase], x, scale) for x in sorted(found) if phase in found[x]]
            if points:
                lines.append(Line(f"{titles[key]}, {phase}", tuple(points)))
    contexts = sorted({context for found in steps.values() for context in found})
    of = "; ".join(
        f"of {each.tflops:.4g} TFLOPS, {each.dtype} {each.regime}: {each.description}" for each in ceilings.values()
    )
    title = f"MAMFU: {of}" if has_all else "TFLOPS: the log names no ceiling, so there is no MAMFU"
    axis = Axis("context length", True, labelled(contexts, in_kibi))
    panel = Panel(title, tuple(lines), unit="% MAMFU" if has_all else "TFLOPS")
    return Chart(title, "", axis, ((panel,),))
