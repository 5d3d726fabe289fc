"""What a network learns: arrays by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from streamiter.optimizers import Optimizer

__all__ = ["Array", "Initial", "Parameter"]

Array = npt.NDArray[Any]
"""float32 or float64, as the network is."""

Initial = Literal["weight", "zero"]
"""How a parameter begins: as the network's way of initial values says for weights, or with zeros (biases)."""


@dataclass(eq=False)
class Parameter:
    """One array of one layer. ``values`` and ``gradient`` are those of the mini-batch at hand.

    ``shape`` is the whole shape. Where it is ``by_feature``, the first axis counts features, and ``values`` and
    ``gradient`` have one row for each of ``PlaceHolder.indices``, in that order.
    """

    name: str
    """``layer.weight``, ``layer.bias``."""
    shape: tuple[int, ...]
    by_feature: bool
    optimizer: Optimizer
    initial: Initial
    fan_in: int
    """Inputs of one output: features, or the dimension before."""
    fan_out: int
    values: Array | None = None
    gradient: Array | None = None

    @property
    def size(self) -> int:
        """Numbers in it."""
        return int(np.prod(self.shape))
