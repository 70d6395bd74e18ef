"""``--devices``: a run that several devices of the machine share, and the process for each device."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from mamf.backend import Backend
from mamf.choices import PATIENCE_SECONDS
from mamf.cli.interruption import EXIT_CODE, Interruption
from mamf.cli.options.values import ALL, index
from mamf.cli.terminal import say
from mamf.errors import LogMismatchError, PluginError, UnavailableError, UsageError, describe_error, plugin_errors
from mamf.logs.compare import require_device_of_log
from mamf.logs.recording import traits_record
from mamf.logs.run_log import RunLog
from mamf.node.children import FAILURE
from mamf.node.sharing import DevicePool, Worker
from mamf.plugins.discovery import is_path, open_backend


def asked_devices(options: argparse.Namespace, log: RunLog | None) -> list[int]:
    """The devices from the options or the resumed log; empty if one device measures alone. Raises UsageError or
    LogMismatchError for contradictions.
    """
    asked = sorted(set(getattr(options, "devices", None) or ()))
    if asked and options.device is not None:
        raise UsageError("--device names one device, --devices several: leave one of them out")
    if len(asked) > 1 and ALL in asked:
        raise UsageError("--devices: 'all' or some, not both")
    if log is None:
        return asked
    held: list[int] = [device.index for device in log.devices]
    strangers = [device for device in asked if device not in (*held, ALL)]
    if strangers or (asked and not held) or (held and options.device is not None):
        before = f"devices {' '.join(map(str, held))}" if held else "one device"
        raise LogMismatchError(f"{log.path} was measured by {before}: resume it without --device and --devices")
    return asked if asked and asked != [ALL] else held


def found_devices(backend: Backend, asked: Sequence[int], log: RunLog | None) -> list[int]:
    """The devices that share a run; empty if one measures alone. Raises UnavailableError for a missing device."""
    if not asked:
        return []
    count = backend.device_count()
    found = list(range(count)) if ALL in asked else list(asked)
    if missing := [device for device in found if device >= count]:
        others = [str(device) for device in found if device < count]
        remedy = f"; use --devices {' '.join(others)}" if others else ""
        raise UnavailableError(f"{backend.name} has no device {missing[0]}; it has {count}{remedy}")
    is_shared = log is not None and bool(log.devices)
    return found if len(found) > 1 or is_shared else []


def open_first(opens: Callable[[int], Backend], devices: Sequence[int]) -> Backend:
    """Open the first usable device of those that share a run; the pool reports why others fail."""
    for device in devices[:-1]:
        with suppress(UnavailableError, PluginError):
            return opens(device)
    return opens(devices[-1])


def open_pool(
    options: argparse.Namespace, backend: Backend, devices: Sequence[int], on_failure: Callable[[str], None]
) -> AbstractContextManager[DevicePool | None]:
    """The pool of devices that share a run; None if one measures alone."""
    if not devices:
        return nullcontext()
    name = options.backend if options.backend and is_path(options.backend) else backend.name
    return DevicePool(name, devices, getattr(options, "patience", PATIENCE_SECONDS), on_failure, traits_record(backend))


def require_same_devices(log: RunLog | None, pool: DevicePool | None) -> None:
    """Raises LogMismatchError if a device of the pool is not the one in the resumed log."""
    if log is not None and pool is not None:
        for device, info in pool.infos.items():
            require_device_of_log(log, log.device(device), info)


def say_devices(devices: Sequence[int]) -> None:
    """Print the devices, for a dry run."""
    if devices:
        say(f"devices: {' '.join(map(str, devices))}, one process each, compared by a shared reference")


def run_device_process(backend: str, device: str) -> int:
    """Run as a process of a pool, which exchanges records as lines on stdin and stdout."""

    def receive() -> str:
        line = sys.stdin.readline()
        threading.Thread(target=end_with_parent, daemon=True).start()
        return line

    def end_with_parent() -> None:
        sys.stdin.read()
        os._exit(EXIT_CODE)  # the parent has finished or died: a row in progress is not needed

    def send(record: Mapping[str, Any]) -> None:
        say(json.dumps(record))

    with Interruption():
        try:
            Worker(open_backend(backend, index(device)), send, receive).work()
        except (KeyboardInterrupt, BrokenPipeError):
            return EXIT_CODE
        except plugin_errors() as error:  # any of a vendor's library
            send({FAILURE: describe_error(error)})
            return 1
    return 0
