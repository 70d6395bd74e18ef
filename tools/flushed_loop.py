"""Why mamf-finder's sustained figure is higher: the same matmuls back to back, and with untimed work between them.

    python tools/flushed_loop.py --shapes 1536x2816x6144 8192x8192x8192     an NVIDIA GPU with torch

Each shape runs in two loops of --seconds, in turns, --rounds times. The table shows for each shape:

- back to back: TFLOPS over three operand sets in rotation, with nothing between launches; total FLOP / total time
- flushed: TFLOPS of launches between two events each; before each of them, untimed, 256 MiB are cleared and C is
  overwritten, as in mamf-finder
- idle: the share of the flushed loop's time in which no matmul ran
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

FLUSHED_BYTES = 256 * 2**20
#: Launches that are queued before the host waits for the device.
BLOCK = 32


def back_to_back(launches: Sequence[Callable[[], object]], seconds: float) -> float:
    """Mean device seconds of a launch, with nothing between the launches."""
    count, total, until = 0, 0.0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for number in range(BLOCK):
            launches[number % len(launches)]()
        end.record()
        end.synchronize()
        count, total = count + BLOCK, total + begin.elapsed_time(end) / 1e3
    return total / count


def with_flushes(
    launches: Sequence[Callable[[], object]], prepare: Callable[[], object], seconds: float
) -> tuple[float, float]:
    """Mean device seconds of a launch with ``prepare`` queued before each, and the share of the time between them."""
    timed, whole, until = 0.0, 0.0, time.perf_counter() + seconds
    count = 0
    while time.perf_counter() < until:
        marks = []
        for number in range(BLOCK):
            prepare()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            launches[number % len(launches)]()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize()
        timed += sum(begin.elapsed_time(end) for begin, end in marks) / 1e3
        whole += marks[0][0].elapsed_time(marks[-1][1]) / 1e3
        count += BLOCK
    return timed / count, 1 - timed / whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1536x2816x6144"], metavar="MxNxK")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of each loop")
    parser.add_argument("--rounds", type=int, default=2, help="how often each loop runs")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16")
    print("| shape | back to back | flushed | idle |\n|:--|--:|--:|--:|")
    for text in options.shapes:
        m, n, k = map(int, text.split("x"))
        sets = [
            (torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16().mT)
            for _ in range(3)
        ]
        c, rewrite = torch.empty(m, n, device="cuda", dtype=torch.bfloat16), torch.randn(m, n, device="cuda").bfloat16()
        flush = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
        launches = [lambda a=a, b=b, c=c: torch.mm(a, b, out=c) for a, b in sets]

        def prepare(flush: torch.Tensor = flush, c: torch.Tensor = c, rewrite: torch.Tensor = rewrite) -> None:
            flush.zero_()
            c.copy_(rewrite)

        plain, flushed, idle = [], [], []
        for _ in range(options.rounds):
            plain.append(back_to_back(launches, options.seconds))
            seconds, share = with_flushes(launches, prepare, options.seconds)
            flushed.append(seconds)
            idle.append(share)
        rates = (2 * m * n * k / statistics.fmean(seconds) / 1e12 for seconds in (plain, flushed))
        print(f"| {text} | {' | '.join(f'{rate:.0f}' for rate in rates)} | {statistics.fmean(idle):.0%} |")


if __name__ == "__main__":
    main()
