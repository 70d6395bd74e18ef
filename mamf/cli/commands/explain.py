"""``mamf explain``: the gap between the datasheet's FLOPS and one product, measured in half a minute: in burst on every
kind of data, and in sustained on normal data.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mamf.backend import Backend
from mamf.ceilings.ceiling import Ceiling
from mamf.ceilings.explanation import WaterfallStep, waterfall_steps
from mamf.ceilings.roof import require_same_device
from mamf.ceilings.share import require_usable_ceiling
from mamf.cli.commands.kernels_sweep import KernelsSession
from mamf.cli.interruption import Interruption
from mamf.cli.printing import note_stream
from mamf.cli.resuming import Resumed
from mamf.cli.roofline_files import Given, read_given, require_files
from mamf.cli.session import measure
from mamf.cli.terminal import say, warn
from mamf.engine.search.finding import Find
from mamf.engine.search.grid import plan_for
from mamf.errors import DeviceError, UsageError
from mamf.kernel import DATA, AnyKernel
from mamf.logs.found import cached_ceiling
from mamf.logs.run_log import RunLog, read_run_log
from mamf.measurement import TERA, Measurement
from mamf.operations.matmul.operation import problem_for
from mamf.operations.matmul.selection import installed_kernel, kernel_for
from mamf.plans import EXPLAIN, MATMUL, Plan
from mamf.plugins.discovery import operation
from mamf.plugins.selection import choose_kernels
from mamf.profiling.profile import Profile
from mamf.regime_names import BURST, CEILINGS, SUSTAINED
from mamf.report.charts.plotting import draw, save
from mamf.report.charts.waterfall import waterfall_chart
from mamf.report.document import Document
from mamf.report.explanation import explanation_document, title
from mamf.report.roofline import named
from mamf.report.text import end_line, machine_line

_SECONDS, _SEARCH_SECONDS = 30.0, 12.0


def run(options: argparse.Namespace) -> int:
    require_files(options)
    if options.ceiling and options.shape:
        raise UsageError("--ceiling determines the shape: leave --shape out")
    given = [read_given(path) for path in options.rows]
    try:
        return measure(options, partial(ExplainSession, options, given))
    except _ToBeFoundError:
        say(f"product: the winner of a find of {_SEARCH_SECONDS:.0f} s; --ceiling LOG or --shape avoids it")
        say(f"time: after that at most {options.budget or _SECONDS:.0f} s, the budget")
        return 0


class _ToBeFoundError(Exception):
    """Raised by a dry run when only a find could choose the product."""


class Product(NamedTuple):
    """The product to explain; ``kernel``: by the name on the command line."""

    problem: Any
    shape: Any
    kernel: str


class ExplainSession(KernelsSession):
    """Measures a few rows of one product and explains its gap to the datasheet."""

    kind = EXPLAIN

    def __init__(
        self, options: argparse.Namespace, given: Sequence[Given], interruption: Interruption, resumed: Resumed | None
    ) -> None:
        self.given = given
        super().__init__(operation(MATMUL), options, interruption, resumed)
        self._given_steps()  # reports wrong logs before anything is measured

    def opened_kernels(self) -> list[tuple[str, AnyKernel]]:
        before, options = self.before, self.options
        if before is None:
            self.product = product_of(options, self.backend)
            return choose_kernels(self.of, self.backend, [self.product.kernel])
        problem = problem_for(self.backend, options.dtype) if options.dtype else before.problem
        self.product = Product(problem, options.shape or before.shapes[0], before.kernels[0])
        return super().opened_kernels()

    def new_plan(self) -> Plan:
        problem, shape, kernel = self.product
        problems = tuple(replace(problem, data=data) for data in DATA)
        budget = self.options.budget or _SECONDS
        return Plan(EXPLAIN, self.of.name, problems, (kernel,), (shape,), CEILINGS, budget_seconds=budget)

    def label(self) -> str:
        return f"{self.plan.problems[0].dtype}-{self.plan.shapes[0]}"

    def _given_steps(self) -> list[WaterfallStep]:
        info = self.backend.info
        return list(given_steps(self.given, (info.name, info.uuid_hash), self.options.anyway))

    def _fall(self, rows: Sequence[Measurement]) -> list[WaterfallStep]:
        return waterfall_steps(rows, self.backend.info, self._given_steps())

    def document(self, log: RunLog) -> Document:
        rows = log.measurements
        if not rows:
            return super().document(log)
        head, foot = [machine_line(log.header), title(rows[0])], [end_line(log.summary)]
        return explanation_document(self._fall(rows), rows, head, foot)

    def _report(self, log: RunLog) -> int:
        code = super()._report(log)
        if self.options.picture and log.measurements:
            chart = waterfall_chart(self._fall(log.measurements), log.measurements, log.header)
            save(draw(chart), self.options.picture, self.options.overwrite)
            say(f"figure: {self.options.picture}", note_stream(self.options))
        return code


def product_of(options: argparse.Namespace, backend: Backend) -> Product:
    """The product on the command line, else the winner of a log, of the last find here, or of a short find."""
    asked = options.kernel[0] if options.kernel else None
    if options.ceiling:
        return _winner(_ceiling_of(options.ceiling, options.dtype, backend), asked)
    problem = problem_for(backend, options.dtype)
    if options.shape:
        return Product(problem, options.shape, asked or kernel_for(backend, problem).name)
    before = cached_ceiling(backend.info, problem, BURST)
    if before is not None:
        warn(
            f"the product is from the find of {before.started[:10]}: {before.ceiling.shape} by {before.ceiling.kernel}"
        )
        return _winner(before.ceiling, asked)
    if options.dry_run:
        raise _ToBeFoundError
    return _found(backend, problem, asked)


def _ceiling_of(path: Path, dtype: str | None, backend: Backend) -> Ceiling:
    """The burst ceiling in a log, for one dtype if it holds several."""
    held = {name: each for (name, regime), each in read_run_log(path).all_ceilings.items() if regime == BURST}
    wanted = problem_for(backend, dtype).dtype if dtype else next(iter(held), None)
    if wanted not in held:
        remedy = f"it holds {', '.join(held)}" if held else "give a log of 'mamf find'"
        raise UsageError(f"{path} holds no burst ceiling{f' of {wanted}' if wanted else ''}: {remedy}")
    require_usable_ceiling(held[wanted], backend)
    return held[wanted]


def _winner(ceiling: Ceiling, asked: str | None) -> Product:
    return Product(
        replace(ceiling.problem, data=DATA[0]), ceiling.shape, asked or installed_kernel(ceiling.kernel).name
    )


def _found(backend: Backend, problem: Any, asked: str | None) -> Product:
    """Search without a log: only the shape is needed."""
    warn(f"searching for a shape for {_SEARCH_SECONDS:.0f} s: --ceiling LOG or --shape avoids it")
    names = [asked] if asked else None
    plan, kernels = plan_for(backend, problem, names, regimes=(BURST,), budget_seconds=_SEARCH_SECONDS, is_quick=True)
    rows = [row for row in Find(plan, kernels, backend).results() if row.ok]
    if not rows:
        raise DeviceError("no product could be measured: name a --shape")
    best = max(rows, key=lambda row: row.best_rate)
    return Product(problem, best.shape, asked or best.kernel)


def given_steps(given: Iterable[Given], device: tuple[str, str | None], anyway: bool) -> Iterator[WaterfallStep]:
    """The best row of each log and the training step of each profile. Raises IncomparableError for another card."""
    for log, profiled in given:
        if log is not None:
            if not anyway:
                of = log.header["device"]
                require_same_device(device, (of["name"], of["uuid_hash"]))
            yield _best_of(log)
        elif profiled is not None:
            if profiled[1].device and not anyway:
                require_same_device((device[0], None), (profiled[1].device, None))
            yield _step_of(*profiled)


def _best_of(log: RunLog) -> WaterfallStep:
    rows = [row for row in log.measurements if row.ok and not row.is_reference and row.work.unit == "TFLOPS"]
    if not rows:
        raise UsageError(f"{log.path} holds no row that does FLOP")
    # Sustained rows first: they show a device under continuous load.
    best = max(rows, key=lambda row: (row.regime == SUSTAINED, row.best_rate))
    description = f"the best of {log.path.name}: {named(best)}, {best.problem.dtype}, {best.regime}"
    return WaterfallStep(f"{best.operation} by {best.kernel}", best.best_rate, description, best)


def _step_of(script: str, profile: Profile) -> WaterfallStep:
    """FLOP per second of a profiled training step, including its other work."""
    at_work = sum(row.share for row in profile.classes if row.flop)
    description = f"a whole training step, {at_work:.0%} of it in classes that do FLOP"
    return WaterfallStep(script, profile.flop / profile.seconds / TERA, description, regime=SUSTAINED)
