"""Check a kernel from a separate process, so that the kernel's own code cannot influence the check.

mamf.engine.isolation starts the separate process. ``serve_launches`` runs in the process that loaded the kernel: it
launches the kernel on the operands that it receives, and sends back the buffers that the launch wrote.
``serve_check_requests`` runs in the separate process: it draws the operands and verifies the results.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

import torch

from mamf.backend import Backend, OperandPool
from mamf.errors import MamfError, UnsupportedError, describe_error, get_catchable_plugin_errors
from mamf.kernel import AnyKernel
from mamf.operations.operand_sets import list_result_tensors, take_pool_buffers
from mamf.plugins.discovery import find_entry_points, make_kernel, make_operation, open_backend

# The checking process times launches in up to _MAX_TRIALS trials. A trial takes about _TRIAL_TARGET_SECONDS, and has at
# most _MAX_TRIAL_LAUNCHES launches.
_TRIAL_TARGET_SECONDS, _MAX_TRIALS, _MAX_TRIAL_LAUNCHES = 0.5, 3, 2000
# A trial may take longer than the reported time. Work on the host may add _HOST_SECONDS_PER_TRIAL, and
# _HOST_SECONDS_PER_LAUNCH for each launch. The launches may be slower by the factor _MAX_SLOWDOWN, because a trial may
# be long enough for the device to reach its power limit and lower its clock.
_HOST_SECONDS_PER_LAUNCH, _HOST_SECONDS_PER_TRIAL, _MAX_SLOWDOWN = 100e-6, 0.1, 2.0


class ChannelError(MamfError):
    """The error that Channel raises if the other process has ended, or has sent bytes that are not a message."""


@dataclass(frozen=True)
class Channel:
    """A connection to another process over a pair of pipes. A message is a line of JSON, followed by bytes.

    Writes are unbuffered. With buffers, an interrupted process would write the rest of a message when it exits.
    """

    input_pipe: IO[bytes]
    output_pipe: IO[bytes]

    def send(self, *parts: bytes, **fields: Any) -> None:
        """Send a message of JSON fields and binary parts. Raises OSError if the other process has ended."""
        for part in (json.dumps({**fields, "sizes": list(map(len, parts))}).encode() + b"\n", *parts):
            unsent_bytes = memoryview(part)
            while unsent_bytes:
                unsent_bytes = unsent_bytes[os.write(self.output_pipe.fileno(), unsent_bytes) :]

    def receive(self) -> tuple[dict[str, Any], Sequence[bytes]]:
        """Wait for the next message, and return its JSON fields and its binary parts.

        Raises ChannelError if the other process has ended, or has sent bytes that are not a message.
        """
        try:
            fields = json.loads(self.input_pipe.readline())
            return fields, [self.input_pipe.read(size) for size in fields.pop("sizes")]
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ChannelError(
                "the isolated check did not finish: the other process ended too early or sent an invalid message"
            ) from None


def serve_launches(
    channel: Channel, kernel: AnyKernel, backend: Backend, problem: Any, shape: Any, pool: OperandPool
) -> dict[str, str]:
    """Launch a kernel on the operands that the checking process sends, and repeat the launch as often as it requests.

    Return the last message of the checking process: ``{"wrong": reason}`` if the result is wrong, ``{"unknown":
    reason}`` if the process could not check the kernel, or ``{}`` if the result is right. Raises ChannelError if the
    checking process ends too early or sends an invalid message, and any error that a launch raises.
    """
    request, operands = channel.receive()
    if "operands" not in request:
        return request
    tensors = take_pool_buffers(pool, problem.list_buffers(shape))
    _fill_buffers_from_bytes(tensors, request["operands"], operands)
    prepared = kernel.prepare(backend, problem, shape, pool)
    prepared.poison_outputs([None])
    while "operands" in request or "launches" in request:
        for _ in range(request.get("launches", 1)):
            result = prepared.launches[0]()
        backend.submit()
        backend.synchronize()
        if "launches" in request:
            channel.send()
        else:
            _send_results(channel, {name: tensors[name] for name in tensors.keys() - set(request["operands"])}, result)
        request, _ = channel.receive()
    return request


def _send_results(channel: Channel, written_buffers: Mapping[str, torch.Tensor], result: object) -> None:
    returned_tensors = list_result_tensors(result)
    channel.send(
        *(_convert_to_bytes(tensor) for tensor in (*written_buffers.values(), *returned_tensors)),
        written=list(written_buffers),
        returned=[(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in returned_tensors],
        is_one=isinstance(result, torch.Tensor),
    )


def serve_check_requests() -> None:
    """Check kernels for the process at the other end of stdin and stdout, until that process ends."""
    channel = Channel(sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb"))
    # Redirect stdout to stderr, because the other process would read the output of libraries as messages.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    answer_check_requests(channel)


def answer_check_requests(channel: Channel) -> None:
    """Read requests to check kernels from the channel, and answer each with a verdict, until the other process ends."""
    with suppress(ChannelError, BrokenPipeError):
        while True:
            request, _ = channel.receive()
            try:
                answer = _check_kernel(channel, request)
            except (ChannelError, BrokenPipeError):
                return
            except get_catchable_plugin_errors() as error:
                answer = {"unknown": describe_error(error)}
            channel.send(**answer)


def _check_kernel(channel: Channel, request: Mapping[str, Any]) -> dict[str, str]:
    operation, cpu = make_operation(request["operation"]), open_backend("cpu")
    problem, shape = operation.read_problem_record(request["problem"]), operation.read_shape_record(request["shape"])
    pool = cpu.make_operand_pool(problem.data, problem.seed)
    prepared = _find_reference_kernel(operation, cpu, problem, shape).prepare(cpu, problem, shape, pool)
    if prepared.change_operands:
        prepared.change_operands()  # Use random operands, so that no kernel can know the result in advance.
    buffers = problem.list_buffers(shape)
    tensors = take_pool_buffers(pool, buffers)
    operands = [name for name, buffer in buffers.items() if buffer.fill]
    channel.send(*(_convert_to_bytes(tensors[name]) for name in operands), operands=operands)
    fields, parts = channel.receive()
    written_count = len(fields["written"])
    _fill_buffers_from_bytes(tensors, fields["written"], parts[:written_count])
    result = _rebuild_result(fields, parts[written_count:])
    for verify in (prepared.verify, prepared.verify_whole_output):
        verdict = verify and verify(0, result)
        if verdict and not verdict.ok:
            error_description = f"relative error {verdict.error:.2g}; the limit is {verdict.tolerance:.2g}"
            return {"wrong": verdict.reason or error_description}
    return _check_reported_time(channel, request["seconds"])


def _find_reference_kernel(operation: Any, cpu: Backend, problem: Any, shape: Any) -> AnyKernel:
    """Return the first of mamf's own kernels that supports a problem and shape on the CPU, to compute expected results.

    Raises UnsupportedError if no kernel does.
    """
    mamf_entry_points = (
        point for point in find_entry_points(operation.kernel_group) if point.value.startswith("mamf.")
    )
    for kernel in (make_kernel(operation, point.name) for point in mamf_entry_points):
        if not (
            kernel.explain_unavailability(cpu)
            or kernel.explain_unsupported_problem(cpu, problem)
            or kernel.explain_unsupported_shape(problem, shape)
        ):
            return kernel
    raise UnsupportedError(f"mamf has no CPU kernel that can check results in {problem.dtype}: use another --dtype")


def _check_reported_time(channel: Channel, seconds: float) -> dict[str, str]:
    """Time launches of the other process with this process's clock, and compare them with the reported time.

    ``seconds``: the time per launch that the other process reported. Return ``{"slow": reason}`` if launches take much
    longer, and otherwise ``{}``.
    """
    launches = min(_MAX_TRIAL_LAUNCHES, math.ceil(_TRIAL_TARGET_SECONDS / seconds))
    max_seconds = _HOST_SECONDS_PER_TRIAL + launches * (_HOST_SECONDS_PER_LAUNCH + _MAX_SLOWDOWN * seconds)
    shortest_seconds = math.inf
    for _ in range(_MAX_TRIALS):
        start = time.perf_counter()
        channel.send(launches=launches)
        channel.receive()
        shortest_seconds = min(shortest_seconds, time.perf_counter() - start)
        if shortest_seconds <= max_seconds:
            return {}
    return {
        "slow": f"{launches} launches take {shortest_seconds:.3g} s by the clock of the checking process, "
        f"{shortest_seconds / (launches * seconds):.3g} times the reported time"
    }


def _convert_to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _fill_buffers_from_bytes(tensors: Mapping[str, torch.Tensor], names: Sequence[str], parts: Sequence[bytes]) -> None:
    for name, part in zip(names, parts, strict=True):
        tensors[name].view(torch.uint8).copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8))


def _rebuild_result(fields: Mapping[str, Any], parts: Sequence[bytes]) -> Any:
    """Return the result of the launch as tensors in this process, or None if the launch returned no tensor.

    ``fields``, ``parts``: the message of the other process with the dtypes, sizes and bytes of the tensors.
    """
    tensors = [
        torch.frombuffer(bytearray(part), dtype=getattr(torch, dtype)).view(sizes)
        for (dtype, sizes), part in zip(fields["returned"], parts, strict=True)
    ]
    if not tensors:
        return None
    return tensors[0] if fields["is_one"] else tuple(tensors)
