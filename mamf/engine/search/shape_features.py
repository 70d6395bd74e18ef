"""Compute the features that determine the rate of a matmul shape, and distances between shapes in these features.

The features are sizes, and how full the last wave and the edge tiles are. C is divided into tiles, and the tiles into
waves over the compute units, so the rates of neighboring shapes can differ more than those of distant shapes whose
tiles and waves are equally full.
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

# The sizes of tiles that libraries commonly divide C into, each in either orientation.
_TILES = ((64, 128), (64, 256), (128, 128), (128, 192), (128, 256), (192, 256), (256, 256))


@dataclass
class Features:
    """The features of all candidates (shapes with kernels). Each column is standardized: mean 0, standard deviation 1.

    - ``sizes``: one row per candidate, with functions of M, N and K that do not change if M and N are exchanged.
    - ``pairs``: the index of each candidate's pair of M and N in ``waves`` and ``log_aspect``.
    - ``waves``: one row per pair, with how full the waves are for each tile size; it does not change if M and N are
      exchanged.
    - ``log_aspect``: one row per pair, with log2(M / N).
    - ``kernels``: the index of each candidate's kernel; None if there is only one kernel.
    """

    sizes: Array
    pairs: Indices
    waves: Array
    log_aspect: Array
    kernels: Indices | None = None

    def repeat_for_kernels(self, kernels: int) -> Features:
        """Return the features of candidates for several kernels: all shapes with the first kernel, then with the
        second, and so on. ``kernels``: their number.
        """
        if kernels == 1:
            return self
        sizes, pairs = np.tile(self.sizes, (kernels, 1)), np.tile(self.pairs, kernels)
        return replace(self, sizes=sizes, pairs=pairs, kernels=np.repeat(np.arange(kernels), len(self.sizes)))


#: The features of an empty list of shapes.
NO_FEATURES = Features(np.zeros((0, 1)), np.zeros(0, dtype=np.int64), np.zeros((0, 1)), np.zeros((0, 1)))


def compute_features(shapes: Sequence[MatmulShape], compute_units: int | None) -> Features:
    """Compute the features of S shapes with P distinct pairs of M and N: ``sizes`` is S x 4, ``waves`` P x tile sizes
    and ``log_aspect`` P x 1. ``compute_units``: the number of compute units of the device; None if unknown.
    """
    m, n, k = np.array([(shape.m, shape.n, shape.k) for shape in shapes], dtype=float).T
    sizes = np.stack([np.log2(m * n), np.log2(k), np.abs(np.log2(m / n)), np.log2(m * k + k * n + m * n)], axis=1)
    (m, n), pairs = find_size_pairs(m, n)
    waves, log_aspect = compute_wave_features(cut_into_tiles(m, n), compute_units), np.log2(m / n)[:, None]
    return Features(_standardize(sizes), pairs, waves, _standardize(log_aspect))


def find_size_pairs(m: Array, n: Array) -> tuple[Array, Indices]:
    """Return the distinct pairs of M and N as an array of 2 x P, and for each shape the index of its pair."""
    pairs, indices = np.unique(np.stack([m, n]), axis=1, return_inverse=True)
    return pairs, indices.reshape(-1)


class Tiling(NamedTuple):
    """The division of C into tiles, for P pairs of M and N. Both arrays are 2 (orientations) x tile sizes x P.

    ``tile_count``: the number of tiles. ``useful_share``: the share of the tiles' work that is within C, because tiles
    at the edges extend beyond C.
    """

    tile_count: Array
    useful_share: Array


def cut_into_tiles(m: Array, n: Array) -> Tiling:
    tile_m, tile_n = np.array([_TILES, [(b, a) for a, b in _TILES]], dtype=float).transpose(2, 0, 1)[..., None]
    tiles = np.ceil(m / tile_m) * np.ceil(n / tile_n)
    return Tiling(tiles, m * n / (tiles * tile_m * tile_n))


def compute_wave_features(tiling: Tiling, compute_units: int | None) -> Array:
    """Return, for each pair of M and N and each tile size, the share of the compute units' work that contributes to C,
    with the better orientation of the tile, standardized. The other work is lost in tiles that extend beyond C and, if
    ``compute_units`` is known, in compute units that are idle in the last wave.
    """
    useful = tiling.useful_share
    if compute_units:
        useful = useful * tiling.tile_count / (np.ceil(tiling.tile_count / compute_units) * compute_units)
    # Make the array contiguous, because the rounding of column sums depends on the order in memory.
    return _standardize(np.ascontiguousarray(useful.max(axis=0).T))


def _standardize(columns: Array) -> Array:
    deviation = columns.std(axis=0)
    return np.asarray((columns - columns.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0))


class Distances(NamedTuple):
    """The squared Euclidean distances in each feature from C candidates to D other candidates, or to the P pairs of M
    and N of these D candidates.

    - ``sizes``: C x D. ``waves``: tile sizes x C x P. ``log_aspect``: C x P.
    - ``is_pair``: C x P, 1.0 where the candidate has this pair of M and N.
    - ``pairs``: for each of the D candidates, the index of its pair of M and N.
    - ``is_same_kernel``: C x D, 1.0 where both candidates have one kernel; None if there is only one kernel.
    """

    sizes: Array
    waves: Array
    log_aspect: Array
    is_pair: Array
    pairs: Indices
    is_same_kernel: Array | None = None


def compute_distances(features: Features, rows: list[int], other_rows: list[int] | None = None) -> Distances:
    """Return the distances in each feature from the candidates ``rows`` to ``other_rows`` (None: all candidates)."""
    own = features.pairs[rows]
    pairs = np.arange(len(features.waves)) if other_rows is None else features.pairs[other_rows]
    which = features.pairs if other_rows is None else np.arange(len(other_rows))
    apart = Distances(
        compute_squared_distances(features.sizes, rows, other_rows),
        compute_tile_distances(features.waves[own], features.waves[pairs]),
        (features.log_aspect[own] - features.log_aspect[pairs].T) ** 2,
        np.equal.outer(own, pairs).astype(float),
        which,
    )
    if features.kernels is None:
        return apart
    others = features.kernels if other_rows is None else features.kernels[other_rows]
    return apart._replace(is_same_kernel=np.equal.outer(features.kernels[rows], others).astype(float))


def compute_tile_distances(one: Array, other: Array) -> Array:
    """Return the squared difference between each row of ``one`` and each row of ``other`` in each column (tile size),
    as an array of columns x rows of ``one`` x rows of ``other``.
    """
    return np.asarray((one.T[:, :, None] - other.T[:, None, :]) ** 2)


def compute_squared_distances(columns: Array, one: list[int], other: list[int] | None) -> Array:
    """Return the squared Euclidean distance from each of the rows ``one`` of the array ``columns`` to each of its rows
    ``other`` (None: all rows), as a matrix.
    """
    left, right = columns[one], columns if other is None else columns[other]
    squared = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None]
    squared -= 2 * left @ right.T
    return np.asarray(np.maximum(squared, 0.0, out=squared))
