"""A fake libcublasLt that multiplies matrices in the host's memory.

It has the real C signatures, so ctypes converts every argument. It finds the column-major matrices from addresses,
leading dimensions and attributes, as NVIDIA documents them. It shares only the signatures with the kernel under test.
"""

import ctypes
import itertools
from ctypes import CFUNCTYPE, c_char, c_double, c_float, c_int, c_int8, c_int32, c_size_t, c_uint64

import torch

from mamf.operations.matmul.cublaslt_library import PARAMETER_TYPES_BY_FUNCTION

DTYPE_BY_DATA_TYPE = {
    0: torch.float32,
    1: torch.float64,
    2: torch.float16,
    3: torch.int8,
    10: torch.int32,
    14: torch.bfloat16,
    28: torch.float8_e4m3fn,
    29: torch.float8_e5m2,
}
FP4 = 33
E2M1_MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
#: The cudaDataType of alpha and beta, by the cublasComputeType_t and the cudaDataType of D. Other combinations need
#: float32 (0).
SCALE_TYPES = {(72, 10): 10, (72, 3): 0, (70, 1): 1}
SCALAR_TYPES = {0: c_float, 1: c_double, 10: c_int32}
ATTRIBUTE_TYPES = {3: c_int32, 4: c_int32, 17: c_uint64, 18: c_uint64, 25: c_int8, 31: c_int32, 32: c_int32}
INVALID_VALUE, EXECUTION_FAILED, NOT_SUPPORTED = 7, 13, 15
STREAM = 77


def view_memory(address, dtype, element_count):
    nbytes = element_count * dtype.itemsize
    return torch.frombuffer((c_char * nbytes).from_address(address), dtype=torch.uint8).view(dtype)


class FakeCublasLt:
    """A fake libcublasLt.

    - ``proposal_count``: how many algorithms the heuristic proposes. ``workspace_sizes``: the workspace in bytes that
      an algorithm needs; the algorithms take these values in turn.
    - ``status_by_function``: the status that a function returns instead of running, by the name of the function.
    - ``spoil``: a function that changes D after each matmul.
    - ``live_objects``: the objects that are not destroyed yet, by address. ``launched_ranks``: the ranks of the
      algorithms that ran. ``heuristic_requests``: the requests to the heuristic.
    """

    def __init__(self, version=130100, proposal_count=5, status_by_function=(), workspace_sizes=(0, 0, 4096)):
        self.proposal_count, self.workspace_sizes = proposal_count, workspace_sizes
        self.status_by_function = dict(status_by_function)
        self.spoil = lambda output: None
        self.live_objects, self.launched_ranks, self.heuristic_requests = {}, [], []
        self._addresses = itertools.count(1000)
        self.cublasLtGetVersion = CFUNCTYPE(c_size_t)(lambda: version)
        for name, parameters in PARAMETER_TYPES_BY_FUNCTION.items():
            setattr(self, name, CFUNCTYPE(c_int, *parameters)(self._make_function(name)))

    def _make_function(self, name):
        kind = name.removeprefix("cublasLt")

        def run(*arguments):
            if name in self.status_by_function:
                return self.status_by_function[name]
            if kind.endswith("Create"):
                arguments[0][0] = address = next(self._addresses)
                self.live_objects[address] = (kind.removesuffix("Create"), arguments[1:], {})
                return 0
            if kind.endswith("Destroy"):
                del self.live_objects[arguments[0]]
                return 0
            if kind.endswith("SetAttribute"):
                return self._set_attribute(*arguments)
            return self._propose(*arguments) if kind == "MatmulAlgoGetHeuristic" else self._multiply(*arguments)

        return run

    def _set_attribute(self, descriptor, attribute, value, size):
        kind = self.live_objects[descriptor][0]
        value_type = c_size_t if kind == "MatmulPreference" else ATTRIBUTE_TYPES.get(attribute)
        if value_type is None or ctypes.sizeof(value_type) != size:
            return INVALID_VALUE
        self.live_objects[descriptor][2][attribute] = value_type.from_address(value).value
        return 0

    def _propose(self, handle, description, a, b, c, d, preference, requested_count, proposals, returned_count):
        compute_type, scale_type = self.live_objects[description][1]
        attributes = self.live_objects[description][2]
        a_layout, b_layout, d_layout = (self.live_objects[each][1] for each in (a, b, d))
        is_narrow = a_layout[0] == 3 or a_layout[0] >= 28
        if is_narrow and (attributes[3], attributes[4]) != (1, 0):
            return NOT_SUPPORTED
        has_wrong_stride = any(stride < rows for _, rows, _, stride in (a_layout, b_layout))
        if has_wrong_stride or scale_type != SCALE_TYPES.get((compute_type, d_layout[0]), 0):
            return INVALID_VALUE
        max_workspace_bytes = self.live_objects[preference][2][1]
        self.heuristic_requests.append((requested_count, max_workspace_bytes, compute_type, dict(attributes)))
        returned_count[0] = min(self.proposal_count, requested_count)
        for rank in range(returned_count[0]):
            proposals[rank].algorithm.data[0] = rank
            proposals[rank].workspace_bytes = self.workspace_sizes[rank % len(self.workspace_sizes)]
        return 0

    def _multiply(
        self, handle, description, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm,
        workspace, workspace_bytes, stream,
    ):  # fmt: skip
        rank = c_uint64.from_address(algorithm).value
        assert (handle in self.live_objects, c, c_layout, stream) == (True, d, d_layout, STREAM)
        assert workspace_bytes == self.workspace_sizes[rank % len(self.workspace_sizes)]
        if workspace_bytes:
            view_memory(workspace, torch.uint8, workspace_bytes).fill_(255)
        self.launched_ranks.append(rank)
        _, (_, scale_type), attributes = self.live_objects[description]
        left, right = self._read_matrix(a, a_layout, attributes, 0), self._read_matrix(b, b_layout, attributes, 1)
        alpha, beta = (SCALAR_TYPES[scale_type].from_address(each).value for each in (alpha, beta))
        assert beta == 0
        data_type, rows, columns, stride = self.live_objects[d_layout][1]
        dtype, product = DTYPE_BY_DATA_TYPE[data_type], alpha * (left @ right)
        output = torch.as_strided(view_memory(d, dtype, stride * columns), (rows, columns), (1, stride))
        has_int8_output = dtype == torch.int8
        output.copy_(product.round().clamp(-128, 127).to(dtype) if has_int8_output else product.to(dtype))
        self.spoil(output)
        return 0

    def _read_matrix(self, address, layout, attributes, operand):
        """Return op(A) for operand 0, or op(B) for operand 1, in float64 and with its scales applied."""
        data_type, rows, columns, stride = self.live_objects[layout][1]
        if data_type == FP4:
            packed = view_memory(address, torch.uint8, stride * columns // 2)
            values = E2M1_MAGNITUDES[torch.stack((packed & 15, packed >> 4), dim=-1).flatten().int()]
        else:
            element_count = stride * (columns - 1) + rows
            values = view_memory(address, DTYPE_BY_DATA_TYPE[data_type], element_count).to(torch.float64)
        scales = self._read_scales(attributes, operand, rows, columns)
        stored = torch.as_strided(values, (rows, columns), (1, stride)) * scales
        return stored.t() if attributes[3 + operand] else stored

    def _read_scales(self, attributes, operand, k, rows):
        """Return the scales of a matrix that is stored as k x rows, in a shape that broadcasts to the matrix.

        K is the contiguous dimension, as all modes with blocks require.
        """
        mode, address = attributes.get(31 + operand), attributes.get(17 + operand)
        if mode is None:
            return torch.ones(())
        row, term = torch.arange(rows)[None], torch.arange(k)[:, None]
        if mode == 3:
            return view_memory(address, torch.float32, rows).double()[None]
        if mode in (4, 5):
            blocks = -(-k // 128)
            padded = -(-blocks // 4) * 4
            indices = term // 128 * rows + row if mode == 4 else row // 128 * padded + term // 128
        else:
            block = term // (16 if mode == 1 else 32)
            tiles = -(-(int(block.max()) + 1) // 4)
            tile = row // 128 * tiles + block // 4
            indices = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
        dtype = {1: torch.float8_e4m3fn, 2: torch.uint8}.get(mode, torch.float32)
        scales = view_memory(address, dtype, int(indices.max()) + 1).double()[indices]
        return 2.0 ** (scales - 127) if mode == 2 else scales

    @property
    def live_descriptor_types(self):
        """The types of all descriptors that are not destroyed yet. Handles of the library are left out."""
        return [kind for kind, _, _ in self.live_objects.values() if kind]


def install(monkeypatch, fake):
    """Let mamf find the fake as the libcublasLt that torch has loaded, and return the fake."""
    from mamf.operations.matmul import cublaslt, cublaslt_library

    library = cublaslt_library.CublasLtLibrary(fake)
    monkeypatch.setattr(cublaslt_library, "load_cublaslt", lambda: library)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    monkeypatch.setattr(cublaslt, "_WORKSPACE_BY_DEVICE", {})
    return fake
