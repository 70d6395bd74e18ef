"""Copy data with torch between host memory and a device, or between two devices.

Data loaders, offloaded optimizers and pipeline parallelism make such copies.
"""

from __future__ import annotations

import torch

from mamf.backend import Backend, OperandPool, Unavailability
from mamf.errors import UnsupportedError
from mamf.kernel import PreparedKernel, Verdict
from mamf.operations.copies import CopyKernel, CopyProblem, CopyShape
from mamf.operations.operand_sets import ChangeDetector, explain_torch_unavailability, poison_tensor, view_as_words


class TorchCopies(CopyKernel):
    """A kernel that calls torch's non-blocking ``copy_``, with pinned memory on the host.

    Verification compares all bytes of source and target on the device.
    """

    name = "torch"
    is_default = True

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        return explain_torch_unavailability(backend)

    def prepare(
        self,
        backend: Backend,
        problem: CopyProblem,
        shape: CopyShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> PreparedKernel:
        device_buffer = pool.take_buffer("own", *problem.list_buffers(shape)["own"])
        other_buffer = allocate_peer_or_host_buffer(device_buffer, problem, backend)
        source, target = (
            (other_buffer.copy_(device_buffer), torch.empty_like(device_buffer))
            if problem.direction == "to_device"
            else (device_buffer, other_buffer)
        )

        def launch() -> None:
            target.copy_(source, non_blocking=True)

        def verify(index: int, result: object) -> Verdict:
            return Verdict(
                (view_as_words(target.to(device_buffer.device)) != view_as_words(device_buffer)).float().mean().item(),
                0.0,
            )

        def poison_target(returned: object = None) -> None:
            backend.synchronize()  # Wait for queued copies, which could overwrite the new values of the target.
            poison_tensor(target)

        return PreparedKernel(
            launches=[launch] * sets,
            verify=verify,
            poison_outputs=poison_target,
            list_changed_operands=ChangeDetector({"source": source}),
            rewrite_output=poison_target if rewrite else None,
        )


def allocate_peer_or_host_buffer(device_buffer: torch.Tensor, problem: CopyProblem, backend: Backend) -> torch.Tensor:
    """Allocate a buffer like ``device_buffer`` at the other end of a copy: on the next device or in pinned host memory.

    Raises UnsupportedError if torch cannot pin host memory for this type of device.
    """
    if problem.direction == "to_peer":
        index = (backend.index + 1) % backend.count_devices()
        return torch.empty_like(device_buffer, device=torch.device(device_buffer.device.type, index))
    try:
        return torch.empty_like(device_buffer, device="cpu", pin_memory=device_buffer.device.type != "cpu")
    except NotImplementedError:
        raise UnsupportedError(
            f"torch cannot pin host memory for {device_buffer.device.type} devices: use --direction to_peer"
        ) from None
