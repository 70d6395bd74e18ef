"""Copies between memories with torch, as in a data loader, an offloaded optimizer or a pipeline."""

from __future__ import annotations

import torch

from mamf.backend import Backend, OperandPool, Unavailable
from mamf.errors import UnsupportedError
from mamf.kernel import Prepared, Verdict
from mamf.operations.copies import CopyKernel, CopyProblem, CopyShape
from mamf.operations.operand_sets import ChangeDetector, check_torch_backend, poison_tensor, view_as_words


class TorchCopies(CopyKernel):
    """Non-blocking ``copy_``, with pinned memory on the host. Verification compares all bytes, on the device."""

    name = "torch"
    is_default = True

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return check_torch_backend(backend)

    def prepare(
        self,
        backend: Backend,
        problem: CopyProblem,
        shape: CopyShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        own = pool.take("own", *problem.buffers(shape)["own"])
        other = allocate_other_end(own, problem, backend)
        source, target = (other.copy_(own), torch.empty_like(own)) if problem.direction == "to_device" else (own, other)

        def launch() -> None:
            target.copy_(source, non_blocking=True)

        def verify(index: int, result: object) -> Verdict:
            return Verdict((view_as_words(target.to(own.device)) != view_as_words(own)).float().mean().item(), 0.0)

        def poison_target(returned: object = None) -> None:
            backend.synchronize()  # otherwise the host could write before queued copies have ended
            poison_tensor(target)

        return Prepared(
            launches=[launch] * sets,
            verify=verify,
            poison=poison_target,
            changed_operands=ChangeDetector({"source": source}),
            rewrite_output=poison_target if rewrite else None,
        )


def allocate_other_end(own: torch.Tensor, problem: CopyProblem, backend: Backend) -> torch.Tensor:
    """Allocate a buffer like ``own`` at the other end of the copy. Raises UnsupportedError without pinned memory."""
    if problem.direction == "to_peer":
        index = (backend.index + 1) % backend.device_count()
        return torch.empty_like(own, device=torch.device(own.device.type, index))
    try:
        return torch.empty_like(own, device="cpu", pin_memory=own.device.type != "cpu")
    except NotImplementedError:
        raise UnsupportedError(f"torch cannot pin host memory for {own.device.type} devices") from None
