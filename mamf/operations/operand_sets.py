"""Operand sets of torch kernels: memory from the pool, one set per launch, and their checks.

A kernel that derives from TorchKernel supplies ``operand_set``, which makes one set. This module rotates over sets,
poisons outputs, checks that operands stay unchanged and rewrites outputs.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, TypeVar

import torch

from mamf.backend import Backend, OperandPool, Unavailable
from mamf.kernel import Buffer, Kernel, Prepared, ProblemT, ShapeT, Verdict
from mamf.operations.outputs import Unchanged, check_torch, poison_outputs

AnswerT = TypeVar("AnswerT")
#: The buffer from which the classic regime overwrites the output of the first set; without it the output is zeroed.
_REWRITE = "c_rewrite"


@dataclass(frozen=True)
class OperandSet:
    """One set of operands. ``launch``, ``verify``, ``verify_whole`` and ``checksum`` as in Prepared, for this set.

    ``outputs``: the tensors that a launch writes. ``change``: queues a random change of the operands, which ``verify``
    expects from then on; ``restore`` undoes all changes. None: operands never change.
    """

    launch: Callable[[], object]
    verify: Callable[[object], Verdict]
    outputs: Sequence[torch.Tensor] = ()
    verify_whole: Callable[[object], Verdict] | None = None
    checksum: Callable[[object], Callable[[], int]] | None = None
    change: Callable[[], object] | None = None
    restore: Callable[[], object] = lambda: None


class TorchKernel(Kernel[ProblemT, ShapeT]):
    """A kernel over torch tensors. Derived kernels supply ``operand_set``."""

    #: Buffers that launches must not modify; empty: all buffers that are filled with data.
    read_only: ClassVar[tuple[str, ...]] = ()

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return check_torch(backend)

    @abstractmethod
    def operand_set(
        self, backend: Backend, problem: ProblemT, shape: ShapeT, flat: Mapping[str, torch.Tensor]
    ) -> OperandSet:
        """Make one set from the flat memory of its buffers, which may be longer than needed (see ``view_as``)."""

    def configured(self, backend: Backend, problem: ProblemT, shape: ShapeT) -> TorchKernel[ProblemT, ShapeT]:
        """The kernel that makes the operand sets, such as one with a configuration for this shape."""
        return self

    def prepare(
        self,
        backend: Backend,
        problem: ProblemT,
        shape: ShapeT,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        kernel, buffers = self.configured(backend, problem, shape), problem.buffers(shape, sets, rewrite)
        whole = take_buffers(pool, buffers)
        source = whole.pop(_REWRITE, None)
        ready = [kernel.operand_set(backend, problem, shape, flat) for flat in split_sets(whole, sets)]
        names = self.read_only or [name for name in whole if buffers[name].fill]
        prepared = prepare_sets(ready, Unchanged({name: whole[name] for name in names}))
        if not rewrite or not ready[0].outputs:
            return prepared
        output = ready[0].outputs[0]
        overwrite = output.zero_ if source is None else partial(output.copy_, source.view(output.shape))
        return replace(prepared, rewrite_output=overwrite)


def take_buffers(pool: OperandPool, buffers: Mapping[str, Buffer]) -> dict[str, torch.Tensor]:
    """Take flat memory from the pool for each buffer."""
    return {name: pool.take(name, *buffer) for name, buffer in buffers.items()}


def split_sets(whole: Mapping[str, torch.Tensor], sets: int) -> list[dict[str, torch.Tensor]]:
    """The flat memory of each set."""
    parts = {name: tensor.chunk(sets) for name, tensor in whole.items()}
    return [{name: parts[name][index] for name in whole} for index in range(sets)]


def view_as(flat: torch.Tensor, *sizes: int) -> torch.Tensor:
    """A view of the beginning of flat memory as a tensor of these sizes."""
    return flat[: math.prod(sizes)].view(sizes)


def prepare_sets(
    sets: Sequence[OperandSet],
    unchanged: Callable[[], Sequence[str]],
    held_bytes: int = 0,
) -> Prepared:
    """Combine operand sets into a Prepared. ``unchanged`` returns the names of operands that launches have modified; it
    is called after all sets are restored.
    """

    def poison(returned: Sequence[object]) -> None:
        for each, result in zip(sets, returned, strict=True):
            poison_outputs(each.outputs, result)

    def changed_operands() -> Sequence[str]:
        for each in sets:
            each.restore()
        return unchanged()

    changes = [each.change for each in sets if each.change]
    return Prepared(
        launches=[each.launch for each in sets],
        verify=lambda index, result: sets[index].verify(result),
        verify_whole=_by_index([each.verify_whole for each in sets]),
        change_operands=(lambda: [change() for change in changes]) if changes else None,
        poison=poison,
        changed_operands=changed_operands,
        held_bytes=held_bytes,
        checksum=_by_index([each.checksum for each in sets]),
    )


def _by_index(calls: Sequence[Callable[[object], AnswerT] | None]) -> Callable[[int, object], AnswerT] | None:
    """One function of the set's index and result, from one function per set; None if the sets have none."""
    known = [call for call in calls if call is not None]
    return (lambda index, result: known[index](result)) if known else None
