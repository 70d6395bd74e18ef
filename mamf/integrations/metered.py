"""Measure training runs for the callbacks of training libraries: count the tokens, samples and FLOP of each step.

A batch may be a mapping, a named tuple, a dataclass, or a list of batches. mamf counts the tokens in the tensor with a
name such as ``input_ids``, or else in the first tensor of whole numbers with shape (sequences, length). The number of
samples is the size of the first dimension of the tensors, if this size is the same for all. Numbers that cannot be
found in this way are unknown; mamf does not guess them. A tensor is any object with ``shape`` and ``dtype``.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import is_dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from mamf.errors import MamfWarning, UnknownNameError, UsageError, describe_error, require_whole_number, shorten_value
from mamf.integrations.flop_counter import StepFlopCounter
from mamf.integrations.meter import Meter, check_meter_options
from mamf.integrations.model_flops import ModelFlops, model_flops
from mamf.text import escape_invisible_characters

#: For a model without a FLOP formula, torch counts the FLOP of at most _MAX_COUNTED_STEPS steps. It need not count them
#: for a sequence length that differs by at most the share _LENGTH_TOLERANCE from a length that it has counted.
_MAX_COUNTED_STEPS, _LENGTH_TOLERANCE = 8, 0.01


def warn(message: str) -> None:
    """Issue a warning with the text ``message``. Raise nothing, even if the program turns warnings into errors."""
    with suppress(Warning):
        warnings.warn(escape_invisible_characters(message), MamfWarning, stacklevel=2)


def stop_metering_on_error(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of MeteredCallback: if it raises an error, warn, stop metering, and let the training continue.

    Until the method named ``start_method`` has started metering, all other decorated methods do nothing.
    """

    @functools.wraps(hook)
    def run_hook_safely(self: MeteredCallback, *positional_arguments: Any, **keyword_arguments: Any) -> Any:
        if self.training is None and hook.__name__ != self.start_method:
            return
        try:
            hook(self, *positional_arguments, **keyword_arguments)
        except Exception as error:
            with suppress(Exception):
                self.stop_metering()
            warn(f"metering has stopped, training continues: {describe_error(error)}")

    return run_hook_safely


class MeteredCallback:
    """The base class of callbacks that measure a training run in a training library.

    ``start_method``: the name of the method that starts the metering. ``tokens``, ``samples``: the number of tokens and
    of samples per forward and backward pass on this rank, or functions that compute them from the batch. ``options``:
    arguments of Meter. Raises UsageError for an unknown option or an impossible value.
    """

    start_method = ""

    def __init__(self, tokens: Any = None, samples: Any = None, **options: Any) -> None:
        # Users cannot give these options of Meter, because the callback finds their values itself.
        meter_options = inspect.signature(Meter).parameters.keys() - {
            "model",
            "sequence_length",
            "tokens_per_step",
            "accumulation",
        }
        for name in options.keys() - meter_options:
            raise UnknownNameError("option", name, meter_options | {"tokens", "samples"})
        check_meter_options(options)
        if not callable(tokens):
            require_valid_tokens(tokens)
        if samples is not None and not callable(samples):
            require_whole_number("samples", samples)
        self.options = {name: each for name, each in options.items() if each is not None}
        self.tokens_and_samples = (tokens, samples)
        self.training: Any = None
        #: Functions to call when the metering ends, for example to remove a hook.
        self.cleanup_stack = ExitStack()

    def start_metering(self, model: Any, module: Any, defaults: dict[str, Any], is_compiled: bool = False) -> None:
        """Start metering. ``model``: the object with the configuration. ``module``: the module with all parameters."""
        self.stop_metering()
        self.training = MeteredTraining(model, module, defaults | self.options, self.tokens_and_samples, is_compiled)

    def stop_metering(self) -> None:
        """Stop metering, because the training has ended."""
        self.cleanup_stack.close()
        training, self.training = self.training, None
        if training is not None:
            training.stop_counting()


class MeteredTraining:
    """A metered training run. A formula gives the FLOP of a step. mamf divides them by ``model_parallel`` to get the
    FLOP of this rank. If the model has no formula, torch counts the FLOP of a few steps.

    ``options``: the arguments of Meter. ``user_counts``: the arguments ``tokens`` and ``samples`` of MeteredCallback.
    """

    def __init__(
        self, model: Any, module: Any, options: dict[str, Any], user_counts: tuple[Any, Any], is_compiled: bool = False
    ) -> None:
        self.options, self._tokens_and_samples, self.meter = options, user_counts, Meter(**options)
        self._formula: ModelFlops | None = None
        self._counter: StepFlopCounter | None = None
        #: Maps the mean sequence length of each step that torch counted to the step's FLOP per token.
        self._counted_flop_per_token: dict[float, float] = {}
        #: The batch of each forward and backward pass that has run so far in the current step.
        self._batches: list[BatchSizes] = []
        self._is_counting, self._is_between_steps = False, True
        self.warn_once = functools.cache(warn)
        self._gradient_observer: GradientObserver | None = None
        layers = list(module.modules()) if isinstance(module, torch.nn.Module) else []
        self._is_compiled = is_compiled or any(
            hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) for each in layers
        )
        ranks = options.get("world_size", 1) // options.get("model_parallel", 1)
        if ranks > 1 and os.environ.get("RANK", "0") == "0":
            warn(f"tokens and samples per second are those of rank 0, multiplied by {ranks} ranks")
        if "flops_per_step" in options:
            return
        try:
            self._formula = model_flops(model)
        except Exception as error:  # An object that looks like a configuration may raise any error.
            self._switch_to_counting(describe_error(error).partition(":")[0])
        if self._formula and not all(each.requires_grad for layer in layers for each in layer.parameters(False)):
            if self._formula.encoder is None:
                self._gradient_observer = GradientObserver(module, self._formula, self._is_compiled)
            else:
                self._switch_to_counting("some layers are frozen (not trained)")

    def _switch_to_counting(self, reason: str) -> None:
        """Stop using the formula. Let torch count the FLOP instead, if it can. ``reason``: why, for a warning."""
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

    def begin_pass(self) -> None:
        """Record that the data of a forward and backward pass are ready. The first pass of a step begins the step."""
        if self._is_between_steps:
            self._is_between_steps = False
            self.meter.begin()

    def add_batch(self, batch: Any) -> None:
        """Add a batch to the step, before the batch's forward pass. Leave out the batch if gradients are disabled."""
        if not torch.is_grad_enabled():
            self.warn_once("forward passes without gradients (generation, a reference model) are not counted")
            return
        batch_sizes = read_batch_sizes(batch, *self._tokens_and_samples)
        self._batches.append(batch_sizes)
        if self._formula is not None and not (batch_sizes.sequence_counts or self._list_fixed_sequences(batch_sizes)):
            self._switch_to_counting("mamf found no tokens in a batch")
        if self._is_counting and len(self._batches) == 1 and self._must_count_flop():
            self._counter = StepFlopCounter()
            self._counter.start_counting()

    def _must_count_flop(self) -> bool:
        """Return whether torch must count the FLOP of this step. It need not if it has counted a step with a shorter
        and a step with a longer mean sequence length, because mamf then interpolates.
        """
        lengths, (_, length) = self._counted_flop_per_token, _compute_element_count_and_length(self._batches)
        if not lengths or len(lengths) >= _MAX_COUNTED_STEPS:
            return not lengths
        return not min(lengths) * (1 - _LENGTH_TOLERANCE) <= length <= max(lengths) * (1 + _LENGTH_TOLERANCE)

    def _list_fixed_sequences(self, batch_sizes: BatchSizes) -> list[tuple[int, int]]:
        """Return [(number of sequences, length)] for a batch. Return [] if the model accepts more than one length."""
        fixed_length = self._formula and (self._formula.encoder or self._formula).fixed_length
        return [(int(batch_sizes.sample_count), fixed_length)] if fixed_length and batch_sizes.sample_count > 0 else []

    def stop_counting(self) -> None:
        """Stop counting FLOP, because all backward passes of a step are done or the training has ended."""
        if self._gradient_observer is not None:
            self._gradient_observer.hooks.close()
        if self._counter is not None:
            flop = self._counter.stop_counting() or math.nan
            if self._batches and not math.isnan(flop):
                elements, length = _compute_element_count_and_length(self._batches)
                self._counted_flop_per_token[length] = flop / elements
            elif self._batches:
                self._is_counting = False
                self.warn_once("TFLOPS are not logged: torch missed some or all matmuls; give flops_per_step=")

    def end_step(self) -> None:
        """Pass the tokens, samples and FLOP of a step to the meter. Call this right after the optimizer's step."""
        self.stop_counting()
        batches, self._batches, self._is_between_steps = self._batches, [], True
        counter, self._counter = self._counter, None
        self.meter.accumulation = max(len(batches), 1)
        if self._gradient_observer is not None and batches:
            self._formula, self._gradient_observer = self._gradient_observer.make_formula(), None
        if counter is not None:
            self.meter.pause()  # Leave this step out of the figures, because counting took most of its time.
            return
        tokens = sum(each.token_count for each in batches) or math.nan
        samples = sum(each.sample_count for each in batches) or math.nan
        flop = None if "flops_per_step" in self.options else functools.partial(self._compute_flop, batches)
        self.meter.step(tokens, flop, samples)

    def _compute_flop(self, batches: list[BatchSizes]) -> float:
        """Return the FLOP of a step on this rank. The meter calls this method after the step has ended on the device,
        because the lengths of packed documents have been copied to the host by then.
        """
        if not batches:
            return math.nan
        formula = self._formula
        if formula is None:
            return self._interpolate_flop(*_compute_element_count_and_length(batches))
        causal, rank_count, total = self.options.get("causal", False), self.options.get("model_parallel", 1), 0.0
        for each in batches:
            counts = self._list_fixed_sequences(each) or each.count_documents_by_length() or each.sequence_counts
            total += sum(formula.compute_flop(count, length, each.target_length, causal) for count, length in counts)
            if each.logit_token_count is not None:
                total -= formula.compute_output_layer_flop(each.token_count - each.logit_token_count)
        return total / int(rank_count)

    def _interpolate_flop(self, elements: float, length: float) -> float:
        """Interpolate the FLOP of a step between steps that torch has counted. Return NaN if there are none. The
        arguments are the results of ``_compute_element_count_and_length`` for the step.
        """
        points = sorted(self._counted_flop_per_token.items(), key=lambda point: abs(point[0] - length))[:2]
        if len(points) < 2:
            return points[0][1] * elements if points else math.nan
        slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
        return (intercept + slope * length) * elements

    def compute_figures(self) -> dict[str, float]:
        """Return the known mean figures, by name, of the steps since the last call; empty if all were warm-up steps."""
        self.meter.finish()
        mean = self.meter.mean()
        self.meter.reset()
        if mean is None:
            return {}
        figures = {
            "tflops": mean.tflops,
            "mfu_percent": mean.mfu_percent,
            "mamfu_percent": mean.mamfu_percent,
            "tokens_per_second": mean.tokens_per_second,
            "samples_per_second": mean.samples_per_second,
            "step_seconds": mean.seconds,
        }
        return {name: each for name, each in figures.items() if not math.isnan(each)}


class GradientObserver:
    """An observer of the first step of a partly frozen model, which finds out which weights and inputs have gradients.

    The gradient of a weight and the gradient of its input each take as many FLOP as the forward matmul. For a compiled
    model, the observer assumes that all inputs have gradients, because hooks would make torch compile the model again.
    """

    def __init__(self, module: torch.nn.Module, formula: ModelFlops, is_compiled: bool) -> None:
        self._formula, self._blocks = formula, list[set[Any]]()
        #: The hooks on layers, to be removed when the first step ends.
        self.hooks = ExitStack()
        #: For each layer with weights, whether its input needed a gradient in the first step.
        self._has_input_gradient: dict[Any, bool] = {}
        self._adapters: set[Any] = set()
        for each in module.modules():
            if hasattr(each, "base_layer"):  # This module is an adapter of PEFT.
                self._adapters |= set(each.modules()) - set(each.get_submodule("base_layer").modules())
            if isinstance(each, torch.nn.ModuleList) and len(each) == formula.layer_count and not self._blocks:
                self._blocks = [set(block.modules()) for block in each]
            if not isinstance(each, torch.nn.Embedding) and _count_weights(each):
                if is_compiled:
                    self._has_input_gradient[each] = True
                else:
                    hook = each.register_forward_pre_hook(self._record_input_gradient, with_kwargs=True)
                    self.hooks.callback(hook.remove)

    def _record_input_gradient(self, layer: Any, inputs: tuple[Any, ...], named_inputs: dict[str, Any]) -> None:
        has_gradient = any(getattr(each, "requires_grad", False) for each in (*inputs, *named_inputs.values()))
        self._has_input_gradient[layer] = self._has_input_gradient.get(layer, False) or has_gradient

    def make_formula(self) -> ModelFlops:
        """Return the FLOP formula with the shares of weights and layers that had gradients in the first step."""
        adapter_weights = sum(_count_weights(each) for each in self._has_input_gradient if each in self._adapters)
        layer_weights = sum(_count_weights(each) for each in self._has_input_gradient) - adapter_weights
        if not layer_weights:  # The model is sharded: its layers contain no weights.
            warn("frozen weights count as trained, because the layers of this sharded model do not contain weights")
            return self._formula
        # Scale the weight counts so that they add up to those of the formula, which counts only the experts of a token.
        scale = self._formula.weight_count / layer_weights
        scales = {each: 1.0 if each in self._adapters else scale for each in self._has_input_gradient}
        trained_weights = sum(
            factor * _count_weights(each, counts_only_trained=True) for each, factor in scales.items()
        )
        input_weights = sum(scales[each] * _count_weights(each) for each in scales if self._has_input_gradient[each])
        weights = self._formula.weight_count + adapter_weights
        trained_blocks = [any(self._has_input_gradient.get(each) for each in block) for block in self._blocks] or [True]
        return replace(
            self._formula,
            weight_count=weights,
            trained_weight_share=trained_weights / weights,
            input_gradient_share=input_weights / weights,
            attention_gradient_share=sum(trained_blocks) / len(trained_blocks),
        )


def _count_weights(layer: Any, counts_only_trained: bool = False) -> int:
    """Count the weights in a layer's own matrices, or only those with gradients if ``counts_only_trained``."""
    matrices = (each for each in layer.parameters(recurse=False) if each.dim() > 1)
    return sum(each.numel() for each in matrices if each.requires_grad or not counts_only_trained)


def get_matmul_dtype(dtype: str) -> str:
    """Return the dtype in which torch multiplies operands of ``dtype``: tf32 for float32 if torch may use tf32."""
    return "tf32" if dtype == "float32" and torch.get_float32_matmul_precision() != "highest" else dtype


# -- tokens and samples of a batch -------------------------------------------------------------------------------------


#: Names of tensors with one element per token, of the shape (..., length). ``inputs_embeds`` has one vector per token
#: instead, so its shape is (..., length, width).
_TOKEN_TENSOR_NAMES, _EMBEDDING_TENSOR_NAME = ("input_ids", "inputs_embeds", "token_ids", "tokens"), "inputs_embeds"
#: Names of tensors that contain tokens only if they have two dimensions and an integer dtype.
_INPUT_TENSOR_NAMES = ("input", "inputs", "ids", "text", "src", "source", "x")


class BatchSizes(NamedTuple):
    """The sizes of the batch of a forward and backward pass, including padding. An unknown count is NaN.

    - ``sequence_counts``: a pair (number of sequences, length) for each length. ``target_length``: the length of a
      decoder's targets.
    - ``sample_count_and_size``: the number of samples, and how many elements of the largest tensor belong to a sample.
    - ``document_bounds``, ``document_positions``: a tensor with the ends of packed documents, or with the positions of
      tokens within their document. ``logit_token_count``: the number of tokens with logits; None: all tokens.
    """

    token_count: float
    sample_count: float
    sequence_counts: list[tuple[int, int]]
    target_length: int | None
    sample_count_and_size: tuple[float, float] = (1, 1)
    document_bounds: Any = None
    document_positions: Any = None
    logit_token_count: float | None = None

    def count_documents_by_length(self) -> list[tuple[int, int]]:
        """Return (count, length) for each length of packed documents, or an empty list if no documents are packed."""
        counts_by_length: Counter[int] = Counter()
        if self.document_bounds is not None:
            counts_by_length.update(end - begin for begin, end in pairwise(self.document_bounds.tolist()))
        elif self.document_positions is not None:
            for positions in self.document_positions.tolist():
                starts = [index for index, (before, after) in enumerate(pairwise(positions), 1) if after != before + 1]
                counts_by_length.update(end - begin for begin, end in pairwise([0, *starts, len(positions)]))
        return [(count, length) for length, count in counts_by_length.items() if length > 0]


def _compute_element_count_and_length(batches: Iterable[BatchSizes]) -> tuple[float, float]:
    """Return the number of elements in the batches of a step, and the mean sequence length, weighted by elements.

    Elements are tokens or, if a batch has no known sequences, the numbers in its largest tensor (1 without tensors).
    """
    counts_and_lengths: list[tuple[float, float]] = []
    for each in batches:
        counts_and_lengths += each.sequence_counts or [each.sample_count_and_size]
    elements = sum(count * length for count, length in counts_and_lengths)
    return elements, sum(count * length**2 for count, length in counts_and_lengths) / elements


def read_batch_sizes(batch: Any, tokens: Any = None, samples: Any = None) -> BatchSizes:
    """Count the tokens, samples and sequences of a batch.

    ``tokens``, ``samples``: counts from the user, which replace those read from the batch, or functions that compute
    the counts. Raises UsageError if ``tokens`` is neither a count nor (sequences, length).
    """
    token_count, sample_count = (each(batch) if callable(each) else each for each in (tokens, samples))
    token_count = getattr(token_count, "shape", token_count)
    require_valid_tokens(token_count)
    sequence_counts = (
        count_sequences_by_length(batch)
        if tokens is None
        else [(token_count[0], token_count[1])]
        if isinstance(token_count, tuple)
        else []
    )
    tensors = _list_tensors(batch)
    if sample_count is None:
        lengths = {int(each.shape[0]) for each in tensors}
        sample_count = sum(each for each, _ in sequence_counts) or (lengths.pop() if len(lengths) == 1 else None)
    if type(token_count) is int and sample_count and token_count % sample_count == 0:
        sequence_counts = [(sample_count, token_count // sample_count)]
    fields = _list_batch_items(batch)
    labels: list[Any] = [fields.get(name) for name in ("decoder_input_ids", "labels")]
    targets = next((each.shape[-1] for each in labels if _is_tensor(each) and len(each.shape) > 1), None)
    total_tokens = token_count if type(token_count) is int else sum(each * length for each, length in sequence_counts)
    elements = max((math.prod(each.shape) for each in tensors), default=0)
    row_count = sample_count or 1
    bounds, positions = (None, None) if tokens is not None else _start_copying_document_bounds(fields)
    return BatchSizes(
        token_count=total_tokens or math.nan,
        sample_count=sample_count or math.nan,
        sequence_counts=sequence_counts,
        target_length=targets,
        sample_count_and_size=(row_count, elements / row_count) if elements else (1, 1),
        document_bounds=bounds,
        document_positions=positions,
        logit_token_count=_count_logit_tokens(fields, sample_count),
    )


def _start_copying_document_bounds(fields: Mapping[Any, Any]) -> tuple[Any, Any]:
    """Start copying document bounds or, without bounds, token positions to the host. Return (bounds, positions)."""
    # If a sequence consists of packed documents, a tensor with one of these names contains 0 and then their ends.
    names = ("cu_seq_lens_q", "cu_seq_lens", "cu_seqlens_q", "cu_seqlens")
    bounds = next((fields[name] for name in names if _is_tensor(fields.get(name))), None)
    if bounds is not None:
        return _copy_to_host(bounds), None
    positions: Any = fields.get("position_ids")
    # Ignore positions if the batch has a mask, because its sequences may be padded, not packed.
    is_packed = _is_tensor(positions) and len(positions.shape) == 2 and fields.get("attention_mask") is None
    return None, _copy_to_host(positions) if is_packed else None


def _copy_to_host(tensor: Any) -> Any:
    """Start to copy a tensor to the host, and return the copy without waiting until it is complete."""
    return tensor.detach().to("cpu", non_blocking=tensor.is_cuda)


def _count_logit_tokens(fields: Mapping[Any, Any], sample_count: float | None) -> float | None:
    """Return the number of tokens for which the output layer computes logits, or None if it does so for all tokens."""
    kept_tokens: Any = fields.get("logits_to_keep")
    if _is_tensor(kept_tokens) and len(kept_tokens.shape) == 1:
        kept_tokens = kept_tokens.shape[0]
    return kept_tokens * sample_count if type(kept_tokens) is int and kept_tokens > 0 and sample_count else None


def require_valid_tokens(tokens: Any) -> None:
    """Raise UsageError unless ``tokens`` is a whole number above 0, (sequences, length), or None."""
    pair = tokens if isinstance(tokens, tuple) and len(tokens) == 2 else (tokens,)
    if tokens is not None and not all(type(each) is int and each > 0 for each in pair):
        raise UsageError(
            f"tokens {shorten_value(tokens)} must be a whole number above 0, (sequences, length), or a function of the "
            "batch"
        )


def count_sequences_by_length(batch: Any) -> list[tuple[int, int]]:
    """Return pairs (number of sequences, length), one for each batch in a batch; empty if there are no tokens."""
    if _is_tensor(batch):
        return [tuple(batch.shape)] if _is_token_id_tensor(batch) else []
    fields = _list_batch_items(batch)
    if _is_tensor(fields.get(0)):
        return count_sequences_by_length(fields[0])
    for name in (*_TOKEN_TENSOR_NAMES, *_INPUT_TENSOR_NAMES):
        tensor: Any = fields.get(name)
        if _is_tensor(tensor) and tensor.shape and (name in _TOKEN_TENSOR_NAMES or _is_token_id_tensor(tensor)):
            *counts, length = tensor.shape[:-1] if name == _EMBEDDING_TENSOR_NAME else tensor.shape
            return [(math.prod(counts), int(length))]
    nested = (value for value in fields.values() if not _is_tensor(value))
    return [each for value in nested for each in count_sequences_by_length(value)]


def _list_tensors(batch: Any) -> list[Any]:
    """Return all tensors in a batch and in batches nested in it, except scalars."""
    if _is_tensor(batch):
        return [batch] if batch.shape else []
    return [each for value in _list_batch_items(batch).values() for each in _list_tensors(value)]


def _list_batch_items(batch: Any) -> dict[Any, Any]:
    """Return the items of a batch by name or, for a list or tuple, by index; empty if the batch is not a container."""
    items = batch._asdict() if hasattr(batch, "_asdict") else vars(batch) if is_dataclass(batch) else batch
    if isinstance(items, Mapping):
        return dict(items)
    return dict(enumerate(batch)) if isinstance(batch, (tuple, list)) else {}


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_token_id_tensor(tensor: Any) -> bool:
    return len(tensor.shape) == 2 and str(tensor.dtype).endswith(("int32", "int64"))
