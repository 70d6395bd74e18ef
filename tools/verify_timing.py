"""Is the time right? The same launches timed by mamf and by the profiler, and what else a timer must pass.

    python tools/verify_timing.py            # needs an NVIDIA GPU with CUPTI

1. Products from 20 us to 3 ms: mamf's samples against the durations that torch.profiler (CUPTI) reports for the very
same kernels. Ratios of medians; from 200 us on they must agree within 1 %.
2. Nothing between two marks: what a window costs by itself.
3. A kernel of known cycles (torch.cuda._sleep): half the cycles, half the time, at the clock that NVML shows.
4. Zeros against normal data: the same kernel must be faster on zeros, or the data never reached it.
5. A launch that is skipped: verification must refuse it.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys

import torch
from torch.profiler import ProfilerActivity, profile

from mamf.api.measuring import problem_for
from mamf.backend import Backend
from mamf.kernel import Prepared
from mamf.operations.matmul.shapes import MatmulShape
from mamf.plugins.discovery import open_backend
from mamf.plugins.selection import kernel_for
from mamf.regimes import Burst, StoppingRule

SHAPES = (
    "1024x1024x1024",
    "2048x2048x2048",
    "2048x4096x4096",
    "4096x4096x4096",
    "8192x4096x4096",
    "8192x8192x8192",
    "16896x2048x20224",
)
AGREEMENT = 0.01
FROM_SECONDS = 200e-6
# Everything else that a burst queues: the flush of the cache.
NOT_THE_PRODUCT = ("memset", "fill", "elementwise")
RULE = StoppingRule(seconds=1.0)


def prepare(backend: Backend, shape: MatmulShape, data: str = "normal") -> Prepared:
    problem = problem_for(backend, data=data)
    return kernel_for(backend, problem).prepare(backend, problem, shape, backend.operand_pool(data, 0))


def burst_seconds(backend: Backend, prepared: Prepared) -> list[float]:
    assert prepared.verify().ok
    regime = Burst(backend)
    regime.start()
    return regime.sample(prepared, RULE, 0.0).seconds


def kernel_seconds(profiler: profile) -> list[float]:
    """Durations of the product's kernels in the order they ran."""
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    products = [event for event in events if not any(word in event.name.lower() for word in NOT_THE_PRODUCT)]
    return [
        event.time_range.elapsed_us() * 1e-6 for event in sorted(products, key=lambda event: event.time_range.start)
    ]


def compare_with_profiler(backend: Backend, shape: MatmulShape) -> tuple[float, float]:
    """Median seconds of the same launches, by mamf and by the profiler."""
    prepared = prepare(backend, shape)
    prepared.verify()
    regime = Burst(backend)
    regime.start()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        mine = regime.sample(prepared, RULE, 0.0).seconds
        backend.synchronize()
    theirs = kernel_seconds(profiler)
    if len(theirs) < len(mine):
        raise SystemExit(f"{shape}: {len(mine)} launches but {len(theirs)} kernels in the profile; cannot pair them")
    # The launches before these warmed the device in.
    return statistics.median(mine), statistics.median(theirs[-len(mine) :])


def window_seconds(backend: Backend, launch: object = None) -> float:
    """Median seconds between two marks around ``launch``, the host well ahead."""
    seconds = []
    for _ in range(30):
        for _ in range(60):
            backend.flush_cache()
        start = backend.mark()
        if callable(launch):
            launch()
        end = backend.mark()
        backend.synchronize()
        seconds.append(backend.seconds_between(start, end))
    return statistics.median(seconds)


def main() -> int:
    backend = open_backend("cuda")
    print(f"{backend.info.name}, torch {torch.__version__}, driver {backend.info.driver}")
    failed: list[str] = []

    def check(name: str, is_right: bool, text: str) -> None:
        print(f"{'ok  ' if is_right else 'FAIL'} {name}: {text}")
        if not is_right:
            failed.append(name)

    for shape in map(MatmulShape.parse, SHAPES):
        mine, theirs = compare_with_profiler(backend, shape)
        text = f"mamf {mine * 1e6:.1f} us, profiler {theirs * 1e6:.1f} us, ratio {mine / theirs:.4f}"
        check(str(shape), theirs < FROM_SECONDS or abs(mine / theirs - 1) <= AGREEMENT, text)

    empty = window_seconds(backend)
    check("empty window", 0 <= empty < 10e-6, f"{empty * 1e6:.2f} us")
    cycles = 2_000_000
    long, short = (
        window_seconds(backend, lambda count=count: torch.cuda._sleep(count)) for count in (cycles, cycles // 2)
    )
    expected = cycles / 2 / (long - short)
    clock = backend.info.max_clock_hz or expected
    check(
        "known cycles",
        abs(expected / clock - 1) < 0.02,
        f"{expected / 1e6:.0f} MHz by the kernel, {clock / 1e6:.0f} by NVML",
    )

    square = MatmulShape(8192, 8192, 8192)
    normal, zeros = (
        statistics.median(burst_seconds(backend, prepare(backend, square, data))) for data in ("normal", "zeros")
    )
    check("zeros against normal", normal / zeros > 1.05, f"zeros are {normal / zeros:.3f} times as fast")

    original = torch.mm
    torch.mm = lambda *operands, **options: None  # type: ignore[assignment]
    try:
        skipped = prepare(backend, square).verify()
    finally:
        torch.mm = original
    check(
        "skipped launch", not skipped.ok, f"relative error {skipped.error}: {'accepted' if skipped.ok else 'refused'}"
    )
    right = dataclasses.replace(prepare(backend, square)).verify()
    check("right launch", right.ok, f"relative error {right.error:.1e}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
