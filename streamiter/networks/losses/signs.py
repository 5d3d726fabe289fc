"""Labels of two classes, −1 and 1."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from streamiter.networks.parameters import Array

__all__ = ["SIGNS_OF_LABELS", "are_signs", "sign_labels"]

SIGNS_OF_LABELS: Final = "set translabel to PosNegTrans (above 0: 1, otherwise −1)"


def are_signs(labels: Array) -> npt.NDArray[np.bool_]:
    """Which labels are −1 or 1."""
    good: npt.NDArray[np.bool_] = np.abs(labels) == 1
    return good


def sign_labels(values: Array, at: float) -> Array:
    """1 where a value is above ``at``, otherwise −1."""
    labels: Array = np.where(values > at, values.dtype.type(1), values.dtype.type(-1))
    return labels
