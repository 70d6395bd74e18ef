"""Finds both matmul ceilings of a device: chooses which shape and kernel to measure next.

- Burst: scout shapes on a coarse grid, refine around the leaders with smaller steps, then measure the candidates in
  interleaved rounds. Shapes and kernels are searched together, because another kernel may be best at shapes where the
  library's default is not.
- Sustained: take candidates from burst, rank them in short visits by energy per FLOP (which sets the speed at the power
  limit), then measure rounds of visits.

Some rounds choose and separate rounds confirm: a measurement that chose a candidate never confirms it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from mamf.ceilings.ceiling import CHOOSE_PHASE, MIN_ROUNDS, Candidate, rank_candidates
from mamf.engine.regimes import Burst, Regime, StoppingRule, Sustained
from mamf.engine.runner import PlanStrategy, Runner, Setup, Step, Steps
from mamf.engine.search.grid import (
    choose_long_k_sizes,
    choose_pace,
    draw_distant_shapes,
    fits_grid,
    list_grid_shapes,
    list_refinement_steps,
    list_shapes_around,
)
from mamf.engine.search.rounds import (
    ConfirmationRounds,
    RoundCounts,
    StepsWithRows,
    choose_finalists,
    find_best_by_shape,
    find_best_per_size_pair,
    list_default_candidates,
)
from mamf.engine.search.search import FIRST_SHAPES, Search, draw_short_shapes
from mamf.engine.strategies.rows import RowsStrategy
from mamf.kernel import Problem
from mamf.measurement import Measurement
from mamf.operations.matmul.shapes import MatmulKernel, MatmulShape, SearchOptions
from mamf.operations.unknown import get_operation
from mamf.plans import ALGORITHM, BURST, DEFAULT_BUDGET_SECONDS, SUSTAINED


class FindStrategy(PlanStrategy):
    """Searches the grid of a plan for its ceilings, and confirms them."""

    #: Seconds of a visit in sustained that chooses.
    visit_seconds: ClassVar[float] = 1.0
    sustained_candidate_count: ClassVar[int] = 3
    #: Shapes anywhere in the grid that a refinement considers in addition to the leaders' neighbors.
    max_distant_shapes: ClassVar[int] = 5000
    #: How many steps away a leader's farthest neighbor is in M and N.
    reach: ClassVar[int] = 4
    sustained_finalist_count: ClassVar[int] = 2
    #: Shapes on which kernels are compared before they join the search.
    trial_shape_count: ClassVar[int] = 2
    #: A shape is short if its FLOP are at most this share of the grid's maximum.
    max_trial_flop_share: ClassVar[float] = 0.25
    #: How much faster another algorithm must be to replace a kernel's first one in the search. In a quick search, also
    #: how much faster than the default another kernel must be to join.
    min_gain: ClassVar[float] = 0.005
    #: Shapes that won before on devices of this model, on which a quick search also tries the kernel that it chose.
    trial_prior_count: ClassVar[int] = 4
    #: The number of algorithms (the most promising first) that a quick search tries if they must be compiled. It also
    #: limits the algorithms tried on each shape after the first.
    max_quick_algorithms: ClassVar[int] = 2

    def __init__(self, setup: Setup) -> None:
        # The rows of an interrupted run are replayed. They also show when each phase ended, which may have been because
        # time ran out.
        super().__init__(setup, replayed=setup.rows)
        kernels: list[MatmulKernel] = setup.kernel_objects
        self.options: SearchOptions = setup.plan.options
        self._seconds = setup.plan.budget_seconds or DEFAULT_BUDGET_SECONDS
        self._default = kernels[0].name
        #: The kernels for which the search compares algorithms. The default kernel is one of them if its algorithms are
        #: cheap to try.
        self._ranked = [*kernels[1:], *(kernel for kernel in kernels[:1] if kernel.has_cheap_variants)]
        self.pace = choose_pace(self.options)
        self._chooser = random.Random(setup.plan.problem.seed)
        self._by_name = {kernel.name: kernel for kernel in kernels}
        self._scouted_rows: list[Measurement] = []
        self._algorithm_rows: list[Measurement] = []
        #: The names of the algorithms that were tried, by kernel.
        self._algorithm_names_by_kernel: dict[str, set[str]] = {}
        self._compiled = 0.0

    def _compute_phase_end(self, share: float) -> float:
        """Return the moment at which a phase ends, from its share of the budget. Without sustained, burst has the whole
        budget. Time for compiling algorithms does not count.
        """
        scale = 1.0 if Sustained.name in self.plan.regimes else 1 / self.pace.burst_end_share
        return self.runner.start_time + self._compiled + share * scale * (self._seconds - self._compiled)

    def yield_steps(self) -> Steps:
        deadline, problem, chooser = self.runner.start_time + self._seconds, self.plan.problem, self._chooser
        self._deadline = deadline
        self._confirmation = ConfirmationRounds(
            self.runner, problem, self._by_name, self.plan.precision, chooser, self.visit_seconds, deadline
        )
        burst: list[Measurement] = []
        if Sustained.name in self.plan.regimes:
            self._confirmation.deadline -= self._confirmation.estimate_confirm_seconds()
        yield from self._search_burst(burst)
        self._confirmation.deadline = deadline
        if Sustained.name in self.plan.regimes:
            yield from self._search_sustained(burst)

    # -- burst -------------------------------------------------------------------------------------------------------

    def _search_burst(self, seen: list[Measurement]) -> Steps:
        problem, shapes = self.plan.problem, list_grid_shapes(self.options.grid)
        self.runner.allocate_largest_operands(problem, (problem.buffers(shape) for shape in shapes))
        regime = self.runner.start_regime(Burst(self.backend))
        units = self.backend.info.compute_units
        first = [*self.options.priors, *draw_short_shapes(shapes, units, self._chooser)]
        search = Search(
            shapes,
            self._default,
            compute_units=units,
            seed=problem.seed,
            first=first,
        )
        self.runner.on_phase("burst: scouting")
        seconds = self.pace.scout_end_share * self._seconds / self.options.scouts
        rule = StoppingRule(max(self.plan.precision, 0.005), min(seconds, 1.0))
        if self._ranked:
            count = min(self.options.scouts, FIRST_SHAPES + len(first))
            yield from self._run_search(
                search, regime, "scout", count, self._compute_phase_end(self.pace.scout_end_share), rule
            )
            yield from self._add_best_kernels(search, regime, rule, self._ranked)
        yield from self._run_search(
            search, regime, "scout", self.options.scouts, self._compute_phase_end(self.pace.scout_end_share), rule
        )
        if not self.options.is_quick:
            yield from self._add_best_kernels(
                search, regime, rule, [each for each in self._ranked if each.has_cheap_variants]
            )
        self.runner.on_phase("burst: refining")
        steps = list_refinement_steps(self.options.grid)
        for number, step in enumerate(steps, start=1):
            best = [shape for shape, _ in search.find_leaders(self.pace.candidates)] or shapes[:1]
            near = list_shapes_around(best, step, self.options.grid, self.reach)
            # The best shape may be far from all leaders: sizes between the coarse steps may fill waves exactly.
            search.set_shapes(
                [*near, *draw_distant_shapes(best, step, self.options.grid, self.max_distant_shapes, self._chooser)]
            )
            share = self.pace.scout_end_share + (self.pace.refine_end_share - self.pace.scout_end_share) * number / len(
                steps
            )
            max_measured = len(search.measured) + self.options.refinements // len(steps)
            yield from self._run_search(search, regime, "refine", max_measured, self._compute_phase_end(share), rule)
        # Scouts cannot rank shapes that differ by less than their precision, so the best of several kinds continue.
        leaders = search.find_leaders(self.pace.candidates)
        kinds = find_best_per_size_pair(self._scouted_rows)[: self.pace.candidates // 2]
        candidates = list(dict.fromkeys((*kinds, *leaders)))[: self.pace.candidates]
        self.runner.on_phase("burst: choosing algorithms")
        shapes = list(dict.fromkeys(shape for shape, _ in candidates[: self.pace.algorithm_shapes]))
        until = self._compute_phase_end(self.pace.choose_end_share) if self.options.is_quick else self._deadline
        yield from self._try_algorithms(regime, shapes, rule, self._ranked, until)
        candidates += find_best_by_shape(row for row in self._algorithm_rows if row.shape in shapes)
        measured = [*self._scouted_rows, *self._algorithm_rows]
        candidates += list_default_candidates(candidates, measured, self._default)
        confirming = yield from self._run_rounds(
            regime,
            list(dict.fromkeys(candidates)),
            self.pace.burst_rounds,
            self.pace.choose_end_share,
            self.pace.burst_end_share,
        )
        seen += [*measured, *confirming]

    def _run_search(
        self, search: Search, regime: Regime, phase: str, max_measured: int, until: float, rule: StoppingRule
    ) -> Steps:
        while len(search.measured) < max_measured and self.runner.has_next_step(
            regime, phase, until, is_due=len(search.measured) < MIN_ROUNDS
        ):
            proposed = search.propose()
            if proposed is None:
                return
            shape, kernel = proposed
            row = yield Step(self._by_name[kernel], self.plan.problem, shape, regime, rule, phase, len(search.measured))
            if row is None:
                return
            search.record((row.shape, row.kernel), row.best_rate if row.ok else float("nan"))
            self._scouted_rows.append(row)

    def _add_best_kernels(
        self, search: Search, regime: Regime, rule: StoppingRule, kernels: Sequence[MatmulKernel]
    ) -> Steps:
        """Compare kernels on the best shapes so far. Each joins the search with the algorithms that were best there, or
        with only the best one if algorithms must be compiled. A quick search compares on short shapes and continues
        with the best kernel only.
        """
        if not kernels:
            return
        best_first = [shape for shape, _ in find_best_per_size_pair(self._scouted_rows)]
        if self.options.is_quick:
            limit = self.max_trial_flop_share * self.options.grid.most_flop
            best_first.sort(key=lambda shape: shape.flop > limit)
        shapes = best_first[: self.trial_shape_count]
        yield from self._try_algorithms(regime, shapes, rule, kernels, self._deadline)
        tried = [row for row in self._algorithm_rows if row.ok and row.shape in shapes]
        if self.options.is_quick:
            self._ranked = kernels = self._choose_best_kernel(tried, shapes)
            # The default kernel's best shapes are rarely the best ones of another kernel, so try that kernel on the
            # priors too.
            shapes = list(dict.fromkeys((*shapes, *self.options.priors[: self.trial_prior_count])))
            cheap = [kernel for kernel in kernels if kernel.has_cheap_variants]
            yield from self._try_algorithms(regime, shapes, rule, cheap, self._deadline)
            tried = [row for row in self._algorithm_rows if row.ok and row.shape in shapes]
        for kernel in kernels:
            best = self._rank_algorithms(kernel, tried)
            for name in best if kernel.has_cheap_variants else best[:1]:
                if name not in search.kernels:
                    search.add_kernel(name)
        for row in tried:
            if row.kernel in search.kernels and (row.shape, row.kernel) not in search.measured:
                search.record((row.shape, row.kernel), row.best_rate)

    def _choose_best_kernel(self, tried: Sequence[Measurement], shapes: Sequence[MatmulShape]) -> list[MatmulKernel]:
        """Return the fastest kernel on these shapes, in a list; empty if it is not clearly faster than the default."""
        default = (row for row in self._scouted_rows if row.ok and row.kernel == self._default and row.shape in shapes)
        to_beat = (1 + self.min_gain) * max((row.best_rate for row in default), default=0.0)
        best = max(tried, key=lambda row: row.best_rate, default=None)
        if best is None or best.best_rate < to_beat:
            return []
        return [kernel for kernel in self._ranked if best.kernel in self._algorithm_names_by_kernel[kernel.name]]

    def _rank_algorithms(self, kernel: MatmulKernel, tried: Sequence[Measurement]) -> list[str]:
        """Return a kernel's best algorithm on each shape, fastest first. This is its first algorithm unless another one
        is clearly faster. A quick search adds the first one in any case, because the best algorithm on these few shapes
        is rarely the best elsewhere.
        """
        best: list[Measurement] = []
        for shape in dict.fromkeys(row.shape for row in tried):
            if rows := [
                row
                for row in tried
                if row.shape == shape and row.kernel in self._algorithm_names_by_kernel[kernel.name]
            ]:
                fastest = max(rows, key=lambda row: row.best_rate)
                best.append(fastest if fastest.best_rate >= (1 + self.min_gain) * rows[0].best_rate else rows[0])
        found = [row.kernel for row in sorted(best, key=lambda row: row.best_rate, reverse=True)]
        if self.options.is_quick and best:
            found.append(
                next(row.kernel for row in tried if row.kernel in self._algorithm_names_by_kernel[kernel.name])
            )
        return list(dict.fromkeys(found))

    def _try_algorithms(
        self,
        regime: Regime,
        shapes: Sequence[MatmulShape],
        rule: StoppingRule,
        kernels: Sequence[MatmulKernel],
        until: float,
    ) -> Steps:
        """Measure every algorithm of these kernels on these shapes. A quick search measures all algorithms of a kernel
        only on the first shape.
        """
        for kernel in kernels:
            begun = self.runner.now()
            yield from self._measure_algorithms(regime, shapes, rule, kernel, until)
            if not kernel.has_cheap_variants:
                self._compiled += self.runner.now() - begun

    def _measure_algorithms(
        self, regime: Regime, shapes: Sequence[MatmulShape], rule: StoppingRule, kernel: MatmulKernel, until: float
    ) -> Steps:
        names = self._algorithm_names_by_kernel.setdefault(kernel.name, set())
        for shape in shapes:
            variants = self._list_variants(kernel, shape)
            if self.options.is_quick and shape != shapes[0]:
                variants = variants[: self.max_quick_algorithms]
            for variant in variants:
                self._by_name[variant.name] = variant
                names.add(variant.name)
                if any((row.shape, row.kernel) == (shape, variant.name) for row in self._algorithm_rows):
                    continue
                if not self.runner.has_next_step(regime, ALGORITHM, until):
                    return
                row = yield Step(variant, self.plan.problem, shape, regime, rule, ALGORITHM, 0)
                if row is None:
                    return
                self._algorithm_rows.append(row)

    def _list_variants(self, kernel: MatmulKernel, shape: MatmulShape) -> Sequence[MatmulKernel]:
        try:
            found = kernel.variants(self.backend, self.plan.problem, shape)
            compiles = self.options.is_quick and not kernel.has_cheap_variants
            return found[: self.max_quick_algorithms] if compiles else found
        except Exception:  # the library fails for this shape: measuring the kernel will give the reason
            return (kernel,)

    # -- sustained ---------------------------------------------------------------------------------------------------

    def _search_sustained(self, burst: Sequence[Measurement]) -> Steps:
        regime, rounds = Sustained(self.backend, self.visit_seconds), self.pace.sustained_rounds
        # Rank by the rounds of burst: if single rows are noisy, the fastest row is merely the luckiest.
        chosen = rank_candidates(row for row in burst if row.phase == CHOOSE_PHASE)
        finalists = (chosen or find_best_per_size_pair(burst))[: self.sustained_finalist_count]
        if self.pace.has_choosing_visits:
            finalists = yield from self._visit_candidates(regime, burst)
            if not self._confirmation.has_time_to_confirm():
                rounds = rounds._replace(choosing=0)  # the visits have chosen
        else:
            self._start_regime(regime, [shape for shape, _ in finalists])
        yield from self._run_rounds(regime, finalists, rounds, self.pace.chosen_end_share, 1.0)

    def _start_regime(self, regime: Regime, shapes: Iterable[MatmulShape]) -> None:
        """Allocate operands for all these shapes, then start the regime."""
        problem, cache = self.plan.problem, self.backend.info.cache_bytes
        self.runner.allocate_largest_operands(
            problem, (problem.buffers(shape, regime.count_sets(problem, shape, cache)) for shape in shapes)
        )
        self.runner.start_regime(regime)

    def _visit_candidates(
        self, regime: Regime, burst: Sequence[Measurement]
    ) -> Generator[Step | Measurement, Measurement | None, list[Candidate]]:
        """Make short visits to candidates, and return the best of them."""
        candidates = find_best_per_size_pair(burst)[: self.sustained_candidate_count]
        shapes = [shape for shape, _ in candidates]
        longer = [replace(shape, k=k) for shape in shapes for k in choose_long_k_sizes(self.options.grid)]
        self._start_regime(regime, [*shapes, *(shape for shape in longer if fits_grid(self.options.grid, shape))])
        self.runner.on_phase("sustained: soaking, then visiting")
        rule, until = (
            StoppingRule(self.plan.precision, self.visit_seconds),
            self._compute_phase_end(self.pace.visit_end_share),
        )
        visits: list[Measurement] = []
        for number, (shape, kernel) in enumerate(self._iterate_candidates(candidates, visits)):
            if not self.runner.has_next_step(regime, "visit", until, is_due=len(visits) < 2):
                break
            step = Step(self._by_name[kernel], self.plan.problem, shape, regime, rule, "visit", number)
            row = yield from self._confirmation.measure_step(step)
            if row is None:
                break
            visits.append(row)
        finalists = choose_finalists(visits, self.sustained_finalist_count)
        return list(dict.fromkeys((*finalists, *list_default_candidates(finalists[:1], (), self._default))))

    def _iterate_candidates(
        self, candidates: Sequence[Candidate], visits: Sequence[Measurement]
    ) -> Iterator[Candidate]:
        """Yield the candidates, then the best of them with M and N exchanged and with longer K. These tie in burst, but
        differ by up to 1.5 % at the power limit.
        """
        yield from candidates
        for shape, kernel in choose_finalists(visits, 1):
            exchanged = MatmulShape(shape.n, shape.m, shape.k)
            for other in (exchanged, *(replace(shape, k=k) for k in choose_long_k_sizes(self.options.grid))):
                if fits_grid(self.options.grid, other) and (other, kernel) not in candidates:
                    yield other, kernel

    def _run_rounds(
        self,
        regime: Regime,
        candidates: Sequence[Candidate],
        counts: RoundCounts,
        chosen_by: float,
        confirmed_by: float,
    ) -> StepsWithRows:
        """Run rounds that choose and rounds that confirm, each until its share of the budget has passed."""
        return self._confirmation.run_rounds(
            regime, candidates, counts, self._compute_phase_end(chosen_by), self._compute_phase_end(confirmed_by)
        )


_ROUNDS = {BURST: RoundCounts(choosing=4, confirming=7), SUSTAINED: RoundCounts(choosing=1, confirming=3)}
_CANDIDATES = {BURST: 4, SUSTAINED: 2}
_VISIT_SECONDS = 1.0
#: The share of the budget for measuring every row once; the share after which all regimes except the last have ended (a
#: soak takes long); and the share of a problem's time for choosing.
_SHARE_OF_ROWS, _SHARE_BEFORE_LAST, _SHARE_OF_CHOOSING = 0.2, 0.45, 0.35


class KernelsFindStrategy(RowsStrategy):
    """Measures every row of a plan, then takes the best ones of each problem through rounds that choose and separate
    rounds that confirm, in every regime.
    """

    def __init__(self, setup: Setup) -> None:
        # Rows with a phase answer the same steps again. Rows without a phase give the candidates.
        super().__init__(setup, replayed=[row for row in setup.rows if row.phase])
        self._confirmations: dict[Problem, ConfirmationRounds] = {}

    def yield_steps(self) -> Steps:
        """Measure every step that no row answers yet, then choose and confirm."""
        run, left = self.runner, self.setup.remaining_steps
        for number, name in enumerate(self.plan.regimes):
            regime = run.start_regime(self.make_regime(name))
            if left and not number:
                yield from self.measure_rows(regime, left)
            is_last = number == len(self.plan.regimes) - 1
            yield from self._confirm_problems(
                run, regime, self._compute_end_time(run, 1.0 if is_last else _SHARE_BEFORE_LAST)
            )

    def _compute_end_time(self, run: Runner, share: float) -> float:
        """Return the moment at which this share of the budget has passed."""
        return math.inf if self.plan.budget_seconds is None else run.start_time + share * self.plan.budget_seconds

    def _confirm_problems(self, run: Runner, regime: Regime, end: float) -> Steps:
        """Choose and confirm for every problem in one regime; the time until ``end`` is divided among them."""
        cache = self.backend.info.cache_bytes
        for number, problem in enumerate(self.plan.problems):
            candidates = self._find_best_candidates(problem, _CANDIDATES[regime.name])
            if not candidates:
                continue
            shapes = [shape for shape, _ in candidates]
            run.allocate_largest_operands(
                problem, (problem.buffers(shape, regime.count_sets(problem, shape, cache)) for shape in shapes)
            )
            now = run.now()
            part = max(end - now, 0.0) / (len(self.plan.problems) - number)
            confirmation = self._get_confirmation(run, problem)
            until = now + _SHARE_OF_CHOOSING * part, now + part
            yield from confirmation.run_rounds(regime, candidates, _ROUNDS[regime.name], *until)

    def _find_best_candidates(self, problem: Problem, count: int) -> list[Candidate]:
        """Return the fastest rows of a problem that may be a ceiling."""
        of, info = get_operation(self.plan.operation), self.backend.info
        rows = [row for row in self.setup.rows if row.problem == problem and not (row.phase or row.is_reference)]
        own = (row for row in rows if row.ok and of.may_be_ceiling(info, problem, row.shape))
        fastest = sorted(own, key=lambda row: row.best_rate, reverse=True)
        return list(dict.fromkeys((row.shape, row.kernel) for row in fastest))[:count]

    def _get_confirmation(self, run: Runner, problem: Problem) -> ConfirmationRounds:
        if problem not in self._confirmations:
            deadline = math.inf if run.deadline is None else run.deadline
            kernels = {kernel.name: kernel for kernel in self.kernels.values()}
            self._confirmations[problem] = ConfirmationRounds(
                run, problem, kernels, self.plan.precision, random.Random(problem.seed), _VISIT_SECONDS, deadline
            )
        return self._confirmations[problem]

    def make_regime(self, name: str) -> Regime:
        return Sustained(self.backend, _VISIT_SECONDS) if name == SUSTAINED else super().make_regime(name)

    def make_rule(self, regime: Regime) -> StoppingRule:
        """Return a rule that stops a row early if the budget is short, because the row only has to show whether it is
        worth confirming.
        """
        usual = super().make_rule(regime)
        if self.plan.seconds is not None or self.plan.budget_seconds is None or usual.seconds is None:
            return usual
        part = _SHARE_OF_ROWS * self.plan.budget_seconds / max(len(self.plan.steps()), 1)
        return replace(usual, seconds=min(usual.seconds, part))
