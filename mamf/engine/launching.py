"""Launches one kernel within a profiler's window. The profiler does not record launches outside it.

Operands, settings and checks are the same as in a measurement (mamf.engine.measure). The times are not comparable,
because nothing rests the device or flushes its cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mamf.backend import Backend
from mamf.engine.measure import classify_error
from mamf.engine.regimes.base import CheckedKernel
from mamf.errors import DeviceError, MamfError, UnsupportedError, get_plugin_errors
from mamf.kernel import AnyKernel, Verdict

#: Runs a launch and returns the names of the kernels that ran on the device.
Watch = Callable[[Callable[[], object]], Sequence[str]]


@dataclass(frozen=True)
class LaunchRequest:
    """What to launch. ``launches``: the number of launches in the window. ``verifies``: whether to verify results.
    After the window, ``watch`` observes one launch, and ``repeats`` more launches show whether results repeat.
    """

    launches: int = 1
    verifies: bool = True
    watch: Watch | None = None
    repeats: int = 0


@dataclass(frozen=True)
class LaunchResult:
    """The result of ``launch_in_window``.

    - ``seconds``: the time between two marks of each launch in the window.
    - ``preparing_seconds``: host time before the window, including compilation, tuning and the first launch.
    - ``verdict``: None if nothing was verified.
    - ``device_kernels``: the names of the kernels that ran on the device; None without ``watch``.
    - ``is_deterministic``: whether all repeats gave the same bits; None if unknown.
    """

    seconds: tuple[float, ...]
    preparing_seconds: float
    verdict: Verdict | None
    device_kernels: Sequence[str] | None = None
    is_deterministic: bool | None = None


def launch_in_window(
    kernel: AnyKernel, problem: Any, shape: Any, backend: Backend, asked: LaunchRequest
) -> LaunchResult:
    """Prepare the kernel and verify a launch, then launch within the profiler's window and verify again.

    Raises UnsupportedError if the kernel does not support the problem, WrongResultError, and DeviceError if a launch
    fails.
    """
    reason = kernel.unsupported(backend, problem) or kernel.unsupported_shape(problem, shape)
    if reason:
        raise UnsupportedError(reason)
    try:
        with kernel.settings(backend, problem):
            return _launch_and_verify(kernel, problem, shape, backend, asked)
    except MamfError:
        raise
    except get_plugin_errors() as error:
        status, reason = classify_error(error, kernel, backend)
        raise DeviceError(f"{kernel.name} on {shape}: {status}: {reason}") from error


def _launch_and_verify(
    kernel: AnyKernel, problem: Any, shape: Any, backend: Backend, asked: LaunchRequest
) -> LaunchResult:
    begun = backend.now()
    pool = backend.operand_pool(problem.data, problem.seed)
    ready = kernel.prepare(backend, problem, shape, pool)
    checked = CheckedKernel(ready)
    if asked.verifies:
        checked.warm_up_and_verify(backend)
        checked.poison()
    else:
        launch_once(checked.launches[0], backend)
        backend.synchronize()
    prepared = backend.now()
    with backend.profiler_window(f"{kernel.name} {shape}"):
        marks = [launch_once(checked.launches[0], backend) for _ in range(asked.launches)]
    backend.synchronize()
    if asked.verifies:
        checked.verify()
        checked.require_unchanged_operands()
    return LaunchResult(
        seconds=tuple(backend.seconds_between(*each) for each in marks),
        preparing_seconds=prepared - begun,
        verdict=checked.verdict if asked.verifies else None,
        device_kernels=asked.watch and tuple(asked.watch(checked.launches[0])),
        is_deterministic=_check_determinism(checked, backend, asked.repeats, ready.checksum),
    )


def launch_once(launch: Callable[[], object], backend: Backend) -> tuple[object, object]:
    """Queue a launch between two marks, and return the marks."""
    start = backend.mark()
    launch()
    backend.submit()
    return start, backend.mark()


def time_parts(kernel: Any, problem: Any, shape: Any, backend: Backend, launches: int) -> dict[str, tuple[int, float]]:
    """Launch each part of a kernel separately. Return the FLOP and median seconds of each part, by its name. Raises
    UnsupportedError if the kernel has no parts.
    """
    if not hasattr(kernel, "parts"):
        raise UnsupportedError(f"{kernel.name} is a single launch, so its parts cannot be timed: use the kernel eager")
    parts = kernel.parts(backend, problem, shape, backend.operand_pool(problem.data, problem.seed))
    found = {}
    for name, (flop, launch) in parts.items():
        _, *marks = [launch_once(launch, backend) for _ in range(launches + 1)]  # the first one warms up
        backend.synchronize()
        found[name] = flop, statistics.median(backend.seconds_between(*each) for each in marks)
    return found


def _check_determinism(
    checked: CheckedKernel, backend: Backend, repeats: int, checksum: Callable[[int, object], Callable[[], int]] | None
) -> bool | None:
    """Compare what launches return or, for kernels that return nothing, the checksum of their output."""
    digests = set[object]()
    for _ in range(repeats):
        checked.poison()
        returned = checked.launches[0]()
        summed = checksum and checksum(0, returned)
        backend.submit()
        backend.synchronize()
        digest = backend.digest(returned)
        digests.add(summed() if digest is None and summed else digest)
    return None if None in digests or not digests else len(digests) == 1
