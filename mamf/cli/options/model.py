"""The options of ``mamf model``."""

from __future__ import annotations

import argparse

from mamf.cli.options import add, add_session_options, size
from mamf.operations.model.shapes import PHASES, SIZES

EXAMPLES = """examples:
  mamf model --size small --phase forward forward-backward step
  mamf model --size 1b --batch 4 --context-lengths 2048 8192 --attention sdpa-flash flash-attn-4
  mamf model --size xl --phase step --set optimizer=adamw-fused --compile
  mamf model --set d_model=1024 d_ff=4096 layers=8 heads=8 kv_heads=8 --context-lengths 512
  mamf model --resume LOG                               continue after Ctrl-C or kill
"""


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what", "several values are measured in every combination")
    group.add_argument("--size", choices=SIZES, help="small to 2.7b: GPT-2; 1b, 3b, 8b: Llama 3 (default: small)")
    add(group, "--set")
    group.add_argument("--batch", type=size, nargs="+", metavar="N", help="sequences in a batch (default: 8)")
    group.add_argument("--context-lengths", type=size, nargs="+", metavar="N", help="tokens each (default: 1024)")
    group.add_argument(
        "--phase",
        choices=PHASES,
        nargs="+",
        help="part of a training step; forward-backward minus forward is the backward pass (default: forward)",
    )
    group.add_argument(
        "--attention", nargs="+", metavar="KERNEL", help="attention kernels of 'mamf kernels' (default: sdpa)"
    )
    group.add_argument("--compile", action="store_true", default=None, help="also under torch.compile")
    add(group, "--dtype")
    add(parser, "--ceiling", default_text="the ceilings that 'mamf peak' knows")
    add_session_options(parser, regimes="sustained")
