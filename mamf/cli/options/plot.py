"""The options of ``mamf plot``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.cli.options.shared import add
from mamf.regime_names import NAMES

EXAMPLES = """examples:
  mamf plot attention.jsonl                                 attention.png: TFLOPS against sequence length
  mamf plot attention.jsonl --direction fwd --output forward.svg
  mamf plot sweep.jsonl --regime burst
  mamf plot model.jsonl                                     training steps by phase, and their MAMFU
  mamf plot FOLDER                                          devices side by side, from a folder of 'mamf node'
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs",
        type=Path,
        nargs="+",
        metavar="LOG",
        help="a run log, the logs or folder of a shared run, logs of mamf-finder, or folders of 'mamf node'",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="picture to write: .png or .svg (default: the log's name with .png)"
    )
    add(parser, "--overwrite")
    add(parser, "--regime", nargs=None, choices=NAMES, default_text="all, for attention the log's first")
    add(parser, "--direction", default_text="all")
