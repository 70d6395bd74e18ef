"""Detect whether a card is split into MIG slices or partitions, or shared through vGPUs, MPS or other processes.

This code was checked with nvidia-ml-py 13.615.71 and amdsmi 7.0.2. The device name that CUDA reports includes the MIG
slice ("NVIDIA H100 80GB HBM3 MIG 3g.40gb"). While the control daemon of MPS (CUDA Multi-Process Service) runs, every
process uses MPS. mamf looks for the daemon's pid file, because the daemon leaves its socket behind when it stops.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from mamf.backend import STARTING_PROCESS_PID_VARIABLE, CheckResult

_MIG_SLICE_PATTERN = re.compile(r"\bMIG \S+")
# NVML's virtualization mode of a vGPU (NVML_GPU_VIRTUALIZATION_MODE_VGPU). A whole card in a virtual machine reports a
# different mode.
_VGPU_MODE = 2
_PCI_DEVICES_FOLDER = Path("/sys/bus/pci/devices")
_WHOLE_CARD_PARTITION_MODES = ("", "SPX", "UNKNOWN")
_OTHER_PROCESSES = "other processes"
_SHARING_EFFECT = "measured rates are lower, and cannot be compared with datasheet peaks or with rates of whole cards"


def find_mig_slice(name: str) -> str | None:
    """Return the MIG slice that CUDA's device name contains, such as "MIG 3g.40gb"; None for a whole card."""
    match = _MIG_SLICE_PATTERN.search(name)
    return match[0] if match else None


def list_sharing_ways(sensors: Any, name: str) -> tuple[str, ...]:
    """Return the ways in which an NVIDIA card is shared, such as "MPS".

    If processes use MPS, the result does not contain "other processes", because NVML lists the MPS server as another
    process. ``sensors``: the NvmlSensors of the card, or None if NVML is unavailable.
    """
    ways = [find_mig_slice(name), _detect_vgpu(sensors), _detect_mps(sensors) or _detect_other_processes(sensors)]
    return tuple(filter(None, ways))


def _detect_vgpu(sensors: Any) -> str | None:
    mode = sensors and sensors.call_or_none(sensors.nvml.nvmlDeviceGetVirtualizationMode)
    return "vGPU" if mode == _VGPU_MODE else None


def _detect_mps(sensors: Any) -> str | None:
    # nvidia-ml-py before 11.495 lacks this query.
    query = sensors and getattr(sensors.nvml, "nvmlDeviceGetMPSComputeRunningProcesses", None)
    clients = sensors.call_or_none(query) if query else None
    daemon = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps", "nvidia-cuda-mps-control.pid")
    return "MPS" if clients or daemon.exists() else None


def _detect_other_processes(sensors: Any) -> str | None:
    return _OTHER_PROCESSES if sensors and count_other_processes(sensors) else None


def count_other_processes(sensors: Any) -> int | None:
    """Return the number of compute processes on the card that do not belong to this run of mamf; None if unknown.

    In a container, some drivers report no processes at all. The number is then unknown. Other drivers report pids of
    the host, which this process cannot match with its own pid. In that case, this function assumes that the list
    includes this process and the mamf process that started it, if any.
    """
    processes = sensors.call_or_none(sensors.nvml.nvmlDeviceGetComputeRunningProcesses)
    if not processes:
        return None
    pids, pids_of_run = {process.pid for process in processes}, _find_pids_of_run()
    if os.getpid() in pids:
        return len(pids - pids_of_run)
    return max(0, len(pids) - (2 if STARTING_PROCESS_PID_VARIABLE in os.environ else 1))


def _find_pids_of_run() -> set[int]:
    """Return the pids of all processes of this run of mamf."""
    pids = {os.getpid()}
    if starting_process_pid := os.environ.get(STARTING_PROCESS_PID_VARIABLE):
        with contextlib.suppress(psutil.Error, ValueError):  # The parent process has ended, or its pid is invalid.
            pids.add(int(starting_process_pid))
            pids |= {child.pid for child in psutil.Process(int(starting_process_pid)).children(recursive=True)}
    return pids


def check_card_sharing(sensors: Any, name: str, index: int) -> list[CheckResult]:
    """Return findings on whether the card is split, and whether other processes use it.

    ``index``: the card's index in nvidia-smi.
    """
    findings = [_check_other_processes(sensors)]
    if mig_slice := find_mig_slice(name):
        command = f"sudo nvidia-smi -i {index} -mig 0   # removes all slices of the card"
        findings.append(
            CheckResult(
                "whole card", "warning", f"the device is a slice of a card: {mig_slice}", _SHARING_EFFECT, command
            )
        )
    if _detect_vgpu(sensors):
        findings.append(
            CheckResult(
                "whole card",
                "warning",
                "the device is a vGPU",
                _SHARING_EFFECT,
                "pass the whole card through to the virtual machine",
            )
        )
    if _detect_mps(sensors):
        findings.append(
            CheckResult(
                "MPS",
                "warning",
                "the MPS daemon is running, so other processes may share the card",
                _SHARING_EFFECT,
                "echo quit | nvidia-cuda-mps-control",
            )
        )
    return findings


def _check_other_processes(sensors: Any) -> CheckResult:
    count = count_other_processes(sensors)
    if count is None:
        return CheckResult(_OTHER_PROCESSES, "unknown", "NVML does not report which processes use the card")
    if not count:
        return CheckResult(_OTHER_PROCESSES, "ok", "no other process uses this device")
    effect = f"other processes use compute time, power and memory of the device: {_SHARING_EFFECT}"
    return CheckResult(
        _OTHER_PROCESSES,
        "warning",
        f"{count} running on this device",
        effect,
        "nvidia-smi   # lists the processes to end",
    )


# -- AMD -------------------------------------------------------------------------------------------------------------


def find_amd_partition(address: str | None) -> str | None:
    """Return the kind of partition of an AMD device, such as "CPX partition"; None if the device is a whole card (SPX).

    The Linux kernel reports partitions of Instinct MI300 and newer. ``address``: the device's address on the PCI bus.
    """
    path = _PCI_DEVICES_FOLDER / (address or "unknown") / "current_compute_partition"
    mode = ""
    with contextlib.suppress(OSError):  # The file does not exist, or the card is being reset.
        mode = path.read_text().strip()
    return None if mode in _WHOLE_CARD_PARTITION_MODES else f"{mode} partition"


def detect_other_amd_processes(sensors: Any) -> str | None:
    """Return "other processes" if processes outside this run of mamf use memory of the card, else None.

    If amdsmi does not list this process, as in a container with separate pids, the result is None, because mamf cannot
    tell which of the listed processes are its own. ``sensors``: AmdSmiSensors, or None if they are unavailable.
    """
    processes = (sensors and sensors.call_or_none(sensors.smi.amdsmi_get_gpu_process_list)) or []
    pids = {process["pid"] for process in processes if process["mem"]}
    return _OTHER_PROCESSES if os.getpid() in pids and pids - _find_pids_of_run() else None


def make_sharing_warnings(ways: Iterable[str]) -> list[CheckResult]:
    """Return a warning for each way in which an AMD card is shared."""
    unsplit_command = "sudo amd-smi set --gpu all --compute-partition SPX"
    commands = {_OTHER_PROCESSES: "amd-smi process   # lists the processes to end"}
    return [
        CheckResult(
            "whole card", "warning", f"the card is shared: {way}", _SHARING_EFFECT, commands.get(way, unsplit_command)
        )
        for way in ways
    ]
