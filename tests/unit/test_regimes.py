"""Test the regimes on a simulated device, where the true rate and the earlier load of the device are known."""

import dataclasses
import itertools
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamf.ceilings.ceiling import summarize_conditions
from mamf.engine.measure import measure_row
from mamf.engine.regimes import BurstRegime, ClassicRegime, StoppingRule, SustainedRegime
from mamf.kernel import choose_operand_set_count
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.testing import Physics, SimulatedBackend, SimulatedMatmul
from mamf.testing.simulated import SimulatedSensors

FAT = MatmulShape(16896, 2048, 20224)
SMALL = MatmulShape(2304, 4096, 4096)
HUGE = MatmulShape(16384, 16384, 16384)
QUIET = dataclasses.replace(Physics(), hot_clock_loss_share=0.0, launch_noise=0.0)


def compute_tflops(backend, shape, clock_hz):
    return shape.flop / backend.compute_matmul_cycles(shape) * clock_hz / 1e12


def measure(regime, shape=FAT, **rule):
    backend = regime.backend
    rule = {"max_seconds": regime.default_sweep_row_seconds, **rule}
    pool = backend.make_operand_pool("normal", 0)
    row = measure_row(SimulatedMatmul(), MatmulProblem(), shape, regime, pool, StoppingRule(**rule))
    assert row.ok, row.reason
    return row


def start_regime(regime_class, backend, **options):
    regime = regime_class(backend, **options)
    regime.prepare_device()
    return regime


def apply_load(backend, load):
    """Load the device in the given way, until just before a measurement."""
    if load == "soak":
        measure(start_regime(SustainedRegime, backend))
    elif load == "loop":
        measure(start_regime(ClassicRegime, backend, warmup_seconds=3.0))
    elif load == "huge":
        for _ in range(20):
            backend.launch_compute(backend.compute_matmul_cycles(HUGE), 0)
        backend.synchronize()


@pytest.mark.parametrize("shape", [FAT, SMALL, HUGE])
@pytest.mark.parametrize("load", ["nothing", "soak", "loop", "huge"])
def test_burst_gives_the_boost_rate_whatever_ran_before(shape, load):
    backend = SimulatedBackend()
    apply_load(backend, load)
    row = measure(start_regime(BurstRegime, backend), shape)
    assert row.compute_rate("median") == pytest.approx(
        compute_tflops(backend, shape, backend.device_physics.boost_clock_hz), rel=0.003
    )
    assert row.conditions.throttle_reasons == ()


@pytest.mark.parametrize(("slow_trains", "status"), [(25, "ok"), (99, "wrong_result")])
def test_a_kernel_is_blamed_only_if_many_trains_end_with_a_slow_launch(monkeypatch, slow_trains, status):
    run_train, trains = BurstRegime._run_train, itertools.count()  # with those that warm the device up, about 20

    def run_train_with_slow_last_launch(*arguments, **options):
        seconds, reading = run_train(*arguments, **options)
        return [*seconds[:-1], (3 if next(trains) < slow_trains else 1) * seconds[-1]], reading

    monkeypatch.setattr(BurstRegime, "_run_train", run_train_with_slow_last_launch)
    backend = SimulatedBackend()
    pool, rule = backend.make_operand_pool("normal", 0), StoppingRule(max_seconds=0.2)
    regime = start_regime(BurstRegime, backend)
    row = measure_row(SimulatedMatmul(), MatmulProblem(), FAT, regime, pool, rule)
    assert row.status == status, row.reason
    assert "the kernel probably skips work" in row.reason or row.ok


@pytest.mark.parametrize("load", ["nothing", "loop", "huge"])
def test_sustained_gives_the_capped_rate_whatever_ran_before(load):
    backend = SimulatedBackend()
    apply_load(backend, load)
    row = measure(start_regime(SustainedRegime, backend))
    assert row.compute_rate("median") == pytest.approx(
        compute_tflops(backend, FAT, backend.device_physics.capped_clock_hz), rel=0.003
    )
    assert row.conditions.throttle_reasons == ("power cap",)
    assert row.conditions.watts == pytest.approx(backend.device_physics.power_limit_watts, rel=0.01)
    assert row.launch_count * row.seconds >= SustainedRegime.min_visit_seconds, (
        "launches from before the visit must not count"
    )


def test_long_launches_do_not_throttle_themselves():
    """Check with a power controller that reacts within three launches of 11 ms, as that of an H200 does."""
    backend = SimulatedBackend(physics=dataclasses.replace(QUIET, power_averaging_seconds=0.018))
    row = measure(start_regime(BurstRegime, backend), HUGE)
    assert row.seconds > 0.3 * backend.burst_traits.train_seconds
    assert row.conditions.throttle_reasons == ()
    assert row.compute_rate("slowest") == pytest.approx(compute_tflops(backend, HUGE, QUIET.boost_clock_hz), rel=0.003)


class ThrottledSensors(SimulatedSensors):
    """Sensors that report a power cap in their first ``throttled_count`` readings. Burst reads them once per train."""

    def __init__(self, backend, throttled_count):
        super().__init__(backend)
        self.throttled_count, self.read_at = throttled_count, []

    def read(self, energy=False):
        self.read_at.append(self.backend.now())
        reasons = ("power cap",) if len(self.read_at) <= self.throttled_count else ()
        return dataclasses.replace(super().read(energy), throttle_reasons=reasons)


@pytest.mark.parametrize("throttled_count", [1, 3])
def test_a_device_that_earlier_load_throttles_rests_until_it_is_not_throttled(throttled_count):
    backend = SimulatedBackend(physics=QUIET)
    regime = start_regime(BurstRegime, backend)
    measure(regime, SMALL)
    backend.telemetry = sensors = ThrottledSensors(backend, throttled_count)
    row = measure(regime, SMALL)
    assert row.conditions.throttle_reasons == ()
    rests = [later - earlier for earlier, later in itertools.pairwise(sensors.read_at)]
    assert min(rests[:throttled_count]) >= backend.burst_traits.cold_after_seconds > max(rests[throttled_count:])


def test_a_device_that_is_always_throttled_is_measured_as_it_is():
    backend = SimulatedBackend(physics=QUIET)
    regime = start_regime(BurstRegime, backend)
    backend.telemetry = sensors = ThrottledSensors(backend, 10**6)
    first, second = measure(regime, SMALL), measure(regime, SMALL)
    assert first.conditions.throttle_reasons == second.conditions.throttle_reasons == ("power cap",)
    reading_count = len(sensors.read_at)
    rests = [later - earlier for earlier, later in itertools.pairwise(sensors.read_at)]
    assert sum(rest >= backend.burst_traits.cold_after_seconds for rest in rests) == regime.max_throttled_trains
    assert reading_count > 2 * regime.max_throttled_trains


def test_burst_flushes_the_cache_and_keeps_launches_outside_the_window():
    backend = SimulatedBackend(
        physics=dataclasses.replace(QUIET, cached_time_saving_share=0.3, host_launch_seconds=25e-6)
    )
    tiny = MatmulShape(256, 512, 512)
    row = measure(start_regime(BurstRegime, backend), tiny)
    # The host needs 25 us to queue a launch of 1 us, so a sample with host time would be many times too long.
    assert row.compute_rate("median") == pytest.approx(compute_tflops(backend, tiny, QUIET.boost_clock_hz), rel=0.003)


class TwoKernelMatmul(SimulatedMatmul):
    """A launch of two kernels with host work between them, as in compiled autograd on a busy host."""

    def __init__(self, host_seconds):
        super().__init__()
        self.host_seconds = host_seconds

    def make_launch_function(self, device, problem, shape):
        half = device.compute_matmul_cycles(shape) / 2

        def launch(operands):
            device.launch_compute(half, operands)
            device.sleep(self.host_seconds)
            device.launch_compute(half, operands)

        return launch


@pytest.mark.parametrize("host_seconds", [0.6e-3, 0.7e-3, 0.8e-3])
def test_a_host_that_uses_up_its_lead_does_not_make_verified_launches_slow(host_seconds):
    backend = SimulatedBackend(physics=QUIET)
    regime = start_regime(BurstRegime, backend)
    pool, rule = backend.make_operand_pool("normal", 0), StoppingRule(max_seconds=1.0)
    row = measure_row(TwoKernelMatmul(host_seconds), MatmulProblem(), MatmulShape(1024, 1024, 1024), regime, pool, rule)
    assert row.ok, row.reason


def test_burst_subtracts_the_timer_overhead_from_every_sample():
    backend = SimulatedBackend(physics=dataclasses.replace(QUIET, timer_overhead_seconds=10e-6))
    row = measure(start_regime(BurstRegime, backend), SMALL)
    assert row.timer_overhead_seconds == 10e-6
    assert row.compute_rate("median") == pytest.approx(compute_tflops(backend, SMALL, QUIET.boost_clock_hz), rel=0.003)


def test_burst_warms_up_only_a_device_that_was_idle():
    """Check that a rested device, which is faster for a while, is warmed up before it is measured."""
    backend = SimulatedBackend(physics=dataclasses.replace(QUIET, rested_time_saving_share=0.05))
    regime = start_regime(BurstRegime, backend)
    durations = []
    for pause in (0.0, 0.0, 1.0):
        backend.sleep(pause)
        start = backend.now()
        row = measure(regime, SMALL)
        durations.append(backend.now() - start)
        assert row.compute_rate("median") == pytest.approx(
            compute_tflops(backend, SMALL, QUIET.boost_clock_hz), rel=0.003
        )
    warm_in = backend.burst_traits.warm_in_seconds
    assert min(durations[0], durations[2]) > warm_in > durations[1]


def test_sustained_rotates_operands_past_twice_the_cache():
    backend = SimulatedBackend(physics=dataclasses.replace(QUIET, cached_time_saving_share=0.3))
    row = measure(start_regime(SustainedRegime, backend), SMALL)
    assert row.compute_rate("median") == pytest.approx(compute_tflops(backend, SMALL, QUIET.capped_clock_hz), rel=0.003)


@given(st.integers(16, 8192), st.integers(16, 8192), st.integers(1, 10**9))
def test_operand_sets_exceed_twice_the_cache(m, k, cache_bytes):
    shape = MatmulShape(m, m, k)
    set_count = choose_operand_set_count(MatmulProblem(), shape, cache_bytes)
    assert 3 <= set_count <= 64
    assert set_count == 64 or set_count * MatmulProblem().count_bytes(shape) >= 2 * cache_bytes


@pytest.mark.parametrize("shape", [FAT, HUGE, MatmulShape(32768, 32768, 22800)])  # a block of the last one takes 0.07 s
@pytest.mark.parametrize("phase", [0.0, 0.01, 0.035, 0.05, 0.066, 0.09])
def test_power_is_right_if_the_energy_counter_ticks_every_tenth_of_a_second(phase, shape):
    """Check visits of 1 s. Power would be up to 10 % off if mamf read the counter between two of its ticks."""
    backend = SimulatedBackend(physics=dataclasses.replace(QUIET, energy_update_seconds=0.1))
    backend.sleep(phase)
    regime = start_regime(SustainedRegime, backend, visit_seconds=1.0)
    rows = [measure(regime, shape, max_seconds=1.0) for _ in range(3)]
    assert [row.conditions.watts for row in rows] == pytest.approx(
        [backend.device_physics.power_limit_watts] * 3, rel=0.005
    )


@pytest.mark.parametrize("shape", [FAT, MatmulShape(32768, 32768, 22800), MatmulShape(3072, 4096, 4096), SMALL])
def test_looking_for_a_tick_leaves_no_gap_between_launches(shape):
    def measure_samples(**physics):
        backend = SimulatedBackend(physics=dataclasses.replace(QUIET, **physics))
        return measure(start_regime(SustainedRegime, backend), shape).samples

    assert max(measure_samples(energy_update_seconds=0.1)) == pytest.approx(max(measure_samples()), rel=1e-4)
    assert max(measure_samples(energy_update_seconds=60.0)) == pytest.approx(max(measure_samples()), rel=1e-4), (
        "a counter that never changes must cause no gaps either"
    )


def test_sustained_does_not_count_the_time_in_which_the_host_leaves_the_device_idle():
    class SleepyHost(SimulatedBackend):
        def wait_for_mark(self, mark):
            super().wait_for_mark(mark)
            self.wakes = getattr(self, "wakes", 0) + 1
            self.host_time += 0.15 if self.wakes % 7 == 0 else 0.0

    steady, sleepy = (
        measure(start_regime(SustainedRegime, backend(physics=QUIET)), FAT)
        for backend in (SimulatedBackend, SleepyHost)
    )
    assert sleepy.compute_rate("mean") == pytest.approx(steady.compute_rate("mean"), rel=0.003)
    assert not steady.remarks
    assert steady.conditions.true_clock_hz is not None
    assert sleepy.conditions.true_clock_hz is None
    assert [remark for remark in sleepy.remarks if "idled for more than 1 % of the time between launches" in remark]


@pytest.mark.parametrize(
    "shape, host_seconds, is_limited",
    [
        (MatmulShape(512, 512, 512), 20e-6, True),
        (MatmulShape(512, 512, 512), 2e-6, False),
        (MatmulShape(4096, 4096, 4096), 20e-6, False),
        (FAT, 20e-6, False),
    ],
)
def test_the_interval_of_a_rate_that_depends_on_the_host_is_unknown(shape, host_seconds, is_limited):
    backend = SimulatedBackend(physics=dataclasses.replace(QUIET, host_launch_seconds=host_seconds))
    row = measure(start_regime(SustainedRegime, backend), shape)
    assert any("faster than the host queued them" in remark for remark in row.remarks) is is_limited
    assert row.interval.is_known is not is_limited


def test_sustained_ends_on_a_backend_that_never_reports_a_reached_mark():
    class NeverReached(SimulatedBackend):
        def is_mark_reached(self, mark):
            return False

    backend = NeverReached(physics=dataclasses.replace(QUIET, energy_update_seconds=1e9))
    assert measure(start_regime(SustainedRegime, backend)).ok


def test_power_without_ticks_comes_from_the_power_sensor():
    backend = SimulatedBackend(physics=dataclasses.replace(QUIET, energy_update_seconds=60.0))
    assert measure(start_regime(SustainedRegime, backend)).conditions.watts == pytest.approx(
        backend.mean_watts, rel=0.01
    )


def test_the_power_of_a_ceiling_is_energy_over_time():
    row = measure(start_regime(SustainedRegime, SimulatedBackend()))
    rounds = [
        dataclasses.replace(row, launch_count=launches, conditions=dataclasses.replace(row.conditions, watts=watts))
        for launches, watts in ((100, 640.0), (100, 700.0), (200, 720.0))
    ]
    assert summarize_conditions(rounds).watts == pytest.approx(695.0)


def test_sustained_soaks_once_and_then_only_settles():
    backend = SimulatedBackend()
    regime = start_regime(SustainedRegime, backend)
    durations = []
    for _ in range(3):
        start = backend.now()
        measure(regime)
        durations.append(backend.now() - start)
    soak = backend.sustained_traits.soak_seconds
    assert durations[0] > soak
    assert durations[0] > max(durations[1:]) + soak / 2


def test_sustained_says_when_it_never_settled(monkeypatch):
    backend = SimulatedBackend()
    monkeypatch.setattr(SustainedRegime, "max_settled_slope", -1.0)
    row = measure(start_regime(SustainedRegime, backend))
    assert row.remarks == ("clock and power had not settled when the measurement began",)


def test_classic_takes_as_many_launches_as_mamf_finder():
    backend = SimulatedBackend()
    row = measure(start_regime(ClassicRegime, backend, warmup_seconds=30.0))
    assert row.launch_count == 100
    assert row.ranking_statistic == "fastest"
    assert backend.now() > 30


@pytest.mark.parametrize("seconds", [0.001, 0.005, 0.0085, 0.009, 0.0095, 0.012])
def test_classic_with_too_little_time_keeps_at_least_three_launches_and_says_so(seconds):
    regime = start_regime(ClassicRegime, SimulatedBackend(), warmup_seconds=0.0)
    row = measure(regime, MatmulShape(1024, 1024, 1024), max_seconds=seconds)
    assert row.launch_count >= 3
    assert "the time limit stopped the loop" in row.remarks[0]


def test_classic_warms_up_once():
    backend = SimulatedBackend()
    regime = start_regime(ClassicRegime, backend, warmup_launches=5, timed_launches=10, warmup_seconds=3.0)
    measure(regime)
    start = backend.now()
    assert measure(regime).launch_count == 10
    assert backend.now() - start < 0.1


def test_a_slow_device_finishes_with_three_launches():
    backend = SimulatedBackend(physics=dataclasses.replace(Physics(), matmul_peak_share=1e-5, launch_noise=0.05))
    regime = start_regime(BurstRegime, backend)
    row = measure(regime, MatmulShape(4096, 4096, 4096))
    assert row.launch_count == 3
    assert row.summary.interval.coverage == 0.75
    assert regime.last_visit_seconds < 9 * row.summary.slowest, "a rest must be shorter than a launch"


@settings(max_examples=25)
@given(st.floats(0.0005, 0.02), st.floats(0.0, 0.03))
def test_burst_stops_when_precise_or_out_of_time(precision, noise):
    backend = SimulatedBackend(physics=dataclasses.replace(Physics(), launch_noise=noise))
    regime = start_regime(BurstRegime, backend)
    start = backend.now() + backend.burst_traits.longest_rest_seconds
    row = measure(regime, SMALL, precision=precision)
    has_max_samples = row.launch_count >= StoppingRule().max_samples
    is_out_of_time = backend.now() - start >= regime.default_sweep_row_seconds
    # Samples are rounded to nanoseconds after the rule has judged them.
    rounding = 1e-9 / row.summary.median
    assert (
        is_out_of_time
        or has_max_samples
        or row.summary.interval.half_width / row.summary.median <= precision + rounding
    )


class MatmulWithSettings(SimulatedMatmul):
    """A kernel that works only under its own settings, such as one that selects an implementation of a library."""

    active_name = None

    def __init__(self, name):
        self.name = name

    @contextmanager
    def apply_settings(self, backend, problem):
        MatmulWithSettings.active_name = self.name
        try:
            yield
        finally:
            MatmulWithSettings.active_name = None

    def prepare(self, backend, problem, shape, pool, sets=1, rewrite=False):
        prepared = super().prepare(backend, problem, shape, pool, sets, rewrite)

        def check_settings(launch):
            def checked_launch():
                assert MatmulWithSettings.active_name == self.name
                launch()

            return checked_launch

        return dataclasses.replace(prepared, launches=[check_settings(launch) for launch in prepared.launches])


def test_launches_that_keep_the_device_loaded_run_under_the_settings_of_their_kernel():
    """Check that launches that keep the device loaded run under the settings of their own kernel.

    Under the settings of the next kernel, they would run another implementation, or fail, and mamf would blame the next
    kernel.
    """
    backend = SimulatedBackend()
    regime, pool = start_regime(SustainedRegime, backend), backend.make_operand_pool("normal", 0)
    for name in ("one", "other"):
        row = measure_row(MatmulWithSettings(name), MatmulProblem(), FAT, regime, pool, StoppingRule(max_seconds=2.0))
        assert row.ok, row.reason


def test_the_device_is_loaded_while_the_host_prepares_the_next_kernel():
    backend = SimulatedBackend()
    regime = start_regime(SustainedRegime, backend)
    measure(regime)
    queued = backend.device_time - backend.now()
    assert queued == pytest.approx(backend.sustained_traits.bridge_seconds, rel=0.2)


def test_a_warm_cache_is_warm_in_every_launch_of_a_train():
    """Check that the last launch of a train has a warm cache too.

    Before this launch, mamf changes the operands, which flushes the cache.
    """
    backend = SimulatedBackend(physics=dataclasses.replace(QUIET, cached_time_saving_share=0.6))
    row = measure(start_regime(BurstRegime, backend, must_flush_cache=False), SMALL)
    assert row.compute_rate("slowest") == pytest.approx(row.compute_rate("fastest"), rel=0.01)
