"""Compare mamf's times of kernels with the times of NVIDIA's profiler (CUPTI).

    python tools/verify_timing.py                   # needs an NVIDIA GPU with CUPTI; takes 20 s

The tool measures launches of 4 us to 0.5 ms in burst. Then it queues the same launches in the same way under
torch.profiler, whose times do not include the overhead of events. The profiler's time of a launch begins with the first
kernel or memset of the launch and ends with the last one. It includes memsets because torch.mm of 4096x4096x4096 on an
H100 begins with a memset of 0.7 us. The two times may differ by the accuracy of the timer (mamf/timers.csv) or by
0.5 %, whichever is larger. If a pair of times differs by more, the exit code is 1.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from mamf.backend import Backend
from mamf.engine.measure import measure_row
from mamf.engine.regimes import BurstRegime, StoppingRule
from mamf.measurement import Measurement, compute_relative_timing_error, find_timer_calibration
from mamf.plugins.discovery import make_kernel, make_operation, open_backend

# A cache flush is a memset or a fill kernel that takes at least this long. The memsets of a launch are shorter.
FLUSH_WORDS, MIN_FLUSH_MICROSECONDS = ("memset", "fill"), 10
TRAIN_COUNT, LAUNCHES_PER_TRAIN, FLUSHES_BEFORE_TRAIN = 24, 5, 12
REST_RATIO, MIN_REST_SECONDS = 4, 0.002


class TimingCase(NamedTuple):
    """A kernel and a shape to compare. ``fields``: the fields of the problem that differ from their defaults."""

    operation: str
    kernel: str
    shape: str
    fields: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.kernel} {self.shape}"


CASES = (
    TimingCase("matmul", "torch.mm", "512x512x512", {}),
    TimingCase("matmul", "torch.mm", "1024x1024x1024", {}),
    TimingCase("matmul", "torch.mm", "2048x2048x2048", {}),
    TimingCase("bandwidth", "torch", "64MiB", {"pattern": "copy", "dtype": "float32"}),
    TimingCase("matmul", "torch.mm", "4096x4096x4096", {}),
    TimingCase("attention", "sdpa-flash", "b4h16q2048k2048d128", {}),
    TimingCase("matmul", "torch.mm", "3072x2816x19328", {}),
)


def prepare_case(backend: Backend, case: TimingCase) -> tuple[Any, Any, Any]:
    """Return the kernel, the problem and the shape of a case."""
    operation = make_operation(case.operation)
    return (
        make_kernel(operation, case.kernel),
        operation.make_problem(backend, case.fields),
        operation.parse_shape(case.shape),
    )


def measure_case(backend: Backend, case: TimingCase) -> Measurement:
    """Measure a case in burst, as ``mamf sweep --regime burst`` does. Raises SystemExit if that fails."""
    regime = BurstRegime(backend)
    regime.prepare_device()
    pool = backend.make_operand_pool("normal", 0)
    row = measure_row(*prepare_case(backend, case), regime, pool, StoppingRule(max_seconds=1.0))
    pool.release_buffers()
    if not row.ok:
        raise SystemExit(f"{case}: {row.status}: {row.reason}")
    return row


def queue_trains(backend: Backend, launch: Callable[[], object]) -> None:
    """Queue trains of launches with cache flushes, events and rests, as mamf does in burst."""
    for _ in range(TRAIN_COUNT):
        for _ in range(FLUSHES_BEFORE_TRAIN):
            backend.flush_cache()
        for _ in range(LAUNCHES_PER_TRAIN):
            backend.flush_cache()
            start = backend.record_mark()
            launch()
            end = backend.record_mark()
        backend.synchronize()
        # Rest between trains, as mamf does in burst, so that the clock returns to its maximum.
        time.sleep(max(MIN_REST_SECONDS, REST_RATIO * LAUNCHES_PER_TRAIN * backend.compute_seconds_between(start, end)))


def profile_case(backend: Backend, case: TimingCase) -> float:
    """Return the profiler's median time of a launch. Raises SystemExit if the profile does not contain all launches."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    pool, (kernel, problem, shape) = backend.make_operand_pool("normal", 0), prepare_case(backend, case)
    with kernel.apply_settings(backend, problem):
        launch = kernel.prepare(backend, problem, shape, pool).launches[0]
        queue_trains(backend, launch)
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            queue_trains(backend, launch)
    pool.release_buffers()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    launches = [list(group) for flushes, group in itertools.groupby(events, is_flush) if not flushes]
    if len(launches) != TRAIN_COUNT * LAUNCHES_PER_TRAIN:
        expected = TRAIN_COUNT * LAUNCHES_PER_TRAIN
        raise SystemExit(f"{case}: the profile has {len(launches)} of {expected} launches: run the tool again")
    return statistics.median(kernels[-1].time_range.end - kernels[0].time_range.start for kernels in launches) * 1e-6


def is_flush(event: Any) -> bool:
    """Return whether an event of the profiler is a cache flush."""
    is_fill = any(word in event.name.lower() for word in FLUSH_WORDS)
    return is_fill and event.time_range.elapsed_us() >= MIN_FLUSH_MICROSECONDS


def compare_with_profiler(backend: Backend) -> bool:
    """Print the table. Return whether all times agree.

    Measure all kernels before the first profile, because a profiler changes the times of later launches.
    """
    timer = find_timer_calibration(backend.name)
    if timer is None:
        raise SystemExit(f"mamf/timers.csv has no row for {backend.name}: add one, with the accuracy of its timer")
    rows = [measure_case(backend, case) for case in CASES]
    print("| kernel | profiler, us | window | mamf | difference, us | difference | allowed, us |")
    print("|:--|--:|--:|--:|--:|--:|--:|")
    do_all_agree = True
    for case, row in zip(CASES, rows, strict=True):
        profiled_seconds = profile_case(backend, case)
        allowed = profiled_seconds * compute_relative_timing_error(timer.error_seconds, profiled_seconds)
        difference = row.seconds - profiled_seconds
        agrees = abs(difference) <= allowed
        do_all_agree &= agrees
        figures = (profiled_seconds, row.seconds + row.timer_overhead_seconds, row.seconds)
        print(
            f"| {case} | {' | '.join(f'{figure * 1e6:.2f}' for figure in figures)} | {difference * 1e6:+.2f} | "
            f"{100 * difference / profiled_seconds:+.2f} % | {allowed * 1e6:.2f} |{'' if agrees else ' FAIL'}"
        )
    return do_all_agree


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    backend = open_backend("cuda")
    print(f"{backend.info.name}, driver {backend.info.driver}\n")
    return 0 if compare_with_profiler(backend) else 1


if __name__ == "__main__":
    sys.exit(main())
