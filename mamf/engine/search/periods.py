"""Estimates the number of compute units from measured rates, for devices that do not report it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from mamf.engine.search.shape_features import distances, features, squared_distances, tiled, wave_features
from mamf.engine.search.surrogate import Nearness, Scales, log_likelihood
from mamf.operations.matmul.shapes import MatmulShape

_UNITS = range(8, 322, 2)
# Shapes of at least this share of the best: what else holds back the others hides the waves.
_FAST = 0.7
# The most of these that are used, the fastest first, and the fewest that allow an estimate.
_MOST_SHAPES, _FEWEST_SHAPES = 64, 16
# By how much more likely (as a logarithm) waves over some units must make what was measured than no waves at all: of
# so many numbers of units the likeliest is likelier by chance alone (the logarithm of how many is 5).
_CONVINCING = 8.0


def likeliest_units(measured: Mapping[MatmulShape, float], scales: Scales) -> int | None:
    """Compute units, by TFLOPS of shapes; None where none are convincing. Half or twice as many explain as much."""
    best = max(measured.values(), default=0.0)
    fast = sorted((shape for shape in measured if measured[shape] >= _FAST * best), key=measured.__getitem__)
    shapes = fast[-_MOST_SHAPES:]
    if len(shapes) < _FEWEST_SHAPES:
        return None
    values = np.array([math.log(measured[shape]) for shape in shapes])
    rows = list(range(len(shapes)))
    m, n = np.array([(shape.m, shape.n) for shape in shapes], dtype=float).T
    cut, near = tiled(m, n), Nearness(distances(features(shapes, None), rows, rows))

    def likelihood(units: int | None) -> float:
        # All tiles together: a separate effect per tile would take several times as long for this many candidates.
        waves = squared_distances(wave_features(cut, units), rows, rows)[None] / 4
        return log_likelihood(near.with_waves(waves), values, scales)

    found = {units: likelihood(units) for units in _UNITS}
    likeliest = max(found, key=found.__getitem__)
    return likeliest if found[likeliest] > likelihood(None) + _CONVINCING else None
