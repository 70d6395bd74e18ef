"""``mamf sweep --operation NAME``: kernels of any operation over shapes."""

from __future__ import annotations

import argparse

from mamf.cli.options import add_session_options
from mamf.cli.parser import Parser
from mamf.cli.planning import add_named_operation
from mamf.cli.session import Session, run_kernels

EXAMPLES = """examples:
  mamf sweep --operation NAME                               default shapes, every available kernel
  mamf sweep --operation NAME --shapes A B --set FIELD=X,Y  each shape, with each value of a field of its problem
  mamf sweep --operation NAME --resume LOG                  continue after Ctrl-C or kill
  mamf find --operation NAME --help                         its confirmed ceilings
"""


def configure(parser: Parser) -> None:
    add_named_operation(parser)
    add_session_options(parser)


def run(options: argparse.Namespace) -> int:
    return run_kernels(options, Session)
