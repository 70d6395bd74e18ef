"""mamf: the maximum achievable matmul FLOPS of an accelerator, and how close a kernel comes.

    import mamf

    backend = mamf.open_backend("auto")
    for row in mamf.sweep(mamf.matmul_grid([4096], [4096], [1024, 2048]), backend=backend):
        print(row.shape, row.status, row.summary and row.tflops("median"))

Everything is loaded when first used: ``import mamf`` imports neither torch nor numpy.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Backend": "mamf.backend",
    "Ceiling": "mamf.ceilings.ceiling",
    "DeviceInfo": "mamf.backend",
    "MamfError": "mamf.errors",
    "MatmulGrid": "mamf.operations.matmul.shapes",
    "MatmulKernel": "mamf.kernel",
    "MatmulProblem": "mamf.kernel",
    "MatmulShape": "mamf.operations.matmul.shapes",
    "Measurement": "mamf.measure",
    "Plan": "mamf.strategies.shapes",
    "RunLog": "mamf.logs.run_log",
    "KernelsPlan": "mamf.plans",
    "Operation": "mamf.operation",
    "attention": "mamf.api",
    "compare": "mamf.logs.compare",
    "find": "mamf.api",
    "measure_kernels": "mamf.api",
    "find_best": "mamf.ceilings.search",
    "load_ceiling": "mamf.api",
    "matmul_grid": "mamf.operations.matmul.shapes",
    "open_backend": "mamf.discovery",
    "parse_range": "mamf.operations.matmul.shapes",
    "read_run_log": "mamf.logs.run_log",
    "sweep": "mamf.api",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mamf' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
