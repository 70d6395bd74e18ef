"""Multiply matrices with mamf's own kernels in Triton and Gluon.

Each dtype has a few promising configurations. mamf measures each of them as a separate kernel. Triton is installed with
torch on NVIDIA, AMD and Intel. It is faster than the vendors' libraries for some problems, mainly int8 on Hopper. Gluon
is part of Triton 3.6 and later. Unlike in Triton, a program in Gluon decides which warps load operands and which
multiply them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch

from mamf.backend import Backend, Unavailability
from mamf.dtypes import DTYPES
from mamf.errors import UnsupportedError, UsageError
from mamf.operations.compilation import explain_triton_unavailability, get_architecture_major_version
from mamf.operations.matmul.shapes import MatmulKernel, MatmulProblem, MatmulShape
from mamf.operations.matmul.torch_kernels import TorchMatmul, describe_busy_units

#: How programs share the tiles of C. ``tile``: each program computes one tile. ``persistent``: a launch has only as
#: many programs as the device runs at once, and each program computes several tiles. ``tma``: like ``persistent``, but
#: the kernel accesses the matrices through tensor descriptors.
TileSchedule = Literal["tile", "persistent", "tma"]
_CONFIGURATION_PATTERN = re.compile(r"(\d{1,4})x(\d{1,4})x(\d{1,4})/(\d{1,2})w(\d)s(?:/(persistent|tma))?", re.ASCII)


@dataclass(frozen=True)
class TritonConfiguration:
    """A configuration of the Triton matmul.

    - ``block_m``, ``block_n``: the numbers of rows and columns of a tile of C.
    - ``block_k``: the part of K that one iteration of the kernel's loop processes.
    - ``warps``: the number of warps of a program.
    - ``stages``: the number of iterations whose operands are loaded in advance.
    - ``schedule``: see TileSchedule.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    schedule: TileSchedule = "tile"

    @classmethod
    def parse(cls, text: str) -> TritonConfiguration:
        """Parse the text of a configuration, such as ``128x256x64/8w3s`` or ``128x256x64/8w3s/tma``.

        Raises UsageError if the text is malformed, or if Triton does not support the sizes.
        """
        match = _CONFIGURATION_PATTERN.fullmatch(text)
        if match is None:
            raise UsageError(
                f"{text!r} is not a configuration of kernel triton; "
                "write it like 128x256x64/8w3s, or 128x256x64/8w3s/tma"
            )
        *numbers, schedule = match.groups(default="tile")
        sizes = block_m, block_n, block_k, warps, stages = [int(number) for number in numbers]
        if any(size & (size - 1) for size in sizes[:4]) or min(sizes[:3]) < 16 or not (warps and stages):
            raise UsageError(
                f"{text!r} is not a configuration of kernel triton: blocks must be powers of 2 of at least 16, warps "
                "must be a power of 2, and stages must be at least 1"
            )
        return cls(block_m, block_n, block_k, warps, stages, cast("TileSchedule", schedule))

    def count_tiles(self, m: int, n: int) -> int:
        """Return the number of tiles that cover C, which has ``m`` rows and ``n`` columns."""
        return -(-m // self.block_m) * -(-n // self.block_n)

    def __str__(self) -> str:
        suffix = "" if self.schedule == "tile" else f"/{self.schedule}"
        return f"{self.block_m}x{self.block_n}x{self.block_k}/{self.warps}w{self.stages}s{suffix}"


_16_BIT_CONFIGURATIONS = (
    "128x256x64/8w3s/tma",
    "128x256x64/8w4s/tma",
    "128x256x64/8w4s",
    "256x128x64/8w3s/tma",
    "128x128x64/4w3s",
)
_FLOAT8_CONFIGURATIONS = (
    "128x256x128/8w3s/tma",
    "128x256x128/8w4s/tma",
    "128x256x128/8w3s",
    "256x128x128/8w3s/tma",
    "128x128x128/4w3s",
)
_FLOAT32_CONFIGURATIONS = ("128x128x16/8w3s", "64x128x16/4w3s", "64x64x16/4w3s")
#: The configurations for NVIDIA, mainly for Hopper, by dtype. The first configuration is the kernel's default.
_CUDA_CONFIGURATIONS_BY_DTYPE = {
    "bfloat16": _16_BIT_CONFIGURATIONS,
    "float16": _16_BIT_CONFIGURATIONS,
    "tf32": ("128x256x32/8w3s/tma", "128x256x32/8w4s", "128x128x32/4w3s"),
    "float32": _FLOAT32_CONFIGURATIONS,
    "float8_e4m3fn": _FLOAT8_CONFIGURATIONS,
    "float8_e5m2": _FLOAT8_CONFIGURATIONS,
    "int8": (
        "128x128x128/4w3s",
        "128x128x128/4w3s/persistent",
        "128x128x128/4w2s/tma",
        "128x256x128/8w3s",
        "128x256x128/8w3s/tma",
    ),
}
#: The configurations for other devices, by dtype. They need less shared memory than those for NVIDIA, because AMD's
#: CDNA 3 has only 64 KiB.
_NON_CUDA_CONFIGURATIONS_BY_DTYPE = {
    **dict.fromkeys(("bfloat16", "float16"), ("256x256x64/8w2s", "256x128x64/8w2s", "128x128x64/4w2s")),
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "int8"),
        ("256x256x128/8w2s", "256x128x128/8w2s", "128x128x128/4w2s"),
    ),
    "tf32": ("256x128x32/8w2s", "128x128x32/4w2s"),
    "float32": _FLOAT32_CONFIGURATIONS,
}


def list_triton_configurations(runtime: str, dtype: str) -> list[TritonConfiguration]:
    """Return the configurations that are worth trying for a dtype, most promising first.

    ``runtime``: the runtime of the backend, such as ``cuda``.
    """
    configuration_texts = _CUDA_CONFIGURATIONS_BY_DTYPE.get(dtype) if runtime == "cuda" else None
    return [TritonConfiguration.parse(text) for text in configuration_texts or _NON_CUDA_CONFIGURATIONS_BY_DTYPE[dtype]]


_FLOAT8_DTYPES = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
# The number of rows of tiles in a group. Tiles are numbered group by group, so that programs that run at the same time
# share operands in the cache.
_TILE_ROWS_PER_GROUP = 8
# The number of compute units to assume if a device does not report the number.
_ASSUMED_COMPUTE_UNITS = 64
# How many warps the persistent programs may have on one compute unit. Eight warps fill the registers of the unit: two
# programs with tiles of 128 x 128 and 4 warps each, or one program with a tile of 128 x 256 and 8 warps.
_MAX_WARPS_PER_UNIT = 8
_DESCRIPTOR_ALIGNMENT_BYTES = 16
_HOPPER_MAJOR_VERSION = 9


class TritonMatmul(TorchMatmul):
    """A matmul by mamf's Triton kernels in one configuration.

    - ``configuration_text``: the configuration, such as ``128x256x64/8w3s``; None: the most promising for the dtype.
    - ``compute_unit_count``: the number of compute units of the device, if known.
    """

    dtypes = ("bfloat16", "float16", "tf32", "float32", *_FLOAT8_DTYPES, "int8")
    output_dtypes_by_dtype = dict.fromkeys(_FLOAT8_DTYPES, ("bfloat16", "float16", "float32"))
    fast_accumulation_dtypes = _FLOAT8_DTYPES
    argument_description = "a configuration"

    def __init__(self, configuration_text: str | None = None, compute_unit_count: int | None = None) -> None:
        self.configuration = None if configuration_text is None else TritonConfiguration.parse(configuration_text)
        self.name = "triton" if configuration_text is None else f"triton[{self.configuration}]"
        self._compute_unit_count = compute_unit_count

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        return explain_triton_unavailability(backend, "torch.mm")

    def explain_unsupported_options(self, backend: Backend, problem: MatmulProblem) -> str | None:
        reason = super().explain_unsupported_options(backend, problem)
        if reason or not self._uses_descriptors:
            return reason
        if not supports_tensor_descriptors(backend):
            return (
                f"kernel {self.name} needs NVIDIA Hopper or newer, and a Triton with tensor descriptors: use a "
                "configuration without /tma"
            )
        if DTYPES[problem.dtype].itemsize != 2 and problem.layout != "nt":
            return f"kernel {self.name} needs --layout nt for {problem.dtype}, not {problem.layout}"
        return None

    def explain_unsupported_shape(self, problem: MatmulProblem, shape: MatmulShape) -> str | None:
        if not self._uses_descriptors:
            return None
        row_lengths = {
            "A": (shape.m if problem.layout[0] == "t" else shape.k, problem.dtype),
            "B": (shape.k if problem.layout[1] == "t" else shape.n, problem.b_dtype),
            "C": (shape.n, problem.out_dtype),
        }
        for name, (length, dtype) in row_lengths.items():
            if length * DTYPES[dtype].itemsize % _DESCRIPTOR_ALIGNMENT_BYTES:
                return (
                    f"{self.name} needs rows whose length is a multiple of {_DESCRIPTOR_ALIGNMENT_BYTES} bytes, but "
                    f"the rows of {name} have {length * DTYPES[dtype].itemsize} bytes: choose another shape"
                )
        return None

    @property
    def _uses_descriptors(self) -> bool:
        return self.configuration is not None and self.configuration.schedule == "tma"

    def list_variants(self, backend: Backend, problem: MatmulProblem, shape: MatmulShape) -> Sequence[TritonMatmul]:
        if self.configuration is not None:
            return (self,)
        kernels = (TritonMatmul(str(each)) for each in list_triton_configurations(backend.runtime, problem.dtype))
        return [
            each
            for each in kernels
            if each.explain_unsupported_options(backend, problem) is None
            and each.explain_unsupported_shape(problem, shape) is None
        ]

    def is_refusal(self, error: Exception) -> bool:
        """Return whether an error means that a configuration is too large for the device or does not compile."""
        from triton.errors import TritonError

        return isinstance(error, TritonError) or "PassManager::run failed" in str(error)

    def make_details(self, problem: MatmulProblem, shape: MatmulShape) -> Mapping[str, str]:
        """Return details for reports: the configuration, the number of busy compute units if some are idle, and how
        8-bit floats are summed.

        Hopper's tensor cores sum 8-bit floats with a precision of only 14 bits. So without fast accumulation, the
        kernel adds these sums to float32 accumulators after every block of K.
        """
        assert self.configuration is not None, "a prepared kernel has a configuration"
        busy_units = describe_busy_units(self.configuration.count_tiles(shape.m, shape.n), self._compute_unit_count)
        details = {"configuration": str(self.configuration), **busy_units}
        if problem.dtype not in _FLOAT8_DTYPES:
            return details
        float32_accumulation = f"in float32 after every {self.configuration.block_k} terms of K"
        return {**details, "accumulation": "fast" if problem.fast_accumulation else float32_accumulation}

    def configure_for_shape(self, backend: Backend, problem: MatmulProblem, shape: MatmulShape) -> TritonMatmul:
        return TritonMatmul(
            str(self.list_variants(backend, problem, shape)[0].configuration), backend.info.compute_units
        )

    def bind_operands(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        from mamf.operations.matmul import triton_kernels as kernels

        configuration = self.configuration
        assert configuration is not None, "a prepared kernel has a configuration"
        (m, k), n = a.shape, b.shape[1]
        # The schedule ``tile`` has one program per tile of C.
        program_count = configuration.count_tiles(m, n)
        if configuration.schedule != "tile":
            program_count = min(
                program_count,
                (self._compute_unit_count or _ASSUMED_COMPUTE_UNITS)
                * max(1, _MAX_WARPS_PER_UNIT // configuration.warps),
            )
        options: dict[str, Any] = {
            "BLOCK_M": configuration.block_m,
            "BLOCK_N": configuration.block_n,
            "BLOCK_K": configuration.block_k,
            "GROUP_M": _TILE_ROWS_PER_GROUP,
            **_choose_arithmetic_options(problem, configuration),
            "num_warps": configuration.warps,
            "num_stages": configuration.stages,
        }
        if configuration.schedule == "tma":
            kernel = kernels.multiply_with_descriptors[(program_count,)]
            arguments: tuple[Any, ...] = (*_make_tensor_descriptors(a, b, c, problem.layout, configuration), m, n, k)
            options |= {"IS_A_BY_COLUMNS": problem.layout[0] == "t", "IS_B_BY_COLUMNS": problem.layout[1] == "t"}
        else:
            kernel = kernels.multiply_with_pointers[(program_count,)]
            arguments = (a, b, c, m, n, k, *a.stride(), *b.stride())
            options["IS_K_WHOLE_BLOCKS"] = k % configuration.block_k == 0

        return partial(kernel, *arguments, **options), 1.0


def supports_tensor_descriptors(backend: Backend) -> bool:
    """Return whether the device supports tensor descriptors and the installed Triton can create them on the host."""
    has_hardware = backend.runtime == "cuda" and get_architecture_major_version(backend) >= _HOPPER_MAJOR_VERSION
    return has_hardware and importlib.util.find_spec("triton.tools.tensor_descriptor") is not None


def _choose_arithmetic_options(problem: MatmulProblem, configuration: TritonConfiguration) -> dict[str, Any]:
    """Return the options of the Triton kernel that set the precision of multiplications and sums."""
    import triton.language as tl

    is_precise_float8 = problem.dtype in _FLOAT8_DTYPES and not problem.fast_accumulation
    return {
        "SUM_DTYPE": tl.int32 if problem.dtype == "int8" else tl.float32,
        "INPUT_PRECISION": "tf32" if problem.dtype == "tf32" else "ieee",
        # This option has an effect only on Hopper. With None, sums have only the low precision of Hopper's tensor
        # cores.
        "MAX_IMPRECISE_STEPS": configuration.block_k if is_precise_float8 else None,
    }


def _make_tensor_descriptors(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, layout: str, configuration: TritonConfiguration
) -> list[Any]:
    """Make tensor descriptors of A, B and C in their memory layouts.

    The blocks of C have half the width of a tile, because the kernel stores a tile in two halves to save shared memory.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    a_block, b_block = [configuration.block_m, configuration.block_k], [configuration.block_k, configuration.block_n]
    if layout[0] == "t":
        a, a_block = a.t(), a_block[::-1]
    if layout[1] == "t":
        b, b_block = b.t(), b_block[::-1]
    blocks = ((a, a_block), (b, b_block), (c, [configuration.block_m, configuration.block_n // 2]))
    return [TensorDescriptor.from_tensor(operand, block) for operand, block in blocks]


# -- Gluon -------------------------------------------------------------------------------------------------------------


_GLUON_ARCHITECTURE = "sm_90"
_GLUON_TILE_PATTERN = re.compile(r"(128|192)x256/([2-8])s", re.ASCII)
#: The tiles to try, with as many stages as fit in shared memory, the most promising first.
_GLUON_TILES = ("128x256/4s", "192x256/3s")
_GLUON_TILE_COLUMNS = 256
# Four warps multiply one block of A at a time. The block has _GLUON_BLOCK_ROWS rows. The warps store C in blocks of
# _STORED_BLOCK_COLUMNS columns.
_GLUON_BLOCK_ROWS, _STORED_BLOCK_COLUMNS = 64, 128
# A row of a block of A or B has _GLUON_BLOCK_ROW_BYTES bytes, the longest row that shared memory can swizzle. The row
# stride of A, B and C must be a multiple of _GLUON_ROW_ALIGNMENT_BYTES bytes.
_GLUON_BLOCK_ROW_BYTES, _GLUON_ROW_ALIGNMENT_BYTES = 128, 16


class GluonMatmul(TorchMatmul):
    """A matmul by mamf's Gluon kernel for Hopper.

    ``tile``: the rows and columns of a tile of C, and the stages of the ring buffer of operands, such as
    ``192x256/3s``; None: the most promising tile.
    """

    dtypes = ("bfloat16", "float16")
    argument_description = "a tile"
    is_tried_by_default = False
    #: The number of programs of a launch. ``configure_for_shape`` sets it to the device's number of compute units.
    program_count = 1

    def __init__(self, tile: str | None = None) -> None:
        self.tile = tile or _GLUON_TILES[0]
        match = _GLUON_TILE_PATTERN.fullmatch(self.tile)
        if match is None:
            raise UsageError(f"{tile!r} is not a tile of kernel gluon; write it like {_GLUON_TILES[0]}")
        self.tile_rows, self.stages = int(match[1]), int(match[2])
        self.is_tile_given, self.name = tile is not None, f"gluon[{tile}]" if tile else "gluon"

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        if backend.info.architecture == _GLUON_ARCHITECTURE:
            return explain_triton_unavailability(backend, "torch.mm")
        return Unavailability(
            f"kernel gluon runs only on NVIDIA Hopper ({_GLUON_ARCHITECTURE})", "use the kernel torch.mm"
        )

    def list_variants(self, backend: Backend, problem: MatmulProblem, shape: MatmulShape) -> Sequence[MatmulKernel]:
        return (self,) if self.is_tile_given else [GluonMatmul(tile) for tile in _GLUON_TILES]

    def configure_for_shape(self, backend: Backend, problem: MatmulProblem, shape: MatmulShape) -> GluonMatmul:
        kernel = GluonMatmul(self.tile)
        kernel.program_count = backend.info.compute_units or 1
        return kernel

    def is_refusal(self, error: Exception) -> bool:
        """Return whether an error means that a tile does not compile, or needs more memory or registers than the
        device has.
        """
        from triton.errors import TritonError

        return isinstance(error, TritonError)

    def explain_unsupported_options(self, backend: Backend, problem: MatmulProblem) -> str | None:
        if problem.layout != "nt":
            return (
                f"kernel {self.name} needs A and B stored so that K is contiguous: use --layout nt, not "
                f"{problem.layout}"
            )
        return super().explain_unsupported_options(backend, problem)

    def explain_unsupported_shape(self, problem: MatmulProblem, shape: MatmulShape) -> str | None:
        if shape.k * 2 % _GLUON_ROW_ALIGNMENT_BYTES or shape.n * 2 % _GLUON_ROW_ALIGNMENT_BYTES:
            return (
                f"{self.name} needs N and K to be multiples of {_GLUON_ROW_ALIGNMENT_BYTES // 2}, not {shape.n} and "
                f"{shape.k}: choose another shape"
            )
        return None

    def make_details(self, problem: MatmulProblem, shape: MatmulShape) -> Mapping[str, str]:
        tile_count = -(-shape.m // self.tile_rows) * -(-shape.n // _GLUON_TILE_COLUMNS)
        return {"configuration": self.tile, **describe_busy_units(tile_count, self.program_count)}

    def bind_operands(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        try:
            from triton.experimental.gluon.language import NVMMASharedLayout
            from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

            from mamf.operations.matmul.gluon_kernels import multiply_with_warp_groups
        except (ImportError, AttributeError) as error:
            raise UnsupportedError(
                f"this release of Triton lacks the Gluon API of Triton 3.6 ({error}): run pip install --upgrade triton"
            ) from error
        (m, k), n, block_k = a.shape, b.shape[1], _GLUON_BLOCK_ROW_BYTES // a.element_size()
        descriptors = [
            TensorDescriptor.from_tensor(
                each, block, NVMMASharedLayout(_GLUON_BLOCK_ROW_BYTES, 8 * each.element_size(), 2)
            )
            for each, block in (
                (a, [_GLUON_BLOCK_ROWS, block_k]),
                (b.t(), [_GLUON_TILE_COLUMNS, block_k]),
                (c, [_GLUON_BLOCK_ROWS, _STORED_BLOCK_COLUMNS]),
            )
        ]
        kernel = multiply_with_warp_groups[
            (min(self.program_count, -(-m // self.tile_rows) * -(-n // _GLUON_TILE_COLUMNS)),)
        ]
        launch = partial(
            kernel,
            *(*descriptors, m, n, k),
            BLOCKS_PER_TILE=self.tile_rows // _GLUON_BLOCK_ROWS,
            STAGES=self.stages,
            GROUP_M=_TILE_ROWS_PER_GROUP,
            num_warps=4,
        )
        return launch, 1.0
