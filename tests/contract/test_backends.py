"""Test every registered backend against the contract, and the behavior that all backends share: the order of the
calls in a launch, memory and dtypes.
"""

import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from simulated_vendors import GB, MILLISECONDS_BETWEEN_EVENTS, FlushRecorder

from mamf.backend import MIB, Unavailability
from mamf.engine.regimes import BurstRegime, StoppingRule
from mamf.engine.regimes.base import CheckedKernel
from mamf.errors import UnavailableError
from mamf.kernel import PreparedKernel, Verdict
from mamf.plugins.discovery import BACKEND_GROUP, find_entry_points_by_name, load_backend_class, open_backend
from mamf.testing import BackendContract, SimulatedBackend

VENDORS = ("cuda", "rocm", "xpu", "hpu", "mps", "accelerator")


class TestCpu(BackendContract):
    out_of_memory = RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
    )

    @pytest.fixture
    def backend(self):
        return open_backend("cpu")


class TestSimulated(BackendContract):
    out_of_memory = None

    @pytest.fixture
    def backend(self):
        return SimulatedBackend()

    def test_distinguishes_exhausted_memory_from_other_errors(self, backend):
        with pytest.raises(MemoryError) as caught:
            backend.make_operand_pool("normal", 0).take_buffer("a", backend.read_free_memory_bytes(), "float32")
        self.out_of_memory = caught.value
        super().test_distinguishes_exhausted_memory_from_other_errors(backend)


class TestCuda(BackendContract):
    out_of_memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 GiB.")

    @pytest.fixture
    def backend(self, cuda):
        return cuda.kind(1)


class TestRocm(BackendContract):
    out_of_memory = torch.OutOfMemoryError("HIP out of memory. Tried to allocate 256.00 GiB.")

    @pytest.fixture
    def backend(self, rocm):
        return rocm.kind(0)


class TestXpu(BackendContract):
    out_of_memory = torch.OutOfMemoryError("XPU out of memory. Tried to allocate 128.00 GiB.")

    @pytest.fixture
    def backend(self, xpu):
        return xpu.kind(0)


class TestHpu(BackendContract):
    out_of_memory = RuntimeError("synStatus=8 [Out of memory] Device memory. Allocation failed for size 137438953472")

    @pytest.fixture
    def backend(self, hpu):
        return hpu.kind(0)


class TestAccelerator(BackendContract):
    out_of_memory = RuntimeError("NPU out of memory. Tried to allocate 128.00 GiB (NPU 0; 60.97 GiB total capacity)")

    @pytest.fixture
    def backend(self, accelerator, monkeypatch):
        backend = accelerator.kind(1)
        monkeypatch.setattr(backend, "now", time.perf_counter)
        return backend


class TestMps(BackendContract):
    out_of_memory = RuntimeError("MPS backend out of memory (MPS allocated: 30 GB, max allowed: 36 GB).")

    @pytest.fixture
    def backend(self, mps):
        return mps.kind(0)


def test_every_registered_backend_is_tested_against_the_contract():
    tested_names = {kind.__name__.removeprefix("Test").lower() for kind in BackendContract.__subclasses__()}
    # mamf never opens a tpu device (see test_tpu.py).
    assert tested_names >= set(find_entry_points_by_name(BACKEND_GROUP)) - {"tpu"}


@pytest.fixture(params=VENDORS)
def vendor_backend(request):
    """Return the backend of each simulated vendor in turn, opened on the last device of the vendor."""
    simulated = request.getfixturevalue(request.param)
    return simulated.kind(simulated.kind.count_devices() - 1)


def time_launches(backend, calls):
    """Run a train of three launches. Return the names of its calls of torch and of the vendor's module, in order, and
    the seconds of each launch.
    """
    calls.clear()
    checked = CheckedKernel(
        PreparedKernel([lambda: calls.append(("launch",))], lambda index, result: Verdict(0.0, 1.0))
    )
    with FlushRecorder(calls):
        samples = BurstRegime(backend).take_samples(checked, StoppingRule(max_seconds=0.0), 0.0)
    assert len(samples.seconds_per_launch) == 3
    recorded_names = ("flush", "record", "launch", "mark_step", "synchronize")
    return [call[0] for call in calls if call[0] in recorded_names], samples.seconds_per_launch


@pytest.mark.parametrize("name", ["cuda", "rocm", "xpu", "hpu"])
def test_marks_enclose_only_the_launch_and_a_train_ends_with_a_synchronize(name, request, calls):
    names, _ = time_launches(request.getfixturevalue(name).kind(0), calls)
    train = [*3 * ["flush", "record", "launch", "record"], "synchronize"]
    idle_marks = {"cuda": ["record"]}.get(name, [])
    expected = [*train[:-1], *idle_marks, train[-1]]
    assert names == expected


def test_each_mark_of_a_device_timed_by_the_host_clock_waits_for_the_device(mps, calls):
    names, seconds = time_launches(mps.kind(0), calls)
    assert names == [*3 * ["flush", "synchronize", "launch", "synchronize"], "synchronize"]
    assert all(0 < each < 1 for each in seconds)


@pytest.mark.parametrize("name", ["cuda", "rocm", "xpu", "hpu"])
def test_events_in_milliseconds_become_seconds(name, request, calls):
    _, seconds = time_launches(request.getfixturevalue(name).kind(0), calls)
    assert seconds == pytest.approx(3 * [MILLISECONDS_BETWEEN_EVENTS * 1e-3])


@pytest.mark.parametrize(
    ("name", "megabytes"),
    # The vendors' libraries do not report the sizes of the Infinity Cache (rocm) and of Gaudi's cache (hpu), so mamf
    # has tables of them. If the size of the cache is unknown (xpu, mps), a flush writes 256 MiB.
    [("cuda", 2 * 50), ("rocm", 2 * 256), ("hpu", 2 * 96), ("xpu", 256), ("mps", 256)],
)
def test_a_flush_is_twice_the_last_level_cache(name, megabytes, request, calls, flush_cache):
    backend = request.getfixturevalue(name).kind(0)
    with FlushRecorder(calls):
        flush_cache(backend)
    assert calls[-1] == ("flush", megabytes * MIB)


def test_memory_that_torch_caches_counts_as_free(cuda):
    backend = cuda.kind(0)
    assert backend.read_free_memory_bytes() == 80 * GB - cuda.module.reserved + (
        cuda.module.reserved - cuda.module.allocated
    )
    assert backend.read_peak_memory_bytes() == cuda.module.peak


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("tried to allocate"), RuntimeError("CUDA error: out of memory")],
    ids=repr,
)
def test_every_vendor_recognizes_errors_of_exhausted_memory(vendor_backend, error):
    assert vendor_backend.is_out_of_memory(error)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED",
        "mat1 and mat2 shapes cannot be multiplied",
        "HIP error: the operation cannot be performed in the present state",
        "synStatus=26 [Generic failure] Device reset",
    ],
)
def test_no_vendor_mistakes_other_errors_for_exhausted_memory(vendor_backend, text):
    assert not vendor_backend.is_out_of_memory(RuntimeError(text))


def test_more_than_is_free_is_refused_before_it_is_allocated(vendor_backend):
    with pytest.raises(MemoryError, match=r"GB are needed, .* GB are free") as caught:
        vendor_backend.make_operand_pool("normal", 0).take_buffer("a", 10**12, "float32")
    assert vendor_backend.is_out_of_memory(caught.value)


def test_an_unavailable_backend_does_not_open_and_says_why(cuda):
    cuda.module.devices.clear()
    with pytest.raises(UnavailableError, match="backend cuda is not available: torch sees no NVIDIA device"):
        cuda.kind(0)


# -- the CPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cpu_module():
    return sys.modules[load_backend_class("cpu").__module__]


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [("flags\t: fpu avx512f avx512_bf16", "bfloat16"), ("Features\t: fp asimd bf16", "bfloat16"), ("", "float32")],
)
def test_the_cpu_defaults_to_bfloat16_only_where_it_is_native(cpu_module, monkeypatch, tmp_path, flags, dtype):
    path = tmp_path / "cpuinfo"
    path.write_text(f"model name\t: Some CPU\n{flags}\n")
    monkeypatch.setattr(cpu_module, "_CPUINFO_FILE", path)
    assert open_backend("cpu").default_dtype == dtype


def test_the_cpu_keeps_freed_memory_so_that_rates_do_not_depend_on_earlier_work(cpu_module, monkeypatch):
    mallopt_arguments = []
    library = SimpleNamespace(mallopt=lambda *parameter_and_value: mallopt_arguments.append(parameter_and_value))
    monkeypatch.setattr(cpu_module.ctypes, "CDLL", lambda name: library)
    open_backend("cpu")
    assert mallopt_arguments == [(-3, 32 << 20), (-1, 64 << 20)]
    monkeypatch.setattr(cpu_module.ctypes, "CDLL", lambda name: SimpleNamespace())  # no glibc, as on macOS
    open_backend("cpu")


@pytest.mark.parametrize("error", [None, NotImplementedError("can't find current frequency file"), OSError()])
def test_a_cpu_that_shows_no_sensors_says_so(monkeypatch, error):
    def read_frequency():
        if error is not None:
            raise error

    monkeypatch.setattr(psutil, "cpu_freq", read_frequency)
    monkeypatch.setattr(psutil, "sensors_temperatures", dict, raising=False)
    backend = open_backend("cpu")
    assert backend.info.max_clock_hz is None
    assert isinstance(backend.telemetry, Unavailability)


def test_digests_of_results_differ_if_a_bit_differs():
    """Check that equal results have equal digests, whatever their strides, and that even the sign of a zero changes a
    digest.

    A result without tensors has no digest.
    """
    backend = load_backend_class("cpu")(0)
    first, second = torch.arange(12, dtype=torch.bfloat16).view(3, 4).t(), torch.zeros(2)
    digest = backend.compute_digest((first, second))
    assert digest == backend.compute_digest([first.contiguous(), second.clone()])
    assert digest != backend.compute_digest((first, torch.tensor([0.0, -0.0])))
    assert backend.compute_digest(None) is None
