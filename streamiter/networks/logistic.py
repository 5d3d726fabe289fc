"""The logistic function, for the sigmoid and for losses."""

from __future__ import annotations

import numpy as np

from streamiter.networks.parameters import Array

__all__ = ["logistic"]


def logistic(values: Array) -> Array:
    """1/(1 + e^(−x)), in place; where e^(−x) overflows it is 0.

    >>> logistic(np.array([-1000.0, 0.0, 1000.0])).tolist()
    [0.0, 0.5, 1.0]
    """
    with np.errstate(over="ignore"):
        np.negative(values, out=values)
        np.exp(values, out=values)
        values += 1
        np.reciprocal(values, out=values)
    return values
