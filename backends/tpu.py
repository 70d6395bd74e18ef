"""Tell users of Google TPUs why mamf cannot measure them: neither torch package for TPUs can time a launch.

This follows from the code of torch_tpu 0.2.0 (its wheel) and of torch_xla (pytorch/xla 41398bf):

- An event of torch_tpu does not wait for kernels, but only for copies to the host that were queued before the event was
  recorded. So the elapsed_time of two events measures only the host. (In earlier releases, elapsed_time raises an
  error.)
- torch.tpu.synchronize also waits only for copies, as its documentation says. A function that waits for all work
  exists, but it is internal (torch_tpu._internal.sync).
- torch_xla has no events. It collects launches in a graph, and drops matmuls from the graph if another launch
  overwrites their result.
"""

from __future__ import annotations

from mamf.backend import Unavailability
from mamf.machine.environment import get_package_version
from mamf.torch_backend import HostTimedBackend

_REASON_BY_UNUSABLE_PACKAGE = {
    "torch_tpu": "the package's events and synchronize wait for copies to the host, not for kernels",
    "torch_xla": "the package merges launches into a graph and has no events",
}
_REMEDY = "not possible yet (traces of xprof show device times, but mamf cannot use them: pip install xprof)"


class TpuBackend(HostTimedBackend):
    """A backend that is never available, because no torch package can wait for a TPU's kernels to end."""

    name = "tpu"
    device_type = "tpu"

    @classmethod
    def explain_unavailability(cls) -> Unavailability:
        installed = {name: version for name in _REASON_BY_UNUSABLE_PACKAGE if (version := get_package_version(name))}
        reasons = [
            f"{name} {version} cannot time a launch: {_REASON_BY_UNUSABLE_PACKAGE[name]}"
            for name, version in installed.items()
        ]
        return Unavailability(
            "; ".join(reasons)
            or f"mamf cannot time launches on a TPU, neither with {' nor with '.join(_REASON_BY_UNUSABLE_PACKAGE)}",
            _REMEDY,
        )

    @classmethod
    def count_devices(cls) -> int:
        return 0


# Let Python accept this class without the abstract methods, because mamf never creates a TpuBackend.
TpuBackend.__abstractmethods__ = frozenset()
