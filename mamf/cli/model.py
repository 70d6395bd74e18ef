"""``mamf model``: steps of language models, with the options that people expect of them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mamf.cli import kernels_sweep
from mamf.cli.model_ceilings import given, known_here, require_repeated
from mamf.cli.options import say_memory, size
from mamf.cli.resuming import asks_for_plan
from mamf.errors import UsageError
from mamf.logs.writer import RunLogWriter
from mamf.operations.model.shapes import OPTIMIZERS, PHASES, SIZES, STYLES

_OPERATION = "model"
_BATCH, _CONTEXTS = 8, (1024,)
_NUMBERS = {
    "d_model": "width of the residual stream",
    "d_ff": "width of the MLP's inside",
    "layers": "blocks",
    "heads": "heads of the queries",
    "kv_heads": "heads of keys and values (default: as many)",
    "experts": "experts of a moe",
    "active_experts": "of them for each token",
    "vocabulary": "tokens that there are",
}
_EXAMPLES = """examples:
  mamf model --size small --phase forward forward-backward step --regime sustained
  mamf model --size 1b --batch 4 --context-lengths 2048 8192 --attention sdpa-flash flash-attn-4 --regime sustained
  mamf model --size xl --phase step --optimizer adamw-fused --compile --regime sustained
  mamf model --attention sdpa-flash sdpa-cudnn --compile sdpa-flash
  mamf model --d-model 1024 --layers 8 --heads 8 --context-lengths 512
  mamf model --resume LOG                               go on after Ctrl-C or kill
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    group = parser.add_argument_group("model", "a named size, numbers, or a size with some of its numbers changed")
    group.add_argument("--size", choices=SIZES, help="small to 2.7b: GPT-2; 1b, 3b, 8b: Llama 3 (default: small)")
    group.add_argument("--style", choices=STYLES, help="what blocks are made of (default: the size's)")
    for name, told in _NUMBERS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=size, metavar="N", help=told)
    group = parser.add_argument_group("what", "several values are measured in every combination")
    group.add_argument("--batch", type=size, nargs="+", metavar="N", help=f"sequences (default: {_BATCH})")
    group.add_argument("--context-lengths", type=size, nargs="+", metavar="N", help="tokens of each (default: 1024)")
    group.add_argument(
        "--phase", choices=PHASES, nargs="+", help="the backward alone is a difference (default: forward)"
    )
    group.add_argument("--optimizer", choices=OPTIMIZERS, nargs="+", help="of a step (default: adamw)")
    group.add_argument(
        "--autocast", action="store_true", default=None, help="parameters in float32, products in --dtype"
    )
    group.add_argument("--checkpointing", action="store_true", default=None, help="run blocks again in the backward")
    group.add_argument("--attention", nargs="+", metavar="KERNEL", help="any of 'mamf kernels' (default: sdpa)")
    group.add_argument(
        "--compile", nargs="*", metavar="KERNEL", help="under torch.compile too (default: with each --attention)"
    )
    group.add_argument("--dtype", nargs="+", help="of parameters and activations (default: the device's)")
    parser.add_argument(
        "--ceiling", type=Path, nargs="+", metavar="LOG", help="of 'mamf find', for MAMFU (default: as 'mamf peak')"
    )
    kernels_sweep.add_run(parser)
    parser.set_defaults(run=run, session=ModelSession)


def run(options: argparse.Namespace) -> int:
    options.command = options.operation = _OPERATION
    options.shapes = shapes(options)
    options.set = [f"{name}={value}" for name, value in {**architecture(options), **varied(options)}.items()]
    options.kernel = kernels(options)
    return kernels_sweep.run(options)


class ModelSession(kernels_sweep.KernelsSession):
    """Steps of models, and the ceilings that they are shares of."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.given = given(self.options, self.wanted_ceilings(), self.backend)
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
    """None where a resumed log says."""
    if options.resume and not asks_for_plan(options):
        return None
    contexts = options.context_lengths or _CONTEXTS
    return [f"b{batch}s{context}" for batch in options.batch or (_BATCH,) for context in contexts]


def architecture(options: argparse.Namespace) -> Mapping[str, Any]:
    """The fields of a problem that the size and the numbers make up, where any is asked for."""
    given = {name: getattr(options, name) for name in ("style", *_NUMBERS) if getattr(options, name) is not None}
    if not (options.size or given):
        return {}
    named = SIZES[options.size or "small"]
    if "heads" in given and "kv_heads" not in given and named["kv_heads"] == named["heads"]:
        given["kv_heads"] = given["heads"]
    return {**named, **given}


def varied(options: argparse.Namespace) -> Mapping[str, str]:
    """What is measured in every combination."""
    asked = {"phase": options.phase, "optimizer": options.optimizer}
    found = {name: ",".join(values) for name, values in asked.items() if values}
    switches = [name for name in ("autocast", "checkpointing") if getattr(options, name)]
    return {**found, **dict.fromkeys(switches, "yes")}


def kernels(options: argparse.Namespace) -> list[str] | None:
    """Each attention in the model as it is and, where asked for, compiled too; None where a resumed log says."""
    if options.resume and not asks_for_plan(options):
        return None
    attentions = options.attention or ["sdpa"]
    compiled = attentions if options.compile == [] else options.compile or ()
    if others := [name for name in compiled if name not in attentions]:
        raise UsageError(f"--compile {' '.join(others)}: name it by --attention too")
    ways = [(way, name) for name in attentions for way in ("torch", "compiled") if way == "torch" or name in compiled]
    return [f"{way}[{name}]" for way, name in ways]
