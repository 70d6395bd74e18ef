"""Search for the matmul ceilings of a device (its highest rates in the burst and sustained regimes): choose which shape
and kernel to measure next.

- Burst: measure shapes of a coarse grid ("scout"), measure shapes near the fastest ones ("leaders") in smaller steps
  ("refine"), then measure the best candidates in interleaved rounds. The search is over shapes and kernels together,
  because the fastest shape of one kernel is rarely the fastest shape of another.
- Sustained: take the best candidates from burst, rank them in short measurements ("visits") by rate and energy per
  FLOP, then measure the best of them in rounds. At the power limit, the candidate that needs the least energy per FLOP
  is the fastest.

A candidate is a shape and a kernel. Some rounds choose a candidate and separate rounds confirm its rate: a measurement
that chose a candidate never confirms it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from mamf.ceilings.ceiling import CHOOSE_PHASE, MIN_CONFIRMING_ROUNDS, Candidate, rank_candidates
from mamf.engine.regimes import BurstRegime, Regime, StoppingRule, SustainedRegime
from mamf.engine.runner import PlanStrategy, RunSetup, Step, StepGenerator
from mamf.engine.search.grid import (
    choose_long_k_sizes,
    choose_schedule,
    draw_distant_shapes,
    fits_grid,
    list_shapes_around,
)
from mamf.engine.search.rounds import (
    SUSTAINED_VISIT_SECONDS,
    ConfirmationRounds,
    RoundCounts,
    StepsReturningRows,
    choose_candidates_by_visits,
    find_best_candidate_per_size_pair,
    list_default_kernel_candidates,
)
from mamf.engine.search.search import FIRST_SHAPE_COUNT, ShapeSearch, draw_small_k_shapes
from mamf.engine.strategies.rows import RowsStrategy
from mamf.kernel import Problem
from mamf.measurement import Measurement, group_pairs
from mamf.operations.matmul.shapes import MatmulKernel, MatmulShape, SearchOptions
from mamf.operations.unknown import get_operation
from mamf.plans import ALGORITHM_PHASE, BURST, DEFAULT_BUDGET_SECONDS, SUSTAINED


class GridSearchStrategy(PlanStrategy):
    """The strategy that searches a grid of matmul shapes for the ceilings of a device, and confirms them."""

    #: The number of the best candidates from burst that get a short measurement in the sustained regime.
    sustained_visit_candidate_count: ClassVar[int] = 3
    #: A refinement considers the neighbors of the fastest shapes, and at most this many shapes that are not neighbors.
    max_distant_shapes: ClassVar[int] = 5000
    #: A refinement considers shapes that are up to this many steps in M and in N from one of the fastest shapes.
    max_refinement_reach: ClassVar[int] = 4
    #: The number of candidates that the rounds of sustained measure.
    sustained_round_candidate_count: ClassVar[int] = 2
    #: The number of trial shapes, on which kernels are compared before they join the search.
    trial_shape_count: ClassVar[int] = 2
    #: If possible, the trial shapes of a quick search have at most this share of the maximum FLOP in the grid.
    max_trial_flop_share: ClassVar[float] = 0.25
    #: An algorithm replaces the first algorithm of its kernel in the search if it is faster by at least this share. In
    #: a quick search, a kernel joins the search if it is faster than the default kernel by at least this share.
    min_speedup_share: ClassVar[float] = 0.005
    #: A quick search also tries the chosen kernel on this number of shapes that were the fastest in earlier searches on
    #: devices of this model.
    earlier_trial_shape_count: ClassVar[int] = 4
    #: The maximum number of a kernel's algorithms, the most promising first, that a quick search tries on a shape. On
    #: the first shape it tries all algorithms of kernels that need no compilation.
    max_algorithms_in_quick_search: ClassVar[int] = 2

    def __init__(self, setup: RunSetup) -> None:
        # Let all rows of an interrupted run answer steps, because the rows also show when each phase ended.
        super().__init__(setup, replayed_rows=setup.rows)
        kernels: list[MatmulKernel] = setup.plan_kernels
        self.options: SearchOptions = setup.plan.options
        self._budget_seconds = setup.plan.budget_seconds or DEFAULT_BUDGET_SECONDS
        self._default_kernel_name = kernels[0].name
        #: The kernels whose algorithms the search compares. The default kernel is one of them only if its algorithms
        #: need no compilation.
        self._ranked_kernels = [*kernels[1:], *(kernel for kernel in kernels[:1] if kernel.has_cheap_variants)]
        self.schedule = choose_schedule(self.options)
        self._random_chooser = random.Random(setup.plan.problem.seed)
        self._kernels_by_name = {kernel.name: kernel for kernel in kernels}
        self._scouted_rows: list[Measurement] = []
        self._algorithm_rows: list[Measurement] = []
        #: The names of the algorithms that were measured, by the name of their kernel.
        self._algorithm_names: dict[str, set[str]] = {}
        self._compiling_seconds = 0.0

    def _compute_phase_end(self, budget_share: float) -> float:
        """Return the backend time at which a phase ends, given its end as a share of the budget. If the search only
        measures in the burst regime, scale the share up, so that burst gets the whole budget. The time to compile
        kernels does not count.
        """
        scale = 1.0 if SustainedRegime.name in self.plan.regimes else 1 / self.schedule.burst_end_share
        return (
            self.runner.start_time
            + self._compiling_seconds
            + budget_share * scale * (self._budget_seconds - self._compiling_seconds)
        )

    def yield_steps(self) -> StepGenerator:
        deadline, problem, chooser = (
            self.runner.start_time + self._budget_seconds,
            self.plan.problem,
            self._random_chooser,
        )
        self._deadline = deadline
        self._confirmation = ConfirmationRounds(
            self.runner, problem, self._kernels_by_name, self.plan.precision, chooser, deadline
        )
        if SustainedRegime.name in self.plan.regimes:
            self._confirmation.deadline -= self._confirmation.estimate_confirmation_seconds()
        burst_rows = yield from self._search_in_burst_regime()
        self._confirmation.deadline = deadline
        if SustainedRegime.name in self.plan.regimes:
            yield from self._search_in_sustained_regime(burst_rows)

    # -- burst -------------------------------------------------------------------------------------------------------

    def _search_in_burst_regime(self) -> StepsReturningRows:
        problem, grid, schedule = self.plan.problem, self.options.grid, self.schedule
        shapes = [shape for shape in grid.list_shapes() if fits_grid(grid, shape)]
        regime = self._allocate_operands_and_prepare(BurstRegime(self.backend), shapes)
        units = self.backend.info.compute_units
        first = [*self.options.priors, *draw_small_k_shapes(shapes, units, self._random_chooser)]
        search = ShapeSearch(
            shapes, self._default_kernel_name, compute_units=units, seed=problem.seed, first_shapes=first
        )
        self.runner.report_phase("burst: measuring shapes of a coarse grid")
        seconds = schedule.scout_end_share * self._budget_seconds / self.options.scouts
        rule = StoppingRule(max(self.plan.precision, 0.005), min(seconds, 1.0))
        if self._ranked_kernels:
            count = min(self.options.scouts, FIRST_SHAPE_COUNT + len(first))
            yield from self._run_search(
                search, regime, "scout", count, self._compute_phase_end(schedule.scout_end_share), rule
            )
            yield from self._add_best_kernels(search, regime, rule, self._ranked_kernels)
        yield from self._run_search(
            search, regime, "scout", self.options.scouts, self._compute_phase_end(schedule.scout_end_share), rule
        )
        if not self.options.is_quick:
            yield from self._add_best_kernels(
                search, regime, rule, [each for each in self._ranked_kernels if each.has_cheap_variants]
            )
        self.runner.report_phase("burst: measuring shapes near the fastest ones")
        # Refine with steps of a quarter, an eighth and a sixteenth of the grid's step, each rounded down to a multiple
        # of 16. Refine twice with each of these steps, because the fastest shapes change during a refinement.
        steps = [max(16, grid.m[0] // part // 16 * 16) for part in (4, 4, 8, 8, 16, 16)]
        for number, step in enumerate(steps, start=1):
            best = [shape for shape, _ in search.find_leaders(schedule.candidate_count)] or shapes[:1]
            # Consider distant shapes too: the fastest shape may be far from all leaders, because sizes between the
            # coarse steps may fill the waves of tiles exactly.
            search.set_shapes(
                [
                    *list_shapes_around(best, step, grid, self.max_refinement_reach),
                    *draw_distant_shapes(best, step, grid, self.max_distant_shapes, self._random_chooser),
                ]
            )
            share = schedule.scout_end_share + (schedule.refine_end_share - schedule.scout_end_share) * number / len(
                steps
            )
            max_measurements = len(search.measured_tflops) + self.options.refinements // len(steps)
            yield from self._run_search(
                search, regime, "refine", max_measurements, self._compute_phase_end(share), rule
            )
        # The single measurements so far cannot rank shapes whose rates differ by less than the precision. So continue
        # with the fastest shapes of several pairs of M and N, not only with the leaders.
        leaders = search.find_leaders(schedule.candidate_count)
        size_pair_candidates = find_best_candidate_per_size_pair(self._scouted_rows)[: schedule.candidate_count // 2]
        candidates = list(dict.fromkeys((*size_pair_candidates, *leaders)))[: schedule.candidate_count]
        self.runner.report_phase("burst: choosing the fastest algorithms of each shape")
        shapes = list(dict.fromkeys(shape for shape, _ in candidates[: schedule.algorithm_trial_shape_count]))
        end_time = self._compute_phase_end(schedule.choose_end_share) if self.options.is_quick else self._deadline
        yield from self._measure_algorithms(regime, shapes, rule, self._ranked_kernels, end_time)
        rows_by_shape = group_pairs((row.shape, row) for row in self._algorithm_rows if row.ok and row.shape in shapes)
        candidates += [
            (row.shape, row.kernel)
            for row in (max(rows, key=lambda row: row.best_rate) for rows in rows_by_shape.values())
        ]
        measured = [*self._scouted_rows, *self._algorithm_rows]
        candidates += list_default_kernel_candidates(candidates, measured, self._default_kernel_name)
        confirming = yield from self._confirmation.run_rounds(
            regime,
            list(dict.fromkeys(candidates)),
            schedule.burst_round_counts,
            self._compute_phase_end(schedule.choose_end_share),
            self._compute_phase_end(schedule.burst_end_share),
        )
        return [*measured, *confirming]

    def _run_search(
        self,
        search: ShapeSearch,
        regime: Regime,
        phase: str,
        max_measurements: int,
        end_time: float,
        rule: StoppingRule,
    ) -> StepGenerator:
        while len(search.measured_tflops) < max_measurements and self.runner.has_next_step(
            regime, phase, end_time, is_required=len(search.measured_tflops) < MIN_CONFIRMING_ROUNDS
        ):
            proposed = search.propose_candidate()
            if proposed is None:
                return
            shape, kernel = proposed
            row = yield Step(
                self._kernels_by_name[kernel],
                self.plan.problem,
                shape,
                regime,
                rule,
                phase,
                len(search.measured_tflops),
            )
            if row is None:
                return
            search.record_measurement((row.shape, row.kernel), row.best_rate if row.ok else float("nan"))
            self._scouted_rows.append(row)

    def _add_best_kernels(
        self, search: ShapeSearch, regime: Regime, rule: StoppingRule, kernels: Sequence[MatmulKernel]
    ) -> StepGenerator:
        """Measure kernels on the fastest shapes so far, and add each kernel to the search with the algorithms that were
        fastest on these shapes. If the algorithms of a kernel must be compiled, add only the fastest of them. A quick
        search prefers small shapes, and adds only the fastest kernel.
        """
        if not kernels:
            return
        best_first = [shape for shape, _ in find_best_candidate_per_size_pair(self._scouted_rows)]
        if self.options.is_quick:
            limit = self.max_trial_flop_share * self.options.grid.most_flop
            best_first.sort(key=lambda shape: shape.flop > limit)
        shapes = best_first[: self.trial_shape_count]
        yield from self._measure_algorithms(regime, shapes, rule, kernels, self._deadline)
        tried_rows = [row for row in self._algorithm_rows if row.ok and row.shape in shapes]
        if self.options.is_quick:
            self._ranked_kernels = kernels = self._choose_best_kernel(tried_rows, shapes)
            # The shapes so far are the fastest of the default kernel, but another kernel is rarely fastest on the same
            # shapes. So also try the chosen kernel on shapes that were the fastest in earlier searches on devices of
            # this model.
            shapes = list(dict.fromkeys((*shapes, *self.options.priors[: self.earlier_trial_shape_count])))
            yield from self._measure_algorithms(
                regime, shapes, rule, [kernel for kernel in kernels if kernel.has_cheap_variants], self._deadline
            )
            tried_rows = [row for row in self._algorithm_rows if row.ok and row.shape in shapes]
        for kernel in kernels:
            best = self._rank_algorithms(kernel, tried_rows)
            for name in best if kernel.has_cheap_variants else best[:1]:
                if name not in search.kernels:
                    search.add_kernel(name)
        for row in tried_rows:
            if row.kernel in search.kernels and (row.shape, row.kernel) not in search.measured_tflops:
                search.record_measurement((row.shape, row.kernel), row.best_rate)

    def _choose_best_kernel(
        self, tried_rows: Sequence[Measurement], shapes: Sequence[MatmulShape]
    ) -> list[MatmulKernel]:
        """Return the kernel of the fastest row of ``tried_rows``, in a list. Return an empty list if that kernel is not
        clearly faster on these shapes than the default kernel.
        """
        default_rates = (
            row.best_rate
            for row in self._scouted_rows
            if row.ok and row.kernel == self._default_kernel_name and row.shape in shapes
        )
        best = max(tried_rows, key=lambda row: row.best_rate, default=None)
        if best is None or best.best_rate < (1 + self.min_speedup_share) * max(default_rates, default=0.0):
            return []
        return [kernel for kernel in self._ranked_kernels if best.kernel in self._algorithm_names[kernel.name]]

    def _rank_algorithms(self, kernel: MatmulKernel, tried_rows: Sequence[Measurement]) -> list[str]:
        """Return the names of a kernel's fastest algorithms on the shapes in ``tried_rows``, fastest first. On each
        shape, take the kernel's first algorithm unless another algorithm is clearly faster. In a quick search, always
        add the first algorithm, because the fastest algorithm on these few shapes is rarely the fastest elsewhere.
        """
        kernel_rows = [row for row in tried_rows if row.kernel in self._algorithm_names[kernel.name]]
        best_rows = list[Measurement]()
        for rows in group_pairs((row.shape, row) for row in kernel_rows).values():
            fastest = max(rows, key=lambda row: row.best_rate)
            best_rows.append(
                fastest if fastest.best_rate >= (1 + self.min_speedup_share) * rows[0].best_rate else rows[0]
            )
        names = [row.kernel for row in sorted(best_rows, key=lambda row: row.best_rate, reverse=True)]
        names += [row.kernel for row in kernel_rows[:1]] if self.options.is_quick else []
        return list(dict.fromkeys(names))

    def _measure_algorithms(
        self,
        regime: Regime,
        shapes: Sequence[MatmulShape],
        rule: StoppingRule,
        kernels: Sequence[MatmulKernel],
        end_time: float,
    ) -> StepGenerator:
        """Measure the algorithms of these kernels on these shapes, until the backend time ``end_time``. In a quick
        search, measure all algorithms of a kernel only on the first shape.
        """
        for kernel in kernels:
            start_time = self.runner.now()
            for shape, variant in self._yield_unmeasured_algorithms(kernel, shapes):
                if not self.runner.has_next_step(regime, ALGORITHM_PHASE, end_time):
                    break
                row = yield Step(variant, self.plan.problem, shape, regime, rule, ALGORITHM_PHASE, 0)
                if row is None:
                    break
                self._algorithm_rows.append(row)
            if not kernel.has_cheap_variants:
                self._compiling_seconds += self.runner.now() - start_time

    def _yield_unmeasured_algorithms(
        self, kernel: MatmulKernel, shapes: Sequence[MatmulShape]
    ) -> Iterator[tuple[MatmulShape, MatmulKernel]]:
        """Yield each of these shapes with each of the kernel's algorithms that was not measured on the shape yet."""
        names = self._algorithm_names.setdefault(kernel.name, set())
        for shape in shapes:
            try:
                variants: Sequence[Any] = kernel.list_variants(self.backend, self.plan.problem, shape)
            except Exception:  # The library fails for this shape. The row of the kernel itself will say why.
                variants = (kernel,)
            if self.options.is_quick and (shape != shapes[0] or not kernel.has_cheap_variants):
                variants = variants[: self.max_algorithms_in_quick_search]
            for variant in variants:
                self._kernels_by_name[variant.name] = variant
                names.add(variant.name)
                if not any((row.shape, row.kernel) == (shape, variant.name) for row in self._algorithm_rows):
                    yield shape, variant

    # -- sustained ---------------------------------------------------------------------------------------------------

    def _search_in_sustained_regime(self, burst_rows: Sequence[Measurement]) -> StepGenerator:
        regime, rounds = SustainedRegime(self.backend, SUSTAINED_VISIT_SECONDS), self.schedule.sustained_round_counts
        # Rank candidates by their rounds in the burst regime, because the fastest of many single rows may be fastest by
        # chance.
        chosen = rank_candidates(row for row in burst_rows if row.phase == CHOOSE_PHASE)
        best_candidates = (chosen or find_best_candidate_per_size_pair(burst_rows))[
            : self.sustained_round_candidate_count
        ]
        if rounds.max_choosing_rounds:
            best_candidates = yield from self._measure_candidates_in_sustained_regime(regime, burst_rows)
            if not self._confirmation.has_time_to_confirm():
                rounds = rounds._replace(max_choosing_rounds=0)  # The short visits have already chosen.
        else:
            self._allocate_operands_and_prepare(regime, [shape for shape, _ in best_candidates])
        yield from self._confirmation.run_rounds(
            regime,
            best_candidates,
            rounds,
            self._compute_phase_end(self.schedule.sustained_choose_end_share),
            self._compute_phase_end(1.0),
        )

    def _allocate_operands_and_prepare(self, regime: Regime, shapes: Iterable[MatmulShape]) -> Regime:
        """Allocate operands that are large enough for all these shapes, then prepare the regime and return it."""
        problem, cache = self.plan.problem, self.backend.info.cache_bytes
        self.runner.allocate_largest_operands(
            problem,
            (problem.list_buffers(shape, regime.choose_operand_set_count(problem, shape, cache)) for shape in shapes),
        )
        return self.runner.prepare_regime(regime)

    def _measure_candidates_in_sustained_regime(
        self, regime: Regime, burst_rows: Sequence[Measurement]
    ) -> Generator[Step | Measurement, Measurement | None, list[Candidate]]:
        """Measure each candidate from burst for a short time in the sustained regime, and return the best of them."""
        candidates = find_best_candidate_per_size_pair(burst_rows)[: self.sustained_visit_candidate_count]
        shapes = [shape for shape, _ in candidates]
        longer = [replace(shape, k=k) for shape in shapes for k in choose_long_k_sizes(self.options.grid)]
        self._allocate_operands_and_prepare(
            regime, [*shapes, *(shape for shape in longer if fits_grid(self.options.grid, shape))]
        )
        self.runner.report_phase("sustained: loading the device until it settles, then measuring")
        rule = StoppingRule(self.plan.precision, SUSTAINED_VISIT_SECONDS)
        visits: list[Measurement] = []
        for number, (shape, kernel) in enumerate(self._yield_candidates_and_variants(candidates, visits)):
            end_time = self._compute_phase_end(self.schedule.sustained_visits_end_share)
            if not self.runner.has_next_step(regime, "visit", end_time, is_required=len(visits) < 2):
                break
            step = Step(self._kernels_by_name[kernel], self.plan.problem, shape, regime, rule, "visit", number)
            row = yield from self._confirmation.measure_step(step)
            if row is None:
                break
            visits.append(row)
        best_candidates = choose_candidates_by_visits(visits, self.sustained_round_candidate_count)
        return list(
            dict.fromkeys(
                (*best_candidates, *list_default_kernel_candidates(best_candidates[:1], (), self._default_kernel_name))
            )
        )

    def _yield_candidates_and_variants(
        self, candidates: Sequence[Candidate], visits: Sequence[Measurement]
    ) -> Iterator[Candidate]:
        """Yield the candidates. Then yield variants of the candidate that was best in the ``visits``: with M and N
        exchanged, and with longer K. Variants are equally fast in the burst regime, but differ by up to 1.5 % at the
        power limit.
        """
        yield from candidates
        for shape, kernel in choose_candidates_by_visits(visits, 1):
            exchanged = MatmulShape(shape.n, shape.m, shape.k)
            for other in (exchanged, *(replace(shape, k=k) for k in choose_long_k_sizes(self.options.grid))):
                if fits_grid(self.options.grid, other) and (other, kernel) not in candidates:
                    yield other, kernel


_ROUND_COUNTS_BY_REGIME = {
    BURST: RoundCounts(max_choosing_rounds=4, max_confirming_rounds=7),
    SUSTAINED: RoundCounts(max_choosing_rounds=1, max_confirming_rounds=3),
}
_CANDIDATE_COUNT_BY_REGIME = {BURST: 4, SUSTAINED: 2}
#: _BUDGET_SHARE_FOR_ROWS: the share of the budget in which every row is measured once.
#: _BUDGET_SHARE_BEFORE_LAST_REGIME: the share of the budget by which the last regime begins. It leaves time for
#: sustained, which needs seconds to warm up the device. _TIME_SHARE_FOR_CHOOSING: the share of a problem's time in
#: which a candidate is chosen.
_BUDGET_SHARE_FOR_ROWS, _BUDGET_SHARE_BEFORE_LAST_REGIME, _TIME_SHARE_FOR_CHOOSING = 0.2, 0.45, 0.35


class RowsSearchStrategy(RowsStrategy):
    """The strategy that finds the ceilings of operations other than matmul. It first measures every row of a plan.
    Then, in every regime, it measures the fastest rows of each problem in rounds that choose and separate rounds that
    confirm.
    """

    def __init__(self, setup: RunSetup) -> None:
        # In a resumed run, the rows of rounds are those that have a phase. Let them answer the steps of the rounds. The
        # search chooses the candidates from the other rows.
        super().__init__(setup, replayed_rows=[row for row in setup.rows if row.phase])
        self._confirmation_by_problem: dict[Problem, ConfirmationRounds] = {}

    def yield_steps(self) -> StepGenerator:
        """Yield every step that is not measured yet, then the rounds that choose and confirm the winner."""
        run, remaining_row_keys = self.runner, self.setup.remaining_row_keys
        for number, name in enumerate(self.plan.regimes):
            regime = run.prepare_regime(self.make_regime(name))
            if remaining_row_keys and not number:
                yield from self.measure_rows(regime, remaining_row_keys)
            is_last = number == len(self.plan.regimes) - 1
            budget = math.inf if self.plan.budget_seconds is None else self.plan.budget_seconds
            yield from self._confirm_best_candidates(
                regime, run.start_time + (1.0 if is_last else _BUDGET_SHARE_BEFORE_LAST_REGIME) * budget
            )

    def _confirm_best_candidates(self, regime: Regime, phase_end_time: float) -> StepGenerator:
        """Choose and confirm a candidate for every problem in one regime. Each problem gets an equal part of the time
        until the backend time ``phase_end_time``.
        """
        run, cache = self.runner, self.backend.info.cache_bytes
        deadline = math.inf if run.deadline is None else run.deadline
        kernels = {kernel.name: kernel for kernel in self.kernels.values()}
        for number, problem in enumerate(self.plan.problems):
            candidates = self._find_best_candidates(problem, _CANDIDATE_COUNT_BY_REGIME[regime.name])
            if not candidates:
                continue
            run.allocate_largest_operands(
                problem,
                (
                    problem.list_buffers(shape, regime.choose_operand_set_count(problem, shape, cache))
                    for shape, _ in candidates
                ),
            )
            now = run.now()
            seconds_for_problem = max(phase_end_time - now, 0.0) / (len(self.plan.problems) - number)
            confirmation = self._confirmation_by_problem.setdefault(
                problem,
                ConfirmationRounds(run, problem, kernels, self.plan.precision, random.Random(problem.seed), deadline),
            )
            end_time = now + _TIME_SHARE_FOR_CHOOSING * seconds_for_problem, now + seconds_for_problem
            yield from confirmation.run_rounds(regime, candidates, _ROUND_COUNTS_BY_REGIME[regime.name], *end_time)

    def _find_best_candidates(self, problem: Problem, count: int) -> list[Candidate]:
        """Return the shape and kernel of the ``count`` fastest rows of a problem, fastest first. Skip rows of shapes
        that must not give a ceiling (``Operation.may_be_ceiling``).
        """
        operation, info = get_operation(self.plan.operation), self.backend.info
        rows = [row for row in self.setup.rows if row.problem == problem and not (row.phase or row.is_reference)]
        candidates = (row for row in rows if row.ok and operation.may_be_ceiling(info, problem, row.shape))
        fastest = sorted(candidates, key=lambda row: row.best_rate, reverse=True)
        return list(dict.fromkeys((row.shape, row.kernel) for row in fastest))[:count]

    def make_regime(self, name: str) -> Regime:
        return (
            SustainedRegime(self.backend, SUSTAINED_VISIT_SECONDS) if name == SUSTAINED else super().make_regime(name)
        )

    def make_stopping_rule(self, regime: Regime) -> StoppingRule:
        """Return the rule that stops the measurement of a row. With a short budget, the rule stops early, because a row
        only has to show whether its shape and kernel are worth confirming.
        """
        default_rule = super().make_stopping_rule(regime)
        if self.plan.seconds is not None or self.plan.budget_seconds is None or default_rule.max_seconds is None:
            return default_rule
        seconds_per_row = _BUDGET_SHARE_FOR_ROWS * self.plan.budget_seconds / max(len(self.plan.list_row_keys()), 1)
        return replace(default_rule, max_seconds=min(default_rule.max_seconds, seconds_per_row))
