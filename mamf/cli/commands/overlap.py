"""``mamf overlap``: products beside a collective of all devices, or beside copies and passes over memory on one."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from mamf.cli.session import Session, run_kernels
from mamf.cli.terminal import stdout
from mamf.engine.strategies.overlap import Overlapping
from mamf.errors import UsageError
from mamf.kinds.kind import Setup, Strategy
from mamf.logs.run_log import RunLog, read_run_log
from mamf.measurement import Measurement
from mamf.node.group import Launched, launched, launched_group, of_all
from mamf.operations.collective import COLLECTIVES
from mamf.operations.overlap import TIMED, Pair
from mamf.plans import OVERLAP, Plan, StepKey
from mamf.plugins.discovery import backend_class, first_backend, open_backend
from mamf.regime_names import SUSTAINED
from mamf.report.document import Document
from mamf.report.overlap import overlap_document

_OF_RANKS, _OF_ONE = ("all_reduce", "all_gather", "reduce_scatter"), ("to_host", "to_device", "copy")
_PATIENCE_SECONDS = 120.0


def run(options: argparse.Namespace) -> int:
    step = [each for each in (options.flop, options.bytes) if each is not None]
    if len(step) == 1 or not all(0 < each < math.inf for each in step):
        raise UsageError("a step has FLOP and bytes: give --flop and --bytes, each above 0")
    own, name = launched(os.environ), options.backend or first_backend()
    count = backend_class(name).device_count()
    beside = options.beside or (_OF_RANKS if own or count > 1 else _OF_ONE)
    collectives = [each for each in beside if each in COLLECTIVES]
    is_over = options.resume and read_run_log(options.resume).tier == "complete"
    if collectives and own is None and count < 2 and not is_over:
        raise UsageError(f"{collectives[0]} needs several devices, and {name} has {count}: --beside to_host copy")
    if collectives and own is None and not (is_over or options.dry_run):
        ranks = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m", "mamf")
        return subprocess.call([sys.executable, *ranks, *options.typed], stdout=stdout())
    if own is not None:
        # A launcher may hide the devices of the other ranks.
        options.backend, options.device = name, own.index % max(count, 1)
    if own is not None and own.rank:
        return 0 if list(ranked(Overlapping(open_backend(name, options.device), Pair(), ()), own)) else 1
    options.operation = OVERLAP
    vars(options).update(dict.fromkeys(("kernel", "precision", "regime", "no_flush")))
    options.set = [
        *(f"other={','.join(beside)}", f"timed={','.join(TIMED)}", "alone=yes,no"),
        f"blocks={','.join(map(str, options.blocks or [0]))}",
    ]
    return run_kernels(options, OverlapSession)


def ranked(run: Overlapping, own: Launched | None) -> Iterator[Measurement]:
    """The rows of a run, as one rank of its group where there is one: all measure what rank 0 does."""
    if own is None:
        yield from run.results()
        return
    with launched_group(own, run.backend, _PATIENCE_SECONDS):
        run.of_all = of_all
        run.cells, run.seconds, run.budget_seconds = of_all((run.cells, run.seconds, run.budget_seconds))[0]
        yield from run.results()


@dataclass
class _Ranked:
    """A run as rank 0 of its group. ``held``: the steps of rows that the log has already."""

    run: Overlapping
    own: Launched | None
    held: Collection[StepKey]

    @property
    def left_out(self) -> int:
        return self.run.left_out

    def results(self) -> Iterator[Measurement]:
        return (row for row in ranked(self.run, self.own) if row.step not in self.held)


class OverlapSession(Session):
    kind = OVERLAP

    def new_plan(self) -> Plan:
        return replace(super().new_plan(), kind=OVERLAP, regimes=(SUSTAINED,), options=None)

    def strategy(self, setup: Setup) -> Strategy:
        run: Any = super().strategy(setup)
        return _Ranked(run, launched(os.environ), [row.step for row in setup.answers.values()])

    def document(self, log: RunLog) -> Document:
        step = self.options.flop and (self.options.flop, self.options.bytes)
        return overlap_document(log.measurements, log.header, log.summary, self.options.top, step)
