"""Turns SIGINT, SIGTERM or SIGHUP into one KeyboardInterrupt, never while a record is written. A second signal exits.

One event may arrive several times: from the terminal or a batch system, and again from the watching process.
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
#: The signals that end a run. SIGHUP does not if it was ignored when the process started, as under nohup.
ENDING_SIGNALS = {signal.SIGINT, signal.SIGTERM} | {
    each for each in signal.Signals if each.name == "SIGHUP" and signal.getsignal(each) != signal.SIG_IGN
}
_SAME_EVENT_SECONDS = 0.3


class Interruption:
    """Within this context the first signal raises Interrupted (a KeyboardInterrupt) in the main thread.

    Python raises it between bytecodes, so a call into a vendor's library returns first. So does a ``shielded`` block.
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
            # The same event may arrive again while the process ends, and must not kill the process.
            if self.is_requested and handler == signal.SIG_DFL:
                continue
            is_python = self.is_requested and handler == signal.default_int_handler
            signal.signal(number, self._on_late_signal if is_python else handler)
        ENDING[0] = self._ended_by

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            # A second SIGHUP is not an impatient user: a shell may repeat it when its terminal is gone.
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
        """Handle a signal after the run as Python does, but ignore a repetition of the same event."""
        if time.monotonic() > self._requested_at + _SAME_EVENT_SECONDS:
            signal.default_int_handler(number, frame)

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Let a block finish before a first signal that arrives meanwhile is raised."""
        before = self.is_requested
        self._is_shielded = True
        try:
            yield
        finally:
            self._is_shielded = False
        self.check(before)

    def check(self, before: bool = False) -> None:
        """Raise Interrupted for a signal that came during a shielded block or that a library's callback swallowed.

        ``before``: whether the signal had been raised before the block.
        """
        if self.is_requested and not before:
            raise Interrupted
