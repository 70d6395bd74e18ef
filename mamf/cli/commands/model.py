"""``mamf model``: training steps of language models, and the ceilings for their shares."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from dataclasses import asdict
from typing import Any

from mamf.backend import Backend
from mamf.ceilings.share import KnownCeiling, given_ceiling
from mamf.cli.ceilings import given_ceilings
from mamf.cli.commands.kernels_sweep import KernelsSession, run_session
from mamf.cli.resuming import asks_for_plan, contradiction
from mamf.cli.terminal import say_memory, warn
from mamf.contribution.known_ceilings import measured_peak
from mamf.errors import MamfError
from mamf.logs.writer import RunLogWriter
from mamf.plugins.discovery import operation


def run(options: argparse.Namespace) -> int:
    options.kernel = kernels(options)
    return run_session(options, ModelSession, operation("model"))


def kernels(options: argparse.Namespace) -> list[str] | None:
    """The model with each attention, eager and on request compiled; None if a resumed log decides."""
    if options.resume and not asks_for_plan(options):
        return None
    ways = ("torch", "compiled") if options.compile else ("torch",)
    return [f"{way}[{name}]" for name in options.attention or ("sdpa",) for way in ways]


class ModelSession(KernelsSession):
    """Training steps of models, and the ceilings for their shares."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        held, wanted = self.known_ceilings, self.wanted_ceilings()
        for key, each in given_ceilings(self.options, wanted, self.backend).items():
            ceiling = given_ceiling(each)
            if held.get(key, ceiling) != ceiling:
                then = f"a {' '.join(key)} ceiling of {held[key].tflops:.6g} TFLOPS"
                raise contradiction(self.options, "ceiling", then, self.options.ceiling)
            if key in wanted:
                held[key] = ceiling

    def dry_run(self) -> int:
        super().dry_run()
        needed = max((problem.nbytes(shape) for _, problem, shape, _ in self.plan.steps(self.held)), default=0)
        say_memory(needed, "the largest without its activations", self.backend)
        return 0

    def before_measuring(self, writer: RunLogWriter) -> None:
        missing = [key for key in self.wanted_ceilings() if key not in self.known_ceilings]
        self.known_ceilings |= {(each.dtype, each.regime): each for each in known_here(self.backend, missing)}
        held = self.log.known_ceilings if self.log else {}
        with self.interruption.shielded():
            for key, ceiling in self.known_ceilings.items():
                if key not in held:
                    writer.write("known_ceiling", asdict(ceiling))


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
