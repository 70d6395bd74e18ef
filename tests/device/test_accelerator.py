"""Test the contracts, the regimes and interrupted runs on a real accelerator: ``python -m pytest tests/device``."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from this_accelerator import ACCELERATOR

from mamf.api.measuring import sweep
from mamf.logs.run_log import read_run_log
from mamf.operations.matmul.operation import choose_matmul_kernel, make_problem
from mamf.operations.matmul.shapes import MatmulShape, matmul_grid
from mamf.testing import BackendContract, KernelContract

DTYPES = [
    dtype
    for dtype in ("bfloat16", "float16", "float32", "tf32", "float64", "fp8", "float8_e5m2", "int8")
    if ACCELERATOR.explain_unsupported_dtype(ACCELERATOR.resolve_dtype(dtype)) is None
]
SQUARE = MatmulShape(4096, 4096, 4096)


class TestBackend(BackendContract):
    @pytest.fixture
    def backend(self):
        return ACCELERATOR


@pytest.mark.parametrize("dtype", DTYPES)
class TestKernel(KernelContract):
    @pytest.fixture
    def shape(self):
        return MatmulShape(256, 384, 512)

    @pytest.fixture
    def backend(self, dtype):
        return ACCELERATOR

    @pytest.fixture
    def problem(self, backend, dtype):
        return make_problem(backend, dtype)

    @pytest.fixture
    def kernel(self, backend, problem):
        return choose_matmul_kernel(backend, problem)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_measured_right(dtype):
    (row,) = sweep([SQUARE], backend=ACCELERATOR, dtype=dtype)
    assert row.ok, row.reason
    assert row.summary.interval.coverage >= 0.95


def test_burst_is_unthrottled_and_sustained_is_not_faster():
    (burst,) = sweep([SQUARE], backend=ACCELERATOR)
    (sustained,) = sweep([SQUARE], backend=ACCELERATOR, regime="sustained")
    assert burst.ok
    assert sustained.ok
    assert sustained.compute_rate("median") <= burst.compute_rate("median") * 1.01


def test_a_shape_too_large_is_a_row_and_the_next_is_measured():
    huge = MatmulShape(400_000, 400_000, 4096)
    rows = {row.shape: row for row in sweep([huge, SQUARE], backend=ACCELERATOR)}
    assert rows[huge].status == "out_of_memory"
    assert rows[SQUARE].ok


def test_an_interrupted_run_is_resumed(tmp_path):
    path = tmp_path / "run.jsonl"
    command = [sys.executable, "-m", "mamf", "sweep", "--m-range", "0", "8192", "256", "--output", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_text().count('"measurement"') < 3:
        assert process.poll() is None
        if time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"fewer than three measurements after 120 s: {process.communicate()[1]}")
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "best burst" in output
    assert read_run_log(path).summary["status"] == "interrupted"
    resumed = subprocess.run(
        [sys.executable, "-m", "mamf", "sweep", "--resume", str(path), "--format", "json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(resumed.stdout)["summary"]["status"] == "complete"
    shapes = [row.shape for row in read_run_log(path).measurements]
    assert sorted(shapes) == sorted(matmul_grid(range(256, 8192, 256), [4096], [4096]))
