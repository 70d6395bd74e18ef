"""``mamf model``: training steps of language models, and the ceilings for their shares."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from dataclasses import asdict
from typing import Any

from mamf.backend import Backend
from mamf.ceilings.share import KnownCeiling, given_ceiling
from mamf.cli.ceilings import given_ceilings, wanted_ceilings
from mamf.cli.resuming import asks_for_plan, contradiction
from mamf.cli.session import Session, run_kernels
from mamf.cli.terminal import say_memory, warn
from mamf.contribution.known_ceilings import measured_peak
from mamf.engine.strategies.kernels import KernelsSweep
from mamf.errors import MamfError
from mamf.kinds.kind import Setup
from mamf.logs.recording import Record
from mamf.plugins.discovery import operation


def run(options: argparse.Namespace) -> int:
    options.kernel = kernels(options)
    return run_kernels(options, ModelSession, operation("model"))


def kernels(options: argparse.Namespace) -> list[str] | None:
    """The model with each attention, eager and on request compiled; None if a resumed log decides."""
    if options.resume and not asks_for_plan(options):
        return None
    ways = ("torch", "compiled") if options.compile else ("torch",)
    return [f"{way}[{name}]" for name in options.attention or ("sdpa",) for way in ways]


class ModelSession(Session):
    """Training steps of models, and the ceilings for their shares."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        wanted = wanted_ceilings(self.plan)
        self.known_ceilings = dict(self.log.known_ceilings) if self.log else {}
        for key, each in given_ceilings(self.options, wanted, self.backend).items():
            ceiling, before = given_ceiling(each), self.known_ceilings.get(key)
            if before and before != ceiling:
                then = f"a {' '.join(key)} ceiling of {before.tflops:.6g} TFLOPS"
                raise contradiction(self.options, "ceiling", then, self.options.ceiling)
            if key in wanted:
                self.known_ceilings[key] = ceiling

    def say_plan(self) -> None:
        super().say_plan()
        needed = max((problem.nbytes(shape) for _, problem, shape, _ in self.driven.steps), default=0)
        say_memory(needed, "the largest without its activations", self.backend)

    def strategy(self, setup: Setup) -> KernelsSweep:
        missing = [key for key in wanted_ceilings(self.plan) if key not in self.known_ceilings]
        self.known_ceilings |= {(each.dtype, each.regime): each for each in known_here(self.backend, missing)}
        logged = self.log.known_ceilings if self.log else {}
        new = [Record("known_ceiling", asdict(each)) for key, each in self.known_ceilings.items() if key not in logged]
        on_phase = setup.on_phase
        return KernelsSweep(self.plan, setup.opened, self.backend, held=setup.answers, on_phase=on_phase, records=new)


def known_here(backend: Backend, needed: Collection[tuple[str, str]]) -> Iterator[KnownCeiling]:
    """Ceilings that were measured on this device or contributed for its model; warns of missing ones."""
    missing: dict[str, list[str]] = {}
    for dtype, regime in needed:
        try:
            known = measured_peak(backend, dtype, regime)
        except MamfError as error:
            missing.setdefault(str(error), []).append(regime)
            continue
        yield KnownCeiling(dtype, regime, known.tflops, known.source, known.description)
    for reason, regimes in missing.items():
        warn(f"no MAMFU in {' and '.join(regimes)}: {reason}")
