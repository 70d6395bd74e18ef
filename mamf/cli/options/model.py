"""The options of ``mamf model``."""

from __future__ import annotations

import argparse

from mamf.cli.options import add, add_session_options
from mamf.cli.planning import add_parameters
from mamf.operations.model.operation import Model

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
