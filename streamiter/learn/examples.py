"""What a learner needs of a mini-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from streamiter.learn.feature_rows import Features

__all__ = ["Examples", "Extract"]


@dataclass(frozen=True, slots=True)
class Examples:
    """Features (rows × features, or ``SparseRows``), a target for each row, and optionally its weight.

    A row of weight 2 is two rows of its mini-batch. The step is the mean over the rows, so weights are
    shares: they change nothing in a mini-batch of one row.
    """

    features: Features
    targets: npt.ArrayLike
    weights: npt.ArrayLike | None = None


Extract = Callable[[Any], Examples]
"""From a mini-batch (a list of records, an array or ``Columns``) to its examples. Raises ``BadRows``
naming the rows that are none."""
