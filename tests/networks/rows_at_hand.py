"""Mini-batches of every kind for the tests of layers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamiter.sparse_rows import SparseRows

__all__ = ["KINDS", "rows_of"]

KINDS = ["one-hot", "sparse", "dense", "dense with zeros"]
"""Of dense rows all features are there, or as many as there are fields."""


def rows_of(
    kind: str, rows: int, features: int, fields: int, generator: np.random.Generator
) -> SparseRows | npt.NDArray[np.float64]:
    """Return rows of ``fields`` features each; "dense": of all features, whose number must be that of the fields."""
    if kind == "dense":
        return generator.normal(size=(rows, features))
    named = [np.sort(generator.choice(features, fields, replace=False)) for _ in range(rows)]
    numbers = np.ones((rows, fields)) if kind == "one-hot" else generator.normal(size=(rows, fields))
    sparse = SparseRows.from_rows(zip(named, numbers, strict=True), features)
    return sparse.to_dense() if kind == "dense with zeros" else sparse
