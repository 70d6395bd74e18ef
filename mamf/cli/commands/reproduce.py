"""``mamf reproduce``: measures a figure of a log, a table or a paper again, and says whether it is true here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from mamf.ceilings.ceiling import CONFIRM
from mamf.cli.claims import matching_kernels, read_claims
from mamf.cli.commands.kernels_sweep import KernelsSession
from mamf.cli.interruption import Interruption
from mamf.cli.resuming import Resumed, asked_budget
from mamf.cli.session import measure
from mamf.cli.terminal import say, warn
from mamf.engine.strategies.reproduce import ReproduceSweep
from mamf.errors import UnavailableError, UnknownNameError, UsageError
from mamf.kernel import AnyKernel
from mamf.logs.claims import DEFAULT_KERNEL, Source, completed
from mamf.logs.reproducing import Reproduction, judge_reproduction
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.operations.matmul.selection import kernel_for
from mamf.plans import DEFAULT_BUDGET_SECONDS, MATMUL, REPRODUCE, Claim, Plan, ReproduceOptions
from mamf.plugins.discovery import is_path, operation
from mamf.plugins.selection import choose_kernels
from mamf.regime_names import NAMES
from mamf.report.document import Document
from mamf.report.reproduction import reproduction_document
from mamf.report.text import rate_text

_SLOWER, _UNFINISHED = 3, 1
#: With --explain: half a minute is the warm-up of classic.
_EXPLAINING_SECONDS = 120.0


def run(options: argparse.Namespace) -> int:
    source = read_claims(options)
    if source is None and options.resume is None:
        raise UsageError("nothing to reproduce: name a log, or a figure with --claim")

    def opened(interruption: Interruption, resumed: Resumed | None) -> ReproduceSession:
        return ReproduceSession(source, options, interruption, resumed)

    return measure(options, opened)


class ReproduceSession(KernelsSession):
    """Measures claims again and compares both figures. ``source``: None if the resumed log holds the claims."""

    kind = REPRODUCE

    def __init__(
        self, source: Source | None, options: argparse.Namespace, interruption: Interruption, resumed: Resumed | None
    ) -> None:
        self.source = source
        self.found: Reproduction | None = None
        self._opened: dict[str, list[tuple[str, AnyKernel]]] = {}
        name = resumed.log.plan.operation if resumed else source.operation if source else MATMUL
        super().__init__(operation(name), options, interruption, resumed)

    def opened_kernels(self) -> list[tuple[str, AnyKernel]]:
        """The kernels of the claims that can run here, and those that an ambiguous name may mean too."""
        if self.before is not None or self.source is None:
            return choose_kernels(self.of, self.backend, self.plan_before.kernels)
        given = choose_kernels(self.of, self.backend, self.options.kernel) if self.options.kernel else []
        for name in dict.fromkeys(claim.kernel for claim in self.source.claims):
            try:
                self._opened[name] = self._kernels_of(name, given)
            except (UnavailableError, UnknownNameError) as error:
                reason = str(error)
                self._opened[name] = []
                warn(f"{reason}: its claims are left out")
        found = {kernel.name: (name, kernel) for each in self._opened.values() for name, kernel in each}
        if unused := [name for name, kernel in given if kernel.name not in found]:
            raise UsageError(f"no claim is by {unused[0]}: they are by {', '.join(self._opened)}")
        if not found:
            raise UnavailableError(f"no kernel of {self.source.name} can run here, so nothing is reproduced")
        return list(found.values())

    @property
    def plan_before(self) -> Plan:
        assert self.before is not None, "without a source, a log is resumed"
        return self.before

    def _kernels_of(self, name: str, given: Sequence[tuple[str, AnyKernel]]) -> list[tuple[str, AnyKernel]]:
        """The kernels that a claim may mean. Nothing is imported because a log names it. Raises UnavailableError."""
        if named := [each for each in given if name in (each[0], each[1].name)]:
            return named
        if is_path(name):
            raise UnavailableError(f"kernel {name} is a path, so add --kernel {name} if you trust it")
        if name == DEFAULT_KERNEL:
            problem = self._completed()[0].problem
            return choose_kernels(self.of, self.backend, [kernel_for(self.backend, problem).name])
        meant = matching_kernels(self.of, name)
        if not meant:
            raise UnavailableError(f"kernel {name} is not installed; --kernel package.module:Class names its class")
        if len(meant) > 1 and not self.options.explain:
            raise UsageError(f"{name} may be {', '.join(meant)}: name one, or add --explain to measure each")
        found, reason = [], None
        for each in meant:
            try:
                found += choose_kernels(self.of, self.backend, [each])
            except UnavailableError as error:
                reason = error
        if reason and not found:
            raise reason
        return found

    def _completed(self) -> list[Claim]:
        """The claims, with the defaults of the device."""
        claims = self.source.claims if self.source else ()
        return [replace(each, problem=completed(each.problem, self.of, self.backend)) for each in claims]

    def new_plan(self) -> Plan:
        assert self.source is not None, "else the plan is the log's"
        own = {name: each[0][1].name for name, each in self._opened.items() if each}
        claims = tuple(replace(each, kernel=own[each.kernel]) for each in self._completed() if each.kernel in own)
        source, before, launches = self.source, self.source.plan, self.source.sweep_options
        options = ReproduceOptions(
            claims,
            source.name,
            source.recorded,
            source.chosen_from,
            self.options.tolerance or ReproduceOptions.tolerance,
            self.options.explain,
            launches.warmup_launches,
            launches.timed_launches,
        )
        usual = _EXPLAINING_SECONDS if self.options.explain else DEFAULT_BUDGET_SECONDS
        return Plan(
            REPRODUCE,
            self.of.name,
            tuple(dict.fromkeys(each.problem for each in claims)),
            tuple(name for name, _ in self.kernels),
            tuple(dict.fromkeys(each.shape for each in claims)),
            tuple(name for name in NAMES if name in {each.regime for each in claims}),
            before.precision if before else Plan.precision,
            before.seconds if before else None,
            asked_budget(self.options) or usual,
            before.flush if before else Plan.flush,
            options=options,
        )

    def plan_to_compare(self, before: Plan) -> Plan:
        """The claims are the log's; a source that is named again must be the same."""
        asked = self.options
        options = replace(
            before.options,
            source=self.source.name if self.source else before.options.source,
            tolerance=asked.tolerance or before.options.tolerance,
            explains=asked.explain or before.options.explains,
        )
        return replace(before, options=options)

    def strategy(self) -> ReproduceSweep:
        return ReproduceSweep(self.plan, [each for _, each in self.kernels], self.backend, rows=list(self.rows))

    def dry_run(self) -> int:
        say(f"device: {self.backend.info.name} ({self.backend.name}:{self.backend.index})")
        for claim in self.plan.options.claims:
            rate = rate_text(claim.rate, claim.problem.work(claim.shape).unit)
            say(f"claim: {rate} in {claim.regime} at {claim.shape} by {claim.kernel}")
        say(f"time: at most {self.plan.budget_seconds or 0:.0f} s, the budget")
        return 0

    def is_of_step(self, row: Measurement) -> bool:
        return row.phase == CONFIRM

    def count_due(self) -> int | None:
        return self.count_left() or None

    def count_left(self) -> int:
        seen = {row.step for row in self.rows if self.is_of_step(row)}
        return sum(claim.step not in seen for claim in self.plan.options.claims)

    def document(self, log: RunLog) -> Document:
        self.found = judge_reproduction(log)
        return reproduction_document(self.found, log.header, log.summary)

    def run(self) -> int:
        code = super().run()
        if code not in (0, _UNFINISHED) or self.found is None:
            return code
        verdicts = self.found.counts
        if self.found.is_slower or (self.options.strict and "undecided" in verdicts):
            return _SLOWER
        return _UNFINISHED if "not measured" in verdicts else code
