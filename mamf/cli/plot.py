"""``mamf plot LOG``: draw a run log as PNG or SVG."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.charts.chart import QUANTITIES
from mamf.charts.of_log import chart_of
from mamf.charts.plotting import Picture, draw, exists, file_type, save
from mamf.cli.reading import read_log
from mamf.cli.terminal import say, warn
from mamf.counters.chart import counters_chart
from mamf.counters.log import counted_in
from mamf.logs.run_log import RunLog
from mamf.operations.attention.rows import is_attention
from mamf.operations.attention.shapes import DIRECTIONS
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
    _tell_other_regimes(log, options.regime)
    chart: Picture
    if log.counter_records:
        chart = counters_chart(log.measurements, counted_in(log), log.header)
    else:
        chart = chart_of(log, options.regime, options.direction, options.quantity)
    save(draw(chart), path, options.overwrite)
    say(f"figure: {path}")
    return 0


def _tell_other_regimes(log: RunLog, wanted: str | None) -> None:
    held = list(dict.fromkeys(row.regime for row in log.measurements if row.ok and is_attention(row)))
    if wanted is None and len(held) > 1:
        warn(f"drawing {held[0]}; --regime draws {' or '.join(held[1:])}")
