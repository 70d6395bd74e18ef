"""``mamf node --from``: the verdict on a node from its logs alone, without torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mamf.choices import UNKNOWN, VERDICT_EXIT_CODES
from mamf.cli.printing import terminal_width
from mamf.cli.terminal import say, say_lines, warn
from mamf.errors import MamfError, UsageError
from mamf.node.baselines import baseline_of, contributed_baselines, headers_of, unfit
from mamf.node.figures import Device
from mamf.node.gathering import Run, devices_of
from mamf.node.report import render_node
from mamf.node.verdict import judged
from mamf.report.formats import TABLE_ALONE


def exit_unknown(work: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """The exit code of ``work``, UNKNOWN after an error: 1 and 2 are verdicts."""
    try:
        return work(options)
    except MamfError as error:
        warn(str(error))
        return VERDICT_EXIT_CODES[UNKNOWN]


def existing(folder: Path) -> Path:
    """Raises UsageError if there is no such folder."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder: name one with the logs of 'mamf node'")
    return folder


def print_verdict(options: argparse.Namespace, run: Run, devices: Sequence[Device], folders: Sequence[Path]) -> int:
    """Print the verdict; returns its exit code."""
    headers, bad = headers_of(folders), dict[str, str]()
    if options.baseline:
        baselines = baseline_of(options.baseline)
        bad = unfit(baselines, devices, headers)
        baselines = {name: baseline for name, baseline in baselines.items() if name not in bad}
    else:
        baselines = contributed_baselines(devices, headers)
    verdict = judged(devices, baselines, bad.values())
    say_lines(render_node(options.format, run, devices, verdict, terminal_width(options)))
    if options.format in TABLE_ALONE:
        say(verdict.reason, sys.stderr)
    return verdict.exit_code


def run(options: argparse.Namespace) -> int:
    return exit_unknown(_run, options)


def _run(options: argparse.Namespace) -> int:
    run, devices = devices_of([existing(folder) for folder in options.logs])
    return print_verdict(options, run, devices, options.logs)
