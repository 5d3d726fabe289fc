"""``VectorIndex``: an approximate index of vectors, made by faiss, that follows the versions of a model."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from threading import Lock
from typing import Any, Final

import numpy as np

from streamiter.values.numbers import Float32s, Indices

# Measured: of a million vectors in 1,000 lists, 62 lists have 98 to 99.5 % of the ten largest products.
_LISTS_READ: Final = 16
_LISTS_LEAST: Final = 16
_TRAINING: Final = 39
"""The vectors of a list that faiss wants at least; with fewer vectors there are fewer lists."""
_ROUNDS: Final = 10
"""The rounds of k-means, measured."""

# A vector is replaced when it has moved by this part of the length of a vector.
_MOVED: Final = 0.02
# All lists are made again when so many of the vectors were replaced.
_REPLACED: Final = 0.5
# An answer waits while so many vectors are replaced, a few milliseconds.
_REPLACED_AT_ONCE: Final = 1_000
# So many vectors are compared in the cache of a processor.
_AT_ONCE: Final = 65_536

_LEAST_WEIGHT: Final = np.float32(1e-3)

_HASHTABLE: Final = 2  # faiss.DirectMap.Hashtable: lists find a vector by its number.


class VectorIndex:
    """Lists of vectors that are near each other; a question reads some of the lists.

    The vectors are columns of ``numbers``. One more number, √(M² - |x|²), makes the nearest vector the one with the
    largest product. ``weights`` say how much each number counts in questions, nearly. One thread updates, others may
    ask.
    """

    def __init__(self, numbers: Float32s, weights: Float32s) -> None:
        self._lock = Lock()
        self._weights = np.maximum(weights, _LEAST_WEIGHT)
        self._build(numbers * self._weights[:, None])

    def _build(self, numbers: Float32s) -> None:
        import faiss

        count = numbers.shape[1]
        self._square = max(float(_squares(part).max()) for _, part in _parts(numbers))
        vectors, lists = self._with_rest(numbers), max(1, min(isqrt(count), count // _TRAINING))
        index: Any = faiss.IndexIVFFlat(faiss.IndexFlatL2(vectors.shape[1]), vectors.shape[1], lists)
        index.cp.niter, index.cp.max_points_per_centroid = _ROUNDS, 2 * _TRAINING
        index.train(vectors)
        index.set_direct_map_type(_HASHTABLE)
        index.add_with_ids(vectors, np.arange(count))  # With ``add`` it finds no vector by its number.
        index.nprobe = max(_LISTS_LEAST, lists // _LISTS_READ)
        with self._lock:
            self._index = index
        self._numbers, self._replaced = numbers.copy(), 0

    def _with_rest(self, numbers: Float32s) -> Float32s:
        """Return vectors as rows with one more number."""
        rest = np.sqrt(np.maximum(self._square - _squares(numbers), 0.0))
        return np.ascontiguousarray(np.vstack([numbers, rest]).T, np.float32)

    def update(self, numbers: Float32s) -> None:
        """Replace the vectors that have moved."""
        numbers = numbers * self._weights[:, None]
        least = _MOVED**2 * self._square
        moved = [
            start + np.flatnonzero(~(_squares(part - self._numbers[:, start : start + _AT_ONCE]) <= least))
            for start, part in _parts(numbers)
        ]
        at = np.concatenate(moved)
        self._replaced += len(at)
        if self._replaced > _REPLACED * numbers.shape[1]:
            self._build(numbers)
            return
        for start in range(0, len(at), _REPLACED_AT_ONCE):
            some = at[start : start + _REPLACED_AT_ONCE]
            vectors = self._with_rest(numbers[:, some])
            with self._lock:
                self._index.remove_ids(some)
                self._index.add_with_ids(vectors, some)
        self._numbers[:, at] = numbers[:, at]

    def nearest(self, question: Float32s, count: int) -> Indices:
        """Return the positions, in ascending order, of so many vectors whose products with the question are large."""
        wanted = min(count, self._numbers.shape[1])
        with self._lock:
            found = self._index.search(np.append(question / self._weights, np.float32(0.0))[None], wanted)[1][0]
        return np.sort(found[found >= 0]).astype(np.intp)


def _parts(numbers: Float32s) -> Iterator[tuple[int, Float32s]]:
    for start in range(0, numbers.shape[1], _AT_ONCE):
        yield start, numbers[:, start : start + _AT_ONCE]


def _squares(numbers: Float32s) -> Float32s:
    squares: Float32s = np.einsum("cr,cr->r", numbers, numbers)
    return squares
