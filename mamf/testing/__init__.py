"""What a third party needs to test an adapter: the contracts as test suites, and an accelerator in virtual time.

    class TestMyBackend(BackendContract):
        @pytest.fixture
        def backend(self):
            return MyBackend(0)

The suites need pytest (``pip install mamf[test]``); the simulated backend needs nothing.
"""

from __future__ import annotations

from typing import Any

from mamf.testing.simulated import Physics, SimulatedBackend
from mamf.testing.simulated_kernels import SimulatedAttention, SimulatedBandwidth, SimulatedMatmul

__all__ = [
    "BackendContract",
    "KernelContract",
    "Physics",
    "SimulatedAttention",
    "SimulatedBackend",
    "SimulatedBandwidth",
    "SimulatedMatmul",
]


def __getattr__(name: str) -> Any:
    if name in ("BackendContract", "KernelContract"):
        from mamf.testing import contracts

        return getattr(contracts, name)
    raise AttributeError(f"module 'mamf.testing' has no attribute {name!r}")
