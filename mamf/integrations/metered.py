"""Shared by the callbacks: sums tokens and FLOP over the passes of a training step. Errors never stop the training."""

from __future__ import annotations

import math
import warnings
from typing import Any

from mamf.errors import MamfError, MamfWarning
from mamf.integrations.meter import Meter
from mamf.integrations.model_flops import ModelFlops, model_flops

#: What is logged, as StepFigures has it.
LOGGED = ("tflops", "mfu_percent", "mamfu_percent", "tokens_per_second")


class MeteredTraining:
    """``flops``: what ``mamf.model_flops`` takes or gives. ``options``: of Meter."""

    def __init__(self, flops: Any, options: dict[str, Any]) -> None:
        self.flops = _known_flops(flops)
        self.meter = _meter(options)
        self._tokens = self._flop = 0.0
        self._is_between = True

    def begin(self) -> None:
        """The data of a pass are ready; only the first pass of a step counts."""
        if self._is_between and self.meter is not None:
            self.meter.begin()
        self._is_between = False

    def add(self, sequences: int, length: int) -> None:
        """A forward and backward pass over so many tokens, padding included."""
        tokens = sequences * length
        self._tokens += tokens
        is_causal = self.meter is not None and self.meter.causal
        self._flop += math.nan if self.flops is None else tokens * self.flops.per_token(length, is_causal)

    def step(self) -> None:
        """The optimizer has stepped."""
        if self.meter is not None:
            self.meter.step(self._tokens, self._flop)
        self._tokens = self._flop = 0.0
        self._is_between = True

    def pause(self) -> None:
        """An evaluation or a checkpoint was between."""
        if self.meter is not None:
            self.meter.pause()

    def figures(self) -> dict[str, float]:
        """The mean since the last call; empty during the warm-up."""
        if self.meter is None:
            return {}
        self.meter.finish()
        mean = self.meter.mean()
        self.meter.reset()
        return {} if mean is None else {name: getattr(mean, name) for name in LOGGED}


def _known_flops(model: Any) -> ModelFlops | None:
    if isinstance(model, ModelFlops):
        return model
    try:
        return model_flops(model)
    except MamfError as error:
        warnings.warn(f"TFLOPS and shares are NaN: {error}", MamfWarning, stacklevel=4)
        return None


def _meter(options: dict[str, Any]) -> Meter | None:
    try:
        return Meter(**options)
    except MamfError as error:
        warnings.warn(f"nothing is metered: {error}", MamfWarning, stacklevel=4)
        return None
