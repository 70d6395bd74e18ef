"""Simulate pynvml, amdsmi and pyhlml, as far as mamf calls them.

Values have the units of the real libraries, and a test can let any query fail. Parameters, constants and keys are those
of the real libraries: test_vendor_interfaces.py compares the parameters and constants with vendor_interfaces.json.
"""

import os
from enum import IntEnum
from types import SimpleNamespace


class SimulatedLibrary:
    """A library with the functions in ``answers``.

    A function in ``refused`` raises the library's error. A function in ``missing`` does not exist, as in an older
    release.
    """

    error = RuntimeError
    answers: dict = {}  # noqa: RUF012 each class has its own dict, which never changes

    def __init__(self, calls):
        self.calls = calls
        self.refused = set()
        self.refuses_all = False
        self.missing = set()

    def __getattr__(self, name):
        if name not in self.answers or name in self.missing:
            raise AttributeError(name)

        def query(*arguments, **keywords):
            self.calls.append((name,))
            if self.refuses_all or name in self.refused:
                raise self.error(f"{name}: Insufficient Permissions")
            return self.answers[name](self, *arguments, **keywords)

        return query


class NVMLError(Exception):
    pass


class NVMLLibraryMismatchError(Exception):
    """The error of a query with several versions if the driver supports none of them. It is not an NVMLError."""


def nvml_card(index, properties):
    """Return the state of a card in NVML's units: milliwatts, millijoules, megahertz and degrees Celsius."""
    return SimpleNamespace(
        index=index,
        uuid=f"GPU-{properties.uuid}",
        address=f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0",
        clocks={1: 1755 + index, 2: 2619},
        max_clocks={1: 1980, 2: 2619},
        application=1980,
        power=684_500,
        energy=123_456_789,
        temperature=61,
        reasons=0,
        limit=700_000,
        default_limit=700_000,
        persistence=1,
        ecc=[1, 1],
        processes=[SimpleNamespace(pid=os.getpid())],
        mps=[],
        virtualization=0,
        utilization=SimpleNamespace(gpu=0),
    )


class SimulatedNvml(SimulatedLibrary):
    """A simulated NVML. It numbers all cards, even those that CUDA_VISIBLE_DEVICES hides from torch."""

    NVMLError = error = NVMLError
    NVMLLibraryMismatchError = NVMLLibraryMismatchError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, calls, properties):
        super().__init__(calls)
        self.cards = [nvml_card(index, each) for index, each in enumerate(properties)]
        self.cuda_version = 13000

    def find_card(self, attribute, value):
        self.calls.append((f"by {attribute}", value.decode()))
        for card in self.cards:
            if getattr(card, attribute) == value.decode():
                return card
        raise NVMLError("Not Found")

    def find_card_by_uuid(self, uuid):
        return self.find_card("uuid", uuid)

    def find_card_by_address(self, pciBusId):
        return self.find_card("address", pciBusId)

    def find_card_by_index(self, index):
        return self.cards[index]

    answers = {  # noqa: RUF012
        "nvmlInit": lambda self: None,
        "nvmlSystemGetCudaDriverVersion": lambda self: self.cuda_version,
        "nvmlSystemGetDriverVersion": lambda self: "580.65.06",
        "nvmlDeviceGetCount": lambda self: len(self.cards),
        "nvmlDeviceGetHandleByUUID": find_card_by_uuid,
        "nvmlDeviceGetHandleByPciBusId": find_card_by_address,
        "nvmlDeviceGetHandleByIndex": find_card_by_index,
        "nvmlDeviceGetIndex": lambda self, handle: handle.index,
        "nvmlDeviceGetUUID": lambda self, handle: handle.uuid,
        "nvmlDeviceGetClockInfo": lambda self, handle, type: handle.clocks[type],
        "nvmlDeviceGetMaxClockInfo": lambda self, handle, type: handle.max_clocks[type],
        "nvmlDeviceGetApplicationsClock": lambda self, handle, type: {self.NVML_CLOCK_SM: handle.application}[type],
        "nvmlDeviceGetPowerUsage": lambda self, handle: handle.power,
        "nvmlDeviceGetTotalEnergyConsumption": lambda self, handle: handle.energy,
        "nvmlDeviceGetTemperature": lambda self, handle, sensor: {self.NVML_TEMPERATURE_GPU: handle.temperature}[
            sensor
        ],
        "nvmlDeviceGetCurrentClocksEventReasons": lambda self, handle: handle.reasons,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda self, handle: handle.reasons,
        "nvmlDeviceGetEnforcedPowerLimit": lambda self, handle: handle.limit,
        "nvmlDeviceGetPowerManagementDefaultLimit": lambda self, handle: handle.default_limit,
        "nvmlDeviceGetPersistenceMode": lambda self, handle: handle.persistence,
        "nvmlDeviceGetEccMode": lambda self, handle: handle.ecc,
        "nvmlDeviceGetComputeRunningProcesses": lambda self, handle: handle.processes,
        "nvmlDeviceGetMPSComputeRunningProcesses": lambda self, handle: handle.mps,
        "nvmlDeviceGetVirtualizationMode": lambda self, handle: handle.virtualization,
        "nvmlDeviceGetUtilizationRates": lambda self, handle: handle.utilization,
    }


class AmdSmiException(Exception):
    pass


class AmdSmiInitFlags(IntEnum):
    INIT_AMD_GPUS = 2


class AmdSmiClkType(IntEnum):
    GFX = 0


class AmdSmiTemperatureType(IntEnum):
    HOTSPOT = 1


class AmdSmiTemperatureMetric(IntEnum):
    CURRENT = 0


class SimulatedAmdSmi(SimulatedLibrary):
    """A simulated amdsmi, with power in watts, clocks in megahertz and the power cap in microwatts.

    Energy is a number of counts, each of which is ``counter_resolution`` microjoules.
    """

    AmdSmiException = error = AmdSmiException
    AmdSmiInitFlags = AmdSmiInitFlags
    AmdSmiClkType = AmdSmiClkType
    AmdSmiTemperatureType = AmdSmiTemperatureType
    AmdSmiTemperatureMetric = AmdSmiTemperatureMetric

    def __init__(self, calls):
        super().__init__(calls)
        self.clock = {"clk": 1850, "max_clk": 2100}
        self.power = {"current_socket_power": 742, "average_socket_power": "N/A"}
        self.energy = {"energy_accumulator": 2_000_000, "counter_resolution": 15.259}
        self.celsius = 71
        self.processes = [{"pid": os.getpid(), "mem": 2**30}]
        causes = ("ppt", "socket_thm", "hbm_thm", "vr_thm", "prochot")
        self.metrics = {f"{cause}_residency_acc": 1000 for cause in causes}

    def find_handle_by_address(self, bdf):
        self.calls.append(("by address", bdf))
        return "handle"

    def read_clock_info(self, processor_handle, clock_type):
        assert type(clock_type) is AmdSmiClkType
        return self.clock

    def read_temperature(self, processor_handle, sensor_type, metric):
        assert (type(sensor_type), type(metric)) == (AmdSmiTemperatureType, AmdSmiTemperatureMetric)
        return self.celsius

    answers = {  # noqa: RUF012
        "amdsmi_init": lambda self, flag=AmdSmiInitFlags.INIT_AMD_GPUS: None,
        "amdsmi_get_processor_handle_from_bdf": find_handle_by_address,
        "amdsmi_get_clock_info": read_clock_info,
        "amdsmi_get_gpu_process_list": lambda self, processor_handle: self.processes,
        "amdsmi_get_power_info": lambda self, processor_handle: self.power,
        "amdsmi_get_power_cap_info": lambda self, processor_handle: {"power_cap": 750_000_000},
        "amdsmi_get_energy_count": lambda self, processor_handle: self.energy,
        "amdsmi_get_temp_metric": read_temperature,
        "amdsmi_get_gpu_metrics_info": lambda self, processor_handle: dict(self.metrics),
        "amdsmi_get_gpu_device_uuid": lambda self, processor_handle: "d1ff74a1-0000-1000-8000-000000000000",
    }


class HLMLError(Exception):
    pass


class SimulatedHlml(SimulatedLibrary):
    """A simulated pyhlml, with clocks in megahertz, power in milliwatts and temperatures in degrees Celsius."""

    HLMLError = error = HLMLError
    answers = {  # noqa: RUF012
        "hlmlInit": lambda self: None,
        "hlmlDeviceGetHandleByIndex": lambda self, index: index,
        "hlmlDeviceGetClockInfo": lambda self, device, clock_type=0: {0: 1600}[clock_type],
        "hlmlDeviceGetPowerUsage": lambda self, device: 812_000,
        "hlmlDeviceGetTemperature": lambda self, device, sensor_type: {0: 55}[sensor_type],
    }
