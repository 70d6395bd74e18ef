"""The group of ranks, by torch.distributed: where a launcher placed this process, how ranks meet and agree."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from mamf.backend import Backend
from mamf.errors import UnavailableError, UsageError, first_line

#: Each launcher's variables for rank, number of ranks, the rank within the node and the node.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
_SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
_FIRST_HOST = re.compile(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?")
_DEFAULT_PORT, _PORTS = 29400, 1000
_distributed: Any = torch.distributed  # torch's annotations leave out stores


@dataclass(frozen=True)
class Launched:
    """This process as one rank. ``index``: the rank within its node. ``host``, ``port``: where the ranks meet.
    ``is_agent_host``: torchrun's agent keeps that place, not rank 0.
    """

    rank: int
    ranks: int
    index: int
    node: int
    host: str
    port: int
    is_agent_host: bool = False


def launched(environment: Mapping[str, str]) -> Launched | None:
    """This process as a launcher started it; None if it is the only one. Raises UsageError for incomplete variables."""
    for names in (_TORCHRUN, _SRUN):
        ranks = environment.get(names[1], "")
        if names[0] in environment and ranks.isdecimal() and int(ranks) > 1:
            rank, _, index, node = (_number(name, environment.get(name, "0")) for name in names)
            is_agent_host = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            return Launched(rank, int(ranks), index, node, _host(environment), _port(environment), is_agent_host)
    return None


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{name}={text!r} in the environment: it must be a number from 0")
    return int(text)


def _host(environment: Mapping[str, str]) -> str:
    host = environment.get("MASTER_ADDR") or first_host(environment.get("SLURM_STEP_NODELIST", ""))
    if not host:
        raise UsageError("several ranks, but no host where they meet: set MASTER_ADDR to the host of rank 0")
    return host


def _port(environment: Mapping[str, str]) -> int:
    if port := environment.get("MASTER_PORT"):
        return _number("MASTER_PORT", port)
    # Jobs on one host must not share a port.
    return _DEFAULT_PORT + _number("SLURM_JOB_ID", environment.get("SLURM_JOB_ID") or "0") % _PORTS


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: ``gpu01`` of ``gpu[01-03,07],cpu1``."""
    found = _FIRST_HOST.match(nodes)
    return "" if found is None else found[1] + (found[2] or "") + (found[3] or "")


def open_store(host: str, port: int, is_host: bool, seconds: float) -> Any:
    """Open the store through which ranks meet. ``port`` 0: any free port. Raises UnavailableError if the host is not
    reached within ``seconds``.
    """
    try:
        return _distributed.TCPStore(
            host, port, is_master=is_host, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
    except Exception as error:
        raise UnavailableError(f"rank 0 is not met at {host}:{port}: {first_line(error)}") from None


@contextmanager
def group(store: Any, rank: int, ranks: int, backend: Backend, seconds: float) -> Iterator[None]:
    """Make all ranks torch's default group, with the device's communication library, and Gloo on the host."""
    torch.distributed.init_process_group(
        libraries(getattr(backend, "device_type", "cpu")),
        store=_distributed.PrefixStore("mamf", store),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=seconds),
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def launched_group(own: Launched, backend: Backend, seconds: float) -> Any:
    """The group of all ranks that a launcher started."""
    store = open_store(own.host, own.port, own.rank == 0 and not own.is_agent_host, seconds)
    return group(store, own.rank, own.ranks, backend, seconds)


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
