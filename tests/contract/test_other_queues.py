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
APART = 4e-6


class TwoQueues(SimulatedBackend):
    """A simulated device with a second queue, which is busy until the time ``aside_until``."""

    has_idle_marks = True
    aside_until = 0.0

    def synchronize(self):
        self.host_time = max(self.host_time, self.device_time, self.aside_until)

    def record_idle_mark(self, after):
        left = max(self.device_time, self.aside_until)
        return left + APART if after > self.host_time else None


class Delayed(TwoQueues):
    """A simulated device on which another process delays every third idle mark."""

    marks = 0
    #: The delays of idle marks in seconds. The marks take them in turn.
    delays = (0.0, 300e-6, 0.0)

    def record_idle_mark(self, after):
        mark = super().record_idle_mark(after)
        self.marks += mark is not None
        return mark if mark is None else mark + self.delays[self.marks % len(self.delays)]


class ManyStreams(Delayed):
    """A simulated device on which idle marks are later and less regular once a kernel has created streams."""

    @property
    def delays(self):
        return (1e-6, 8e-6, 3e-6, 8.5e-6) if self.has_streams else (0.0,)

    has_streams = False


class WithoutIdleMarks(TwoQueues):
    has_idle_marks = False


class CountingFlushes(WithoutIdleMarks):
    flushes = 0

    def flush_cache(self, size=None):
        self.flushes += 1
        super().flush_cache(size)


class Aside(SimulatedMatmul):
    """A matmul that leaves ``seconds`` of work in the second queue in each launch.

    ``rarely``: if given, each ``rarely``-th launch leaves no work there.
    """

    def __init__(self, seconds, rarely=None):
        self.seconds, self.rarely, self.count = seconds, rarely, 0

    def make_launch_function(self, device, problem, shape):
        run = super().make_launch_function(device, problem, shape)
        device.has_streams = True

        def launch(operands):
            run(operands)
            self.count += 1
            if not self.rarely or self.count % self.rarely:
                device.aside_until = max(device.aside_until, device.device_time) + self.seconds

        return launch


def row_of(kernel, regime, backend):
    started, problem = REGIMES[regime](backend), MatmulProblem()
    started.prepare_device()
    pool = backend.make_operand_pool(problem.data, problem.seed)
    return measure_row(kernel, problem, SHAPE, started, pool, StoppingRule(max_seconds=0.5))


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("seconds", [5e-6, 50e-6, 500e-6])
def test_a_launch_that_leaves_work_in_another_queue_is_refused(regime, seconds):
    row = row_of(Aside(seconds), regime, TwoQueues())
    assert row.status == "wrong_result"
    assert "the kernel works in a queue that is not timed" in row.reason


def test_a_train_that_leaves_nothing_in_another_queue_does_not_hide_the_others():
    device = TwoQueues()
    assert row_of(Aside(500e-6, rarely=7), "burst", device).status == "wrong_result"


@pytest.mark.parametrize("regime", REGIMES)
def test_work_in_another_queue_is_found_although_marks_of_many_streams_vary(regime):
    assert row_of(Aside(50e-6), regime, ManyStreams()).status == "wrong_result"


@pytest.mark.parametrize("regime", REGIMES)
def test_new_streams_that_delay_idle_marks_refuse_no_launch(regime):
    assert row_of(Aside(0.0), regime, ManyStreams()).ok


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("backend", [WithoutIdleMarks, TwoQueues])
def test_a_launch_that_leaves_nothing_is_accepted(regime, backend):
    assert row_of(Aside(0.0), regime, backend()).ok


def test_a_device_without_idle_marks_is_flushed_for_launches_only():
    device = CountingFlushes()
    assert row_of(Aside(0.0), "classic", device).ok
    assert device.flushes == 8


def test_marks_that_another_process_delays_now_and_then_refuse_no_burst():
    assert row_of(Aside(0.0), "burst", Delayed()).ok


def test_an_idle_mark_is_an_event_of_the_context(cuda, calls):
    device = cuda.kind(0)
    mark = device.record_idle_mark(device.record_mark())
    assert ("record in context", cuda.driver.context, mark.cuda_event) in calls


@pytest.mark.parametrize("loaded", [None, object()], ids=["no driver", "an old driver"])
def test_old_drivers_have_no_idle_marks(cuda, monkeypatch, loaded):
    assert cuda.kind(0).has_idle_marks
    monkeypatch.setattr(f"{cuda.kind.__module__}._load_driver", lambda: loaded)
    assert not cuda.kind(0).has_idle_marks


@pytest.mark.parametrize("fault", ["no context", "refused", "host is late"])
def test_an_idle_mark_that_would_say_nothing_is_none(cuda, fault):
    device = cuda.kind(0)
    end = device.record_mark()
    if fault == "host is late":
        # The device reaches the end of the launch before the host queues the idle mark.
        end.synchronize()
    else:
        cuda.driver.context, cuda.driver.answer = (None, 0) if fault == "no context" else (1, 1)
    assert device.record_idle_mark(end) is None
