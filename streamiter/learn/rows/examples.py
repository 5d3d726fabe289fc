"""What a learner needs of a mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.learn.rows.checks import Floats
from streamiter.learn.rows.feature_rows import Features, Rows, concatenated_rows
from streamiter.operators.rejection import shortened
from streamiter.sparse_rows import SparseRows

__all__ = ["CheckedExamples", "Examples", "Extract", "as_examples"]


@dataclass(frozen=True, slots=True)
class Examples:
    """Features (rows × features, or ``SparseRows``), a target for each row, and optionally its weight.

    A row of weight 2 is two rows of its mini-batch. The step is the mean over the rows, so weights are
    shares: they change nothing in a mini-batch of one row.
    """

    features: Features
    targets: npt.ArrayLike
    weights: npt.ArrayLike | None = None


@dataclass(frozen=True, slots=True)
class CheckedExamples:
    """The same as a model has checked it: finite, of its width, with targets as its loss counts them."""

    rows: Rows
    targets: Floats
    weights: Floats | None = None
    """None: each row counts once."""

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, which: slice) -> CheckedExamples:
        """Some of the rows; in one piece they are views, not copies."""
        weights = None if self.weights is None else self.weights[which]
        return CheckedExamples(self.rows[which], self.targets[which], weights)

    @classmethod
    def concatenate(cls, parts: Sequence[CheckedExamples]) -> CheckedExamples:
        """One of all, in this order; at least one. Dense or sparse, whichever the first one is."""
        if len(parts) == 1:
            return parts[0]
        weights = None
        if any(part.weights is not None for part in parts):
            weights = np.concatenate(
                [np.ones(len(part)) if part.weights is None else part.weights for part in parts]
            )
        rows = concatenated_rows([part.rows for part in parts])
        return cls(rows, np.concatenate([part.targets for part in parts]), weights)

    def to_record(self) -> dict[str, Any]:
        """The same as plain data."""
        rows: Any = self.rows
        if isinstance(rows, SparseRows):
            rows = {name: getattr(rows, name) for name in ("indptr", "indices", "values", "width")}
        return {"rows": rows, "targets": self.targets, "weights": self.weights}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> CheckedExamples:
        """What :meth:`to_record` gave."""
        rows = record["rows"]
        return cls(
            SparseRows(**rows) if isinstance(rows, dict) else rows, record["targets"], record["weights"]
        )


def as_examples(owner: str, given: Any) -> Examples:
    """What an :data:`Extract` gave; ConfigurationError for what are no ``Examples``: the function is at fault."""
    if isinstance(given, Examples):
        return given
    raise ConfigurationError(
        f"{owner}: expected a function that returns Examples, given one that returned {shortened(given)}; "
        "return Examples(features, targets)"
    )


Extract = Callable[[Any], Examples]
"""From a mini-batch (a list of records, an array or ``Columns``) to its examples. Raises ``BadRows``
naming the rows that are none."""
