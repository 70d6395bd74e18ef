"""Test how mamf detects and names shared cards: slices, partitions, vGPUs, MPS and other processes."""

import os
import sys
from types import SimpleNamespace

import pytest
from simulated_vendors import h100

from mamf.backend import STARTING_PROCESS_PID_VARIABLE, parse_sharing_ways
from mamf.peaks import find_datasheet_rate

SLICE = "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
THIS_PID, STARTING_PID, OTHER_PID = os.getpid(), 4_000_001, 4_000_002


def run_checks(backend):
    return {result.check_name: result for result in backend.check_machine()}


def make_processes(*pids):
    return [SimpleNamespace(pid=pid) for pid in pids]


@pytest.fixture(autouse=True)
def no_daemon(monkeypatch, tmp_path):
    """Hide an MPS daemon and a run of mamf that may exist on this machine."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.delenv(STARTING_PROCESS_PID_VARIABLE, raising=False)


@pytest.fixture
def pid_file(tmp_path):
    """Return the path of the pid file that a running MPS control daemon keeps."""
    return tmp_path / "nvidia-cuda-mps-control.pid"


def assert_shared(backend, *ways):
    assert backend.find_sharing_ways() == ways
    assert parse_sharing_ways(backend.info.name) == ways
    assert (find_datasheet_rate(backend.info.name, "bfloat16", backend.info.compute_units) is None) == bool(ways)
    warnings = [result for result in backend.check_machine() if result.verdict == "warning"]
    assert len(warnings) == len(ways)
    assert all(result.effect and result.command for result in warnings)


# -- NVIDIA ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mig_slice(cuda):
    """Return a backend that is opened on a MIG slice.

    NVML does not accept the UUID of a slice as the UUID of a GPU, so mamf finds the card by its PCI address.
    """
    cuda.module.devices[:] = [h100(0, name=SLICE, uuid="90443af0-2fe6-57fb-86fe-54186d5a6581")]
    return cuda.kind(0)


def test_a_mig_slice_is_named_and_has_no_peak_of_the_card(mig_slice):
    assert_shared(mig_slice, "MIG 3g.40gb")
    assert mig_slice.info.name == f"{SLICE} (shared: MIG 3g.40gb)"
    assert find_datasheet_rate(SLICE, "bfloat16") is None  # the name without mamf's note, as in logs of other tools
    result = run_checks(mig_slice)["whole card"]
    assert result.command.startswith("sudo nvidia-smi -i 0 -mig 0")


def test_a_mig_slice_does_not_report_the_power_of_the_card(mig_slice):
    reading = mig_slice.telemetry.read(energy=True)
    assert (reading.watts, reading.joules) == (None, None)
    assert reading.clock_hz
    assert reading.celsius


def test_a_vgpu_is_shared_and_a_card_that_is_passed_through_is_not(cuda):
    cuda.nvml.cards[0].virtualization = 1
    assert_shared(cuda.kind(0))
    cuda.nvml.cards[0].virtualization = 2
    assert_shared(cuda.kind(0), "vGPU")


def test_a_client_of_mps_shares_the_card_even_if_nvml_lists_no_other_process(cuda):
    cuda.nvml.cards[0].mps = make_processes(THIS_PID)
    cuda.nvml.cards[0].processes = make_processes(THIS_PID)
    assert_shared(cuda.kind(0), "MPS")


@pytest.mark.parametrize("has_nvml", [True, False])
def test_a_daemon_of_mps_is_found_by_its_pid_file(cuda, pid_file, monkeypatch, has_nvml):
    if not has_nvml:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    cuda.nvml.missing = {"nvmlDeviceGetMPSComputeRunningProcesses"}  # as in an older nvidia-ml-py
    assert cuda.kind(0).find_sharing_ways() == ()
    pid_file.write_text("4000003\n")
    assert cuda.kind(0).find_sharing_ways() == ("MPS",)


def test_processes_that_come_during_a_run_are_seen_after_it(cuda):
    backend = cuda.kind(0)
    assert backend.find_sharing_ways() == ()
    cuda.nvml.cards[0].processes = make_processes(THIS_PID, OTHER_PID)
    assert backend.find_sharing_ways() == ("other processes",)
    assert_shared(cuda.kind(0), "other processes")
    assert run_checks(backend)["other processes"].finding == "1 running on this device"


@pytest.mark.parametrize(
    ("listed_pids", "has_starting_process", "verdict"),
    [
        ([THIS_PID], False, "ok"),
        ([THIS_PID, OTHER_PID], False, "warning"),
        ([THIS_PID, STARTING_PID], False, "warning"),
        ([THIS_PID, STARTING_PID], True, "ok"),
        ([THIS_PID, STARTING_PID, OTHER_PID], True, "warning"),
        # In a container, older drivers report pids of the host, which differ from the container's. So mamf assumes
        # that this process is among them, and also the mamf process that started it, if there is one.
        ([STARTING_PID], False, "ok"),
        ([STARTING_PID, OTHER_PID], False, "warning"),
        ([STARTING_PID, OTHER_PID], True, "ok"),
        ([], False, "unknown"),
    ],
)
def test_processes_of_the_same_run_do_not_count_as_other_processes(
    cuda, monkeypatch, listed_pids, has_starting_process, verdict
):
    if has_starting_process:
        monkeypatch.setenv(STARTING_PROCESS_PID_VARIABLE, str(STARTING_PID))
    cuda.nvml.cards[0].processes = make_processes(*listed_pids)
    backend = cuda.kind(0)
    assert run_checks(backend)["other processes"].verdict == verdict
    assert backend.find_sharing_ways() == (("other processes",) if verdict == "warning" else ())


# -- AMD -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def set_partition(rocm, monkeypatch, tmp_path):
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
def test_a_partition_is_named_and_has_neither_peak_nor_power_of_the_socket(rocm, set_partition, mode, ways):
    if mode:
        set_partition(mode)
    backend = rocm.kind(0)
    assert_shared(backend, *ways)
    assert (backend.telemetry.read(energy=True).watts is None) == bool(ways)


@pytest.mark.parametrize(
    ("pids_and_gigabytes", "ways"),
    [
        ([(THIS_PID, 1)], ()),
        ([(THIS_PID, 1), (OTHER_PID, 0)], ()),  # has opened the driver, but uses no memory
        ([(THIS_PID, 1), (OTHER_PID, 1)], ("other processes",)),
        ([(OTHER_PID, 1)], ()),  # as in a container, which has separate pids
    ],
)
def test_other_processes_with_memory_share_an_amd_card(rocm, set_partition, pids_and_gigabytes, ways):
    rocm.smi.processes = [{"pid": pid, "mem": gigabytes * 2**30} for pid, gigabytes in pids_and_gigabytes]
    assert_shared(rocm.kind(0), *ways)
