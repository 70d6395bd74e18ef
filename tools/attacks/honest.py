"""Define the runs that the attacks disturb, and make undamaged logs of them on the simulated device."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from attacks.calls import Counts, call
from mamf.engine.regimes.classic import ClassicRegime
from mamf.engine.search.grid import THOROUGH_SCHEDULE, plan_search
from mamf.engine.search.strategy import GridSearchStrategy
from mamf.operations.matmul.shapes import MatmulGrid

BACKEND = ("--backend", "mamf.testing:SimulatedBackend")
MATMUL, ATTENTION, BANDWIDTH = (
    ("--kernel", f"mamf.testing:Simulated{operation}") for operation in ("Matmul", "Attention", "Bandwidth")
)
LEGACY = "imported"
# The warm-up of the classic regime. With the default of 30 s, nearly all launches would be warm-up, and few faults
# would occur between rows.
_WARMUP_SECONDS = 0.1
_LEGACY_LOG = Path(__file__).parents[2] / "results/nvidia-h200/mamf-finder-v2g-bfloat16-20261122-022832.jsonl"


@dataclass(frozen=True)
class AttackedRun:
    """A command that measures.

    - ``base_arguments``: the command and the options that it also needs when it resumes a log.
    - ``measured_options``: the options that define what it measures. A resumed run reads them from its log.
    - ``is_search``: whether the rates that it measures decide which shapes it measures next.
    """

    name: str
    base_arguments: tuple[str, ...]
    measured_options: str
    is_search: bool = False

    def make_new_command(self, path: Path) -> list[str]:
        return [*self.base_arguments, *self.measured_options.split(), "--output", str(path)]

    def make_resume_command(self, path: Path) -> list[str]:
        return [*self.base_arguments, "--resume", str(path)]


_SWEEP = ("sweep", *BACKEND, *MATMUL)
_SMALL = "--m 256 512 1024 --n 256 512 --k 256 --reference 128x128x128 --reference-every 2 --time-limit 0.1s"
_CLASSIC = "--m-range 0 20480 4096 --n 16384 --k 16384 --regime burst classic --order given"
_CLASSIC += " --num-iterations 5 --num-warmup-iterations 2"
_SUSTAINED = "--m 8192 16384 --n 8192 --k 8192 --regime sustained --time-limit 1s"
_ATTENTION = "--seq-lens 512 1024 --batch 2 --heads 8 --kv-heads 4 --head-dims 64 --causal both --direction fwd bwd"
_OPERATION = "--set pattern=copy,read --shapes 64MiB 1GiB --regime burst --budget 10s"
RUNS = (
    AttackedRun("sweep", _SWEEP, _SMALL),
    AttackedRun("sweep-classic", _SWEEP, _CLASSIC),
    AttackedRun("sweep-sustained", _SWEEP, _SUSTAINED),
    AttackedRun("find", ("find", *BACKEND, *MATMUL), "--regime burst --budget 20s", is_search=True),
    AttackedRun("attention", ("attention", *BACKEND, *ATTENTION), f"{_ATTENTION} --no-ceiling"),
    AttackedRun("bandwidth", ("bandwidth", *BACKEND, *BANDWIDTH), "--size 1GiB 64MiB"),
    AttackedRun(
        "find-operation", ("find", "--operation", "bandwidth", *BACKEND, *BANDWIDTH), _OPERATION, is_search=True
    ),
)


def make_logs(folder: Path) -> dict[str, Path]:
    """Make a log of each run in RUNS, and copy an imported log of mamf-finder. Return the paths by name.

    Raises RuntimeError if a run fails.
    """
    counts, logs = Counts("undisturbed runs"), {LEGACY: folder / f"{LEGACY}.jsonl"}
    shutil.copy(_LEGACY_LOG, logs[LEGACY])
    for run in RUNS:
        logs[run.name] = folder / f"{run.name}.jsonl"
        result = call(run.make_new_command(logs[run.name]), counts)
        if result.code != 0:
            raise RuntimeError(f"the undisturbed run {run.name} failed: {result.err} {counts.examples}")
    return logs


@contextlib.contextmanager
def shorten_runs() -> Iterator[None]:
    """Shorten all runs: search a coarse grid, shorten the warm-up of the classic regime, and do not wait to measure how
    busy the host is.
    """

    def plan_short_search(*arguments: Any, **options: Any) -> Any:
        (plan, kernels), sizes = plan_search(*arguments, **options), (4096, 8192)
        short_options = replace(plan.options, grid=MatmulGrid(sizes, sizes, sizes), scouts=6, refinements=0)
        return replace(plan, options=short_options), kernels

    with (
        mock.patch("psutil.cpu_percent", lambda interval: 3.0),
        # First patch the modules that import plan_search by name, then the module that defines it. In the other order,
        # a module that is only imported here would import the substitute, and keep it.
        mock.patch("mamf.cli.ceilings.plan_search", plan_short_search),
        mock.patch("mamf.node.device.plan_search", plan_short_search),
        mock.patch("mamf.api.measuring.plan_search", plan_short_search),
        mock.patch("mamf.engine.search.grid.plan_search", plan_short_search),
        mock.patch.object(ClassicRegime.__init__, "__defaults__", (50, 100, _WARMUP_SECONDS)),
        mock.patch.object(GridSearchStrategy, "max_distant_shapes", 1),
        mock.patch("mamf.engine.search.grid.THOROUGH_SCHEDULE", replace(THOROUGH_SCHEDULE, candidate_count=4)),
    ):
        yield
