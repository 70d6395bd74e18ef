"""Calls the functions of libcublasLt that a matmul needs, with ctypes. Importing this module loads no library.

Names and values are those of NVIDIA's cublasLt.h and library_types.h, releases 12 and 13.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from ctypes import POINTER, byref, c_double, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p, sizeof
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mamf.backend import Unavailable

_SUPPORTED_MAJOR_VERSIONS = (13, 12)
#: Where NVIDIA's wheels put the library, below site-packages; torch for Windows has its own copy.
_LIBRARY_FOLDERS = (
    *("nvidia/cu13/lib", "nvidia/cublas/lib"),
    *("nvidia/cu13/bin/x86_64", "nvidia/cublas/bin", "torch/lib"),
)

#: cudaDataType by dtype.
DATA_TYPES: Mapping[str, int] = {
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
#: alpha and beta by their cudaDataType; float32 otherwise.
_SCALAR_TYPES: Mapping[int, Any] = {
    DATA_TYPES["float64"]: c_double,
    DATA_TYPES["int32"]: lambda value: c_int(int(value)),
}
COMPUTE_32F, COMPUTE_64F, COMPUTE_32I, COMPUTE_32F_FAST_TF32 = 68, 70, 72, 77
# Attributes of a product: for each operand TRANS, SCALE_POINTER and SCALE_MODE; and FAST_ACCUM.
_OPERAND_ATTRIBUTES, _FAST_ACCUMULATION_ATTRIBUTE = ((3, 17, 31), (4, 18, 32)), 25
_MAX_WORKSPACE_ATTRIBUTE = 1
#: cublasLtMatmulMatrixScale_t by the rows and columns of the block that shares a scale; None: all of K.
SCALE_MODES: Mapping[tuple[int, int | None], int] = {(1, 16): 1, (1, 32): 2, (1, None): 3, (1, 128): 4, (128, 128): 5}

_STATUS_INVALID_VALUE, _STATUS_ARCH_MISMATCH, _STATUS_NOT_SUPPORTED = 7, 8, 15
_STATUS_NAMES = {
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


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = (("data", c_uint64 * 8),)


class Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


_MATMUL_FUNCTION = "cublasLtMatmul"
_CREATED_OBJECT = POINTER(c_void_p)
_SET_ATTRIBUTE_PARAMETERS = (c_void_p, c_int, c_void_p, c_size_t)
#: The parameters of each function; all return a status.
PARAMETER_TYPES: Mapping[str, tuple[Any, ...]] = {
    "cublasLtCreate": (_CREATED_OBJECT,),
    "cublasLtMatmulDescCreate": (_CREATED_OBJECT, c_int, c_int),
    "cublasLtMatmulDescSetAttribute": _SET_ATTRIBUTE_PARAMETERS,
    "cublasLtMatmulDescDestroy": (c_void_p,),
    "cublasLtMatrixLayoutCreate": (_CREATED_OBJECT, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatrixLayoutDestroy": (c_void_p,),
    "cublasLtMatmulPreferenceCreate": (_CREATED_OBJECT,),
    "cublasLtMatmulPreferenceSetAttribute": _SET_ATTRIBUTE_PARAMETERS,
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    "cublasLtMatmulAlgoGetHeuristic": (*(c_void_p,) * 7, c_int, POINTER(Proposal), POINTER(c_int)),
    _MATMUL_FUNCTION: (*(c_void_p,) * 14, c_size_t, c_void_p),
}


class CublasLtError(RuntimeError):
    """A call of libcublasLt that did not succeed."""

    def __init__(self, function: str, status: int) -> None:
        super().__init__(f"{function} returned CUBLAS_STATUS_{_STATUS_NAMES.get(status, status)}")
        self.function, self.status = function, status

    @property
    def is_refusal(self) -> bool:
        """Whether the library or the device does not support the request.

        An invalid value before the launch also counts: this release does not know the attribute or layout.
        """
        is_invalid = self.status == _STATUS_INVALID_VALUE and self.function != _MATMUL_FUNCTION
        return is_invalid or self.status in (_STATUS_NOT_SUPPORTED, _STATUS_ARCH_MISMATCH)


class CublasLtLibrary:
    """A loaded libcublasLt. ``call[name]`` raises CublasLtError for any status but success."""

    def __init__(self, loaded: Any) -> None:
        loaded.cublasLtGetVersion.restype = c_size_t
        number = int(loaded.cublasLtGetVersion())
        self.version = number // 10000, number // 100 % 100, number % 100
        self.call = {name: _declare_function(loaded, name) for name in PARAMETER_TYPES}

    def create_object(self, object_type: str, *arguments: object) -> c_void_p:
        """Return a handle (``object_type`` empty), or a descriptor: MatmulDesc, MatrixLayout or MatmulPreference."""
        made = c_void_p()
        self.call[f"cublasLt{object_type}Create"](byref(made), *arguments)
        return made

    def set_attribute(self, object_type: str, descriptor: c_void_p, attribute: int, value: Any) -> None:
        """Set an attribute of a descriptor to a ctypes value."""
        self.call[f"cublasLt{object_type}SetAttribute"](descriptor, attribute, byref(value), sizeof(value))


def _declare_function(loaded: Any, name: str) -> Any:
    def check(status: int, function: object, arguments: object) -> None:
        if status:
            raise CublasLtError(name, status)

    function = getattr(loaded, name)
    function.argtypes, function.restype, function.errcheck = PARAMETER_TYPES[name], c_int, check
    return function


@functools.cache
def load_cublaslt() -> CublasLtLibrary | Unavailable:
    """Load the library that torch uses, or say why it cannot be loaded."""
    loaded = next(_yield_loaded_libraries(), None)
    if loaded is None:
        return Unavailable("libcublasLt 12 or 13 was not found", "install a CUDA build of torch, which includes it")
    try:
        library = CublasLtLibrary(loaded)
    except AttributeError as error:  # ctypes names the function
        return Unavailable(f"this libcublasLt lacks a function: {error}", "use the kernel torch.mm")
    if library.version[0] not in _SUPPORTED_MAJOR_VERSIONS:
        version, known = ".".join(map(str, library.version)), " and ".join(map(str, sorted(_SUPPORTED_MAJOR_VERSIONS)))
        return Unavailable(f"cuBLASLt {version} is not supported, only versions {known}", "use the kernel torch.mm")
    return library


def _yield_loaded_libraries() -> Iterator[Any]:
    """Yield loaded libraries, best first: the library that this process already uses, the one in a wheel, and the
    system's.
    """
    is_windows = sys.platform == "win32"
    names = [
        f"cublasLt64_{major}.dll" if is_windows else f"libcublasLt.so.{major}" for major in _SUPPORTED_MAJOR_VERSIONS
    ]
    wheels = [str(Path(root, folder, name)) for name in names for root in sys.path for folder in _LIBRARY_FOLDERS]
    # A name finds a library that is loaded already, wherever its file is.
    in_process = getattr(os, "RTLD_NOLOAD", None)
    tried = [] if in_process is None else [(name, in_process | os.RTLD_LAZY) for name in names]
    for path, mode in (*tried, *((path, ctypes.DEFAULT_MODE) for path in (*wheels, *names))):
        try:
            yield ctypes.CDLL(path, mode)
        except OSError:
            continue


@dataclass(frozen=True)
class MatrixDescription:
    """A matrix in device memory, stored by columns that begin ``column_stride`` elements apart.

    ``scales``: the address of its scales and their mode, if it has any.
    """

    data_type: int
    rows: int
    columns: int
    column_stride: int
    address: int
    is_transposed: bool = False
    scales: tuple[int, int] | None = None


class MatmulDescriptors:
    """The descriptors of D = alpha op(A) op(B), valid until ``destroy_descriptors``. ``handle``: the handle of a
    device.

    ``compute_type``: cublasComputeType_t; ``scale_type``: the cudaDataType of alpha.
    """

    def __init__(
        self,
        library: CublasLtLibrary,
        handle: c_void_p,
        operands: tuple[MatrixDescription, MatrixDescription, MatrixDescription],
        compute_type: int,
        scale_type: int,
        fast_accumulation: bool = False,
    ) -> None:
        self._library, self._handle, self._operands = library, handle, operands
        self._created_objects: list[tuple[str, c_void_p]] = []
        self._scalar_type = _SCALAR_TYPES.get(scale_type, c_float)
        try:
            self._matmul_descriptor = self._create_object("MatmulDesc", compute_type, scale_type)
            for matrix, (transpose, pointer, mode) in zip(operands[:2], _OPERAND_ATTRIBUTES, strict=True):
                self._set_matmul_attribute(transpose, c_int(matrix.is_transposed))
                if matrix.scales is not None:
                    self._set_matmul_attribute(mode, c_int(matrix.scales[1]))
                    self._set_matmul_attribute(pointer, c_void_p(matrix.scales[0]))
            if fast_accumulation:
                self._set_matmul_attribute(_FAST_ACCUMULATION_ATTRIBUTE, ctypes.c_int8(1))
            self._layouts = [
                self._create_object("MatrixLayout", each.data_type, each.rows, each.columns, each.column_stride)
                for each in operands
            ]
        except CublasLtError:
            self.destroy_descriptors()
            raise

    def _create_object(self, object_type: str, *arguments: object) -> c_void_p:
        made = self._library.create_object(object_type, *arguments)
        self._created_objects.append((object_type, made))
        return made

    def _set_matmul_attribute(self, attribute: int, value: Any) -> None:
        self._library.set_attribute("MatmulDesc", self._matmul_descriptor, attribute, value)

    def request_proposals(self, count: int, workspace_bytes: int) -> list[Proposal]:
        """Return up to ``count`` algorithms that the library's heuristic proposes, the most promising first."""
        preference, found, number = self._create_object("MatmulPreference"), (Proposal * count)(), c_int()
        self._library.set_attribute("MatmulPreference", preference, _MAX_WORKSPACE_ATTRIBUTE, c_size_t(workspace_bytes))
        a, b, d = self._layouts
        self._library.call["cublasLtMatmulAlgoGetHeuristic"](
            self._handle, self._matmul_descriptor, a, b, d, d, preference, count, found, byref(number)
        )
        return [each for each in found[: number.value] if not each.status]

    def make_launch_arguments(self, proposal: Proposal, alpha: float, workspace: int) -> tuple[Any, ...]:
        """Return the arguments of a launch, except the stream. They keep alive the host memory that they point to."""
        (a, b, d), (layout_a, layout_b, layout_d) = self._operands, self._layouts
        factor, zero, output = self._scalar_type(alpha), self._scalar_type(0), c_void_p(d.address)
        return (
            *(self._handle, self._matmul_descriptor, byref(factor), c_void_p(a.address), layout_a),
            *(c_void_p(b.address), layout_b, byref(zero), output, layout_d, output, layout_d),
            *(byref(proposal.algorithm), c_void_p(workspace), proposal.workspace_bytes),
        )

    def destroy_descriptors(self) -> None:
        """Destroy the descriptors."""
        while self._created_objects:
            object_type, made = self._created_objects.pop()
            self._library.call[f"cublasLt{object_type}Destroy"](made)
