"""Multiply matrices with the library quack-kernels (CuTe DSL), with one kernel for each of its configurations.

The library's own tuner compares configurations in a short loop, during which the clock of the device may change. mamf
does not use this tuner: each configuration is a variant of the kernel (``list_variants``), and mamf measures which
variant is fastest.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mamf.backend import Backend, Unavailability
from mamf.errors import UnsupportedError, UsageError
from mamf.operations.compilation import get_architecture_major_version
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.operations.matmul.torch_kernels import TorchMatmul

_CONFIGURATION_PATTERN = re.compile(r"(\d{2,3})x(\d{2,3})/c([12])x([12])(/pingpong)?", re.ASCII)
_ROW_ALIGNMENT_ELEMENTS = 8
#: The configurations to try, by the major version of NVIDIA's architecture. The first configuration is the default. In
#: ``256x192/c2x1``, a tile of C has 256 rows and 192 columns, and a cluster has 2 x 1 tiles. With ``pingpong``, two
#: groups of warps alternate: one group computes a tile, and the other group computes the next tile.
_CONFIGURATIONS_BY_ARCHITECTURE = {
    9: (
        "256x128/c2x1",
        "256x192/c2x1",
        "256x192/c1x2",
        "128x256/c2x1",
        "128x256/c1x2",
        "128x192/c2x1/pingpong",
    ),
    10: ("256x256/c2x1", "256x192/c2x1", "256x224/c2x1", "128x256/c2x1"),
}


class QuackMatmul(TorchMatmul):
    """A matmul by quack in one configuration.

    - ``configuration``: the configuration, such as ``256x192/c2x1``; None: the default configuration.
    - ``architecture_major``: the major version of the device's architecture: 9 for Hopper, 10 for Blackwell.

    Each configuration takes seconds to compile, so a search tries this kernel only if the user names it.
    """

    dtypes = ("bfloat16", "float16")
    argument_description = "a configuration"
    is_tried_by_default = False

    def __init__(self, configuration: str | None = None, architecture_major: int = 9) -> None:
        self.configuration, self._architecture_major = configuration, architecture_major
        if configuration is not None and _CONFIGURATION_PATTERN.fullmatch(configuration) is None:
            raise UsageError(f"{configuration!r} is not a configuration of kernel quack; write it like 256x192/c2x1")
        self.name = "quack" if configuration is None else f"quack[{configuration}]"

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        if backend.runtime != "cuda":
            return Unavailability("quack supports NVIDIA GPUs only", "use --backend cuda on an NVIDIA GPU")
        if get_architecture_major_version(backend) not in _CONFIGURATIONS_BY_ARCHITECTURE:
            return Unavailability("quack supports Hopper and Blackwell only", "use the kernel torch.mm")
        if importlib.util.find_spec("quack") is None:
            return Unavailability("quack-kernels is not installed", "pip install 'quack-kernels>=0.6.5,<0.7'")
        return None

    def explain_unsupported_shape(self, problem: MatmulProblem, shape: MatmulShape) -> str | None:
        row_lengths = {
            shape.m if problem.layout[0] == "t" else shape.k,
            shape.k if problem.layout[1] == "t" else shape.n,
            shape.n,
        }
        if any(length % _ROW_ALIGNMENT_ELEMENTS for length in row_lengths):
            return (
                f"{self.name} needs rows of A, B and C whose length in memory is a multiple of "
                f"{_ROW_ALIGNMENT_ELEMENTS} elements: choose another shape than {shape}, or another kernel"
            )
        return None

    def list_variants(self, backend: Backend, problem: MatmulProblem, shape: MatmulShape) -> Sequence[QuackMatmul]:
        if self.configuration is not None:
            return (self,)
        architecture_major = get_architecture_major_version(backend)
        return [
            QuackMatmul(configuration, architecture_major)
            for configuration in _CONFIGURATIONS_BY_ARCHITECTURE[architecture_major]
        ]

    def configure_for_shape(self, backend: Backend, problem: MatmulProblem, shape: MatmulShape) -> QuackMatmul:
        return QuackMatmul(self.configuration, get_architecture_major_version(backend))

    def is_refusal(self, error: Exception) -> bool:
        """Return whether an error means that CuTe DSL, or an assertion in quack, rejects the configuration."""
        return isinstance(error, AssertionError) or type(error).__module__.startswith("cutlass")

    def bind_operands(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        match = _CONFIGURATION_PATTERN.fullmatch(self._chosen_configuration)
        assert match is not None
        tile_m, tile_n, cluster_m, cluster_n = map(int, match.groups()[:4])
        try:
            from quack.gemm_config import GemmConfig
            from quack.gemm_interface import gemm_tuned

            run_gemm: Any = gemm_tuned.fn  # gemm_tuned would start the tuner; .fn only runs the matmul.
            config = GemmConfig(
                tile_m=tile_m,
                tile_n=tile_n,
                cluster_m=cluster_m,
                cluster_n=cluster_n,
                pingpong=match[5] is not None,
                is_dynamic_persistent=self._architecture_major == 10,
                device_capacity=self._architecture_major,
            )
        except (ImportError, AttributeError, TypeError) as error:
            raise UnsupportedError(
                f"this release of quack-kernels differs from 0.6 ({error}): run pip install 'quack-kernels>=0.6.5,<0.7'"
            ) from error
        return functools.partial(run_gemm, a, b, c, config=config), 1.0

    def make_details(self, problem: MatmulProblem, shape: MatmulShape) -> Mapping[str, str]:
        return {"configuration": self._chosen_configuration}

    @property
    def _chosen_configuration(self) -> str:
        return self.configuration or _CONFIGURATIONS_BY_ARCHITECTURE[self._architecture_major][0]
