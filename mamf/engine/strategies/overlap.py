"""Runs matmul and other work at the same time: measures the rate of each alone, and of each while both run.

Each of the two is queued back to back in its own queue, in blocks that take equally long, with marks between blocks.
Only blocks within the time in which both queues were busy count, so no rate includes time in which one ran alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

from mamf.backend import Backend
from mamf.engine.measure import build_row, classify_error
from mamf.engine.regimes import Samples, StoppingRule, Sustained
from mamf.engine.regimes.base import Checked, WrongResultError, refuse_unseen_work
from mamf.engine.runner import Step, failed_row
from mamf.errors import UnsupportedError, plugin_errors
from mamf.kernel import Verdict
from mamf.measurement import Measurement, Status
from mamf.operations.overlap import OTHER, PRODUCTS, OverlapProblem, OverlapShape, Pair
from mamf.plans import StepKey

AnswerT = TypeVar("AnswerT")
#: The rows of a pair: what is timed, and whether it runs alone.
ROWS = ((PRODUCTS, True), (OTHER, True), (PRODUCTS, False), (OTHER, False))
#: How often visits alternate between matmul, the other work and both, so that the device's drift affects all three
#: equally; and the seconds to measure each row for, over all rounds.
_ROUNDS, DEFAULT_SECONDS = 3, 3.0
#: Blocks of a window; blocks of the other work that a CPU queues ahead; seconds of a window; and the most windows to
#: try for a first sample.
_BLOCKS, _AHEAD, _WINDOW_SECONDS, _MAX_TRIED = 16, 4, 0.05, 4
#: Pairs of flushes ahead of a window, during which the host queues its first blocks, and the most short launches in a
#: window. If the host is late in more than _MAX_LATE of a visit's windows, the next pair is used.
_PACES, _MAX_LATE = ((128, 320), (256, 160), (512, 80)), 0.25
#: The host must be this far ahead at each mark, or the device may have waited for it. A launch counts as no shorter
#: than _MIN_SECONDS.
_MIN_AHEAD_SECONDS, _MIN_SECONDS = 20e-6, 1e-9


def row_of(problem: OverlapProblem, row: tuple[str, bool]) -> OverlapProblem:
    return replace(problem, timed=row[0], alone=row[1])


def cells_of(steps: Iterable[StepKey]) -> list[tuple[OverlapProblem, OverlapShape]]:
    """The pairs that these steps measure, as problem and shape."""
    return list(dict.fromkeys((row_of(problem, ROWS[0]), shape) for _, problem, shape, _ in steps))


def overlapping(marks: Sequence[Sequence[tuple[float, int]]]) -> list[float] | None:
    """Seconds per launch of each work, from the blocks between the latest start and the earliest end of all works; None
    if a work has no block there. ``marks``: for each work, the seconds and the number of launches so far.
    """
    begin, end = max(each[0][0] for each in marks), min(each[-1][0] for each in marks)
    within = [[mark for mark in each if begin <= mark[0] <= end] for each in marks]
    if not all(each[1:] for each in within):
        return None
    return [(each[-1][0] - each[0][0]) / (each[-1][1] - each[0][1]) for each in within]


@dataclass
class OverlapStrategy:
    """Measures pairs of matmul and other work.

    - ``cells``: the pairs, as the problem of any of their rows and their shape.
    - ``seconds``: how long to measure each row. ``budget_seconds``: no pair begins after this time.
    - ``of_all``: gathers a value from all ranks, by rank. All ranks decide as rank 0 does, and fail together.
    """

    backend: Backend
    kernel: Pair
    cells: Sequence[tuple[OverlapProblem, OverlapShape]]
    seconds: float = DEFAULT_SECONDS
    budget_seconds: float = math.inf
    on_phase: Callable[[str], None] = lambda text: None
    of_all: Callable[[Any], list[Any]] = lambda own: [own]
    left_out: int = field(default=0, init=False)

    def results(self) -> Iterator[Measurement]:
        """Yield four rows for each pair, in the order of ROWS."""
        begun = self.backend.now()
        for index, (problem, shape) in enumerate(self.cells):
            if index and self.of_all(self.backend.now() - begun >= self.budget_seconds)[0]:
                self.left_out = len(ROWS) * (len(self.cells) - index)
                return
            self.on_phase(f"{problem.other} {shape}")
            yield from self._rows(problem, shape)

    def _rows(self, problem: OverlapProblem, shape: OverlapShape) -> Sequence[Measurement]:
        regime = Sustained(self.backend)
        try:
            with self.kernel.settings(self.backend, problem):
                return _Pair(self, problem, shape, regime).measured()
        except WrongResultError as error:
            outcome: tuple[Status, str] = ("wrong_result", str(error))
        except plugin_errors() as error:
            outcome = classify_error(error, self.kernel, self.backend)
        self.backend.release_memory()
        steps = [Step(self.kernel, row_of(problem, row), shape, regime, StoppingRule()) for row in ROWS]
        return [replace(failed_row(step), status=outcome[0], reason=outcome[1]) for step in steps]


@dataclass
class _Work:
    """One of the two works, with its queue. ``marks``: those around the blocks of a window, each with the host's time
    and the number of launches so far. ``seconds``: the latest time of a launch, which sets the length of blocks.
    """

    name: str
    checked: Checked
    mark: Callable[[], Any]
    put: Callable[[Callable[[], object]], object]
    rotation: Iterator[Callable[[], object]]
    seconds: float
    marks: list[tuple[Any, float, int]] = field(default_factory=list)


class _Pair:
    """The two prepared works of a pair. Raises what their kernels raise."""

    def __init__(self, run: OverlapStrategy, problem: OverlapProblem, shape: OverlapShape, regime: Sustained) -> None:
        self.run, self.problem, self.shape, self.regime = run, problem, shape, regime
        self.backend, queue = run.backend, run.backend.second_queue()
        if queue is None:
            raise UnsupportedError(str(run.kernel.unavailable(run.backend)))
        self.queue, self.is_late, self.is_slow = queue, False, False
        self.flushes, self.max_short_launches = _PACES[0]
        own = self._work(PRODUCTS, run.backend.mark, lambda launch: launch())
        self.works = {PRODUCTS: own, OTHER: self._work(OTHER, queue.mark, queue.launch)}
        self.samples: dict[tuple[str, bool], Samples] = {}

    def _work(self, timed: str, mark: Callable[[], Any], put: Callable[..., object]) -> _Work:
        kernel, backend, problem = self.run.kernel, self.backend, row_of(self.problem, (timed, True))
        if reason := kernel.unsupported(backend, problem):
            raise UnsupportedError(reason)
        sets = self.regime.sets(problem, self.shape, backend.info.cache_bytes)
        pool = backend.operand_pool(problem.data, problem.seed)
        checked = Checked(self._agreed(partial(kernel.prepare, backend, problem, self.shape, pool, sets)))
        seconds = self._agreed(partial(checked.rehearse, backend))
        name, rotation = kernel.of(backend, problem).name, itertools.cycle(checked.launches)
        return _Work(name, checked, mark, put, rotation, seconds)

    def measured(self) -> list[Measurement]:
        """Measure the rows. Raises WrongResultError, or UnsupportedError if the host was too slow."""
        every = list(self.works.values())
        for flushes, self.max_short_launches in _PACES:
            self.flushes = 0 if self.backend.timer == "host clock" else flushes
            if self._keeps_up(every, flushes == _PACES[-1][0]):
                break
        self._window(every, (1, 1))  # few launches, so that a repeated all-reduce stays finite and can be verified
        self._verify(every, whole=True)
        if not all(self.run.of_all(all(taken.seconds for taken in self.samples.values()))):
            slow = "the host queues these launches too slowly"
            raise UnsupportedError(slow if self.is_slow else "the device does not run the two at the same time")
        return [self._row(row) for row in ROWS]

    def _keeps_up(self, every: Sequence[_Work], is_last: bool) -> bool:
        """Take all samples. False if the host is late in too many windows and a slower pace is left to try."""
        self.samples = {row: Samples() for row in ROWS}
        for works in (every[:1], every[1:], every) * _ROUNDS:
            self.is_slow = self._visit(works) > _MAX_LATE
            self._verify(works)
            if self.is_slow and not is_last:
                return False
        return True

    def _agreed(self, call: Callable[[], AnswerT]) -> AnswerT:
        """Call a function on all ranks, and return its answer. If it raises on one rank, all ranks raise."""
        answer, error = None, None
        try:
            answer = call()
        except Exception as failed:
            error = failed
        if any(self.run.of_all(error is not None)):
            raise error or WrongResultError(Verdict(math.inf, 0.0, reason="another rank failed"))
        return cast(AnswerT, answer)

    def _verify(self, works: Sequence[_Work], whole: bool = False) -> None:
        for work in works:
            self._agreed(partial(refuse_unseen_work, work.checked.unseen_work(work.seconds)))
            self._agreed(partial(work.checked.verify, whole))
            if whole:
                self._agreed(work.checked.require_unchanged_operands)

    def _visit(self, works: Sequence[_Work]) -> float:
        """Wait for one period of the power controller, at most the time to measure, then measure. Returns the share of
        windows in which a host was late.
        """
        part, windows, late, tried, taken = self.run.seconds / _ROUNDS, 0, 0, 0, 0
        settled_at = self.backend.now() + min(part, self.backend.sustained_traits.swing_seconds)
        while True:
            self.regime.require_clock_advances(windows)
            own = (self.backend.now() - settled_at, [work.seconds for work in works], taken)
            elapsed, seconds, of_first = self.run.of_all(own)[0]
            if elapsed >= part and (of_first or tried >= _MAX_TRIED):
                return late / windows
            is_settled = windows > 0 and elapsed >= 0
            block = max(min(_WINDOW_SECONDS, self.max_short_launches * min(seconds)) / _BLOCKS, *seconds, _MIN_SECONDS)
            counts = [block / max(each, _MIN_SECONDS) for each in seconds]
            found = self._window(works, counts)
            windows, late = windows + 1, late + self.is_late
            for work, count, latest in zip(works, counts, found or (), strict=False):
                work.seconds = latest
                samples = self.samples[PRODUCTS if work is self.works[PRODUCTS] else OTHER, len(works) == 1]
                samples.seconds += [latest] * is_settled
                samples.launches += round(_BLOCKS * count) * is_settled
                samples.add_reading(self.regime.read_sensors() if is_settled else None)
            tried, taken = tried + is_settled, taken + (is_settled and found is not None)

    def _window(self, works: Sequence[_Work], launches: Sequence[float]) -> list[float] | None:
        """Seconds per launch of each work while all of them run; None if they never ran together or waited for the
        host. ``launches``: the mean number of launches per block, chosen so that the works end together.
        """
        backend = self.backend
        for work in works:
            work.marks = []
            work.checked.prepare_check()
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
                    work.put(launch)
                    backend.submit()
                work.marks.append((work.mark(), backend.now(), done))
        self.queue.join()
        self.regime.synchronize(works[0].checked, backend.mark(), self.regime.idle_mark())
        # Ignore the first block, in which queues wait for the host and ranks for each other.
        times = [[(backend.seconds_between(first, mark), done) for mark, _, done in work.marks[1:]] for work in works]
        due = [host - begun + _MIN_AHEAD_SECONDS for work in works for _, host, _ in work.marks[1:]]
        reached = [seconds for each in times for seconds, _ in each]
        headway = min(device - host for host, device in zip(due, reached, strict=True)) if self.flushes else 0.0
        found, last = overlapping(times), max(range(len(works)), key=lambda each: times[each][-1][0])
        # A collective waits for the slowest host, and all ranks must adapt the works alike.
        answers = self.run.of_all((headway, last if found is None else None))
        self.is_late = min(each for each, _ in answers) < 0
        starved = next((each for _, each in answers if each is not None), None)
        if starved is not None and not self.is_late:  # queue fewer launches of what ends last, at least one per block
            works[starved].seconds *= min(2.0, launches[starved])
        return found if starved is None and not self.is_late else None

    def _row(self, row: tuple[str, bool]) -> Measurement:
        checked, names = self.works[row[0]].checked, " + ".join(work.name for work in self.works.values())
        verdict = replace(checked.verdict, details={**checked.verdict.details, "kernels": names})
        problem, taken = row_of(self.problem, row), self.samples[row]
        return build_row(self.run.kernel, problem, self.shape, self.regime, taken, verdict)
