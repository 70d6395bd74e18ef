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


class Aside(TorchMm):
    """A matmul that multiplies the last ``share`` of the rows of A on a side stream, and does not wait for it."""

    name = "aside"

    def __init__(self, share):
        self.share, self.stream = share, torch.cuda.Stream()

    def bind_operands(self, problem, a, b, c):
        here = a.shape[0] - int(a.shape[0] * self.share)

        def launch():
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                torch.mm(a[here:], b, out=c[here:])
            if here:
                torch.mm(a[:here], b, out=c[:here])

        return launch, 1.0


def row_of(kernel, size, regime):
    if not ACCELERATOR.has_idle_marks:
        pytest.skip("this driver records no events in a context")
    started, problem, shape = REGIMES[regime](ACCELERATOR), MatmulProblem(), MatmulShape(size, size, size)
    started.prepare_device()
    pool = ACCELERATOR.make_operand_pool(problem.data, problem.seed)
    return measure_row(kernel, problem, shape, started, pool, StoppingRule(max_seconds=0.5))


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(("size", "share"), [(1024, 1.0), (4096, 0.25), (4096, 0.5), (8192, 0.5), (8192, 1.0)])
def test_work_on_a_side_stream_gains_nothing(size, share, regime):
    """Check that mamf rejects the row, or that its rate is no higher than that of an honest kernel.

    If the host queues work more slowly than the device does it, the side stream hides no work, and the rate is honest.
    """
    row = row_of(Aside(share), size, regime)
    honest = row_of(TorchMm(), size, regime)
    assert row.status in ("wrong_result", "implausible") or row.best_rate < 1.02 * honest.best_rate, row.reason


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("size", [256, 1024, 4096, 8192])
def test_honest_launches_are_accepted(size, regime):
    for _ in range(1 if regime == "sustained" else 20):
        row = row_of(TorchMm(), size, regime)
        assert row.ok, row.reason
