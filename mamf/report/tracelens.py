"""Export the ceilings of a device for TraceLens (github.com/AMD-AGI/TraceLens).

The docs of TraceLens describe its format (``--gpu_arch_json_path``) under "GPU Architecture Specifications". The
``matrix_*`` fields of this format are rates of matmuls. mamf leaves out the ``vector_*`` fields, because it does not
measure them. TraceLens counts bytes as mamf does: each operand is read once, and each result is written once.
"""

from __future__ import annotations

from typing import Any

from mamf.ceilings.roof import MEMORY_LEVEL, Roofs
from mamf.dtypes import DTYPES
from mamf.measurement import find_rate
from mamf.plans import BURST, SUSTAINED
from mamf.report.document import format_four_digits


def make_tracelens_architecture(roofs: Roofs, memory_bytes: int | None) -> dict[str, Any]:
    """Return the ceilings of a device as an architecture file of TraceLens: ``max_achievable_tflops`` in TFLOPS,
    ``mem_bw_gbps`` in GB/s, and ``memory_gb`` in GiB, as in the files that TraceLens contains.

    Each rate is the sustained rate, because traces come from devices under load, or the burst rate if no sustained rate
    is known. ``_regimes`` contains the regime of each rate.
    """
    tflops: dict[str, float] = {}
    regimes: dict[str, str] = {}
    keys = dict.fromkeys((each.problem.dtype, each.regime) for each in roofs.matmul_ceilings.values())
    # Skip a dtype if it has only ceilings with an unusual output dtype. For this dtype, find_rate returns None.
    ceilings = filter(None, (find_rate(roofs.matmul_ceilings, *key) for key in keys))
    # If several ceilings have the same name, the last one replaces the others. So put sustained ceilings after burst
    # ceilings, and higher rates after lower rates.
    for ceiling in sorted(ceilings, key=lambda each: (each.regime == SUSTAINED, each.rate)):
        name = f"matrix_{DTYPES[ceiling.problem.dtype].datasheet_dtype}"
        tflops[name], regimes[name] = float(format_four_digits(ceiling.rate)), ceiling.regime
    architecture: dict[str, Any] = {"name": roofs.device}
    memory = roofs.bandwidth_ceilings.get((MEMORY_LEVEL, SUSTAINED)) or roofs.bandwidth_ceilings.get(
        (MEMORY_LEVEL, BURST)
    )
    if memory is not None:
        architecture["mem_bw_gbps"] = float(format_four_digits(1e3 * memory.rate))
        regimes["mem_bw_gbps"] = memory.regime
    if memory_bytes is not None:
        architecture["memory_gb"] = round(memory_bytes / 2**30)
    return {
        **architecture,
        "max_achievable_tflops": tflops,
        "_regimes": regimes,
        "_reference": "measured by mamf roofline",
    }
