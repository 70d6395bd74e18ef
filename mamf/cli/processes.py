"""A process for each device: which devices, and what the parent and its children do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mamf.backend import LEADER
from mamf.cli.interruption import EXIT_CODE, Interruption
from mamf.cli.options import ALL, RANKS
from mamf.cli.progress import Phases
from mamf.cli.terminal import say, stdout
from mamf.errors import MamfError, UnavailableError, UsageError, describe_error, plugin_errors
from mamf.files import make_folder
from mamf.node.children import FAILURE, Children, Event, Watch, watched
from mamf.plugins.discovery import backend_class

#: Sends a record to the parent.
Send = Callable[[Mapping[str, Any]], None]


def device_indices(backend: str, asked: Sequence[int]) -> list[int]:
    """The indices of the devices asked for. Raises UnavailableError for a missing one."""
    if RANKS in asked:
        raise UsageError("--devices ranks is for runs that processes of a launcher share: name devices, or 'all'")
    count = backend_class(backend).device_count()
    found = list(range(count)) if ALL in asked else sorted(set(asked))
    if missing := [device for device in found if device >= count]:
        others = [device for device in found if device < count]
        remedy = f"; use --devices {' '.join(map(str, others))}" if others else ""
        raise UnavailableError(f"{backend} has no device {missing[0]}; it has {count}{remedy}")
    return found


def make_empty_folder(folder: Path, option: str) -> None:
    """Make the folder for new logs. Raises UsageError if it is not empty or cannot be made."""
    make_folder(folder, f"; name another {option}")
    if any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty: name another {option}")


def watch_children(
    watch: Watch,
    commands: Mapping[int, Sequence[str]],
    let_go: Callable[[Children], None] = lambda children: None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> None:
    """Run a command for each device and show what each is doing. ``let_go``: called when all wait for one another."""

    def show(event: Event) -> None:
        on_event(event)
        phases.show(watch.phases)

    environment = {**os.environ, "PYTHONUNBUFFERED": "1", LEADER: str(os.getpid())}
    names = {device: f"device {device}" for device in commands}
    with Children(commands, environment) as children, Phases(names) as phases:
        watched(watch, children.processes, children.next, lambda: let_go(children), show)


def run_child(work: Callable[[Send], int], describe: Callable[[BaseException], str] = describe_error) -> int:
    """Do the work of a child process, which tells its parent what it does; tell it too why the work failed."""
    to = stdout()

    def send(record: Mapping[str, Any]) -> None:
        try:
            say(json.dumps(record), to)
        except BrokenPipeError:  # the parent is gone: an interruption, not a fault of the device
            raise KeyboardInterrupt from None

    with Interruption():
        try:
            return work(send)
        except KeyboardInterrupt:
            return EXIT_CODE
        except plugin_errors() as error:  # any of a vendor's library
            send({FAILURE: describe(error)})
            return error.exit_code if isinstance(error, MamfError) else 1
