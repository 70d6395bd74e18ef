"""Products beside other work: the rate of each alone, and of each while both run.

Both works are queued back to back, each in its own queue, in blocks that take equally long. Marks stand between the
blocks. Only blocks that lie within the time in which both queues were at work count, so a rate is never a mean over a
part in which one ran alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

from mamf.backend import Backend
from mamf.engine.measure import classify_error, judged
from mamf.engine.regimes import Samples, StoppingRule, Sustained
from mamf.engine.regimes.checking import Checked, WrongResultError, refuse_unseen_work
from mamf.engine.runner import Step, failed_row
from mamf.errors import UnsupportedError, plugin_errors
from mamf.kernel import Verdict
from mamf.measurement import Measurement, Status
from mamf.operations.overlap.operation import OTHER, PRODUCTS, OverlapProblem, OverlapShape, Pair
from mamf.plans import StepKey

_NEVER = "the two works never ran at the same time: the host queues launches this short too slowly"
AnswerT = TypeVar("AnswerT")
#: The rows of a pair: what is timed, and whether it is alone.
ROWS = ((PRODUCTS, True), (OTHER, True), (PRODUCTS, False), (OTHER, False))
#: Visits alternate this many times between the two works and both, so that all three see the device drift alike.
_ROUNDS = 3
#: Seconds that are measured of each row in all rounds; each visit settles for as long as it measures.
DEFAULT_SECONDS = 0.9
_BLOCKS, _WINDOW_SECONDS = 16, 0.05
#: Blocks by which the host queues the other work ahead of the products: a host's own queue is the host.
_AHEAD = 4
#: Flushes ahead of a window, while the host queues its first blocks, and launches of a window of short ones.
_FLUSHES, _MOST_SHORT = 128, 320
#: The host must be ahead by as much at each mark: else the device waited for it.
_LEAST_AHEAD_SECONDS = 20e-6
_FEWEST_MARKS = 2
#: What is timed of a pair, and whether it is alone.
Row = tuple[str, bool]
#: The problem of any row of a pair, and its shape.
Cell = tuple[OverlapProblem, OverlapShape]


def row_of(problem: OverlapProblem, row: Row) -> OverlapProblem:
    return replace(problem, timed=row[0], alone=row[1])


def cells_of(steps: Iterable[StepKey]) -> list[Cell]:
    """The pairs that these steps are of."""
    return list(dict.fromkeys((row_of(problem, ROWS[0]), shape) for _, problem, shape, _ in steps))


def overlapping(marks: Sequence[Sequence[float]], launches: Sequence[int]) -> list[float] | None:
    """Seconds a launch of each work, from the blocks that lie between the later start and the earlier end of all;
    ``launches``: of a block. None if a work has no block there.
    """
    begin, end = max(each[0] for each in marks), min(each[-1] for each in marks)
    within = [[mark for mark in each if begin <= mark <= end] for each in marks]
    if any(len(each) < _FEWEST_MARKS for each in within):
        return None
    return [(each[-1] - each[0]) / ((len(each) - 1) * count) for each, count in zip(within, launches, strict=True)]


@dataclass
class Overlapping:
    """``kernel``: of the pairs. ``seconds``: to measure of each row. ``budget_seconds``: after which no pair begins.
    ``agree``: gives a decision of rank 0 to every rank; ``worst``: the largest number of all ranks.
    """

    backend: Backend
    kernel: Pair
    cells: Sequence[Cell]
    seconds: float = DEFAULT_SECONDS
    budget_seconds: float = math.inf
    on_phase: Callable[[str], None] = lambda text: None
    agree: Callable[[float], float] = lambda own: own
    worst: Callable[[float], float] = lambda own: own
    left_out: int = field(default=0, init=False)

    def results(self) -> Iterator[Measurement]:
        """Four rows of each pair, in the order of ROWS."""
        begun = self.backend.now()
        for index, (problem, shape) in enumerate(self.cells):
            if index and self.agree(self.backend.now() - begun >= self.budget_seconds):
                self.left_out = len(ROWS) * (len(self.cells) - index)
                return
            self.on_phase(f"{problem.other} {shape}")
            yield from self._rows(problem, shape)

    def _rows(self, problem: OverlapProblem, shape: OverlapShape) -> Iterator[Measurement]:
        status: Status
        try:
            with self.kernel.settings(self.backend, replace(problem, timed=PRODUCTS)):
                pair = _Pair(self, problem, shape)
                pair.measure()
        except WrongResultError as error:
            status, reason = "wrong_result", str(error)
        except plugin_errors() as error:
            status, reason = classify_error(error, self.kernel, self.backend)
        else:
            yield from map(pair.row, ROWS)
            return
        self.backend.release_memory()
        for row in ROWS:
            step = Step(self.kernel, row_of(problem, row), shape, Sustained(self.backend), StoppingRule())
            yield replace(failed_row(step), status=status, reason=reason)


@dataclass
class _Work:
    """One of the two works, in its queue. ``seconds``: the latest of a launch, for the length of blocks."""

    checked: Checked
    put: Callable[[Callable[[], object]], object]
    mark: Callable[[], Any]
    seconds: float = 0.0
    launched: int = 0
    marks: list[Any] = field(default_factory=list)
    queued: list[float] = field(default_factory=list)

    def block(self, launches: int, now: Callable[[], float]) -> None:
        """Queue launches between two marks, of which the first is that of the block before. ``now``: the host's."""
        if not self.marks:
            self._mark(now)
        for _ in range(launches):
            self.put(self.checked.launches[self.launched % len(self.checked.launches)])
            self.launched += 1
        self._mark(now)

    def _mark(self, now: Callable[[], float]) -> None:
        self.marks.append(self.mark())
        self.queued.append(now())


class _Pair:
    """The two works of a pair, prepared, and what was measured of them. Raises what their kernels do."""

    def __init__(self, run: Overlapping, problem: OverlapProblem, shape: OverlapShape) -> None:
        self.run, self.problem, self.shape = run, problem, shape
        self.regime, backend, queue = Sustained(run.backend), run.backend, run.backend.second_queue()
        if queue is None:
            raise UnsupportedError(str(run.kernel.unavailable(backend)))
        self.queue = queue
        self.works: dict[str, _Work] = {}
        self.names: list[str] = []
        self.flushes = 0 if backend.timer == "host clock" else _FLUSHES
        for row, calls in zip(ROWS, ((self._launch, backend.mark), (queue.launch, queue.mark)), strict=False):
            own = row_of(problem, row)
            if reason := run.kernel.unsupported(backend, own):
                raise UnsupportedError(reason)
            sets = self.regime.sets(own, shape, backend.info.cache_bytes)
            pool = backend.operand_pool(own.data, own.seed)
            checked = Checked(self._agreed(partial(run.kernel.prepare, backend, own, shape, pool, sets)))
            self.works[own.timed] = _Work(checked, *calls)
            self.names.append(run.kernel.of(backend, own).name)
        self.samples = {row: Samples() for row in ROWS}

    def _launch(self, launch: Callable[[], object]) -> None:
        launch()
        self.run.backend.submit()

    def measure(self) -> None:
        for work in self.works.values():
            work.seconds = self._agreed(partial(work.checked.rehearse, self.run.backend))
        for _ in range(_ROUNDS):
            for timed in ((PRODUCTS,), (OTHER,), (PRODUCTS, OTHER)):
                self._visit(timed)
                self._verify(timed)
        self._window(tuple(self.works), (1, 1))  # so few launches that even a sum of sums can be told from a wrong one
        self._verify(tuple(self.works), whole=True)

    def _agreed(self, call: Callable[[], AnswerT]) -> AnswerT:
        """The answer of a call that fails on all ranks if it fails on any. Raises what it raises."""
        answer: AnswerT | None = None
        error: Exception | None = None
        try:
            answer = call()
        except Exception as failed:
            error = failed
        if self.run.worst(float(error is not None)):
            raise error or WrongResultError(Verdict(math.inf, 0.0, reason="another rank failed"))
        return cast(AnswerT, answer)

    def _verify(self, timed: Sequence[str], whole: bool = False) -> None:
        for work in map(self.works.__getitem__, timed):
            self._agreed(lambda work=work: refuse_unseen_work(work.checked.unseen_work(work.seconds)))  # type: ignore[misc]
            self._agreed(partial(work.checked.verify, whole))
            if whole:
                self._agreed(work.checked.require_unchanged_operands)

    def _visit(self, timed: Sequence[str]) -> None:
        """Settle, then measure, for the same time each."""
        backend, agree = self.run.backend, self.run.agree
        part, begun, windows, taken = self.run.seconds / _ROUNDS, backend.now(), 0, 0
        while True:
            self.regime.require_clock_advances(windows)
            is_settled = agree(windows > 0 and backend.now() - begun >= part)
            counts = self._counts(timed)
            found = self._window(timed, counts)
            windows += 1
            for name, seconds in zip(timed, found or (), strict=False):
                self.works[name].seconds = seconds
                if is_settled:
                    self._take(name, len(timed) == 1, seconds, counts[0])
            taken += bool(is_settled)
            if agree(taken > 0 and backend.now() - begun >= 2 * part):
                return

    def _take(self, name: str, alone: bool, seconds: float, launches: int) -> None:
        samples = self.samples[name, alone]
        samples.seconds.append(seconds)
        samples.launches += _BLOCKS * launches
        samples.add_reading(self.regime.read_sensors())

    def _counts(self, timed: Sequence[str]) -> list[int]:
        """Launches of a block of each work: blocks take equally long."""
        seconds = [max(self.run.agree(self.works[name].seconds), 1e-9) for name in timed]
        block = max(min(_WINDOW_SECONDS, _MOST_SHORT * min(seconds)) / _BLOCKS, *seconds)
        return [max(1, round(block / each)) for each in seconds]

    def _window(self, timed: Sequence[str], launches: Sequence[int]) -> list[float] | None:
        """Seconds a launch of each work while all of them run; None if they never did, or waited for the host."""
        backend, works = self.run.backend, [self.works[name] for name in timed]
        for work in works:
            work.marks, work.queued = [], []
            work.checked.prepare_check()
        first = backend.mark()
        backend.wait(first)
        begun = backend.now()
        for _ in range(self.flushes):
            backend.flush_cache()
        self.queue.fork()
        ahead = 0 if self.flushes or len(works) < len(self.works) else _AHEAD
        for block in range(_BLOCKS + ahead):
            for work, count in zip(reversed(works), reversed(launches), strict=True):
                delay = ahead if work is works[0] else 0
                if delay <= block < _BLOCKS + delay:
                    work.block(count, backend.now)
        self.queue.join()
        end, idle = backend.mark(), self.regime.idle_mark()
        self.regime.synchronize(works[0].checked, end, idle)
        # In the first block queues wait for the host, and ranks for one another.
        times = [[backend.seconds_between(first, mark) for mark in work.marks[1:]] for work in works]
        due = [host - begun + _LEAST_AHEAD_SECONDS for work in works for host in work.queued[1:]]
        is_late = self.flushes and any(host > device for host, device in zip(due, itertools.chain(*times), strict=True))
        return None if is_late else overlapping(times, launches)

    def row(self, row: Row) -> Measurement:
        run, taken, checked, problem = self.run, self.samples[row], self.works[row[0]].checked, self.problem
        if not taken.seconds:
            step = Step(run.kernel, row_of(problem, row), self.shape, self.regime, StoppingRule())
            return replace(failed_row(step), reason=_NEVER)
        verdict = replace(checked.verdict, details={**checked.verdict.details, "kernels": " + ".join(self.names)})
        return judged(run.kernel, row_of(problem, row), self.shape, self.regime, taken, verdict)
