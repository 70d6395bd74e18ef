"""The options of ``mamf autoprofile``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.cli.options.shared import add, add_device_options

EXAMPLES = """examples:
  mamf autoprofile                                      ./autoprofile: ceilings, attention, a model step, SUMMARY.md
  mamf autoprofile --output-folder h200 --seq-lens 4096 16384 --head-dims 64 128 --budget 10m
  SEQLEN=8192 NHEADS=16 mamf autoprofile                sizes from the environment
  mamf autoprofile --operation bandwidth                another operation instead of attention
  mamf autoprofile --from h200                          write SUMMARY.md again from the logs
Repeat the command to measure what is missing.
"""


#: The environment variables that sizes are taken from, by option.
VARIABLES = {"seq_lens": "SEQLEN", "batch": "BATCH", "heads": "NHEADS", "head_dims": "HEADDIM"}


def configure(parser: argparse.ArgumentParser) -> None:
    add(parser, "--output-folder", default=Path("autoprofile"), default_text="autoprofile")
    add(parser, "--from", dest="source")
    variables = ", ".join(VARIABLES.values())
    group = parser.add_argument_group("what", f"sizes that are not given are taken from the environment: {variables}")
    add(group, "--operation", default="attention", default_text="attention")
    add(group, "--kernel", default_text="all available kernels, on a CPU those that need no compiler")
    add(group, "--dtype", nargs=None)
    for name in VARIABLES:
        add(group, f"--{name.replace('_', '-')}")
    add(group, "--ceiling", nargs=None, default_text="a search comes first")
    add(parser, "--budget", default_text="270s, 150s on a CPU")
    add_device_options(parser)
