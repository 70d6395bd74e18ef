"""``mamf model``: training steps of language models, and the ceilings for their shares."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from mamf.backend import Backend
from mamf.ceilings.ceiling import given_ceiling
from mamf.cli.attention_plans import given_ceilings
from mamf.cli.commands.kernels_sweep import KernelsSession, run_session
from mamf.cli.printing import say_memory
from mamf.cli.resuming import asks_for_plan, contradiction
from mamf.cli.terminal import warn
from mamf.contribution.known_ceilings import measured_peak
from mamf.errors import MamfError
from mamf.logs.records import known_ceiling_record
from mamf.logs.writer import RunLogWriter
from mamf.operations.model.shapes import SIZES
from mamf.rate import Rate, find_rate

_BATCH, _CONTEXTS = 8, (1024,)


def run(options: argparse.Namespace) -> int:
    options.operation = "model"
    options.set = fields(options)
    options.shapes, options.kernel = shapes(options), kernels(options)
    return run_session(options, ModelSession)


def fields(options: argparse.Namespace) -> list[str]:
    """The fields of the size, of --phase and of --set, which replaces those of the size."""
    given = [*(options.set or ()), *([f"phase={','.join(options.phase)}"] if options.phase else ())]
    replaced = {each.partition("=")[0] for each in given}
    return [f"{name}={each}" for name, each in SIZES.get(options.size, {}).items() if name not in replaced] + given


def shapes(options: argparse.Namespace) -> list[str] | None:
    """The shapes; None if a resumed log decides."""
    if options.resume and not asks_for_plan(options):
        return None
    contexts = options.context_lengths or _CONTEXTS
    return [f"b{batch}s{context}" for batch in options.batch or (_BATCH,) for context in contexts]


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
            if known_ceiling_record(held.get(key, ceiling)) != known_ceiling_record(ceiling):
                then = f"a {' '.join(key)} ceiling of {held[key].tflops:.6g} TFLOPS"
                raise contradiction(self.options, "ceiling", then, self.options.ceiling)
            if any(find_rate({key: ceiling}, *each) for each in wanted):
                held[key] = ceiling

    def dry_run(self) -> int:
        super().dry_run()
        needed = max((problem.nbytes(shape) for _, problem, shape, _ in self.plan.steps(self.held)), default=0)
        say_memory(needed, "the largest without its activations", self.backend)
        return 0

    def before_measuring(self, writer: RunLogWriter) -> None:
        missing = [key for key in self.wanted_ceilings() if find_rate(self.known_ceilings, *key) is None]
        self.known_ceilings |= known_here(self.backend, missing)
        held = self.log.known_ceilings if self.log else {}
        with self.interruption.shielded():
            for key, ceiling in self.known_ceilings.items():
                if key not in held:
                    writer.write("known_ceiling", known_ceiling_record(ceiling))


def known_here(backend: Backend, needed: Collection[tuple[str, str]]) -> dict[tuple[str, str], Rate]:
    """Ceilings that were measured on this device or contributed for its model; warns of missing ones."""
    known: dict[tuple[str, str], Rate] = {}
    missing: dict[str, list[str]] = {}
    for dtype, regime in needed:
        try:
            found = measured_peak(backend, dtype, regime)
            known[found.dtype, regime] = found
        except MamfError as error:
            missing.setdefault(str(error), []).append(regime)
    for reason, regimes in missing.items():
        warn(f"no MAMFU in {' and '.join(regimes)}: {reason}")
    return known
