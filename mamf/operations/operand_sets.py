"""Operand sets of torch kernels: they take memory from the pool, rotate over launches, and are checked.

A class that derives from TorchKernel implements ``operand_set``, which makes one set. This module does the rest: it
rotates over sets, poisons outputs, checks that operands stay unchanged, changes them between launches and rewrites
outputs.
"""

from __future__ import annotations

import math
import random
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from mamf.backend import Backend, OperandPool, Unavailable
from mamf.kernel import CELL, Buffer, Kernel, Prepared, ProblemT, ShapeT, Verdict, WrongCells
from mamf.torch_backend import TorchBackend

AnswerT = TypeVar("AnswerT")
#: The buffer that the classic regime copies over the output of the first set. Without it, the output is zeroed.
_REWRITE_BUFFER = "c_rewrite"


@dataclass(frozen=True)
class OperandSet:
    """One set of operands. The fields that are not explained here are those of ``Prepared``, but for this set only.

    ``outputs``: the tensors that a launch writes. ``change``: queues a random change of the operands, which ``verify``
    expects from then on; ``restore`` undoes all changes. If ``change`` is None, operands never change. ``changed``:
    returns the names of modified operands, among those that ``operand_set`` created itself.
    """

    launch: Callable[[], object]
    verify: Callable[[object], Verdict]
    outputs: Sequence[torch.Tensor] = ()
    verify_whole: Callable[[object], Verdict] | None = None
    checksum: Callable[[object], Callable[[], int]] | None = None
    change: Callable[[], object] | None = None
    restore: Callable[[], object] = lambda: None
    changed: Callable[[], Sequence[str]] = tuple
    repeats_bits: bool = False
    locate: Callable[[object], WrongCells] | None = None
    verify_special: Callable[[], Verdict] | None = None


class TorchKernel(Kernel[ProblemT, ShapeT]):
    """A kernel on torch tensors. Derived classes implement ``operand_set``."""

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return check_torch_backend(backend)

    @abstractmethod
    def operand_set(
        self, backend: Backend, problem: ProblemT, shape: ShapeT, flat: Mapping[str, torch.Tensor]
    ) -> OperandSet:
        """Make one set from the flat memory of its buffers, which may be larger than needed (see ``view_as``)."""

    def configured(self, backend: Backend, problem: ProblemT, shape: ShapeT) -> TorchKernel[ProblemT, ShapeT]:
        """Return the kernel that makes the operand sets: this one, or one with a configuration for this shape."""
        return self

    def prepare(
        self,
        backend: Backend,
        problem: ProblemT,
        shape: ShapeT,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        kernel, buffers = self.configured(backend, problem, shape), problem.buffers(shape, sets, rewrite)
        whole = take_pool_buffers(pool, buffers)
        source = whole.pop(_REWRITE_BUFFER, None)
        # Create the check before the kernel sees the operands, because operand_set may already overwrite them.
        unchanged = ChangeDetector({name: whole[name] for name in whole if buffers[name].fill})
        ready = [kernel.operand_set(backend, problem, shape, flat) for flat in split_into_sets(whole, sets)]
        prepared = combine_operand_sets(ready, unchanged)
        if not rewrite or not ready[0].outputs:
            return prepared
        output = ready[0].outputs[0]
        overwrite = output.zero_ if source is None else partial(output.copy_, source.view(output.shape))
        return replace(prepared, rewrite_output=overwrite)


def take_pool_buffers(pool: OperandPool, buffers: Mapping[str, Buffer]) -> dict[str, torch.Tensor]:
    """Take flat memory from the pool for each buffer."""
    return {name: pool.take(name, *buffer) for name, buffer in buffers.items()}


def split_into_sets(whole: Mapping[str, torch.Tensor], sets: int) -> list[dict[str, torch.Tensor]]:
    """Split each buffer into the flat memory of its sets."""
    parts = {name: tensor.chunk(sets) for name, tensor in whole.items()}
    return [{name: parts[name][index] for name in whole} for index in range(sets)]


def view_as(flat: torch.Tensor, *sizes: int) -> torch.Tensor:
    """View the beginning of flat memory as a tensor of these sizes."""
    return flat[: math.prod(sizes)].view(sizes)


def combine_operand_sets(
    sets: Sequence[OperandSet],
    unchanged: Callable[[], Sequence[str]],
    held_bytes: int = 0,
) -> Prepared:
    """Combine operand sets into a Prepared.

    ``unchanged``: returns the names of operands that launches have modified; called after all sets are restored.
    """

    def poison(returned: Sequence[object]) -> None:
        for each, result in zip(sets, returned, strict=True):
            poison_outputs(each.outputs, result)

    def changed_operands() -> Sequence[str]:
        for each in sets:
            each.restore()
        return [*unchanged(), *dict.fromkeys(name for each in sets for name in each.changed())]

    changes = [each.change for each in sets if each.change]
    return Prepared(
        launches=[each.launch for each in sets],
        verify=lambda index, result: sets[index].verify(result),
        verify_whole=_combine_by_index([each.verify_whole for each in sets]),
        change_operands=(lambda: [change() for change in changes]) if changes else None,
        poison=poison,
        changed_operands=changed_operands,
        held_bytes=held_bytes,
        checksum=_combine_by_index([each.checksum for each in sets]),
        remember=lambda index, result: remember_outputs(
            lambda returned: list_tensors(returned) or sets[index].outputs, result
        ),
        repeats_bits=all(each.repeats_bits for each in sets),
        locate=_combine_by_index([each.locate for each in sets]),
        verify_special=sets[0].verify_special,
    )


def _combine_by_index(calls: Sequence[Callable[[object], AnswerT] | None]) -> Callable[[int, object], AnswerT] | None:
    """Combine one function per set into one that also takes the set's index; None if the sets have no function."""
    known = [call for call in calls if call is not None]
    return (lambda index, result: known[index](result)) if known else None


# -- checks ------------------------------------------------------------------------------------------------------------


_POISON_BYTE = 0x7F  # NaN in all float8 dtypes of torch except fnuz, where 0x80 is NaN
_POISON_INT = -(2**31) + 1
# How many new tensors to poison per output, because the allocator may reuse their memory for the next output.
_SPARE_BLOCKS = 2
_COLUMNS = 4096


def check_torch_backend(backend: Backend) -> Unavailable | None:
    """Return why torch does not support this backend, or None."""
    if isinstance(backend, TorchBackend):
        return None
    return Unavailable(f"torch has no device for backend {backend.name}", "'mamf backends' lists available backends")


def poison(tensor: torch.Tensor) -> None:
    """Overwrite a tensor with values that no launch produces, to find entries that a launch does not write."""
    with torch.no_grad():
        if tensor.dtype in (torch.int32, torch.int64):
            tensor.fill_(_POISON_INT)
        elif tensor.dtype.itemsize == 1:
            tensor.view(torch.uint8).fill_(0x80 if "fnuz" in str(tensor.dtype) else _POISON_BYTE)
        else:
            tensor.fill_(float("nan"))


def poison_outputs(written: Iterable[torch.Tensor], returned: object) -> None:
    """Poison outputs that launches write, tensors that they returned, and free memory that the next launch may use."""
    for tensor in written:
        poison(tensor)
    for tensor in list_tensors(returned):
        spares = [torch.empty_like(tensor) for _ in range(_SPARE_BLOCKS)]
        for each in (tensor, *spares):
            poison(each)


def select(tensor: torch.Tensor, dim: int, indices: torch.Tensor) -> torch.Tensor:
    """Select like torch.index_select, but also from 8-bit floats, which index_select does not support."""
    if tensor.dtype.itemsize > 1 or tensor.dtype in (torch.int8, torch.uint8):
        return tensor.index_select(dim, indices)
    return tensor.view(torch.uint8).index_select(dim, indices).view(tensor.dtype)


def draw_sample_indices(size: int, count: int, chooser: random.Random) -> torch.Tensor:
    """Return sorted indices: the first and the last, where bugs at edges show, and random others."""
    return torch.tensor(sorted({0, size - 1, *chooser.sample(range(size), min(count - 2, size))}))


@contextmanager
def use_float32_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def use_one_torch_thread() -> Iterator[None]:
    """Use one torch thread for small sums: waking 64 threads takes 20 times as long as the sums, and 60 times as long
    if four processes do it at once.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def explain_wrong_type(result: object, expected: torch.Tensor) -> str:
    """Return in one line why a launch's result has the wrong type; empty if it is like ``expected``, or not a tensor.

    Only plain strided tensors are accepted: a subclass, or a tensor that is negated when it is read, may defer work
    until after the launch.
    """
    if not isinstance(result, torch.Tensor):
        return ""
    if type(result) is not torch.Tensor or result.layout != torch.strided or result.is_neg():
        kind = f"{type(result).__name__} ({result.layout}{', negated on read' if result.is_neg() else ''})"
        return f"the launch returned a {kind}: return a plain strided torch.Tensor with computed values"
    found, wanted = (f"{each.dtype} {tuple(each.shape)} on {each.device}" for each in (result, expected))
    return "" if found == wanted else f"the launch returned a tensor of {found}, not {wanted}"


def list_tensors(returned: object) -> list[torch.Tensor]:
    """Return the tensors of a launch's result: the result itself, or those in a tuple."""
    if isinstance(returned, torch.Tensor):
        return [returned.detach()]
    return [each.detach() for each in returned if isinstance(each, torch.Tensor)] if isinstance(returned, tuple) else []


def verify_special_values(
    found: torch.Tensor, expected: torch.Tensor, special: str, details: Mapping[str, str | float]
) -> Verdict:
    """Verify that special values in the operands, such as NaN, change only the expected values of the output."""
    differing = int((~((found == expected) | (found.isnan() & expected.isnan()))).sum().item())
    reason = f"{differing} values are wrong with {special} among the operands"
    return Verdict(math.inf, 0.0, details, reason=reason) if differing else Verdict(0.0, 0.0, details)


def get_max_error(errors: Iterable[float]) -> float:
    """Return the largest error, or NaN if any is NaN. (``max`` ignores a NaN that does not come first.)"""
    found = list(errors)
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


class ChangeDetector:
    """A check that tensors stay unchanged. Calling it returns the names of the tensors that changed since its creation.

    It compares integer sums of the tensors' bits along rows and along columns. The order of addition does not matter,
    and changing or moving an element changes at least one sum.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        self._before = {name: checksum(tensor) for name, tensor in self._tensors.items()}

    def __call__(self) -> Sequence[str]:
        return [name for name, tensor in self._tensors.items() if not torch.equal(self._before[name], checksum(tensor))]


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum the words of a contiguous tensor over rows and columns of a table that is _COLUMNS words wide."""
    words = view_as_words(tensor.detach().reshape(-1))
    whole = words.numel() // _COLUMNS * _COLUMNS
    table, rest = words[:whole].view(-1, _COLUMNS), words[whole:]
    # Sums use the dtype of the words, because a wider one would copy the operands. Overflow is harmless.
    return torch.cat((table.sum(0, dtype=words.dtype), table.sum(1, dtype=words.dtype), rest))


def queue_checksum(tensor: torch.Tensor) -> Callable[[], int]:
    """Queue a checksum of a tensor's bits on its device; the returned function waits for the number.

    Sums are weighted by their position, so that a swap of two elements changes the checksum.
    """
    sums = checksum(tensor)
    weights = torch.arange(1, sums.numel() + 1, dtype=torch.int32, device=sums.device)
    number = (sums.to(torch.int32) * weights).sum(dtype=torch.int64)
    return lambda: int(number.item())


def view_as_words(flat: torch.Tensor) -> torch.Tensor:
    """View a flat tensor's memory as integers, of the widest dtype that fits its size and alignment."""
    nbytes = flat.numel() * flat.element_size()
    for dtype in (torch.int32, torch.int16):
        if nbytes % dtype.itemsize == 0 and flat.storage_offset() * flat.element_size() % dtype.itemsize == 0:
            return flat.view(dtype)
    return flat.view(torch.int8)


# -- operands that change between launches -----------------------------------------------------------------------------


_SIGN_BIT, _SIGN_BIT_OF_LOWER = 0x80, 0x08
_PATTERNS, _ROWS_IN_ONE = 16, 64


def draw_integers(
    below: int, size: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Draw unpredictable integers from 0 to ``below`` - 1; on the host if the device has no generator."""
    try:
        generator = torch.Generator(device=device)
    except RuntimeError:
        return draw_integers(below, size, torch.device("cpu"), dtype).to(device)
    generator.manual_seed(secrets.randbits(63))
    return torch.randint(below, tuple(size), generator=generator, device=device, dtype=dtype)


def draw_booleans(size: Sequence[int], device: torch.device) -> torch.Tensor:
    """Draw unpredictable booleans."""
    return draw_integers(2, size, device, torch.int8) == 1


def join_rows(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor with up to _ROWS_IN_ONE rows joined into one, so that ``SignFlipper`` needs less memory."""
    width = tensor.shape[-1]
    return tensor.view(-1, width * math.gcd(tensor.numel() // width, _ROWS_IN_ONE))


def draw_signs(size: Sequence[int], device: torch.device) -> torch.Tensor:
    """Draw unpredictable signs, 1 and -1, as int8."""
    return torch.where(draw_booleans(size, device), -1, 1).to(torch.int8)


class SignFlipper:
    """Flips random signs of an operand (..., rows, K), so that a result from an earlier launch becomes wrong.

    A flip is exact in every dtype, and a second flip undoes it. Signs come from fresh entropy, which no kernel can
    predict, and are drawn on the operand's device, so nothing waits for the host. Patterns are drawn once, so a change
    is one pass over the operand. Operands are 8-bit floats, two e2m1 values per byte (uint8), or other numbers. Row i
    uses the signs i, i+1, ... of a pattern: with the same signs in all rows, a kernel could update its last result
    with only the half of K that flipped.
    """

    def __init__(self, operand: torch.Tensor) -> None:
        self._operand = operand
        self._patterns: torch.Tensor | None = None
        #: The patterns that have been applied an odd number of times.
        self._present: set[int] = set()
        self._last: int | None = None

    def change(self) -> None:
        """Queue a pattern of flips that differs from the last one."""
        if self._patterns is None:
            self._patterns = self._draw_patterns()
        index = self._last = secrets.choice([index for index in range(_PATTERNS) if index != self._last])
        self._present ^= {index}
        self._apply(self._patterns[index])

    def restore(self) -> None:
        """Queue flips that restore the original operand."""
        for index in self._present:
            assert self._patterns is not None
            self._apply(self._patterns[index])
        self._present = set()

    def _draw_patterns(self) -> torch.Tensor:
        """Draw patterns with at least one flip each: factors for numbers, or bits to flip for 8-bit values."""
        operand = self._operand
        size = (_PATTERNS, operand.shape[:-1].numel() + operand.shape[-1] - 1)
        flips = draw_booleans(size, operand.device)
        flips[:, secrets.randbelow(size[1])] = True
        if operand.dtype.itemsize > 1 or operand.dtype == torch.int8:
            return 1 - 2 * flips.to(operand.dtype)
        bits = flips.to(torch.uint8) * _SIGN_BIT
        if operand.dtype == torch.uint8:
            bits += draw_booleans(size, operand.device).to(torch.uint8) * _SIGN_BIT_OF_LOWER
        return bits

    @torch.no_grad()
    def _apply(self, pattern: torch.Tensor) -> None:
        operand = self._operand
        pattern = pattern.unfold(0, operand.shape[-1], 1).view(operand.shape)
        if operand.dtype.itemsize > 1 or operand.dtype == torch.int8:
            operand.mul_(pattern)
            return
        bits = operand.view(torch.uint8)
        # float8 dtypes without a negative zero have a NaN in its place, so zeros keep their bits.
        bits.bitwise_xor_(pattern * (bits != 0) if "fnuz" in str(operand.dtype) else pattern)


# -- outputs that repeat -----------------------------------------------------------------------------------------------


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def remember_outputs(
    outputs_of: Callable[[object], Sequence[torch.Tensor]], result: object
) -> Callable[[object], Callable[[], WrongCells]]:
    """Keep a launch's outputs, and return a function that compares later outputs with them (``Prepared.remember``).

    ``outputs_of``: returns the outputs of a launch, given its result. Whole outputs are compared bit by bit on their
    device, without waiting for the device.
    """
    first = [_view_bits(each).clone() for each in outputs_of(result)]
    values = sum(each.numel() for each in first)

    def compare(later: object) -> Callable[[], WrongCells]:
        pairs = zip(outputs_of(later), first, strict=True)
        found = [_find_wrong_cells(_view_bits(now) != before) for now, before in pairs]

        def read() -> WrongCells:
            """Return the differing cells of the first output that differs."""
            number = next((number for number, cells in enumerate(found) if cells.any()), 0)
            places = frozenset((b, row, column) for b, row, column in found[number].nonzero().tolist())
            rows, columns = first[number].shape[1:]
            return WrongCells(places, rows, columns, values)

        return read

    return compare


def _view_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's bits as integers, in the shape of a batch of matrices."""
    bits = tensor.detach().view(_INTEGERS[tensor.dtype.itemsize])
    return bits.reshape(-1, *(bits.shape[-2:] if bits.dim() > 1 else (1, bits.shape[-1])))


def _find_wrong_cells(flags: torch.Tensor) -> torch.Tensor:
    """Return which cells contain a flag, given flags by matrix, row and column."""
    padded = torch.nn.functional.pad(flags, (0, -flags.shape[2] % CELL, 0, -flags.shape[1] % CELL))
    cells: torch.Tensor = padded.unflatten(2, (-1, CELL)).any(3).unflatten(1, (-1, CELL)).any(2)
    return cells
