"""What the callbacks share: options are checked when one is made, what is known is logged, nothing stops a training.

Tokens and samples of a batch are found whatever holds it: mappings, named tuples, dataclasses, lists of these. Nothing
is guessed. Tokens are a tensor whose name says so, or whole numbers of shape (sequences, length) that come first.
Samples are the first dimension that all tensors share. A tensor is anything with ``shape`` and ``dtype``.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass, replace
from itertools import pairwise
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
#: Steps that torch counts at most, and lengths that count as the same.
_MAX_COUNTS, _SAME_LENGTH = 8, 0.01


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


class _Counts:
    """FLOP that torch counted in steps, by the mean length of their sequences.

    FLOP per token are linear in the length, because attention is quadratic. So two counts give those between them.
    """

    def __init__(self) -> None:
        self._known: dict[float, float] = {}

    def needs(self, length: float) -> bool:
        """Whether a step of this mean length must be counted."""
        known = self._known
        if not known or len(known) >= _MAX_COUNTS:
            return not known
        return not min(known) * (1 - _SAME_LENGTH) <= length <= max(known) * (1 + _SAME_LENGTH)

    def add(self, work: _Work, flop: float) -> None:
        self._known[work.length] = flop / work.elements

    def flop(self, work: _Work) -> float:
        """FLOP of a step; NaN if no step was counted."""
        points = sorted(self._known.items(), key=lambda point: abs(point[0] - work.length))[:2]
        if len(points) < 2:
            return points[0][1] * work.elements if points else math.nan
        (length, flop), (other_length, other_flop) = points
        slope = (other_flop - flop) / (other_length - length)
        return (flop + slope * (work.length - length)) * work.elements


@dataclass
class _Work:
    """The passes of a step so far. ``elements``: tokens, else elements of the largest tensor, else passes; ``squares``:
    the same, each times the length of its sequence.
    """

    tokens: float = 0.0
    samples: float = 0.0
    elements: float = 0.0
    squares: float = 0.0
    passes: list[Pass] = field(default_factory=list)

    @property
    def length(self) -> float:
        return self.squares / self.elements

    def add(self, found: Pass) -> None:
        self.tokens += found.tokens
        self.samples += found.samples
        self.passes.append(found)
        sizes: list[tuple[float, float]] = [*found.sequences] or [found.size]
        self.elements += sum(number * length for number, length in sizes)
        self.squares += sum(number * length**2 for number, length in sizes)


class MeteredTraining:
    """A training with its meter. FLOP of a step are by formula, else as many as torch counts in others.

    ``options``: of Meter; ``amounts``: ``tokens`` and ``samples`` of MeteredCallback. FLOP by formula are shared out
    among ``model_parallel`` ranks.
    """

    def __init__(
        self, model: Any, module: Any, options: dict[str, Any], amounts: tuple[Any, Any], is_compiled: bool = False
    ) -> None:
        self.options, self._given, self.meter = options, amounts, Meter(**options)
        self._formula: ModelFlops | None = None
        self._counter: StepCounter | None = None
        self._is_counting, self._counts = False, _Counts()
        self._work, self._is_between, self._warned = _Work(), True, set[str]()
        self._gradients: Gradients | None = None
        layers = list(module.modules()) if isinstance(module, torch.nn.Module) else []
        compiled = (hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) for each in layers)
        self._is_compiled = is_compiled or any(compiled)
        ranks = options.get("world_size", 1) // options.get("model_parallel", 1)
        if ranks > 1 and os.environ.get("RANK", "0") == "0":
            warn(f"tokens and samples per second are those of rank 0 x {ranks} ranks")
        if "flops_per_step" in options:
            return
        try:
            self._formula = model_flops(model)
        except Exception as error:  # what looks like a configuration may raise anything
            self._count(describe_error(error).partition(":")[0])
        if self._formula and not all(each.requires_grad for layer in layers for each in layer.parameters(False)):
            if self._formula.encoder is None:
                self._gradients = Gradients(module, self._formula, self._is_compiled)
            else:
                self._count("some layers are frozen")

    def warn_once(self, line: str) -> None:
        if line not in self._warned:
            self._warned.add(line)
            warn(line)

    def _count(self, reason: str) -> None:
        """Count steps, because no formula is known."""
        self._formula = None
        obstacle = "counting would run a compiled model uncompiled" if self._is_compiled else ""
        if self.options.get("model_parallel", 1) > 1:
            obstacle = "the share of this rank in a count is unknown"
        self._is_counting = not obstacle
        if obstacle:
            self.warn_once(f"TFLOPS are not logged: {reason}, and {obstacle}; give flops_per_step=")
        else:
            self.warn_once(
                f"torch counts the FLOP of a step of each new length, recomputation included, and does not meter it: "
                f"{reason}"
            )

    def begin(self) -> None:
        """The data of a pass are ready; only the first pass of a step counts."""
        if self._is_between:
            self._is_between = False
            self.meter.begin()

    def add(self, batch: Any) -> None:
        """Add a forward and backward pass over a batch, before it runs. A pass without gradients is not counted."""
        if not torch.is_grad_enabled():
            self.warn_once("forward passes without gradients (generation, a reference model) are not counted")
            return
        found = read_pass(batch, *self._given)
        is_first = not self._work.passes
        self._work.add(found)
        if self._formula is not None and not (found.sequences or self._fixed_length(found)):
            self._count("no tokens were found in a batch")
        if self._is_counting and is_first and self._counts.needs(self._work.length):
            self._counter = StepCounter()
            self._counter.start()

    def _fixed_length(self, found: Pass) -> list[tuple[int, int]]:
        """Sequences of a model that fixes their length."""
        positions = self._formula and (self._formula.encoder or self._formula).positions
        return [(int(found.samples), positions)] if positions and found.samples > 0 else []

    def stop(self) -> None:
        """All backward passes of a step are done; or the training has ended."""
        if self._gradients is not None:
            self._gradients.remove_hooks()
        if self._counter is not None:
            flop = self._counter.stop() or math.nan
            if self._work.passes and not math.isnan(flop):
                self._counts.add(self._work, flop)
            elif self._work.passes:
                self._is_counting = False
                self.warn_once("TFLOPS are not logged: the counter saw no products, or not all; give flops_per_step=")

    def step(self) -> None:
        """The optimizer has stepped."""
        self.stop()
        work, self._work, self._is_between = self._work, _Work(), True
        counter, self._counter = self._counter, None
        self.meter.accumulation = max(len(work.passes), 1)
        if self._gradients is not None and work.passes:
            self._formula, self._gradients = self._gradients.formula(), None
        if counter is not None:
            self.meter.pause()  # counting took most of the step's time
            return
        tokens, samples = (work.tokens, work.samples) if work.passes else (math.nan, math.nan)
        self.meter.step(tokens, None if "flops_per_step" in self.options else lambda: self._flop(work), samples)

    def _flop(self, work: _Work) -> float:
        """FLOP of a step on this rank. This waits for the lengths of packed sequences, so it is called a step later."""
        if not work.passes:
            return math.nan
        formula = self._formula
        if formula is None:
            return self._counts.flop(work)
        causal, share, total = self.options.get("causal", False), self.options.get("model_parallel", 1), 0.0
        for each in work.passes:
            sequences = self._fixed_length(each) or each.documents() or each.sequences
            total += sum(formula.flop(number, length, each.targets, causal) for number, length in sequences)
            if each.logits is not None:
                total -= formula.head_flop(each.tokens - each.logits)
        return total / int(share)

    def figures(self) -> dict[str, float]:
        """What is known of the mean since the last call; empty during the warm-up."""
        self.meter.finish()
        mean = self.meter.mean()
        self.meter.reset()
        if mean is None:
            return {}
        found = {name: getattr(mean, name) for name in _FIGURES} | {"step_seconds": mean.seconds}
        return {name: each for name, each in found.items() if not math.isnan(each)}


class Gradients:
    """Which weights of a partly frozen model have gradients, and which of their inputs, seen in the first step.

    The gradient of a weight and that of its input take as many FLOP as its forward product. Hooks would change a
    compiled model: all inputs of its layers count as having gradients.
    """

    def __init__(self, module: torch.nn.Module, formula: ModelFlops, is_compiled: bool) -> None:
        self._formula, self._blocks, self._hooks = formula, list[set[Any]](), list[Any]()
        #: By layer: whether a gradient of its input was seen.
        self._seen: dict[Any, bool] = {}
        self._adapters: set[Any] = set()
        for each in module.modules():
            if hasattr(each, "base_layer"):  # as adapters of PEFT have it
                self._adapters |= set(each.modules()) - set(each.get_submodule("base_layer").modules())
            if isinstance(each, torch.nn.ModuleList) and len(each) == formula.layers and not self._blocks:
                self._blocks = [set(block.modules()) for block in each]
            if not isinstance(each, torch.nn.Embedding) and _weights(each):
                if is_compiled:
                    self._seen[each] = True
                else:
                    self._hooks.append(each.register_forward_pre_hook(self._see, with_kwargs=True))

    def _see(self, layer: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        has_gradient = any(getattr(each, "requires_grad", False) for each in (*positional, *named.values()))
        self._seen[layer] = self._seen.get(layer, False) or has_gradient

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def formula(self) -> ModelFlops:
        """The formula of FLOP for this model."""
        adapters = [each for each in self._seen if each in self._adapters]
        layers = [each for each in self._seen if each not in self._adapters]
        known, added = self._formula.weights, sum(map(_weights, adapters))
        own = sum(map(_weights, layers))
        if not own:  # ranks that share a model keep its weights in another form
            warn("frozen weights count as trained: which layers have gradients was not seen")
            return self._formula
        # The formula counts active experts only: of the model's own weights just the shares are known.
        trained = known * sum(_weights(each, trained=True) for each in layers) / own
        trained += sum(_weights(each, trained=True) for each in adapters)
        passed = known * sum(_weights(each) for each in layers if self._seen[each]) / own
        passed += sum(_weights(each) for each in adapters if self._seen[each])
        attended = [any(self._seen.get(each) for each in block) for block in self._blocks] or [True]
        return replace(
            self._formula,
            weights=known + added,
            trained_share=trained / (known + added),
            input_share=passed / (known + added),
            attention_share=sum(attended) / len(attended),
        )


def _weights(layer: Any, trained: bool = False) -> int:
    """How many weights of matrices a layer itself has, or only those that are trained."""
    matrices = (each for each in layer.parameters(recurse=False) if each.dim() > 1)
    return sum(each.numel() for each in matrices if each.requires_grad or not trained)


def product_dtype(dtype: str) -> str:
    """Of the products of a training in that dtype: torch may multiply float32 in tf32."""
    return "tf32" if dtype == "float32" and torch.get_float32_matmul_precision() != "highest" else dtype


# -- tokens and samples of a batch -------------------------------------------------------------------------------------


#: Of shape (..., length), then the width of an embedding if the name says so.
_TOKENS, _EMBEDDED = ("input_ids", "inputs_embeds", "token_ids", "tokens"), "inputs_embeds"
#: Tokens too if they are whole numbers of two dimensions.
_INPUTS = ("input", "inputs", "ids", "text", "src", "source", "x")
_TARGETS = ("decoder_input_ids", "labels")
#: The ends of packed documents, beginning with 0.
_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens", "cu_seqlens_q", "cu_seqlens")


class Pass(NamedTuple):
    """What a forward and backward pass takes, padding included; NaN if unknown.

    ``sequences``: how many of which length; ``targets``: the length that a decoder is to write; ``size``: samples, and
    elements of each in the largest tensor. ``bounds``: a tensor with the ends of packed documents, or ``positions``
    within them. ``logits``: how many tokens the output layer takes, None for all.
    """

    tokens: float
    samples: float
    sequences: list[tuple[int, int]]
    targets: int | None
    size: tuple[float, float] = (1, 1)
    bounds: Any = None
    positions: Any = None
    logits: float | None = None

    def documents(self) -> list[tuple[int, int]]:
        """How many packed documents of which length; empty if the pass is not packed."""
        lengths: Counter[int] = Counter()
        if self.bounds is not None:
            ends = self.bounds.tolist()
            lengths.update(end - begin for begin, end in pairwise(ends))
        elif self.positions is not None:
            for row in self.positions.tolist():
                begins = [0, *(place for place in range(1, len(row)) if row[place] != row[place - 1] + 1), len(row)]
                lengths.update(end - begin for begin, end in pairwise(begins))
        return [(count, length) for length, count in lengths.items() if length > 0]


def read_pass(batch: Any, tokens: Any = None, samples: Any = None) -> Pass:
    """``tokens``, ``samples``: given in place of what would be found, or functions of the batch. Raises UsageError for
    anything that is no count.
    """
    given, number = (each(batch) if callable(each) else each for each in (tokens, samples))
    given = getattr(given, "shape", given)
    require_tokens(given)
    sequences = find_sequences(batch) if tokens is None else [(given[0], given[1])] if isinstance(given, tuple) else []
    tensors = _tensors(batch)
    if number is None:
        lengths = {int(each.shape[0]) for each in tensors}
        number = sum(each for each, _ in sequences) or (lengths.pop() if len(lengths) == 1 else None)
    if type(given) is int and number and given % number == 0:
        sequences = [(number, given // number)]
    fields = _fields(batch)
    labels: list[Any] = [fields.get(name) for name in _TARGETS]
    targets = next((each.shape[-1] for each in labels if _is_tensor(each) and len(each.shape) > 1), None)
    total = given if type(given) is int else sum(each * length for each, length in sequences)
    elements = max((math.prod(each.shape) for each in tensors), default=0)
    rows = number or 1
    bounds, positions = (None, None) if tokens is not None else _find_documents(fields)
    return Pass(
        tokens=total or math.nan,
        samples=number or math.nan,
        sequences=sequences,
        targets=targets,
        size=(rows, elements / rows) if elements else (1, 1),
        bounds=bounds,
        positions=positions,
        logits=_find_logits(fields, number),
    )


def _find_documents(fields: Mapping[Any, Any]) -> tuple[Any, Any]:
    """Bounds of packed documents, else positions in them, on their way to the host."""
    bounds = next((fields[name] for name in _BOUNDS if _is_tensor(fields.get(name))), None)
    if bounds is not None:
        return _to_host(bounds), None
    positions: Any = fields.get("position_ids")
    # With a mask, positions may be those of padded sequences.
    is_packed = _is_tensor(positions) and len(positions.shape) == 2 and fields.get("attention_mask") is None
    return None, _to_host(positions) if is_packed else None


def _to_host(tensor: Any) -> Any:
    """Copy without waiting."""
    return tensor.detach().to("cpu", non_blocking=tensor.is_cuda)


def _find_logits(fields: Mapping[Any, Any], rows: float | None) -> float | None:
    """How many tokens of the pass the output layer takes; None for all."""
    kept: Any = fields.get("logits_to_keep")
    if _is_tensor(kept) and len(kept.shape) == 1:
        kept = kept.shape[0]
    return kept * rows if type(kept) is int and kept > 0 and rows else None


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
