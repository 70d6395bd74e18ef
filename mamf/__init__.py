"""mamf measures the maximum achievable matmul FLOPS of an accelerator, and how close a kernel comes to it.

    import mamf

    backend = mamf.open_backend("auto")
    for row in mamf.sweep(mamf.matmul_grid([4096], [4096], [1024, 2048]), backend=backend):
        print(row.shape, row.status, row.ok and row.tflops)

Names are loaded on first use: ``import mamf`` imports neither torch nor numpy.
"""

from __future__ import annotations

import importlib
from typing import Any

from mamf.measurement import NotebookTable

_MODULE_BY_NAME = {
    # measuring
    "CeilingSearch": "mamf.api.measuring",
    "Rows": "mamf.api.measuring",
    "attention": "mamf.api.measuring",
    "bandwidth": "mamf.api.measuring",
    "find": "mamf.api.measuring",
    "measure_kernels": "mamf.api.measuring",
    "open_backend": "mamf.plugins.discovery",
    "make_problem": "mamf.operations.matmul.operation",
    "search": "mamf.api.measuring",
    "sweep": "mamf.api.measuring",
    # problems and shapes
    "AttentionProblem": "mamf.operations.attention.operation",
    "AttentionShape": "mamf.operations.attention.operation",
    "BandwidthProblem": "mamf.operations.bandwidth.operation",
    "BandwidthShape": "mamf.operations.bandwidth.operation",
    "MatmulGrid": "mamf.operations.matmul.shapes",
    "MatmulProblem": "mamf.operations.matmul.shapes",
    "MatmulShape": "mamf.operations.matmul.shapes",
    "ModelProblem": "mamf.operations.model.operation",
    "ModelShape": "mamf.operations.model.operation",
    "find_best": "mamf.engine.search.search",
    "matmul_grid": "mamf.operations.matmul.shapes",
    "parse_range": "mamf.operation",
    # results
    "Ceiling": "mamf.ceilings.ceiling",
    "Measurement": "mamf.measurement",
    "Rate": "mamf.measurement",
    # MFU and MAMFU (the FLOPS of a model as a share of the maximum achievable matmul FLOPS)
    "Meter": "mamf.integrations.meter",
    "ModelFlops": "mamf.integrations.model_flops",
    "StepFigures": "mamf.integrations.meter",
    "count_flops": "mamf.integrations.flop_counter",
    "model_flops": "mamf.integrations.model_flops",
    "peak": "mamf.contribution.known_ceilings",
    # run logs
    "Comparison": "mamf.logs.compare",
    "FinderRun": "mamf.logs.legacy",
    "Review": "mamf.contribution.review",
    "RunLog": "mamf.logs.run_log",
    "check": "mamf.api.reading",
    "compare": "mamf.api.reading",
    "import_logs": "mamf.api.reading",
    "load_ceiling": "mamf.api.reading",
    "read_log": "mamf.api.reading",
    "write_imported": "mamf.api.reading",
    # charts
    "plot": "mamf.api.reading",
    # interfaces for plugins: backends, kernels and operations
    "AttentionKernel": "mamf.operations.attention.operation",
    "Backend": "mamf.backend",
    "DeviceInfo": "mamf.backend",
    "Kernel": "mamf.kernel",
    "MatmulKernel": "mamf.operations.matmul.shapes",
    "Operation": "mamf.operation",
    # plans of runs
    "Plan": "mamf.plans",
    "SearchOptions": "mamf.operations.matmul.shapes",
    # errors
    "DeviceError": "mamf.errors",
    "IncomparableError": "mamf.errors",
    "LogMismatchError": "mamf.errors",
    "MamfError": "mamf.errors",
    "MamfWarning": "mamf.errors",
    "RunLogError": "mamf.errors",
    "RunLogWriteError": "mamf.errors",
    "UnavailableError": "mamf.errors",
    "UnknownNameError": "mamf.errors",
    "UnsupportedError": "mamf.errors",
    "UsageError": "mamf.errors",
}
__all__ = sorted(_MODULE_BY_NAME)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("mamf")
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'mamf' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)


# Import mamf.kinds.notebook only when a notebook first shows an object, because it imports all report modules.
NotebookTable.render = staticmethod(lambda table: importlib.import_module("mamf.kinds.notebook").render_html(table))


def __dir__() -> list[str]:
    return __all__
