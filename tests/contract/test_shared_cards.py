"""Test how mamf detects and names shared cards: slices, partitions, vGPUs, MPS and other processes."""

import os
import sys
from types import SimpleNamespace

import pytest
from simulated_vendors import h100

from mamf.backend import STARTING_PROCESS_PID_VARIABLE, parse_sharing_ways
from mamf.peaks import find_datasheet_rate

SLICE = "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
OWN, LEADING, STRANGER = os.getpid(), 4_000_001, 4_000_002


def check_results_of(backend):
    return {result.check_name: result for result in backend.check_machine()}


def processes(*pids):
    return [SimpleNamespace(pid=pid) for pid in pids]


@pytest.fixture(autouse=True)
def no_daemon(monkeypatch, tmp_path):
    """Hide an MPS daemon and a run of mamf that may exist on this machine."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.delenv(STARTING_PROCESS_PID_VARIABLE, raising=False)


@pytest.fixture
def pipe(tmp_path):
    """Return the path of the pid file that a running MPS control daemon keeps."""
    return tmp_path / "nvidia-cuda-mps-control.pid"


def assert_named(backend, *ways):
    assert backend.find_sharing_ways() == ways
    assert parse_sharing_ways(backend.info.name) == ways
    assert (find_datasheet_rate(backend.info.name, "bfloat16", backend.info.compute_units) is None) == bool(ways)
    warned = [result for result in backend.check_machine() if result.verdict == "warning"]
    assert len(warned) == len(ways)
    assert all(result.effect and result.command for result in warned)


# -- NVIDIA ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def slice_of_a_card(cuda):
    """Return a backend that is opened on a MIG slice.

    NVML does not accept the UUID of a slice as the UUID of a GPU, so mamf finds the card by its PCI address.
    """
    cuda.module.devices[:] = [h100(0, name=SLICE, uuid="90443af0-2fe6-57fb-86fe-54186d5a6581")]
    return cuda.kind(0)


def test_a_mig_slice_is_named_and_has_no_peak_of_the_card(slice_of_a_card):
    assert_named(slice_of_a_card, "MIG 3g.40gb")
    assert slice_of_a_card.info.name == f"{SLICE} (shared: MIG 3g.40gb)"
    assert find_datasheet_rate(SLICE, "bfloat16") is None  # the name without mamf's note, as in logs of other tools
    result = check_results_of(slice_of_a_card)["whole card"]
    assert result.command.startswith("sudo nvidia-smi -i 0 -mig 0")


def test_the_power_of_the_card_is_not_that_of_a_slice(slice_of_a_card):
    reading = slice_of_a_card.telemetry.read(energy=True)
    assert (reading.watts, reading.joules) == (None, None)
    assert reading.clock_hz
    assert reading.celsius


def test_a_vgpu_is_a_part_and_a_card_that_is_passed_through_is_not(cuda):
    cuda.nvml.cards[0].virtualization = 1
    assert_named(cuda.kind(0))
    cuda.nvml.cards[0].virtualization = 2
    assert_named(cuda.kind(0), "vGPU")


def test_a_client_of_mps_shares_whatever_processes_nvml_lists(cuda):
    cuda.nvml.cards[0].mps = processes(OWN)
    cuda.nvml.cards[0].processes = processes(OWN)
    assert_named(cuda.kind(0), "MPS")


@pytest.mark.parametrize("has_nvml", [True, False])
def test_a_daemon_of_mps_is_found_by_its_pid_file(cuda, pipe, monkeypatch, has_nvml):
    if not has_nvml:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    cuda.nvml.missing = {"nvmlDeviceGetMPSComputeRunningProcesses"}  # as in an older nvidia-ml-py
    assert cuda.kind(0).find_sharing_ways() == ()
    pipe.write_text("4000003\n")
    assert cuda.kind(0).find_sharing_ways() == ("MPS",)


def test_processes_that_come_during_a_run_are_seen_after_it(cuda):
    backend = cuda.kind(0)
    assert backend.find_sharing_ways() == ()
    cuda.nvml.cards[0].processes = processes(OWN, STRANGER)
    assert backend.find_sharing_ways() == ("other processes",)
    assert_named(cuda.kind(0), "other processes")
    assert check_results_of(backend)["other processes"].finding == "1 running on this device"


@pytest.mark.parametrize(
    ("listed", "is_led", "verdict"),
    [
        ([OWN], False, "ok"),
        ([OWN, STRANGER], False, "warning"),
        ([OWN, LEADING], False, "warning"),
        ([OWN, LEADING], True, "ok"),
        ([OWN, LEADING, STRANGER], True, "warning"),
        # In a container, older drivers report pids of the host, which differ from the container's. So mamf assumes
        # that this process is among them, and also the mamf process that started it, if there is one.
        ([LEADING], False, "ok"),
        ([LEADING, STRANGER], False, "warning"),
        ([LEADING, STRANGER], True, "ok"),
        ([], False, "unknown"),
    ],
)
def test_processes_of_the_same_run_are_no_others(cuda, monkeypatch, listed, is_led, verdict):
    if is_led:
        monkeypatch.setenv(STARTING_PROCESS_PID_VARIABLE, str(LEADING))
    cuda.nvml.cards[0].processes = processes(*listed)
    backend = cuda.kind(0)
    assert check_results_of(backend)["other processes"].verdict == verdict
    assert backend.find_sharing_ways() == (("other processes",) if verdict == "warning" else ())


# -- AMD -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def partition(rocm, monkeypatch, tmp_path):
    """Return a function that writes the card's compute partition to the file where the Linux kernel reports it.

    Also make sure that NUMA balancing and TunableOp cause no warnings.
    """
    adapter = sys.modules[rocm.kind.__module__]
    monkeypatch.setitem(adapter.find_amd_partition.__globals__, "_PCI_DEVICES_FOLDER", tmp_path)
    monkeypatch.setattr(adapter, "_NUMA_BALANCING_FILE", tmp_path / "none")
    monkeypatch.setenv("PYTORCH_TUNABLEOP_ENABLED", "1")
    folder = tmp_path / "0000:0c:00.0"
    folder.mkdir()
    return lambda mode: (folder / "current_compute_partition").write_text(f"{mode}\n")


@pytest.mark.parametrize(("mode", "ways"), [(None, ()), ("SPX", ()), ("CPX", ("CPX partition",))])
def test_a_partition_is_named_and_has_neither_peak_nor_power_of_the_socket(rocm, partition, mode, ways):
    if mode:
        partition(mode)
    backend = rocm.kind(0)
    assert_named(backend, *ways)
    assert (backend.telemetry.read(energy=True).watts is None) == bool(ways)


@pytest.mark.parametrize(
    ("listed", "ways"),
    [
        ([(OWN, 1)], ()),
        ([(OWN, 1), (STRANGER, 0)], ()),  # has opened the driver, but uses no memory
        ([(OWN, 1), (STRANGER, 1)], ("other processes",)),
        ([(STRANGER, 1)], ()),  # as in a container, which has separate pids
    ],
)
def test_other_processes_with_memory_share_an_amd_card(rocm, partition, listed, ways):
    rocm.smi.processes = [{"pid": pid, "mem": gigabytes * 2**30} for pid, gigabytes in listed]
    assert_named(rocm.kind(0), *ways)
