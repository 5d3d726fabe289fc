"""Random numbers that follow from a seed, a sequence of their own for each purpose."""

from __future__ import annotations

import random

__all__ = ["generator"]


def generator(seed: int, purpose: str) -> random.Random:
    """What is drawn for one purpose does not depend on how much was drawn for another.

    >>> generator(1, "faults").random() == generator(1, "faults").random()
    True
    """
    return random.Random(f"{seed} {purpose}")  # noqa: S311 (nothing here is a secret)
