"""Turns SIGINT, SIGTERM and SIGHUP into one KeyboardInterrupt, never within a record; a second signal exits at once.

The same event may arrive several times: from the terminal or a batch system, and from the process that watches.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from mamf.errors import ENDING, Interrupted

EXIT_CODE = 130
#: They end a run; a hangup does not if it was ignored when the process started, as under nohup.
ENDING_SIGNALS = {signal.SIGINT, signal.SIGTERM} | {
    each for each in signal.Signals if each.name == "SIGHUP" and signal.getsignal(each) != signal.SIG_IGN
}
_SAME_EVENT_SECONDS = 0.3


class Interruption:
    """While entered, the first signal raises Interrupted (a KeyboardInterrupt) in the main thread: between bytecodes,
    so a call into a vendor's library returns first. Inside ``shielded`` it waits until the block ends.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._is_shielded = False
        self._requested_at = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        for number in ENDING_SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)
        self._ended_by, ENDING[0] = ENDING[0], Interrupted
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._previous.items():
            # The same event may arrive again while the process ends, and must not kill it.
            if self.is_requested and handler == signal.SIG_DFL:
                continue
            is_python = self.is_requested and handler == signal.default_int_handler
            signal.signal(number, self._on_late_signal if is_python else handler)
        ENDING[0] = self._ended_by

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            # Nobody hangs up out of impatience: a shell may do so once more when its terminal is gone.
            if (
                number in (signal.SIGINT, signal.SIGTERM)
                and time.monotonic() > self._requested_at + _SAME_EVENT_SECONDS
            ):
                os._exit(EXIT_CODE)
            return
        self.is_requested, self._requested_at = True, time.monotonic()
        if not self._is_shielded:
            raise Interrupted

    def _on_late_signal(self, number: int, frame: FrameType | None) -> None:
        """After the run: as Python's own handler, but for the same event."""
        if time.monotonic() > self._requested_at + _SAME_EVENT_SECONDS:
            signal.default_int_handler(number, frame)

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Let a block finish; a first signal that came meanwhile is raised after it."""
        before = self.is_requested
        self._is_shielded = True
        try:
            yield
        finally:
            self._is_shielded = False
        self.check(before)

    def check(self, before: bool = False) -> None:
        """Raise what is still pending: a signal during a shielded block, or one that a library's callback swallowed."""
        if self.is_requested and not before:
            raise Interrupted
