"""Choose and measure the steps of ``mamf guard`` (rows compared with a baseline), ``mamf reproduce`` (claimed rates
measured again), ``mamf verify`` (random problems) and ``mamf overlap`` (a matmul at the same time as other work).

``mamf overlap`` measures the rates of two workloads, the matmul and the other work: first of each alone, then while
both run. Each workload is launched back to back in its own queue, in blocks of equal duration, with marks (device
events that record the time) between blocks. While both run, only blocks in which both queues were busy count.
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
from mamf.engine.regimes import Regime, Samples, StoppingRule, SustainedRegime, get_regime_class
from mamf.engine.regimes.base import CheckedKernel, WrongResultError
from mamf.engine.runner import PlanStrategy, RunSetup, Step, StepGenerator, make_failed_row
from mamf.engine.strategies.rows import RowsStrategy
from mamf.errors import UnavailableError, UnsupportedError, UsageError, get_catchable_plugin_errors
from mamf.kernel import AnyKernel, Verdict, explain_unsupported_launch
from mamf.logs.compared_rows import ComparedRow, combine_measurements, group_by_key
from mamf.logs.judging import DEFAULT_GUARD_TOLERANCE, UNDECIDED, judge_claims, needs_repetition
from mamf.measurement import Measurement, MeasurementStatus, group_pairs
from mamf.operation import make_operation_plan
from mamf.operations.matmul.operation import make_problem
from mamf.operations.matmul.shapes import MatmulShape
from mamf.operations.overlap import MATMUL_WORK, OTHER_WORK, OverlapProblem, OverlapShape, WorkPairKernel
from mamf.operations.unknown import get_operation
from mamf.plans import CHECKING_REGIMES, LOADED, VERIFY, VERIFY_BUDGET_SECONDS, Plan, RowKey, VerifyOptions
from mamf.plugins import discovery


class GuardStrategy(RowsStrategy):
    """The strategy of ``mamf guard``: it measures all rows once, then repeats the rows that may have become slower.

    ``baseline``: the rows of the baseline, by key; None: measure a new baseline, by measuring all rows in each round.
    ``tolerance``: the share by which a row may be slower than in the baseline.
    """

    def __init__(
        self,
        setup: RunSetup,
        baseline: Mapping[object, ComparedRow] | None = None,
        tolerance: float = DEFAULT_GUARD_TOLERANCE,
    ) -> None:
        super().__init__(setup, replayed_rows=[row for row in setup.rows if row.phase])
        self.baseline, self.tolerance = baseline, tolerance
        self._rows_by_key = group_by_key(row for row in setup.rows if not row.phase)

    def yield_steps(self) -> StepGenerator:
        remaining_row_keys = frozenset(self.setup.remaining_row_keys)
        for name in self.plan.regimes:
            regime = self.runner.prepare_regime(self.make_regime(name))
            keys = [key for key in self.plan.list_row_keys() if key.regime == name]
            yield from self._measure_rows_once(regime, [key for key in keys if key in remaining_row_keys], "", 1)
            rows = [row for visits in self._rows_by_key.values() for row in visits if row.ok and row.regime == name]
            later_regime = regime.make_confirmation_regime(summarize_conditions(rows), math.inf)
            for number in range(1, self.plan.options.rounds + 1):
                doubtful = [key for key in keys if self._may_be_slower(key)]
                if not doubtful:
                    break
                if len(doubtful) == 1:  # Measure another row too, so that no row is measured twice in succession.
                    doubtful += [key for key in keys if key not in doubtful][-1:]
                random.Random(f"{name} {number}").shuffle(doubtful)
                yield from self._measure_rows_once(later_regime, doubtful, CONFIRM_PHASE, number)

    def _measure_rows_once(self, regime: Regime, keys: Sequence[RowKey], phase: str, number: int) -> StepGenerator:
        for key in keys:
            name, problem, shape, kernel = key
            progress = f"round {number} of at most {self.plan.options.rounds}" if phase else ""
            self.setup.report_phase(f"{name} {shape} {kernel} {progress}".rstrip())
            row = yield Step(
                self.kernels[kernel], problem, shape, regime, self.make_stopping_rule(regime), phase, number
            )
            if row is not None:
                # A row has the name of the kernel itself, which may differ from the name that the user requested.
                self._rows_by_key.setdefault(key._replace(kernel=self.kernels[kernel].name), []).append(row)

    def _may_be_slower(self, key: RowKey) -> bool:
        visits = self._rows_by_key.get(key._replace(kernel=self.kernels[key.kernel].name))
        if not visits:
            return False
        if self.baseline is None:
            return visits[-1].ok
        before = self.baseline.get(combine_measurements(visits).pairing_key)
        return before is not None and needs_repetition(before, visits, self.tolerance)


#: The maximum number of times that ``mamf reproduce`` measures the row of a claimed rate.
_MAX_VISITS_PER_CLAIM = 5


class ReproduceStrategy(RowsStrategy):
    """The strategy of ``mamf reproduce``: it measures claimed rates again until each is reproduced or refuted."""

    def yield_steps(self) -> StepGenerator:
        rows, measured_visits = list(self.setup.rows), {(row.key, row.round_number) for row in self.setup.rows}
        kernels = {kernel.name: kernel for kernel in self.kernels.values()}
        for regime_name, visit in itertools.product(self.plan.regimes, range(1, _MAX_VISITS_PER_CLAIM + 1)):
            if visit == 1:
                regime = self.runner.prepare_regime(self.make_regime(regime_name))
            elif visit == 2:  # Rest before each repeated measurement, so that the power controller changes its state.
                regime_rows = [row for row in rows if row.ok and row.regime == regime_name]
                regime = regime.make_confirmation_regime(summarize_conditions(regime_rows), math.inf)
            judged = judge_claims(self.plan.options, rows)
            for key in [each.claim.step for each in judged if visit == 1 or each.verdict == UNDECIDED]:
                if key.regime == regime_name and (key, visit) not in measured_visits:
                    _, problem, shape, name = key
                    self.setup.report_phase(f"{regime_name} {shape} {name} {CONFIRM_PHASE} {visit}")
                    row = yield Step(
                        kernels[name], problem, shape, regime, self.make_stopping_rule(regime), CONFIRM_PHASE, visit
                    )
                    rows += [row] if row is not None else []


# The maximum number of attempts to draw a problem that a kernel supports, and the maximum number of rows in a log. If
# the budget allows more rows, mamf verifies each problem for longer instead.
_MAX_DRAW_COUNT, _MAX_ROW_COUNT = 1000, 5000
# The minimum seconds of each verification of a problem that the user requested by its number.
_MIN_VERIFY_SECONDS = 1.0
# A problem of the regime `loaded` has at least this share of the multiply-adds of the largest allowed problem.
_MIN_LOADED_WORK_SHARE = 0.25


def draw_problem(backend: Backend, plan: Plan, kernel: AnyKernel, number: int, regime: str) -> tuple[Any, Any] | None:
    """Draw the random problem with this ``number`` for a kernel, and its shape. Return None if the kernel supports none
    of the drawn problems. The problem depends only on the plan's seed and largest shape, and on the kernel, the number
    and the regime: a plan with fewer dtypes draws the same problems, and skips those with other dtypes.
    """
    operation, seed = get_operation(kernel.operation), plan.problem.seed + number
    chooser = random.Random(f"{seed} {kernel.name}")
    max_terms, allowed = plan.shapes[0].flop // 2, {problem.dtype for problem in plan.problems}
    terms = range(int(max_terms * _MIN_LOADED_WORK_SHARE) if regime == LOADED else 1, max_terms + 1)
    dtypes = kernel.dtypes or OPERAND_DTYPES
    for _ in range(0 if allowed.isdisjoint(dtypes) else _MAX_DRAW_COUNT):
        dtype, case = chooser.choice(dtypes), operation.draw_random_case(chooser, terms)
        if case is None or dtype not in allowed:
            continue
        shape = case.pop("shape")
        problem = operation.make_problem(backend, {**case, "dtype": dtype, "seed": seed})
        if not explain_unsupported_launch(kernel, backend, problem, shape):
            return problem, shape
    return None


def choose_kernels_to_verify(backend: Backend, names: Sequence[str] | None) -> dict[str, AnyKernel]:
    """Return the kernels with these names, or else all available kernels that need no long compilation, by name."""
    kernels = dict[str, AnyKernel]()
    names_by_operation = group_pairs((discovery.find_operation_of_kernel(name).name, name) for name in names or ())
    registered = discovery.find_entry_points_by_name(discovery.OPERATION_GROUP)
    for operation_name, kernel_names in (names_by_operation or dict.fromkeys(registered)).items():
        with suppress(*(() if names else (UnavailableError,))):
            kernels |= discovery.choose_kernels(discovery.make_operation(operation_name), backend, kernel_names)
    return {
        name: each
        for name, each in kernels.items()
        if names
        or (
            each.is_tried_by_default
            and discovery.make_operation(each.operation).draw_random_case(random.Random(0), range(1, 2)) is not None
        )
    }


def make_verify_plan(
    backend: Backend,
    kernels: Mapping[str, AnyKernel],
    budget_seconds: float | None = None,
    dtypes: Sequence[str] | None = None,
    regimes: Sequence[str] = CHECKING_REGIMES,
    largest_shape: MatmulShape | None = None,
    seed: int = 0,
    problem_number: int = 0,
) -> Plan:
    """Return the plan of a run of ``mamf verify``. ``dtypes``: by default all operand dtypes. ``largest_shape``: no
    problem has more FLOP than this matmul. ``problem_number``: the only problem to verify; 0: verify all in turn.
    """
    names = dict.fromkeys(map(canonicalize_dtype_name, dtypes or OPERAND_DTYPES))
    problems = tuple(make_problem(backend, name, seed=seed) for name in names)
    size, budget = 4096 if backend.is_accelerator else 256, budget_seconds or VERIFY_BUDGET_SECONDS
    shape = largest_shape or MatmulShape(size, size, size)
    return make_operation_plan(
        get_operation(problems[0].operation),
        kernels,
        problems,
        [shape],
        regimes,
        VERIFY,
        budget_seconds=budget,
        options=VerifyOptions(problem_number, tuple(sorted({kernel.operation for kernel in kernels.values()}))),
    )


class VerifyStrategy(PlanStrategy):
    """The strategy of ``mamf verify``: it verifies random problems of the plan's kernels until the budget ends."""

    skipped_step_count = 0  # The run has no fixed number of steps, so the end of its budget skips none.

    def yield_steps(self) -> StepGenerator:
        """Yield random problems to verify, each for the kernel that has been verified for the shortest time so far.
        Raise UsageError if no kernel supports a random problem of the plan.
        """
        run, rows = self.runner, self.setup.rows
        requested_number, budget = self.plan.options.number, self.plan.budget_seconds or VERIFY_BUDGET_SECONDS
        number, drawn = requested_number or 1 + max((row.round_number for row in rows), default=0), None
        seconds, repeats = max(budget / _MAX_ROW_COUNT, _MIN_VERIFY_SECONDS if requested_number else 0.0), len(rows)
        rule = StoppingRule(max_seconds=seconds)
        for index, name in enumerate(self.plan.regimes, 1):
            regime, spent = (
                run.prepare_regime(get_regime_class(name)(self.backend)),
                dict.fromkeys(self.setup.plan_kernels, 0.0),
            )
            while spent and run.now() < run.start_time + budget * index / len(self.plan.regimes):
                kernel, start = min(spent, key=lambda each: spent[each]), run.now()
                found = draw_problem(self.backend, self.plan, kernel, number, name)
                if found is None:
                    del spent[kernel]
                    continue
                drawn, repeats = found, repeats + 1
                self.setup.report_phase(f"{name} {number} {kernel.name} {drawn[1]}")
                # If the user requested this problem by its number, verify it again and again until it fails.
                row = yield Step(kernel, *drawn, regime, rule, str(repeats) if requested_number else "", number)
                run.release_pools()  # The next problem has another seed, so it needs other operands.
                # After a failure, set the kernel's time to the longest time of all kernels. Otherwise a kernel that
                # fails immediately would always be the next one.
                spent[kernel] = spent[kernel] + run.now() - start if row and row.ok else max(spent.values())
                if requested_number and row and not row.ok:
                    del spent[kernel]
                number += not requested_number
            if not (spent or drawn):
                raise UsageError("no kernel supports any of the generated problems: add dtypes or raise --largest")


ResultT = TypeVar("ResultT")
#: The four rows of each pair of a matmul and other work: which of the two is timed, and whether it runs alone.
PAIR_ROWS = ((MATMUL_WORK, True), (OTHER_WORK, True), (MATMUL_WORK, False), (OTHER_WORK, False))
#: Each round measures the matmul, the other work, and both at once, so that a drift of the device affects all three
#: equally. These are the number of rounds, and the default seconds to measure a row in all rounds together.
_OVERLAP_ROUND_COUNT, DEFAULT_ROW_SECONDS = 3, 3.0
#: A window is a series of launches that gives one sample. _WINDOW_BLOCKS: the number of blocks of launches in a window.
#: _CPU_BLOCKS_AHEAD: the number of blocks of the other work that the host queues before the first matmul, if the device
#: is a CPU. _WINDOW_SECONDS: the maximum duration of a window of short launches. _MAX_WINDOWS_TRIED: if this many
#: windows give no sample, stop trying.
_WINDOW_BLOCKS, _CPU_BLOCKS_AHEAD, _WINDOW_SECONDS, _MAX_WINDOWS_TRIED = 16, 4, 0.05, 4
#: Pairs of settings, to try in this order: the number of cache flushes before a window, and the maximum number of short
#: launches in the window. During the flushes, the host queues the first launches of the window. If the host is late in
#: more than the share _MAX_LATE_SHARE of the windows, mamf tries the next pair.
_FLUSHES_AND_MAX_LAUNCHES, _MAX_LATE_SHARE = ((128, 320), (256, 160), (512, 80)), 0.25
#: At each mark, the host must be at least this many seconds ahead of the device, so that the device never waits for it.
#: A launch counts as at least _MIN_LAUNCH_SECONDS long, to avoid a division by 0.
_MIN_HOST_LEAD_SECONDS, _MIN_LAUNCH_SECONDS = 20e-6, 1e-9


def make_row_problem(problem: OverlapProblem, pair_row: tuple[str, bool]) -> OverlapProblem:
    return replace(problem, timed=pair_row[0], alone=pair_row[1])


def list_overlap_pairs(keys: Iterable[RowKey]) -> list[tuple[OverlapProblem, OverlapShape]]:
    """Return the pairs of matmul and other work that these rows measure, each as its problem and shape."""
    return list(dict.fromkeys((make_row_problem(problem, PAIR_ROWS[0]), shape) for _, problem, shape, _ in keys))


def compute_overlapping_seconds(marks: Sequence[Sequence[tuple[float, int]]]) -> list[float] | None:
    """Return the seconds per launch of each workload while all workloads ran; None if a workload has no whole block in
    that time. ``marks``: for each workload, its marks, each with its device seconds and the number of earlier launches.
    """
    begin, end = max(work_marks[0][0] for work_marks in marks), min(work_marks[-1][0] for work_marks in marks)
    shared_marks = [[mark for mark in work_marks if begin <= mark[0] <= end] for work_marks in marks]
    if all(work_marks[1:] for work_marks in shared_marks):
        return [(last[0] - first[0]) / (last[1] - first[1]) for first, *_, last in shared_marks]
    return None


@dataclass
class OverlapStrategy:
    """The strategy of ``mamf overlap``, which measures pairs of a matmul and other work (such as a copy or a
    collective) that run at the same time.

    - ``kernel``: launches both workloads of a pair.
    - ``pairs``: the problem and the shape of each pair. It may be the problem of any of its four rows.
    - ``row_seconds``: how long to measure each row. ``budget_seconds``: no pair begins after this time.
    - ``gather_from_ranks``: returns a list of the values that the ranks (processes, one per device) pass to it. All
      ranks follow the decisions of rank 0, and fail together.
    """

    backend: Backend
    kernel: WorkPairKernel
    pairs: Sequence[tuple[OverlapProblem, OverlapShape]]
    row_seconds: float = DEFAULT_ROW_SECONDS
    budget_seconds: float = math.inf
    report_phase: Callable[[str], None] = lambda text: None
    gather_from_ranks: Callable[[Any], list[Any]] = lambda value: [value]
    skipped_step_count: int = field(default=0, init=False)

    def yield_results(self) -> Iterator[Measurement]:
        """Measure each pair, and yield four rows for it, in the order of PAIR_ROWS."""
        start_time = self.backend.now()
        for index, (problem, shape) in enumerate(self.pairs):
            if index and self.gather_from_ranks(self.backend.now() - start_time >= self.budget_seconds)[0]:
                self.skipped_step_count = len(PAIR_ROWS) * (len(self.pairs) - index)
                return
            self.report_phase(f"{problem.other} {shape}")
            yield from self._measure_pair(problem, shape)

    def _measure_pair(self, problem: OverlapProblem, shape: OverlapShape) -> Sequence[Measurement]:
        regime = SustainedRegime(self.backend)
        try:
            with self.kernel.apply_settings(self.backend, problem):
                return _PairMeasurement(self, problem, shape, regime).measure_rows()
        except WrongResultError as error:
            failure: tuple[MeasurementStatus, str] = ("wrong_result", str(error))
        except get_catchable_plugin_errors() as error:
            failure = classify_error(error, self.kernel, self.backend)
        self.backend.release_cached_memory()
        steps = [Step(self.kernel, make_row_problem(problem, row), shape, regime, StoppingRule()) for row in PAIR_ROWS]
        return [replace(make_failed_row(step), status=failure[0], reason=failure[1]) for step in steps]


@dataclass
class _TimedWork:
    """One of the two workloads that run at the same time (the matmul or the other work), with its queue on the device.

    - ``queue_mark``, ``queue_launch``: functions that queue a mark, or a given launch, in the queue of this workload.
    - ``launch_rotation``: yields the launches in turn, each with a different set of operands.
    - ``launch_seconds``: the most recent estimate of the seconds of a launch.
    - ``marks``: the marks around blocks, each with the host's time and the number of launches so far.
    """

    kernel_name: str
    checked: CheckedKernel
    queue_mark: Callable[[], Any]
    queue_launch: Callable[[Callable[[], object]], object]
    launch_rotation: Iterator[Callable[[], object]]
    launch_seconds: float
    marks: list[tuple[Any, float, int]] = field(default_factory=list)


class _PairMeasurement:
    """The measurement of a pair's two workloads. ``__init__`` launches each once, and raises any error of a kernel."""

    def __init__(
        self, strategy: OverlapStrategy, problem: OverlapProblem, shape: OverlapShape, regime: SustainedRegime
    ) -> None:
        self.strategy, self.problem, self.shape, self.regime = strategy, problem, shape, regime
        self.backend, queue = strategy.backend, strategy.backend.get_second_queue()
        if queue is None:
            raise UnsupportedError(str(strategy.kernel.explain_unavailability(strategy.backend)))
        self.queue, self.is_host_late, self.is_host_slow = queue, False, False
        self.flushes, self.max_short_launches = _FLUSHES_AND_MAX_LAUNCHES[0]
        matmul = self._prepare_work(MATMUL_WORK, strategy.backend.record_mark, lambda launch: launch())
        self.works = {MATMUL_WORK: matmul, OTHER_WORK: self._prepare_work(OTHER_WORK, queue.record_mark, queue.launch)}
        self.samples: dict[tuple[str, bool], Samples] = {}

    def _prepare_work(self, timed: str, mark: Callable[[], Any], queue_launch: Callable[..., object]) -> _TimedWork:
        kernel, backend, problem = self.strategy.kernel, self.backend, make_row_problem(self.problem, (timed, True))
        if reason := kernel.explain_unsupported_problem(backend, problem):
            raise UnsupportedError(reason)
        sets = self.regime.choose_operand_set_count(problem, self.shape, backend.info.cache_bytes)
        pool = backend.make_operand_pool(problem.data, problem.seed)
        checked = CheckedKernel(
            self._call_on_all_ranks(partial(kernel.prepare, backend, problem, self.shape, pool, sets))
        )
        seconds = self._call_on_all_ranks(partial(checked.warm_up_and_verify, backend))
        name, rotation = kernel.get_timed_kernel(backend, problem).name, itertools.cycle(checked.launches)
        return _TimedWork(name, checked, mark, queue_launch, rotation, seconds)

    def measure_rows(self) -> list[Measurement]:
        """Measure the four rows. Raise WrongResultError, or UnsupportedError if the workloads never overlap."""
        both_works = list(self.works.values())
        for flushes, self.max_short_launches in _FLUSHES_AND_MAX_LAUNCHES:
            self.flushes = 0 if self.backend.timer == "host clock" else flushes
            self.samples = {row: Samples() for row in PAIR_ROWS}
            for works in (both_works[:1], both_works[1:], both_works) * _OVERLAP_ROUND_COUNT:
                self.is_host_slow = self._measure_workloads_in_round(works) > _MAX_LATE_SHARE
                self._verify_outputs(works)
                # If the host was late in too many windows, try more flushes and fewer launches per window.
                if self.is_host_slow and flushes != _FLUSHES_AND_MAX_LAUNCHES[-1][0]:
                    break
            else:  # All rounds were measured.
                break
        # Verify after a window of few launches, because the values of a repeated all-reduce grow without bound.
        self._measure_window(both_works, (1, 1))
        self._verify_outputs(both_works, checks_all_elements=True)
        if not all(self.strategy.gather_from_ranks(all(taken.seconds_per_launch for taken in self.samples.values()))):
            slow = "the host queues these launches more slowly than the device runs them"
            raise UnsupportedError(
                slow if self.is_host_slow else "the device does not run matmul and the other work at the same time"
            )
        return [self._build_row(row) for row in PAIR_ROWS]

    def _call_on_all_ranks(self, call: Callable[[], ResultT]) -> ResultT:
        """Call a function on all ranks together, and return its result. If it raises on one rank, raise on all."""
        result, error = None, None
        try:
            result = call()
        except Exception as failed:
            error = failed
        if any(self.strategy.gather_from_ranks(error is not None)):
            raise error or WrongResultError(Verdict(math.inf, 0.0, reason="another process (rank) of this run failed"))
        return cast(ResultT, result)

    def _verify_outputs(self, works: Sequence[_TimedWork], checks_all_elements: bool = False) -> None:
        for work in works:
            self._call_on_all_ranks(partial(self.regime.require_no_unseen_work, work.checked, work.launch_seconds))
            self._call_on_all_ranks(partial(work.checked.verify_last_outputs, checks_all_elements))
            if checks_all_elements:
                self._call_on_all_ranks(work.checked.require_unchanged_operands)

    def _measure_workloads_in_round(self, works: Sequence[_TimedWork]) -> float:
        """Launch these workloads for one oscillation period of the power controller without taking samples, then take
        samples for this round's share of the time. Return the share of windows in which the host of any rank was late.
        """
        part, windows, late, tried, taken = self.strategy.row_seconds / _OVERLAP_ROUND_COUNT, 0, 0, 0, 0
        settled_at = self.backend.now() + min(part, self.backend.sustained_traits.swing_seconds)
        while True:
            self.regime.require_advancing_clock(windows)
            values = (self.backend.now() - settled_at, [work.launch_seconds for work in works], taken)
            elapsed, seconds, sample_count = self.strategy.gather_from_ranks(values)[0]
            if elapsed >= part and (sample_count or tried >= _MAX_WINDOWS_TRIED):
                return late / windows
            is_settled = windows > 0 and elapsed >= 0
            block = max(
                min(_WINDOW_SECONDS, self.max_short_launches * min(seconds)) / _WINDOW_BLOCKS,
                *seconds,
                _MIN_LAUNCH_SECONDS,
            )
            counts = [block / max(each, _MIN_LAUNCH_SECONDS) for each in seconds]
            window_seconds = self._measure_window(works, counts)
            windows, late = windows + 1, late + self.is_host_late
            for work, count, latest in zip(works, counts, window_seconds or (), strict=False):
                work.launch_seconds = latest
                samples = self.samples[MATMUL_WORK if work is self.works[MATMUL_WORK] else OTHER_WORK, len(works) == 1]
                samples.seconds_per_launch += [latest] * is_settled
                samples.launch_count += round(_WINDOW_BLOCKS * count) * is_settled
                samples.add_reading(self.regime.read_sensors() if is_settled else None)
            tried, taken = tried + is_settled, taken + (is_settled and window_seconds is not None)

    def _measure_window(self, works: Sequence[_TimedWork], launches_per_block: Sequence[float]) -> list[float] | None:
        """Run the workloads at the same time for one window, and return the seconds per launch of each while all of
        them ran. Return None if they never all ran, or if one waited for the host. ``launches_per_block``: for each
        workload, the mean number of launches in a block, chosen so that all workloads end together.
        """
        backend = self.backend
        for work in works:
            work.marks = []
            work.checked.change_operands_and_poison_outputs()
        first = backend.record_mark()
        backend.wait_for_mark(first)
        start_time = backend.now()
        for _ in range(self.flushes):
            backend.flush_cache()
        self.queue.fork()
        # A CPU runs the matmul while the host queues it, so the host must queue some of the other work first.
        ahead = 0 if self.flushes or len(works) == 1 else _CPU_BLOCKS_AHEAD
        for block in range(_WINDOW_BLOCKS + 1 + ahead):
            for work, count in zip(reversed(works), reversed(launches_per_block), strict=True):
                number = block - ahead if work is works[0] else block
                if not 0 <= number <= _WINDOW_BLOCKS:
                    continue
                done = round(number * count)
                for launch in itertools.islice(work.launch_rotation, done - work.marks[-1][2] if number else 0):
                    work.queue_launch(launch)
                    backend.submit()
                work.marks.append((work.queue_mark(), backend.now(), done))
        self.queue.join()
        end = backend.record_mark()
        self.regime.wait_and_record_gap(works[0].checked, end, self.regime.queue_idle_mark(end))
        # Ignore the first block, in which queues wait for the host and ranks wait for one another.
        measure = partial(backend.compute_seconds_between, first)
        times = [[(measure(mark), done) for mark, _, done in work.marks[1:]] for work in works]
        leads = [
            reached - (host - start_time + _MIN_HOST_LEAD_SECONDS)
            for work, reached_marks in zip(works, times, strict=True)
            for (_, host, _), (reached, _) in zip(work.marks[1:], reached_marks, strict=True)
        ]
        seconds, last = compute_overlapping_seconds(times), max(range(len(works)), key=lambda i: times[i][-1][0])
        # Use the values of all ranks, because a collective waits for the slowest host and all ranks must do equal work.
        answers = self.strategy.gather_from_ranks(
            (min(leads) if self.flushes else 0.0, last if seconds is None else None)
        )
        self.is_host_late = min(each for each, _ in answers) < 0
        latest = next((index for _, index in answers if index is not None), None)
        if latest is not None and not self.is_host_late:  # Next time, queue fewer launches of the work that ends last.
            works[latest].launch_seconds *= min(2.0, launches_per_block[latest])
        return seconds if latest is None and not self.is_host_late else None

    def _build_row(self, pair_row: tuple[str, bool]) -> Measurement:
        checked, names = self.works[pair_row[0]].checked, " + ".join(work.kernel_name for work in self.works.values())
        verdict = replace(checked.verdict, details={**checked.verdict.details, "kernels": names})
        problem, samples = make_row_problem(self.problem, pair_row), self.samples[pair_row]
        return build_row_from_samples(self.strategy.kernel, problem, self.shape, self.regime, samples, verdict)
