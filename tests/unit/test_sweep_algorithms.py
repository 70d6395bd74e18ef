"""Test a sweep of a kernel with several algorithms: it ranks them on each shape, and measures the fastest again."""

import json
from pathlib import Path

import pytest

from mamf.cli import main
from mamf.logs.run_log import read_run_log
from mamf.plans import ALGORITHM_PHASE
from mamf.testing import SimulatedMatmul

PATH = "test_sweep_algorithms:Algorithm"
DEVICE = ["sweep", "--backend", "mamf.testing:SimulatedBackend"]
SWEEP = [*DEVICE, "--shapes", "4096x4096x4096", "8192x8192x8192", "--output", "log.jsonl"]


class Algorithm(SimulatedMatmul):
    """A kernel with algorithms 0 to 2. Algorithm 1 is the fastest at M = 4096, and algorithm 2 at other sizes."""

    has_cheap_variants = True

    def __init__(self, rank=None):
        self.rank, self.name = rank or 0, "ranked" if rank is None else f"ranked[{rank}]"

    def list_variants(self, backend, problem, shape):
        return [Algorithm(rank) for rank in range(3)] if self.name == "ranked" else (self,)

    def prepare(self, backend, problem, shape, *arguments, **options):
        self.slowness = 1.0 if self.rank == (1 if shape.m == 4096 else 2) else 1.2
        return super().prepare(backend, problem, shape, *arguments, **options)

    def make_launch_function(self, device, problem, shape):
        cycles = device.compute_matmul_cycles(shape) * self.slowness
        return lambda result: device.launch_compute(cycles, result)


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run_sweep(*options):
        code = main([*SWEEP, *options])
        return code, read_run_log("log.jsonl")

    return run_sweep


def get_fastest_kernels(log):
    return {str(row.shape): row.kernel for row in log.measurements if not row.phase}


def test_the_fastest_of_each_shape_is_measured_again_and_all_are_in_the_log(sweep, capsys):
    code, log = sweep("--kernel", PATH)
    assert code == 0
    assert get_fastest_kernels(log) == {"4096x4096x4096": "ranked[1]", "8192x8192x8192": "ranked[2]"}
    ranking_rows = [row for row in log.measurements if row.phase == ALGORITHM_PHASE]
    assert len(ranking_rows) == 2 * 3
    assert log.summary["best"]["burst"]["shapes"] == 2
    assert log.tier == "complete"
    assert "ranked[2]" in capsys.readouterr().out


def test_an_interrupted_run_is_resumed_in_the_middle_of_a_shape(sweep):
    sweep("--kernel", PATH)
    lines = Path("log.jsonl").read_text().splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if json.loads(line).get("phase") == "")
    Path("log.jsonl").write_text("".join(lines[: first + 2]))  # up to the first algorithm of the second shape
    assert main([*DEVICE, "--kernel", PATH, "--resume", "log.jsonl"]) == 0
    log = read_run_log("log.jsonl")
    assert get_fastest_kernels(log) == {"4096x4096x4096": "ranked[1]", "8192x8192x8192": "ranked[2]"}
    assert len([row for row in log.measurements if not row.phase]) == 2
    assert len([row for row in log.measurements if row.phase]) == 6
