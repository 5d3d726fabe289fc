"""Labelled sparse vectors, one for each line, kept together in arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from streamiter.records import Columns
from streamiter_files.line_tokens import Irregular
from streamiter_files.number_parsing import Integers, Numbers

__all__ = ["SparseLines", "SparseRow", "sorted_row"]

SparseRow = tuple[float, list[int], list[float]]
"""Label, indices (from 0, increasing) and values of one line."""


class SparseLines:
    """Line i has the label ``labels[i]`` and, from ``firsts[i]`` to before ``firsts[i + 1]``, its entries."""

    __slots__ = ("firsts", "indices", "labels", "values")

    def __init__(self, labels: Numbers, firsts: Integers, indices: Integers, values: Numbers) -> None:
        self.labels = labels
        self.firsts = firsts
        self.indices = indices
        self.values = values

    @classmethod
    def from_rows(cls, rows: Sequence[SparseRow]) -> SparseLines:
        """The same from single rows."""
        counts = [len(indices) for _, indices, _ in rows]
        return cls(
            np.array([label for label, _, _ in rows], dtype=np.float64),
            np.cumsum([0, *counts]),
            np.array([index for _, indices, _ in rows for index in indices], dtype=np.int64),
            np.array([value for _, _, values in rows for value in values], dtype=np.float64),
        )

    def check(self, width: int | None) -> None:
        """Raise ``Irregular`` unless the indices of each line increase, from 0 to below ``width``."""
        increasing = self.indices[1:] > self.indices[:-1]
        inner = self.firsts[(self.firsts > 0) & (self.firsts < len(self.indices))]
        increasing[inner - 1] = True  # from one line to the next
        if not increasing.all():
            raise Irregular("indices that do not increase")
        if self.indices.size and (self.indices.min() < 0 or (width and self.indices.max() >= width)):
            raise Irregular("indices out of range")

    def records(self) -> list[dict[str, Any]]:
        """Each line as a dict with ``label``, ``indices`` and ``values`` (views of common arrays)."""
        firsts = self.firsts.tolist()
        indices, values = self.indices, self.values
        return [
            {"label": label, "indices": indices[first:last], "values": values[first:last]}
            for label, first, last in zip(self.labels.tolist(), firsts[:-1], firsts[1:], strict=True)
        ]

    def dense(self, width: int) -> Columns:
        """Columns ``label`` and ``features`` of the shape (lines, width)."""
        features = np.zeros((len(self.labels), width))
        lines = np.repeat(np.arange(len(self.labels)), np.diff(self.firsts))
        features[lines, self.indices] = self.values
        return Columns({"label": self.labels, "features": features})


def sorted_row(row: SparseRow, width: int | None) -> SparseRow:
    """The row with its indices in order; raises ``ValueError`` for one that is twice there or too large."""
    label, indices, values = row
    entries = sorted(zip(indices, values, strict=True), key=lambda entry: entry[0])
    ordered = [index for index, _ in entries]
    for index, following in pairwise(ordered):
        if index == following:
            raise ValueError(f"the index {index} (counted from 0) comes twice")
    if width is not None and ordered and ordered[-1] >= width:
        raise ValueError(f"the index {ordered[-1]} (counted from 0) is not below the width {width}")
    return label, ordered, [value for _, value in entries]
