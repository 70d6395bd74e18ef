"""Test behavior that only the adapter of Intel GPUs, of Gaudi or of Apple GPUs has."""

import importlib
import sys

import pytest
from simulated_vendors import GB

from mamf.backend import MIB, SensorReading
from mamf.engine.regimes import BurstRegime, StoppingRule
from mamf.engine.regimes.base import CheckedKernel
from mamf.kernel import PreparedKernel, Verdict

EXTENSION = "intel_extension_for_pytorch"

# -- Intel GPUs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def extension(monkeypatch, tmp_path):
    """Return a function that installs an intel-extension-for-pytorch with the given source."""
    monkeypatch.delitem(sys.modules, EXTENSION, raising=False)
    monkeypatch.syspath_prepend(tmp_path)

    def install(source):
        (tmp_path / f"{EXTENSION}.py").write_text(source)
        importlib.invalidate_caches()

    yield install
    sys.modules.pop(EXTENSION, None)


@pytest.mark.parametrize("source", ["raise ImportError('libze')", "raise OSError('libsycl')", "raise SystemExit(127)"])
def test_an_extension_that_does_not_load_is_a_reason_not_an_error(xpu, extension, source):
    xpu.module.devices.clear()
    extension(source)
    reason = xpu.kind.explain_unavailability()
    assert "cannot be loaded" in reason.reason
    assert "pip uninstall" in reason.remedy


def test_without_an_intel_device_the_remedy_is_to_query_the_driver(xpu):
    xpu.module.devices.clear()
    reason = xpu.kind.explain_unavailability()
    assert "no Intel GPU" in reason.reason
    assert reason.remedy.startswith("sycl-ls")


def test_sensors_of_torch_xpu_are_in_megahertz_and_may_be_refused(xpu):
    def refuse(device):
        raise RuntimeError("ZE_RESULT_ERROR_INSUFFICIENT_PERMISSIONS")

    xpu.torch.xpu.clock_rate, xpu.torch.xpu.temperature = lambda device: 1600, refuse
    assert xpu.kind(0).telemetry.read(energy=True) == SensorReading(clock_hz=pytest.approx(1.6e9))


def test_a_card_that_does_not_report_its_free_memory_can_still_be_used(xpu):
    def refuse(device):
        raise RuntimeError("The device (Intel(R) Arc(TM)) doesn't support querying the available free memory.")

    xpu.torch.xpu.mem_get_info = refuse
    backend = xpu.kind(0)
    assert backend.read_free_memory_bytes() is None
    backend.make_operand_pool("normal", 0).take_buffer("a", 1024, "bfloat16")
    del xpu.torch.xpu.mem_get_info  # torch before 2.6 does not have it
    assert backend.read_free_memory_bytes() is None


# -- Gaudi -----------------------------------------------------------------------------------------------------------


def list_launch_calls(backend, calls):
    checked = CheckedKernel(
        PreparedKernel([lambda: calls.append(("launch",))], lambda index, result: Verdict(0.0, 1.0))
    )
    calls.clear()
    BurstRegime(backend).take_samples(checked, StoppingRule(max_seconds=0.0), 0.0)
    return [name for name, *_ in calls if name in ("record", "launch", "mark_step")]


@pytest.mark.parametrize(
    ("mode", "calls_per_launch"),
    [("1", ["record", "launch", "mark_step", "record"]), ("0", ["record", "launch", "record"])],
)
def test_a_step_is_marked_after_each_launch_in_lazy_mode_only(hpu, calls, monkeypatch, mode, calls_per_launch):
    monkeypatch.setenv("PT_HPU_LAZY_MODE", mode)
    assert list_launch_calls(hpu.kind(0), calls) == 3 * calls_per_launch


def test_gaudi_is_eager_by_default(hpu, calls):
    backend = hpu.kind(0)
    backend.submit()
    assert ("mark_step",) not in calls
    assert backend.read_settings()["lazy_mode"] == "False"


def test_a_missing_framework_is_a_reason_with_a_remedy(hpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "habana_frameworks", None)
    reason = hpu.kind.explain_unavailability()
    assert "habana_frameworks is not installed" in reason.reason
    assert "docs.habana.ai" in reason.remedy


def test_if_the_framework_does_not_load_the_remedy_is_to_query_the_driver(hpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch", None)
    reason = hpu.kind.explain_unavailability()
    assert "cannot be loaded" in reason.reason
    assert reason.remedy.startswith("hl-smi")


def test_hlml_readings_are_in_core_units(hpu):
    expected = SensorReading(clock_hz=pytest.approx(1.6e9), watts=pytest.approx(812), celsius=55)
    assert hpu.kind(0).telemetry.read(energy=True) == expected


def test_readings_that_hlml_refuses_are_none(hpu):
    backend = hpu.kind(0)
    hpu.hlml.refuses_all = True
    assert backend.telemetry.read(energy=True) == SensorReading()
    unavailability = hpu.kind(0).telemetry
    assert "does not answer" in unavailability.reason
    assert unavailability.remedy.startswith("hl-smi")


def test_without_pyhlml_the_remedy_is_named(hpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyhlml", None)
    assert hpu.kind(0).telemetry.remedy == "pip install habana-pyhlml"


def test_gaudis_memory_is_its_limit_whatever_is_in_use(hpu):
    backend = hpu.kind(0)
    assert backend.info.memory_bytes == 96 * GB
    assert backend.read_free_memory_bytes() == 93 * GB
    assert backend.info.cache_bytes == 96 * MIB


@pytest.mark.parametrize("dtype", ["tf32", "float64", "float8_e4m3fnuz", "int8"])
def test_dtypes_that_gaudi_lacks(hpu, dtype):
    assert dtype in hpu.kind(0).explain_unsupported_dtype(dtype)


# -- Apple -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "tf32", "int8", "float8_e4m3fn", "float8_e5m2"])
def test_dtypes_that_apple_gpus_lack(mps, dtype):
    backend = mps.kind(0)
    assert dtype in backend.explain_unsupported_dtype(dtype)
    assert backend.default_dtype == "float16"
