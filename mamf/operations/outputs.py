"""What torch's kernels of all operations share: where they run, and what makes their results worth believing: outputs
that cannot be left over, operands that stay.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from mamf.backend import Backend, Unavailable
from mamf.torch_backend import TorchBackend

_POISON_BYTE = 0x7F  # NaN in every float8 of torch but fnuz, where 0x80 is
_POISON_INT = -(2**31) + 1
# Fresh tensors that an allocator may hand out again in place of the one that a launch returned.
_SPARE_BLOCKS = 2
_COLUMNS = 4096


def check_torch(backend: Backend) -> Unavailable | None:
    """Why torch runs nothing on a backend, or None."""
    if isinstance(backend, TorchBackend):
        return None
    return Unavailable(f"torch has no device of backend {backend.name}", "'mamf backends' lists those that it has")


def poison(tensor: torch.Tensor) -> None:
    """Overwrite with what no launch yields, so that an entry that is not written cannot pass."""
    with torch.no_grad():
        if tensor.dtype in (torch.int32, torch.int64):
            tensor.fill_(_POISON_INT)
        elif tensor.dtype.itemsize == 1:
            tensor.view(torch.uint8).fill_(0x80 if "fnuz" in str(tensor.dtype) else _POISON_BYTE)
        else:
            tensor.fill_(float("nan"))


def poison_outputs(written: Iterable[torch.Tensor], returned: object) -> None:
    """Poison the outputs that launches write, and what they returned, with the memory that may be returned next."""
    for tensor in written:
        poison(tensor)
    for tensor in tensors_of(returned):
        spares = [torch.empty_like(tensor) for _ in range(_SPARE_BLOCKS)]
        for each in (tensor, *spares):
            poison(each)


def select(tensor: torch.Tensor, dim: int, indices: torch.Tensor) -> torch.Tensor:
    """index_select that also takes 8-bit floats, which torch can only move as bytes."""
    if tensor.dtype.itemsize > 1 or tensor.dtype in (torch.int8, torch.uint8):
        return tensor.index_select(dim, indices)
    return tensor.view(torch.uint8).index_select(dim, indices).view(tensor.dtype)


def sample_indices(size: int, count: int, chooser: random.Random) -> torch.Tensor:
    """First, last and random others: a kernel that mishandles an edge does so there."""
    others = chooser.sample(range(size), min(count - 2, size))
    return torch.tensor(sorted({0, size - 1, *others}))


@contextmanager
def float32_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """For sums this small, waking torch's threads takes longer than the sums: with 64 of them 20 times as long, and 60
    times where four processes do so at once.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def explain_wrong_type(result: object, expected: torch.Tensor) -> str:
    """Why what a launch returned is no output like ``expected``, in a line; empty if it is one, or no tensor at all.

    A subclass, or a tensor that is negated when it is read, may put work off until after the launch.
    """
    if not isinstance(result, torch.Tensor):
        return ""
    if type(result) is not torch.Tensor or result.layout != torch.strided or result.is_neg():
        kind = f"{type(result).__name__} ({result.layout}{', not written out' if result.is_neg() else ''})"
        return f"the launch returned a {kind}: return a plain strided torch.Tensor whose values it computed"
    found, wanted = (f"{each.dtype} {tuple(each.shape)} on {each.device}" for each in (result, expected))
    return "" if found == wanted else f"the launch returned a tensor of {found}, not of {wanted}"


def tensors_of(returned: object) -> list[torch.Tensor]:
    """The tensors of a result: itself, or those of a tuple."""
    if isinstance(returned, torch.Tensor):
        return [returned.detach()]
    return [each.detach() for each in returned if isinstance(each, torch.Tensor)] if isinstance(returned, tuple) else []


class Unchanged:
    """Called, the names of the tensors that are not what they were when this was made.

    By sums of their bits along rows and along columns, in whole numbers: the order of adding does not matter, and an
    element that is changed or moved shows in one of them.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        self._before = {name: checksum(tensor) for name, tensor in self._tensors.items()}

    def __call__(self) -> Sequence[str]:
        return [name for name, tensor in self._tensors.items() if not torch.equal(self._before[name], checksum(tensor))]


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of a contiguous tensor's bits over rows and over columns of _COLUMNS words."""
    words = as_words(tensor.detach().reshape(-1))
    whole = words.numel() // _COLUMNS * _COLUMNS
    table, rest = words[:whole].view(-1, _COLUMNS), words[whole:]
    # In the words' own kind: a wider one would be a copy of the operands. Sums wrap around, and may.
    return torch.cat((table.sum(0, dtype=words.dtype), table.sum(1, dtype=words.dtype), rest))


def queue_checksum(tensor: torch.Tensor) -> Callable[[], int]:
    """One number of a tensor's bits, computed on its device; what is returned waits for it.

    Words are weighed by where they stand among the columns, so that two that change places show.
    """
    sums = checksum(tensor)
    weights = torch.arange(1, sums.numel() + 1, dtype=torch.int32, device=sums.device)
    number = (sums.to(torch.int32) * weights).sum(dtype=torch.int64)
    return lambda: int(number.item())


def as_words(flat: torch.Tensor) -> torch.Tensor:
    """A flat tensor's memory as whole numbers of the widest kind that it holds a whole number of."""
    nbytes = flat.numel() * flat.element_size()
    for dtype in (torch.int32, torch.int16):
        if nbytes % dtype.itemsize == 0 and flat.storage_offset() * flat.element_size() % dtype.itemsize == 0:
            return flat.view(dtype)
    return flat.view(torch.int8)
