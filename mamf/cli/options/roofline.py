"""The options of ``mamf roofline``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.choices import EXPORTS
from mamf.cli.options import add, add_device_options, add_output_options

EXAMPLES = """examples:
  mamf roofline                                             measure the roofs and balance points of the device
  mamf roofline --dtype bfloat16 fp8 --output-folder roofs --picture roofline.png
  mamf roofline attention.jsonl decode.jsonl --ceiling roofs/*.jsonl --picture roofline.svg
  mamf roofline --ceiling find.jsonl bandwidth.jsonl --export tracelens --export-file h200.json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rows", type=Path, nargs="*", metavar="LOG", help="logs whose rows are placed under the roof")
    add(parser, "--ceiling", default_text="they are measured")
    add(parser, "--anyway")
    group = parser.add_argument_group("measuring")
    add(group, "--dtype")
    add(group, "--regime", default_text="both")
    add(group, "--budget", default_text="57s per dtype and 86s for bandwidth")
    add(group, "--dry-run", "--notes")
    add(group, "--output-folder", default_text="roofline and the date; finds in it are continued")
    add_device_options(parser)
    group = parser.add_argument_group("files")
    add(group, "--picture")
    group.add_argument("--export", choices=EXPORTS, help="write the measured roofs for another tool")
    group.add_argument("--export-file", type=Path, metavar="FILE", help="file to export to (default: tracelens.json)")
    add(group, "--overwrite")
    add_output_options(parser)
