"""The options of ``mamf model``."""

from __future__ import annotations

import argparse

from mamf.cli.options.operations import add_session_options
from mamf.cli.options.shared import add
from mamf.cli.options.values import size
from mamf.operations.model.shapes import OPTIMIZERS, PHASES, SIZES, STYLES

EXAMPLES = """examples:
  mamf model --size small --phase forward forward-backward step --regime sustained
  mamf model --size 1b --batch 4 --context-lengths 2048 8192 --attention sdpa-flash flash-attn-4 --regime sustained
  mamf model --size xl --phase step --optimizer adamw-fused --compile --regime sustained
  mamf model --attention sdpa-flash sdpa-cudnn --compile sdpa-flash
  mamf model --d-model 1024 --layers 8 --heads 8 --context-lengths 512
  mamf model --resume LOG                               continue after Ctrl-C or kill
"""


#: The numbers of an architecture, with what each is.
NUMBERS = {
    "d_model": "width of the residual stream",
    "d_ff": "inner width of the MLP",
    "layers": "transformer blocks",
    "heads": "query heads",
    "kv_heads": "key and value heads (default: as many as --heads)",
    "experts": "experts of a mixture of experts",
    "active_experts": "experts that see each token",
    "vocabulary": "tokens in the vocabulary",
}


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model", "a named size, numbers, or a size with some of its numbers changed")
    group.add_argument("--size", choices=SIZES, help="small to 2.7b: GPT-2; 1b, 3b, 8b: Llama 3 (default: small)")
    group.add_argument("--style", choices=STYLES, help="blocks like those of this family (default: the size's)")
    for name, description in NUMBERS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=size, metavar="N", help=description)
    group = parser.add_argument_group("what", "several values are measured in every combination")
    group.add_argument("--batch", type=size, nargs="+", metavar="N", help="sequences in a batch (default: 8)")
    group.add_argument("--context-lengths", type=size, nargs="+", metavar="N", help="tokens each (default: 1024)")
    group.add_argument(
        "--phase",
        choices=PHASES,
        nargs="+",
        help="part of a training step; forward-backward minus forward is the backward pass (default: forward)",
    )
    group.add_argument("--optimizer", choices=OPTIMIZERS, nargs="+", help="optimizer of a step (default: adamw)")
    group.add_argument(
        "--autocast", action="store_true", default=None, help="parameters in float32, products in --dtype"
    )
    group.add_argument(
        "--checkpointing", action="store_true", default=None, help="recompute activations in the backward pass"
    )
    group.add_argument(
        "--attention", nargs="+", metavar="KERNEL", help="attention kernels of 'mamf kernels' (default: sdpa)"
    )
    group.add_argument(
        "--compile", nargs="*", metavar="KERNEL", help="also under torch.compile, by default each --attention"
    )
    add(group, "--dtype")
    add(parser, "--ceiling", default_text="the ceilings that 'mamf peak' knows")
    add_session_options(parser, regimes="burst, and sustained for what outlasts a burst")
