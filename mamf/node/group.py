"""The group of ranks, by torch.distributed: how they meet, agree and exchange messages."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from mamf.backend import Backend
from mamf.errors import UnavailableError, first_line
from mamf.node.figures import Launched

_KEYS, _GROUP = "mamf/node", "mamf/group"
# The time that a published value may take over a network.
_LEAST_SECONDS = 0.05
# Longer than any store takes that honors its timeouts.
_ANSWER_SECONDS = 10.0


class Meeting:
    """A store that every rank reaches, for messages to all ranks. Every wait has a limit."""

    _torch: Any = torch.distributed  # torch's annotations leave out stores

    def __init__(self, host: str, port: int, is_host: bool, seconds: float) -> None:
        """``port`` 0: any free port. Raises UnavailableError if rank 0 is not reached within so many seconds."""
        try:
            self._store = _interruptible(
                lambda: self._torch.TCPStore(
                    host, port, is_master=is_host, timeout=timedelta(seconds=seconds), wait_for_workers=False
                ),
                seconds + _ANSWER_SECONDS,
            )
        except Exception as error:
            raise UnavailableError(f"rank 0 is not met at {host}:{port}: {first_line(error)}") from None
        self.port = int(self._store.port)
        self._values = self._torch.PrefixStore(_KEYS, self._store)

    @classmethod
    def of(cls, launched: Launched, seconds: float) -> Meeting:
        is_host = launched.leads and not launched.meets_agent
        return cls(launched.host, launched.port, is_host, seconds)

    def publish(self, key: str, value: object) -> None:
        """Raises UnavailableError if the host of the store is gone or hangs."""
        try:
            _interruptible(lambda: self._values.set(key, json.dumps(value)), _ANSWER_SECONDS)
        except Exception as error:
            raise UnavailableError(f"the meeting place of the ranks is gone: {first_line(error)}") from None

    def receive(self, key: str, seconds: float) -> Any:
        """The value of a key, or None if it was not published within so many seconds."""

        def value() -> Any:
            self._values.wait([key], timedelta(seconds=max(seconds, _LEAST_SECONDS)))
            return self._values.get(key)

        try:
            return json.loads(_interruptible(value, seconds + _ANSWER_SECONDS))
        except Exception:  # late, or gone
            return None

    @contextmanager
    def group(self, launched: Launched, backend: Backend, seconds: float, name: str = _GROUP) -> Iterator[None]:
        """torch's default group of all ranks, with the device's communication library, and Gloo on the host. ``name``:
        another for each group that meets at one place.
        """
        torch.distributed.init_process_group(
            libraries(getattr(backend, "device_type", "cpu")),
            store=self._torch.PrefixStore(name, self._store),
            rank=launched.place.rank,
            world_size=launched.ranks,
            timeout=timedelta(seconds=seconds),
        )
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


def _interruptible(call: Callable[[], Any], seconds: float) -> Any:
    """Run a call into torch in a thread, so that Ctrl-C ends the wait, which the call itself would ignore.
    Raises TimeoutError after so many seconds: a store's own timeouts fail if its host hangs.
    """
    answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def answered() -> None:
        try:
            answers.put((call(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=answered, daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer for {seconds:.0f} s") from None
    if error is not None:
        raise error
    return answer


def libraries(device_type: str) -> str:
    """torch's communication libraries for a device type and for the host: ``cpu:gloo,cuda:nccl``."""
    own = torch.distributed.Backend.default_device_backend_map.get(device_type, "gloo")
    return "gloo" if device_type == "cpu" or own == "gloo" else f"cpu:gloo,{device_type}:{own}"


def agreed(own: float) -> float:
    """The decision of rank 0, in every rank: to stop, to continue, or how many launches to queue."""
    decision = torch.tensor([own], dtype=torch.float64)
    torch.distributed.broadcast(decision, 0)
    return decision.item()


def of_all(own: Any) -> list[Any]:
    """The values of all ranks, by rank."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, own)
    return values


def met() -> None:
    """Returns when every rank has called it."""
    torch.distributed.all_reduce(torch.zeros(1))
