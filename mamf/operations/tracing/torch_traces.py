"""Traces launches with torch.profiler."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mamf.operations.tracing.events import Trace
from mamf.operations.tracing.traces import STEP_MARK, read_chrome_trace

# Silences the profiler's library, which otherwise prints a line on each start and stop.
_QUIET = "6"
# The variable that the library reads when a profile ends.
_TEARDOWN = "TEARDOWN_CUPTI"


def trace_launch(launch: Callable[[], object]) -> Trace:
    """Trace a launch as one step under torch.profiler, without lasting effects. Raises RuntimeError if another profiler
    is active.
    """
    with _tear_down_after(), torch_profiler() as profiler:
        synchronize()
        mark_step()
        launch()
        synchronize()
        mark_step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return read_chrome_trace(path)


@contextmanager
def _tear_down_after() -> Iterator[None]:
    """Detach CUPTI when a profile ends, if possible. By default it stays attached and slows all later launches of the
    process: on an H200 a graph's kernels of 1 us took 25 % longer (torch 2.11).
    """
    before = os.environ.get(_TEARDOWN)
    if _can_be_torn_down():
        os.environ.setdefault(_TEARDOWN, "1")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_TEARDOWN, None)


def _can_be_torn_down() -> bool:
    """Whether CUPTI can be detached. Before CUDA 12.6, a graph replayed in a later profile would crash
    (pytorch/pytorch#150957).
    """
    import torch

    version = torch.version.cuda
    return version is not None and tuple(map(int, version.split(".")[:2])) >= (12, 6)


def list_device_kernels(launch: Callable[[], object]) -> list[str]:
    """The names of the kernels that a launch runs on the device, in order; empty on a CPU."""
    ran = [event for event in trace_launch(launch).events if event.is_on_device]
    return [event.name for event in sorted(ran, key=lambda event: event.begun)]


def torch_profiler(**options: Any) -> Any:
    """A profiler for the host and all devices that torch supports."""
    os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
    from torch.profiler import profile, supported_activities

    # Events of a single cycle are kept; without this option some releases warn about that.
    return profile(activities=supported_activities(), acc_events=True, **options)


def mark_step() -> None:
    from torch.profiler import record_function

    with record_function(STEP_MARK):
        pass


def synchronize() -> None:
    """Wait for the device, if there is one."""
    import torch

    accelerator = getattr(torch, "accelerator", torch.cuda)  # torch 2.5 has no torch.accelerator
    if accelerator.is_available():
        accelerator.synchronize()
