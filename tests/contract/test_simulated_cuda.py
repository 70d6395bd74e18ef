"""Test the CUDA adapter with simulated cards: which card it queries with NVML, its units, and its advice."""

import itertools
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import simulated_vendors
import torch
from simulated_vendors import h100, make_version_module

from mamf import torch_backend
from mamf.backend import SensorReading, Unavailability

OWN_PROCESS, OTHER_PROCESS = SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=1)
NULL_UUID = "00000000-0000-0000-0000-000000000000"


def check_machine_by_name(backend):
    return {result.check_name: result for result in backend.check_machine()}


# -- time ------------------------------------------------------------------------------------------------------------


def test_the_timer_overhead_follows_from_kernels_of_known_cycles(cuda, calls, monkeypatch):
    cuda.torch.cuda._sleep = cuda.module._sleep
    monkeypatch.setattr(simulated_vendors, "MILLISECONDS_BETWEEN_EVENTS", 4e-3)
    monkeypatch.setattr(torch_backend, "_OVERHEAD_ESTIMATE_COUNT", 1)
    assert cuda.kind(0).estimate_timer_overhead() == pytest.approx(4e-6)
    names = [name for name, *_ in calls]
    first = names.index("_sleep")
    assert names[first - 1 : first + 2] == ["record", "_sleep", "record"]


@pytest.mark.parametrize("launched_before", [0, 1])
def test_the_timer_overhead_does_not_depend_on_the_position_in_the_queue(cuda, monkeypatch, launched_before):
    """Check a device on which windows at even and odd positions of the queue differ by 0.28 us, like an H200."""
    clock_hz, overhead = 1.98e9, 3e-6
    window_numbers = itertools.count(launched_before)
    requested_cycles, mark_numbers = [0], itertools.count()
    backend = cuda.kind(0)
    cuda.torch.cuda._sleep = requested_cycles.append
    monkeypatch.setattr(backend, "record_mark", lambda: (next(mark_numbers), requested_cycles[-1]))

    def seconds_between(start, end):
        return overhead + end[1] / clock_hz + (0.14e-6 if next(window_numbers) % 2 else -0.14e-6)

    monkeypatch.setattr(backend, "compute_seconds_between", seconds_between)
    assert backend.estimate_timer_overhead() == pytest.approx(overhead, abs=0.1e-6)


# -- availability ----------------------------------------------------------------------------------------------------


def test_a_torch_without_cuda_is_named_with_its_version(cuda):
    cuda.torch.version = make_version_module()
    reason = cuda.kind.explain_unavailability()
    assert torch.__version__ in reason.reason
    assert "built without CUDA" in reason.reason
    assert "pip install" in reason.remedy


# -- which card ------------------------------------------------------------------------------------------------------


def test_nvml_finds_a_card_by_uuid_if_torch_renumbers_cards(cuda, calls):
    # With CUDA_VISIBLE_DEVICES=1, device 0 of torch is device 1 of NVML.
    cuda.module.devices[:] = [h100(1)]
    backend = cuda.kind(0)
    assert ("by uuid", f"GPU-{h100(1).uuid}") in calls
    assert not any(name in ("by address", "nvmlDeviceGetHandleByIndex") for name, *_ in calls)
    assert backend.telemetry.read().clock_hz == pytest.approx(1756e6)


def test_commands_of_nvidia_smi_use_the_index_of_the_driver_not_of_torch(cuda):
    cuda.module.devices[:] = [h100(1)]
    cuda.nvml.cards[1].limit = 500_000
    cuda.nvml.cards[1].persistence = 0
    results = check_machine_by_name(cuda.kind(0))
    assert results["power limit"].command == "sudo nvidia-smi -i 1 -pl 700"
    assert results["persistence mode"].command == "sudo nvidia-smi -i 1 -pm 1"


def test_a_hidden_uuid_falls_back_to_the_pci_address(cuda, calls):
    cuda.module.devices[:] = [h100(1, uuid=NULL_UUID, pci_domain_id=1)]
    cuda.nvml.cards[1].address = "00000001:18:00.0"
    assert cuda.kind(0).telemetry.read().clock_hz == pytest.approx(1756e6)
    assert ("by address", "00000001:18:00.0") in calls
    assert not any(name == "by uuid" for name, *_ in calls)


def test_the_hashes_of_two_cards_differ_and_do_not_reveal_the_uuid(cuda):
    hashes = [cuda.kind(index).info.uuid_hash for index in (0, 1)]
    assert len(set(hashes)) == 2
    assert not any(uuid_hash in h100(0).uuid for uuid_hash in hashes)


# -- sensors ---------------------------------------------------------------------------------------------------------


def test_readings_are_in_core_units(cuda):
    assert cuda.kind(0).telemetry.read(energy=True) == SensorReading(
        clock_hz=pytest.approx(1755e6), watts=pytest.approx(684.5), joules=pytest.approx(123_456.789), celsius=61
    )


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (0x0, ()),
        (0x1 | 0x2 | 0x100, ()),  # idle, clock set by the user, clock set for the display: not throttling
        (0x4, ("power cap",)),
        (0x8 | 0x40, ("hardware slowdown", "hardware thermal slowdown")),
        (0x10 | 0x20, ("sync boost", "software thermal slowdown")),
        (0x80, ("power brake",)),
    ],
)
def test_throttle_bits_are_named(cuda, bits, reasons):
    cuda.nvml.cards[0].reasons = bits
    assert cuda.kind(0).telemetry.read().throttle_reasons == reasons


@pytest.mark.parametrize("how", ["missing", "refused"])
def test_throttling_is_read_with_the_old_function_if_the_new_one_is_missing_or_refused(cuda, how):
    # An old nvidia-ml-py does not have the new function, and drivers before 535 refuse it.
    getattr(cuda.nvml, how).add("nvmlDeviceGetCurrentClocksEventReasons")
    cuda.nvml.cards[0].reasons = 0x4
    assert cuda.kind(0).telemetry.read().throttle_reasons == ("power cap",)


def test_readings_that_nvml_refuses_are_none(cuda):
    backend = cuda.kind(0)
    cuda.nvml.refuses_all = True
    assert backend.telemetry.read(energy=True) == SensorReading()
    assert all(result.verdict in ("unknown", "ok") for result in backend.check_machine())


def test_without_pynvml_the_clock_comes_from_torch_and_the_remedy_is_named(cuda, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    backend = cuda.kind(0)
    assert isinstance(backend.telemetry, Unavailability)
    assert backend.telemetry.remedy == "pip install nvidia-ml-py"
    assert backend.info.max_clock_hz == pytest.approx(1980e6)
    sensors = check_machine_by_name(backend)["sensors"]
    assert (sensors.verdict, sensors.command) == ("warning", "pip install nvidia-ml-py")


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        ({"nvmlInit"}, "NVML cannot be started"),
        ({"nvmlDeviceGetHandleByUUID", "nvmlDeviceGetHandleByPciBusId"}, "NVML does not know the device"),
    ],
)
def test_nvml_without_permission_is_unavailable_not_an_error(cuda, refused, reason):
    cuda.nvml.refused = refused
    assert reason in cuda.kind(0).telemetry.reason


def test_device_info_contains_what_torch_and_nvml_report(cuda):
    info = cuda.kind(0).info
    assert (info.architecture, info.compute_units, info.driver) == ("sm_90", 132, "580.65.06")
    assert info.power_limit_watts == pytest.approx(700)
    assert info.versions["cuda"] == "12.8"


# -- checks of the machine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "change", "finding", "command"),
    [
        ("power limit", {"limit": 500_000}, "500 W, below the default of 700 W", "sudo nvidia-smi -i 0 -pl 700"),
        ("application clock", {"application": 1410}, "1410 MHz", "sudo nvidia-smi -i 0 -ac 2619,1980"),
        ("throttling", {"reasons": 0x40}, "hardware thermal slowdown", "nvidia-smi -q -d PERFORMANCE,TEMPERATURE"),
        ("persistence mode", {"persistence": 0}, "off", "sudo nvidia-smi -i 0 -pm 1"),
        ("ECC", {"ecc": [1, 0]}, "ECC changes at the next reset", "sudo nvidia-smi -r"),
        (
            "other processes",
            {"processes": [OWN_PROCESS, OTHER_PROCESS]},
            "1 running on this device",
            "nvidia-smi ",
        ),
    ],
)
def test_each_fault_of_the_card_has_an_effect_and_a_command(cuda, check, change, finding, command):
    vars(cuda.nvml.cards[0]).update(change)
    results = check_machine_by_name(cuda.kind(0))
    assert [name for name, result in results.items() if result.verdict == "warning"] == [check]
    assert finding in results[check].finding
    assert results[check].effect
    assert results[check].command.startswith(command)


def test_a_driver_older_than_torch_is_a_warning(cuda):
    cuda.nvml.cuda_version = 12040
    driver = check_machine_by_name(cuda.kind(0))["driver"]
    assert driver.verdict == "warning"
    assert "CUDA 12.4" in driver.finding
    assert "12.8" in driver.finding
    assert driver.effect
    assert driver.command


def test_the_load_of_the_card_itself_does_not_count_as_a_siblings(cuda):
    cuda.nvml.cards[0].utilization.gpu = 100
    assert check_machine_by_name(cuda.kind(0))["sibling devices"].verdict == "ok"
    cuda.nvml.cards[1].utilization.gpu = 97
    siblings = check_machine_by_name(cuda.kind(0))["sibling devices"]
    assert (siblings.verdict, siblings.finding) == ("warning", "other devices of this machine that are busy: 1")
    assert siblings.effect
    assert siblings.command


@pytest.mark.parametrize(("name", "value"), [("CUDA_LAUNCH_BLOCKING", "1"), ("NVIDIA_TF32_OVERRIDE", "0")])
def test_harmful_variables_are_advised_against(cuda, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    result = check_machine_by_name(cuda.kind(0))[name]
    assert (result.verdict, result.command) == ("warning", f"unset {name}")
    assert result.effect


# -- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "missing"),
    [
        ((7, 5), {"tf32", "float8_e4m3fn", "float8_e5m2"}),
        ((8, 0), {"float8_e4m3fn", "float8_e5m2"}),
        ((8, 6), {"float8_e4m3fn", "float8_e5m2"}),
        ((8, 9), set()),
        ((9, 0), set()),
        ((12, 0), set()),
    ],
)
def test_dtypes_follow_the_compute_capability(cuda, capability, missing):
    major, minor = capability
    cuda.module.devices[:] = [h100(0, major=major, minor=minor)]
    backend = cuda.kind(0)
    dtypes = ("bfloat16", "float16", "float32", "tf32", "float64", "int8", "float8_e4m3fn", "float8_e5m2")
    reasons = {dtype: backend.explain_unsupported_dtype(dtype) for dtype in dtypes}
    assert {dtype for dtype, reason in reasons.items() if reason} == missing
    assert all("needs" in reason or "need " in reason for reason in reasons.values() if reason)


def test_fp8_is_e4m3fn_and_fnuz_is_amds(cuda):
    backend = cuda.kind(0)
    assert backend.resolve_dtype("fp8") == "float8_e4m3fn"
    assert "use float8_e4m3fn" in backend.explain_unsupported_dtype("float8_e4m3fnuz")


# -- a profiler's window ---------------------------------------------------------------------------------------------


def test_a_profiler_sees_what_runs_in_its_window_and_nothing_else(cuda, calls):
    backend = cuda.kind(0)
    assert backend.explain_missing_counters() is None
    calls.clear()
    with backend.open_profiler_window("torch.mm 64x64x64"):
        calls.append(("launch",))
    calls_in_window = [("start",), ("range_push", "torch.mm 64x64x64"), ("launch",)]
    assert calls == [("synchronize", 0), *calls_in_window, ("synchronize", 0), ("range_pop",), ("stop",)]
    calls.clear()
    with pytest.raises(RuntimeError), backend.open_profiler_window("it breaks"):
        raise RuntimeError
    assert calls[-2:] == [("range_pop",), ("stop",)]


# -- vboost and clock stamps -------------------------------------------------------------------------------------------

SLIDERS = "| GPU  Boost Slider  Max Value  Current Value |\n|   0  vboost                4              1 |\n"


@pytest.mark.parametrize(
    ("output", "expected"), [(SLIDERS, {"vboost": "1"}), ("No sliders", {}), (OSError("nvidia-smi"), {})]
)
def test_vboost_is_what_nvidia_smi_lists(cuda, monkeypatch, output, expected):
    def run(command, **options):
        assert command == ["nvidia-smi", "boost-slider", "-l", "-i", "3"]  # the index of NVML, not of CUDA
        if isinstance(output, OSError):
            raise output
        return SimpleNamespace(stdout=output)

    monkeypatch.setattr(subprocess, "run", run)
    cuda.nvml.nvmlDeviceGetIndex = lambda handle: 3
    adapter = sys.modules[cuda.kind.__module__]
    adapter._read_vboost.cache_clear()
    backend = cuda.kind(0)
    settings, check_results = backend.read_settings(), check_machine_by_name(backend)
    adapter._read_vboost.cache_clear()
    assert ("vboost" in check_results) == bool(expected)
    assert {name: value for name, value in settings.items() if name == "vboost"} == expected


def test_a_card_whose_driver_is_missing_has_no_clock_stamps(cuda, monkeypatch):
    monkeypatch.setattr(sys.modules[cuda.kind.__module__], "_load_driver", lambda: None)
    assert "driver" in str(cuda.kind(0).clock_stamps)
