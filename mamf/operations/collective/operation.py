"""The operation ``collective``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from mamf.backend import MIB, Backend, DeviceInfo
from mamf.measurement import TERA, Measurement
from mamf.operation import Operation
from mamf.operations.collective.kernel import CollectiveKernel
from mamf.operations.collective.shapes import CollectiveProblem, CollectiveShape

_SIZES = tuple(CollectiveShape(size * MIB) for size in (1, 16, 128, 1024, 4096))
# The most memory for both buffers of the largest size: the device needs memory for other things too.
_SHARE_OF_MEMORY = 0.25


class CollectiveOperation(Operation[CollectiveProblem, CollectiveShape]):
    name = "collective"
    kernel_group = "mamf.collective_kernels"
    kernel_type = CollectiveKernel
    shape_type = CollectiveShape
    problem_type = CollectiveProblem
    shape_example = "1MiB"
    is_of_links = True

    def default_shapes(self, backend: Backend) -> Sequence[CollectiveShape]:
        """1 MiB to 4 GiB, limited by memory; for CPUs up to 16 MiB."""
        if not backend.is_accelerator:
            return _SIZES[:2]
        free = backend.free_memory()
        most = None if free is None else free * _SHARE_OF_MEMORY
        return [size for size in _SIZES if most is None or size == _SIZES[0] or size.nbytes <= most]

    def problem_for(self, backend: Backend, asked: Mapping[str, Any]) -> CollectiveProblem:
        """As in Operation; ``ranks`` defaults to the size of this process's group."""
        ranks = asked.get("ranks") or max(2, int(os.environ.get("WORLD_SIZE") or 0))
        return super().problem_for(backend, {**asked, "ranks": ranks})

    def columns(self, row: Measurement, info: DeviceInfo | None = None) -> Mapping[str, object]:
        """The algorithm bandwidth, in TB/s."""
        return {"size / time": row.shape.nbytes / row.seconds / TERA if row.ok else None}

    def axis(self, shape: CollectiveShape) -> float:
        """Bytes of a rank's larger buffer."""
        return float(shape.nbytes)
