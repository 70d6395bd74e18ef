"""pynvml, amdsmi and pyhlml, as far as mamf asks them: the units are the libraries', each query can be refused."""

import os
from types import SimpleNamespace


class SimulatedLibrary:
    """Answers by name. ``refused`` queries raise the library's error, ``missing`` ones an older release lacks."""

    error = RuntimeError
    answers: dict = {}  # noqa: RUF012 each library's own, never changed

    def __init__(self, calls):
        self.calls = calls
        self.refused = set()
        self.refuses_all = False
        self.missing = set()

    def __getattr__(self, name):
        if name not in self.answers or name in self.missing:
            raise AttributeError(name)

        def query(*arguments):
            self.calls.append((name,))
            if self.refuses_all or name in self.refused:
                raise self.error(f"{name}: Insufficient Permissions")
            return self.answers[name](self, *arguments)

        return query


class NVMLError(Exception):
    pass


def nvml_card(index, properties):
    """One card's state: milliwatts, millijoules, megahertz, degrees Celsius."""
    return SimpleNamespace(
        index=index,
        uuid=f"GPU-{properties.uuid}",
        address=f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0",
        clocks={1: 1755 + index, 2: 2619},
        highest={1: 1980, 2: 2619},
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
        utilization=SimpleNamespace(gpu=0),
    )


class SimulatedNvml(SimulatedLibrary):
    """Numbered as the driver does: all cards, whatever CUDA_VISIBLE_DEVICES shows torch."""

    NVMLError = error = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, calls, properties):
        super().__init__(calls)
        self.cards = [nvml_card(index, each) for index, each in enumerate(properties)]
        self.cuda_version = 13000
        self.forbidden = set()

    def by(self, what, value):
        self.calls.append((f"by {what}", value.decode()))
        for card in self.cards:
            if getattr(card, what) == value.decode():
                return card
        raise NVMLError("Not Found")

    def by_index(self, index):
        if index in self.forbidden:
            raise NVMLError("Insufficient Permissions")
        return self.cards[index]

    answers = {  # noqa: RUF012
        "nvmlInit": lambda self: None,
        "nvmlSystemGetCudaDriverVersion": lambda self: self.cuda_version,
        "nvmlSystemGetDriverVersion": lambda self: "580.65.06",
        "nvmlDeviceGetCount": lambda self: len(self.cards),
        "nvmlDeviceGetHandleByUUID": lambda self, uuid: self.by("uuid", uuid),
        "nvmlDeviceGetHandleByPciBusId": lambda self, address: self.by("address", address),
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetIndex": lambda self, card: card.index,
        "nvmlDeviceGetUUID": lambda self, card: card.uuid,
        "nvmlDeviceGetClockInfo": lambda self, card, which: card.clocks[which],
        "nvmlDeviceGetMaxClockInfo": lambda self, card, which: card.highest[which],
        "nvmlDeviceGetApplicationsClock": lambda self, card, which: card.application,
        "nvmlDeviceGetPowerUsage": lambda self, card: card.power,
        "nvmlDeviceGetTotalEnergyConsumption": lambda self, card: card.energy,
        "nvmlDeviceGetTemperature": lambda self, card, which: card.temperature,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda self, card: card.reasons,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda self, card: card.reasons,
        "nvmlDeviceGetEnforcedPowerLimit": lambda self, card: card.limit,
        "nvmlDeviceGetPowerManagementDefaultLimit": lambda self, card: card.default_limit,
        "nvmlDeviceGetPersistenceMode": lambda self, card: card.persistence,
        "nvmlDeviceGetEccMode": lambda self, card: card.ecc,
        "nvmlDeviceGetComputeRunningProcesses": lambda self, card: card.processes,
        "nvmlDeviceGetUtilizationRates": lambda self, card: card.utilization,
    }


class AmdSmiException(Exception):
    pass


class SimulatedAmdSmi(SimulatedLibrary):
    """Watts and megahertz, energy in counts of ``counter_resolution`` microjoules, the power cap in microwatts."""

    AmdSmiException = error = AmdSmiException
    AmdSmiClkType = SimpleNamespace(GFX="gfx")
    AmdSmiTemperatureType = SimpleNamespace(HOTSPOT="hotspot")
    AmdSmiTemperatureMetric = SimpleNamespace(CURRENT="current")

    def __init__(self, calls):
        super().__init__(calls)
        self.clock = {"clk": 1850, "min_clk": 132, "max_clk": 2100}
        self.power = {"current_socket_power": 742, "average_socket_power": "N/A", "power_limit": 750_000_000}
        self.energy = {"energy_accumulator": 2_000_000, "counter_resolution": 15.259, "timestamp": 1}
        self.celsius = 71
        self.violations = dict.fromkeys(
            ("active_ppt_pwr", "active_socket_thrm", "active_hbm_thrm", "active_vr_thrm", "active_prochot_thrm"), False
        )

    def by_address(self, address):
        self.calls.append(("by address", address))
        return "handle"

    answers = {  # noqa: RUF012
        "amdsmi_init": lambda self: None,
        "amdsmi_get_processor_handle_from_bdf": by_address,
        "amdsmi_get_clock_info": lambda self, handle, domain: self.clock,
        "amdsmi_get_power_info": lambda self, handle: self.power,
        "amdsmi_get_power_cap_info": lambda self, handle: {"power_cap": 750_000_000},
        "amdsmi_get_energy_count": lambda self, handle: self.energy,
        "amdsmi_get_temp_metric": lambda self, handle, sensor, metric: self.celsius,
        "amdsmi_get_violation_status": lambda self, handle: self.violations,
        "amdsmi_get_gpu_device_uuid": lambda self, handle: "d1ff74a1-0000-1000-8000-000000000000",
    }


class SimulatedHlml(SimulatedLibrary):
    """Megahertz, milliwatts, degrees Celsius."""

    answers = {  # noqa: RUF012
        "hlmlInit": lambda self: None,
        "hlmlDeviceGetHandleByIndex": lambda self, index: index,
        "hlmlDeviceGetClockInfo": lambda self, handle, which: 1600,
        "hlmlDeviceGetPowerUsage": lambda self, handle: 812_000,
        "hlmlDeviceGetTemperature": lambda self, handle, which: 55,
    }
