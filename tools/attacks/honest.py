"""Honest logs of a simulated device, one of each kind, to be damaged, compared with and killed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from attacks.calls import Counts, call
from mamf.engine.regimes.classic import Classic
from mamf.engine.search.grid import THOROUGH, plan_for
from mamf.engine.search.strategy import FindStrategy
from mamf.operations.matmul.shapes import MatmulGrid

BACKEND = ("--backend", "mamf.testing:SimulatedBackend")
MATMUL = ("--kernel", "mamf.testing:SimulatedMatmul")
ATTENTION = ("--kernel", "mamf.testing:SimulatedAttention")
BANDWIDTH = ("--kernel", "mamf.testing:SimulatedBandwidth")
LEGACY = "imported"
# Of thirty seconds nearly all launches would be, and few kills would fall between rows.
_WARMUP_SECONDS = 0.1
_FINDER_OUTPUT = """
Benchmark started on 2025-01-04 16:01:02

** Command line:
python ./mamf-finder.py --m_range 256 769 256 -n 1024 -k 4096

** Dtype: torch.bfloat16

** Platform/Device info:
Linux 5.15.0 x86_64
_CudaDeviceProperties(name='NVIDIA H100 80GB HBM3', major=9, minor=0, total_memory=81079MB, multi_processor_count=132)

** Critical software versions:
torch=2.5.1+cu124
cuda=12.4

** Additional notes:
benchmark version: 2
a rack

--------------------------------------------------------------------------------

     1 |  100.0(mean)  101.0(median)  110.0(max) @ 256x1024x4096 | best:  100.0(mean)  101.0(median)  110.0(max) TFLOPS
     2 |  300.5(mean)  301.5(median)  310.5(max) @ 512x1024x4096 | best:  300.5(mean)  301.5(median)  310.5(max) TFLOPS
     3 |  200.0(mean)  201.0(median)  210.0(max) @ 768x1024x4096 | best:  300.5(mean)  301.5(median)  310.5(max) TFLOPS

Tried  3 shapes => the best outcomes were:
mean:   300.5 TFLOPS @ 512x1024x4096 (MxNxK)
median: 301.5 TFLOPS @ 512x1024x4096 (MxNxK)
max:    310.5 TFLOPS @ 512x1024x4096 (MxNxK)
Elapsed time: 0:00:09
"""


@dataclass(frozen=True)
class Run:
    """A measuring command. ``begin``: its name and what it needs when it is resumed too; ``what``: what it measures.

    ``is_search``: which shapes it measures depends on what it read.
    """

    name: str
    begin: tuple[str, ...]
    what: tuple[str, ...]
    is_search: bool = False

    def new(self, path: Path) -> list[str]:
        return [*self.begin, *self.what, "--output", str(path)]

    def resumed(self, path: Path) -> list[str]:
        return [*self.begin, "--resume", str(path)]


RUNS = (
    Run(
        "sweep",
        ("sweep", *BACKEND, *MATMUL),
        (
            *("--m", "256", "512", "1024", "--n", "256", "512", "--k", "256", "--reference", "128x128x128"),
            *("--reference-every", "2", "--time-limit", "0.1s"),
        ),
    ),
    Run(
        "sweep-classic",
        ("sweep", *BACKEND, *MATMUL),
        (
            *("--m-range", "0", "20480", "4096", "--n", "16384", "--k", "16384", "--regime", "burst", "classic"),
            *("--num-iterations", "5", "--num-warmup-iterations", "2", "--order", "given"),
        ),
    ),
    Run(
        "sweep-sustained",
        ("sweep", *BACKEND, *MATMUL),
        ("--m", "8192", "16384", "--n", "8192", "--k", "8192", "--regime", "sustained", "--time-limit", "1s"),
    ),
    Run("find", ("find", *BACKEND, *MATMUL), ("--regime", "burst", "--budget", "20s"), is_search=True),
    Run(
        "attention",
        ("attention", *BACKEND, *ATTENTION),
        (
            *("--seq-lens", "512", "1024", "--batch", "2", "--heads", "8", "--kv-heads", "4", "--head-dims", "64"),
            *("--causal", "both", "--direction", "fwd", "bwd", "--no-ceiling"),
        ),
    ),
    Run("bandwidth", ("bandwidth", *BACKEND, *BANDWIDTH), ("--size", "1GiB", "64MiB")),
    Run(
        "find-operation",
        ("find", "--operation", "bandwidth", *BACKEND, *BANDWIDTH),
        ("--set", "pattern=copy,read", "--shapes", "64MiB", "1GiB", "--regime", "burst", "--budget", "10s"),
        is_search=True,
    ),
)


def make(folder: Path) -> dict[str, Path]:
    """A log of each run, and an imported one. Raises RuntimeError where honest work fails."""
    counts = Counts("honest")
    logs = {run.name: folder / f"{run.name}.jsonl" for run in RUNS}
    commands = [run.new(logs[run.name]) for run in RUNS]
    original = folder / f"{LEGACY}.txt"
    original.write_text(_FINDER_OUTPUT)
    commands.append(["import", str(original), "--output-folder", str(folder)])
    for command in commands:
        ended = call(command, counts)
        if ended.code != 0:
            raise RuntimeError(f"{command} ended with {ended.code}: {ended.err} {counts.examples}")
    return logs | {LEGACY: folder / f"{LEGACY}.jsonl"}


@contextlib.contextmanager
def little_work() -> Iterator[None]:
    """Searches of a coarse grid, a short warm-up of classic, and nobody waits to see how busy the host is."""

    def short(*arguments: Any, **options: Any) -> Any:
        sizes = (4096, 8192)
        plan, kernels = plan_for(*arguments, **options)
        return replace(
            plan, options=replace(plan.options, grid=MatmulGrid(sizes, sizes, sizes), scouts=6, refinements=0)
        ), kernels

    with (
        mock.patch("psutil.cpu_percent", lambda interval: 3.0),
        mock.patch("mamf.cli.commands.find.plan_for", short),
        mock.patch.object(Classic.__init__, "__defaults__", (50, 100, _WARMUP_SECONDS)),
        mock.patch.object(FindStrategy, "fine_shapes", 1),
        mock.patch("mamf.engine.search.grid.THOROUGH", replace(THOROUGH, candidates=4)),
    ):
        yield
