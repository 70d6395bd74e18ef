"""The options of ``mamf find --operation NAME``."""

from __future__ import annotations

from mamf.cli.options import add_session_options
from mamf.cli.parser import Parser
from mamf.cli.planning import add_named_operation
from mamf.plans import DEFAULT_BUDGET_SECONDS

EXAMPLES = """examples:
  mamf find --operation bandwidth --set pattern=copy,read,write,triad
  mamf find --operation NAME --regime burst --budget 20s
  mamf find --operation NAME --resume LOG                   continue after Ctrl-C or kill
"""


_BUDGET = f"{DEFAULT_BUDGET_SECONDS:.0f}s, and half of it for each problem beyond the first"


def configure(parser: Parser) -> None:
    add_named_operation(parser)
    add_session_options(parser, budget=_BUDGET, regimes="both")
