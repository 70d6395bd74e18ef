"""Google TPUs: known, and refused, because neither of their torch packages can time a launch.

Read in torch_tpu 0.2.0 (its wheel) and torch_xla (pytorch/xla 41398bf). An event of torch_tpu stands for the copies to
the host that were pending when it was recorded, not for a place in the device's queue. elapsed_time, for which earlier
releases raise, is the host's time between two notifications. torch.tpu.synchronize is documented to wait for these
copies; a barrier for all work is internal (torch_tpu._internal.sync). torch_xla traces launches into a graph, where
products whose result is overwritten disappear, and it has no events.
"""

from __future__ import annotations

from mamf.backend import Unavailable
from mamf.machine.environment import package_version
from mamf.torch_backend import HostTimedBackend

_PACKAGES = {
    "torch_tpu": "its events and its synchronize wait for copies to the host, not for kernels",
    "torch_xla": "it merges launches into a graph and has no events",
}
_REMEDY = "pip install xprof   # its traces hold the device's own times; mamf needs a barrier that waits for kernels"


class TpuBackend(HostTimedBackend):
    """Never opened: a host clock around a barrier that does not wait shows rates that no device reaches."""

    name = "tpu"
    device_type = "tpu"

    @classmethod
    def unavailable(cls) -> Unavailable:
        installed = {name: version for name in _PACKAGES if (version := package_version(name))}
        reasons = [f"{name} {version} cannot time a launch: {_PACKAGES[name]}" for name, version in installed.items()]
        return Unavailable("; ".join(reasons) or f"mamf can time neither {' nor '.join(_PACKAGES)}", _REMEDY)

    @classmethod
    def device_count(cls) -> int:
        return 0


# No device is ever opened, so there is no method to define for it.
TpuBackend.__abstractmethods__ = frozenset()
