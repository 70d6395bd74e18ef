"""``mamf model``: training steps of language models, and the ceilings for their shares."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from mamf.backend import Backend
from mamf.cli.options import add, add_session_options
from mamf.cli.planning import add_parameters
from mamf.cli.session import Session, run_kernels
from mamf.cli.terminal import say_memory, warn
from mamf.errors import MamfError
from mamf.operations.model.operation import Model
from mamf.rate import find_rate

if TYPE_CHECKING:
    from mamf.engine.runner import Setup
    from mamf.engine.strategies.rows import RowsStrategy
    from mamf.rate import Rate

EXAMPLES = """examples:
  mamf model --size small --phase forward forward-backward step
  mamf model --size 1b --batch 4 --context-lengths 2048 8192 --attention sdpa-flash flash-attn-4
  mamf model --size xl --phase step --set optimizer=adamw-fused --compile
  mamf model --set d_model=1024 d_ff=4096 layers=8 heads=8 kv_heads=8 --context-lengths 512
  mamf model --resume LOG                               continue after Ctrl-C or kill
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_parameters(parser, Model(), defaults={"context": (1024,)})
    group = parser.add_argument_group("what")
    group.add_argument(
        "--attention", nargs="+", metavar="KERNEL", help="attention kernels of 'mamf kernels' (default: sdpa)"
    )
    group.add_argument("--compile", action="store_true", default=None, help="also under torch.compile")
    add(parser, "--ceiling", default_text="the ceilings that 'mamf peak' knows")
    add_session_options(parser, regimes="sustained")


def run(options: argparse.Namespace) -> int:
    options.kernel = kernels(options)
    return run_kernels(options, ModelSession, Model())


def kernels(options: argparse.Namespace) -> list[str] | None:
    """The model with each attention, eager and on request compiled; None if a resumed log decides."""
    from mamf.cli.resuming import asks_for_plan

    if options.resume and not asks_for_plan(options):
        return None
    ways = ("torch", "compiled") if options.compile else ("torch",)
    return [f"{way}[{name}]" for name in options.attention or ("sdpa",) for way in ways]


class ModelSession(Session):
    """Training steps of models, and the ceilings for their shares."""

    def __init__(self, *arguments: Any) -> None:
        from mamf.ceilings.ceiling import given_ceiling
        from mamf.cli.ceilings import given_ceilings, wanted_ceilings
        from mamf.cli.resuming import contradiction
        from mamf.logs.records import known_ceiling_record

        super().__init__(*arguments)
        wanted = wanted_ceilings(self.plan)
        self.known_ceilings = dict(self.log.known_ceilings) if self.log else {}
        for key, each in given_ceilings(self.options, wanted, self.backend).items():
            ceiling, before = given_ceiling(each), self.known_ceilings.get(key)
            if before and known_ceiling_record(before) != known_ceiling_record(ceiling):
                then = f"a {' '.join(key)} ceiling of {before.tflops:.6g} TFLOPS"
                raise contradiction(self.options, "ceiling", then, self.options.ceiling)
            if any(find_rate({key: ceiling}, *each) for each in wanted):
                self.known_ceilings[key] = ceiling

    def say_plan(self) -> None:
        super().say_plan()
        needed = max((problem.nbytes(shape) for _, problem, shape, _ in self.driven.steps), default=0)
        say_memory(needed, "the largest without its activations", self.backend)

    def strategy(self, setup: Setup) -> RowsStrategy:
        from mamf.cli.ceilings import wanted_ceilings
        from mamf.engine.strategies.rows import RowsStrategy
        from mamf.logs.recording import Record
        from mamf.logs.records import known_ceiling_record

        missing = [key for key in wanted_ceilings(self.plan) if find_rate(self.known_ceilings, *key) is None]
        self.known_ceilings |= known_here(self.backend, missing)
        logged = self.log.known_ceilings if self.log else {}
        new = [
            Record("known_ceiling", known_ceiling_record(each))
            for key, each in self.known_ceilings.items()
            if key not in logged
        ]
        return RowsStrategy(setup, records=new)


def known_here(backend: Backend, needed: Collection[tuple[str, str]]) -> dict[tuple[str, str], Rate]:
    """Ceilings that were measured on this device or contributed for its model; warns of missing ones."""
    from mamf.contribution.known_ceilings import measured_peak

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
