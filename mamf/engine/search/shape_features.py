"""What of a shape its speed follows from: sizes, and how full the last wave and the edge tiles are; and how far shapes
lie apart by these. Pure.

A product is cut into tiles, and tiles into waves over the compute units, so neighbours differ by more than distant
shapes of equal quantisation.
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

# Tiles that libraries commonly cut C into, of either orientation.
_TILES = ((64, 128), (64, 256), (128, 128), (128, 192), (128, 256), (192, 256), (256, 256))


@dataclass
class Features:
    """Per candidate ``sizes`` and ``pairs``, which of the pairs of M and N it has; per pair ``waves`` and ``lean``.
    ``sizes`` and ``waves`` are symmetric in M and N, ``lean`` is not; columns standardized. ``kernels``: by which of
    several a candidate is measured; None where there is one.
    """

    sizes: Array
    pairs: Indices
    waves: Array
    lean: Array
    kernels: Indices | None = None

    def by_each_of(self, kernels: int) -> Features:
        """Of every shape by the first kernel, then of every shape by the second, and so on."""
        if kernels == 1:
            return self
        sizes, pairs = np.tile(self.sizes, (kernels, 1)), np.tile(self.pairs, kernels)
        return replace(self, sizes=sizes, pairs=pairs, kernels=np.repeat(np.arange(kernels), len(self.sizes)))


#: Of no shape.
NO_FEATURES = Features(np.zeros((0, 1)), np.zeros(0, dtype=np.int64), np.zeros((0, 1)), np.zeros((0, 1)))


def features(shapes: Sequence[MatmulShape], compute_units: int | None) -> Features:
    """Features of S shapes with P pairs of M and N: S x 4 and S, P x (one a tile) and P x 1."""
    m, n, k = np.array([(shape.m, shape.n, shape.k) for shape in shapes], dtype=float).T
    sizes = np.stack([np.log2(m * n), np.log2(k), np.abs(np.log2(m / n)), np.log2(m * k + k * n + m * n)], axis=1)
    (m, n), pairs = pairs_of(m, n)
    waves, lean = wave_features(cut_into_tiles(m, n), compute_units), np.log2(m / n)[:, None]
    return Features(_standardised(sizes), pairs, waves, _standardised(lean))


def pairs_of(m: Array, n: Array) -> tuple[Array, Indices]:
    """The different pairs of M and N, 2 x P, and which of them each is."""
    pairs, indices = np.unique(np.stack([m, n]), axis=1, return_inverse=True)
    return pairs, indices.reshape(-1)


class Tiled(NamedTuple):
    """C of P pairs of M and N cut into tiles of each orientation, 2 x tiles x P: how many ``tiles``, and the ``useful``
    share of their work, as edge tiles hang over C's border.
    """

    tiles: Array
    useful: Array


def cut_into_tiles(m: Array, n: Array) -> Tiled:
    tile_m, tile_n = np.array([_TILES, [(b, a) for a, b in _TILES]], dtype=float).transpose(2, 0, 1)[..., None]
    tiles = np.ceil(m / tile_m) * np.ceil(n / tile_n)
    return Tiled(tiles, m * n / (tiles * tile_m * tile_n))


def wave_features(cut: Tiled, compute_units: int | None) -> Array:
    """By tile the share of the compute units' work that reaches C: besides the edge tiles the last wave, which leaves
    units idle (known only with ``compute_units``). Of a tile's two orientations the better counts.
    """
    useful = cut.useful
    if compute_units:
        useful = useful * cut.tiles / (np.ceil(cut.tiles / compute_units) * compute_units)
    # The sums of columns are rounded by the order in memory.
    return _standardised(np.ascontiguousarray(useful.max(axis=0).T))


def _standardised(columns: Array) -> Array:
    deviation = columns.std(axis=0)
    return np.asarray((columns - columns.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0))


class Distances(NamedTuple):
    """Squared Euclidean distances of C candidates to D others: by ``sizes``, C x D, and to the P pairs of M and N that
    the features have, by the ``waves`` of each tile, tiles x C x P, and by ``lean``, C x P. ``is_pair``: whether a
    candidate has that pair, C x P; ``pairs``: which each of the others has, D. ``alike``, which of them are by one
    kernel, C x D, or None where all are.
    """

    sizes: Array
    waves: Array
    lean: Array
    is_pair: Array
    pairs: Indices
    alike: Array | None = None


def distances(of: Features, one: list[int], other: list[int] | None = None) -> Distances:
    """Of rows ``one`` to rows ``other`` (None: all)."""
    own = of.pairs[one]
    pairs = np.arange(len(of.waves)) if other is None else of.pairs[other]
    which = of.pairs if other is None else np.arange(len(other))
    apart = Distances(
        squared_distances(of.sizes, one, other),
        tile_distances(of.waves[own], of.waves[pairs]),
        (of.lean[own] - of.lean[pairs].T) ** 2,
        np.equal.outer(own, pairs).astype(float),
        which,
    )
    if of.kernels is None:
        return apart
    others = of.kernels if other is None else of.kernels[other]
    return apart._replace(alike=np.equal.outer(of.kernels[one], others).astype(float))


def tile_distances(one: Array, other: Array) -> Array:
    """Squared distances of rows ``one`` to rows ``other`` in each column, columns first."""
    return np.asarray((one.T[:, :, None] - other.T[:, None, :]) ** 2)


def squared_distances(columns: Array, one: list[int], other: list[int] | None) -> Array:
    """Squared Euclidean distances of rows ``one`` to rows ``other`` (None: all)."""
    left, right = columns[one], columns if other is None else columns[other]
    squared = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None]
    squared -= 2 * left @ right.T
    return np.asarray(np.maximum(squared, 0.0, out=squared))
