"""The options of ``mamf results``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.cli.options.parser import Parser
from mamf.cli.options.shared import add

EXAMPLES = """examples:
  mamf results check run.jsonl                          one line per finding; exit code 1 if the log is rejected
  mamf results check results                            a whole folder: each log in its place, and only once
  mamf results submit run.jsonl                         check, copy into results/, print the git commands
  mamf results submit run.jsonl --dry-run               without a clone: print where in results/ the log belongs
  mamf results table                                    write results/README.md and the page of each accelerator
  mamf results site --output site                       write pages of all figures: open site/index.html
"""


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(
        title="actions", metavar="ACTION", dest="action", required=True, parser_class=Parser
    )
    check = actions.add_parser("check", help="check logs against the rules of results/")
    check.add_argument(
        "paths", type=Path, nargs="+", metavar="FILE", help="run logs, or folders of them (warnings are only counted)"
    )
    add(check, "--format", choices=("table", "json"))
    submit = actions.add_parser("submit", help="check a log, and copy it into results/")
    submit.add_argument("log", type=Path, metavar="LOG", help="a run log, or a folder of --devices")
    add(submit, "--dry-run")
    table = actions.add_parser("table", help="write the tables of results/ from its logs")
    table.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a table is out of date")
    site = actions.add_parser("site", help="write static pages and downloads of results/ from its logs")
    site.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="new, empty, or of an earlier site")
    site.add_argument("--logs", metavar="URL", help="where the logs are published (default: relative links to them)")
    for action in (submit, table, site):
        action.add_argument(
            "--results", type=Path, default=Path("results"), metavar="FOLDER", help="the folder (default: results)"
        )
    for action in (check, submit, table, site):
        action.set_defaults(parser=action)
