"""Measures the devices of ``mamf node``: the parent process, and the child process of each device."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from mamf.cli.devices import Send, device_indices, make_empty_folder, run_child, watch_children
from mamf.cli.interruption import Interruption
from mamf.cli.options import ALL
from mamf.cli.terminal import warn
from mamf.engine.runner import crashes_of
from mamf.engine.traits import fit_traits
from mamf.errors import (
    LogChangedWarning,
    RunLogWriteError,
    UnsupportedError,
    UsageError,
    describe_error,
)
from mamf.node.children import ADDRESS, PHASE, WAITS, Children, ChildWatch
from mamf.node.device import DeviceRun
from mamf.node.group import find_rank_place
from mamf.node.logs import UNMEASURABLE, UNWRITTEN, NodeRun, read_node
from mamf.node.verdict import Device
from mamf.operations.matmul.selection import kernel
from mamf.plans import NODE_BUDGET_SECONDS
from mamf.plugins.discovery import first_backend_name, open_backend

#: The parent's answers to a child that waits: measure together with the others, or end.
_GO, _END = "go", "end"


# -- the parent --------------------------------------------------------------------------------------------------------


def choose_devices(options: argparse.Namespace) -> list[int]:
    """Return the indices of the devices to measure; none if another process of the launcher measures this machine.

    Sets the backend and the output folder in the options; one of several machines gets a subfolder.
    """
    for name in options.kernel or ():
        kernel(name)
    options.backend = options.backend or first_backend_name()
    options.output_folder = options.output_folder or Path(f"mamf-node-{datetime.now():%Y%m%d-%H%M%S}")
    if (own := find_rank_place(os.environ)) is not None:
        if options.overlap:
            raise UsageError("--overlap works on one machine only: start 'mamf overlap' with the launcher instead")
        if own.index > 0:
            return []
        options.output_folder /= f"node{own.node}"
    return device_indices(options.backend, options.devices or [ALL])


def measure_devices(options: argparse.Namespace, indices: list[int]) -> tuple[Path, NodeRun, list[Device]]:
    """Measure each device in its own process. Return the folder of the logs, how the run ended, and the devices."""
    folder = options.output_folder
    make_empty_folder(folder, "--output-folder")
    run, watch = NodeRun(indices), ChildWatch(indices, options.patience)
    run.write(folder)
    with Interruption():
        try:
            _watch_children(options, folder, run, watch)
            run.is_over = True
        except KeyboardInterrupt:
            pass
    run.failures = watch.failures
    try:
        run.write(folder)
    except (RunLogWriteError, UsageError) as error:  # the verdict is still printed
        warn(str(error))
    _, devices = read_node(folder, known=run)
    return folder, run, [replace(device, address=watch.addresses.get(device.index)) for device in devices]


def _watch_children(options: argparse.Namespace, folder: Path, run: NodeRun, watch: ChildWatch) -> None:
    commands = {index: _command(options, folder, len(run.devices), index) for index in run.devices}

    def let_waiting_go(children: Children) -> None:
        if watch.failures:
            run.not_together = f"{', '.join(f'device {index}' for index in sorted(watch.failures))} failed"
        for index in watch.running:
            children.send(index, _END if run.not_together else _GO)

    watch_children(watch, commands, let_waiting_go)


def _command(options: argparse.Namespace, folder: Path, devices: int, index: int) -> list[str]:
    return [
        *(sys.executable, "-m", "mamf", "node", "--led", str(index), str(devices)),
        *("--output-folder", str(folder), "--backend", options.backend),
        *(("--dtype", options.dtype) if options.dtype else ()),
        *(("--budget", f"{options.budget:g}s") if options.budget else ()),
        *(("--verify", f"{options.verify:g}s") if options.verify else ()),
        *(("--kernel", *options.kernel) if options.kernel else ()),
    ]


# -- a device's process ------------------------------------------------------------------------------------------------


def measure_device(options: argparse.Namespace) -> int:
    """Measure one device and report to the parent; return the exit code. The logs are kept whatever happens."""
    return run_child(lambda send: _measure_device(options, send), _describe_failure)


def _measure_device(options: argparse.Namespace, send: Send) -> int:
    index, devices = options.led
    warnings.simplefilter("error", LogChangedWarning)  # the verdict needs each log at its place
    send({PHASE: "opening the device"})
    backend = open_backend(options.backend, index)
    fit_traits(backend)
    # Before each launch, so that a crash names its kernel; None after the last one.
    crashes_of(backend).keep = lambda row: send({PHASE: f"{row.kernel} at {row.shape}" if row else "between rows"})
    send({ADDRESS: backend.bus_address()})

    def meet() -> bool:
        """Wait for the other devices; return False if one of them has failed."""
        send({PHASE: WAITS})
        return sys.stdin.readline().strip() == _GO

    budget = options.budget or NODE_BUDGET_SECONDS
    run = DeviceRun(backend, options.output_folder, options.dtype, options.kernel, budget, options.verify)
    run.on_progress, run.meet = lambda text: send({PHASE: text}), meet
    run.measure_alone()
    if devices > 1:
        run.measure_together()
    return 0


def _describe_failure(error: BaseException) -> str:
    """Describe why a device's run ended. A full disk, a log that another program changed, or a wrong request is marked
    as not the device's fault.
    """
    if isinstance(error, (LogChangedWarning, RunLogWriteError)):
        return f"{UNWRITTEN}: {error}"
    return f"{UNMEASURABLE}: {error}" if isinstance(error, (UsageError, UnsupportedError)) else describe_error(error)
