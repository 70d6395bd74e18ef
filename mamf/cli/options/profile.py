"""The options of ``mamf profile``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.cli.options import add, add_device_options, add_output_options, size

EXAMPLES = """examples:
  mamf profile train.py --lr 3e-4                       options after SCRIPT belong to the script
  mamf profile --steps 5 --ceiling find.jsonl --output step.jsonl train.py
  mamf profile --calls model:generate serve.py          without an optimizer: each call is a step
  mamf profile --stop -m package.train --lr 3e-4        a module; end it after the last profiled step
  mamf profile --from trace.json.gz                     an existing Chrome trace; of a folder: one per rank
  torchrun --nproc-per-node 8 -m mamf profile train.py  profile the first rank
  torchrun --nproc-per-node 8 -m mamf profile --ranks all --output ranks train.py
The exit code is the script's; 1 if it ended well and nothing could be profiled.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    script = parser.add_argument(
        "script", nargs=argparse.PARSER, metavar="SCRIPT", help="a Python file, followed by its own arguments"
    )
    script.required = False  # --from needs none
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("--steps", type=size, default=3, metavar="N", help="steps to profile (default: 3)")
    parser.add_argument(
        "--warmup",
        type=size,
        default=5,
        metavar="N",
        help="steps before them (default: 5); after them, the same number of steps is timed without the profiler",
    )
    parser.add_argument(
        "--calls", metavar="MODULE:FUNCTION", help="a step is a call of it (default: a step of the optimizer)"
    )
    parser.add_argument("--stop", action="store_true", help="end the script after the last profiled step, with code 0")
    parser.add_argument(
        "--ranks",
        choices=("first", "all"),
        default="first",
        help="under torchrun: profile the first rank, or all: a log per rank in the folder --output, for 'mamf show'",
    )
    # An option with several values would take SCRIPT too.
    add(
        parser,
        "--ceiling",
        nargs=None,
        action="append",
        default=[],
        default_text="the ceilings that 'mamf peak' knows; repeatable",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="keep the steps as a Chrome trace, for Perfetto")
    parser.add_argument(
        "--memory", type=Path, metavar="FILE", help="keep the allocations (CUDA), and report what causes the peak"
    )
    parser.add_argument("--nvtx", action="store_true", help="mark modules as ranges for nsys or rocprofv3")
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help="read a Chrome trace (.json, .json.gz), a folder of one per rank, or a list of launches (.csv)",
    )
    add(parser, "--output", default_text="none")
    add_device_options(parser)
    add_output_options(parser)
    parser.set_defaults(script=None)
