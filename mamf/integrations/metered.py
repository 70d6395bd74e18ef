"""What the callbacks share: options are checked when one is made, what is known is logged, nothing stops a training.

Tokens and samples of a batch are found whatever holds it: mappings, named tuples, dataclasses, lists of these. Nothing
is guessed. Tokens are a tensor whose name says so, or whole numbers of shape (sequences, length) that come first.
Samples are the first dimension that all tensors share. A tensor is anything with ``shape`` and ``dtype``.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

import torch

from mamf.errors import MamfWarning, UnknownNameError, UsageError, describe_error
from mamf.integrations.flop_counter import StepCounter
from mamf.integrations.meter import Meter, check_options
from mamf.integrations.model_flops import ModelFlops, model_flops
from mamf.limits import shorten, whole_number
from mamf.text import visible

_FIGURES = ("tflops", "mfu_percent", "mamfu_percent", "tokens_per_second", "samples_per_second")
#: Options of Meter that a callback finds itself, or takes as ``tokens``.
_FOUND = {"model", "sequence_length", "tokens_per_step", "accumulation"}


def warn(line: str) -> None:
    """Warn in one line. Raises nothing where warnings are errors."""
    with suppress(Warning):
        warnings.warn(visible(line), MamfWarning, stacklevel=2)


def never_raises(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A method of MeteredCallback, called while a training is metered or to start it. Its first error ends the metering
    with one warning.
    """

    @functools.wraps(hook)
    def guarded(self: MeteredCallback, *positional: Any, **named: Any) -> Any:
        if self.training is None and hook.__name__ != self.starts:
            return
        try:
            hook(self, *positional, **named)
        except Exception as error:
            with suppress(Exception):
                self.close()
            warn(f"nothing is metered, and the training goes on: {describe_error(error)}")

    return guarded


class MeteredCallback:
    """What the callbacks take: ``tokens`` and ``samples`` of a pass, or functions of its batch; options of Meter.

    Raises UsageError for one that is unknown or not possible. ``starts``: the method that starts a training.
    """

    starts = ""

    def __init__(self, tokens: Any = None, samples: Any = None, **options: Any) -> None:
        known = inspect.signature(Meter).parameters.keys() - _FOUND
        for name in options.keys() - known:
            raise UnknownNameError("option", name, known | {"tokens", "samples"})
        check_options(options)
        if not callable(tokens):
            require_tokens(tokens)
        if samples is not None and not callable(samples):
            whole_number("samples", samples)
        self.options = {name: each for name, each in options.items() if each is not None}
        self.amounts = (tokens, samples)
        self.training: Any = None

    def start(self, model: Any, module: Any, defaults: dict[str, Any], is_compiled: bool = False) -> None:
        """A training begins. ``model``: has the configuration; ``module``: all that is trained."""
        self.close()
        self.training = MeteredTraining(model, module, defaults | self.options, self.amounts, is_compiled)

    def close(self) -> None:
        """The training has ended."""
        training, self.training = self.training, None
        if training is not None:
            training.stop()


@dataclass
class _Work:
    """The passes of a step so far. ``flop``: by formula."""

    tokens: float = 0.0
    samples: float = 0.0
    flop: float = 0.0
    passes: int = 0

    def ratio_to(self, other: _Work) -> float:
        """By tokens, else by samples, else by passes; NaN if nothing is known of both."""
        pairs = ((self.tokens, other.tokens), (self.samples, other.samples), (self.passes, other.passes))
        return next((one / another for one, another in pairs if one > 0 and another > 0), math.nan)


class MeteredTraining:
    """A training with its meter. FLOP of a step are by formula, else as many as torch counts in the first one.

    ``options``: of Meter; ``amounts``: ``tokens`` and ``samples`` of MeteredCallback. FLOP by formula are shared out
    among ``model_parallel`` ranks.
    """

    def __init__(
        self, model: Any, module: Any, options: dict[str, Any], amounts: tuple[Any, Any], is_compiled: bool = False
    ) -> None:
        self.options, self._given, self.meter = options, amounts, Meter(**options)
        self._formula: ModelFlops | None = None
        self._counter: StepCounter | None = None
        self._must_count, self._counted, self._first = False, math.nan, _Work()
        self._work, self._is_between = _Work(), True
        layers = list(module.modules()) if isinstance(module, torch.nn.Module) else []
        compiled = (hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) for each in layers)
        self._is_compiled = is_compiled or any(compiled)
        if "flops_per_step" in options:
            return
        try:
            self._formula = model_flops(model)
        except Exception as error:  # what looks like a configuration may raise anything
            self._count(describe_error(error).partition(":")[0])
        is_frozen = any(isinstance(each, torch.nn.Linear) and not each.weight.requires_grad for each in layers)
        if is_frozen and self._formula is not None:
            self._count("some layers are frozen")

    def _count(self, reason: str) -> None:
        """Count the next step, because no formula holds."""
        self._formula = None
        obstacle = "counting would run a compiled model uncompiled" if self._is_compiled else ""
        if self.options.get("model_parallel", 1) > 1:
            obstacle = "the share of this rank in a count is unknown"
        self._must_count = not obstacle
        if obstacle:
            warn(f"TFLOPS are not logged: {reason}, and {obstacle}; give flops_per_step=")
        else:
            warn(f"torch counts the FLOP of one step, recomputation included, and others have as many: {reason}")

    def begin(self) -> None:
        """The data of a pass are ready; only the first pass of a step counts."""
        if not self._is_between:
            return
        self._is_between = False
        if self._must_count:
            self._must_count, self._counter = False, StepCounter()
            self._counter.start()
        self.meter.begin()

    def add(self, batch: Any) -> None:
        """A forward and backward pass over a batch."""
        found, work, formula = read_pass(batch, *self._given), self._work, self._formula
        work.tokens += found.tokens
        work.samples += found.samples
        work.passes += 1
        if formula is None:
            return
        sequences, causal = found.sequences, self.options.get("causal", False)
        if positions := (formula.encoder or formula).positions:
            sequences = [(int(found.samples), positions)] if found.samples > 0 else []
        flop = sum(formula.flop(number, length, found.targets, causal) for number, length in sequences)
        work.flop += flop / self.options.get("model_parallel", 1)
        if not sequences:
            self._count("no tokens were found in a batch")

    def stop(self) -> None:
        """All backward passes of a step are done; or the training has ended."""
        if self._counter is not None:
            self._counted = self._counter.stop() or math.nan

    def step(self) -> None:
        """The optimizer has stepped."""
        self.stop()
        work, self._work, self._is_between = self._work, _Work(), True
        counter, self._counter = self._counter, None
        self.meter.accumulation = max(work.passes, 1)
        if counter is not None:
            self._first = work
            if math.isnan(self._counted):
                warn("TFLOPS are not logged: the counter saw no products, or not all; give flops_per_step=")
            self.meter.pause()  # counting took most of the step's time
            return
        flop = work.flop if self._formula else self._counted * work.ratio_to(self._first)
        tokens, samples = (work.tokens, work.samples) if work.passes else (math.nan, math.nan)
        self.meter.step(tokens, None if "flops_per_step" in self.options else flop, samples)

    def figures(self) -> dict[str, float]:
        """What is known of the mean since the last call; empty during the warm-up."""
        self.meter.finish()
        mean = self.meter.mean()
        self.meter.reset()
        if mean is None:
            return {}
        found = {name: getattr(mean, name) for name in _FIGURES} | {"step_seconds": mean.seconds}
        return {name: each for name, each in found.items() if not math.isnan(each)}


def product_dtype(dtype: str) -> str:
    """Of the products of a training in that dtype: torch may multiply float32 in tf32."""
    return "tf32" if dtype == "float32" and torch.get_float32_matmul_precision() != "highest" else dtype


# -- tokens and samples of a batch -------------------------------------------------------------------------------------


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
