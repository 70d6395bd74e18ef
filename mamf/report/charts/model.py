"""Charts of training steps: milliseconds by phase, and the share of the ceiling. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mamf.ceilings.share import KnownCeilings
from mamf.measurement import Measurement
from mamf.operations.model.operation import Model
from mamf.operations.model.shapes import PHASES, ModelProblem
from mamf.report.charts.bars import Stack, StackedChart, StackedPanel
from mamf.report.charts.lines import in_kibi
from mamf.report.charts.measured import chosen_regimes, failures, machine

#: What a phase holds, in the order that it runs.
_CONTENT: Mapping[str, tuple[str, ...]] = {
    "forward": ("forward",),
    "forward-backward": ("forward", "backward"),
    "step": ("forward", "backward", "optimizer step"),
}
#: Rows of the phases of one step: regime, problem without its phase, kernel and batch.
_Key = tuple[str, ModelProblem, str, int]
_Phases = Mapping[str, Measurement]
_DIFFERENCES = "parts above the lowest are differences: of a phase and the one that it holds, each measured separately"


def model_chart(
    rows: Sequence[Measurement], known: KnownCeilings, header: Mapping[str, Any], regime: str | None = None
) -> StackedChart:
    """Bars of the phases by context length, a panel a kernel and model; each bar with the MAMFU of its longest phase
    (TFLOPS where no ceiling is known). Of one context length bars stand side by side in one panel. Raises UsageError
    where nothing was measured.
    """
    regimes = chosen_regimes(rows, regime)
    steps: dict[_Key, dict[int, dict[str, Measurement]]] = {}
    for row in rows:
        if row.ok and row.regime in regimes:
            steps.setdefault(_key(row), {}).setdefault(row.shape.context, {})[row.problem.phase] = row
    first = next(iter(steps))
    common = set(_words(first)).intersection(*map(_words, steps))
    titles = {key: ", ".join(word for word in _words(key) if word not in common) or first[2] for key in steps}
    contexts = {context for found in steps.values() for context in found}
    title = f"A model's step by phase: {', '.join(word for word in _words(first) if word in common)}"
    if len(contexts) == 1:
        title += f", context length {in_kibi(*contexts)}"
        bars = [_bar(titles[key], by_phase, known) for key, found in steps.items() for by_phase in found.values()]
        panels: tuple[StackedPanel, ...] = (StackedPanel("", tuple(sorted(bars, key=lambda bar: -bar.height))),)
    else:
        panels = tuple(
            StackedPanel(titles[key], tuple(_bar(in_kibi(each), found[each], known) for each in sorted(found)))
            for key, found in steps.items()
        )
    notes = list(_share_notes(steps, known))
    notes += [_DIFFERENCES] if any(len(bar.parts) > 1 for panel in panels for bar in panel.bars) else []
    if faster := [title for key, found in steps.items() for title in _faster(titles[key], found)]:
        notes.append(f"a phase took no longer than the one that it holds: {'; '.join(faster)}")
    notes += failures(rows, dict.fromkeys(row.kernel for row in rows))
    below = "" if len(contexts) == 1 else "context length"
    return StackedChart(title, machine(header), "milliseconds", below, panels, notes=tuple(notes))


def _key(row: Measurement) -> _Key:
    return row.regime, replace(row.problem, phase=PHASES[0]), row.kernel, row.shape.batch


def _words(key: _Key) -> list[str]:
    regime, problem, kernel, batch = key
    words = [word for word in Model().words(problem) if word not in PHASES]
    return [kernel, *words, f"batch {batch}", problem.dtype, regime]


def _bar(label: str, by_phase: _Phases, known: KnownCeilings) -> Stack:
    """A step with the share of its longest phase."""
    longest = by_phase[[phase for phase in PHASES if phase in by_phase][-1]]
    ceiling = known.get((longest.problem.dtype, longest.regime))
    rate = longest.comparable_rate
    share = f"{100 * rate / ceiling.tflops:.1f} % MAMFU" if ceiling else f"{rate:.4g} TFLOPS"
    return Stack(f"{label} {share}", stacked(by_phase))


def stacked(by_phase: _Phases) -> tuple[tuple[str, float], ...]:
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


def _share_notes(steps: Mapping[_Key, Any], known: KnownCeilings) -> Iterator[str]:
    """What the shares are of."""
    for key in dict.fromkeys((problem.dtype, regime) for regime, problem, _, _ in steps):
        if key in known:
            each = known[key]
            yield f"MAMFU: of {each.tflops:.4g} TFLOPS, {each.dtype} {each.regime}: {each.told}"
        else:
            yield f"TFLOPS of {', '.join(key)}: the log names no ceiling, so there is no MAMFU"
