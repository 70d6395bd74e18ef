"""Call the functions of libcublasLt that a matmul needs, with ctypes, for the kernels in cublaslt.py.

Importing this module does not load the library. Names and numbers are those of NVIDIA's cublasLt.h and library_types.h,
releases 12 and 13.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from ctypes import POINTER, byref, c_double, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p, sizeof
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mamf.backend import Unavailability

_SUPPORTED_MAJOR_VERSIONS = (13, 12)
#: The folders below site-packages where NVIDIA's wheels, and torch for Windows, install the library.
_LIBRARY_FOLDERS = (
    *("nvidia/cu13/lib", "nvidia/cublas/lib"),
    *("nvidia/cu13/bin/x86_64", "nvidia/cublas/bin", "torch/lib"),
)

#: The number of each dtype in CUDA's enumeration cudaDataType.
CUDA_DATA_TYPE_BY_DTYPE: Mapping[str, int] = {
    "float32": 0,
    "tf32": 0,
    "float64": 1,
    "float16": 2,
    "int8": 3,
    "int32": 10,
    "bfloat16": 14,
    "float8_e4m3fn": 28,
    "float8_e5m2": 29,
    "float4_e2m1fn_x2": 33,
}
#: The C type of the factors alpha and beta, by their cudaDataType. Other data types use a C float.
_SCALAR_TYPE_BY_DATA_TYPE: Mapping[int, Any] = {
    CUDA_DATA_TYPE_BY_DTYPE["float64"]: c_double,
    CUDA_DATA_TYPE_BY_DTYPE["int32"]: lambda value: c_int(int(value)),
}
COMPUTE_32F, COMPUTE_64F, COMPUTE_32I, COMPUTE_32F_FAST_TF32 = 68, 70, 72, 77
# The numbers that identify attributes of a matmul descriptor. The first group contains the numbers of TRANS,
# SCALE_POINTER and SCALE_MODE for A, and the second group those for B. The last number identifies FAST_ACCUM, which
# applies to the whole matmul.
_OPERAND_ATTRIBUTE_NUMBERS, _FAST_ACCUMULATION_ATTRIBUTE_NUMBER = ((3, 17, 31), (4, 18, 32)), 25
# The number that identifies the attribute MAX_WORKSPACE_BYTES of a matmul preference.
_MAX_WORKSPACE_ATTRIBUTE_NUMBER = 1
#: The value in the enumeration cublasLtMatmulMatrixScale_t for each block size (rows, columns). The values in a block
#: share a scale. If the number of columns is None, a block spans all of K.
SCALE_MODE_BY_BLOCK_SIZE: Mapping[tuple[int, int | None], int] = {
    (1, 16): 1,
    (1, 32): 2,
    (1, None): 3,
    (1, 128): 4,
    (128, 128): 5,
}

_STATUS_INVALID_VALUE, _STATUS_ARCH_MISMATCH, _STATUS_NOT_SUPPORTED = 7, 8, 15
_STATUS_NAME_BY_NUMBER = {
    1: "NOT_INITIALIZED",
    3: "ALLOC_FAILED",
    _STATUS_INVALID_VALUE: "INVALID_VALUE",
    _STATUS_ARCH_MISMATCH: "ARCH_MISMATCH",
    11: "MAPPING_ERROR",
    13: "EXECUTION_FAILED",
    14: "INTERNAL_ERROR",
    _STATUS_NOT_SUPPORTED: "NOT_SUPPORTED",
    16: "LICENSE_ERROR",
}


class AlgorithmStructure(ctypes.Structure):
    """The C structure cublasLtMatmulAlgo_t: an algorithm. Only the library reads its contents."""

    _fields_ = (("data", c_uint64 * 8),)


class AlgorithmProposal(ctypes.Structure):
    """The C structure cublasLtMatmulHeuristicResult_t: an algorithm that the heuristic proposes."""

    _fields_ = (
        ("algorithm", AlgorithmStructure),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


_MATMUL_FUNCTION_NAME = "cublasLtMatmul"
_OBJECT_POINTER_TYPE = POINTER(c_void_p)
_SET_ATTRIBUTE_PARAMETER_TYPES = (c_void_p, c_int, c_void_p, c_size_t)
#: The types of the parameters of each C function. All of these functions return a status.
PARAMETER_TYPES_BY_FUNCTION: Mapping[str, tuple[Any, ...]] = {
    "cublasLtCreate": (_OBJECT_POINTER_TYPE,),
    "cublasLtMatmulDescCreate": (_OBJECT_POINTER_TYPE, c_int, c_int),
    "cublasLtMatmulDescSetAttribute": _SET_ATTRIBUTE_PARAMETER_TYPES,
    "cublasLtMatmulDescDestroy": (c_void_p,),
    "cublasLtMatrixLayoutCreate": (_OBJECT_POINTER_TYPE, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatrixLayoutDestroy": (c_void_p,),
    "cublasLtMatmulPreferenceCreate": (_OBJECT_POINTER_TYPE,),
    "cublasLtMatmulPreferenceSetAttribute": _SET_ATTRIBUTE_PARAMETER_TYPES,
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    "cublasLtMatmulAlgoGetHeuristic": (*(c_void_p,) * 7, c_int, POINTER(AlgorithmProposal), POINTER(c_int)),
    _MATMUL_FUNCTION_NAME: (*(c_void_p,) * 14, c_size_t, c_void_p),
}


class CublasLtError(RuntimeError):
    """The error that CublasLtLibrary raises if a C function of libcublasLt returns a status other than success."""

    def __init__(self, function_name: str, status: int) -> None:
        super().__init__(f"{function_name} returned CUBLAS_STATUS_{_STATUS_NAME_BY_NUMBER.get(status, status)}")
        self.function_name, self.status = function_name, status

    @property
    def is_refusal(self) -> bool:
        """Whether the error means that the library or the device does not support the matmul.

        The status INVALID_VALUE has this meaning too, unless the launch itself returns it. Older releases of cuBLASLt
        return INVALID_VALUE for attributes and layouts that they do not know.
        """
        is_invalid = self.status == _STATUS_INVALID_VALUE and self.function_name != _MATMUL_FUNCTION_NAME
        return is_invalid or self.status in (_STATUS_NOT_SUPPORTED, _STATUS_ARCH_MISMATCH)


class CublasLtLibrary:
    """A loaded libcublasLt: its version (major, minor, patch), and its functions by name.

    A function raises CublasLtError if its status is not success.
    """

    def __init__(self, cdll: Any) -> None:
        cdll.cublasLtGetVersion.restype = c_size_t
        version_number = int(cdll.cublasLtGetVersion())
        self.version = version_number // 10000, version_number // 100 % 100, version_number % 100
        self.functions = {name: _declare_function(cdll, name) for name in PARAMETER_TYPES_BY_FUNCTION}

    def create_object(self, object_type: str, *arguments: object) -> c_void_p:
        """Create an object of the library, and return a pointer to it.

        ``object_type``: ``MatmulDesc``, ``MatrixLayout`` or ``MatmulPreference``; empty for a handle of the library.
        ``arguments``: further arguments of the C function that creates the object.
        """
        pointer = c_void_p()
        self.functions[f"cublasLt{object_type}Create"](byref(pointer), *arguments)
        return pointer

    def set_attribute(self, object_type: str, descriptor: c_void_p, attribute_number: int, value: Any) -> None:
        """Set an attribute of a descriptor of type ``object_type``, such as ``MatmulDesc``, to a ctypes value."""
        self.functions[f"cublasLt{object_type}SetAttribute"](descriptor, attribute_number, byref(value), sizeof(value))


def _declare_function(cdll: Any, name: str) -> Any:
    def raise_if_failed(status: int, function: object, arguments: object) -> None:
        if status:
            raise CublasLtError(name, status)

    function = getattr(cdll, name)
    function.argtypes, function.restype, function.errcheck = PARAMETER_TYPES_BY_FUNCTION[name], c_int, raise_if_failed
    return function


@functools.cache
def load_cublaslt() -> CublasLtLibrary | Unavailability:
    """Load the libcublasLt that torch uses, and return the library, or the reason why mamf cannot use it."""
    cdll = next(_load_candidate_libraries(), None)
    if cdll is None:
        return Unavailability("libcublasLt 12 or 13 was not found", "install a CUDA build of torch, which includes it")
    try:
        library = CublasLtLibrary(cdll)
    except AttributeError as error:  # The text of ctypes' error names the missing function.
        return Unavailability(f"this libcublasLt lacks a function: {error}", "use the kernel torch.mm")
    if library.version[0] not in _SUPPORTED_MAJOR_VERSIONS:
        version, usable = ".".join(map(str, library.version)), " and ".join(map(str, sorted(_SUPPORTED_MAJOR_VERSIONS)))
        return Unavailability(f"cuBLASLt {version} is not supported, only versions {usable}", "use the kernel torch.mm")
    return library


def _load_candidate_libraries() -> Iterator[Any]:
    """Load libcublasLt from each possible place, and yield the libraries: first the library that this process already
    uses, then the libraries in wheels, and last the library of the system.
    """
    is_windows = sys.platform == "win32"
    names = [
        f"cublasLt64_{major}.dll" if is_windows else f"libcublasLt.so.{major}" for major in _SUPPORTED_MAJOR_VERSIONS
    ]
    wheel_paths = [str(Path(root, folder, name)) for name in names for root in sys.path for folder in _LIBRARY_FOLDERS]
    # First try each name without a path. This finds a library that is already loaded, in whatever folder its file is.
    no_load_flag = getattr(os, "RTLD_NOLOAD", None)
    paths_and_modes = [] if no_load_flag is None else [(name, no_load_flag | os.RTLD_LAZY) for name in names]
    for path, mode in (*paths_and_modes, *((path, ctypes.DEFAULT_MODE) for path in (*wheel_paths, *names))):
        with suppress(OSError):
            yield ctypes.CDLL(path, mode)


@dataclass(frozen=True)
class MatrixDescription:
    """A description of a matrix in device memory that is stored by columns.

    - ``data_type``: the dtype, as a number of cudaDataType. ``address``: the address of the first element.
    - ``column_stride``: the number of elements from the start of a column to the start of the next one.
    - ``is_transposed``: whether the matmul uses the transpose of the matrix.
    - ``scales_address_and_mode``: the address of the scales, and their scaling mode (a value of
      SCALE_MODE_BY_BLOCK_SIZE); None if the matrix has no scales.
    """

    data_type: int
    rows: int
    columns: int
    column_stride: int
    address: int
    is_transposed: bool = False
    scales_address_and_mode: tuple[int, int] | None = None


class MatmulDescriptors:
    """cuBLASLt's descriptors of the matmul D = alpha op(A) op(B), where op may transpose a matrix.

    The descriptors exist until ``destroy_descriptors`` is called.

    - ``handle``: the library's handle for the device. ``matrices``: A, B and D.
    - ``compute_type``: the precision of the arithmetic, as a number of cublasComputeType_t.
    - ``scale_type``: the data type of alpha, as a number of cudaDataType.
    - ``fast_accumulation``: whether partial sums of 8-bit floats may have fewer bits.
    """

    def __init__(
        self,
        library: CublasLtLibrary,
        handle: c_void_p,
        matrices: tuple[MatrixDescription, MatrixDescription, MatrixDescription],
        compute_type: int,
        scale_type: int,
        fast_accumulation: bool = False,
    ) -> None:
        self._library, self._handle, self._matrices = library, handle, matrices
        self._created_objects: list[tuple[str, c_void_p]] = []
        self._scalar_type = _SCALAR_TYPE_BY_DATA_TYPE.get(scale_type, c_float)
        try:
            self._matmul_descriptor = self._create_object("MatmulDesc", compute_type, scale_type)
            for matrix, (transpose, pointer, mode) in zip(matrices[:2], _OPERAND_ATTRIBUTE_NUMBERS, strict=True):
                self._set_matmul_attribute(transpose, c_int(matrix.is_transposed))
                if matrix.scales_address_and_mode is not None:
                    self._set_matmul_attribute(mode, c_int(matrix.scales_address_and_mode[1]))
                    self._set_matmul_attribute(pointer, c_void_p(matrix.scales_address_and_mode[0]))
            if fast_accumulation:
                self._set_matmul_attribute(_FAST_ACCUMULATION_ATTRIBUTE_NUMBER, ctypes.c_int8(1))
            self._layouts = [
                self._create_object("MatrixLayout", each.data_type, each.rows, each.columns, each.column_stride)
                for each in matrices
            ]
        except CublasLtError:
            self.destroy_descriptors()
            raise

    def _create_object(self, object_type: str, *arguments: object) -> c_void_p:
        pointer = self._library.create_object(object_type, *arguments)
        self._created_objects.append((object_type, pointer))
        return pointer

    def _set_matmul_attribute(self, attribute_number: int, value: Any) -> None:
        self._library.set_attribute("MatmulDesc", self._matmul_descriptor, attribute_number, value)

    def request_proposals(self, count: int, workspace_bytes: int) -> list[AlgorithmProposal]:
        """Return up to ``count`` algorithms that the library's heuristic proposes, the most promising first.

        ``workspace_bytes``: the largest workspace that an algorithm may need.
        """
        preference, proposals, proposal_count = (
            self._create_object("MatmulPreference"),
            (AlgorithmProposal * count)(),
            c_int(),
        )
        self._library.set_attribute(
            "MatmulPreference", preference, _MAX_WORKSPACE_ATTRIBUTE_NUMBER, c_size_t(workspace_bytes)
        )
        a, b, d = self._layouts
        self._library.functions["cublasLtMatmulAlgoGetHeuristic"](
            self._handle, self._matmul_descriptor, a, b, d, d, preference, count, proposals, byref(proposal_count)
        )
        return [each for each in proposals[: proposal_count.value] if not each.status]

    def make_launch_arguments(
        self, proposal: AlgorithmProposal, alpha: float, workspace_address: int
    ) -> tuple[Any, ...]:
        """Return the arguments of the C function cublasLtMatmul, except the last one, the stream.

        ``proposal``: the algorithm. ``workspace_address``: the address of the algorithm's workspace on the device. The
        returned arguments keep alive the host memory to which they point.
        """
        (a, b, d), (layout_a, layout_b, layout_d) = self._matrices, self._layouts
        factor, zero, output = self._scalar_type(alpha), self._scalar_type(0), c_void_p(d.address)
        return (
            *(self._handle, self._matmul_descriptor, byref(factor), c_void_p(a.address), layout_a),
            *(c_void_p(b.address), layout_b, byref(zero), output, layout_d, output, layout_d),
            *(byref(proposal.algorithm), c_void_p(workspace_address), proposal.workspace_bytes),
        )

    def destroy_descriptors(self, *objects_to_keep_alive: object) -> None:
        """Destroy all descriptors that this object has created in the library.

        ``objects_to_keep_alive``: not used. A finalizer passes these objects, so that they exist until it calls this
        method.
        """
        while self._created_objects:
            object_type, pointer = self._created_objects.pop()
            self._library.functions[f"cublasLt{object_type}Destroy"](pointer)
