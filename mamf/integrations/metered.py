"""The base of the callbacks, which check options when created, log all known figures, and never stop a training.

A batch may be a mapping, a named tuple, a dataclass, or a list of these. Its tokens are the tensor with a name such as
``input_ids``, or else the first tensor of whole numbers with shape (sequences, length). Its samples are the first
dimension, if all tensors have the same. If neither is found, the number is unknown: nothing is guessed. A tensor is any
object with ``shape`` and ``dtype``.
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

from mamf.errors import MamfWarning, UnknownNameError, UsageError, describe_error, require_whole_number, shorten
from mamf.integrations.flop_counter import StepCounter
from mamf.integrations.meter import Meter, check_options
from mamf.integrations.model_flops import ModelFlops, model_flops
from mamf.text import escape_invisible

_FIGURES = ("tflops", "mfu_percent", "mamfu_percent", "tokens_per_second", "samples_per_second")
#: Options of Meter that a callback does not take, because it finds the values itself.
_OPTIONS_OF_CALLBACK = {"model", "sequence_length", "tokens_per_step", "accumulation"}
#: The maximum number of steps that torch counts; the relative difference below which two lengths count as equal.
_MAX_COUNTS, _SAME_LENGTH = 8, 0.01


def warn(line: str) -> None:
    """Warn in one line. Raises nothing, even if warnings are turned into errors."""
    with suppress(Warning):
        warnings.warn(escape_invisible(line), MamfWarning, stacklevel=2)


def stop_metering_on_error(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of MeteredCallback so that its first error ends the metering with one warning.

    Until the method named by ``starts`` has run, the other methods do nothing.
    """

    @functools.wraps(hook)
    def run_guarded(self: MeteredCallback, *positional: Any, **named: Any) -> Any:
        if self.training is None and hook.__name__ != self.starts:
            return
        try:
            hook(self, *positional, **named)
        except Exception as error:
            with suppress(Exception):
                self.close()
            warn(f"metering has stopped, training continues: {describe_error(error)}")

    return run_guarded


class MeteredCallback:
    """Base class of the callbacks. ``starts``: the name of the method that a framework calls when training starts.

    ``tokens``, ``samples``: of a forward and backward pass on this rank, or functions that compute them from its batch.
    ``options``: those of Meter. Raises UsageError for an unknown option or an impossible value.
    """

    starts = ""

    def __init__(self, tokens: Any = None, samples: Any = None, **options: Any) -> None:
        known = inspect.signature(Meter).parameters.keys() - _OPTIONS_OF_CALLBACK
        for name in options.keys() - known:
            raise UnknownNameError("option", name, known | {"tokens", "samples"})
        check_options(options)
        if not callable(tokens):
            require_tokens(tokens)
        if samples is not None and not callable(samples):
            require_whole_number("samples", samples)
        self.options = {name: each for name, each in options.items() if each is not None}
        self.amounts = (tokens, samples)
        self.training: Any = None

    def start(self, model: Any, module: Any, defaults: dict[str, Any], is_compiled: bool = False) -> None:
        """Start metering. ``model``: the object with the configuration. ``module``: the whole module to train."""
        self.close()
        self.training = MeteredTraining(model, module, defaults | self.options, self.amounts, is_compiled)

    def close(self) -> None:
        """Stop metering: the training has ended."""
        training, self.training = self.training, None
        if training is not None:
            training.stop()


class _CountedFlop:
    """FLOP per token that torch counted, by the mean sequence length of the counted step.

    Attention is quadratic in the length, so FLOP per token are linear in it, and two counts give all lengths between.
    """

    def __init__(self) -> None:
        self._flop_per_token: dict[float, float] = {}

    def needs_count(self, length: float) -> bool:
        """Return whether a step with this mean length must be counted."""
        known = self._flop_per_token
        if not known or len(known) >= _MAX_COUNTS:
            return not known
        return not min(known) * (1 - _SAME_LENGTH) <= length <= max(known) * (1 + _SAME_LENGTH)

    def add(self, work: _StepWork, flop: float) -> None:
        self._flop_per_token[work.length] = flop / work.elements

    def flop(self, work: _StepWork) -> float:
        """Interpolate the FLOP of a step; NaN if no step was counted."""
        points = sorted(self._flop_per_token.items(), key=lambda point: abs(point[0] - work.length))[:2]
        if len(points) < 2:
            return points[0][1] * work.elements if points else math.nan
        (length, flop), (other_length, other_flop) = points
        slope = (other_flop - flop) / (other_length - length)
        return (flop + slope * (work.length - length)) * work.elements


@dataclass
class _StepWork:
    """The passes of a step so far.

    ``elements``: the number of tokens; if unknown, of elements of the largest tensor, or of passes. ``squares``: the
    sum of the squared lengths, so that ``squares / elements`` is the mean length that an element sees.
    """

    tokens: float = 0.0
    samples: float = 0.0
    elements: float = 0.0
    squares: float = 0.0
    passes: list[Pass] = field(default_factory=list)

    @property
    def length(self) -> float:
        return self.squares / self.elements

    def add(self, batch_pass: Pass) -> None:
        self.tokens += batch_pass.tokens
        self.samples += batch_pass.samples
        self.passes.append(batch_pass)
        sizes: list[tuple[float, float]] = [*batch_pass.sequences] or [batch_pass.size]
        self.elements += sum(number * length for number, length in sizes)
        self.squares += sum(number * length**2 for number, length in sizes)


class MeteredTraining:
    """Meters one training run. The FLOP of a step come from a formula, divided by ``model_parallel``; if there is no
    formula, torch counts them in a few steps.

    ``options``: the arguments of Meter. ``amounts``: the arguments ``tokens`` and ``samples`` of MeteredCallback.
    """

    def __init__(
        self, model: Any, module: Any, options: dict[str, Any], amounts: tuple[Any, Any], is_compiled: bool = False
    ) -> None:
        self.options, self._amounts, self.meter = options, amounts, Meter(**options)
        self._formula: ModelFlops | None = None
        self._counter: StepCounter | None = None
        self._is_counting, self._counts = False, _CountedFlop()
        self._work, self._is_between_steps, self._warned = _StepWork(), True, set[str]()
        self._gradients: Gradients | None = None
        layers = list(module.modules()) if isinstance(module, torch.nn.Module) else []
        compiled = (hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) for each in layers)
        self._is_compiled = is_compiled or any(compiled)
        ranks = options.get("world_size", 1) // options.get("model_parallel", 1)
        if ranks > 1 and os.environ.get("RANK", "0") == "0":
            warn(f"tokens and samples per second are those of rank 0, multiplied by {ranks} ranks")
        if "flops_per_step" in options:
            return
        try:
            self._formula = model_flops(model)
        except Exception as error:  # an object that looks like a configuration may raise anything
            self._switch_to_counting(describe_error(error).partition(":")[0])
        if self._formula and not all(each.requires_grad for layer in layers for each in layer.parameters(False)):
            if self._formula.encoder is None:
                self._gradients = Gradients(module, self._formula, self._is_compiled)
            else:
                self._switch_to_counting("some layers are frozen")

    def warn_once(self, line: str) -> None:
        if line not in self._warned:
            self._warned.add(line)
            warn(line)

    def _switch_to_counting(self, reason: str) -> None:
        """Let torch count the FLOP of steps if possible. ``reason``: why the formula is not used."""
        self._formula = None
        obstacle = "counting would run the compiled model without compilation" if self._is_compiled else ""
        if self.options.get("model_parallel", 1) > 1:
            obstacle = "torch cannot count the FLOP of one rank"
        self._is_counting = not obstacle
        if obstacle:
            self.warn_once(f"TFLOPS are not logged: {reason}, and {obstacle}; give flops_per_step=")
        else:
            self.warn_once(
                f"{reason}: instead, torch counts the FLOP, including recomputation, in one step of each new length; "
                "these steps are not metered"
            )

    def begin(self) -> None:
        """Begin a pass: its data are ready. Only the first pass of a step begins a step of the meter."""
        if self._is_between_steps:
            self._is_between_steps = False
            self.meter.begin()

    def add(self, batch: Any) -> None:
        """Add a forward and backward pass over a batch, before it runs. Passes without gradients are left out."""
        if not torch.is_grad_enabled():
            self.warn_once("forward passes without gradients (generation, a reference model) are not counted")
            return
        batch_pass = read_pass(batch, *self._amounts)
        is_first = not self._work.passes
        self._work.add(batch_pass)
        if self._formula is not None and not (batch_pass.sequences or self._find_fixed_length(batch_pass)):
            self._switch_to_counting("no tokens were found in a batch")
        if self._is_counting and is_first and self._counts.needs_count(self._work.length):
            self._counter = StepCounter()
            self._counter.start()

    def _find_fixed_length(self, batch_pass: Pass) -> list[tuple[int, int]]:
        """Return the sequences of a pass, as (count, length), if the model fixes their length; else empty."""
        positions = self._formula and (self._formula.encoder or self._formula).positions
        return [(int(batch_pass.samples), positions)] if positions and batch_pass.samples > 0 else []

    def stop(self) -> None:
        """Stop counting: all backward passes of a step are done, or the training has ended."""
        if self._gradients is not None:
            self._gradients.remove_hooks()
        if self._counter is not None:
            flop = self._counter.stop() or math.nan
            if self._work.passes and not math.isnan(flop):
                self._counts.add(self._work, flop)
            elif self._work.passes:
                self._is_counting = False
                self.warn_once("TFLOPS are not logged: torch missed some or all matmuls; give flops_per_step=")

    def step(self) -> None:
        """End a step, after the optimizer."""
        self.stop()
        work, self._work, self._is_between_steps = self._work, _StepWork(), True
        counter, self._counter = self._counter, None
        self.meter.accumulation = max(len(work.passes), 1)
        if self._gradients is not None and work.passes:
            self._formula, self._gradients = self._gradients.make_formula(), None
        if counter is not None:
            self.meter.pause()  # counting took most of the step's time
            return
        tokens, samples = (work.tokens, work.samples) if work.passes else (math.nan, math.nan)
        self.meter.step(tokens, None if "flops_per_step" in self.options else lambda: self._compute_flop(work), samples)

    def _compute_flop(self, work: _StepWork) -> float:
        """Return the FLOP of a step on this rank. Called a step later, as it may wait for the lengths of documents."""
        if not work.passes:
            return math.nan
        formula = self._formula
        if formula is None:
            return self._counts.flop(work)
        causal, share, total = self.options.get("causal", False), self.options.get("model_parallel", 1), 0.0
        for each in work.passes:
            sequences = self._find_fixed_length(each) or each.list_documents() or each.sequences
            total += sum(formula.flop(number, length, each.targets, causal) for number, length in sequences)
            if each.logits is not None:
                total -= formula.head_flop(each.tokens - each.logits)
        return total / int(share)

    def compute_figures(self) -> dict[str, float]:
        """Return the mean figures since the last call, without unknown ones. Empty during the warm-up."""
        self.meter.finish()
        mean = self.meter.mean()
        self.meter.reset()
        if mean is None:
            return {}
        figures = {name: getattr(mean, name) for name in _FIGURES} | {"step_seconds": mean.seconds}
        return {name: each for name, each in figures.items() if not math.isnan(each)}


class Gradients:
    """Watches the first step of a partly frozen model, to find which weights and which inputs of layers have gradients.

    The gradient of a weight and the gradient of its input each take as many FLOP as the forward matmul. In a compiled
    model all inputs count as having gradients, because hooks would change the model.
    """

    def __init__(self, module: torch.nn.Module, formula: ModelFlops, is_compiled: bool) -> None:
        self._formula, self._blocks, self._hooks = formula, list[set[Any]](), list[Any]()
        #: Whether a layer's input had a gradient.
        self._had_gradient: dict[Any, bool] = {}
        self._adapters: set[Any] = set()
        for each in module.modules():
            if hasattr(each, "base_layer"):  # an adapter of PEFT
                self._adapters |= set(each.modules()) - set(each.get_submodule("base_layer").modules())
            if isinstance(each, torch.nn.ModuleList) and len(each) == formula.layers and not self._blocks:
                self._blocks = [set(block.modules()) for block in each]
            if not isinstance(each, torch.nn.Embedding) and _count_weights(each):
                if is_compiled:
                    self._had_gradient[each] = True
                else:
                    self._hooks.append(each.register_forward_pre_hook(self._record_input, with_kwargs=True))

    def _record_input(self, layer: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        has_gradient = any(getattr(each, "requires_grad", False) for each in (*positional, *named.values()))
        self._had_gradient[layer] = self._had_gradient.get(layer, False) or has_gradient

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def make_formula(self) -> ModelFlops:
        """Return the formula with the shares of weights and layers that had gradients in the first step."""
        adapters = [each for each in self._had_gradient if each in self._adapters]
        layers = [each for each in self._had_gradient if each not in self._adapters]
        weights, in_adapters = self._formula.weights, sum(map(_count_weights, adapters))
        in_layers = sum(map(_count_weights, layers))
        if not in_layers:  # sharded models keep their weights elsewhere
            warn("frozen weights count as trained, because the layers of this sharded model do not contain weights")
            return self._formula
        # The formula counts active experts only, so scale its count by shares instead of adding up weights.
        trained_weights = weights * sum(_count_weights(each, trained=True) for each in layers) / in_layers
        trained_weights += sum(_count_weights(each, trained=True) for each in adapters)
        input_weights = weights * sum(_count_weights(each) for each in layers if self._had_gradient[each]) / in_layers
        input_weights += sum(_count_weights(each) for each in adapters if self._had_gradient[each])
        attended = [any(self._had_gradient.get(each) for each in block) for block in self._blocks] or [True]
        return replace(
            self._formula,
            weights=weights + in_adapters,
            trained_share=trained_weights / (weights + in_adapters),
            input_share=input_weights / (weights + in_adapters),
            attention_share=sum(attended) / len(attended),
        )


def _count_weights(layer: Any, trained: bool = False) -> int:
    """Count the weights in a layer's own matrices. ``trained``: only those with gradients."""
    matrices = (each for each in layer.parameters(recurse=False) if each.dim() > 1)
    return sum(each.numel() for each in matrices if each.requires_grad or not trained)


def get_matmul_dtype(dtype: str) -> str:
    """Return the dtype in which torch multiplies operands of ``dtype``: it may multiply float32 in tf32."""
    return "tf32" if dtype == "float32" and torch.get_float32_matmul_precision() != "highest" else dtype


# -- tokens and samples of a batch -------------------------------------------------------------------------------------


#: Names of tensors with one element per token: (..., length), or (..., length, width) for ``inputs_embeds``.
_TOKENS, _EMBEDDED = ("input_ids", "inputs_embeds", "token_ids", "tokens"), "inputs_embeds"
#: Names of tensors that contain tokens if they have two dimensions and whole numbers.
_INPUTS = ("input", "inputs", "ids", "text", "src", "source", "x")
_TARGETS = ("decoder_input_ids", "labels")
#: Names of tensors with 0 and the ends of packed documents.
_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens", "cu_seqlens_q", "cu_seqlens")


class Pass(NamedTuple):
    """The batch of a forward and backward pass. Padding tokens are counted. Tokens and samples are NaN if unknown.

    - ``sequences``: (count, length) for each length. ``targets``: the length of a decoder's targets.
    - ``size``: the number of samples, and the elements per sample of the largest tensor.
    - ``bounds``: a tensor with the ends of packed documents; ``positions``: a tensor with positions within them.
    - ``logits``: the number of tokens that the output layer sees; None if it sees all.
    """

    tokens: float
    samples: float
    sequences: list[tuple[int, int]]
    targets: int | None
    size: tuple[float, float] = (1, 1)
    bounds: Any = None
    positions: Any = None
    logits: float | None = None

    def list_documents(self) -> list[tuple[int, int]]:
        """Return (count, length) of the packed documents; empty if the pass is not packed."""
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
    """Read tokens, samples and sequences of a batch.

    ``tokens``, ``samples``: values to use instead, or functions that compute them from the batch. Raises UsageError if
    ``tokens`` is neither a count nor (sequences, length).
    """
    count, number = (each(batch) if callable(each) else each for each in (tokens, samples))
    count = getattr(count, "shape", count)
    require_tokens(count)
    sequences = find_sequences(batch) if tokens is None else [(count[0], count[1])] if isinstance(count, tuple) else []
    tensors = _list_tensors(batch)
    if number is None:
        lengths = {int(each.shape[0]) for each in tensors}
        number = sum(each for each, _ in sequences) or (lengths.pop() if len(lengths) == 1 else None)
    if type(count) is int and number and count % number == 0:
        sequences = [(number, count // number)]
    fields = _get_items(batch)
    labels: list[Any] = [fields.get(name) for name in _TARGETS]
    targets = next((each.shape[-1] for each in labels if _is_tensor(each) and len(each.shape) > 1), None)
    total = count if type(count) is int else sum(each * length for each, length in sequences)
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
    """Return the bounds of packed documents, or the positions in them. Their copy to the host may not be done yet."""
    bounds = next((fields[name] for name in _BOUNDS if _is_tensor(fields.get(name))), None)
    if bounds is not None:
        return _to_host(bounds), None
    positions: Any = fields.get("position_ids")
    # If there is a mask, the positions may belong to padded sequences.
    is_packed = _is_tensor(positions) and len(positions.shape) == 2 and fields.get("attention_mask") is None
    return None, _to_host(positions) if is_packed else None


def _to_host(tensor: Any) -> Any:
    """Start a copy to the host without waiting for it."""
    return tensor.detach().to("cpu", non_blocking=tensor.is_cuda)


def _find_logits(fields: Mapping[Any, Any], rows: float | None) -> float | None:
    """Return the number of tokens that the output layer sees; None if it sees all."""
    kept: Any = fields.get("logits_to_keep")
    if _is_tensor(kept) and len(kept.shape) == 1:
        kept = kept.shape[0]
    return kept * rows if type(kept) is int and kept > 0 and rows else None


def require_tokens(tokens: Any) -> None:
    """Raise UsageError unless ``tokens`` is a whole number above 0, (sequences, length), or None."""
    pair = tokens if isinstance(tokens, tuple) and len(tokens) == 2 else (tokens,)
    if tokens is not None and not all(type(each) is int and each > 0 for each in pair):
        raise UsageError(
            f"tokens {shorten(tokens)} must be a number, (sequences, length), or a function that takes the batch"
        )


def find_sequences(batch: Any) -> list[tuple[int, int]]:
    """Return (count, length) of the sequences of a batch and of batches nested in it; empty without tokens."""
    if _is_tensor(batch):
        return [tuple(batch.shape)] if _is_ids(batch) else []
    fields = _get_items(batch)
    if _is_tensor(fields.get(0)):
        return find_sequences(fields[0])
    for name in (*_TOKENS, *_INPUTS):
        found: Any = fields.get(name)
        if _is_tensor(found) and found.shape and (name in _TOKENS or _is_ids(found)):
            *counts, length = found.shape[:-1] if name == _EMBEDDED else found.shape
            return [(math.prod(counts), int(length))]
    nested = (value for value in fields.values() if not _is_tensor(value))
    return [each for value in nested for each in find_sequences(value)]


def _list_tensors(batch: Any) -> list[Any]:
    """Return all tensors of a batch that are not scalars."""
    if _is_tensor(batch):
        return [batch] if batch.shape else []
    return [each for value in _get_items(batch).values() for each in _list_tensors(value)]


def _get_items(batch: Any) -> dict[Any, Any]:
    """Return the items of a batch by name or by index; empty if it is not a container."""
    named = batch._asdict() if hasattr(batch, "_asdict") else vars(batch) if is_dataclass(batch) else batch
    if isinstance(named, Mapping):
        return dict(named)
    return dict(enumerate(batch)) if isinstance(batch, (tuple, list)) else {}


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_ids(tensor: Any) -> bool:
    return len(tensor.shape) == 2 and str(tensor.dtype).endswith(("int32", "int64"))
