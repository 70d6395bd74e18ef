"""Test kernels that work on a side stream of a card: ``python -m pytest tests/device/test_side_streams.py``."""

import pytest
import torch
from this_accelerator import ACCELERATOR

from mamf.engine.measure import measure_row
from mamf.engine.regimes import BurstRegime, ClassicRegime, StoppingRule, SustainedRegime
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.operations.matmul.torch_kernels import TorchMm

REGIMES = {
    "burst": BurstRegime,
    "sustained": SustainedRegime,
    "classic": lambda device: ClassicRegime(device, warmup_seconds=0.5),
}


class SideStreamMm(TorchMm):
    """A matmul that multiplies the last ``share`` of the rows of A on a side stream, and does not wait for it."""

    name = "side-stream"

    def __init__(self, share):
        self.share, self.stream = share, torch.cuda.Stream()

    def bind_operands(self, problem, a, b, c):
        side_start = a.shape[0] - int(a.shape[0] * self.share)

        def launch():
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                torch.mm(a[side_start:], b, out=c[side_start:])
            if side_start:
                torch.mm(a[:side_start], b, out=c[:side_start])

        return launch, 1.0


def measure_one_row(kernel, size, regime):
    if not ACCELERATOR.has_idle_marks:
        pytest.skip("this driver cannot record events in a context")
    opened_regime, problem, shape = REGIMES[regime](ACCELERATOR), MatmulProblem(), MatmulShape(size, size, size)
    opened_regime.prepare_device()
    pool = ACCELERATOR.make_operand_pool(problem.data, problem.seed)
    return measure_row(kernel, problem, shape, opened_regime, pool, StoppingRule(max_seconds=0.5))


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(("size", "share"), [(1024, 1.0), (4096, 0.25), (4096, 0.5), (8192, 0.5), (8192, 1.0)])
def test_work_on_a_side_stream_gains_nothing(size, share, regime):
    """Check that mamf rejects the row, or that its rate is no higher than that of an honest kernel.

    If the host queues work more slowly than the device does it, the side stream hides no work, and the rate is honest.
    """
    row = measure_one_row(SideStreamMm(share), size, regime)
    honest = measure_one_row(TorchMm(), size, regime)
    assert row.status in ("wrong_result", "implausible") or row.best_rate < 1.02 * honest.best_rate, row.reason


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("size", [256, 1024, 4096, 8192])
def test_honest_launches_are_accepted(size, regime):
    for _ in range(1 if regime == "sustained" else 20):
        row = measure_one_row(TorchMm(), size, regime)
        assert row.ok, row.reason
