"""``mamf node``: every device of this machine, or of many, at once, and a verdict that a gate can act on."""

from __future__ import annotations

import argparse

from mamf.cli import call, node_measuring
from mamf.cli.commands.node_reading import exit_unknown
from mamf.cli.interruption import EXIT_CODE
from mamf.cli.options.values import ALL
from mamf.errors import UsageError
from mamf.node.baselines import baseline_of
from mamf.operations.matmul.selection import kernel


def run(options: argparse.Namespace) -> int:
    return exit_unknown(_run, options)


def _run(options: argparse.Namespace) -> int:
    if options.resume and options.output_folder:
        raise UsageError("--resume continues its own folder: leave --output-folder out")
    baseline_of(options.baseline or ())  # reports a wrong one before anything is measured
    for name in options.kernel or ():
        kernel(name)
    if ALL in (options.devices or ()):
        options.devices = None
    code = node_measuring.run(options)
    if options.overlap and not options.led and not options.dry_run and code != EXIT_CODE:
        call(["overlap", "--backend", options.backend, *(["--dtype", options.dtype] if options.dtype else [])])
    return code
