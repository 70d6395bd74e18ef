"""FLOP of the steps of a training: by formula where one holds, else as many as a first step was counted to have."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from mamf.errors import MamfWarning, describe_error
from mamf.integrations.batches import Pass
from mamf.integrations.flop_counter import StepCounter
from mamf.integrations.model_flops import ModelFlops, model_flops
from mamf.text import visible


def warn(line: str) -> None:
    """One line, which is no error where warnings are."""
    with suppress(Warning):
        warnings.warn(visible(line), MamfWarning, stacklevel=2)


class StepFlops:
    """``model``: what ``mamf.model_flops`` takes or gives; ``module``: all that is trained; ``options``: of Meter. FLOP
    by formula are shared out among ``model_parallel`` ranks; a count is this rank's already. None are found if the
    options have ``flops_per_step``.
    """

    def __init__(self, model: Any, module: Any, options: Mapping[str, Any], is_compiled: bool = False) -> None:
        self._share, self._causal = 1 / options.get("model_parallel", 1), options.get("causal", False)
        self._formula: ModelFlops | None = None
        self._by_formula, self._must_count = 0.0, False
        self._counter: StepCounter | None = None
        self._counted, self._first = math.nan, (math.nan,) * 3
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

    def begin(self) -> None:
        """A step begins."""
        if self._must_count:
            self._must_count, self._counter = False, StepCounter()
            self._counter.start()

    def add(self, work: Pass) -> None:
        """A pass begins."""
        if self._formula is None:
            return
        encoder, sequences = self._formula.encoder, work.sequences
        if positions := (encoder or self._formula).positions:
            sequences = [(int(work.samples), positions)] if work.samples > 0 else []
        for number, length in sequences:
            self._by_formula += self._share * self._formula.flop(number, length, work.targets, self._causal)
        if not sequences:
            self._count("no tokens were found in a batch")

    def stop(self) -> None:
        """All backward passes of a step are done; or the training has ended."""
        if self._counter is not None:
            self._counted = self._counter.stop() or math.nan

    def of_step(self, tokens: float, samples: float, passes: float) -> float | None:
        """FLOP of a step that has ended; NaN if unknown. None if it was counted: that took most of its time."""
        self.stop()
        amounts, flop, counter = (tokens, samples, passes), self._by_formula, self._counter
        self._by_formula, self._counter = 0.0, None
        if counter is not None:
            self._first = amounts
            if math.isnan(self._counted):
                warn("TFLOPS are not logged: the counter saw no products, or not all; give flops_per_step=")
            return None
        ratios = (now / first for now, first in zip(amounts, self._first, strict=True) if now > 0 and first > 0)
        return self._counted * next(ratios, math.nan) if self._formula is None else flop

    def _count(self, reason: str) -> None:
        """No formula holds."""
        self._formula = None
        if self._is_compiled:
            warn(f"TFLOPS are not logged: {reason}, and counting would run a compiled model uncompiled; give "
                 "flops_per_step=")  # fmt: skip
            return
        self._must_count = True
        warn(f"torch counts the FLOP of one step, recomputation included, and others have as many: {reason}")
