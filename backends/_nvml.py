"""Read the sensors of an NVIDIA device from NVML, and check the state of its card.

mamf finds the device in NVML by UUID, or by PCI address if a virtual machine hides the UUID. An index would not work,
because CUDA_VISIBLE_DEVICES changes the indices of torch, but not those of NVML.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mamf_backends._card_sharing import check_card_sharing, find_mig_slice

from mamf.backend import SIBLING_CHECK, CheckResult, SensorReading, Unavailability

# The clock-event reasons of NVML that mamf reports as throttling, by bit. Other reasons, such as an idle GPU or a clock
# that the user has set, are not throttling.
_THROTTLE_REASON_BY_BIT = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
_SLOWDOWN_BITS = 0x8 | 0x20 | 0x40 | 0x80
_NULL_UUID = "00000000-0000-0000-0000-000000000000"
_NVML_NOT_INSTALLED = Unavailability(
    "nvidia-ml-py is not installed, so clock, power and temperature cannot be read", "pip install nvidia-ml-py"
)


class NvmlSensors:
    """Reads the sensors of one NVIDIA device from NVML. A value that the driver or a container hides is None.

    ``is_whole_card``: False for a MIG slice, whose power NVML cannot measure.
    """

    def __init__(self, nvml: Any, handle: Any, is_whole_card: bool = True) -> None:
        self.nvml = nvml
        self.handle = handle
        self.is_whole_card = is_whole_card
        # NVMLLibraryMismatchError means that the driver is too old. It is not a subclass of NVMLError, and old releases
        # of nvidia-ml-py lack it.
        self.error_types = (nvml.NVMLError, getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError))

    def call_or_none(self, query: Callable[..., Any], *arguments: Any) -> Any:
        return self.call_system_or_none(query, self.handle, *arguments)

    def call_system_or_none(self, query: Callable[..., Any], *arguments: Any) -> Any:
        """Return NVML's answer to a query about the whole machine; None if the query fails."""
        try:
            return query(*arguments)
        except self.error_types:
            return None

    def read(self, energy: bool = False) -> SensorReading:
        nvml = self.nvml
        clock_mhz = self.call_or_none(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
        milliwatts = self.call_or_none(nvml.nvmlDeviceGetPowerUsage) if self.is_whole_card else None
        millijoules = (
            self.call_or_none(nvml.nvmlDeviceGetTotalEnergyConsumption) if self.is_whole_card and energy else None
        )
        reasons = self.read_clock_event_reason_bits() or 0
        return SensorReading(
            clock_hz=None if clock_mhz is None else clock_mhz * 1e6,
            watts=None if milliwatts is None else milliwatts * 1e-3,
            joules=None if millijoules is None else millijoules * 1e-3,
            celsius=self.call_or_none(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            throttle_reasons=tuple(reason for bit, reason in _THROTTLE_REASON_BY_BIT.items() if reasons & bit),
        )

    def read_clock_event_reason_bits(self) -> int | None:
        # Drivers and releases of nvidia-ml-py before 535 support this query only under the second name.
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            query = getattr(self.nvml, name, None)
            reasons: int | None = None if query is None else self.call_or_none(query)
            if reasons is not None:
                return reasons
        return None

    def read_max_clock_hz(self) -> float | None:
        megahertz = self.call_or_none(self.nvml.nvmlDeviceGetMaxClockInfo, self.nvml.NVML_CLOCK_SM)
        return None if megahertz is None else megahertz * 1e6

    def read_power_limit_watts(self) -> float | None:
        milliwatts = self.call_or_none(self.nvml.nvmlDeviceGetEnforcedPowerLimit)
        return None if milliwatts is None else milliwatts * 1e-3


def open_nvml(properties: Any) -> NvmlSensors | Unavailability:
    """Return the sensors of a device, or the reason why they are unavailable.

    ``properties``: torch.cuda's properties of the device.
    """
    try:
        import pynvml
    except ImportError:
        return _NVML_NOT_INSTALLED
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Unavailability(f"NVML cannot be started ({error})", "check that nvidia-smi runs in this container")
    uuid, is_whole_card = str(getattr(properties, "uuid", _NULL_UUID)), find_mig_slice(properties.name) is None
    if uuid != _NULL_UUID:
        try:
            return NvmlSensors(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode()), is_whole_card)
        except pynvml.NVMLError:
            pass  # Some virtual machines hide the UUID. Find the device by its PCI address below.
    if not hasattr(properties, "pci_bus_id"):
        return Unavailability(
            "this torch reports neither the device's UUID nor its PCI address", "pip install --upgrade torch"
        )
    address = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        return NvmlSensors(pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(address.encode()), is_whole_card)
    except pynvml.NVMLError as error:
        return Unavailability(f"NVML does not know the device ({error})", "check that nvidia-smi lists the device")


def find_smi_index(sensors: NvmlSensors, index: int) -> int:
    """Return the card's index in nvidia-smi, which CUDA_VISIBLE_DEVICES does not change; ``index`` if unknown."""
    smi_index = sensors.call_or_none(sensors.nvml.nvmlDeviceGetIndex)
    return index if smi_index is None else int(smi_index)


def check_device(sensors: NvmlSensors, name: str, index: int, torch_cuda: str | None) -> list[CheckResult]:
    """Return findings on the card, its driver, other processes on the card, and the other cards of the machine.

    ``name``: CUDA's name of the device. ``torch_cuda``: torch's CUDA version, such as "13.0".
    """
    index = find_smi_index(sensors, index)
    return [
        _check_driver(sensors, torch_cuda),
        _check_power_limit(sensors, index),
        _check_application_clock(sensors, index),
        _check_throttling(sensors),
        _check_persistence_mode(sensors, index),
        _check_ecc(sensors),
        *check_card_sharing(sensors, name, index),
        _check_other_devices(sensors),
    ]


def _check_driver(sensors: NvmlSensors, torch_cuda: str | None) -> CheckResult:
    cuda_version_number = sensors.call_system_or_none(sensors.nvml.nvmlSystemGetCudaDriverVersion)
    if cuda_version_number is None:
        return CheckResult("driver", "unknown", "NVML does not report the driver's CUDA version")
    major, minor = cuda_version_number // 1000, cuda_version_number % 1000 // 10
    if torch_cuda is None or (major, minor) >= tuple(map(int, torch_cuda.split("."))):
        return CheckResult("driver", "ok", f"the driver supports CUDA {major}.{minor}; torch is built for {torch_cuda}")
    return CheckResult(
        "driver",
        "warning",
        f"the driver supports CUDA {major}.{minor}, but torch is built for {torch_cuda}",
        "libraries run in compatibility mode, without their newest kernels",
        "install a newer driver, or a torch built for this one",
    )


def _check_power_limit(sensors: NvmlSensors, index: int) -> CheckResult:
    limit_watts = sensors.read_power_limit_watts()
    default_milliwatts = sensors.call_or_none(sensors.nvml.nvmlDeviceGetPowerManagementDefaultLimit)
    if limit_watts is None or default_milliwatts is None:
        return CheckResult("power limit", "unknown", "NVML does not report the power limit")
    default_watts = default_milliwatts * 1e-3
    if limit_watts >= default_watts:
        return CheckResult("power limit", "ok", f"{limit_watts:.0f} W; the default is {default_watts:.0f} W")
    return CheckResult(
        "power limit",
        "warning",
        f"{limit_watts:.0f} W, below the default of {default_watts:.0f} W",
        "rates under sustained load are lower",
        f"sudo nvidia-smi -i {index} -pl {default_watts:.0f}",
    )


def _check_application_clock(sensors: NvmlSensors, index: int) -> CheckResult:
    nvml = sensors.nvml
    application_mhz = sensors.call_or_none(nvml.nvmlDeviceGetApplicationsClock, nvml.NVML_CLOCK_SM)
    max_hz = sensors.read_max_clock_hz()
    if application_mhz is None or max_hz is None:
        return CheckResult("application clock", "unknown", "the device does not report its application clock")
    if application_mhz * 1e6 >= max_hz:
        return CheckResult("application clock", "ok", f"{application_mhz} MHz, the maximum")
    memory_mhz = sensors.call_or_none(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_MEM)
    return CheckResult(
        "application clock",
        "warning",
        f"{application_mhz} MHz, below the maximum of {max_hz / 1e6:.0f} MHz",
        "if the card applies this limit, rates in short bursts are lower in proportion",
        f"sudo nvidia-smi -i {index} -ac {memory_mhz},{max_hz / 1e6:.0f}",
    )


def _check_throttling(sensors: NvmlSensors) -> CheckResult:
    reasons = sensors.read_clock_event_reason_bits()
    if reasons is None:
        return CheckResult("throttling", "unknown", "NVML does not report whether the card is throttled")
    reasons &= _SLOWDOWN_BITS
    if not reasons:
        return CheckResult("throttling", "ok", "the idle card is not throttled")
    names = ", ".join(reason for bit, reason in _THROTTLE_REASON_BY_BIT.items() if reasons & bit)
    return CheckResult(
        "throttling",
        "warning",
        f"throttled while idle: {names}",
        "all measured rates are too low",
        "nvidia-smi -q -d PERFORMANCE,TEMPERATURE",
    )


def _check_persistence_mode(sensors: NvmlSensors, index: int) -> CheckResult:
    mode = sensors.call_or_none(sensors.nvml.nvmlDeviceGetPersistenceMode)
    if mode is None:
        return CheckResult("persistence mode", "unknown", "NVML does not report the persistence mode")
    if mode:
        return CheckResult("persistence mode", "ok", "on")
    return CheckResult(
        "persistence mode",
        "warning",
        "off",
        "each new process waits a second or more until the driver is ready",
        f"sudo nvidia-smi -i {index} -pm 1",
    )


def _check_ecc(sensors: NvmlSensors) -> CheckResult:
    modes = sensors.call_or_none(sensors.nvml.nvmlDeviceGetEccMode)
    if modes is None:
        return CheckResult("ECC", "unknown", "the device does not report whether ECC is on")
    current, pending = (bool(mode) for mode in modes)
    if current == pending:
        return CheckResult("ECC", "ok", "on" if current else "off")
    return CheckResult(
        "ECC",
        "warning",
        "ECC changes at the next reset",
        "rates before and after the reset differ",
        "sudo nvidia-smi -r",
    )


def _check_other_devices(sensors: NvmlSensors) -> CheckResult:
    nvml = sensors.nvml
    uuid = sensors.call_or_none(nvml.nvmlDeviceGetUUID)
    busy_count = 0
    for index in range(sensors.call_system_or_none(nvml.nvmlDeviceGetCount) or 0):
        handle = sensors.call_system_or_none(nvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:  # A container may hide the card.
            continue
        sibling = NvmlSensors(nvml, handle)
        rates = sibling.call_or_none(nvml.nvmlDeviceGetUtilizationRates)
        busy_count += bool(sibling.call_or_none(nvml.nvmlDeviceGetUUID) != uuid and rates and rates.gpu > 5)
    if not busy_count:
        return CheckResult(SIBLING_CHECK, "ok", "no other device of this machine is busy")
    return CheckResult(
        SIBLING_CHECK,
        "warning",
        f"other devices of this machine that are busy: {busy_count}",
        "the devices share power and cooling, so rates under sustained load are a few percent lower",
        "nvidia-smi   # wait until the other devices are idle",
    )
