"""Devices that share a run, one process each: opens them, sends their work, receives their messages, watches them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mamf.backend import LEADER, DeviceInfo
from mamf.choices import PATIENCE_SECONDS
from mamf.errors import UnavailableError, UsageError
from mamf.node.children import WAITS, Children, Watch
from mamf.node.worker import DEVICE

_TICK_SECONDS = 0.5


@dataclass
class DevicePool:
    """Use as a context manager: once entered, every device was opened or has failed. ``on_failure``: called with the
    device and reason, and whether other devices remain.

    Raises UnavailableError where none can be opened, UsageError where they are of several models.
    """

    backend: str
    devices: Sequence[int]
    patience: float = PATIENCE_SECONDS
    on_failure: Callable[[str, bool], None] = lambda text, are_others: None
    #: The traits that all devices use, as a log holds them.
    traits: Mapping[str, Any] = field(default_factory=dict)
    #: Opened devices.
    infos: dict[int, DeviceInfo] = field(default_factory=dict, init=False)

    def __enter__(self) -> DevicePool:
        self.watch = Watch(self.devices, self.patience)
        self._gone: set[int] = set()
        self._children = self._started()
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._children.dismiss()
        self._children.__exit__(*raised)

    def _started(self) -> Children:
        command = [sys.executable, "-m", "mamf", "sweep", "--led", self.backend]
        commands = {device: [*command, str(device)] for device in self.devices}
        return Children(commands, {**os.environ, "PYTHONUNBUFFERED": "1", LEADER: str(os.getpid())})

    def _open(self) -> None:
        while any(device not in self.infos for device in self.able):
            device, record = self.next()
            if DEVICE in record:
                self.infos[device] = DeviceInfo(**record[DEVICE])
        if not self.able:
            failures = "; ".join(f"device {device}: {reason}" for device, reason in self.watch.failures.items())
            raise UnavailableError(f"no device could be opened: {failures}")
        names = {info.name: device for device, info in self.infos.items()}
        if len(names) > 1:
            models = ", ".join(f"{device} is a {name}" for name, device in names.items())
            raise UsageError(f"--devices share a run that compares them: {models}; sweep each model separately")

    @property
    def able(self) -> list[int]:
        """The devices that have not failed."""
        return [device for device in self.devices if device not in self._gone]

    def next(self) -> tuple[int, Mapping[str, Any]]:
        """The next message of a device; (-1, {}) if no message arrives for a moment. Ends devices that hang."""
        event = self._children.next(_TICK_SECONDS)
        if event is not None:
            self.watch.take(event)
        for device in self.watch.hanging():
            self._children.processes[device].kill()
        for device in self.able:
            if device in self.watch.failures or device not in self.watch.running:
                self._gone.add(device)
                reason = self.watch.failures.setdefault(device, "its process was ended")
                self.on_failure(f"device {device} failed: {reason}", bool(self.able))
        if event is None or event.said is None or event.rank in self._gone:
            return -1, {}
        return event.rank, event.said

    def send(self, device: int, said: object, phase: str = WAITS) -> None:
        """``phase``: what the device does from now on; unless it waits, it must keep sending messages."""
        self.watch.go_on([device], phase)
        self._children.send(device, json.dumps(said))
