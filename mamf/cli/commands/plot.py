"""Implement the command ``mamf plot LOG``: draw a chart of the measurements in a run log, and save it as PNG or SVG."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mamf.cli.terminal import add_shared_options, print_line
from mamf.errors import UsageError
from mamf.plans import REGIME_NAMES

if TYPE_CHECKING:
    from mamf.report.charts.picture import Picture

EXAMPLES = """examples:
  mamf plot attention.jsonl                                 attention.png: TFLOPS against sequence length
  mamf plot attention.jsonl --direction fwd --output forward.svg
  mamf plot sweep.jsonl --regime burst
  mamf plot model.jsonl                                     training steps by phase, and their MAMFU
  mamf plot attention.jsonl --cycles                        share of clock cycles used against the clock frequency
  mamf plot FOLDER                                          draw devices side by side, from a folder of 'mamf node'
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs",
        type=Path,
        nargs="+",
        metavar="LOG",
        help="a run log, all logs of one run or their folder, logs of mamf-finder, or folders that 'mamf node' wrote",
    )
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="FILE",
        help="picture file to write, .png or .svg (default: the log's name with .png)",
    )
    add_shared_options(parser, "--overwrite")
    add_shared_options(
        parser,
        "--regime",
        nargs=None,
        choices=REGIME_NAMES,
        help="regime (type of load) of the rows to draw (default: all regimes, but only the first one of an attention "
        "log)",
    )
    parser.add_argument(
        "--direction", nargs="+", metavar="PASS", help="attention passes to draw: fwd, bwd or fwd+bwd (default: all)"
    )
    parser.add_argument(
        "--cycles",
        action="store_true",
        help="draw FLOP per clock cycle, as a share of the maximum, against the clock frequency",
    )


def run_with_options(options: argparse.Namespace) -> int:
    from mamf.report.charts.picture import check_image_path, draw_figure, save_figure

    path = options.output or Path(f"{options.logs[0].stem}.png")
    check_image_path(path, options.overwrite)
    save_figure(draw_figure(_make_picture(options)), path, options.overwrite)
    print_line(f"figure: {path}")
    return 0


def _make_picture(options: argparse.Namespace) -> Picture:
    from mamf.cli.reading import read_log
    from mamf.kinds.registry import make_log_chart
    from mamf.logs.legacy import read_legacy_log_or_none
    from mamf.logs.shared_runs import is_shared_run_folder
    from mamf.node.logs import make_contributed_baseline, read_node_folders
    from mamf.node.report import make_node_chart
    from mamf.node.verdict import judge_devices
    from mamf.report.charts.clocks import make_clock_chart
    from mamf.report.imported import make_compared_run, make_side_by_side_chart

    if options.cycles:
        _refuse_regime_and_direction(options, "a picture of cycles")
        return make_clock_chart(read_log(*options.logs))
    folders = [path for path in options.logs if path.is_dir() and not is_shared_run_folder(path)]
    if len(folders) == len(options.logs):
        _refuse_regime_and_direction(options, "the chart of a node")
        _, devices = read_node_folders(options.logs)
        return make_node_chart(devices, judge_devices(devices, make_contributed_baseline(devices)))
    if folders:
        raise UsageError(
            f"mamf cannot draw {folders[0]}, a folder of 'mamf node', together with logs: give only such folders, or "
            "only logs"
        )
    finder_runs = [None if path.is_dir() else read_legacy_log_or_none(path) for path in options.logs]
    if any(finder_runs):
        _refuse_regime_and_direction(options, "a log of mamf-finder")
        return make_side_by_side_chart(
            [
                make_compared_run(path.name, run or read_log(path))
                for path, run in zip(options.logs, finder_runs, strict=True)
            ]
        )
    return make_log_chart(read_log(*options.logs), options.regime, options.direction)


def _refuse_regime_and_direction(options: argparse.Namespace, picture_name: str) -> None:
    for option_name in ("regime", "direction"):
        if getattr(options, option_name):
            raise UsageError(f"--{option_name} does not apply to {picture_name}: leave --{option_name} out")
