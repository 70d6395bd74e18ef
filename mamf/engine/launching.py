"""One kernel launched once, or as often as asked, within a profiler's window: what stands outside is not recorded.

Operands, settings and checks are those of a measurement (mamf.engine.measure), the times are not: nobody waits for the
clock, nobody flushes a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mamf.backend import Backend
from mamf.engine.checking import Checked
from mamf.engine.measure import told
from mamf.errors import DeviceError, MamfError, UnsupportedError
from mamf.kernel import AnyKernel, Verdict


@dataclass(frozen=True)
class Launched:
    """``seconds``: of each launch in the window, between two marks. ``preparing_seconds``: host time of everything
    before, which compiles, tunes and launches it for the first time. ``verdict``: None where nothing was verified;
    ``device_kernels``: what ran on the device, by name, None where nobody watched.
    """

    seconds: tuple[float, ...]
    preparing_seconds: float
    verdict: Verdict | None
    device_kernels: Sequence[str] | None = None


#: Has a launch run, and tells what ran on the device for it.
Watch = Callable[[Callable[[], object]], Sequence[str]]


def launch_in_window(
    kernel: AnyKernel,
    problem: Any,
    shape: Any,
    backend: Backend,
    launches: int = 1,
    verifies: bool = True,
    watch: Watch | None = None,
) -> Launched:
    """Prepare, launch once before the window (verified), then in it as often as ``launches`` says, and verify these.
    ``watch`` sees a further launch behind the window.

    Raises UnsupportedError for what the kernel cannot do, WrongResultError, and DeviceError for what a launch throws.
    """
    reason = kernel.unsupported(backend, problem) or kernel.unsupported_shape(problem, shape)
    if reason:
        raise UnsupportedError(reason)
    try:
        return _launched(kernel, problem, shape, backend, launches, verifies, watch)
    except MamfError:
        raise
    except Exception as error:
        status, reason = told(error, kernel, backend)
        raise DeviceError(f"{kernel.name} on {shape}: {status}: {reason}") from error


def _launched(
    kernel: AnyKernel,
    problem: Any,
    shape: Any,
    backend: Backend,
    launches: int,
    verifies: bool,
    watch: Watch | None,
) -> Launched:
    pool = backend.operand_pool(problem.data, problem.seed)
    with kernel.settings(backend, problem):
        begun = backend.now()
        checked = Checked(kernel.prepare(backend, problem, shape, pool))
        if verifies:
            checked.rehearse(backend)
        else:
            _launch(checked, backend)
            backend.synchronize()
        prepared = backend.now()
        if verifies:
            checked.poison()
        with backend.profiler_window(f"{kernel.name} {shape}"):
            marks = [_launch(checked, backend) for _ in range(launches)]
        backend.synchronize()
        if verifies:
            checked.verify()
            checked.require_unchanged_operands()
        names = None if watch is None else tuple(watch(checked.launches[0]))
    seconds = tuple(backend.seconds_between(*each) for each in marks)
    return Launched(seconds, prepared - begun, checked.verdict if verifies else None, names)


def _launch(checked: Checked, backend: Backend) -> tuple[object, object]:
    """The marks around it."""
    start = backend.mark()
    checked.launches[0]()
    backend.submit()
    return start, backend.mark()
