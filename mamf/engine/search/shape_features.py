"""The features that determine a shape's speed, and distances between shapes in feature space. Pure.

Features are sizes, and how full the last wave and the edge tiles are. A matmul is divided into tiles, and tiles into
waves over the compute units, so neighboring shapes can differ more than distant shapes with equal quantization.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mamf.operations.matmul.shapes import MatmulShape

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

# Tiles that libraries commonly divide C into, in either orientation.
_TILES = ((64, 128), (64, 256), (128, 128), (128, 192), (128, 256), (192, 256), (256, 256))


@dataclass
class Features:
    """The features of all candidates, with standardized columns.

    - ``sizes``: one row per candidate, symmetric in M and N.
    - ``pairs``: the index of each candidate's pair of M and N in ``waves`` and ``lean``.
    - ``waves``: one row per pair, how full the waves are with each tile; symmetric in M and N.
    - ``lean``: one row per pair, log2(M / N).
    - ``kernels``: the index of each candidate's kernel; None if there is only one.
    """

    sizes: Array
    pairs: Indices
    waves: Array
    lean: Array
    kernels: Indices | None = None

    def repeat_for_kernels(self, kernels: int) -> Features:
        """Return the features of every shape with the first kernel, then with the second, and so on."""
        if kernels == 1:
            return self
        sizes, pairs = np.tile(self.sizes, (kernels, 1)), np.tile(self.pairs, kernels)
        return replace(self, sizes=sizes, pairs=pairs, kernels=np.repeat(np.arange(kernels), len(self.sizes)))


#: The features of no shapes.
NO_FEATURES = Features(np.zeros((0, 1)), np.zeros(0, dtype=np.int64), np.zeros((0, 1)), np.zeros((0, 1)))


def compute_features(shapes: Sequence[MatmulShape], compute_units: int | None) -> Features:
    """Return the features of S shapes with P pairs of M and N: ``sizes`` is S x 4, ``waves`` P x tiles and ``lean`` P x
    1.
    """
    m, n, k = np.array([(shape.m, shape.n, shape.k) for shape in shapes], dtype=float).T
    sizes = np.stack([np.log2(m * n), np.log2(k), np.abs(np.log2(m / n)), np.log2(m * k + k * n + m * n)], axis=1)
    (m, n), pairs = find_size_pairs(m, n)
    waves, lean = compute_wave_features(cut_into_tiles(m, n), compute_units), np.log2(m / n)[:, None]
    return Features(_standardize(sizes), pairs, waves, _standardize(lean))


def find_size_pairs(m: Array, n: Array) -> tuple[Array, Indices]:
    """Return the distinct pairs of M and N (2 x P), and the index of each shape's pair."""
    pairs, indices = np.unique(np.stack([m, n]), axis=1, return_inverse=True)
    return pairs, indices.reshape(-1)


class Tiling(NamedTuple):
    """C divided into tiles, for P pairs of M and N; both arrays are 2 (orientations) x tiles x P. ``tiles``: how many.
    ``useful``: the share of their work that lies within C, because edge tiles extend beyond it.
    """

    tiles: Array
    useful: Array


def cut_into_tiles(m: Array, n: Array) -> Tiling:
    tile_m, tile_n = np.array([_TILES, [(b, a) for a, b in _TILES]], dtype=float).transpose(2, 0, 1)[..., None]
    tiles = np.ceil(m / tile_m) * np.ceil(n / tile_n)
    return Tiling(tiles, m * n / (tiles * tile_m * tile_n))


def compute_wave_features(cut: Tiling, compute_units: int | None) -> Array:
    """Return, for each pair and tile, the share of the compute units' work that reaches C, in the better orientation.
    The remaining work is lost in edge tiles and, counted only if ``compute_units`` is known, in idle units of the last
    wave.
    """
    useful = cut.useful
    if compute_units:
        useful = useful * cut.tiles / (np.ceil(cut.tiles / compute_units) * compute_units)
    # Fix the memory order, because the rounding of column sums depends on it.
    return _standardize(np.ascontiguousarray(useful.max(axis=0).T))


def _standardize(columns: Array) -> Array:
    deviation = columns.std(axis=0)
    return np.asarray((columns - columns.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0))


class Distances(NamedTuple):
    """Squared Euclidean distances from C candidates to D others, or to their P pairs of M and N.

    - ``sizes``: C x D. ``waves``: tiles x C x P. ``lean``: C x P.
    - ``is_pair``: C x P, 1.0 where the candidate has this pair.
    - ``pairs``: the index of the pair of each of the D others.
    - ``is_same_kernel``: C x D, 1.0 where both have the same kernel; None if there is only one.
    """

    sizes: Array
    waves: Array
    lean: Array
    is_pair: Array
    pairs: Indices
    is_same_kernel: Array | None = None


def compute_distances(of: Features, one: list[int], other: list[int] | None = None) -> Distances:
    """Return the distances from rows ``one`` to rows ``other`` (None: all)."""
    own = of.pairs[one]
    pairs = np.arange(len(of.waves)) if other is None else of.pairs[other]
    which = of.pairs if other is None else np.arange(len(other))
    apart = Distances(
        compute_squared_distances(of.sizes, one, other),
        compute_tile_distances(of.waves[own], of.waves[pairs]),
        (of.lean[own] - of.lean[pairs].T) ** 2,
        np.equal.outer(own, pairs).astype(float),
        which,
    )
    if of.kernels is None:
        return apart
    others = of.kernels if other is None else of.kernels[other]
    return apart._replace(is_same_kernel=np.equal.outer(of.kernels[one], others).astype(float))


def compute_tile_distances(one: Array, other: Array) -> Array:
    """Return the squared distance from each row of ``one`` to each row of ``other``, as columns x one x other."""
    return np.asarray((one.T[:, :, None] - other.T[:, None, :]) ** 2)


def compute_squared_distances(columns: Array, one: list[int], other: list[int] | None) -> Array:
    """Return the squared Euclidean distances from rows ``one`` to rows ``other`` (None: all rows)."""
    left, right = columns[one], columns if other is None else columns[other]
    squared = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None]
    squared -= 2 * left @ right.T
    return np.asarray(np.maximum(squared, 0.0, out=squared))
