"""``--devices``: a run that several devices of the machine share; and what each of their processes does."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import SimpleQueue
from typing import Any

from mamf.backend import Backend
from mamf.choices import PATIENCE_SECONDS
from mamf.cli.interruption import EXIT_CODE, Interruption
from mamf.cli.options.values import ALL, index
from mamf.cli.terminal import say
from mamf.errors import LogMismatchError, PluginError, UnavailableError, UsageError, fault
from mamf.logs.run_log import RunLog
from mamf.logs.same_device import require_same_device
from mamf.node.children import FAILURE
from mamf.node.pool import DevicePool
from mamf.node.worker import Worker
from mamf.plugins.discovery import is_path, open_backend


def asked_devices(options: argparse.Namespace, log: RunLog | None) -> list[int]:
    """The devices asked for, or those that shared the log that is resumed; none where one measures alone. Raises
    UsageError or LogMismatchError for what contradicts itself or the log.
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
        told = f"devices {' '.join(map(str, held))}" if held else "one device"
        raise LogMismatchError(f"{log.path} was measured by {told}: resume it without --device and --devices")
    return asked if asked and asked != [ALL] else held


def found_devices(backend: Backend, asked: Sequence[int], log: RunLog | None) -> list[int]:
    """The devices that are to share a run; none where one measures alone. Raises UnavailableError for one that is not
    there.
    """
    if not asked:
        return []
    count = backend.device_count()
    found = list(range(count)) if ALL in asked else list(asked)
    if missing := [device for device in found if device >= count]:
        others = [str(device) for device in found if device < count]
        remedy = f"; --devices {' '.join(others)} does without" if others else ""
        raise UnavailableError(f"{backend.name} has no device {missing[0]}; it has {count}{remedy}")
    is_shared = log is not None and bool(log.devices)
    return found if len(found) > 1 or is_shared else []


def first_opened(opens: Callable[[int], Backend], devices: Sequence[int]) -> Backend:
    """The first device that can be opened of those that are to share a run, whose pool tells what the others lack."""
    for device in devices[:-1]:
        with suppress(UnavailableError, PluginError):
            return opens(device)
    return opens(devices[-1])


def opened_pool(
    options: argparse.Namespace, backend: Backend, devices: Sequence[int], on_failure: Callable[[str, bool], None]
) -> AbstractContextManager[DevicePool | None]:
    """The devices of a run; None where one measures alone."""
    if not devices:
        return nullcontext()
    name = options.backend if options.backend and is_path(options.backend) else backend.name
    return DevicePool(name, devices, getattr(options, "patience", PATIENCE_SECONDS), on_failure)


def require_same_devices(log: RunLog | None, pool: DevicePool | None) -> None:
    """Raises LogMismatchError when a device of a pool is not the one that the log which is resumed names."""
    if log is not None and pool is not None:
        for device, info in pool.infos.items():
            require_same_device(log, log.device(device), info)


def say_devices(devices: Sequence[int]) -> None:
    """Of a dry run."""
    if devices:
        say(
            f"devices: {' '.join(map(str, devices))} share it, a process each, compared by a reference that all measure"
        )


def led(backend: str, device: str) -> int:
    """A process of a pool: its lines are records, and so are those that it hears."""

    heard: SimpleQueue[str] = SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            heard.put(line)
        os._exit(EXIT_CODE)  # who leads it has done or is gone: a row in flight is nobody's

    def tell(record: Mapping[str, Any]) -> None:
        say(json.dumps(record))

    threading.Thread(target=listen, daemon=True).start()
    with Interruption():
        try:
            Worker(open_backend(backend, index(device)), tell, heard.get).work()
        except (KeyboardInterrupt, BrokenPipeError):
            return EXIT_CODE
        except Exception as error:  # whatever a vendor's library throws
            tell({FAILURE: fault(error)})
            return 1
    return 0
