"""Multiply matrices with each algorithm that cuBLASLt's heuristic proposes. Support more dtypes than torch.mm.

``torch.mm`` runs only the heuristic's first proposal, which is not the fastest for some shapes. ``torch._int_mm`` gives
cuBLASLt no workspace, so it cannot run algorithms that need a workspace. Here each proposal is a separate kernel, and
mamf measures which one is fastest.

cuBLASLt expects column-major matrices, but torch stores matrices in row-major order. So these kernels let cuBLASLt
compute the transpose of C, as the transpose of B times the transpose of A.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from dataclasses import replace
from typing import Any

import torch

from mamf.backend import MIB, Backend, Unavailability
from mamf.dtypes import DTYPES
from mamf.errors import UnsupportedError
from mamf.operations.matmul import cublaslt_library
from mamf.operations.matmul.cublaslt_library import (
    COMPUTE_32F,
    COMPUTE_32F_FAST_TF32,
    COMPUTE_32I,
    COMPUTE_64F,
    CUDA_DATA_TYPE_BY_DTYPE,
    SCALE_MODE_BY_BLOCK_SIZE,
    CublasLtError,
    CublasLtLibrary,
    MatmulDescriptors,
    MatrixDescription,
)
from mamf.operations.matmul.scaled_formats import ScaledFormatMatmul, lay_out_scales
from mamf.operations.matmul.shapes import MatmulKernel, MatmulProblem, MatmulShape
from mamf.operations.matmul.torch_kernels import TorchMatmul
from mamf.operations.quantization import QuantizedOperand

_TORCH_C_MODULE: Any = torch._C
# The number of algorithms to request from cuBLASLt's heuristic, which lists the most promising algorithm first.
_REQUESTED_PROPOSAL_COUNT = 8
# The largest workspace that an algorithm may need. mamf allocates only as much as the algorithm needs.
_MAX_WORKSPACE_BYTES = 512 * MIB
_FLOAT8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
#: The output dtypes that cuBLASLt supports, by operand dtype.
_OUTPUT_DTYPES_BY_DTYPE = {
    "bfloat16": ("bfloat16", "float32"),
    "float16": ("float16", "float32"),
    "tf32": ("float32",),
    "float32": ("float32",),
    "float64": ("float64",),
    "int8": ("int32", "int8"),
    **dict.fromkeys(_FLOAT8_DTYPES, ("bfloat16", "float16", "float32")),
}
_COMPUTE_TYPE_BY_DTYPE = {"tf32": COMPUTE_32F_FAST_TF32, "float64": COMPUTE_64F, "int8": COMPUTE_32I}


class _CublasLtMatmul(MatmulKernel):
    """A matmul by cuBLASLt, with one variant per algorithm that its heuristic proposes.

    ``proposal_index``: the index of the proposed algorithm to run, where 0 is the most promising. None: run the most
    promising algorithm, and let ``list_variants`` return one kernel per algorithm.
    """

    base_name: str
    has_cheap_variants = True

    def __init__(self, proposal_index: int | None = None) -> None:
        self.proposal_index, self._is_proposal_given = proposal_index or 0, proposal_index is not None
        self.name = self.base_name if proposal_index is None else f"{self.base_name}[{proposal_index}]"

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        if backend.runtime != "cuda":
            return Unavailability("cuBLASLt runs on NVIDIA GPUs only", "use --backend cuda on an NVIDIA GPU")
        library = cublaslt_library.load_cublaslt()
        return library if isinstance(library, Unavailability) else super().explain_unavailability(backend)

    def list_variants(self, backend: Backend, problem: MatmulProblem, shape: MatmulShape) -> Sequence[MatmulKernel]:
        return (self,) if self._is_proposal_given else [type(self)(index) for index in range(_REQUESTED_PROPOSAL_COUNT)]

    def is_refusal(self, error: Exception) -> bool:
        return isinstance(error, CublasLtError) and error.is_refusal

    def make_matmul_launch(
        self,
        problem: MatmulProblem,
        a: MatrixDescription,
        b: MatrixDescription,
        c: torch.Tensor,
        alpha: float,
        objects_to_keep_alive: object,
    ) -> Callable[[], object]:
        """Return a function that launches C = alpha * A @ B.

        ``a``, ``b``: descriptions of the transposes of A and B. ``objects_to_keep_alive``: the tensors of A and B,
        whose memory must not be freed while the returned function exists.
        """
        library = cublaslt_library.load_cublaslt()
        if isinstance(library, Unavailability):
            raise UnsupportedError(str(library))
        device_index = c.device.index or 0
        output = MatrixDescription(
            CUDA_DATA_TYPE_BY_DTYPE[problem.out_dtype], c.shape[1], c.shape[0], c.shape[1], c.data_ptr()
        )
        compute_type = _COMPUTE_TYPE_BY_DTYPE.get(problem.dtype, COMPUTE_32F)
        scale_type = problem.out_dtype if problem.out_dtype in ("int32", "float64") else "float32"
        descriptors = MatmulDescriptors(
            *(library, _get_cublaslt_handle(library, device_index), (b, a, output)),
            *(compute_type, CUDA_DATA_TYPE_BY_DTYPE[scale_type], problem.fast_accumulation),
        )
        try:
            proposals = descriptors.request_proposals(_REQUESTED_PROPOSAL_COUNT, _MAX_WORKSPACE_BYTES)
            if self.proposal_index >= len(proposals):
                raise UnsupportedError(
                    f"{self.name} does not exist for this shape, because cuBLASLt proposes only {len(proposals)} "
                    "algorithms, numbered from 0: use a smaller number or another kernel"
                )
            workspace = _get_workspace(c.device, proposals[self.proposal_index].workspace_bytes)
        except BaseException:
            descriptors.destroy_descriptors()
            raise
        arguments = descriptors.make_launch_arguments(proposals[self.proposal_index], alpha, workspace.data_ptr())
        multiply, raw_stream = library.functions["cublasLtMatmul"], _TORCH_C_MODULE._cuda_getCurrentRawStream

        def launch() -> None:
            multiply(*arguments, raw_stream(device_index))

        weakref.finalize(launch, descriptors.destroy_descriptors, c, workspace, objects_to_keep_alive).atexit = False
        return launch


class CublasLt(_CublasLtMatmul, TorchMatmul):
    """The cuBLASLt kernel for operands without scales."""

    base_name = "cublaslt"
    supports_padding = True
    dtypes = tuple(_OUTPUT_DTYPES_BY_DTYPE)
    output_dtypes_by_dtype = _OUTPUT_DTYPES_BY_DTYPE
    fast_accumulation_dtypes = _FLOAT8_DTYPES

    def explain_unsupported_options(self, backend: Backend, problem: MatmulProblem) -> str | None:
        if DTYPES[problem.dtype].itemsize == 1 and problem.layout[:2] != "nt":
            return f"kernel {self.name} needs --layout nt for {problem.dtype}, not {problem.layout}"
        return super().explain_unsupported_options(backend, problem)

    def bind_operands(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        alpha = problem.compute_output_scale(a.shape[1])
        left, right = _describe_transposed_operand(a, problem.dtype), _describe_transposed_operand(b, problem.b_dtype)
        return self.make_matmul_launch(problem, left, right, c, alpha, (a, b)), alpha


class ScaledCublasLt(_CublasLtMatmul, ScaledFormatMatmul):
    """The cuBLASLt kernel for operands in scaled formats."""

    base_name = "cublaslt-scaled"
    dtypes = ("fp8_rowwise", "fp8_1x128_128x128", "fp8_1x128_1x128", "mxfp8", "nvfp4")

    def bind_operands(
        self, backend: Backend, problem: MatmulProblem, a: QuantizedOperand, b: QuantizedOperand, c: torch.Tensor
    ) -> Callable[[], object]:
        scales = [lay_out_scales(each, needs_swizzle=True) for each in (a, b)]
        left, right = (
            _describe_transposed_quantized_operand(each, scale) for each, scale in zip((a, b), scales, strict=True)
        )
        return self.make_matmul_launch(problem, left, replace(right, is_transposed=True), c, 1.0, (a, b, scales))


def _describe_transposed_operand(operand: torch.Tensor, dtype: str) -> MatrixDescription:
    """Describe the transpose of a matrix to cuBLASLt, which expects column-major matrices.

    A row-major matrix of torch is, in memory, its transpose in column-major order. ``dtype``: mamf's name of the dtype.
    """
    (rows, columns), (by_row, by_column) = operand.shape, operand.stride()
    if by_column == 1:
        return MatrixDescription(
            CUDA_DATA_TYPE_BY_DTYPE[dtype], columns, rows, max(by_row, columns), operand.data_ptr()
        )
    return MatrixDescription(
        CUDA_DATA_TYPE_BY_DTYPE[dtype], rows, columns, max(by_column, rows), operand.data_ptr(), is_transposed=True
    )


def _describe_transposed_quantized_operand(operand: QuantizedOperand, scales: torch.Tensor) -> MatrixDescription:
    """Describe the transpose of a quantized operand to cuBLASLt. ``scales``: the result of ``lay_out_scales``."""
    (rows, k), data_type = (
        operand.shape,
        CUDA_DATA_TYPE_BY_DTYPE[str(operand.packed_elements.dtype).removeprefix("torch.")],
    )
    mode = SCALE_MODE_BY_BLOCK_SIZE[operand.scaling.block_rows, operand.scaling.block_columns]
    return MatrixDescription(
        data_type, k, rows, k, operand.elements.data_ptr(), scales_address_and_mode=(scales.data_ptr(), mode)
    )


@functools.cache
def _get_cublaslt_handle(library: CublasLtLibrary, device: int) -> c_void_p:
    """Return the handle that cuBLASLt's functions need for a device. The device must be torch's current device."""
    return library.create_object("")


_WORKSPACE_BY_DEVICE: dict[torch.device, torch.Tensor] = {}


def _get_workspace(device: torch.device, min_bytes: int) -> torch.Tensor:
    """Return the workspace of a device, with at least ``min_bytes`` bytes.

    All launches on the device share this workspace, so they must not run on two streams at once.
    """
    workspace = _WORKSPACE_BY_DEVICE.get(device)
    if workspace is None or workspace.numel() < min_bytes:
        workspace = _WORKSPACE_BY_DEVICE[device] = torch.empty(min_bytes, dtype=torch.uint8, device=device)
    return workspace
