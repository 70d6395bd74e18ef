"""``mamf plot LOG``: draw a run log as PNG or SVG."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.cli.reading import read_log
from mamf.cli.terminal import say, warn
from mamf.errors import UsageError
from mamf.kinds.registry import chart_of
from mamf.logs.legacy import read_legacy_or_none
from mamf.logs.run_log import RunLog
from mamf.node.logs import contributed_baseline, read_nodes
from mamf.node.report import node_chart
from mamf.node.verdict import judge
from mamf.operations.attention.operation import is_attention
from mamf.report.charts.chart import Chart
from mamf.report.charts.plotting import Picture, draw, exists, file_type, save
from mamf.report.imported import beside_chart, shown_log, shown_run


def run(options: argparse.Namespace) -> int:
    path = options.output or Path(f"{options.logs[0].stem}.png")
    file_type(path)
    if path.exists() and not options.overwrite:
        raise exists(path)
    save(draw(_picture(options)), path, options.overwrite)
    say(f"figure: {path}")
    return 0


def _picture(options: argparse.Namespace) -> Picture:
    folders = [path for path in options.logs if path.is_dir()]
    if len(folders) == len(options.logs):
        return _of_nodes(options)
    if folders:
        raise UsageError(f"{folders[0]} is a folder of 'mamf node': draw folders and logs separately")
    imported = [read_legacy_or_none(path) for path in options.logs]
    if any(imported):
        _require_no_choice(options, "a log of mamf-finder")
        named = zip(options.logs, imported, strict=True)
        return beside_chart([shown_run(path.stem, run) if run else shown_log(read_log(path)) for path, run in named])
    if len(options.logs) > 1:
        raise UsageError("only logs of mamf-finder share a picture: draw them one by one")
    log = read_log(options.logs[0])
    picture = chart_of(log, options.regime, options.direction)
    _warn_of_other_regimes(log, options.regime)
    return picture


def _of_nodes(options: argparse.Namespace) -> Chart:
    _require_no_choice(options, "a node")
    _, devices = read_nodes(options.logs)
    return node_chart(devices, judge(devices, contributed_baseline(devices)))


def _require_no_choice(options: argparse.Namespace, what: str) -> None:
    for given in ("regime", "direction"):
        if getattr(options, given):
            raise UsageError(f"{what} has no {given}: leave --{given} out")


def _warn_of_other_regimes(log: RunLog, wanted: str | None) -> None:
    held = list(dict.fromkeys(row.regime for row in log.measurements if row.ok and is_attention(row)))
    if wanted is None and len(held) > 1:
        warn(f"drawing {held[0]}; --regime draws {' or '.join(held[1:])}")
