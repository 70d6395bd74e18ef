"""Run collectives with torch.distributed, which calls NCCL, RCCL, XCCL, HCCL or Gloo.

To verify a result, ranks exchange samples of the data that they send, and each rank's host computes the expected
samples in float64. Ranks exchange samples and verdicts as Python objects.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed

from mamf.backend import Backend, OperandPool, Unavailability
from mamf.dtypes import DTYPES
from mamf.errors import UnsupportedError
from mamf.kernel import PreparedKernel, Verdict
from mamf.operations.collective import CollectiveKernel, CollectiveProblem, CollectiveShape
from mamf.operations.operand_sets import ChangeDetector, explain_torch_unavailability, poison_tensor, view_as_words

# The number of elements to verify in each part of a buffer.
_SAMPLED_ELEMENT_COUNT = 256
# An in-place all_reduce adds up its own results again in each launch, so the sums grow exponentially. After this many
# doublings, the sums are certainly infinite in float32, so mamf does not compute the expected sums of more doublings.
_MAX_DOUBLINGS = 500


class TorchDistributed(CollectiveKernel):
    name = "torch.distributed"
    is_default = True

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return explain_torch_unavailability(backend)
        return Unavailability("this process does not belong to a process group", "run 'mamf overlap'")

    def explain_unsupported_problem(self, backend: Backend, problem: CollectiveProblem) -> str | None:
        if (reason := self.explain_unavailability(backend)) is not None:
            return str(reason)
        ranks = torch.distributed.get_world_size()
        if problem.ranks != ranks:
            return (
                f"this process group has {ranks} ranks, but the collective needs {problem.ranks}: use --ranks {ranks}, "
                f"or start {problem.ranks} ranks"
            )
        return super().explain_unsupported_problem(backend, problem)

    def prepare(
        self,
        backend: Backend,
        problem: CollectiveProblem,
        shape: CollectiveShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> PreparedKernel:
        buffers, error = None, None
        try:
            buffers_by_name = problem.list_buffers(shape)
            # The pool fills a buffer with values that depend on the buffer's name, so each rank sends different values.
            send_buffer = pool.take_buffer(f"sent by {torch.distributed.get_rank()}", *buffers_by_name["sent"])
            buffers = send_buffer, pool.take_buffer("received", *buffers_by_name["received"])
        except Exception as exception:  # Send the error to the other ranks. Otherwise they would wait forever.
            error = exception
        failures = [each for each in gather_objects(None if error is None else str(error)) if each is not None]
        if buffers is None or failures:
            raise error or MemoryError(
                f"out of memory: another rank could not allocate its buffers ({failures[0]}): use a smaller --size"
            )
        collective = PreparedCollective(
            problem,
            problem.count_part_elements(shape),
            *buffers,
            make_process_group(problem.blocks, buffers[0].device.type),
        )
        return PreparedKernel(
            launches=[collective.launch] * sets,
            verify=lambda index, result: collective.verify(),
            poison_outputs=lambda returned: collective.poison_outputs(),
            list_changed_operands=collective.list_changed_operands,
            rewrite_output=collective.poison_outputs if rewrite else None,
        )


@cache
def make_process_group(blocks: int, device_type: str) -> Any:
    """Make a process group of all ranks that uses ``blocks`` thread blocks per rank to communicate.

    If ``blocks`` is 0, return None, which means the default group. All ranks must call this function with the same
    number of blocks. Raises UnsupportedError if the library has no setting for the number of blocks.
    """
    if not blocks:
        return None
    distributed: Any = torch.distributed
    library = distributed.Backend.default_device_backend_map.get(device_type, "gloo")
    options_class: Any = getattr(type(distributed.group.WORLD._get_backend(torch.device(device_type))), "Options", None)
    if not hasattr(options_class, "config"):
        raise UnsupportedError(f"{library} cannot set the number of thread blocks that communicate: use --blocks 0")
    options = options_class()
    options.config.min_ctas = options.config.max_ctas = blocks
    return distributed.new_group(backend=library, pg_options=options)


def gather_objects(local_object: object) -> list[Any]:
    """Return the objects of all ranks, in the order of ranks. All ranks must call this function."""
    objects_by_rank: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(objects_by_rank, local_object)
    return objects_by_rank


class PreparedCollective:
    """A collective on given buffers: functions that launch the collective and verify its result.

    A buffer has one part, or one part for each rank. All parts have the same size: ``part_elements`` elements.
    ``group``: the process group; None for the default group.
    """

    def __init__(
        self,
        problem: CollectiveProblem,
        part_elements: int,
        send_buffer: torch.Tensor,
        receive_buffer: torch.Tensor,
        group: Any = None,
    ) -> None:
        self._collective, self._ranks = problem.collective, problem.ranks
        self._send_buffer, self._receive_buffer, self._part_elements = send_buffer, receive_buffer, part_elements
        # A ring reduction over n ranks rounds each partial sum. The total error is about sqrt(n / 2) times the error of
        # one rounding. So sqrt(n) times the error of one rounding is a safe tolerance.
        rounding = DTYPES[problem.dtype].tolerance * math.sqrt(problem.ranks)
        self._tolerance = rounding if "reduce" in problem.collective else 0.0
        chooser = random.Random(problem.seed)
        indices = sorted(
            {0, part_elements - 1, *(chooser.randrange(part_elements) for _ in range(_SAMPLED_ELEMENT_COUNT))}
        )
        self._sampled_indices = torch.tensor(indices, device=send_buffer.device)
        self._launch_count = 0
        run_collective: Callable[..., object] = make_collective_launchers(send_buffer, receive_buffer)[
            problem.collective
        ]
        self._run_collective = run_collective if group is None else partial(run_collective, group=group)
        self._expected_samples = self._compute_expected_data(
            torch.stack(gather_objects(self._copy_samples_to_host(send_buffer)))
        )
        self._expected_sums = (
            None
            if self._tolerance
            else self._compute_expected_data(torch.stack(gather_objects(self._compute_part_checksums(send_buffer))))
        )
        self._find_changed_operands = ChangeDetector({"sent": send_buffer})

    def launch(self) -> None:
        self._launch_count += 1
        self._run_collective()

    def poison_outputs(self) -> None:
        """Overwrite the receive buffer, so that the result is right only if a later launch writes it.

        An all_reduce works in place, so fill its receive buffer with the data to send.
        """
        self._launch_count = 0
        if self._collective == "all_reduce":
            self._receive_buffer.copy_(self._send_buffer)
        else:
            poison_tensor(self._receive_buffer)

    def verify(self) -> Verdict:
        """Return the worst verdict of all ranks on every rank, because all ranks must stop together."""
        worst = max(error if math.isfinite(error) else math.inf for error in gather_objects(self._measure_error()))
        return Verdict(worst, self._tolerance * max(self._launch_count, 1))

    def list_changed_operands(self) -> Sequence[str]:
        """Return the names of the operands that have changed on at least one rank."""
        return sorted({name for names in gather_objects(self._find_changed_operands()) for name in names})

    def _compute_expected_data(self, data_by_rank: torch.Tensor) -> torch.Tensor:
        """Return the data that this rank should receive, as a tensor (parts, ...).

        ``data_by_rank``: the data that each rank sends, as a tensor (ranks, parts, ...).
        """
        rank = torch.distributed.get_rank()
        if self._collective == "all_gather":
            return data_by_rank[:, 0]
        if self._collective == "all_to_all":
            return data_by_rank[:, rank]
        return data_by_rank.sum(0)[rank : rank + 1] if self._collective == "reduce_scatter" else data_by_rank.sum(0)

    def _copy_samples_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sampled elements of each part of a buffer, as a float64 tensor (parts, samples) on the host."""
        return tensor.view(-1, self._part_elements).index_select(1, self._sampled_indices).cpu().double()

    def _compute_part_checksums(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a checksum of each part of a buffer: the sum of its bits, interpreted as integers.

        If a collective only moves data, equal checksums show that the elements outside of the sample are right too.
        """
        return torch.stack(
            [view_as_words(part).sum(dtype=torch.int64) for part in tensor.split(self._part_elements)]
        ).cpu()

    def _measure_error(self) -> float:
        if self._expected_sums is not None and not torch.equal(
            self._compute_part_checksums(self._receive_buffer), self._expected_sums
        ):
            return math.inf
        samples, expected = self._copy_samples_to_host(self._receive_buffer), self._expected_samples
        if self._collective == "all_reduce":
            # Each launch after the first reduces the sums again, which multiplies them by the number of ranks.
            exponent = min(self._launch_count - 1, int(_MAX_DOUBLINGS / math.log2(max(2, self._ranks))))
            expected = (expected * float(self._ranks) ** exponent).to(self._receive_buffer.dtype).double()
            is_finite = expected.isfinite()
            if not torch.equal(samples[~is_finite], expected[~is_finite]):
                return math.inf
            samples, expected = samples[is_finite], expected[is_finite]
        difference, norm = (torch.linalg.vector_norm(each).item() for each in (samples - expected, expected))
        return difference / norm if norm else (math.inf if difference else 0.0)


def make_collective_launchers(
    send_buffer: torch.Tensor, receive_buffer: torch.Tensor
) -> dict[str, Callable[[], object]]:
    distributed: Any = torch.distributed
    # torch 2.13 renamed the functions for all_gather and reduce_scatter, and warns if a program uses the older names.
    all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    reduce_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    return {
        "all_reduce": partial(distributed.all_reduce, receive_buffer),
        "all_gather": partial(all_gather, receive_buffer, send_buffer),
        "reduce_scatter": partial(reduce_scatter, receive_buffer, send_buffer),
        "all_to_all": partial(distributed.all_to_all_single, receive_buffer, send_buffer),
    }
