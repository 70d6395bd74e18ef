"""``mamf plot LOG``: draw a run log as PNG or SVG."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from mamf.charts.chart import QUANTITIES, Chart, find_chart, sweep_chart
from mamf.charts.kernels import kernels_chart
from mamf.charts.plotting import draw, exists, file_type, save
from mamf.cli.reading import read_log
from mamf.cli.terminal import say, warn
from mamf.errors import UsageError
from mamf.logs.run_log import RunLog
from mamf.operations.attention.charts import attention_chart
from mamf.operations.attention.operation import Attention
from mamf.operations.attention.rows import is_attention
from mamf.operations.attention.shapes import DIRECTIONS
from mamf.plans import FindPlan, KernelsPlan
from mamf.regimes.names import NAMES

_EXAMPLES = """examples:
  mamf plot attention.jsonl                                 attention.png: TFLOPS and time against sequence length
  mamf plot attention.jsonl --direction fwd --quantity tflops --output forward.svg
  mamf plot sweep.jsonl --regime burst
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument("log", type=Path, metavar="LOG", help="a run log of any kind")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=".png or .svg (default: the log's name, .png, here)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    parser.add_argument(
        "--regime", choices=list(NAMES), help="one regime (default: of attention the log's first, else all)"
    )
    parser.add_argument(
        "--direction", choices=DIRECTIONS, nargs="+", help="of attention: some directions (default: all)"
    )
    parser.add_argument(
        "--quantity", choices=QUANTITIES, nargs="+", help="what to draw (default: of attention both, else tflops)"
    )
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    log = read_log(options.log)
    path = options.output or Path(f"{options.log.stem}.png")
    file_type(path)
    if path.exists() and not options.overwrite:
        raise exists(path)
    chart = chart_of(log, options)
    if log.tier == "interrupted":
        chart = replace(chart, notes=(*chart.notes, "the run was interrupted: what is best may never have been tried"))
    save(draw(chart), path, options.overwrite)
    say(f"figure: {path}")
    return 0


def chart_of(log: RunLog, options: argparse.Namespace) -> Chart:
    """What the options ask of the log, as data. Raises UsageError for what a log of its kind does not have."""
    plan = log.plan
    rows, regime = log.measurements, options.regime
    quantities = tuple(name for name in QUANTITIES if name in (options.quantity or QUANTITIES))
    if isinstance(plan, KernelsPlan) and plan.operation == Attention.name:
        _tell_other_regimes(log, regime)
        return attention_chart(rows, log.all_ceilings, log.header, regime, options.direction, quantities)
    if options.direction:
        of = plan.operation if isinstance(plan, KernelsPlan) else "matmul"
        raise UsageError(f"{log.path} is of {of}, which has no direction: leave --direction out")
    if isinstance(plan, FindPlan):
        if options.quantity not in (None, ["tflops"]):
            raise UsageError(f"{log.path} is of a find, whose shapes take incomparable times: leave --quantity out")
        return find_chart(rows, log.ceilings, log.header, regime)
    drawn = kernels_chart if isinstance(plan, KernelsPlan) else sweep_chart
    return drawn(rows, log.header, regime, quantities if options.quantity else ("tflops",))


def _tell_other_regimes(log: RunLog, wanted: str | None) -> None:
    held = list(dict.fromkeys(row.regime for row in log.measurements if row.ok and is_attention(row)))
    if wanted is None and len(held) > 1:
        warn(f"drawing {held[0]}; --regime draws {' or '.join(held[1:])}")
