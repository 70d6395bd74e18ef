"""Checks for torch kernels of all operations: poisoned outputs, unchanged operands, types and checksums."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from mamf.backend import Backend, Unavailable
from mamf.torch_backend import TorchBackend

_POISON_BYTE = 0x7F  # NaN in all float8 dtypes of torch except fnuz, where 0x80 is NaN
_POISON_INT = -(2**31) + 1
# New tensors to poison, whose memory the allocator may reuse for the next returned output.
_SPARE_BLOCKS = 2
_COLUMNS = 4096


def check_torch(backend: Backend) -> Unavailable | None:
    """Why torch does not support this backend, or None."""
    if isinstance(backend, TorchBackend):
        return None
    return Unavailable(f"torch has no device for backend {backend.name}", "'mamf backends' lists available backends")


def poison(tensor: torch.Tensor) -> None:
    """Overwrite a tensor with values that no launch produces, so that entries that are not written fail the check."""
    with torch.no_grad():
        if tensor.dtype in (torch.int32, torch.int64):
            tensor.fill_(_POISON_INT)
        elif tensor.dtype.itemsize == 1:
            tensor.view(torch.uint8).fill_(0x80 if "fnuz" in str(tensor.dtype) else _POISON_BYTE)
        else:
            tensor.fill_(float("nan"))


def poison_outputs(written: Iterable[torch.Tensor], returned: object) -> None:
    """Poison the outputs that launches write, the tensors that they returned, and memory that may be returned next."""
    for tensor in written:
        poison(tensor)
    for tensor in tensors_of(returned):
        spares = [torch.empty_like(tensor) for _ in range(_SPARE_BLOCKS)]
        for each in (tensor, *spares):
            poison(each)


def select(tensor: torch.Tensor, dim: int, indices: torch.Tensor) -> torch.Tensor:
    """index_select that also supports 8-bit floats, which torch can only move as bytes."""
    if tensor.dtype.itemsize > 1 or tensor.dtype in (torch.int8, torch.uint8):
        return tensor.index_select(dim, indices)
    return tensor.view(torch.uint8).index_select(dim, indices).view(tensor.dtype)


def sample_indices(size: int, count: int, chooser: random.Random) -> torch.Tensor:
    """The first, the last and random other indices: bugs at edges show in the first and the last."""
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
    """Why the result of a launch has the wrong type, in one line; empty if it is like ``expected`` or not a tensor.

    A subclass, or a tensor that is negated on read, may defer work until after the launch.
    """
    if not isinstance(result, torch.Tensor):
        return ""
    if type(result) is not torch.Tensor or result.layout != torch.strided or result.is_neg():
        kind = f"{type(result).__name__} ({result.layout}{', negated on read' if result.is_neg() else ''})"
        return f"the launch returned a {kind}: return a plain strided torch.Tensor whose values it computed"
    found, wanted = (f"{each.dtype} {tuple(each.shape)} on {each.device}" for each in (result, expected))
    return "" if found == wanted else f"the launch returned a tensor of {found}, not {wanted}"


def tensors_of(returned: object) -> list[torch.Tensor]:
    """The tensors of a result: the result itself, or the tensors in a tuple."""
    if isinstance(returned, torch.Tensor):
        return [returned.detach()]
    return [each.detach() for each in returned if isinstance(each, torch.Tensor)] if isinstance(returned, tuple) else []


class Unchanged:
    """A check that tensors stay unchanged. Calling it returns the names of the tensors that changed since its creation.

    It compares integer sums of their bits along rows and along columns: the order of addition does not matter, and a
    changed or moved element changes one of the sums.
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


def as_words(flat: torch.Tensor) -> torch.Tensor:
    """A flat tensor's memory as integers of the widest dtype that fits its size and alignment."""
    nbytes = flat.numel() * flat.element_size()
    for dtype in (torch.int32, torch.int16):
        if nbytes % dtype.itemsize == 0 and flat.storage_offset() * flat.element_size() % dtype.itemsize == 0:
            return flat.view(dtype)
    return flat.view(torch.int8)
