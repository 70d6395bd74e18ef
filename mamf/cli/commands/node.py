"""Implement the command ``mamf node``: measure all devices of this machine at once, and say whether each is as fast and
correct as it should be. Its exit code lets a scheduler reject a bad machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mamf.cli import run_command
from mamf.cli.parser import CommandParser
from mamf.cli.terminal import add_shared_options, parse_duration, parse_index, print_document, print_line, warn
from mamf.cli.watching import INTERRUPTED_EXIT_CODE, exit_on_ctrl_c
from mamf.errors import UNKNOWN, VERDICT_EXIT_CODES, MamfError
from mamf.plans import NODE_BUDGET_SECONDS, VERIFY_BUDGET_SECONDS

if TYPE_CHECKING:
    from mamf.node.verdict import Baseline, NodeDevice

EXAMPLES = """examples:
  mamf node                                     all devices here; exit code 0 OK, 1 WARN, 2 CRITICAL, 3 UNKNOWN
  mamf node --format json --baseline FIND_LOG   for a scheduler: compare with a card that is known to be good
  srun --ntasks-per-node 1 mamf node --output-folder FOLDER   on several machines, one folder each
  mamf node --from FOLDER [FOLDER...]           judge one or more machines from existing logs
"""
_DEFAULT_MAX_SILENT_SECONDS = 120.0


def add_options(parser: CommandParser) -> None:
    group = parser.add_argument_group("what to measure")
    add_shared_options(group, "--backend")
    add_shared_options(group, "--devices", help="devices to measure: their indices, or 'all' (default: all)")
    add_shared_options(group, "--dtype", nargs=None)
    add_shared_options(
        group,
        "--kernel",
        default_text="all available kernels except those that compile for minutes; mamf searches for fast shapes with "
        "the first kernel",
    )
    add_shared_options(
        group,
        "--budget",
        default_text=f"{NODE_BUDGET_SECONDS:.0f}s for the measurements, which run on all devices at once; "
        "--verify, copies between devices and start-up take additional time",
    )
    group.add_argument(
        "--verify",
        type=parse_duration,
        nargs="?",
        const=VERIFY_BUDGET_SECONDS,
        metavar="TIME",
        help="also check results of random problems for TIME, as 'mamf verify' does (TIME defaults to "
        f"{VERIFY_BUDGET_SECONDS:.0f}s)",
    )
    group.add_argument("--overlap", action="store_true", help="also run 'mamf overlap' after the verdict")
    verdict_group = parser.add_argument_group("verdict")
    verdict_group.add_argument(
        "--baseline",
        nargs="+",
        type=Path,
        metavar="LOG",
        help="logs of good cards of the same model, to compare the devices with (default: the ceilings of this model "
        "in results/)",
    )
    add_shared_options(verdict_group, "--patience", default=_DEFAULT_MAX_SILENT_SECONDS, default_text="2m")
    group = parser.add_argument_group("run")
    add_shared_options(group, "--output-folder", default_text="a name with the date")
    add_shared_options(group, "--from", dest="logs", nargs="+")
    add_shared_options(group, "--dry-run")
    group.add_argument("--led", nargs=2, type=parse_index, help=argparse.SUPPRESS)
    add_shared_options(parser, "--format", "--wide")
    parser.usage_exit_code = VERDICT_EXIT_CODES[UNKNOWN]  # The exit code 2 of argparse would mean CRITICAL here.


def run_with_options(options: argparse.Namespace) -> int:
    """Run ``mamf node``: print the verdict on the devices, and return the exit code of the verdict.

    If an error prevents a verdict, return the exit code of the verdict UNKNOWN. The usual exit codes of errors, 1 and
    2, would mean that a device is bad.
    """
    try:
        return _measure_and_judge_devices(options)
    except MamfError as error:
        warn(str(error))
        return VERDICT_EXIT_CODES[UNKNOWN]


def _measure_and_judge_devices(options: argparse.Namespace) -> int:
    from mamf.node.logs import read_baseline, read_node_folders

    baseline = read_baseline(options.baseline) if options.baseline else None
    if options.logs:
        return _print_verdict(options, *read_node_folders(options.logs), baseline)
    with exit_on_ctrl_c():
        # Import this module only if devices are to be measured, because it imports torch.
        from mamf.cli import devices as device_processes

        indices = [] if options.led else device_processes.prepare_node_run(options)
    if options.led:
        return device_processes.run_as_child_process(
            lambda send: device_processes.measure_node_device(options, send), device_processes.describe_node_failure
        )
    if options.dry_run or not indices:
        return _print_measuring_plan(options, indices)
    folder, run, devices = device_processes.measure_node_devices(options, indices)
    exit_code = _print_verdict(options, run.separate_measurement_reason, devices, baseline, not run.is_over)
    print_line(f"logs: {folder}", sys.stderr)
    if not run.is_over:
        return INTERRUPTED_EXIT_CODE
    if options.overlap:
        run_command(["overlap", "--backend", options.backend, *(["--dtype", options.dtype] if options.dtype else [])])
    return exit_code


def _print_measuring_plan(options: argparse.Namespace, indices: Sequence[int]) -> int:
    if not indices:
        print_line(
            "this process measures nothing: the first process on this machine measures all of its devices",
            sys.stderr,
        )
        return 0
    verifying = f", and verifies results for {options.verify:.0f} s" if options.verify else ""
    for line in (
        f"devices: {len(indices)} of {options.backend} ({', '.join(map(str, indices))}), one process each",
        f"each process measures ceilings, bandwidth and copies in {options.budget or NODE_BUDGET_SECONDS:.0f} s"
        f"{verifying}",
        "all processes together measure "
        + ("copies between devices" if len(indices) > 1 else "nothing, because there is only one device"),
    ):
        print_line(line)
    return 0


def _print_verdict(
    options: argparse.Namespace,
    separate_measurement_reason: str,
    devices: Sequence[NodeDevice],
    baseline: Baseline | None,
    is_interrupted: bool = False,
) -> int:
    from mamf.node.logs import make_contributed_baseline
    from mamf.node.report import make_node_document
    from mamf.node.verdict import judge_devices
    from mamf.report.formats import SINGLE_TABLE_FORMATS

    verdict = judge_devices(
        devices, baseline or make_contributed_baseline(devices), must_match_baseline=baseline is not None
    )
    print_document(
        options,
        make_node_document(
            devices, verdict, separate_measurement_reason, baseline.name if baseline else "", is_interrupted
        ),
    )
    if options.format in SINGLE_TABLE_FORMATS:
        print_line(verdict.reason, sys.stderr)
    return verdict.exit_code
