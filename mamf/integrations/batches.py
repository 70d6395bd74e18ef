"""Tokens and samples of a training batch, whatever holds it: mappings, named tuples, dataclasses, lists of these.

Nothing is guessed. Tokens are a tensor of a name that says so, or whole numbers of shape (sequences, length) that come
first; samples are the first dimension that all tensors share. A tensor is what has ``shape`` and ``dtype``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, NamedTuple

from mamf.errors import UsageError
from mamf.limits import shorten

#: Of shape (..., length), then the width of an embedding if the name says so.
_TOKENS, _EMBEDDED = ("input_ids", "inputs_embeds", "token_ids", "tokens"), "inputs_embeds"
#: Tokens too if they are whole numbers of two dimensions.
_INPUTS = ("input", "inputs", "ids", "text", "src", "source", "x")
_TARGETS = ("decoder_input_ids", "labels")


class Pass(NamedTuple):
    """What a forward and backward pass takes, padding included; NaN if unknown. ``sequences``: how many of which
    length; ``targets``: the length that a decoder is to write.
    """

    tokens: float
    samples: float
    sequences: list[tuple[int, int]]
    targets: int | None


def read_pass(batch: Any, tokens: Any = None, samples: Any = None) -> Pass:
    """``tokens``, ``samples``: given in place of what would be found, or functions of the batch. Raises UsageError for
    anything that is no count.
    """
    given, number = (each(batch) if callable(each) else each for each in (tokens, samples))
    given = getattr(given, "shape", given)
    require_tokens(given)
    sequences = find_sequences(batch) if tokens is None else [(given[0], given[1])] if isinstance(given, tuple) else []
    if number is None:
        lengths = {int(each.shape[0]) for each in _tensors(batch)}
        number = sum(each for each, _ in sequences) or (lengths.pop() if len(lengths) == 1 else None)
    if type(given) is int and number and given % number == 0:
        sequences = [(number, given // number)]
    labels: list[Any] = [_fields(batch).get(name) for name in _TARGETS]
    targets = next((each.shape[-1] for each in labels if _is_tensor(each) and len(each.shape) > 1), None)
    total = given if type(given) is int else sum(each * length for each, length in sequences)
    return Pass(total or math.nan, number or math.nan, sequences, targets)


def require_tokens(tokens: Any) -> None:
    """Raises UsageError unless it is a number, (sequences, length), or None."""
    pair = tokens if isinstance(tokens, tuple) and len(tokens) == 2 else (tokens,)
    if tokens is not None and not all(type(each) is int and each > 0 for each in pair):
        raise UsageError(f"tokens {shorten(tokens)}: give a number, (sequences, length), or a function of the batch")


def find_sequences(batch: Any) -> list[tuple[int, int]]:
    """How many of which length a batch has, or each of the batches that it holds; empty if no tokens are found."""
    if _is_tensor(batch):
        return [tuple(batch.shape)] if _is_ids(batch) else []
    fields = _fields(batch)
    if _is_tensor(fields.get(0)):
        return find_sequences(fields[0])
    for name in (*_TOKENS, *_INPUTS):
        found: Any = fields.get(name)
        if _is_tensor(found) and found.shape and (name in _TOKENS or _is_ids(found)):
            *counts, length = found.shape[:-1] if name == _EMBEDDED else found.shape
            return [(math.prod(counts), int(length))]
    nested = (value for value in fields.values() if not _is_tensor(value))
    return [each for value in nested for each in find_sequences(value)]


def _tensors(batch: Any) -> list[Any]:
    """Those with dimensions."""
    if _is_tensor(batch):
        return [batch] if batch.shape else []
    return [each for value in _fields(batch).values() for each in _tensors(value)]


def _fields(batch: Any) -> dict[Any, Any]:
    """By name, or by index; empty for what holds nothing."""
    named = batch._asdict() if hasattr(batch, "_asdict") else vars(batch) if is_dataclass(batch) else batch
    if isinstance(named, Mapping):
        return dict(named)
    return dict(enumerate(batch)) if isinstance(batch, (tuple, list)) else {}


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_ids(tensor: Any) -> bool:
    return len(tensor.shape) == 2 and str(tensor.dtype).endswith(("int32", "int64"))
