"""The contract of a second queue of a device: what is launched there runs beside the work of the first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class Queue(ABC):
    """A second queue of a device, beside the one that the backend's own methods use."""

    @abstractmethod
    def fork(self) -> None:
        """What is launched here from now on begins after all that the device's own queue holds by now."""

    @abstractmethod
    def launch(self, call: Callable[[], object]) -> None:
        """Queue what ``call`` launches."""

    @abstractmethod
    def mark(self) -> Any:
        """As the backend's, in this queue: ``wait`` and ``seconds_between`` take marks of both queues."""

    @abstractmethod
    def join(self) -> None:
        """What the device's own queue gets from now on begins after all that is here by now."""
