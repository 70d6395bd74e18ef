"""The contracts as pytest suites: derive, supply the fixtures, inherit every test."""

from __future__ import annotations

import math

import pytest

from mamf.backend import Backend, Telemetry, Unavailable, shared_name, shared_ways
from mamf.errors import MamfError
from mamf.plugins.contracts import check_attribute, guard_method


class BackendContract:
    """What every backend must do. Supply the fixture ``backend``: an opened device."""

    #: Raised by the vendor when memory is exhausted.
    out_of_memory: BaseException = MemoryError("out of memory")

    @pytest.fixture
    def backend(self) -> Backend:
        raise NotImplementedError("supply a fixture that opens the backend")

    def test_attributes_and_answers_are_what_the_contract_says(self, backend: Backend) -> None:
        label = f"backend {backend.name}"
        for name in ("info", "telemetry", "burst_traits", "sustained_traits", "environment_variables"):
            check_attribute(backend, Backend, name, label)
        for name in ("free_memory", "allocated_memory", "peak_memory", "without_counters", "advice", "settings"):
            guard_method(backend, Backend, name, label)()
        if not isinstance(backend.telemetry, Unavailable):
            guard_method(backend.telemetry, Telemetry, "read", label)(energy=True)

    def test_says_whether_it_is_available(self, backend: Backend) -> None:
        assert backend.unavailable() is None
        assert backend.device_count() > backend.index >= 0

    def test_refuses_a_device_that_is_not_there(self, backend: Backend) -> None:
        with pytest.raises(MamfError, match=str(backend.device_count())):
            type(backend)(backend.device_count())

    def test_describes_the_device_in_core_units(self, backend: Backend) -> None:
        info = backend.info
        assert (info.backend, info.is_accelerator) == (backend.name, backend.is_accelerator)
        assert info.name == shared_name(backend.device_name(backend.index), shared_ways(info.name))
        for bytes_ in (info.memory_bytes, info.cache_bytes):
            assert bytes_ is None or bytes_ > 1024
        assert info.max_clock_hz is None or 1e8 < info.max_clock_hz < 1e11
        assert info.power_limit_watts is None or 1 < info.power_limit_watts < 1e4
        assert info.compute_units is None or info.compute_units > 0
        assert info.uuid_hash is None or len(info.uuid_hash) <= 16

    def test_names_its_timer(self, backend: Backend) -> None:
        assert backend.timer in ("device events", "host clock")

    def test_time_between_marks_is_positive_and_adds_up(self, backend: Backend) -> None:
        first = backend.mark()
        backend.flush_cache()
        second = backend.mark()
        backend.flush_cache()
        third = backend.mark()
        backend.synchronize()
        one, two = backend.seconds_between(first, second), backend.seconds_between(second, third)
        assert one > 0
        assert two > 0
        assert math.isclose(backend.seconds_between(first, third), one + two, rel_tol=0.01, abs_tol=1e-5)

    def test_waiting_for_a_mark_returns(self, backend: Backend) -> None:
        backend.flush_cache()
        mark = backend.mark()
        backend.submit()
        backend.wait(mark)

    def test_a_profilers_window_holds_what_is_launched(self, backend: Backend) -> None:
        with backend.profiler_window("a launch"):
            backend.flush_cache()
        with pytest.raises(ZeroDivisionError), backend.profiler_window("what breaks"):
            raise ZeroDivisionError

    def test_profiler_ranges_nest_and_end_with_an_error(self, backend: Backend) -> None:
        ranges = backend.profiler_range("a module"), backend.profiler_range("a nested one {0}")
        if None in ranges:
            assert ranges == (None, None)
            return
        outer, inner = ranges
        assert outer is not None and inner is not None
        with pytest.raises(ZeroDivisionError), outer, inner:
            backend.flush_cache()
            raise ZeroDivisionError

    def test_says_why_it_has_no_counters(self, backend: Backend) -> None:
        unavailable = backend.without_counters()
        assert unavailable is None or (unavailable.reason and unavailable.remedy)

    def test_host_time_goes_forward(self, backend: Backend) -> None:
        before = backend.now()
        backend.sleep(0.001)
        assert backend.now() >= before + 0.001

    def test_memory_can_be_released(self, backend: Backend) -> None:
        backend.reset_peak_memory()
        backend.release_memory()

    def test_operands_are_views_of_one_buffer(self, backend: Backend) -> None:
        pool = backend.operand_pool("normal", 0)
        pool.take("a", 4096, "float32")
        pool.take("a", 1024, "float32")
        pool.release()

    def test_tells_exhausted_memory_from_other_errors(self, backend: Backend) -> None:
        assert backend.is_out_of_memory(self.out_of_memory)
        assert not backend.is_out_of_memory(ValueError("shape mismatch"))
        assert not backend.is_out_of_memory(RuntimeError("an illegal instruction was encountered"))

    def test_sensors_read_in_core_units_or_say_why_not(self, backend: Backend) -> None:
        if isinstance(backend.telemetry, Unavailable):
            assert backend.telemetry.reason
            assert backend.telemetry.remedy
            return
        assert backend.telemetry.read().joules is None, "an energy counter is slow: read it when asked to"
        reading = backend.telemetry.read(energy=True)
        assert reading.clock_hz is None or 1e6 < reading.clock_hz < 1e11
        assert reading.watts is None or 0 <= reading.watts < 1e5
        assert reading.celsius is None or -50 < reading.celsius < 150

    def test_advice_comes_with_a_command(self, backend: Backend) -> None:
        for advice in backend.advice():
            assert advice.verdict in ("ok", "warning", "unknown")
            assert advice.verdict != "warning" or (advice.cost and advice.command)

    def test_knows_its_dtypes(self, backend: Backend) -> None:
        assert backend.unsupported_dtype(backend.default_dtype) is None
        assert backend.resolve_dtype("fp8").startswith("float8_e4m3")
        assert backend.resolve_dtype("bfloat16") == "bfloat16"
