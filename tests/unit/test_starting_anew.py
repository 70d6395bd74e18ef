"""Test visits of the sustained regime that begin with a rest.

While a device is loaded, its power controller stays in one of several states. After a rest, it chooses a state again.
"""

import math
import random
import statistics
from dataclasses import replace
from typing import ClassVar

import pytest

from mamf.ceilings.ceiling import CONFIRM_PHASE, find_confirmed_ceiling
from mamf.engine.measure import measure_row
from mamf.engine.regimes import StoppingRule, SustainedRegime
from mamf.engine.runner import Runner
from mamf.engine.search.rounds import ConfirmationRounds, RoundCounts
from mamf.measurement import Conditions
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.testing import SimulatedBackend
from mamf.testing.simulated_kernels import SimulatedMatmul

THROTTLED, AT_BOOST = Conditions(clock_hz=1.47e9), Conditions(clock_hz=1.98e9)


class TwoStates(SimulatedBackend):
    """A device whose power controller chooses one of two states, 1.3 % apart, after each rest of at least 0.3 s."""

    def draw_run_variation(self):
        super().draw_run_variation()
        self._slower = self.random.choice((1.0, 1.013))

    def sleep(self, seconds):
        super().sleep(seconds)
        if seconds >= 0.3 and self.is_capped:
            self._slower = self.random.choice((1.0, 1.013))

    def _compute_time_factor(self):
        return super()._compute_time_factor() * (self._slower if self.is_capped else 1.0)


class Swinging(SimulatedBackend):
    """A device whose clock oscillates after each idle time, as on an H200: with a period of 1 s, and at first by 8 %
    from peak to trough.
    """

    loaded_from = 0.0

    def _idle_until_time(self, moment):
        if moment - self.device_time > 0.01:
            self.loaded_from = moment
        return super()._idle_until_time(moment)

    def _compute_time_factor(self):
        loaded = self.device_time - self.loaded_from
        return super()._compute_time_factor() * (1 + 0.04 * math.exp(-loaded / 3) * math.sin(2 * math.pi * loaded))


def test_rows_that_the_power_limit_slows_are_confirmed_by_visits_after_a_rest():
    regime = SustainedRegime(SimulatedBackend())
    assert regime.make_confirmation_regime(THROTTLED, 9.0).settling_seconds_after_rest
    assert regime.make_confirmation_regime(
        Conditions(clock_hz=0.97 * 1.98e9), 9.0
    ).settling_seconds_after_rest  # only 3 % below its maximum, but throttled
    assert regime.make_confirmation_regime(Conditions(), 9.0).settling_seconds_after_rest  # the clock is unknown
    assert regime.make_confirmation_regime(AT_BOOST, 9.0) is regime


def measure_rate(backend, seconds, **attributes):
    """Measure a shape in a visit that begins with a rest and takes about ``seconds``. Return its rate and its duration.

    ``attributes``: attributes of the regime to replace.
    """
    regime = SustainedRegime(backend).make_confirmation_regime(THROTTLED, seconds)
    for name, value in attributes.items():
        setattr(regime, name, value)
    pool, shape = backend.make_operand_pool("normal", 0), MatmulShape(16896, 2048, 65536)
    row = measure_row(SimulatedMatmul(), MatmulProblem(), shape, regime, pool, StoppingRule(max_seconds=0.0))
    return row.best_rate, regime.last_visit_seconds


@pytest.mark.parametrize("seconds", [0.0, 2.9, 3.3, 3.8, 4.8, math.inf])
def test_a_visit_after_a_rest_lasts_for_whole_swings(seconds):
    backend = Swinging()
    steady_rate, _ = measure_rate(SimulatedBackend(), math.inf)
    rate, visit_seconds = measure_rate(backend, seconds)
    assert rate == pytest.approx(steady_rate, rel=0.004)
    assert visit_seconds <= max(seconds, SustainedRegime.compute_min_visit_seconds_with_rest(backend))
    assert measure_rate(backend, seconds, visit_seconds=0.4)[0] != pytest.approx(steady_rate, rel=0.004)


@pytest.mark.parametrize("swing_seconds", [0.3, 0.9, 1.0, 1.5, 3.0])
@pytest.mark.parametrize("seconds", [0.0, 4.3, math.inf])
def test_a_visit_lasts_for_whole_swings_of_any_period(swing_seconds, seconds):
    backend = SimulatedBackend()
    backend.sustained_traits = replace(backend.sustained_traits, swing_seconds=swing_seconds)
    regime = SustainedRegime(backend).make_confirmation_regime(THROTTLED, seconds)
    for loaded_seconds in (regime.visit_seconds, regime.settling_seconds_after_rest):
        assert loaded_seconds / swing_seconds == pytest.approx(round(loaded_seconds / swing_seconds))
        assert loaded_seconds >= swing_seconds * 0.999
    assert (
        regime.fixed_visit_seconds <= max(seconds, SustainedRegime.compute_min_visit_seconds_with_rest(backend)) + 1e-9
    )


def confirm_candidates(seed, kernel=None):
    """Confirm the best of two candidates on a fresh device, and return the rows of all rounds."""
    backend, kernel, problem = TwoStates(seed=seed), kernel or SimulatedMatmul(), MatmulProblem()
    runner = Runner(backend)
    confirmation = ConfirmationRounds(runner, problem, {kernel.name: kernel}, 0.003, random.Random(seed), math.inf)
    candidates = [(MatmulShape(16896, 2048, k), kernel.name) for k in (65536, 98304)]
    regime = SustainedRegime(backend, 1.0)
    rows = runner.measure_steps(confirmation.run_rounds(regime, candidates, RoundCounts(1, 6), math.inf, math.inf))
    return list(rows)


def test_a_ceiling_is_measured_in_several_states():
    rows = confirm_candidates(seed=1)
    confirmation_rows = [row for row in rows if row.phase == CONFIRM_PHASE]
    assert len({row.shape for row in confirmation_rows}) == 1
    assert len(confirmation_rows) == 6
    rates = [row.best_rate for row in confirmation_rows]
    assert max(rates) / min(rates) == pytest.approx(1.013, abs=0.003)


def test_ceilings_are_repeatable_although_each_state_is_random():
    rates = [find_confirmed_ceiling(confirm_candidates(seed), "a device").rate for seed in range(12)]
    assert statistics.stdev(rates) / statistics.fmean(rates) < 0.004  # it is 0.65 % if each run stays in one state


def test_the_next_candidate_replaces_one_that_fails_while_it_is_confirmed():
    class WrongLater(SimulatedMatmul):
        """A kernel whose results become wrong at its third preparation, for the shape that is prepared then."""

        prepared: ClassVar[list[MatmulShape]] = []

        def prepare(self, backend, problem, shape, *arguments, **options):
            self.prepared.append(shape)
            if len(self.prepared) >= 3 and shape == self.prepared[2]:
                backend.faults[shape] = "wrong_result"
            return super().prepare(backend, problem, shape, *arguments, **options)

    rows = [row for row in confirm_candidates(1, WrongLater()) if row.phase == CONFIRM_PHASE]
    wrong_shape = WrongLater.prepared[2]
    assert [row.ok for row in rows if row.shape == wrong_shape] == [False]
    assert sum(row.ok for row in rows if row.shape != wrong_shape) >= 3
