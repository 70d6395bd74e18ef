"""``mamf counters KERNEL...``: hardware counters of kernels, beside their rates without a profiler."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mamf.choices import DETERMINISM, SECTION_SETS
from mamf.cli.attention_plans import given_ceilings
from mamf.cli.commands.kernels_sweep import (
    AnyOperation,
    KernelsSession,
    asked_for,
    operation_asked_for,
    shapes_from,
    with_shapes_of_sizes,
)
from mamf.cli.interruption import Interruption
from mamf.cli.resuming import Resumed
from mamf.cli.session import measure
from mamf.cli.terminal import say, warn
from mamf.errors import UnavailableError, UsageError
from mamf.kernel import AnyKernel
from mamf.logs.run_log import RunLog, read_run_log
from mamf.logs.writer import RunLogWriter
from mamf.measurement import Measurement
from mamf.plugins.discovery import kernel_of
from mamf.profiling.counters.counting import Counter
from mamf.profiling.counters.log import Counted, counted_in, counts_record, roof_record, step_of
from mamf.profiling.counters.report import counters_document
from mamf.profiling.counters.roofs import (
    Roof,
    given_bandwidth_roof,
    given_compute_roof,
    known_bandwidth_roof,
    known_compute_roof,
)
from mamf.profiling.counters.running import found_ncu
from mamf.regime_names import BURST
from mamf.report.document import Document

_NOTHING_COUNTED = 1
_REPORT_TYPE = ".ncu-rep"


def run(options: argparse.Namespace) -> int:
    options.ncu = found_ncu(options.ncu)
    options.sections, options.set = _sections(options.set or [])
    if options.set is None:
        options.given.discard("set")  # sections are no part of the plan
    of = _operation(options)
    # Reports wrong options before a device is opened.
    asked_for(of, options)
    shapes_from(of, options)
    return measure(options, partial(CountersSession, of, options))


def _sections(given: list[str]) -> tuple[str | None, list[str] | None]:
    """Separate a set of ncu's sections from fields of the problem: both use --set."""
    sections = [text for text in given if text in SECTION_SETS]
    return (sections[-1] if sections else None), [text for text in given if text not in sections] or None


def _operation(options: argparse.Namespace) -> AnyOperation:
    options.kernel = options.kernel or None
    if options.resume is not None and options.operation is None:
        plan = read_run_log(options.resume).plan
        if plan.is_search:
            raise UsageError(f"{options.resume} is not a log of 'mamf counters'")
        options.operation = plan.operation
    elif options.kernel is None:
        missing = f"cannot read {options.output}, which does not exist" if options.begins else "nothing to count"
        raise UsageError(f"{missing}: name a KERNEL of 'mamf kernels'")
    return operation_asked_for(options, options.kernel or ())


class CountersSession(KernelsSession):
    """Measures kernels in burst, and counts each afterwards."""

    def __init__(
        self, of: AnyOperation, options: argparse.Namespace, interruption: Interruption, resumed: Resumed | None
    ) -> None:
        super().__init__(of, options, interruption, resumed)
        reason = self.backend.without_counters()
        if reason is not None:
            raise UnavailableError(str(reason))
        before = counted_in(self.log) if self.log else Counted()
        self.counted = {step_of(each): each for each in before.counts if each.ok}
        self.roofs = before.roofs or tuple(self._roofs())
        self.counter = Counter(
            options.ncu,
            options.backend or self.backend.name,
            self.backend.index,
            options.launches,
            tuple(options.metrics),
            options.sections,
            DETERMINISM in options.columns,
        )

    def read_options(self) -> None:
        with_shapes_of_sizes(self.of, self.options, self.backend)

    def opened_kernels(self) -> list[tuple[str, AnyKernel]]:
        chosen = super().opened_kernels()
        return self._variants(chosen) if self.options.variants and not self.before else chosen

    def _variants(self, chosen: list[tuple[str, AnyKernel]]) -> list[tuple[str, AnyKernel]]:
        """All algorithms of the kernels; a kernel that has none is its own."""
        self.kernels = chosen
        plan = self.new_plan()
        names = {
            name if variant.name == kernel.name else variant.name: None
            for name, kernel in chosen
            for problem in plan.problems
            if kernel.unsupported(self.backend, problem) is None
            for shape in plan.shapes
            for variant in kernel.variants(self.backend, problem, shape)
        }
        if len(names) <= len(chosen):
            warn(f"no variants to choose from: {', '.join(name for name, _ in chosen)}")
        return [(name, kernel_of(self.of, name)) for name in names] or chosen

    def _roofs(self) -> Iterator[Roof]:
        dtypes = dict.fromkeys(problem.dtype for problem in self.plan.problems)
        given = given_ceilings(self.options, [(dtype, BURST) for dtype in dtypes], self.backend)
        for dtype in dtypes:
            ceiling = given.get((dtype, BURST))
            roof = given_compute_roof(ceiling) if ceiling else known_compute_roof(self.backend, dtype)
            if roof is not None:
                yield roof
        path = self.options.bandwidth_ceiling
        bandwidth = given_bandwidth_roof(path, self.backend) if path else known_bandwidth_roof(self.backend)
        if bandwidth is not None:
            yield bandwidth

    def run(self) -> int:
        self._require_no_reports()
        return super().run() or (0 if any(each.ok for each in self.counted.values()) else _NOTHING_COUNTED)

    def dry_run(self) -> int:
        super().dry_run()
        for _, problem, shape, kernel in self.plan.steps(self.held):
            say(f"counted by: {' '.join(self.counter.command(kernel, problem, shape))}")
        return 0

    def before_measuring(self, writer: RunLogWriter) -> None:
        self._writer = writer
        if self.log is None or not self.log.counter_records:
            for roof in self.roofs:
                writer.write("roof", roof_record(roof))

    def has_all(self) -> bool:
        return super().has_all() and not self._uncounted()

    def left_out(self) -> bool:
        return super().left_out() or bool(self._uncounted())

    def measurements(self, on_phase: Callable[[str], None]) -> Iterator[Measurement]:
        for row in self._uncounted():
            self._count(row, on_phase)
        for row in super().measurements(on_phase):
            yield row  # written before it is counted
            if row.ok:
                self._count(row, on_phase)

    def _uncounted(self) -> list[Measurement]:
        return [row for row in self.rows if row.ok and not row.is_reference and step_of(row) not in self.counted]

    def _count(self, row: Measurement, on_phase: Callable[[str], None]) -> None:
        on_phase(f"counting {row.shape} {row.kernel}")
        counts = self.counter.count(self.step_of(row)[-1], row, self._report_of(self.step_of(row)))
        with self.interruption.shielded():
            self._writer.write("counters", counts_record(counts))
            self.counted[step_of(counts)] = counts

    def _report_of(self, step: Any) -> str | None:
        """The report of a step: the named file, numbered if there are several steps."""
        path: Path | None = self.options.report
        if path is None:
            return None
        name = path.name.removesuffix(_REPORT_TYPE)
        steps = self.plan.steps()
        number = f"-{steps.index(step) + 1}" if len(steps) > 1 else ""
        return str(path.with_name(f"{name}{number}{_REPORT_TYPE}"))

    def _require_no_reports(self) -> None:
        for step in self.plan.steps(self.held):
            report = self._report_of(step)
            if report is not None and Path(report).exists():
                raise UsageError(f"{report} exists: name another --report")

    def document(self, log: RunLog) -> Document:
        counted = Counted(tuple(self.counted.values()), self.roofs)
        return counters_document(log.measurements, counted, log.header, log.summary, self.options.columns)
