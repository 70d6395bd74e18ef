"""Operand sets of single, batched and grouped matmuls, plain and in scaled formats, verified on the host.

The CPU computes the reference in float64, so a device never judges itself.
"""

from __future__ import annotations

import functools
import math
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

import torch

from mamf.backend import Backend, Unavailable
from mamf.dtypes import DTYPES, SCALED_FORMATS
from mamf.kernel import Verdict
from mamf.operations.matmul.shapes import ProductProblem, ProductProblemT, ProductShape, ProductShapeT
from mamf.operations.operand_sets import (
    ChangeDetector,
    OperandSet,
    SignFlipper,
    TorchKernel,
    draw_sample_indices,
    explain_wrong_type,
    queue_checksum,
    select,
    use_float32_precision,
    use_one_torch_thread,
    view_as,
)
from mamf.operations.quantization import QuantizedOperand, quantize_to_format
from mamf.operations.whole_products import (
    MatmulPart,
    Operand,
    find_wrong_cells,
    round_like_result,
    verify_all_entries,
    verify_special_product,
)
from mamf.torch_backend import to_torch_dtype

#: Errors of cuBLAS and hipBLAS for a shape or layout without an algorithm, and of oneDNN for a missing dtype.
_UNSUPPORTED_ERROR_TEXTS = ("STATUS_NOT_SUPPORTED", "itensor_view_from_dense expects")
# How many rows and columns of C, and matmuls of a batch or of groups, are compared after a train: few enough to fit
# in the idle time between two trains.
_SAMPLED_INDEX_COUNT, _SAMPLED_MATMUL_COUNT = 16, 4
_MIN_ROWS_TO_CHANGE = 8
SplitIntoParts = Callable[[torch.Tensor], Sequence[MatmulPart]]
#: The index of a part, the index of a matmul in it, and sampled rows and columns of that matmul's output.
_SampledBlock = tuple[int, int, torch.Tensor, torch.Tensor]


def make_matmul_operand_set(
    problem: ProductProblem,
    launch: Callable[[], object],
    c: torch.Tensor,
    parts: SplitIntoParts,
    changing: torch.Tensor,
    scale: float = 1.0,
    details: Mapping[str, float | str] | None = None,
    exact: SplitIntoParts | None = None,
    changed: Callable[[], Sequence[str]] = tuple,
) -> OperandSet:
    """Make one operand set from a launch and the output ``c`` that it writes.

    ``parts``: splits an output into parts, one or more matmuls each. ``changing``: the operand (rows, K) that gets new
    signs between launches. ``scale``: C = scale * A @ B. ``exact``: like ``parts``, but with the operands before
    quantization; adds the quantization error to the details. ``changed``: as in OperandSet.
    """
    signs, known = SignFlipper(changing), dict(details or {})
    if exact is not None:
        places = draw_sampled_blocks(parts(c))
        error = compute_relative_error(
            compute_sampled_blocks(parts(c), places), compute_sampled_blocks(exact(c), places)
        )
        known["quantization_error"] = error

    def output(result: object) -> torch.Tensor:
        """Return the output of a launch: the tensor that it returned, or else C."""
        return result if isinstance(result, torch.Tensor) else c

    def verify(result: object) -> Verdict:
        """Verify sampled rows and columns, including the edges: ||C - scale * A @ B|| / ||scale * A @ B|| in float64.

        Scaled operands are dequantized, and the expected values of an int8 output are rounded.
        """
        if reason := explain_wrong_type(result, c):
            return Verdict(math.inf, 0.0, reason=reason)
        own = parts(output(result))
        places = draw_sampled_blocks(own)
        found = torch.cat([copy_selection_to_host(select(own[p].c[i], 0, m), 1, n).flatten() for p, i, m, n in places])
        expected = scale * compute_sampled_blocks(own, places)
        expected = round_like_result(found, expected) if problem.has_int8_output else expected
        return Verdict(compute_relative_error(found, expected), problem.tolerance, known)

    def verify_whole(result: object) -> Verdict:
        """Verify all entries. ``verify`` has already checked the output's type."""
        return verify_all_entries(problem, parts(output(result)), scale)

    return OperandSet(
        launch,
        verify,
        outputs=[c],
        verify_whole=verify_whole,
        checksum=lambda result: queue_checksum(output(result)),
        change=signs.change,
        restore=signs.restore,
        changed=changed,
        repeats_bits=True,
        locate=lambda result: find_wrong_cells(problem, parts(output(result)), scale),
        verify_special=lambda: verify_special_product(problem, parts, lambda: output(launch()), scale),
    )


class TorchProducts(TorchKernel[ProductProblemT, ProductShapeT]):
    """Matmuls by one torch function. Derived classes define their dtypes and the launch."""

    has_padding: ClassVar[bool] = False
    #: The output dtypes by operand dtype; operand dtypes that are not listed have only their default output.
    outputs: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    #: The operand dtypes that have fast accumulation.
    fast_dtypes: ClassVar[tuple[str, ...]] = ()

    def unsupported(self, backend: Backend, problem: ProductProblemT) -> str | None:
        if problem.padding and not self.has_padding:
            return f"kernel {self.name} does not support padded rows: use --layout {problem.layout[:2]}"
        unsupported = self._unsupported_dtype(problem) or backend.unsupported_dtype(problem.dtype)
        return unsupported or self.unsupported_problem(backend, problem)

    def unsupported_problem(self, backend: Backend, problem: ProductProblemT) -> str | None:
        """Return why the problem's output dtype, layout or accumulation is not supported for its dtype, or None."""
        outputs = self.outputs.get(problem.dtype, (DTYPES[problem.dtype].default_output_dtype,))
        if problem.out_dtype not in outputs:
            return f"kernel {self.name} writes {', '.join(outputs)} for {problem.dtype}, not {problem.out_dtype}"
        if problem.fast_accumulation and problem.dtype not in self.fast_dtypes:
            return f"kernel {self.name} has no fast accumulation for {problem.dtype}; only 8-bit floats have it"
        return None

    def settings(self, backend: Backend, problem: ProductProblemT) -> AbstractContextManager[object]:
        # Set the precision for float32 too. Otherwise float32 would run as tf32 if the user's global setting is "high".
        return use_float32_precision("high" if problem.dtype == "tf32" else "highest")

    def refuses(self, error: Exception) -> bool:
        # torch raises NotImplementedError for an operation that the device does not support.
        if isinstance(error, NotImplementedError):
            return True
        return isinstance(error, RuntimeError) and any(text in str(error) for text in _UNSUPPORTED_ERROR_TEXTS)


def view_in_layout(
    flat: torch.Tensor, rows: int, columns: int, layout: str, *leading: int, padding: int = 0
) -> torch.Tensor:
    """View flat memory as an operand (*leading, rows, columns), stored transposed if ``layout`` is ``t``.

    ``padding``: unused elements after each stored row.
    """
    if layout == "t":
        return view_in_layout(flat, columns, rows, "n", *leading, padding=padding).mT
    return view_as(flat, *leading, rows, columns + padding)[..., :columns]


def draw_sampled_blocks(parts: Sequence[MatmulPart]) -> list[_SampledBlock]:
    """Choose random matmuls, and random rows and columns of each, including the edges.

    They are drawn from fresh entropy after the launch, so a kernel cannot predict them and compute only those.
    """
    chooser = random.Random(secrets.randbits(64))
    every = [(p, i) for p, part in enumerate(parts) for i in range(len(part.c))]
    chosen = [every[index] for index in draw_sample_indices(len(every), _SAMPLED_MATMUL_COUNT, chooser).tolist()]
    device = parts[0].c.device
    return [
        (p, i, *(draw_sample_indices(n, _SAMPLED_INDEX_COUNT, chooser).to(device) for n in parts[p].c.shape[1:]))
        for p, i in chosen
    ]


def compute_sampled_blocks(parts: Sequence[MatmulPart], places: Sequence[_SampledBlock]) -> torch.Tensor:
    """Compute A @ B at the sampled places, on the host in float64."""
    operands = (
        (copy_operand_rows_to_host(parts[p].left, i, m), copy_operand_rows_to_host(parts[p].right, i, n))
        for p, i, m, n in places
    )
    return torch.cat([multiply(left, right.t()).flatten() for left, right in operands])


def choose_smaller_operand(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the smaller operand, which is faster to change, or the larger one if the smaller has few rows.

    With few rows, a kernel could update its last result from the part of the other operand where signs flipped.
    """
    smaller, larger = sorted((a, b), key=torch.Tensor.numel)
    return smaller if smaller.shape[-2] >= _MIN_ROWS_TO_CHANGE else larger


def copy_operand_rows_to_host(operand: Operand, product: int, rows: torch.Tensor) -> torch.Tensor:
    return (
        operand.dequantize_on_host(rows)
        if isinstance(operand, QuantizedOperand)
        else copy_selection_to_host(operand[product], 0, rows)
    )


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with use_one_torch_thread():
        return a @ b


def compute_relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ||found - expected|| / ||expected|| of host tensors; infinite if only zeros are expected but not found."""
    with use_one_torch_thread():
        difference = torch.linalg.vector_norm(found - expected).item()
        magnitude = torch.linalg.vector_norm(expected).item()
    if magnitude == 0:
        return 0.0 if difference == 0 else float("inf")
    return float(difference / magnitude)


def copy_selection_to_host(tensor: torch.Tensor, dim: int, indices: torch.Tensor) -> torch.Tensor:
    chosen = select(tensor, dim, indices).cpu()
    with use_one_torch_thread():
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize > 1:
            return chosen.to(torch.float64)
        # A table is 20 times faster than torch's conversion of 8-bit floats.
        places = chosen.view(torch.uint8).flatten().to(torch.int32)
        return _list_float8_values(tensor.dtype).index_select(0, places).view(chosen.shape)


@functools.cache
def _list_float8_values(dtype: torch.dtype) -> torch.Tensor:
    """Return the values of all 256 bit patterns of an 8-bit float dtype in float64."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float64)


# -- scaled formats ----------------------------------------------------------------------------------------------------


class ScaledProducts(TorchKernel[ProductProblemT, ProductShapeT]):
    """Matmuls of quantized operands and their scales. Derived classes define the launch."""

    dtypes: ClassVar[tuple[str, ...]] = SCALED_FORMATS
    out_dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16", "float32")

    #: The function of torch.nn.functional that this kernel calls, if some releases of torch lack it; else empty.
    function: ClassVar[str] = ""

    def unavailable(self, backend: Backend) -> Unavailable | None:
        if self.function and not hasattr(torch.nn.functional, self.function):
            return Unavailable(f"torch {torch.__version__} has no {self.function}", "pip install 'torch>=2.10'")
        return super().unavailable(backend)

    def unsupported(self, backend: Backend, problem: ProductProblemT) -> str | None:
        if reason := self._unsupported_dtype(problem):
            return reason
        if problem.layout != "nt":
            return (
                f"scaled formats need --layout nt, not {problem.layout}: scales run along K, the last dimension of both"
            )
        if problem.out_dtype not in self.out_dtypes:
            return f"kernel {self.name} writes {', '.join(self.out_dtypes)}, not {problem.out_dtype}"
        return self.unsupported_problem(backend, problem)

    def unsupported_problem(self, backend: Backend, problem: ProductProblemT) -> str | None:
        """Return why this device does not support this format with this accumulation, or None."""
        if problem.fast_accumulation and problem.dtype != "fp8_rowwise":
            return f"{problem.dtype} has no fast accumulation; only fp8_rowwise and fp8 have it"
        return backend.unsupported_dtype(backend.resolve_dtype("fp8"))

    def unsupported_shape(self, problem: ProductProblemT, shape: ProductShapeT) -> str | None:
        format = DTYPES[problem.dtype].format
        n, k = format.multiples if format else (1, 1)
        return f"{problem.dtype} needs N to be a multiple of {n} and K of {k}" if shape.n % n or shape.k % k else None

    def refuses(self, error: Exception) -> bool:
        # The library has no algorithm, or torch knows that it has none and does not call it.
        return "STATUS_NOT_SUPPORTED" in str(error) or isinstance(error, (NotImplementedError, ValueError))


def view_operand_rows(shape: ProductShape, operand: str, flat: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """View the values of an operand as (rows, K)."""
    return view_as(flat[operand], shape.rows[operand], shape.k)


def quantize_operand(
    backend: Backend, problem: ProductProblem, shape: ProductShape, operand: str, flat: Mapping[str, torch.Tensor]
) -> QuantizedOperand:
    """Quantize an operand, ``a`` or ``b``, to the problem's format, with the 8-bit floats that the device supports."""
    e4m3, format = to_torch_dtype(backend.resolve_dtype("fp8")), DTYPES[problem.dtype].format
    nbytes = shape.elements[operand] // (format.values_per_byte if format else 1)
    memory = flat[f"{operand}_quantized"][:nbytes]
    return quantize_to_format(view_operand_rows(shape, operand, flat), problem.dtype, operand, memory, e4m3)


def watch_quantized_operands(a: QuantizedOperand, b: QuantizedOperand) -> ChangeDetector:
    """Make a check that quantized operands stay unchanged. Call it before the kernel sees them."""
    operands = {"a": a, "b": b}.items()
    elements = {f"{name}_quantized": each.elements for name, each in operands}
    return ChangeDetector(elements | {f"{name}_scales": each.scales for name, each in operands})
