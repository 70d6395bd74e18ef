"""``mamf model``: training steps of language models, with options for their architecture."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from mamf.backend import Backend
from mamf.ceilings.share import KnownCeiling, KnownCeilings, given_ceiling
from mamf.cli.attention_plans import given_ceilings
from mamf.cli.commands.kernels_sweep import KernelsSession, run_session
from mamf.cli.options.model import NUMBERS
from mamf.cli.printing import say_memory
from mamf.cli.resuming import asks_for_plan, contradiction
from mamf.cli.terminal import warn
from mamf.contribution.known_ceilings import measured_peak
from mamf.errors import MamfError, UsageError
from mamf.logs.writer import RunLogWriter
from mamf.operations.model.shapes import SIZES
from mamf.plans import Plan


def given(
    options: argparse.Namespace, wanted: Collection[tuple[str, str]], plan: Plan, backend: Backend
) -> dict[tuple[str, str], KnownCeiling]:
    """The wanted ceilings in the logs of ``--ceiling``. One that only some rows may need may be missing. Raises the
    errors of ``given_ceilings``.
    """
    needed = [key for key in wanted if key[1] == plan.regimes[0] or not plan.falls_back]
    found = given_ceilings(options, needed, backend)
    return {key: given_ceiling(each) for key, each in found.items() if key in wanted}


def require_repeated(options: argparse.Namespace, held: KnownCeilings, asked: KnownCeilings) -> None:
    """Raises LogMismatchError for a ceiling that differs from the log's."""
    for key in held.keys() & asked.keys():
        if held[key] != asked[key]:
            then = f"a {' '.join(key)} ceiling of {held[key].tflops:.6g} TFLOPS"
            raise contradiction(options, "ceiling", then, options.ceiling)


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


_OPERATION = "model"
_BATCH, _CONTEXTS = 8, (1024,)


def run(options: argparse.Namespace) -> int:
    options.operation = _OPERATION
    options.shapes = shapes(options)
    options.set = [f"{name}={value}" for name, value in {**architecture(options), **varied(options)}.items()]
    options.kernel = kernels(options)
    return run_session(options, ModelSession)


class ModelSession(KernelsSession):
    """Training steps of models, and the ceilings for their shares."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.given = given(self.options, self.wanted_ceilings(), self.plan, self.backend)
        require_repeated(self.options, self.known_ceilings, self.given)
        self.known_ceilings |= self.given

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


def shapes(options: argparse.Namespace) -> list[str] | None:
    """The shapes; None if a resumed log decides."""
    if options.resume and not asks_for_plan(options):
        return None
    contexts = options.context_lengths or _CONTEXTS
    return [f"b{batch}s{context}" for batch in options.batch or (_BATCH,) for context in contexts]


def architecture(options: argparse.Namespace) -> Mapping[str, Any]:
    """The fields of a problem from the size and the numbers; empty without any."""
    given = {name: getattr(options, name) for name in ("style", *NUMBERS) if getattr(options, name) is not None}
    if not (options.size or given):
        return {}
    named = SIZES[options.size or "small"]
    if "heads" in given and "kv_heads" not in given and named["kv_heads"] == named["heads"]:
        given["kv_heads"] = given["heads"]
    return {**named, **given}


def varied(options: argparse.Namespace) -> Mapping[str, str]:
    """Fields that are measured in every combination."""
    asked = {"phase": options.phase, "optimizer": options.optimizer}
    found = {name: ",".join(values) for name, values in asked.items() if values}
    switches = [name for name in ("autocast", "checkpointing") if getattr(options, name)]
    return {**found, **dict.fromkeys(switches, "yes")}


def kernels(options: argparse.Namespace) -> list[str] | None:
    """The model with each attention, eager and on request compiled; None if a resumed log decides."""
    if options.resume and not asks_for_plan(options):
        return None
    attentions = options.attention or ["sdpa"]
    compiled = attentions if options.compile == [] else options.compile or ()
    if others := [name for name in compiled if name not in attentions]:
        raise UsageError(f"--compile {' '.join(others)}: name it by --attention too")
    ways = [(way, name) for name in attentions for way in ("torch", "compiled") if way == "torch" or name in compiled]
    return [f"{way}[{name}]" for way, name in ways]
