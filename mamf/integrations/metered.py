"""Shared by the callbacks: options are checked when one is made, what is known is logged, nothing stops a training."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from mamf.errors import UnknownNameError, UsageError, describe_error
from mamf.integrations.batches import read_pass, require_tokens
from mamf.integrations.meter import Meter
from mamf.integrations.meter_options import check_options
from mamf.integrations.step_flops import StepFlops, warn
from mamf.limits import whole_number

_FIGURES = ("tflops", "mfu_percent", "mamfu_percent", "tokens_per_second", "samples_per_second")
#: What is logged, as far as it is known.
LOGGED = (*_FIGURES, "step_seconds")
#: Of a pass, as Meter takes them: given ones replace what a callback finds.
_PER_STEP = ("tokens_per_step", "samples_per_step", "flops_per_step")


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
        known = inspect.signature(Meter).parameters.keys() - {"model", "sequence_length"}
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
        self.given = {"tokens": tokens, "samples": samples}
        self.training: Any = None

    def start(self, model: Any, module: Any, defaults: dict[str, Any], is_compiled: bool = False) -> None:
        """A training begins. ``model``: has the configuration; ``module``: all that is trained."""
        self.close()
        options = defaults | self.options
        flops = StepFlops(model if self.model is None else self.model, module, options, is_compiled)
        self.training = MeteredTraining(flops, options, **self.given)

    def close(self) -> None:
        """The training has ended."""
        training, self.training = self.training, None
        if training is not None:
            training.flops.stop()


class MeteredTraining:
    """A training of which ``options`` are Meter's, and ``tokens`` and ``samples`` those of MeteredCallback."""

    def __init__(self, flops: StepFlops, options: dict[str, Any], tokens: Any = None, samples: Any = None) -> None:
        self.flops, self.options, self.tokens, self.samples = flops, options, tokens, samples
        self.meter = Meter(**options)
        self._amounts, self._passes, self._is_between = (0.0, 0.0), 0, True

    def begin(self) -> None:
        """The data of a pass are ready; only the first pass of a step counts."""
        if self._is_between:
            self._is_between = False
            self.flops.begin()
            self.meter.begin()

    def add(self, batch: Any) -> None:
        """A forward and backward pass over a batch."""
        work = read_pass(batch, self.tokens, self.samples)
        self._amounts = (self._amounts[0] + work.tokens, self._amounts[1] + work.samples)
        self._passes += 1
        self.flops.add(work)

    def step(self) -> None:
        """The optimizer has stepped."""
        amounts = self._amounts if self._passes else (math.nan, math.nan)
        flop = self.flops.of_step(*amounts, self._passes)
        self.meter.accumulation = self.options.get("accumulation") or max(self._passes, 1)
        tokens, samples, flops = (
            None if name in self.options else each
            for name, each in zip(_PER_STEP, (amounts[0], amounts[1], flop), strict=True)
        )
        if flop is None:
            self.meter.pause()
        else:
            self.meter.step(tokens, flops, samples)
        self._amounts, self._passes, self._is_between = (0.0, 0.0), 0, True

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
