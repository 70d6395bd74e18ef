"""``mamf roofline``: what bounds a kernel, from given ceilings of compute and bandwidth, or from measured ones: compute
by dtype, then bandwidth by level.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mamf.backend import MIB, Backend
from mamf.ceilings.ceiling import Candidate, confirm_ceilings, why_hopeless
from mamf.ceilings.roof import CACHE, MEMORY, Roofs, build_roofs, level_of
from mamf.ceilings.search_plan import SearchPlan
from mamf.cli.commands.kernels_find import KernelsFindSession
from mamf.cli.interruption import Interruption
from mamf.cli.printing import print_document
from mamf.cli.reading import read_log
from mamf.cli.resuming import Resumed, contradiction, flag
from mamf.cli.roofline_files import Given, place_rows, read_given, require_files, write_files
from mamf.cli.session import measure
from mamf.cli.terminal import say
from mamf.engine.search.finding import Find
from mamf.engine.search.grid import plan_for
from mamf.engine.search.kernels import KernelsFind
from mamf.errors import UsageError
from mamf.kernel import Problem
from mamf.logs.comparability import roofs_of_logs
from mamf.logs.run_log import OwnCeilings, RunLog
from mamf.measurement import Measurement
from mamf.operations.bandwidth.operation import Bandwidth, power_of_two
from mamf.operations.bandwidth.shapes import UNTOLD_CACHE_BYTES, BandwidthProblem, BandwidthShape
from mamf.operations.matmul.operation import problem_for
from mamf.operations.matmul.selection import kernels_for
from mamf.plans import DEFAULT_BUDGET_SECONDS, ROOFLINE, Plan
from mamf.plugins.discovery import operation
from mamf.regime_names import CEILINGS, asked_regimes
from mamf.report.document import Answer, Document, Lines
from mamf.report.roofline import roofline_document
from mamf.report.text import end_line, machine_line


def run(options: argparse.Namespace) -> int:
    require_files(options)
    given = [read_given(path) for path in options.rows]
    if options.ceiling is None:
        options.kernel = None
        return measure(options, partial(RooflineSession, options, given))
    for option in ("resume", "output", "budget", "dtype", "dry_run"):
        if option in options.given:
            raise UsageError(f"--ceiling measures nothing: leave {flag(option)} out")
    logs = [read_log(path) for path in options.ceiling]
    roofs = roofs_of_logs(logs, options.anyway)
    if options.regime:
        roofs = roofs.only(options.regime)
    points = place_rows(given, roofs, options.anyway)
    head = [machine_line(logs[0].header), *other_cards([*logs, *(each.log for each in given if each.log)])]
    print_document(options, roofline_document(roofs, points, head, top=options.top))
    write_files(options, roofs, points, logs[0].header)
    return 0


def other_cards(logs: Iterable[RunLog]) -> list[str]:
    """A line for logs that --anyway accepted."""
    devices = [(log.header["device"]["name"], log.header["device"]["uuid_hash"]) for log in logs]
    names = list(dict.fromkeys(name for name, _ in devices))
    if len(names) > 1:
        return [f"accepted with --anyway: logs of {', '.join(names)}"]
    cards = len({uuid for _, uuid in devices if uuid})
    return (
        [f"accepted with --anyway: logs of {cards} cards of this model, which differ by percents"] if cards > 1 else []
    )


#: Passes of a launch over arrays that fit in the cache: the first reads memory, and is a few percent of them.
_PASSES = 32
_PASSES_OF_CPU = 8
#: Time for bandwidth relative to a dtype: it has two problems, one per level.
_PARTS_OF_BANDWIDTH = 1.5
#: A search with less time is a quick one: a thorough one would end before its sustained ceiling.
_LEAST_THOROUGH_SECONDS = 40.0
#: Sizes of the arrays: fractions and multiples of the cache. More would take minutes on a CPU.
_OF_CACHE, _CACHES, _CACHES_OF_CPU = (4, 2), (16, 256), (16,)
# Fraction of the free memory for an array, and the memory of a device that does not report it.
_PART_OF_MEMORY, _MEMORY_BYTES = 4, 8 * 1024 * MIB


def sizes_of(backend: Backend) -> tuple[BandwidthShape, ...]:
    """Arrays that fit in the last-level cache, and arrays that do not."""
    cache = backend.info.cache_bytes or UNTOLD_CACHE_BYTES
    most = (backend.free_memory() or backend.info.memory_bytes or _MEMORY_BYTES) // _PART_OF_MEMORY
    small = [power_of_two(cache // part) for part in _OF_CACHE]
    multiples = _CACHES if backend.is_accelerator else _CACHES_OF_CPU
    large = [min(2 * power_of_two(multiple * cache - 1), power_of_two(most)) for multiple in multiples]
    return tuple(dict.fromkeys(BandwidthShape(size) for size in (*small, *large)))


class LevelsFind(KernelsFind):
    """Confirms each problem only on arrays of its level: one pass shows memory, many show the cache."""

    def _best(self, problem: Problem, count: int) -> list[Candidate]:
        cache, level = self.backend.info.cache_bytes, MEMORY if getattr(problem, "warm", 1) == 1 else CACHE
        every = super()._best(problem, len(self.plan.steps()))
        return [each for each in every if level_of(problem, each[0], cache) == level][:count]  # type: ignore[arg-type]


class RooflineSession(KernelsFindSession):
    """Finds the ceilings of products by dtype, then of bandwidth by level, in one log."""

    kind = ROOFLINE

    def __init__(
        self,
        options: argparse.Namespace,
        given: Sequence[Given],
        interruption: Interruption,
        resumed: Resumed | None,
    ) -> None:
        self.given = given
        super().__init__(operation(Bandwidth.name), options, interruption, resumed)

    # -- the plan ----------------------------------------------------------------------------------------------------

    def plan_to_compare(self, before: Plan) -> Plan:
        """The log's plan with the dtypes and regimes of the options; the rest follows from the device."""
        then = frozenset(search.problem.dtype for search in before.searches)
        now = frozenset(problem_for(self.backend, name).dtype for name in self.options.dtype or [None])
        if then != now:
            raise contradiction(self.options, "dtype", then, now)
        return replace(before, regimes=asked_regimes(self.options.regime, CEILINGS))

    def new_plan(self) -> Plan:
        options, backend = self.options, self.backend
        regimes = asked_regimes(options.regime, CEILINGS)
        names = list(dict.fromkeys(options.dtype or [None]))
        parts = len(names) + _PARTS_OF_BANDWIDTH
        budget = options.budget or parts * DEFAULT_BUDGET_SECONDS
        part = budget / parts
        quick, products = part < _LEAST_THOROUGH_SECONDS, [problem_for(backend, name) for name in names]
        searches = [
            plan_for(backend, each, regimes=regimes, budget_seconds=part, is_quick=quick)[0] for each in products
        ]
        passes = _PASSES if backend.is_accelerator else _PASSES_OF_CPU
        problems = [BandwidthProblem("read", warm=each) for each in ((1, passes) if backend.info.cache_bytes else (1,))]
        return Plan(
            ROOFLINE,
            Bandwidth.name,
            tuple(problems),
            tuple(name for name, _ in self.kernels),
            sizes_of(backend),
            regimes,
            budget_seconds=budget,
            searches=tuple(searches),
        )

    def strategy(self) -> KernelsFind:
        own = replace(self.plan, searches=(), budget_seconds=_PARTS_OF_BANDWIDTH * self._part)
        rows = [row for row in self.rows if row.operation == self.of.name]
        self.find = LevelsFind(own, [each for _, each in self.kernels], self.backend, held=self.held, rows=rows)
        return self.find

    @property
    def _part(self) -> float:
        """Seconds for each search."""
        parts = len(self.plan.searches) + _PARTS_OF_BANDWIDTH
        return (self.plan.budget_seconds or parts * DEFAULT_BUDGET_SECONDS) / parts

    def measurements(self, on_phase: Callable[[str], None]) -> Iterator[Measurement]:
        found = self.ceilings_found()
        for search in self.plan.searches:
            if any((search.problem, regime) not in found for regime in search.regimes):
                yield from self._search(search, on_phase)
        yield from super().measurements(on_phase)

    def _search(self, search: SearchPlan, on_phase: Callable[[str], None]) -> Iterator[Measurement]:
        """Search for the ceilings of a dtype; rows of a resumed log are not measured again."""
        problem, held = search.problem, self._rows_of(search.problem)
        plan = replace(search, budget_seconds=self._part)
        kernels = kernels_for(self.backend, problem, search.kernels)
        yield from Find(plan, kernels, self.backend, held, lambda text: on_phase(f"{problem.dtype}, {text}")).results()

    # -- the result --------------------------------------------------------------------------------------------------

    def ceilings_found(self) -> OwnCeilings:
        """The ceilings of compute and bandwidth."""
        info = self.backend.info
        sought = [(each.problem, regime, each.kernels[0]) for each in self.plan.searches for regime in each.regimes]
        return {**confirm_ceilings(self.rows, sought, info.name, info.uuid_hash), **super().ceilings_found()}

    def missing_ceilings(self) -> list[tuple[Any, str]]:
        found = self.ceilings_found()
        wanted = [(each.problem, regime) for each in self.plan.searches for regime in each.regimes]
        lacking = [each for each in wanted if each not in found and not why_hopeless(self._rows_of(each[0]))]
        return [*lacking, *super().missing_ceilings()]

    def _rows_of(self, problem: Problem) -> list[Measurement]:
        return [row for row in self.rows if row.problem == problem]

    def label(self) -> str:
        return "-".join([*(search.problem.dtype for search in self.plan.searches), *self.plan.regimes])

    def dry_run(self) -> int:
        say(f"device: {self.backend.info.name} ({self.backend.name}:{self.backend.index})")
        for search in self.plan.searches:
            names, regimes = " ".join(search.kernels), " and ".join(search.regimes)
            say(f"{search.problem.dtype}: {regimes} by {names}, in at most {self._part:.0f} s")
        sizes = " ".join(map(str, self.plan.shapes))
        seconds = _PARTS_OF_BANDWIDTH * self._part
        say(f"bandwidth: arrays of {sizes} by {' '.join(self.plan.kernels)}, in at most {seconds:.0f} s")
        return 0

    def roofs(self) -> Roofs:
        """Raises UsageError if nothing was confirmed."""
        return build_roofs(self.ceilings_found().values(), self.backend.info.cache_bytes)

    def document(self, log: RunLog) -> Document:
        head, foot = machine_line(log.header), end_line(log.summary)
        try:
            roofs = self.roofs()
        except UsageError:
            advice = "no ceiling was confirmed: --resume continues, a longer --budget leaves it more time"
            return Document(
                head, [Lines([head]), Answer([advice, foot])], {"header": log.header, "summary": log.summary}
            )
        return roofline_document(
            roofs, place_rows(self.given, roofs, self.options.anyway), [head], [foot], self.options.top
        )

    def _report(self, log: RunLog) -> int:
        code = super()._report(log)
        if self.ceilings_found():
            roofs = self.roofs()
            write_files(self.options, roofs, place_rows(self.given, roofs, self.options.anyway), log.header)
        return code
