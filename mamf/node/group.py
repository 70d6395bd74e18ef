"""Find the rank of this process among the processes that torchrun or srun started, and connect all ranks with
torch.distributed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from mamf.backend import Backend
from mamf.errors import UnavailableError, UsageError, get_first_message_line

#: The environment variables in which torchrun and srun store the rank, the number of ranks, the rank within its node,
#: and the index of the node.
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
_SRUN_VARIABLES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")


@dataclass(frozen=True)
class RankPlace:
    """The place of this process among all processes that a launcher started.

    - ``rank``: the number of this process, from 0. ``rank_count``: the number of processes.
    - ``local_rank``: the number of this process among those on the same node (machine).
    - ``node_index``: the number of this node.
    """

    rank: int
    rank_count: int
    local_rank: int
    node_index: int


def find_rank_place(environment: Mapping[str, str]) -> RankPlace | None:
    """Return the place of this process among all ranks, or None if it is the only rank. Raises UsageError if a variable
    of the launcher is not a number.
    """
    for names in (_TORCHRUN_VARIABLES, _SRUN_VARIABLES):
        rank_count = environment.get(names[1], "")
        if names[0] in environment and rank_count.isdecimal() and int(rank_count) > 1:
            return RankPlace(*(_parse_number(name, environment.get(name, "0")) for name in names))
    return None


def require_rank_place(environment: Mapping[str, str]) -> RankPlace:
    """Return the place of this process among all ranks, even if it is the only rank. Raises UsageError if the variables
    of the launcher are missing or are not numbers.
    """
    names = (
        _TORCHRUN_VARIABLES
        if _TORCHRUN_VARIABLES[0] in environment
        else (_SRUN_VARIABLES[0], "SLURM_NTASKS", *_SRUN_VARIABLES[2:])
    )
    if not environment.keys() >= set(names[:2]):
        raise UsageError(
            "--devices ranks needs RANK and WORLD_SIZE, or SLURM_PROCID and SLURM_NTASKS, in the environment: start "
            "mamf with torchrun or srun"
        )
    return RankPlace(*(_parse_number(name, environment.get(name, "0")) for name in names))


def _parse_number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UsageError(
            f"{name}={text!r} in the environment is not a whole number of at least 0: start mamf with torchrun or srun"
        )
    return int(text)


@contextmanager
def join_group(rank_place: RankPlace, backend: Backend, seconds: float) -> Iterator[None]:
    """Connect all ranks as torch's default process group, with the device's communication library and Gloo on the host.

    The ranks meet at MASTER_ADDR and MASTER_PORT, which torchrun sets. Raises UnavailableError if they do not meet
    within ``seconds``. Destroys the process group on exit.
    """
    device_type = getattr(backend, "device_type", "cpu")
    library = torch.distributed.Backend.default_device_backend_map.get(device_type, "gloo")
    try:
        torch.distributed.init_process_group(
            "gloo" if device_type == "cpu" or library == "gloo" else f"cpu:gloo,{device_type}:{library}",
            rank=rank_place.rank,
            world_size=rank_place.rank_count,
            timeout=timedelta(seconds=seconds),
        )
    except Exception as error:
        raise UnavailableError(
            f"the ranks did not connect: {get_first_message_line(error)}; start them with torchrun"
        ) from None
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def gather_from_all_ranks(value: Any) -> list[Any]:
    """Gather a value from every rank, and return the list of all values, ordered by rank, on every rank."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
