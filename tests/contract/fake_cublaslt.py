"""A fake libcublasLt that multiplies matrices in the host's memory.

It has the real C signatures, so ctypes converts every argument. It finds the column-major matrices from addresses,
leading dimensions and attributes, as NVIDIA documents them. It shares only the signatures with the kernel under test.
"""

import ctypes
import itertools
from ctypes import CFUNCTYPE, c_char, c_double, c_float, c_int, c_int8, c_int32, c_size_t, c_uint64

import torch

from mamf.operations.matmul.cublaslt_library import PARAMETER_TYPES_BY_FUNCTION

DTYPES = {
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
SCALARS = {0: c_float, 1: c_double, 10: c_int32}
ATTRIBUTES = {3: c_int32, 4: c_int32, 17: c_uint64, 18: c_uint64, 25: c_int8, 31: c_int32, 32: c_int32}
INVALID_VALUE, EXECUTION_FAILED, NOT_SUPPORTED = 7, 13, 15
STREAM = 77


def memory(address, dtype, count):
    nbytes = count * dtype.itemsize
    return torch.frombuffer((c_char * nbytes).from_address(address), dtype=torch.uint8).view(dtype)


class FakeCublasLt:
    """A fake libcublasLt.

    - ``proposals``: how many algorithms the heuristic proposes. ``workspaces``: the workspace in bytes that an
      algorithm needs; the algorithms take these values in turn.
    - ``fails``: the status that a function returns instead of running, by the name of the function.
    - ``spoil``: a function that changes D after each matmul.
    - ``alive``: the objects that are not destroyed yet, by address. ``launched``: the indices of the algorithms that
      ran. ``asked``: the requests to the heuristic.
    """

    def __init__(self, version=130100, proposals=5, fails=(), workspaces=(0, 0, 4096)):
        self.count, self.fails, self.workspaces = proposals, dict(fails), workspaces
        self.spoil = lambda output: None
        self.alive, self.launched, self.asked = {}, [], []
        self._addresses = itertools.count(1000)
        self.cublasLtGetVersion = CFUNCTYPE(c_size_t)(lambda: version)
        for name, parameters in PARAMETER_TYPES_BY_FUNCTION.items():
            setattr(self, name, CFUNCTYPE(c_int, *parameters)(self._answer(name)))

    def _answer(self, name):
        kind = name.removeprefix("cublasLt")

        def answer(*arguments):
            if name in self.fails:
                return self.fails[name]
            if kind.endswith("Create"):
                arguments[0][0] = address = next(self._addresses)
                self.alive[address] = (kind.removesuffix("Create"), arguments[1:], {})
                return 0
            if kind.endswith("Destroy"):
                del self.alive[arguments[0]]
                return 0
            if kind.endswith("SetAttribute"):
                return self._set(*arguments)
            return self._propose(*arguments) if kind == "MatmulAlgoGetHeuristic" else self._multiply(*arguments)

        return answer

    def _set(self, described, attribute, value, size):
        kind = self.alive[described][0]
        type_ = c_size_t if kind == "MatmulPreference" else ATTRIBUTES.get(attribute)
        if type_ is None or ctypes.sizeof(type_) != size:
            return INVALID_VALUE
        self.alive[described][2][attribute] = type_.from_address(value).value
        return 0

    def _propose(self, handle, description, a, b, c, d, preference, count, found, number):
        compute_type, scale_type = self.alive[description][1]
        attributes = self.alive[description][2]
        of_a, of_b, of_d = (self.alive[each][1] for each in (a, b, d))
        is_narrow = of_a[0] == 3 or of_a[0] >= 28
        if is_narrow and (attributes[3], attributes[4]) != (1, 0):
            return NOT_SUPPORTED
        if scale_type != SCALE_TYPES.get((compute_type, of_d[0]), 0) or any(each[3] < each[1] for each in (of_a, of_b)):
            return INVALID_VALUE
        self.asked.append((count, self.alive[preference][2][1], compute_type, dict(attributes)))
        number[0] = min(self.count, count)
        for rank in range(number[0]):
            found[rank].algorithm.data[0] = rank
            found[rank].workspace_bytes = self.workspaces[rank % len(self.workspaces)]
        return 0

    def _multiply(self, handle, description, alpha, a, of_a, b, of_b, beta, c, of_c, d, of_d, algorithm, *rest):
        workspace, workspace_bytes, stream = rest
        rank = c_uint64.from_address(algorithm).value
        assert (handle in self.alive, c, of_c, stream) == (True, d, of_d, STREAM)
        assert workspace_bytes == self.workspaces[rank % len(self.workspaces)]
        if workspace_bytes:
            memory(workspace, torch.uint8, workspace_bytes).fill_(255)
        (_, (_, scale_type), attributes), self.launched = self.alive[description], [*self.launched, rank]
        left, right = self._read(a, of_a, attributes, 0), self._read(b, of_b, attributes, 1)
        alpha, beta = (SCALARS[scale_type].from_address(each).value for each in (alpha, beta))
        assert beta == 0
        data_type, rows, columns, stride = self.alive[of_d][1]
        dtype, found = DTYPES[data_type], alpha * (left @ right)
        output = torch.as_strided(memory(d, dtype, stride * columns), (rows, columns), (1, stride))
        has_int8_output = dtype == torch.int8
        output.copy_(found.round().clamp(-128, 127).to(dtype) if has_int8_output else found.to(dtype))
        self.spoil(output)
        return 0

    def _read(self, address, layout, attributes, operand):
        """Return op(A) for operand 0, or op(B) for operand 1, in float64 and with its scales applied."""
        data_type, rows, columns, stride = self.alive[layout][1]
        if data_type == FP4:
            packed = memory(address, torch.uint8, stride * columns // 2)
            values = E2M1_MAGNITUDES[torch.stack((packed & 15, packed >> 4), dim=-1).flatten().int()]
        else:
            values = memory(address, DTYPES[data_type], stride * (columns - 1) + rows).to(torch.float64)
        stored = torch.as_strided(values, (rows, columns), (1, stride)) * self._scales(
            attributes, operand, rows, columns
        )
        return stored.t() if attributes[3 + operand] else stored

    def _scales(self, attributes, operand, k, rows):
        """Return the scales of a matrix that is stored as k x rows, in a shape that broadcasts to the matrix.

        K is the contiguous dimension, as all modes with blocks require.
        """
        mode, address = attributes.get(31 + operand), attributes.get(17 + operand)
        if mode is None:
            return torch.ones(())
        row, term = torch.arange(rows)[None], torch.arange(k)[:, None]
        if mode == 3:
            return memory(address, torch.float32, rows).double()[None]
        if mode in (4, 5):
            blocks = -(-k // 128)
            padded = -(-blocks // 4) * 4
            at = term // 128 * rows + row if mode == 4 else row // 128 * padded + term // 128
        else:
            block = term // (16 if mode == 1 else 32)
            tiles = -(-(int(block.max()) + 1) // 4)
            tile = row // 128 * tiles + block // 4
            at = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
        dtype = {1: torch.float8_e4m3fn, 2: torch.uint8}.get(mode, torch.float32)
        found = memory(address, dtype, int(at.max()) + 1).double()[at]
        return 2.0 ** (found - 127) if mode == 2 else found

    @property
    def descriptors(self):
        """The types of all descriptors that are not destroyed yet. Handles of the library are left out."""
        return [kind for kind, _, _ in self.alive.values() if kind]


def install(monkeypatch, fake):
    """Let mamf find the fake as the libcublasLt that torch has loaded, and return the fake."""
    from mamf.operations.matmul import cublaslt, cublaslt_library

    loaded = cublaslt_library.CublasLtLibrary(fake)
    monkeypatch.setattr(cublaslt_library, "load_cublaslt", lambda: loaded)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    monkeypatch.setattr(cublaslt, "_WORKSPACE_BY_DEVICE", {})
    return fake
