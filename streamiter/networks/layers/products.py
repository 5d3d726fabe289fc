"""Products of several arrays but one."""

from __future__ import annotations

from collections.abc import Sequence

from streamiter.networks.parameters import Array

__all__ = ["products_of_others"]


def products_of_others(factors: Sequence[Array]) -> list[Array]:
    """For each factor the product of all others; nothing is divided, so a factor may be 0. At least two.

    >>> import numpy as np
    >>> [product.tolist() for product in products_of_others([np.array([2.0]), np.array([0.0]), np.array([5.0])])]
    [[0.0], [10.0], [0.0]]
    """
    before = [factors[0]]
    for factor in factors[1:-1]:
        before.append(before[-1] * factor)
    others = [before[-1]]
    behind = factors[-1]
    for at in range(len(factors) - 2, 0, -1):
        others.append(before[at - 1] * behind)
        behind = behind * factors[at]
    others.append(behind)
    return others[::-1]
