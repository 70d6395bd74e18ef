"""Rules about the rows together: they are those of the plan, all of them, each once, with all of their samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from mamf.ceilings.ceiling import CHOOSE, CONFIRM
from mamf.ceilings.search_plan import SearchPlan
from mamf.contribution.evidence import Evidence, Finding
from mamf.contribution.row_rules import good_rows
from mamf.logs.recording import describe_shift
from mamf.measurement import Measurement, group_pairs
from mamf.plans import GUARD, OVERLAP, SWEEP, StepKey
from mamf.regime_names import BURST, SUSTAINED
from mamf.timers import find_timer, is_credible

# A visit of sustained takes 2 s and more, in a quick search half a second and more.
_SHORTEST_SUSTAINED_SECONDS = 0.45
# Its windows hold few of the shortest launches, and mostly flushes: 0.16 s of 16 us each on an H200.
_SHORTEST_OVERLAP_SECONDS = 0.02
#: Fewer samples may agree by chance: they are written in whole nanoseconds.
DISTINCTIVE_SAMPLES = 5


def samples_whole(evidence: Evidence) -> Iterator[Finding]:
    """No sample was left out, moved aside or used twice."""
    seen: dict[tuple[float, ...], int] = {}
    for line, _, row in evidence.rows:
        if not row.ok:
            if row.samples and row.status != "implausible":
                yield Finding("lost-samples", f"{row.shape}: {row.status}, but its samples are there", line)
            continue
        aside = row.implausible_samples
        if row.regime == BURST and row.launches != len(row.samples) + len(aside):
            message = f"{row.shape}: {row.launches} launches, {len(row.samples) + len(aside)} samples"
            yield Finding("lost-samples", message, line)
        if aside and (max(aside) >= min(row.samples) or len(aside) > len(row.samples)):
            yield Finding("lost-samples", f"{row.shape}: its implausible samples are plausible", line)
        if _is_too_short(evidence, row):
            yield Finding("lost-samples", f"{row.shape}: too short to have been sustained", line)
        if len(row.samples) < DISTINCTIVE_SAMPLES:
            continue
        if (before := seen.setdefault(row.samples, line)) != line:
            yield Finding("lost-samples", f"{row.shape}: has the samples of line {before}", line)
        if len(set(row.samples)) == 1:
            yield Finding("lost-samples", f"{row.shape}: its {len(row.samples)} samples are all equal", line)


def _is_too_short(evidence: Evidence, row: Measurement) -> bool:
    """Whether a visit is shorter than any that the end of a run did not cut short."""
    if row.regime != SUSTAINED or row.summary is None or evidence.log.tier != "complete":
        return False
    shortest = _SHORTEST_OVERLAP_SECONDS if evidence.plan.kind == OVERLAP else _SHORTEST_SUSTAINED_SECONDS
    return row.launches * row.summary.mean < shortest


def rows_of_plan(evidence: Evidence) -> Iterator[Finding]:
    """Rows are steps of the plan, by its kernels, of its problem; a step that was measured is not measured again."""
    if not any(evidence.counts(row) for _, row in good_rows(evidence)):
        yield Finding("missing-row", "nothing was measured")
    elif evidence.plan.is_search and not evidence.log.all_ceilings:
        yield Finding(
            "missing-row",
            "no ceiling was confirmed, and a find is known by nothing else: resume it with 'mamf find --resume LOG'",
        )
    yield from _rows_of_searches(evidence)
    yield from _rows_of_devices(evidence)
    if not evidence.is_known:
        yield Finding(
            "unknown-operation",
            f"{evidence.plan.operation} is not installed here: whether rows are of the plan is not known",
            1,
        )
    elif not evidence.plan.is_search:
        yield from _rows_of_steps(evidence, evidence.plan.steps())


def _rows_of_steps(evidence: Evidence, steps: list[StepKey]) -> Iterator[Finding]:
    planned, measured = set(steps), Counter[StepKey]()
    for line, _, row in evidence.rows:
        if row.phase:
            continue
        step = _step(evidence, row)
        if not _is_own(evidence, row) or (not row.is_reference and step not in planned):
            yield Finding("foreign-row", f"{row.shape} by {row.kernel} in {row.regime} is not of this run's plan", line)
        if row.ok and not row.is_reference:
            measured[step] += 1
            if measured[step] > 1:
                yield Finding("duplicate-row", f"{row.shape} by {row.kernel} was measured already", line)
    names = {row.kernel.partition("[")[0] for _, _, row in evidence.rows if not (row.phase or row.is_reference)}
    if len(names) > len(evidence.plan.kernels):  # of kernels that the plan names by path
        yield Finding("foreign-row", f"rows of {len(names)} kernels, in a run of {len(evidence.plan.kernels)}")
    held = {_step(evidence, row) for row in evidence.log.measurements if not row.is_reference}
    lost = [step for step in steps if step not in held]
    if evidence.log.tier == "complete" and lost:
        first = " ".join(map(str, lost[0][-2:]))
        yield Finding("missing-row", f"a complete run lacks {len(lost)} of its {len(steps)} steps, the first {first}")
    reference = _reference(evidence)
    if reference is not None and not any(row.is_reference for row in evidence.log.measurements):
        yield Finding("missing-row", f"no visit of the reference {reference} is there")


def _rows_of_devices(evidence: Evidence) -> Iterator[Finding]:
    """Each row of a run that several devices shared is of one of them; a search before it is of the first."""
    shared: set[int | None] = {device.index for device in evidence.log.devices}
    for line, _, row in evidence.rows:
        if not row.phase and row.device not in (shared or {None}):
            device = "no device" if row.device is None else f"device {row.device}"
            yield Finding("foreign-row", f"{row.shape} is of {device}, of which the header says nothing", line)


def _reference(evidence: Evidence) -> Any:
    """The shape that a sweep measures again and again, or None."""
    return evidence.plan.options.reference if evidence.plan.kind == SWEEP else None


def _step(evidence: Evidence, row: Measurement) -> StepKey:
    plan = evidence.plan
    return plan.step(row.regime, row.problem, row.shape, _planned_kernel(plan.kernels, row.kernel))


def _planned_kernel(planned: Collection[str], name: str) -> str:
    """The plan's name of a row's kernel: the library of an algorithm, the path of a kernel not installed."""
    family = name.partition("[")[0]
    if name in planned or family in planned:
        return name if name in planned else family
    tried = [each for each in planned if ":" in each]
    return tried[0] if len(tried) == 1 else name


def _is_own(evidence: Evidence, row: Measurement) -> bool:
    """Whether a row is a step, or a visit of the sweep's reference, of the ceiling's product, or of the common row."""
    known = evidence.log.all_ceilings.values()
    return (
        not row.is_reference
        or (row.problem, row.shape) == (evidence.plan.problem, _reference(evidence))
        or any((row.shape, row.kernel) == (each.shape, each.kernel) for each in known)
        or _is_common(evidence, row)
    )


def _is_common(evidence: Evidence, row: Measurement) -> bool:
    """Whether a visit is of the common row, by which devices that share a run are compared."""
    plan = evidence.plan
    of_plan = any(row.problem == problem for problem in plan.problems) and row.device is not None
    return of_plan and (row.problem, row.shape) == plan.common(row.problem.dtype)


def _rows_of_searches(evidence: Evidence) -> Iterator[Finding]:
    """Every row of a find, and of attention what has a phase."""
    if evidence.plan.confirms or evidence.plan.kind == GUARD:
        yield from _rows_of_rounds(evidence)
    searched = [found for found in evidence.rows if evidence.plan.is_search or _is_searched(evidence, found[2])]
    problems = [plan.problem for plan in evidence.plan.searches]
    for line, _, row in searched:
        if row.is_reference or row.problem not in problems:
            yield Finding("foreign-row", f"{row.shape} by {row.kernel} is not of this run's plan", line)
    for plan in evidence.plan.searches:
        yield from _rows_of_search(plan, [found for found in searched if found[2].problem == plan.problem])


def _is_searched(evidence: Evidence, row: Measurement) -> bool:
    """Whether a row is of a search beside what the run is for."""
    return bool(row.phase) and evidence.plan.kind != GUARD and not (evidence.plan.confirms and evidence.counts(row))


def _rows_of_rounds(evidence: Evidence) -> Iterator[Finding]:
    """Rows that choose and confirm: of steps that were measured before, round after round."""
    tried: set[tuple[Any, ...]] = set()
    rounds: dict[tuple[str, str, Any], set[int]] = {}
    for line, _, row in evidence.rows:
        what = (row.problem, row.shape, row.kernel)
        if not evidence.counts(row):
            continue
        if not row.phase:
            tried.add(what)
            continue
        rounds.setdefault((row.regime, row.phase, row.problem), set()).add(row.round)
        if row.phase not in (CHOOSE, CONFIRM) or row.regime not in evidence.plan.regimes or what not in tried:
            yield Finding("foreign-row", f"{row.shape} by {row.kernel} in {row.regime} was never tried", line)
    # A guard takes a row into its rounds whenever there is a doubt.
    for (regime, _, _), numbers in () if evidence.plan.kind == GUARD else rounds.items():
        yield from _missing_rounds(regime, numbers)


def _missing_rounds(regime: str, numbers: Collection[int]) -> Iterator[Finding]:
    if set(numbers) != set(range(1, len(numbers) + 1)):
        yield Finding("missing-row", f"rounds of {regime} are missing: {sorted(numbers)} are there")


def _rows_of_search(plan: SearchPlan, found: Iterable[tuple[int, dict[str, Any], Measurement]]) -> Iterator[Finding]:
    on_grid = {axis: set(getattr(plan.grid, axis)) for axis in "mnk"}
    tried: set[tuple[int, int, int]] = set()
    rounds: dict[tuple[str, str], set[int]] = {}
    for line, record, row in found:
        m, n, k = (record["shape"][axis] for axis in "mnk")
        if _planned_kernel(plan.kernels, row.kernel) not in plan.kernels:
            yield Finding("foreign-row", f"{row.shape} by {row.kernel} is not of this run's plan", line)
        is_of_grid = row.shape in plan.priors or all(record["shape"][axis] in on_grid[axis] for axis in "mnk")
        if row.phase == "scout" and not is_of_grid:
            yield Finding("foreign-row", f"the scout {row.shape} is not of the grid", line)
        if row.phase in (CHOOSE, CONFIRM):
            rounds.setdefault((row.regime, row.phase), set()).add(row.round)
            # A search visits the other orientation of its leaders too.
            if row.regime == BURST and not tried & {(m, n, k), (n, m, k)}:
                yield Finding("foreign-row", f"{row.shape} is confirmed, but was never tried", line)
        tried.add((m, n, k))
    for (regime, _), numbers in rounds.items():
        yield from _missing_rounds(regime, numbers)


def timer_is_credible(evidence: Evidence) -> Iterator[Finding]:
    """The overhead subtracted lies within the bounds of its backend."""
    backend = evidence.header["device"]["backend"]
    timer = find_timer(backend)
    subtracted = ((row.timer_overhead, line) for line, _, row in evidence.rows)
    refused = group_pairs(each for each in subtracted if each[0] and not is_credible(backend, each[0]))
    for overhead, lines in sorted(refused.items()):
        bounds = f"{timer.lowest * 1e6:.1f} to {timer.highest * 1e6:.1f}" if timer else "0 to 20"
        yield Finding(
            "timer",
            f"{overhead * 1e6:.1f} us subtracted from {len(lines)} rows, but the timer of {backend} adds {bounds} us",
            lines[0],
        )


def timer_stayed(evidence: Evidence) -> Iterator[Finding]:
    """The overhead after the run is the one subtracted in it (warning)."""
    summary = evidence.log.summary
    if summary and (shift := describe_shift(summary, evidence.log.every_row)):
        yield Finding("timer", shift, is_warning=True)
