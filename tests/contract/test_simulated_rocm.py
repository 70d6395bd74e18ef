"""Test the ROCm backend: amdsmi's units and missing values, the dtypes of each architecture, TunableOp, NUMA balancing
and profiler ranges.
"""

import sys

import pytest
from simulated_vendors import mi300x

from mamf.backend import SensorReading, Unavailability


def run_checks(backend):
    return {result.check_name: result for result in backend.check_machine()}


def open_architecture(rocm, architecture):
    rocm.module.devices[:] = [mi300x(gcnArchName=f"{architecture}:sramecc+:xnack-")]
    return rocm.kind(0)


def test_a_missing_device_has_a_remedy_that_asks_the_driver(rocm):
    rocm.module.devices.clear()
    reason = rocm.kind.explain_unavailability()
    assert "no AMD device" in reason.reason
    assert reason.remedy.startswith("rocminfo")


def test_amdsmi_finds_the_device_by_its_pci_address(rocm, calls):
    rocm.kind(0)
    assert ("by address", "0000:0c:00.0") in calls


def test_readings_are_in_base_units(rocm):
    assert rocm.kind(0).telemetry.read(energy=True) == SensorReading(
        clock_hz=pytest.approx(1850e6), watts=742, joules=pytest.approx(2e6 * 15.259e-6), celsius=71
    )


def test_the_power_limit_in_microwatts_becomes_watts(rocm):
    info = rocm.kind(0).info
    assert info.power_limit_watts == pytest.approx(750)
    assert info.max_clock_hz == pytest.approx(2100e6)


def test_values_that_are_not_applicable_read_as_none(rocm):
    rocm.smi.clock = dict.fromkeys(rocm.smi.clock, "N/A")
    rocm.smi.power = dict.fromkeys(rocm.smi.power, "N/A")
    rocm.smi.energy = dict.fromkeys(rocm.smi.energy, "N/A")
    rocm.smi.metrics = dict.fromkeys(rocm.smi.metrics, "N/A")
    rocm.smi.celsius = "N/A"
    backend = rocm.kind(0)
    assert backend.telemetry.read(energy=True) == SensorReading()
    assert backend.info.max_clock_hz is None


def test_values_that_amdsmi_refuses_read_as_none(rocm):
    backend = rocm.kind(0)
    rocm.smi.refuses_all = True
    assert backend.telemetry.read(energy=True) == SensorReading()


@pytest.mark.parametrize(
    ("counter", "reason"),
    [
        ("ppt_residency_acc", "power cap"),
        ("socket_thm_residency_acc", "socket thermal slowdown"),
        ("hbm_thm_residency_acc", "memory thermal slowdown"),
        ("vr_thm_residency_acc", "voltage regulator thermal slowdown"),
        ("prochot_residency_acc", "hardware thermal slowdown"),
    ],
)
def test_the_reason_for_a_lower_clock_since_the_last_reading_is_named(rocm, counter, reason):
    telemetry = rocm.kind(0).telemetry
    rocm.smi.metrics[counter] += 1
    assert telemetry.read().throttle_reasons == (reason,)
    assert telemetry.read().throttle_reasons == ()


@pytest.mark.parametrize("name", ["amdsmi_init", "amdsmi_get_processor_handle_from_bdf"])
def test_amdsmi_without_permission_is_unavailable_not_an_error(rocm, name):
    rocm.smi.refused = {name}
    backend = rocm.kind(0)
    assert "amdsmi does not answer" in backend.telemetry.reason
    assert "render group" in backend.telemetry.remedy


def test_without_amdsmi_the_remedy_is_named_and_the_device_still_described(rocm, monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    backend = rocm.kind(0)
    assert isinstance(backend.telemetry, Unavailability)
    result = run_checks(backend)["sensors"]
    assert (result.verdict, result.command) == ("warning", "pip install amdsmi")
    assert result.effect
    assert backend.info.compute_units == 304


@pytest.mark.parametrize(
    "failure",
    [
        "raise AttributeError('libamd_smi.so: undefined symbol: amdsmi_get_gpu_revision')",
        "raise KeyError('libamd_smi.so')",
        "raise OSError('libamd_smi.so')",
    ],
)
def test_an_amdsmi_that_does_not_match_rocms_library_is_unavailable_not_an_error(
    rocm, monkeypatch, tmp_path, capsys, failure
):
    (tmp_path / "amdsmi.py").write_text(f"print('Unable to find libamd_smi.so')\n{failure}")
    monkeypatch.delitem(sys.modules, "amdsmi")
    monkeypatch.syspath_prepend(tmp_path)
    telemetry = rocm.kind(0).telemetry
    assert "cannot be loaded" in telemetry.reason
    assert "/opt/rocm" in telemetry.remedy
    # Only the report may go to stdout, because it may be JSON.
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("architecture", "fp8", "missing"),
    [
        ("gfx90a", "float8_e4m3fn", {"tf32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"}),
        ("gfx942", "float8_e4m3fnuz", {"float8_e4m3fn", "float8_e5m2"}),
        ("gfx950", "float8_e4m3fn", {"float8_e4m3fnuz"}),
        ("gfx1201", "float8_e4m3fn", {"tf32", "float8_e4m3fnuz"}),
    ],
)
def test_dtypes_follow_the_architecture(rocm, architecture, fp8, missing):
    backend = open_architecture(rocm, architecture)
    assert backend.resolve_dtype("fp8") == fp8
    dtypes = ("bfloat16", "float32", "tf32", "float64", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
    reasons = {dtype: backend.explain_unsupported_dtype(dtype) for dtype in dtypes}
    assert {dtype for dtype, reason in reasons.items() if reason} == missing
    assert all(architecture in reason for reason in reasons.values() if reason)


@pytest.mark.parametrize(("content", "verdict"), [("1\n", "warning"), ("0\n", "ok"), (None, "unknown")])
def test_numa_balancing_is_read_from_the_kernel(rocm, monkeypatch, tmp_path, content, verdict):
    path = tmp_path / "numa_balancing"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(sys.modules[rocm.kind.__module__], "_NUMA_BALANCING_FILE", path)
    result = run_checks(rocm.kind(0))["numa_balancing"]
    assert result.verdict == verdict
    if verdict == "warning":
        assert result.command == "sudo sysctl kernel.numa_balancing=0"
        assert result.effect


@pytest.mark.parametrize(("value", "verdict"), [(None, "warning"), ("0", "warning"), ("1", "ok")])
def test_a_warning_is_given_unless_tunable_op_is_on(rocm, monkeypatch, value, verdict):
    if value is not None:
        monkeypatch.setenv("PYTORCH_TUNABLEOP_ENABLED", value)
    result = run_checks(rocm.kind(0))["TunableOp"]
    assert result.verdict == verdict
    assert verdict == "ok" or (result.effect and result.command == "export PYTORCH_TUNABLEOP_ENABLED=1")


# -- profiler windows and ranges -------------------------------------------------------------------------------------


class SimulatedRoctx:
    """A fake roctx library, as ctypes loads it. The older library has ranges, but cannot pause or resume a profiler."""

    def __init__(self, calls, has_pause):
        self._calls = calls
        names = ["roctxRangePushA", "roctxRangePop", *(["roctxProfilerResume", "roctxProfilerPause"] * has_pause)]
        for name in names:
            setattr(self, name, lambda *arguments, name=name: calls.append((name, *arguments[:1])))


@pytest.mark.parametrize("installed", ["librocprofiler-sdk-roctx.so", "libroctx64.so", None])
def test_a_profiler_window_is_a_range_in_which_rocprofv3_records(rocm, calls, monkeypatch, installed):
    def load(name):
        if name != installed:
            raise OSError("cannot open shared object file")
        return SimulatedRoctx(calls, has_pause="sdk" in name)

    backend = rocm.kind(0)
    monkeypatch.setattr(sys.modules[rocm.kind.__module__].ctypes, "CDLL", load)
    calls.clear()
    with backend.open_profiler_window("torch.mm"):
        calls.append(("launch",))
    names = [name for name, *_ in calls]
    resumed = ["roctxProfilerResume"] if installed and "sdk" in installed else []
    paused = ["roctxProfilerPause"] if resumed else []
    marks = (["roctxRangePushA"], ["roctxRangePop"]) if installed else ([], [])
    assert names == ["synchronize", *resumed, *marks[0], "launch", "synchronize", *marks[1], *paused]
    assert not installed or ("roctxRangePushA", b"torch.mm") in calls
    calls.clear()
    if (profiler_range := backend.open_profiler_range("a module")) is not None:
        with profiler_range:
            calls.append(("launch",))
    assert [name for name, *_ in calls] == (["roctxRangePushA", "launch", "roctxRangePop"] if installed else [])
