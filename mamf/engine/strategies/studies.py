"""Chooses the steps of runs that compare kernels with a baseline, measure claims again, verify random problems, or
measure a matmul at the same time as other work.

For matmul and other work, the rate of each is measured twice: alone, and while both run. Each is
launched back to back in its own queue, in blocks of equal duration, with marks between blocks. Only blocks in the
period in which both queues were busy count, so the rate together includes no time in which only one of them ran.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

from mamf.backend import Backend
from mamf.ceilings.ceiling import CONFIRM_PHASE, summarize_conditions
from mamf.dtypes import OPERAND_DTYPES, canonicalize_dtype_name
from mamf.engine.measure import build_row_from_samples, classify_error
from mamf.engine.regimes import Regime, Samples, StoppingRule, Sustained, get_regime_class
from mamf.engine.regimes.base import CheckedKernel, WrongResultError
from mamf.engine.runner import PlanStrategy, Setup, Step, Steps, make_failed_row
from mamf.engine.strategies.rows import RowsStrategy
from mamf.errors import UnavailableError, UnsupportedError, UsageError, get_plugin_errors
from mamf.kernel import AnyKernel, Verdict
from mamf.logs.compared_rows import ComparedRow, combine_visits, group_by_step
from mamf.logs.judging import DEFAULT_TOLERANCE, UNDECIDED, is_in_doubt, judge_claims
from mamf.measurement import Measurement, Status
from mamf.operation import make_operation_plan
from mamf.operations.matmul.operation import problem_for
from mamf.operations.matmul.shapes import MatmulShape
from mamf.operations.overlap import MATMUL_WORK, OTHER_WORK, OverlapProblem, OverlapShape, Pair
from mamf.operations.unknown import get_operation
from mamf.plans import CHECKING, LOADED, VERIFY, VERIFY_BUDGET_SECONDS, Plan, StepKey, VerifyOptions
from mamf.plugins.discovery import OPERATIONS, choose_kernels, find_operation, find_registered, make_operation


class GuardStrategy(RowsStrategy):
    """Visits every row once, then visits rows in doubt again, up to the plan's rounds.

    ``baseline``: the baseline's entries by key. None: measure a new baseline, with every row in all rounds.
    """

    def __init__(
        self, setup: Setup, baseline: Mapping[object, ComparedRow] | None = None, tolerance: float = DEFAULT_TOLERANCE
    ) -> None:
        super().__init__(setup, replayed=[row for row in setup.rows if row.phase])
        self.baseline, self.tolerance = baseline, tolerance
        self._visits = group_by_step(row for row in setup.rows if not row.phase)

    def yield_steps(self) -> Steps:
        left = frozenset(self.setup.remaining_steps)
        for name in self.plan.regimes:
            regime = self.runner.start_regime(self.make_regime(name))
            steps = [step for step in self.plan.steps() if step.regime == name]
            yield from self._visit_steps(regime, [step for step in steps if step in left], "", 1)
            later_regime = regime.make_confirmation_regime(summarize_conditions(self._select_measured(name)), math.inf)
            for number in range(1, self.plan.options.rounds + 1):
                doubtful = [step for step in steps if self._is_in_doubt(step)]
                if not doubtful:
                    break
                due = add_second_step(doubtful, steps)
                random.Random(f"{name} {number}").shuffle(due)
                yield from self._visit_steps(later_regime, due, CONFIRM_PHASE, number)

    def _visit_steps(self, regime: Regime, steps: Sequence[StepKey], phase: str, number: int) -> Steps:
        for step in steps:
            name, problem, shape, kernel = step
            progress = f"round {number} of at most {self.plan.options.rounds}" if phase else ""
            self.setup.on_phase(f"{name} {shape} {kernel} {progress}".rstrip())
            row = yield Step(self.kernels[kernel], problem, shape, regime, self.make_rule(regime), phase, number)
            if row is not None:
                self._visits.setdefault(self._replace_kernel_name(step), []).append(row)

    def _select_measured(self, regime: str) -> list[Measurement]:
        return [row for visits in self._visits.values() for row in visits if row.ok and row.regime == regime]

    def _is_in_doubt(self, step: StepKey) -> bool:
        visits = self._visits.get(self._replace_kernel_name(step))
        if not visits:
            return False
        if self.baseline is None:
            return visits[-1].ok
        before = self.baseline.get(combine_visits(visits).key)
        return before is not None and is_in_doubt(before, visits, self.tolerance)

    def _replace_kernel_name(self, step: StepKey) -> StepKey:
        """Return the step with the kernel's own name, as in rows."""
        regime, problem, shape, kernel = step
        return StepKey(regime, problem, shape, self.kernels[kernel].name)


def add_second_step(due: Sequence[StepKey], steps: Sequence[StepKey]) -> list[StepKey]:
    """Return the due steps, plus another step if only one is due, so that no row is measured twice in succession."""
    others = [step for step in steps if step not in due]
    return [*due, *(others[-1:] if len(due) == 1 else ())]


#: The maximum number of visits to a claim.
_MAX_VISITS = 5


class ReproduceStrategy(RowsStrategy):
    """Measures the claims of a plan again."""

    def yield_steps(self) -> Steps:
        self._seen, self._held = list(self.setup.rows), {(row.step, row.round) for row in self.setup.rows}
        for name in self.plan.regimes:
            yield from self._visit_claims(self.runner.start_regime(self.make_regime(name)))

    def _visit_claims(self, regime: Regime) -> Steps:
        # Claims take turns. Later visits follow a rest if the device would otherwise stay in one state.
        by_name = {kernel.name: kernel for kernel in self.kernels.values()}
        for visit in range(1, _MAX_VISITS + 1):
            judged = judge_claims(self.plan.options, self._seen)
            for step in [each.claim.step for each in judged if visit == 1 or each.verdict == UNDECIDED]:
                if step.regime == regime.name and (step, visit) not in self._held:
                    _, problem, shape, name = step
                    self.setup.on_phase(f"{regime.name} {shape} {name} {CONFIRM_PHASE} {visit}")
                    row = yield Step(
                        by_name[name], problem, shape, regime, self.make_rule(regime), CONFIRM_PHASE, visit
                    )
                    self._seen += [row] if row is not None else []
            seen = [row for row in self._seen if row.ok and row.regime == regime.name]
            regime = regime.make_confirmation_regime(summarize_conditions(seen), math.inf) if visit == 1 else regime


# The number of attempts to draw a problem that a kernel supports, and the maximum number of rows in a log. If the
# budget allows more rows, visits become longer instead.
_TRIES, _MAX_ROWS = 200, 5000
# The shortest visit to a problem that was requested by number.
_REPEAT_SECONDS = 1.0
# A problem that must load the device has at least this share of the maximum number of multiply-adds.
_LOADING_SHARE = 0.25


def draw_problem(backend: Backend, plan: Plan, kernel: AnyKernel, number: int, regime: str) -> tuple[Any, Any] | None:
    """Draw random problem ``number`` of a kernel, and its shape; None if the kernel supports none that the plan allows.

    The result depends only on the plan's seed and largest shape, the kernel, the number and the regime.
    """
    of, seed = get_operation(kernel.operation), plan.problem.seed + number
    chooser = random.Random(f"{seed} {kernel.name}")
    max_terms, allowed = plan.shapes[0].flop // 2, {problem.dtype for problem in plan.problems}
    terms = range(int(max_terms * _LOADING_SHARE) if regime == LOADED else 1, max_terms + 1)
    dtypes = [each for each in kernel.dtypes or OPERAND_DTYPES if each in allowed]
    for _ in range(_TRIES if dtypes else 0):
        dtype, case = chooser.choice(dtypes), of.random_case(chooser, terms)
        if case is None:
            continue
        shape = case.pop("shape")
        problem = of.problem_for(backend, {**case, "dtype": dtype, "seed": seed})
        if not (kernel.unsupported(backend, problem) or kernel.unsupported_shape(problem, shape)):
            return problem, shape
    return None


def choose_kernels_to_verify(backend: Backend, names: Sequence[str] | None) -> dict[str, AnyKernel]:
    """Return the named kernels, of any operation; by default all that are available and do not compile for minutes."""
    groups: dict[str, list[str] | None] = {}
    for name in names or ():
        groups.setdefault(find_operation(name).name, []).append(name)  # type: ignore[union-attr]
    found = dict[str, AnyKernel]()
    for of, own in (groups or dict.fromkeys(find_registered(OPERATIONS))).items():
        with suppress(*(() if names else (UnavailableError,))):
            found |= choose_kernels(make_operation(of), backend, own)
    return {
        name: each
        for name, each in found.items()
        if names
        or (
            each.is_tried_unasked
            and make_operation(each.operation).random_case(random.Random(0), range(1, 2)) is not None
        )
    }


def make_verify_plan(
    backend: Backend,
    kernels: Mapping[str, AnyKernel],
    budget_seconds: float | None = None,
    dtypes: Sequence[str] | None = None,
    regimes: Sequence[str] = CHECKING,
    largest: MatmulShape | None = None,
    seed: int = 0,
    number: int = 0,
) -> Plan:
    """Return the plan of a verification. ``largest``: random problems have at most the FLOP of this shape."""
    names = dict.fromkeys(map(canonicalize_dtype_name, dtypes or OPERAND_DTYPES))
    problems = tuple(problem_for(backend, name, seed=seed) for name in names)
    size, budget = 4096 if backend.is_accelerator else 256, budget_seconds or VERIFY_BUDGET_SECONDS
    shape, own = largest or MatmulShape(size, size, size), sorted({each.operation for each in kernels.values()})
    options = VerifyOptions(number, tuple(own))
    of = get_operation(problems[0].operation)
    return make_operation_plan(of, kernels, problems, [shape], regimes, VERIFY, budget_seconds=budget, options=options)


class VerifyStrategy(PlanStrategy):
    """Verifies random problems of the plan's kernels."""

    skipped_count = 0  # the end of the budget is the end of the run

    def yield_steps(self) -> Steps:
        """Yield the steps. Raises UsageError if no kernel has a problem to verify."""
        run, rows = self.runner, self.setup.rows
        asked, budget = self.plan.options.number, self.plan.budget_seconds or VERIFY_BUDGET_SECONDS
        number, drawn = asked or 1 + max((row.round for row in rows), default=0), None
        seconds, repeats = max(budget / _MAX_ROWS, _REPEAT_SECONDS if asked else 0.0), len(rows)
        rule = StoppingRule(seconds=seconds)
        for index, name in enumerate(self.plan.regimes, 1):
            regime, spent = (
                run.start_regime(get_regime_class(name)(self.backend)),
                dict.fromkeys(self.setup.kernel_objects, 0.0),
            )
            while spent and run.now() < run.start_time + budget * index / len(self.plan.regimes):
                kernel, begun = min(spent, key=lambda each: spent[each]), run.now()
                found = draw_problem(self.backend, self.plan, kernel, number, name)
                if found is None:
                    del spent[kernel]
                    continue
                drawn, repeats = found, repeats + 1
                self.setup.on_phase(f"{name} {number} {kernel.name} {drawn[1]}")
                # A problem that was requested by number is verified repeatedly, with a row each time, until it fails.
                row = yield Step(kernel, *drawn, regime, rule, str(repeats) if asked else "", number)
                run.release_pools()  # each problem has its own seed
                # A kernel that fails immediately must not always be next.
                spent[kernel] = spent[kernel] + run.now() - begun if row and row.ok else max(spent.values())
                if asked and row and not row.ok:
                    del spent[kernel]
                number += not asked
            if not (spent or drawn):
                raise UsageError("no kernel supports a random problem with these dtypes: add dtypes or raise --largest")


AnswerT = TypeVar("AnswerT")
#: The rows of a pair: what is timed, and whether it runs alone.
PAIR_ROWS = ((MATMUL_WORK, True), (OTHER_WORK, True), (MATMUL_WORK, False), (OTHER_WORK, False))
#: How often visits alternate between matmul, the other work and both, so that the device's drift affects all three
#: equally; and the seconds to measure each row for, over all rounds.
_ROUNDS, DEFAULT_SECONDS = 3, 3.0
#: The number of blocks in a window, the number of blocks of the other work that a CPU queues ahead, the seconds of a
#: window, and the maximum number of windows to try for a first sample.
_BLOCKS, _AHEAD, _WINDOW_SECONDS, _MAX_TRIED = 16, 4, 0.05, 4
#: Pairs of two numbers: the flushes ahead of a window, during which the host queues the window's first blocks, and the
#: maximum number of short launches in a window. If the host is late in more than _MAX_LATE of a visit's windows, the
#: next pair is used.
_PACES, _MAX_LATE = ((128, 320), (256, 160), (512, 80)), 0.25
#: The host must be this far ahead at each mark, or the device may have waited for it. A launch counts as no shorter
#: than _MIN_SECONDS.
_MIN_AHEAD_SECONDS, _MIN_SECONDS = 20e-6, 1e-9


def make_row_problem(problem: OverlapProblem, row: tuple[str, bool]) -> OverlapProblem:
    return replace(problem, timed=row[0], alone=row[1])


def list_overlap_pairs(steps: Iterable[StepKey]) -> list[tuple[OverlapProblem, OverlapShape]]:
    """Return the pairs that these steps measure, as problem and shape."""
    return list(dict.fromkeys((make_row_problem(problem, PAIR_ROWS[0]), shape) for _, problem, shape, _ in steps))


def compute_overlapping_seconds(marks: Sequence[Sequence[tuple[float, int]]]) -> list[float] | None:
    """Return the seconds per launch of each work. Only blocks between the latest start and the earliest end of all
    works count; None if a work has no such block. ``marks``: for each work, the seconds and the number of launches so
    far.
    """
    begin, end = max(each[0][0] for each in marks), min(each[-1][0] for each in marks)
    within = [[mark for mark in each if begin <= mark[0] <= end] for each in marks]
    if not all(each[1:] for each in within):
        return None
    return [(each[-1][0] - each[0][0]) / (each[-1][1] - each[0][1]) for each in within]


@dataclass
class OverlapStrategy:
    """Measures pairs of matmul and other work.

    - ``pairs``: the pairs, each as the problem of any of its rows and its shape.
    - ``seconds``: how long to measure each row. ``budget_seconds``: no pair begins after this time.
    - ``gather_from_ranks``: returns a list of the values that the ranks pass to it. All ranks follow the decisions of
      rank 0, and fail together.
    """

    backend: Backend
    kernel: Pair
    pairs: Sequence[tuple[OverlapProblem, OverlapShape]]
    seconds: float = DEFAULT_SECONDS
    budget_seconds: float = math.inf
    on_phase: Callable[[str], None] = lambda text: None
    gather_from_ranks: Callable[[Any], list[Any]] = lambda own: [own]
    skipped_count: int = field(default=0, init=False)

    def yield_results(self) -> Iterator[Measurement]:
        """Yield four rows for each pair, in the order of PAIR_ROWS."""
        begun = self.backend.now()
        for index, (problem, shape) in enumerate(self.pairs):
            if index and self.gather_from_ranks(self.backend.now() - begun >= self.budget_seconds)[0]:
                self.skipped_count = len(PAIR_ROWS) * (len(self.pairs) - index)
                return
            self.on_phase(f"{problem.other} {shape}")
            yield from self._measure_pair(problem, shape)

    def _measure_pair(self, problem: OverlapProblem, shape: OverlapShape) -> Sequence[Measurement]:
        regime = Sustained(self.backend)
        try:
            with self.kernel.settings(self.backend, problem):
                return _PairMeasurement(self, problem, shape, regime).measure_rows()
        except WrongResultError as error:
            outcome: tuple[Status, str] = ("wrong_result", str(error))
        except get_plugin_errors() as error:
            outcome = classify_error(error, self.kernel, self.backend)
        self.backend.release_memory()
        steps = [Step(self.kernel, make_row_problem(problem, row), shape, regime, StoppingRule()) for row in PAIR_ROWS]
        return [replace(make_failed_row(step), status=outcome[0], reason=outcome[1]) for step in steps]


@dataclass
class _ConcurrentWork:
    """One of the two works, with its queue. ``marks``: the marks around the blocks of a window, each with the host's
    time and the number of launches so far. ``seconds``: the latest time of a launch, which sets the length of blocks.
    """

    name: str
    checked: CheckedKernel
    mark: Callable[[], Any]
    queue_launch: Callable[[Callable[[], object]], object]
    rotation: Iterator[Callable[[], object]]
    seconds: float
    marks: list[tuple[Any, float, int]] = field(default_factory=list)


class _PairMeasurement:
    """The two prepared works of a pair. Raises what their kernels raise."""

    def __init__(
        self, strategy: OverlapStrategy, problem: OverlapProblem, shape: OverlapShape, regime: Sustained
    ) -> None:
        self.strategy, self.problem, self.shape, self.regime = strategy, problem, shape, regime
        self.backend, queue = strategy.backend, strategy.backend.second_queue()
        if queue is None:
            raise UnsupportedError(str(strategy.kernel.unavailable(strategy.backend)))
        self.queue, self.is_late, self.is_slow = queue, False, False
        self.flushes, self.max_short_launches = _PACES[0]
        own = self._prepare_work(MATMUL_WORK, strategy.backend.mark, lambda launch: launch())
        self.works = {MATMUL_WORK: own, OTHER_WORK: self._prepare_work(OTHER_WORK, queue.mark, queue.launch)}
        self.samples: dict[tuple[str, bool], Samples] = {}

    def _prepare_work(
        self, timed: str, mark: Callable[[], Any], queue_launch: Callable[..., object]
    ) -> _ConcurrentWork:
        kernel, backend, problem = self.strategy.kernel, self.backend, make_row_problem(self.problem, (timed, True))
        if reason := kernel.unsupported(backend, problem):
            raise UnsupportedError(reason)
        sets = self.regime.count_sets(problem, self.shape, backend.info.cache_bytes)
        pool = backend.operand_pool(problem.data, problem.seed)
        checked = CheckedKernel(
            self._call_on_all_ranks(partial(kernel.prepare, backend, problem, self.shape, pool, sets))
        )
        seconds = self._call_on_all_ranks(partial(checked.warm_up_and_verify, backend))
        name, rotation = kernel.get_counted_kernel(backend, problem).name, itertools.cycle(checked.launches)
        return _ConcurrentWork(name, checked, mark, queue_launch, rotation, seconds)

    def measure_rows(self) -> list[Measurement]:
        """Measure the rows. Raises WrongResultError, or UnsupportedError if the host was too slow."""
        every = list(self.works.values())
        for flushes, self.max_short_launches in _PACES:
            self.flushes = 0 if self.backend.timer == "host clock" else flushes
            if self._take_samples(every, flushes == _PACES[-1][0]):
                break
        self._measure_window(
            every, (1, 1)
        )  # few launches, so that a repeated all-reduce stays finite and can be verified
        self._verify(every, whole=True)
        if not all(self.strategy.gather_from_ranks(all(taken.seconds for taken in self.samples.values()))):
            slow = "the host queues these launches too slowly"
            raise UnsupportedError(
                slow if self.is_slow else "the device does not run matmul and the other work at the same time"
            )
        return [self._build_row(row) for row in PAIR_ROWS]

    def _take_samples(self, every: Sequence[_ConcurrentWork], is_last: bool) -> bool:
        """Take all samples. Return False if the host is late in too many windows and there is a slower pace to try."""
        self.samples = {row: Samples() for row in PAIR_ROWS}
        for works in (every[:1], every[1:], every) * _ROUNDS:
            self.is_slow = self._measure_visit(works) > _MAX_LATE
            self._verify(works)
            if self.is_slow and not is_last:
                return False
        return True

    def _call_on_all_ranks(self, call: Callable[[], AnswerT]) -> AnswerT:
        """Call a function on all ranks, and return its answer. If it raises on one rank, all ranks raise."""
        answer, error = None, None
        try:
            answer = call()
        except Exception as failed:
            error = failed
        if any(self.strategy.gather_from_ranks(error is not None)):
            raise error or WrongResultError(Verdict(math.inf, 0.0, reason="another rank failed"))
        return cast(AnswerT, answer)

    def _verify(self, works: Sequence[_ConcurrentWork], whole: bool = False) -> None:
        for work in works:
            self._call_on_all_ranks(partial(self.regime.require_no_unseen_work, work.checked, work.seconds))
            self._call_on_all_ranks(partial(work.checked.verify, whole))
            if whole:
                self._call_on_all_ranks(work.checked.require_unchanged_operands)

    def _measure_visit(self, works: Sequence[_ConcurrentWork]) -> float:
        """Wait for one period of the power controller, at most the time to measure, then measure. Returns the share of
        windows in which a host was late.
        """
        part, windows, late, tried, taken = self.strategy.seconds / _ROUNDS, 0, 0, 0, 0
        settled_at = self.backend.now() + min(part, self.backend.sustained_traits.swing_seconds)
        while True:
            self.regime.require_clock_advances(windows)
            own = (self.backend.now() - settled_at, [work.seconds for work in works], taken)
            elapsed, seconds, of_first = self.strategy.gather_from_ranks(own)[0]
            if elapsed >= part and (of_first or tried >= _MAX_TRIED):
                return late / windows
            is_settled = windows > 0 and elapsed >= 0
            block = max(min(_WINDOW_SECONDS, self.max_short_launches * min(seconds)) / _BLOCKS, *seconds, _MIN_SECONDS)
            counts = [block / max(each, _MIN_SECONDS) for each in seconds]
            found = self._measure_window(works, counts)
            windows, late = windows + 1, late + self.is_late
            for work, count, latest in zip(works, counts, found or (), strict=False):
                work.seconds = latest
                samples = self.samples[MATMUL_WORK if work is self.works[MATMUL_WORK] else OTHER_WORK, len(works) == 1]
                samples.seconds += [latest] * is_settled
                samples.launches += round(_BLOCKS * count) * is_settled
                samples.add_reading(self.regime.read_sensors() if is_settled else None)
            tried, taken = tried + is_settled, taken + (is_settled and found is not None)

    def _measure_window(self, works: Sequence[_ConcurrentWork], launches: Sequence[float]) -> list[float] | None:
        """Return the seconds per launch of each work while all of them run; None if they never ran together or waited
        for the host. ``launches``: the mean number of launches per block, chosen so that the works end together.
        """
        backend = self.backend
        for work in works:
            work.marks = []
            work.checked.change_operands_and_poison()
        first = backend.mark()
        backend.wait(first)
        begun = backend.now()
        for _ in range(self.flushes):
            backend.flush_cache()
        self.queue.fork()
        # A CPU runs launches as they are queued, so the other work must be queued first.
        ahead = 0 if self.flushes or len(works) == 1 else _AHEAD
        for block in range(_BLOCKS + 1 + ahead):
            for work, count in zip(reversed(works), reversed(launches), strict=True):
                own = block - ahead if work is works[0] else block
                if not 0 <= own <= _BLOCKS:
                    continue
                done = round(own * count)
                for launch in itertools.islice(work.rotation, done - work.marks[-1][2] if own else 0):
                    work.queue_launch(launch)
                    backend.submit()
                work.marks.append((work.mark(), backend.now(), done))
        self.queue.join()
        end = backend.mark()
        self.regime.synchronize(works[0].checked, end, self.regime.queue_idle_mark(end))
        # Ignore the first block, in which queues wait for the host and ranks for each other.
        times = [[(backend.seconds_between(first, mark), done) for mark, _, done in work.marks[1:]] for work in works]
        due = [host - begun + _MIN_AHEAD_SECONDS for work in works for _, host, _ in work.marks[1:]]
        reached = [seconds for each in times for seconds, _ in each]
        headway = min(device - host for host, device in zip(due, reached, strict=True)) if self.flushes else 0.0
        found, last = compute_overlapping_seconds(times), max(range(len(works)), key=lambda each: times[each][-1][0])
        # A collective waits for the slowest host, and all ranks must adapt the works alike.
        answers = self.strategy.gather_from_ranks((headway, last if found is None else None))
        self.is_late = min(each for each, _ in answers) < 0
        starved = next((each for _, each in answers if each is not None), None)
        if starved is not None and not self.is_late:  # queue fewer launches of what ends last, at least one per block
            works[starved].seconds *= min(2.0, launches[starved])
        return found if starved is None and not self.is_late else None

    def _build_row(self, row: tuple[str, bool]) -> Measurement:
        checked, names = self.works[row[0]].checked, " + ".join(work.name for work in self.works.values())
        verdict = replace(checked.verdict, details={**checked.verdict.details, "kernels": names})
        problem, taken = make_row_problem(self.problem, row), self.samples[row]
        return build_row_from_samples(self.strategy.kernel, problem, self.shape, self.regime, taken, verdict)
