"""``mamf node``: measures every device of this machine at once, and prints a verdict that a gate can act on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mamf.choices import UNKNOWN, VERDICT_EXIT_CODES
from mamf.cli import call
from mamf.cli.interruption import EXIT_CODE
from mamf.cli.printing import print_document
from mamf.cli.terminal import say, warn
from mamf.errors import MamfError
from mamf.node.logs import contributed_baseline, read_baseline, read_nodes
from mamf.node.report import node_document
from mamf.node.verdict import Baseline, Device, judge
from mamf.plans import NODE_BUDGET_SECONDS
from mamf.report.formats import TABLE_ALONE


def run(options: argparse.Namespace) -> int:
    """Return the exit code of the verdict: UNKNOWN after an error, since 1 and 2 say that a device is bad."""
    try:
        return _run(options)
    except MamfError as error:
        warn(str(error))
        return VERDICT_EXIT_CODES[UNKNOWN]


def _run(options: argparse.Namespace) -> int:
    baseline = read_baseline(options.baseline) if options.baseline else None
    if options.logs:
        return _print_verdict(options, *read_nodes(options.logs), baseline)
    from mamf.cli import node_measuring  # imports torch

    if options.led:
        return node_measuring.measure_device(options)
    indices = node_measuring.choose_devices(options)
    if options.dry_run or not indices:
        return _print_plan(options, indices)
    folder, run, devices = node_measuring.measure_devices(options, indices)
    code = _print_verdict(options, run.not_together, devices, baseline)
    say(f"logs: {folder}", sys.stderr)
    if not run.is_over:
        return EXIT_CODE
    if options.overlap:
        call(["overlap", "--backend", options.backend, *(["--dtype", options.dtype] if options.dtype else [])])
    return code


def _print_plan(options: argparse.Namespace, indices: Sequence[int]) -> int:
    if not indices:
        say("the first process on this machine measures all of its devices", sys.stderr)
        return 0
    say(f"devices: {len(indices)} of {options.backend} ({', '.join(map(str, indices))}), one process each")
    verify = f", verify ({options.verify:.0f} s)" if options.verify else ""
    budget = f"in {options.budget or NODE_BUDGET_SECONDS:.0f} s"
    say(f"each: find, bandwidth and copies {budget}{verify}")
    say("together: " + ("peer copies" if len(indices) > 1 else "nothing, there is only one device"))
    return 0


def _print_verdict(
    options: argparse.Namespace, not_together: str, devices: Sequence[Device], baseline: Baseline | None
) -> int:
    verdict = judge(devices, baseline or contributed_baseline(devices), must_fit=baseline is not None)
    print_document(options, node_document(devices, verdict, not_together))
    if options.format in TABLE_ALONE:
        say(verdict.reason, sys.stderr)
    return verdict.exit_code
