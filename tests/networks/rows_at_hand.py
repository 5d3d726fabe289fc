"""Tests of layers use these mini-batches of every kind."""

import numpy as np
import numpy.typing as npt

from streamiter.values.sparse_rows import SparseRows

__all__ = ["KINDS", "rows_of"]

KINDS = ["one-hot", "sparse", "dense", "dense with zeros"]
"""Dense rows have all features, or as many features as fields."""


def rows_of(
    kind: str, rows: int, features: int, fields: int, generator: np.random.Generator
) -> SparseRows | npt.NDArray[np.float64]:
    """Return rows with ``fields`` features each; for "dense" rows, ``features`` must equal ``fields``."""
    if kind == "dense":
        return generator.normal(size=(rows, features))
    named = [np.sort(generator.choice(features, fields, replace=False)) for _ in range(rows)]
    numbers = np.ones((rows, fields)) if kind == "one-hot" else generator.normal(size=(rows, fields))
    sparse = SparseRows.from_rows(zip(named, numbers, strict=True), features)
    return sparse.to_dense() if kind == "dense with zeros" else sparse
