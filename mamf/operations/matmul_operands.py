"""Make and verify the operand sets of single, batched and grouped matmuls, for plain dtypes and for scaled formats.

The CPU computes the reference of sampled entries of C in float64, so that a device does not verify its own result.
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

from mamf.backend import Backend
from mamf.dtypes import DTYPES, SCALED_DTYPES
from mamf.kernel import Verdict
from mamf.operations.freivalds import (
    MatmulOperand,
    MatmulPart,
    divide_or_return_inf,
    find_wrong_cells,
    round_exact_values_to_int8,
    verify_all_entries,
    verify_matmul_with_special_values,
)
from mamf.operations.matmul.shapes import BaseMatmulProblem, BaseMatmulShape, MatmulProblemT, MatmulShapeT
from mamf.operations.operand_sets import (
    ChangeDetector,
    OperandSet,
    SignFlipper,
    TorchKernel,
    draw_sample_indices,
    explain_wrong_type,
    queue_checksum,
    select_along_dim,
    use_float32_precision,
    use_one_torch_thread,
    view_as,
)
from mamf.operations.quantization import QuantizedOperand, quantize_to_format
from mamf.torch_backend import get_torch_dtype

#: Texts in the errors that libraries raise if they do not support the operands: cuBLAS and hipBLAS if they have no
#: algorithm for a shape or layout, and oneDNN if it does not support a dtype.
_UNSUPPORTED_ERROR_TEXTS = ("STATUS_NOT_SUPPORTED", "itensor_view_from_dense expects")
# A quick check verifies only some entries of C: those where _SAMPLED_INDEX_COUNT rows and as many columns meet, in
# _SAMPLED_MATMUL_COUNT matmuls of a launch. The check must be short, because mamf runs it between two series of timed
# launches.
_SAMPLED_INDEX_COUNT, _SAMPLED_MATMUL_COUNT = 16, 4
# Between launches, mamf flips random signs in the smaller operand, so that results of earlier launches become wrong. If
# the smaller operand has fewer rows than this, mamf flips signs in the larger operand instead.
_MIN_ROWS_TO_CHANGE = 8
#: A function that splits the output of a launch into MatmulParts. A MatmulPart contains the operands and the outputs of
#: a batch of matmuls of the same shape.
PartSplitter = Callable[[torch.Tensor], Sequence[MatmulPart]]
#: Sampled entries of one matmul: the index of its MatmulPart, its index in that part, and the indices of the sampled
#: rows and columns of its C. mamf compares the entries where a sampled row and a sampled column meet.
_SampledBlock = tuple[int, int, torch.Tensor, torch.Tensor]


def make_matmul_operand_set(
    problem: BaseMatmulProblem,
    launch: Callable[[], object],
    c: torch.Tensor,
    split_into_parts: PartSplitter,
    operand_to_change: torch.Tensor,
    scale: float = 1.0,
    details: Mapping[str, float | str] | None = None,
    split_unquantized: PartSplitter | None = None,
    find_changed_operands: Callable[[], Sequence[str]] = tuple,
) -> OperandSet:
    """Make the operand set of one launch: its inputs and outputs, and the functions that verify its output.

    - ``launch``: runs the kernel. It returns the output, or writes it to ``c``.
    - ``split_into_parts``: splits an output into MatmulParts.
    - ``operand_to_change``: the operand (rows, K) in which random signs are flipped between launches.
    - ``scale``: the factor in C = scale * A @ B. ``details``: details of the launch, for the verdict on an output.
    - ``split_unquantized``: like ``split_into_parts``, but with the operands before they were quantized. If it is
      given, the details also contain the relative error of C that quantization causes.
    - ``find_changed_operands``: returns the names of operands that launches modified.
    """
    sign_flipper, verdict_details = SignFlipper(operand_to_change), dict(details or {})
    if split_unquantized is not None:
        blocks = draw_sampled_blocks(split_into_parts(c))
        verdict_details["quantization_error"] = compute_relative_error(
            compute_sampled_blocks(split_into_parts(c), blocks), compute_sampled_blocks(split_unquantized(c), blocks)
        )

    def get_output(result: object) -> torch.Tensor:
        """Return the output of a launch: ``result`` if it is a tensor, and otherwise ``c``, which the kernel wrote."""
        return result if isinstance(result, torch.Tensor) else c

    def verify(result: object) -> Verdict:
        """Verify sampled rows and columns of C, including the first and the last, against scale * A @ B in float64.

        The host dequantizes scaled operands, and rounds the expected values of an int8 output.
        """
        if reason := explain_wrong_type(result, c):
            return Verdict(math.inf, 0.0, reason=reason)
        output_parts = split_into_parts(get_output(result))
        blocks = draw_sampled_blocks(output_parts)
        actual = torch.cat(
            [
                copy_selection_to_host(select_along_dim(output_parts[p].c[i], 0, m), 1, n).flatten()
                for p, i, m, n in blocks
            ]
        )
        expected = scale * compute_sampled_blocks(output_parts, blocks)
        expected = round_exact_values_to_int8(actual, expected) if problem.has_int8_output else expected
        return Verdict(compute_relative_error(actual, expected), problem.tolerance, verdict_details)

    def verify_whole_output(result: object) -> Verdict:
        """Verify all entries of C, whose dtype and shape ``verify`` has already checked."""
        return verify_all_entries(problem, split_into_parts(get_output(result)), scale)

    return OperandSet(
        launch,
        verify,
        outputs=[c],
        verify_whole_output=verify_whole_output,
        queue_checksum=lambda result: queue_checksum(get_output(result)),
        change_operands=sign_flipper.flip_random_signs,
        restore_operands=sign_flipper.restore_signs,
        list_changed_operands=find_changed_operands,
        is_deterministic=True,
        locate_wrong_cells=lambda result: find_wrong_cells(problem, split_into_parts(get_output(result)), scale),
        verify_special_values=lambda: verify_matmul_with_special_values(
            problem, split_into_parts, lambda: get_output(launch()), scale
        ),
    )


class BaseTorchMatmul(TorchKernel[MatmulProblemT, MatmulShapeT]):
    """The base class of kernels that compute one or several matmuls of torch tensors without scales."""

    #: Whether the kernel supports operands with padding: unused elements after each stored row.
    supports_padding: ClassVar[bool] = False
    #: The supported output dtypes, by operand dtype. Other operand dtypes have only their default output dtype.
    output_dtypes_by_dtype: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    #: The operand dtypes for which the kernel has fast accumulation (partial sums with fewer bits).
    fast_accumulation_dtypes: ClassVar[tuple[str, ...]] = ()

    def explain_unsupported_problem(self, backend: Backend, problem: MatmulProblemT) -> str | None:
        if problem.padding_element_count and not self.supports_padding:
            return f"kernel {self.name} does not support padded rows: use --layout {problem.layout[:2]}"
        return (
            self._explain_unsupported_dtype(problem)
            or backend.explain_unsupported_dtype(problem.dtype)
            or self.explain_unsupported_options(backend, problem)
        )

    def explain_unsupported_options(self, backend: Backend, problem: MatmulProblemT) -> str | None:
        """Return why the kernel does not support the problem's output dtype, layout or accumulation, or None."""
        output_dtypes = self.output_dtypes_by_dtype.get(problem.dtype, (DTYPES[problem.dtype].default_output_dtype,))
        if problem.out_dtype not in output_dtypes:
            return (
                f"kernel {self.name} writes C in {' or '.join(output_dtypes)} for {problem.dtype} operands, not in "
                f"{problem.out_dtype}: use --out-dtype {output_dtypes[0]}"
            )
        if problem.fast_accumulation and problem.dtype not in self.fast_accumulation_dtypes:
            return (
                f"kernel {self.name} does not support fast accumulation for {problem.dtype}: use --no-fast-accumulation"
            )
        return None

    def apply_settings(self, backend: Backend, problem: MatmulProblemT) -> AbstractContextManager[object]:
        # Set the precision for float32 too, because float32 would run as tf32 if the user's setting in torch is "high".
        return use_float32_precision("high" if problem.dtype == "tf32" else "highest")

    def is_refusal(self, error: Exception) -> bool:
        # torch raises NotImplementedError, which is a RuntimeError, if the device does not support an operation.
        is_unsupported = isinstance(error, NotImplementedError) or any(
            text in str(error) for text in _UNSUPPORTED_ERROR_TEXTS
        )
        return is_unsupported and isinstance(error, RuntimeError)


def view_in_layout(
    buffer: torch.Tensor, rows: int, columns: int, layout: str, *leading_sizes: int, padding: int = 0
) -> torch.Tensor:
    """View a one-dimensional tensor as an operand (*leading_sizes, rows, columns).

    ``layout``: ``n`` if memory contains the rows one after the other; ``t`` if it contains the columns one after the
    other. ``padding``: the number of unused elements after each row or column in memory.
    """
    if layout == "t":
        return view_in_layout(buffer, columns, rows, "n", *leading_sizes, padding=padding).mT
    return view_as(buffer, *leading_sizes, rows, columns + padding)[..., :columns]


def draw_sampled_blocks(parts: Sequence[MatmulPart]) -> list[_SampledBlock]:
    """Choose random matmuls, and random rows and columns of each, including the first and the last.

    The choice uses a random seed and happens after the launch, so a kernel cannot predict the chosen entries and
    compute only these entries.
    """
    chooser = random.Random(secrets.randbits(64))
    matmul_indices = [(p, i) for p, part in enumerate(parts) for i in range(len(part.c))]
    sampled_matmuls = [
        matmul_indices[index]
        for index in draw_sample_indices(len(matmul_indices), _SAMPLED_MATMUL_COUNT, chooser).tolist()
    ]
    device = parts[0].c.device
    return [
        (p, i, *(draw_sample_indices(n, _SAMPLED_INDEX_COUNT, chooser).to(device) for n in parts[p].c.shape[1:]))
        for p, i in sampled_matmuls
    ]


def compute_sampled_blocks(parts: Sequence[MatmulPart], blocks: Sequence[_SampledBlock]) -> torch.Tensor:
    """Compute the sampled entries of A @ B on the host in float64, and return them as a one-dimensional tensor."""
    with use_one_torch_thread():
        operands = (
            (copy_operand_rows_to_host(parts[p].left, i, m), copy_operand_rows_to_host(parts[p].right, i, n))
            for p, i, m, n in blocks
        )
        return torch.cat([(left @ right.t()).flatten() for left, right in operands])


def choose_operand_to_change(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Choose the operand, A or B, in which signs are flipped between launches.

    Choose the smaller operand, because it is faster to change. But if it has few rows, choose the larger operand, so
    that many elements change. If few elements changed, a kernel could update its last result instead of computing a new
    one.
    """
    smaller, larger = sorted((a, b), key=torch.Tensor.numel)
    return smaller if smaller.shape[-2] >= _MIN_ROWS_TO_CHANGE else larger


def copy_operand_rows_to_host(operand: MatmulOperand, matmul_index: int, rows: torch.Tensor) -> torch.Tensor:
    return (
        operand.dequantize_on_host(rows)
        if isinstance(operand, QuantizedOperand)
        else copy_selection_to_host(operand[matmul_index], 0, rows)
    )


def compute_relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ||actual - expected|| / ||expected|| of two tensors on the host.

    If all expected values are 0, return 0 if all actual values are 0 too, and infinity otherwise.
    """
    with use_one_torch_thread():
        difference = torch.linalg.vector_norm(actual - expected).item()
        magnitude = torch.linalg.vector_norm(expected).item()
    return divide_or_return_inf(difference, magnitude)


def copy_selection_to_host(tensor: torch.Tensor, dim: int, indices: torch.Tensor) -> torch.Tensor:
    selection = select_along_dim(tensor, dim, indices).cpu()
    with use_one_torch_thread():
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize > 1:
            return selection.to(torch.float64)
        # Look up the values in a table, because a lookup is 20 times as fast as torch's conversion of 8-bit floats.
        codes = selection.view(torch.uint8).flatten().to(torch.int32)
        return _list_float8_values(tensor.dtype).index_select(0, codes).view(selection.shape)


@functools.cache
def _list_float8_values(dtype: torch.dtype) -> torch.Tensor:
    """Return the values of the bytes 0 to 255 in an 8-bit float dtype, as a float64 tensor of 256 elements."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float64)


# -- scaled formats ----------------------------------------------------------------------------------------------------


class BaseScaledMatmul(TorchKernel[MatmulProblemT, MatmulShapeT]):
    """The base class of kernels that compute one or several matmuls of operands in scaled formats."""

    dtypes: ClassVar[tuple[str, ...]] = SCALED_DTYPES
    out_dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16", "float32")

    def explain_unsupported_problem(self, backend: Backend, problem: MatmulProblemT) -> str | None:
        if reason := self._explain_unsupported_dtype(problem):
            return reason
        if problem.layout != "nt":
            return (
                f"{problem.dtype} does not support --layout {problem.layout}, because scales run along K: use --layout "
                "nt, in which K is the last dimension of both operands"
            )
        if problem.out_dtype not in self.out_dtypes:
            return (
                f"kernel {self.name} writes C in {' or '.join(self.out_dtypes)}, not in {problem.out_dtype}: use "
                f"--out-dtype {self.out_dtypes[0]}"
            )
        return self.explain_unsupported_options(backend, problem)

    def explain_unsupported_options(self, backend: Backend, problem: MatmulProblemT) -> str | None:
        """Return why the kernel does not support the problem's accumulation, or why the device does not support 8-bit
        floats. Return None if both are supported.
        """
        if problem.fast_accumulation and problem.dtype != "fp8_rowwise":
            return (
                f"{problem.dtype} does not support fast accumulation: use --no-fast-accumulation or --dtype fp8_rowwise"
            )
        return backend.explain_unsupported_dtype(backend.resolve_dtype("fp8"))

    def explain_unsupported_shape(self, problem: MatmulProblemT, shape: MatmulShapeT) -> str | None:
        scaled_format = DTYPES[problem.dtype].scaled_format
        n, k = scaled_format.required_multiples_of_n_and_k if scaled_format else (1, 1)
        if shape.n % n or shape.k % k:
            return (
                f"{problem.dtype} does not support N = {shape.n} and K = {shape.k}: use a multiple of {n} for N and of "
                f"{k} for K"
            )
        return None

    def is_refusal(self, error: Exception) -> bool:
        # cuBLAS and hipBLAS report an unsupported problem as STATUS_NOT_SUPPORTED. The other errors come from torch,
        # which checks the operands first.
        return "STATUS_NOT_SUPPORTED" in str(error) or isinstance(error, (NotImplementedError, ValueError))


def make_scaled_operand_set(
    backend: Backend,
    problem: BaseMatmulProblem,
    shape: BaseMatmulShape,
    buffers: Mapping[str, torch.Tensor],
    c: torch.Tensor,
    bind_operands: Callable[[QuantizedOperand, QuantizedOperand], Callable[[], object]],
    split_into_parts: Callable[[MatmulOperand, MatmulOperand, torch.Tensor], Sequence[MatmulPart]],
) -> OperandSet:
    """Quantize A and B, and make the operand set of one launch that multiplies them.

    - ``buffers``: the memory of all buffers, by name. ``c``: the memory of the output.
    - ``bind_operands``: takes the quantized A and B, and returns a function that launches the kernel on them.
    - ``split_into_parts``: takes A, B (quantized or not) and an output, and splits the output into MatmulParts.
    """
    a, b = (quantize_operand(backend, problem, shape, name, buffers) for name in ("a", "b"))
    # Create the ChangeDetector before calling ``bind_operands``, because this call may already overwrite the operands.
    elements = {f"{name}_quantized": each.elements for name, each in (("a", a), ("b", b))}
    find_changed_operands = ChangeDetector(elements | {"a_scales": a.scales, "b_scales": b.scales})
    unquantized_operands = [view_as(buffers[name], 1, shape.row_counts[name], shape.k) for name in ("a", "b")]
    return make_matmul_operand_set(
        problem,
        bind_operands(a, b),
        c,
        functools.partial(split_into_parts, a, b),
        choose_operand_to_change(a.elements, b.elements),
        split_unquantized=functools.partial(split_into_parts, *unquantized_operands),
        find_changed_operands=find_changed_operands,
    )


def quantize_operand(
    backend: Backend,
    problem: BaseMatmulProblem,
    shape: BaseMatmulShape,
    operand: str,
    buffers: Mapping[str, torch.Tensor],
) -> QuantizedOperand:
    """Quantize an operand, ``a`` or ``b``, to the problem's format.

    If the format contains 8-bit floats, use the variant of their dtype (fn or fnuz) that the device supports.
    ``buffers``: the memory of all buffers, by name. The result uses the memory of ``a_quantized`` or ``b_quantized``.
    """
    float8_dtype, scaled_format = get_torch_dtype(backend.resolve_dtype("fp8")), DTYPES[problem.dtype].scaled_format
    nbytes = shape.element_counts[operand] // (scaled_format.values_per_byte if scaled_format else 1)
    memory = buffers[f"{operand}_quantized"][:nbytes]
    values = view_as(buffers[operand], shape.row_counts[operand], shape.k)
    return quantize_to_format(values, problem.dtype, operand, memory, float8_dtype)
