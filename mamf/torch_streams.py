"""The second queue of an accelerator: a stream of the vendor's torch module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mamf.backend import Queue
from mamf.torch_backend import AcceleratorBackend


class StreamQueue(Queue):
    """A stream as the second queue of an accelerator. ``mark``: the backend's method."""

    def __init__(self, vendor: Any, index: int, mark: Callable[[], Any]) -> None:
        self._vendor, self._stream, self._mark = vendor, vendor.Stream(index), mark

    def fork(self) -> None:
        self._stream.wait_stream(self._vendor.current_stream())

    def launch(self, call: Callable[[], object]) -> None:
        with self._vendor.stream(self._stream):
            call()

    def mark(self) -> Any:
        with self._vendor.stream(self._stream):
            return self._mark()

    def join(self) -> None:
        self._vendor.current_stream().wait_stream(self._stream)


class StreamedBackend(AcceleratorBackend):
    """A device with streams."""

    @functools.cached_property
    def _stream_queue(self) -> StreamQueue:
        return StreamQueue(self.vendor(), self.index, self.mark)

    def second_queue(self) -> Queue | None:
        return self._stream_queue if hasattr(self.vendor(), "Stream") else None
