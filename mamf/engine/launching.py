"""Launch one kernel within a profiler's window, which is the part of the process that an external profiler records.

mamf uses the operands, settings and checks of a measurement (mamf.engine.measure). But it does not rest the device or
flush its cache here, so do not compare these launch times with those of a measurement.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mamf.backend import Backend
from mamf.engine.measure import classify_error
from mamf.engine.regimes.base import CheckedKernel, launch_between_marks
from mamf.errors import DeviceError, MamfError, UnsupportedError, get_catchable_plugin_errors
from mamf.kernel import AnyKernel, Verdict, explain_unsupported_launch

#: A function that takes a launch, calls it, and returns the names of the kernels that it ran on the device.
DeviceKernelFinder = Callable[[Callable[[], object]], Sequence[str]]


@dataclass(frozen=True)
class ProfiledLaunches:
    """The result of launching a kernel within a profiler's window.

    - ``launch_seconds``: the device seconds of each launch in the window, from the events around the launch.
    - ``preparation_seconds``: host time before the window, including compilation, tuning and the first launch.
    - ``worst_verdict``: the verdict on the verified output with the largest error; None if nothing was verified.
    - ``device_kernel_names``: the names of the kernels that a launch ran on the device; None if not requested.
    - ``is_deterministic``: True if all repeated launches gave equal bits; None if unknown.
    """

    launch_seconds: tuple[float, ...]
    preparation_seconds: float
    worst_verdict: Verdict | None
    device_kernel_names: Sequence[str] | None = None
    is_deterministic: bool | None = None


def launch_in_profiler_window(
    kernel: AnyKernel,
    problem: Any,
    shape: Any,
    backend: Backend,
    launch_count: int = 1,
    must_verify: bool = True,
    find_device_kernels: DeviceKernelFinder | None = None,
    repeat_count: int = 0,
) -> ProfiledLaunches:
    """Prepare the kernel and verify a launch. Then launch ``launch_count`` times within the profiler's window, verify
    the last launch, and return the times and the verdict.

    - ``must_verify``: False to skip the verifications before and after the window.
    - ``find_device_kernels``: called after the window to find which kernels a launch runs on the device. It gets a
      function that launches once more.
    - ``repeat_count``: the number of launches after the window whose results are compared with one another, to find
      out whether the kernel is deterministic.

    Raises UnsupportedError if the kernel does not support the problem, WrongResultError if a result is wrong, and
    DeviceError if a launch fails.
    """
    if reason := explain_unsupported_launch(kernel, backend, problem, shape):
        raise UnsupportedError(reason)
    try:
        with kernel.apply_settings(backend, problem):
            start_time = backend.now()
            prepared = kernel.prepare(backend, problem, shape, backend.make_operand_pool(problem.data, problem.seed))
            checked = CheckedKernel(prepared)
            if must_verify:
                checked.warm_up_and_verify(backend)
                checked.poison_outputs()
            else:
                launch_between_marks(checked.launches[0], backend)
                backend.synchronize()
            window_start_time = backend.now()
            with backend.open_profiler_window(f"{kernel.name} {shape}"):
                marks = [launch_between_marks(checked.launches[0], backend) for _ in range(launch_count)]
            backend.synchronize()
            if must_verify:
                checked.verify_last_outputs()
                checked.require_unchanged_operands()
            return ProfiledLaunches(
                launch_seconds=tuple(backend.compute_seconds_between(*each) for each in marks),
                preparation_seconds=window_start_time - start_time,
                worst_verdict=checked.verdict if must_verify else None,
                device_kernel_names=find_device_kernels and tuple(find_device_kernels(checked.launches[0])),
                is_deterministic=_check_determinism(checked, backend, repeat_count, prepared.queue_checksum),
            )
    except MamfError:
        raise
    except get_catchable_plugin_errors() as error:
        status, reason = classify_error(error, kernel, backend)
        raise DeviceError(f"kernel {kernel.name} on {shape} has the status {status}: {reason}") from error


def time_kernel_parts(
    kernel: Any, problem: Any, shape: Any, backend: Backend, launch_count: int
) -> dict[str, tuple[int, float]]:
    """Time each part of a kernel, such as one of its matmuls, in ``launch_count`` launches without the other parts.
    Return a dict from the name of each part to its FLOP and its median seconds. Raises UnsupportedError if the kernel
    has no parts.
    """
    if not hasattr(kernel, "make_part_launches"):
        raise UnsupportedError(
            f"kernel {kernel.name} is one launch, so its parts cannot be timed: choose the kernel eager"
        )
    parts = kernel.make_part_launches(backend, problem, shape, backend.make_operand_pool(problem.data, problem.seed))
    flop_and_seconds_by_part = {}
    for name, (flop, launch) in parts.items():
        # Ignore the first launch, because it only warms up the device.
        _, *marks = [launch_between_marks(launch, backend) for _ in range(launch_count + 1)]
        backend.synchronize()
        flop_and_seconds_by_part[name] = (
            flop,
            statistics.median(backend.compute_seconds_between(*each) for each in marks),
        )
    return flop_and_seconds_by_part


def _check_determinism(
    checked: CheckedKernel,
    backend: Backend,
    repeat_count: int,
    queue_checksum: Callable[[int, object], Callable[[], int]] | None,
) -> bool | None:
    """Launch ``repeat_count`` times, and return whether all outputs are bitwise equal; None if that cannot be checked
    or ``repeat_count`` is 0. Compare the values that the launches return. If they return nothing, compare checksums of
    their outputs.

    ``queue_checksum``: queues the checksum of an output on the device, and returns a function that reads the checksum.
    """
    digests = set[object]()
    for _ in range(repeat_count):
        checked.poison_outputs()
        returned = checked.launches[0]()
        read_checksum = queue_checksum and queue_checksum(0, returned)
        backend.submit()
        backend.synchronize()
        digest = backend.compute_digest(returned)
        digests.add(read_checksum() if digest is None and read_checksum else digest)
    return None if None in digests or not digests else len(digests) == 1
