"""``Gradient``: the sum of the gradients of some rows. Gradients of several workers can be added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from streamiter.errors import ModelError
from streamiter.operators.declared_state import Form
from streamiter.values.numbers import Floats, Indices, Moments
from streamiter.values.sparse_rows import sums_by

MOMENTS: Final = Form(
    lambda moments: (moments.records, moments.mean.copy(), moments.squares.copy()), lambda kept: Moments(*kept)
)


@dataclass(slots=True, eq=False, repr=False)
class Gradient:
    """The sum of the weighted gradients of some rows, and the sum of the weights of these rows.

    The sum of the gradients of several workers equals the gradient of all their rows:

    >>> first = Gradient(total=np.array([1.0, 2.0]), intercept=0.5, weight=1.0, records=1, width=2)
    >>> second = Gradient(total=np.array([3.0]), intercept=0.5, weight=3.0, records=2, width=2,
    ...                   indices=np.array([1]))
    >>> both = first + second
    >>> both.total.tolist(), both.weight, both.records
    ([1.0, 5.0], 4.0, 3)
    """

    total: Floats
    """A number for each of the ``width`` features or, with ``indices``, for each feature that it names."""
    intercept: float
    """The sum for the intercept."""
    weight: float
    """The sum of the weights of the rows."""
    records: int
    """The number of rows with a weight above 0."""
    width: int
    indices: Indices | None = None
    """Features in ascending order; None: all features."""
    moments: Moments | None = None
    """The statistics of the features, for a model that scales them."""

    def __add__(self, other: Gradient) -> Gradient:
        if self.width != other.width:
            raise ModelError(
                f"Gradient: expected a gradient of {self.width} features to add, given one of {other.width}"
            )
        indices, total = _added(self, other)
        return Gradient(
            total,
            self.intercept + other.intercept,
            self.weight + other.weight,
            self.records + other.records,
            self.width,
            indices,
            self.moments.plus(other.moments) if self.moments and other.moments else self.moments or other.moments,
        )

    def scaled(self, factor: float) -> Gradient:
        """Return the gradient of the same rows, times ``factor``."""
        return replace(self, total=self.total * factor, intercept=self.intercept * factor)

    def to_dense(self) -> Floats:
        """Return the sums of all features, as a new array."""
        if self.indices is None:
            return self.total.copy()
        dense = np.zeros(self.width)
        dense[self.indices] = self.total
        return dense

    def to_record(self) -> dict[str, Any]:
        """Return the fields as plain data, to send the gradient to another step."""
        fields = {field: getattr(self, field) for field in self.__slots__}
        return fields | {"moments": self.moments and tuple(self.moments)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Gradient:
        """Return the gradient of a record that :meth:`to_record` returned."""
        return cls(**{**record, "moments": record["moments"] and Moments(*record["moments"])})

    def __repr__(self) -> str:
        named = self.width if self.indices is None else len(self.indices)
        return f"Gradient({self.records} records of weight {self.weight:g}, {named} of {self.width} features)"


def _added(first: Gradient, second: Gradient) -> tuple[Indices | None, Floats]:
    if first.indices is None or second.indices is None:
        return None, first.to_dense() + second.to_dense()
    indices, places = np.unique(np.concatenate([first.indices, second.indices]), return_inverse=True)
    totals = np.concatenate([first.total, second.total])
    return indices, sums_by(places, totals, len(indices))


# Several optimizers keep the square of a gradient; the square of 1e150 is still finite.
GRADIENT_LIMIT: Final = 1e150


def is_tame(gradient: Gradient) -> bool:
    """Whether the square of the gradient is finite, so that optimizers can compute with it."""
    square = float(gradient.total @ gradient.total) + gradient.intercept * gradient.intercept
    return square < GRADIENT_LIMIT * GRADIENT_LIMIT
