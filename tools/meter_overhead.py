"""What mamf.Meter adds to a training step: the same steps with and without it, in turns.

    python tools/meter_overhead.py                   # the first accelerator, else the CPU
    python tools/meter_overhead.py --seconds 0.01    # of a step

A step is additions to a large array, one after another: memory-bound work keeps its clock, while products
vary with the power limit by more than the meter's cost. Prints the median of the pairs' ratios, and the
host time of a call.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

import mamf

_NUMBERS, _NUMBERS_OF_CPU = 2**27, 2**18


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.01, help="of a step (default: 0.01)")
    parser.add_argument("--steps", type=int, default=50, help="in a block (default: 50)")
    parser.add_argument("--pairs", type=int, default=20, help="of blocks with and without (default: 20)")
    options = parser.parse_args(arguments)
    backend = mamf.open_backend("auto")
    count = _NUMBERS if backend.is_accelerator else _NUMBERS_OF_CPU
    array = torch.zeros(count, device=getattr(backend, "device", "cpu"))
    _seconds_of(backend, lambda: array.add_(1.0), 50)  # the first are slower
    additions = max(1, round(options.seconds / _seconds_of(backend, lambda: array.add_(1.0), 50)))

    def step() -> None:
        for _ in range(additions):
            array.add_(1.0)

    meter = mamf.Meter(backend=backend, flops_per_step=float(additions * count), tokens_per_step=1, ceiling=1e15)

    def metered() -> None:
        meter.begin()
        step()
        meter.step()

    _seconds_of(backend, metered, options.steps)
    pairs = [
        (_seconds_of(backend, metered, options.steps), _seconds_of(backend, step, options.steps))
        for _ in range(options.pairs)
    ]
    ratio = statistics.median(with_meter / without for with_meter, without in pairs) - 1
    spread = statistics.quantiles([with_meter / without - 1 for with_meter, without in pairs], n=4)
    milliseconds = statistics.median(without for _, without in pairs) * 1e3
    print(f"{backend.info.name}: a step of {milliseconds:.2f} ms takes {100 * ratio:+.3f} % longer with the meter")
    print(f"half of {options.pairs} pairs lie within {100 * spread[0]:+.3f} to {100 * spread[2]:+.3f} %")
    print(f"begin and step on an idle device: {1e6 * _host_seconds(meter):.1f} us of the host")
    return 0


def _seconds_of(backend: mamf.Backend, work: Callable[[], None], times: int) -> float:
    """Of one call, device time included."""
    backend.synchronize()
    begun = time.perf_counter()
    for _ in range(times):
        work()
    backend.synchronize()
    return (time.perf_counter() - begun) / times


def _host_seconds(meter: mamf.Meter, calls: int = 200, repeats: int = 20) -> float:
    """The least of several repeats: other processes only add."""

    def repeat() -> float:
        begun = time.perf_counter()
        for _ in range(calls):
            meter.begin()
            meter.step()
        return (time.perf_counter() - begun) / calls

    return min(repeat() for _ in range(repeats))


if __name__ == "__main__":
    raise SystemExit(main())
