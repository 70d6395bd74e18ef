"""Writes measured ceilings in the GPU format of TraceLens (``--gpu_arch_json_path``).

Its format: docs of github.com/AMD-AGI/TraceLens, GPU Architecture Specifications. ``matrix_*`` are products; what it
calls ``vector_*`` is not measured here. Bytes are counted alike there: each operand read, each result written.
"""

from __future__ import annotations

from typing import Any

from mamf.ceilings.roof import MEMORY, Roofs
from mamf.dtypes import DTYPES
from mamf.regime_names import BURST, SUSTAINED

_DIGITS = 4


def tracelens_arch(roofs: Roofs, memory_bytes: int | None) -> dict[str, Any]:
    """``max_achievable_tflops`` in TFLOPS, ``mem_bw_gbps`` in GB/s, ``memory_gb`` in GiB as its own files have it.

    A trace is of a device at work: sustained where that is known, else burst; ``_regimes`` says which.
    """
    tflops: dict[str, float] = {}
    regimes: dict[str, str] = {}
    for (dtype, regime), ceiling in roofs.compute.items():
        name = f"matrix_{DTYPES[dtype].peak_name}"
        is_better = (regime == SUSTAINED, ceiling.rate) > (regimes.get(name) == SUSTAINED, tflops.get(name, 0.0))
        if is_better:
            tflops[name], regimes[name] = _rounded(ceiling.rate), regime
    found: dict[str, Any] = {"name": roofs.device}
    memory = roofs.bandwidth.get((MEMORY, SUSTAINED)) or roofs.bandwidth.get((MEMORY, BURST))
    if memory is not None:
        found["mem_bw_gbps"] = _rounded(1e3 * memory.rate)
        regimes["mem_bw_gbps"] = memory.regime
    if memory_bytes is not None:
        found["memory_gb"] = round(memory_bytes / 2**30)
    return {**found, "max_achievable_tflops": tflops, "_regimes": regimes, "_reference": "measured by mamf roofline"}


def _rounded(rate: float) -> float:
    return float(f"{rate:.{_DIGITS}g}")
