"""Test that mamf finds work in a queue that the timer's marks do not wait for, whatever this work computes."""

import pytest

from mamf.engine.measure import measure_row
from mamf.engine.regimes import BurstRegime, ClassicRegime, StoppingRule, SustainedRegime
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.testing import SimulatedBackend, SimulatedMatmul

SHAPE = MatmulShape(4096, 4096, 4096)
REGIMES = {
    "burst": BurstRegime,
    "sustained": SustainedRegime,
    "classic": lambda backend: ClassicRegime(backend, warmup_launches=2, timed_launches=6, warmup_seconds=0.0),
}
#: The seconds between a mark and an idle mark right after it, on the device's clock. The value is that of an H200.
IDLE_MARK_DELAY_SECONDS = 4e-6


class TwoQueues(SimulatedBackend):
    """A simulated device with a second queue, which is busy until the time ``second_queue_end_time``."""

    has_idle_marks = True
    second_queue_end_time = 0.0

    def synchronize(self):
        self.host_time = max(self.host_time, self.device_time, self.second_queue_end_time)

    def record_idle_mark(self, after):
        idle_time = max(self.device_time, self.second_queue_end_time)
        return idle_time + IDLE_MARK_DELAY_SECONDS if after > self.host_time else None


class DelayedIdleMarks(TwoQueues):
    """A simulated device on which another process delays every third idle mark."""

    idle_mark_count = 0
    #: The delays of idle marks in seconds. The marks take them in turn.
    delays = (0.0, 300e-6, 0.0)

    def record_idle_mark(self, after):
        mark = super().record_idle_mark(after)
        self.idle_mark_count += mark is not None
        return mark if mark is None else mark + self.delays[self.idle_mark_count % len(self.delays)]


class ManyStreams(DelayedIdleMarks):
    """A simulated device on which idle marks are later and less regular once a kernel has created streams."""

    @property
    def delays(self):
        return (1e-6, 8e-6, 3e-6, 8.5e-6) if self.has_streams else (0.0,)

    has_streams = False


class WithoutIdleMarks(TwoQueues):
    has_idle_marks = False


class CountingFlushes(WithoutIdleMarks):
    flush_count = 0

    def flush_cache(self, size=None):
        self.flush_count += 1
        super().flush_cache(size)


class SecondQueueMatmul(SimulatedMatmul):
    """A matmul that leaves ``seconds`` of work in the second queue in each launch.

    ``skip_interval``: if given, each ``skip_interval``-th launch leaves no work there.
    """

    def __init__(self, seconds, skip_interval=None):
        self.seconds, self.skip_interval, self.launch_count = seconds, skip_interval, 0

    def make_launch_function(self, device, problem, shape):
        run_matmul = super().make_launch_function(device, problem, shape)
        device.has_streams = True

        def launch(operands):
            run_matmul(operands)
            self.launch_count += 1
            if not self.skip_interval or self.launch_count % self.skip_interval:
                device.second_queue_end_time = max(device.second_queue_end_time, device.device_time) + self.seconds

        return launch


def measure_kernel(kernel, regime_name, backend):
    regime, problem = REGIMES[regime_name](backend), MatmulProblem()
    regime.prepare_device()
    pool = backend.make_operand_pool(problem.data, problem.seed)
    return measure_row(kernel, problem, SHAPE, regime, pool, StoppingRule(max_seconds=0.5))


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("seconds", [5e-6, 50e-6, 500e-6])
def test_a_launch_that_leaves_work_in_another_queue_is_refused(regime, seconds):
    row = measure_kernel(SecondQueueMatmul(seconds), regime, TwoQueues())
    assert row.status == "wrong_result"
    assert "the kernel works in a queue that is not timed" in row.reason


def test_launches_that_leave_no_work_in_another_queue_do_not_hide_the_others():
    device = TwoQueues()
    assert measure_kernel(SecondQueueMatmul(500e-6, skip_interval=7), "burst", device).status == "wrong_result"


@pytest.mark.parametrize("regime", REGIMES)
def test_work_in_another_queue_is_found_although_marks_of_many_streams_vary(regime):
    assert measure_kernel(SecondQueueMatmul(50e-6), regime, ManyStreams()).status == "wrong_result"


@pytest.mark.parametrize("regime", REGIMES)
def test_a_launch_is_not_refused_if_new_streams_delay_idle_marks(regime):
    assert measure_kernel(SecondQueueMatmul(0.0), regime, ManyStreams()).ok


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("backend", [WithoutIdleMarks, TwoQueues])
def test_a_launch_that_leaves_no_work_in_another_queue_is_accepted(regime, backend):
    assert measure_kernel(SecondQueueMatmul(0.0), regime, backend()).ok


def test_a_device_without_idle_marks_is_flushed_for_launches_only():
    device = CountingFlushes()
    assert measure_kernel(SecondQueueMatmul(0.0), "classic", device).ok
    assert device.flush_count == 8


def test_a_burst_is_not_refused_if_another_process_delays_some_idle_marks():
    assert measure_kernel(SecondQueueMatmul(0.0), "burst", DelayedIdleMarks()).ok


def test_an_idle_mark_is_an_event_of_the_context(cuda, calls):
    device = cuda.kind(0)
    mark = device.record_idle_mark(device.record_mark())
    assert ("record in context", cuda.driver.context, mark.cuda_event) in calls


@pytest.mark.parametrize("driver", [None, object()], ids=["no driver", "an old driver"])
def test_old_drivers_have_no_idle_marks(cuda, monkeypatch, driver):
    assert cuda.kind(0).has_idle_marks
    monkeypatch.setattr(f"{cuda.kind.__module__}._load_driver", lambda: driver)
    assert not cuda.kind(0).has_idle_marks


@pytest.mark.parametrize("fault", ["no context", "refused", "host is late"])
def test_an_idle_mark_that_would_prove_nothing_is_none(cuda, fault):
    device = cuda.kind(0)
    end = device.record_mark()
    if fault == "host is late":
        # The device reaches the end of the launch before the host queues the idle mark.
        end.synchronize()
    else:
        cuda.driver.context, cuda.driver.answer = (None, 0) if fault == "no context" else (1, 1)
    assert device.record_idle_mark(end) is None
