"""The group of ranks, by torch.distributed: where they meet, how they agree, and what they tell one another."""

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
from mamf.node.places import Launched

_KEYS, _GROUP = "mamf/node", "mamf/group"
# What has been told takes as long to come over a network.
_LEAST_SECONDS = 0.05
# For which a store that keeps its own limits never takes.
_ANSWER_SECONDS = 10.0


class Meeting:
    """A store that every rank reaches: what is told there can be heard by all, and who is late is not waited for
    forever.
    """

    _torch: Any = torch.distributed  # whose annotations leave stores out

    def __init__(self, host: str, port: int, is_host: bool, seconds: float) -> None:
        """``port`` 0: any that is free. Raises UnavailableError where nobody is met within so many seconds."""
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
        """Raises UnavailableError where the one who keeps the meeting place is gone, or hangs."""
        try:
            _interruptible(lambda: self._values.set(key, json.dumps(value)), _ANSWER_SECONDS)
        except Exception as error:
            raise UnavailableError(f"the meeting place of the ranks is gone: {first_line(error)}") from None

    def receive(self, key: str, seconds: float) -> Any:
        """What was told, or None where nobody did within so many seconds."""

        def value() -> Any:
            self._values.wait([key], timedelta(seconds=max(seconds, _LEAST_SECONDS)))
            return self._values.get(key)

        try:
            return json.loads(_interruptible(value, seconds + _ANSWER_SECONDS))
        except Exception:  # late, or gone
            return None

    @contextmanager
    def group(self, launched: Launched, backend: Backend, seconds: float) -> Iterator[None]:
        """torch's default group of all ranks, by the library of the device, and by Gloo on the host."""
        torch.distributed.init_process_group(
            libraries(getattr(backend, "device_type", "cpu")),
            store=self._torch.PrefixStore(_GROUP, self._store),
            rank=launched.place.rank,
            world_size=launched.ranks,
            timeout=timedelta(seconds=seconds),
        )
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


def _interruptible(call: Callable[[], Any], seconds: float) -> Any:
    """What a call into torch returns or raises, though Ctrl-C ends the wait for it, to which the call itself is deaf.
    Raises TimeoutError after so many seconds: a store's own limits do not hold where its host hangs.
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
    """What torch communicates by for a type of device, and for the host: ``cpu:gloo,cuda:nccl``."""
    own = torch.distributed.Backend.default_device_backend_map.get(device_type, "gloo")
    return "gloo" if device_type == "cpu" or own == "gloo" else f"cpu:gloo,{device_type}:{own}"


def agreed(own: float) -> float:
    """What rank 0 decided, in every rank: a decision to stop, to go on, or how many launches to queue."""
    decision = torch.tensor([own], dtype=torch.float64)
    torch.distributed.broadcast(decision, 0)
    return decision.item()


def met() -> None:
    """Returns when every rank has called it."""
    torch.distributed.all_reduce(torch.zeros(1))
