"""Both ceilings of a device in about a minute: search, confirmation, and a proof in the log.

Burst: scouts on a coarse grid, finer steps around the leaders, then rounds of fresh measurements, interleaved over the
candidates. Sustained: candidates from burst and fat shapes, short visits ranked by energy per FLOP (at its power limit
a device is as fast as it is frugal), then rounds of full visits. What chose a candidate never confirms it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from mamf.backend import Backend
from mamf.candidates import best_by_shape, best_of_their_kind, frugal_and_fast, not_beaten
from mamf.ceiling import FEWEST_ROUNDS, Candidate, Ceiling, confirmed, figures, median_tflops
from mamf.errors import DeviceError, first_line
from mamf.finding_plan import FindPlan, Shares, along_k, anywhere, around, refinement_steps
from mamf.kernel import Buffer, MatmulKernel
from mamf.measure import Measurement, cut_short, measure
from mamf.peaks import fastest_possible_flops
from mamf.regimes import Burst, Regime, StoppingRule, Sustained
from mamf.search import Search
from mamf.shapes import MatmulShape

_PHASES = ("scout", "refine", "algorithm", "confirm")


@dataclass
class Find:
    """One run of a plan on an opened backend. ``results`` yields every measurement; ``ceilings`` fills as it goes.

    ``held`` are the rows of an interrupted run: the search is repeated with them in place of measuring, and so goes on
    where it was. ``kernels`` are those of the plan.
    """

    plan: FindPlan
    kernels: Sequence[MatmulKernel]
    backend: Backend
    held: Collection[Measurement] = ()
    on_phase: Callable[[str], None] = lambda text: None
    ceilings: dict[str, Ceiling] = field(default_factory=dict, init=False)
    left_out: int = field(default=0, init=False)

    burst_rounds: ClassVar[int] = 9
    sustained_rounds: ClassVar[int] = 6
    burst_candidates: ClassVar[int] = 8
    sustained_candidates: ClassVar[int] = 3
    fat_candidates: ClassVar[int] = 1
    #: Shapes of a finer step that a refinement considers beside the leaders' neighbours.
    fine_shapes: ClassVar[int] = 5000
    sustained_finalists: ClassVar[int] = 2
    algorithm_shapes: ClassVar[int] = 3
    #: A candidate this far below the leader after FEWEST_ROUNDS is not measured again.
    hopeless: ClassVar[float] = 0.005
    short_visit_seconds: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        self._held = {_key(row): row for row in self.held}
        self._by_name = {kernel.name: kernel for kernel in self.kernels}
        self._limit = fastest_possible_flops(self.backend.info, self.plan.problem.dtype)
        self._scouted: list[Measurement] = []
        self._chooser = random.Random(self.plan.problem.seed)

    def results(self) -> Iterator[Measurement]:
        """Search and confirm. Breaking off loses the measurement in flight; ``ceilings`` holds what is confirmed."""
        self._begun = self.backend.now()
        self._pool = self.backend.operand_pool(self.plan.problem.data, self.plan.problem.seed)
        try:
            burst: list[Measurement] = []
            for row in self._burst():
                burst.append(row)
                yield row
            if Sustained.name in self.plan.regimes:
                yield from self._sustained(burst)
        finally:
            self._pool.release()

    # -- burst -------------------------------------------------------------------------------------------------------

    def _burst(self) -> Iterator[Measurement]:
        self._reserve(self.plan.problem.buffers(shape) for shape in self.plan.grid.shapes())
        regime = self._started(Burst(self.backend))
        units = self.backend.info.compute_units
        search = Search(self.plan.grid.shapes(), compute_units=units, seed=self.plan.problem.seed)
        default = self.kernels[0]
        self.on_phase("burst: scouting")
        seconds = Shares.scout * self.plan.budget_seconds / self.plan.scouts
        yield from self._search(search, regime, default, "scout", self.plan.scouts, self._until(Shares.scout), seconds)
        self._fat = [(shape, default.name) for shape in search.promising(self.fat_candidates, self._is_fat)]
        self.on_phase("burst: refining")
        steps = refinement_steps(self.plan.grid)
        for number, step in enumerate(steps, start=1):
            near = around(search.leaders(self.burst_candidates), step, self.plan.grid)
            # The best may be far from all leaders: a size of no multiple of the coarse step can fill waves exactly.
            search.consider([*near, *anywhere(self.plan.grid, step, self.fine_shapes, self._chooser)])
            share = Shares.scout + (Shares.refine - Shares.scout) * number / len(steps)
            most = len(search.measured) + self.plan.refinements // len(steps)
            yield from self._search(search, regime, default, "refine", most, self._until(share), seconds)
        # Scouts cannot tell kinds apart that lie closer than their own precision: the best of several are confirmed.
        leaders = [(shape, default.name) for shape in search.leaders(self.burst_candidates)]
        kinds = best_of_their_kind(self._scouted)[: self.burst_candidates // 2]
        candidates = list(dict.fromkeys((*kinds, *leaders)))[: self.burst_candidates]
        self.on_phase("burst: choosing algorithms")
        algorithms: list[Measurement] = []
        for row in self._try_algorithms(regime, [shape for shape, _ in candidates[: self.algorithm_shapes]], seconds):
            algorithms.append(row)
            yield row
        self.on_phase("burst: confirming")
        candidates += best_by_shape(algorithms)
        yield from self._rounds(regime, candidates, self.burst_rounds, self._until(Shares.burst))

    def _search(
        self, search: Search, regime: Regime, kernel: MatmulKernel, phase: str, most: int, until: float, seconds: float
    ) -> Iterator[Measurement]:
        rule = StoppingRule(max(self.plan.precision, 0.005), min(seconds, 1.0), deadline=self._deadline)
        while len(search.measured) < most and (self.backend.now() < until or len(search.measured) < FEWEST_ROUNDS):
            shape = search.propose()
            if shape is None or self._is_over():
                return
            if self._had_ended(regime, phase, len(search.measured), shape):
                return
            row = self._take(regime, kernel, shape, phase, len(search.measured), rule)
            search.tell(shape, row.best_tflops if row.ok else float("nan"))
            self._scouted.append(row)
            yield row

    def _try_algorithms(self, regime: Regime, shapes: Iterable[MatmulShape], seconds: float) -> Iterator[Measurement]:
        """Every other kernel, in each of its algorithms, on the leaders' shapes."""
        rule = StoppingRule(max(self.plan.precision, 0.005), min(seconds, 1.0), deadline=self._deadline)
        for kernel in self.kernels[1:]:
            for shape in shapes:
                for variant in self._variants(kernel, shape):
                    if self._is_over():
                        return
                    self._by_name[variant.name] = variant
                    yield self._take(regime, variant, shape, "algorithm", 0, rule)

    def _variants(self, kernel: MatmulKernel, shape: MatmulShape) -> Sequence[MatmulKernel]:
        try:
            return kernel.variants(self.backend, self.plan.problem, shape)
        except Exception:  # the library's own trouble with a shape: measuring the kernel will say what it is
            return (kernel,)

    # -- sustained ---------------------------------------------------------------------------------------------------

    def _sustained(self, burst: Sequence[Measurement]) -> Iterator[Measurement]:
        candidates = list(dict.fromkeys((*best_of_their_kind(burst)[: self.sustained_candidates], *self._fat)))
        regime = Sustained(self.backend, self.short_visit_seconds)
        problem, cache = self.plan.problem, self.backend.info.cache_bytes
        longest = [replace(shape, k=max(self.plan.grid.k)) for shape, _ in candidates[: self.sustained_candidates]]
        shapes = [*longest, *(shape for shape, _ in candidates)]
        self._reserve(problem.buffers(shape, regime.sets(problem, shape, cache)) for shape in shapes)
        self.on_phase("sustained: soaking, then visiting")
        self._started(regime)
        rule = StoppingRule(self.plan.precision, self.short_visit_seconds, deadline=self._deadline)
        visits: list[Measurement] = []
        until = self._until(Shares.visit)
        for number, (shape, kernel) in enumerate(self._visited(candidates, visits)):
            if self._is_over() or (self.backend.now() > until and len(visits) >= 2):
                break
            row = self._take(regime, self._by_name[kernel], shape, "visit", number, rule)
            if self._is_cut_short(row):
                break
            visits.append(row)
            yield row
        regime.visit_seconds = Sustained.shortest_seconds
        self.on_phase("sustained: confirming")
        finalists = frugal_and_fast(visits, self.sustained_finalists)
        yield from self._rounds(regime, finalists, self.sustained_rounds, self._deadline)

    def _visited(self, candidates: Sequence[Candidate], visits: Sequence[Measurement]) -> Iterator[Candidate]:
        """The candidates, then the best of them with M and N exchanged and at other lengths of K: ties in burst, but
        up to 1.5 % apart at the power limit.
        """
        yield from candidates
        for shape, kernel in frugal_and_fast(visits, 1):
            exchanged = MatmulShape(shape.n, shape.m, shape.k)
            for other in (exchanged, *(replace(shape, k=k) for k in along_k(self.plan.grid))):
                if self.plan.grid.accepts(other) and (other, kernel) not in candidates:
                    yield other, kernel

    def _is_cut_short(self, row: Measurement) -> bool:
        return cut_short(row, self._deadline, self.backend)

    def _is_fat(self, shape: MatmulShape) -> bool:
        """Large in every dimension: such shapes do most work per byte, and so per joule."""
        return min(shape.m, shape.n, shape.k) >= 0.35 * max(self.plan.grid.m)

    # -- confirming --------------------------------------------------------------------------------------------------

    def _rounds(
        self, regime: Regime, candidates: Sequence[Candidate], most: int, until: float
    ) -> Iterator[Measurement]:
        """Fresh measurements in interleaved rounds; what is clearly beaten drops out after FEWEST_ROUNDS."""
        rows: list[Measurement] = []
        left = list(candidates)
        precision = StoppingRule(self.plan.precision, deadline=self._deadline)
        begun = self.backend.now()
        for number in range(1, most + 1):
            if not left or (number > FEWEST_ROUNDS and self.backend.now() >= until):
                break
            limit = max(0.05, (until - self.backend.now()) / (most + 1 - number) / len(left))
            longest = self.short_visit_seconds * 2 if regime.name == Sustained.name else min(limit, 1.0)
            for shape, kernel in self._chooser.sample(left, len(left)):
                if self._is_over():
                    break
                rule = replace(precision, seconds=longest)
                row = self._take(regime, self._by_name[kernel], shape, "confirm", number, rule)
                if self._is_cut_short(row):
                    break
                rows.append(row)
                yield row
            self._confirm(regime.name, rows)
            if self._is_over():  # within the round: some candidates have no row in it
                break
            left = not_beaten(rows, left, self.hopeless if number >= FEWEST_ROUNDS else 1.0)
            if number < FEWEST_ROUNDS:
                left = self._affordable(rows, left, (self.backend.now() - begun) / len(rows), FEWEST_ROUNDS - number)

    def _affordable(
        self, rows: Sequence[Measurement], left: Sequence[Candidate], seconds_each: float, rounds: int
    ) -> list[Candidate]:
        """The best so far, as many as the budget still lets have so many rounds: a slow device confirms few."""
        count = int((self._deadline - self.backend.now()) / max(seconds_each, 1e-9) / rounds)
        found = figures(rows)
        best_first = sorted(left, key=lambda each: median_tflops(found[each].values()), reverse=True)
        return best_first[: max(1, count)]

    def _confirm(self, regime: str, rows: Sequence[Measurement]) -> None:
        info = self.backend.info
        found = confirmed(rows, info.name, info.uuid_hash, self.kernels[0].name)
        if found is not None:
            self.ceilings[regime] = found

    def _had_ended(self, regime: Regime, phase: str, number: int, shape: MatmulShape) -> bool:
        """Whether the interrupted run had gone on to something else here: its time was up, and repeating costs none."""
        there = [row for row in self.held if (row.regime, row.phase, row.round) == (regime.name, phase, number)]
        if there:
            return shape not in {row.shape for row in there}
        later = _PHASES[_PHASES.index(phase) + 1 :]
        return any(row.regime != regime.name or row.phase in later for row in self.held)

    # -- measuring ---------------------------------------------------------------------------------------------------

    def _take(
        self, regime: Regime, kernel: MatmulKernel, shape: MatmulShape, phase: str, number: int, rule: StoppingRule
    ) -> Measurement:
        held = self._held.get((regime.name, phase, number, kernel.name, shape))
        if held is not None:
            return held
        row = measure(kernel, self.plan.problem, shape, regime, self._pool, rule, self._limit)
        return replace(row, phase=phase, round=number)

    def _started(self, regime: Regime) -> Regime:
        try:
            regime.start()
        except Exception as error:
            raise DeviceError(f"the device failed before the first shape: {first_line(error)}") from error
        return regime

    def _reserve(self, needed: Iterable[Mapping[str, Buffer]]) -> None:
        """One buffer per operand, large enough for all: growing it between visits would let the device go cold."""
        self.on_phase("allocating operands")
        largest: dict[str, Buffer] = {}
        for buffers in needed:
            for name, buffer in buffers.items():
                largest[name] = max(buffer, largest.get(name, buffer))
        try:
            for name, buffer in largest.items():
                self._pool.take(name, *buffer, fill=name != "c")
        except Exception as error:
            if not self.backend.is_out_of_memory(error):
                raise DeviceError(f"the device failed while allocating: {first_line(error)}") from error
            self._pool.release()
            self.backend.release_memory()

    @property
    def _deadline(self) -> float:
        return self._begun + self.plan.budget_seconds

    def _until(self, share: float) -> float:
        """The moment by which a phase ends; burst alone has the whole budget."""
        scale = 1.0 if Sustained.name in self.plan.regimes else 1 / Shares.burst
        return self._begun + share * scale * self.plan.budget_seconds

    def _is_over(self) -> bool:
        if self.backend.now() >= self._deadline:
            self.left_out = 1
        return bool(self.left_out)


def _key(row: Measurement) -> tuple[str, str, int, str, MatmulShape]:
    return row.regime, row.phase, row.round, row.kernel, row.shape
