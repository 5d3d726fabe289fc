"""Gradients that can be added, so that several workers can take part in one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import numpy as np

from streamiter.errors import ModelError
from streamiter.learn.rows.checks import Floats
from streamiter.sparse_rows import Indices, sums_by

__all__ = ["Gradient"]


@final
class Gradient:
    """The sum of the weighted gradients of some rows, and the sum of the weights of these rows.

    ``total`` has one number for each of the ``width`` features or, where ``indices`` is not None, for
    each feature it names (ascending). ``intercept`` is the sum for the intercept. The mean of all
    workers' rows is what one model would have got from all rows at once:

    >>> first = Gradient(total=np.array([1.0, 2.0]), intercept=0.5, weight=1.0, records=1, width=2)
    >>> second = Gradient(total=np.array([3.0]), intercept=0.5, weight=3.0, records=2, width=2,
    ...                   indices=np.array([1]))
    >>> both = first + second
    >>> both.total.tolist(), both.weight, both.records
    ([1.0, 5.0], 4.0, 3)
    """

    __slots__ = ("indices", "intercept", "records", "total", "weight", "width")

    def __init__(
        self,
        total: Floats,
        intercept: float,
        weight: float,
        records: int,
        width: int,
        indices: Indices | None = None,
    ) -> None:
        self.total = total
        self.intercept = intercept
        self.weight = weight
        self.records = records
        self.width = width
        self.indices = indices

    def __add__(self, other: Gradient) -> Gradient:
        if self.width != other.width:
            raise ModelError(
                f"Gradient: expected one of {self.width} features to add, given one of {other.width}"
            )
        indices, total = _added(self, other)
        return Gradient(
            total=total,
            indices=indices,
            intercept=self.intercept + other.intercept,
            weight=self.weight + other.weight,
            records=self.records + other.records,
            width=self.width,
        )

    def to_dense(self) -> Floats:
        """The sums of all features (a new array)."""
        if self.indices is None:
            return self.total.copy()
        dense = np.zeros(self.width)
        dense[self.indices] = self.total
        return dense

    def to_record(self) -> dict[str, Any]:
        """The same as plain data, to send it on."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Gradient:
        """What :meth:`to_record` gave."""
        return cls(**record)

    def __repr__(self) -> str:
        named = self.width if self.indices is None else len(self.indices)
        return f"Gradient({self.records} records of weight {self.weight:g}, {named} of {self.width} features)"


def _added(first: Gradient, second: Gradient) -> tuple[Indices | None, Floats]:
    if first.indices is None or second.indices is None:
        return None, first.to_dense() + second.to_dense()
    indices, places = np.unique(np.concatenate([first.indices, second.indices]), return_inverse=True)
    totals = np.concatenate([first.total, second.total])
    return indices, sums_by(places, totals, len(indices))
