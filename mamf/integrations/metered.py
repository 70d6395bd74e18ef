"""Shared by the callbacks: options are checked when one is made, what is known is logged, nothing stops a training."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from mamf.errors import MamfWarning, UnknownNameError, UsageError, describe_error
from mamf.integrations.batches import read_pass, require_tokens
from mamf.integrations.flop_counter import StepCounter
from mamf.integrations.meter import Meter, check_options
from mamf.integrations.model_flops import ModelFlops, model_flops
from mamf.limits import whole_number
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
    """What the callbacks take: ``model``, what ``mamf.model_flops`` takes or gives; ``tokens`` and ``samples`` of a
    pass, or functions of its batch; options of Meter. Raises UsageError for one that is unknown or not possible.
    ``starts``: the method that starts a training.
    """

    starts = ""

    def __init__(self, model: Any = None, tokens: Any = None, samples: Any = None, **options: Any) -> None:
        known = inspect.signature(Meter).parameters.keys() - _FOUND
        for name in options.keys() - known:
            raise UnknownNameError("option", name, known | {"model", "tokens", "samples"})
        check_options(options)
        if model is not None and options.get("flops_per_step") is not None:
            raise UsageError("a callback takes either model= or flops_per_step=")
        if not callable(tokens):
            require_tokens(tokens)
        if samples is not None and not callable(samples):
            whole_number("samples", samples)
        self.model, self.options = model, {name: each for name, each in options.items() if each is not None}
        self.amounts = (tokens, samples)
        self.training: Any = None

    def start(self, model: Any, module: Any, defaults: dict[str, Any], is_compiled: bool = False) -> None:
        """A training begins. ``model``: has the configuration; ``module``: all that is trained."""
        self.close()
        model = model if self.model is None else self.model
        self.training = MeteredTraining(model, module, defaults | self.options, self.amounts, is_compiled)

    def close(self) -> None:
        """The training has ended."""
        training, self.training = self.training, None
        if training is not None:
            training.stop()


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
        self._must_count, self._counted, self._first = False, math.nan, (math.nan,) * 3
        self._clear()
        layers = list(module.modules()) if isinstance(module, torch.nn.Module) else []
        compiled = (hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) for each in layers)
        self._is_compiled = is_compiled or any(compiled)
        if "flops_per_step" in options:
            return
        try:
            self._formula = model if isinstance(model, ModelFlops) else model_flops(model)
        except Exception as error:  # what looks like a configuration may raise anything
            self._count(describe_error(error).partition(":")[0])
        is_frozen = any(isinstance(each, torch.nn.Linear) and not each.weight.requires_grad for each in layers)
        if is_frozen and self._formula not in (None, model):
            self._count("some layers are frozen")

    def _clear(self) -> None:
        self._tokens = self._samples = self._flop = 0.0
        self._passes = 0
        self._is_between = True

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
        work = read_pass(batch, *self._given)
        self._tokens, self._samples = self._tokens + work.tokens, self._samples + work.samples
        self._passes += 1
        if self._formula is None:
            return
        sequences, causal = work.sequences, self.options.get("causal", False)
        if positions := (self._formula.encoder or self._formula).positions:
            sequences = [(int(work.samples), positions)] if work.samples > 0 else []
        flop = sum(self._formula.flop(number, length, work.targets, causal) for number, length in sequences)
        self._flop += flop / self.options.get("model_parallel", 1)
        if not sequences:
            self._count("no tokens were found in a batch")

    def stop(self) -> None:
        """All backward passes of a step are done; or the training has ended."""
        if self._counter is not None:
            self._counted = self._counter.stop() or math.nan

    def step(self) -> None:
        """The optimizer has stepped."""
        self.stop()
        amounts = (self._tokens, self._samples, self._passes) if self._passes else (math.nan, math.nan, 0)
        counter, self._counter = self._counter, None
        self.meter.accumulation = max(self._passes, 1)
        if counter is not None:
            self._first = amounts
            if math.isnan(self._counted):
                warn("TFLOPS are not logged: the counter saw no products, or not all; give flops_per_step=")
            self.meter.pause()  # counting took most of the step's time
        else:
            ratios = (now / first for now, first in zip(amounts, self._first, strict=True) if now > 0 and first > 0)
            flop = self._counted * next(ratios, math.nan) if self._formula is None else self._flop
            self.meter.step(amounts[0], None if "flops_per_step" in self.options else flop, amounts[1])
        self._clear()

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
