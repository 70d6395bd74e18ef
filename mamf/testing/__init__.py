"""Test third-party plugins (backends, kernels, operations) with a pytest suite for each kind of plugin, and with a
simulated device that runs in virtual time. To test a backend, for example, write:

    class TestMyBackend(BackendContract):
        @pytest.fixture
        def backend(self):
            return MyBackend(0)

The suites need pytest (``pip install -e ".[test]"``). The simulated device needs no other package.
"""

from __future__ import annotations

import importlib
from typing import Any

from mamf.testing.simulated import Physics, SimulatedBackend
from mamf.testing.simulated_kernels import (
    SimulatedAttention,
    SimulatedBandwidth,
    SimulatedCollective,
    SimulatedCopies,
    SimulatedMatmul,
    SimulatedModel,
)

# Names of the pytest suites. They are imported on first use, because the simulated device must work without pytest.
_PYTEST_SUITE_NAMES = (
    "AnyKernelContract",
    "AttentionKernelContract",
    "BackendContract",
    "KernelContract",
    "OperationContract",
)
__all__ = [
    "Physics",
    "SimulatedAttention",
    "SimulatedBackend",
    "SimulatedBandwidth",
    "SimulatedCollective",
    "SimulatedCopies",
    "SimulatedMatmul",
    "SimulatedModel",
    *_PYTEST_SUITE_NAMES,
]


def __getattr__(name: str) -> Any:
    if name in _PYTEST_SUITE_NAMES:
        return getattr(importlib.import_module("mamf.testing.contracts"), name)
    raise AttributeError(f"module 'mamf.testing' has no attribute {name!r}")
