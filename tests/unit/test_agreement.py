"""Ranks come to one decision: what one decides is all that decides how often any of them launches."""

import pytest

from mamf.engine.measure import measure
from mamf.engine.regimes import Burst, StoppingRule, Sustained
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.shapes import MatmulShape
from mamf.testing import Physics, SimulatedBackend, SimulatedMatmul

#: Another rank's device: as far from the first as two can be.
OTHER = Physics(noise=0.05, boost_hz=700e6, capped_hz=600e6, cap_watts=2000.0, launch_seconds=300e-6)
#: A device that something else holds back whenever a rank looks.
HELD_BACK = Physics(throttled=1.0)


def launched(regime, physics, agree, shapes):
    backend = SimulatedBackend(physics=physics)
    started = regime(backend)
    started.agree = agree
    started.start()
    pool = backend.operand_pool("normal", 0)
    for shape in shapes:
        rule = StoppingRule(seconds=0.5, agree=agree, deadline=backend.now() + 30)
        assert measure(SimulatedMatmul(), MatmulProblem("bfloat16"), shape, started, pool, rule).ok
    return backend.launches


@pytest.mark.parametrize("regime", [Burst, Sustained])
@pytest.mark.parametrize(("first", "second"), [(None, OTHER), (None, HELD_BACK), (HELD_BACK, None)])
def test_a_rank_launches_as_often_as_the_one_that_decides(regime, first, second):
    shapes = [MatmulShape(8192, 8192, 8192), MatmulShape(4096, 4096, 4096)]
    decisions = []
    count = launched(regime, first, lambda own: decisions.append(own) or own, shapes)
    left = iter(decisions)
    assert launched(regime, second, lambda own: next(left), shapes) == count
    assert next(left, None) is None
    assert launched(regime, second, lambda own: own, shapes) != count
