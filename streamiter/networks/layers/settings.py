"""What a layer is built from: the checked settings of one layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamiter.networks.losses.log_loss import LogLoss
from streamiter.networks.losses.loss import Loss
from streamiter.networks.transfer_functions.identity import Identity
from streamiter.networks.transfer_functions.transfer_function import TransferFunction
from streamiter.optimizers import Optimizer

__all__ = ["LayerSettings"]


@dataclass(frozen=True)
class LayerSettings:
    """Those of one layer; a layer looks only at what its type needs.

    Layers that a file writes as one (``outputdims``) are several here.
    """

    name: str
    output_dim: int = -1
    """−1: what follows from the inputs, where it does."""
    transfer_function: TransferFunction = field(default_factory=Identity)
    optimizer: Optimizer | None = None
    """Of a layer that learns."""
    factors: int | None = None
    """``numfactors`` of an embedding."""
    weight_dim: int | None = None
    """``weightdim`` of a layer whose weights are shared by all vectors of its input."""
    loss: Loss = field(default_factory=LogLoss)
