"""Make the operand sets of kernels on torch tensors, and check what launches do with them.

An operand set is the inputs and outputs of one launch. Launches use several sets in turn, so that operands are not in
the cache. A class that derives from TorchKernel implements ``make_operand_set``, which makes one set. This module does
the rest. It takes the memory of the sets from an OperandPool. It poisons outputs, that is, overwrites them with values
that no launch produces. It changes operands between launches, and checks that launches do not modify them. In the
regime "classic", it overwrites the output before each launch, as mamf-finder does.
"""

from __future__ import annotations

import math
import random
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar, TypeVar

import torch

from mamf.backend import Backend, OperandPool, Unavailability
from mamf.kernel import CELL_SIZE, Buffer, Kernel, PreparedKernel, ProblemT, ShapeT, Verdict, WrongCells
from mamf.torch_backend import TorchBackend

ResultT = TypeVar("ResultT")
#: The name of the buffer that the regime "classic" copies to the output before each launch. If a problem has no buffer
#: of this name, the regime fills the output with zeros.
_REWRITE_BUFFER_NAME = "c_rewrite"


@dataclass(frozen=True)
class OperandSet:
    """The operands of one launch, and the functions that run and check it.

    - ``launch``: runs the kernel once. It returns its output, or None if it writes to ``outputs``.
    - ``verify``, ``verify_whole_output``, ``queue_checksum``, ``locate_wrong_cells``: as in ``PreparedKernel``, but
      without the index of the operand set. ``is_deterministic`` and ``verify_special_values`` have the same meaning.
    - ``outputs``: the tensors that the launch writes.
    - ``change_operands``: queues a random change of the operands. Then ``verify`` expects the result for the changed
      operands. None: the operands never change. ``restore_operands``: undoes all changes.
    - ``list_changed_operands``: returns the names of operands that launches modified. It checks only the operands that
      ``make_operand_set`` created.
    """

    launch: Callable[[], object]
    verify: Callable[[object], Verdict]
    outputs: Sequence[torch.Tensor] = ()
    verify_whole_output: Callable[[object], Verdict] | None = None
    queue_checksum: Callable[[object], Callable[[], int]] | None = None
    change_operands: Callable[[], object] | None = None
    restore_operands: Callable[[], object] = lambda: None
    list_changed_operands: Callable[[], Sequence[str]] = tuple
    is_deterministic: bool = False
    locate_wrong_cells: Callable[[object], WrongCells] | None = None
    verify_special_values: Callable[[], Verdict] | None = None


class TorchKernel(Kernel[ProblemT, ShapeT]):
    """A kernel that computes with torch tensors. Derived classes implement ``make_operand_set``."""

    #: The name of the function in torch or torch.nn.functional that this kernel calls. If torch lacks the function, the
    #: kernel is unavailable. Empty if every release of torch has the function.
    torch_name: ClassVar[str] = ""

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        if self.torch_name and not any(hasattr(module, self.torch_name) for module in (torch, torch.nn.functional)):
            return Unavailability(f"torch {torch.__version__} has no {self.torch_name}", "pip install --upgrade torch")
        return explain_torch_unavailability(backend)

    @abstractmethod
    def make_operand_set(
        self, backend: Backend, problem: ProblemT, shape: ShapeT, buffers: Mapping[str, torch.Tensor]
    ) -> OperandSet:
        """Make one operand set. ``buffers``: the memory of each buffer of the problem, by name, as a flat tensor.

        A tensor may be larger than the operand. ``view_as`` views the beginning of the tensor as the operand.
        """

    def configure_for_shape(self, backend: Backend, problem: ProblemT, shape: ShapeT) -> TorchKernel[ProblemT, ShapeT]:
        """Return the kernel that makes the operand sets: this one, or a kernel configured for this shape."""
        return self

    def prepare(
        self,
        backend: Backend,
        problem: ProblemT,
        shape: ShapeT,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> PreparedKernel:
        kernel, buffers = self.configure_for_shape(backend, problem, shape), problem.list_buffers(shape, sets, rewrite)
        tensors = take_pool_buffers(pool, buffers)
        source = tensors.pop(_REWRITE_BUFFER_NAME, None)
        # Create the ChangeDetector before calling make_operand_set, because this call may already overwrite operands.
        find_changed_operands = ChangeDetector({name: tensors[name] for name in tensors if buffers[name].fill})
        operand_sets = [
            kernel.make_operand_set(backend, problem, shape, set_buffers)
            for set_buffers in split_buffers_into_sets(tensors, sets)
        ]
        prepared = combine_operand_sets(operand_sets, find_changed_operands)
        if not rewrite or not operand_sets[0].outputs:
            return prepared
        output = operand_sets[0].outputs[0]
        return replace(
            prepared,
            rewrite_output=output.zero_ if source is None else partial(output.copy_, source.view(output.shape)),
        )


def take_pool_buffers(pool: OperandPool, buffers: Mapping[str, Buffer]) -> dict[str, torch.Tensor]:
    """Take a one-dimensional tensor from the pool for each buffer, and return the tensors by the buffers' names."""
    return {name: pool.take_buffer(name, *buffer) for name, buffer in buffers.items()}


def split_buffers_into_sets(tensors_by_name: Mapping[str, torch.Tensor], sets: int) -> list[dict[str, torch.Tensor]]:
    """Split each buffer into ``sets`` equal parts. Return a list with the parts of each operand set, by buffer name."""
    parts = {name: tensor.chunk(sets) for name, tensor in tensors_by_name.items()}
    return [{name: parts[name][index] for name in tensors_by_name} for index in range(sets)]


def view_as(buffer: torch.Tensor, *sizes: int) -> torch.Tensor:
    """View the beginning of a one-dimensional tensor as a tensor of these sizes."""
    return buffer[: math.prod(sizes)].view(sizes)


def combine_operand_sets(
    sets: Sequence[OperandSet],
    find_changed_operands: Callable[[], Sequence[str]],
    extra_bytes_per_set: int = 0,
) -> PreparedKernel:
    """Combine operand sets into a ``PreparedKernel``, the object that the engine measures.

    ``find_changed_operands``: returns the names of operands that launches have modified. It is called after all random
    changes are undone. ``extra_bytes_per_set``: the device memory of each set in addition to its operands.
    """

    def poison_outputs(returned: Sequence[object]) -> None:
        for each, result in zip(sets, returned, strict=True):
            for tensor in each.outputs:
                poison_tensor(tensor)
            for tensor in list_result_tensors(result):
                # Also poison two new tensors, because torch may reuse their memory for the next output.
                for memory in (tensor, torch.empty_like(tensor), torch.empty_like(tensor)):
                    poison_tensor(memory)

    def list_changed_operands() -> Sequence[str]:
        for each in sets:
            each.restore_operands()
        return [
            *find_changed_operands(),
            *dict.fromkeys(name for each in sets for name in each.list_changed_operands()),
        ]

    changing_functions = [each.change_operands for each in sets if each.change_operands]
    return PreparedKernel(
        launches=[each.launch for each in sets],
        verify=lambda index, result: sets[index].verify(result),
        verify_whole_output=_combine_checks([each.verify_whole_output for each in sets]),
        change_operands=(lambda: [change() for change in changing_functions]) if changing_functions else None,
        poison_outputs=poison_outputs,
        list_changed_operands=list_changed_operands,
        extra_bytes_per_set=extra_bytes_per_set,
        queue_checksum=_combine_checks([each.queue_checksum for each in sets]),
        remember_output=lambda index, result: remember_outputs(
            lambda returned: list_result_tensors(returned) or sets[index].outputs, result
        ),
        is_deterministic=all(each.is_deterministic for each in sets),
        locate_wrong_cells=_combine_checks([each.locate_wrong_cells for each in sets]),
        verify_special_values=sets[0].verify_special_values,
    )


def _combine_checks(checks: Sequence[Callable[[object], ResultT] | None]) -> Callable[[int, object], ResultT] | None:
    """Return a function that takes the index of an operand set and the result of a launch, and calls the set's check.

    ``checks``: the check of each set. If the sets have no such check, all are None, and the result is None too.
    """
    present_checks = [check for check in checks if check is not None]
    return (lambda index, result: present_checks[index](result)) if present_checks else None


# -- checks ------------------------------------------------------------------------------------------------------------


# The number of columns of the table in which compute_checksums arranges the words (integers) of a tensor's memory.
_CHECKSUM_COLUMNS = 4096


def explain_torch_unavailability(backend: Backend) -> Unavailability | None:
    """Return why kernels on torch tensors cannot run on this backend, or None if they can."""
    if isinstance(backend, TorchBackend):
        return None
    return Unavailability(f"torch has no device for backend {backend.name}", "'mamf backends' lists available backends")


def poison_tensor(tensor: torch.Tensor) -> None:
    """Overwrite a tensor with values that no launch produces, so that verification finds entries that the next launch
    does not write. These values are NaN, or the smallest int32 plus 1 in tensors of int32 and int64.
    """
    with torch.no_grad():
        if tensor.dtype in (torch.int32, torch.int64):
            tensor.fill_(-(2**31) + 1)
        elif tensor.dtype.itemsize == 1:
            # The byte 0x80 is NaN in the fnuz dtypes, and 0x7F is NaN in all other 8-bit float dtypes of torch.
            tensor.view(torch.uint8).fill_(0x80 if "fnuz" in str(tensor.dtype) else 0x7F)
        else:
            tensor.fill_(float("nan"))


def select_along_dim(tensor: torch.Tensor, dim: int, indices: torch.Tensor) -> torch.Tensor:
    """Select indices of a dimension, like torch.index_select, which does not support 8-bit floats."""
    if tensor.dtype.itemsize > 1 or tensor.dtype in (torch.int8, torch.uint8):
        return tensor.index_select(dim, indices)
    return tensor.view(torch.uint8).index_select(dim, indices).view(tensor.dtype)


def draw_sample_indices(size: int, count: int, chooser: random.Random) -> torch.Tensor:
    """Draw up to ``count`` indices below ``size`` and return the indices sorted.

    Include the first and the last index, because bugs often affect edges.
    """
    return torch.tensor(sorted({0, size - 1, *chooser.sample(range(size), min(count - 2, size))}))


@contextmanager
def use_float32_precision(precision: str) -> Iterator[None]:
    previous_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous_precision)


@contextmanager
def use_one_torch_thread() -> Iterator[None]:
    """Let torch use only one CPU thread inside a with block, because small sums are faster this way.

    Waking 64 threads takes 20 times as long as a small sum, or 60 times as long if four processes do so at once.
    """
    thread_count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(thread_count)


def explain_wrong_type(result: object, expected: torch.Tensor) -> str:
    """Return one line that says how a launch's result differs from ``expected`` in dtype, shape or device. Return an
    empty text if nothing differs, or if the result is not a tensor.

    Accept only plain strided tensors. A tensor of a subclass, or a tensor that torch negates lazily, may defer work
    until after the timed launch.
    """
    if not isinstance(result, torch.Tensor):
        return ""
    if type(result) is not torch.Tensor or result.layout != torch.strided or result.is_neg():
        kind = f"{type(result).__name__} ({result.layout}{', negated on read' if result.is_neg() else ''})"
        return f"the launch returned a {kind}: it must return an ordinary dense torch.Tensor whose values are computed"
    actual_type, expected_type = (f"{each.dtype} {tuple(each.shape)} on {each.device}" for each in (result, expected))
    return "" if actual_type == expected_type else f"the launch returned a tensor of {actual_type}, not {expected_type}"


def list_result_tensors(returned: object) -> list[torch.Tensor]:
    """Return the tensors of a launch's result: the result itself, or those in a tuple."""
    results = returned if isinstance(returned, tuple) else (returned,)
    return [each.detach() for each in results if isinstance(each, torch.Tensor)]


def verify_special_value_output(
    output: torch.Tensor, expected: torch.Tensor, special_values: str, details: Mapping[str, str | float]
) -> Verdict:
    """Verify the output of a launch with special values, such as NaN, among the operands.

    Each element of ``output`` must equal that of ``expected``, or both must be NaN. ``special_values``: a description
    of the special values for the verdict. ``details``: the details of the verdict.
    """
    wrong_count = int((~((output == expected) | (output.isnan() & expected.isnan()))).sum().item())
    reason = f"{wrong_count} output values are wrong if the operands contain {special_values}"
    return Verdict(math.inf, 0.0, details, reason=reason) if wrong_count else Verdict(0.0, 0.0, details)


def compute_max_error(errors: Iterable[float]) -> float:
    """Return the largest error, 0 if there are no errors, or NaN if any error is NaN.

    Python's ``max`` would ignore a NaN that does not come first.
    """
    known_errors = list(errors)
    return math.nan if any(map(math.isnan, known_errors)) else max(known_errors, default=0.0)


class ChangeDetector:
    """Detect changed tensors. A call returns the names of the tensors that have changed since the object was made.

    Compare integer sums of the tensors' bits along rows and along columns. Integer sums do not depend on the order of
    addition, and changing or moving an element changes at least one sum.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        self._initial_checksums = {name: compute_checksums(tensor) for name, tensor in self._tensors.items()}

    def __call__(self) -> Sequence[str]:
        return [
            name
            for name, tensor in self._tensors.items()
            if not torch.equal(self._initial_checksums[name], compute_checksums(tensor))
        ]


def compute_checksums(tensor: torch.Tensor) -> torch.Tensor:
    """Return sums of the bits of a contiguous tensor, as a one-dimensional tensor of integers.

    Arrange the words of the tensor in a table with _CHECKSUM_COLUMNS columns. The result contains the sum of each
    column and of each row, and the last words, which do not fill a row.
    """
    words = view_as_words(tensor.detach().reshape(-1))
    table_word_count = words.numel() // _CHECKSUM_COLUMNS * _CHECKSUM_COLUMNS
    table, remaining_words = words[:table_word_count].view(-1, _CHECKSUM_COLUMNS), words[table_word_count:]
    # Sum in the dtype of the words: for a wider dtype, torch would copy the operands. Overflow keeps equal sums equal.
    return torch.cat((table.sum(0, dtype=words.dtype), table.sum(1, dtype=words.dtype), remaining_words))


def queue_checksum(tensor: torch.Tensor) -> Callable[[], int]:
    """Queue a checksum of a tensor's bits on the tensor's device, and return a function that waits for the checksum.

    The checksum weights the sums of rows and columns by their position, so that a swap of two elements changes it.
    """
    sums = compute_checksums(tensor)
    weights = torch.arange(1, sums.numel() + 1, dtype=torch.int32, device=sums.device)
    checksum = (sums.to(torch.int32) * weights).sum(dtype=torch.int64)
    return lambda: int(checksum.item())


def view_as_words(buffer: torch.Tensor) -> torch.Tensor:
    """View the memory of a one-dimensional tensor as integers of the widest dtype that fits its size and alignment: 32,
    16 or 8 bits.
    """
    nbytes = buffer.numel() * buffer.element_size()
    for dtype in (torch.int32, torch.int16):
        if nbytes % dtype.itemsize == 0 and buffer.storage_offset() * buffer.element_size() % dtype.itemsize == 0:
            return buffer.view(dtype)
    return buffer.view(torch.int8)


# -- changes of operands between launches ------------------------------------------------------------------------------


# The sign bit of an 8-bit float, which is also the sign bit of the upper float in a byte with two 4-bit floats (e2m1).
# The second constant is the sign bit of the lower float in this byte.
_SIGN_BIT, _SIGN_BIT_OF_LOWER_E2M1 = 0x80, 0x08
# The number of sign patterns that SignFlipper uses per operand, and the maximum number of rows that join_rows joins.
_SIGN_PATTERN_COUNT, _MAX_JOINED_ROWS = 16, 64


def draw_integers(
    upper_limit: int, size: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Draw integers from 0 to ``upper_limit`` - 1 with a random seed, so that no kernel can predict them.

    Return a tensor of the given size and dtype on the device. It is drawn on the host if the device has no generator.
    """
    try:
        generator = torch.Generator(device=device)
    except RuntimeError:
        return draw_integers(upper_limit, size, torch.device("cpu"), dtype).to(device)
    generator.manual_seed(secrets.randbits(63))
    return torch.randint(upper_limit, tuple(size), generator=generator, device=device, dtype=dtype)


def draw_booleans(size: Sequence[int], device: torch.device) -> torch.Tensor:
    """Draw a tensor of booleans that no kernel can predict."""
    return draw_integers(2, size, device, torch.int8) == 1


def join_rows(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as a matrix in which each row joins up to _MAX_JOINED_ROWS rows of the tensor.

    A pattern of ``SignFlipper`` has rows + columns - 1 signs, so joining many short rows makes the patterns shorter.
    """
    width = tensor.shape[-1]
    return tensor.view(-1, width * math.gcd(tensor.numel() // width, _MAX_JOINED_ROWS))


def draw_signs(size: Sequence[int], device: torch.device) -> torch.Tensor:
    """Draw an int8 tensor of signs, 1 and -1, that no kernel can predict."""
    return torch.where(draw_booleans(size, device), -1, 1).to(torch.int8)


class SignFlipper:
    """Flip random signs of an operand (..., rows, K), so that results of earlier launches become wrong.

    A flip is exact in every dtype, and a second flip undoes the first. The device draws random patterns of signs once,
    so a flip takes one pass over the operand and does not wait for the host. Row i uses the signs i, i+1, ... of a
    pattern. If all rows had the same signs, a kernel could multiply only the flipped columns and correct its last
    result. In an operand of dtype uint8, each byte contains two e2m1 values.
    """

    def __init__(self, operand: torch.Tensor) -> None:
        self._operand = operand
        #: The indices of the patterns that have been applied an odd number of times.
        self._applied_indices: set[int] = set()
        self._last_index: int | None = None

    def flip_random_signs(self) -> None:
        """Queue flips of random signs of the operand, in a pattern that differs from the last call's pattern."""
        index = self._last_index = secrets.choice(
            [index for index in range(_SIGN_PATTERN_COUNT) if index != self._last_index]
        )
        self._applied_indices ^= {index}
        self._flip_signs_in_place(self._sign_patterns[index])

    def restore_signs(self) -> None:
        """Queue flips that undo all changes, so that the operand has its original values."""
        for index in self._applied_indices:
            self._flip_signs_in_place(self._sign_patterns[index])
        self._applied_indices = set()

    @cached_property
    def _sign_patterns(self) -> torch.Tensor:
        """All patterns, drawn at random with at least one flip each, as a tensor (patterns, rows + K - 1).

        The elements are factors 1 and -1 or, for 8-bit floats and e2m1 values, bytes with a 1 in each bit to flip.
        """
        operand = self._operand
        size = (_SIGN_PATTERN_COUNT, operand.shape[:-1].numel() + operand.shape[-1] - 1)
        flips = draw_booleans(size, operand.device)
        flips[:, secrets.randbelow(size[1])] = True
        if operand.dtype.itemsize > 1 or operand.dtype == torch.int8:
            return 1 - 2 * flips.to(operand.dtype)
        bits = flips.to(torch.uint8) * _SIGN_BIT
        if operand.dtype == torch.uint8:
            bits += draw_booleans(size, operand.device).to(torch.uint8) * _SIGN_BIT_OF_LOWER_E2M1
        return bits

    @torch.no_grad()
    def _flip_signs_in_place(self, pattern: torch.Tensor) -> None:
        operand = self._operand
        pattern = pattern.unfold(0, operand.shape[-1], 1).view(operand.shape)
        if operand.dtype.itemsize > 1 or operand.dtype == torch.int8:
            operand.mul_(pattern)
            return
        bits = operand.view(torch.uint8)
        # The fnuz dtypes have NaN in place of a negative zero, so zeros must keep their bits.
        bits.bitwise_xor_(pattern * (bits != 0) if "fnuz" in str(operand.dtype) else pattern)


# -- comparison with earlier outputs -----------------------------------------------------------------------------------


#: The integer dtype for each number of bytes per element.
_INTEGER_DTYPE_BY_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def remember_outputs(
    get_outputs: Callable[[object], Sequence[torch.Tensor]], result: object
) -> Callable[[object], Callable[[], WrongCells]]:
    """Copy a launch's outputs, and return a function that compares the outputs of a later launch with the copy.

    ``get_outputs``: returns the output tensors of a launch, given its result. The returned function queues a comparison
    of all bits on the device. It returns a function that waits for the comparison and returns the wrong cells.
    """
    remembered_outputs = [_view_bits_as_matrices(each).clone() for each in get_outputs(result)]
    value_count = sum(each.numel() for each in remembered_outputs)

    def queue_comparison(later_result: object) -> Callable[[], WrongCells]:
        pairs = zip(get_outputs(later_result), remembered_outputs, strict=True)
        wrong_cells = [_flag_wrong_cells(_view_bits_as_matrices(later) != remembered) for later, remembered in pairs]

        def wait_for_wrong_cells() -> WrongCells:
            """Wait for the comparison. Return the wrong cells (see WrongCells) of the first wrong output."""
            index = next((index for index, cells in enumerate(wrong_cells) if cells.any()), 0)
            positions = frozenset((b, row, column) for b, row, column in wrong_cells[index].nonzero().tolist())
            rows, columns = remembered_outputs[index].shape[1:]
            return WrongCells(positions, rows, columns, value_count)

        return wait_for_wrong_cells

    return queue_comparison


def _view_bits_as_matrices(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's bits as integers of the same size, in the shape (batch, rows, columns)."""
    bits = tensor.detach().view(_INTEGER_DTYPE_BY_BYTES[tensor.dtype.itemsize])
    return bits.reshape(-1, *(bits.shape[-2:] if bits.dim() > 1 else (1, bits.shape[-1])))


def _flag_wrong_cells(flags: torch.Tensor) -> torch.Tensor:
    """Return which cells of a tensor contain a wrong value. A cell is a square of CELL_SIZE x CELL_SIZE values.

    ``flags``: whether each value is wrong (batch, rows, columns). The result is (batch, rows of cells, columns of
    cells).
    """
    padded = torch.nn.functional.pad(flags, (0, -flags.shape[2] % CELL_SIZE, 0, -flags.shape[1] % CELL_SIZE))
    return padded.unflatten(2, (-1, CELL_SIZE)).any(3).unflatten(1, (-1, CELL_SIZE)).any(2)  # type: ignore[no-any-return]
