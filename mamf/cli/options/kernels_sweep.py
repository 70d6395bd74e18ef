"""The options of ``mamf sweep --operation NAME``."""

from __future__ import annotations

import argparse

from mamf.cli.options.operations import add_operation_options, add_session_options

EXAMPLES = """examples:
  mamf sweep --operation NAME                               default shapes, every available kernel
  mamf sweep --operation NAME --shapes A B --set FIELD=X,Y  each shape, with each value of a field of its problem
  mamf sweep --operation NAME --resume LOG                  continue after Ctrl-C or kill
  mamf find --operation NAME --help                         its confirmed ceilings
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_operation_options(parser)
    add_session_options(parser)
