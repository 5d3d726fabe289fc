"""Losses, one a file; all of them are in ``LOSSES``, by their names in files."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from streamiter.networks.losses.cross_entropy_loss import CrossEntropyLoss
from streamiter.networks.losses.hinge_loss import HingeLoss
from streamiter.networks.losses.huber_loss import HuberLoss
from streamiter.networks.losses.k_means_loss import KMeansLoss
from streamiter.networks.losses.l2_loss import L2Loss
from streamiter.networks.losses.log_loss import LogLoss
from streamiter.networks.losses.loss import Loss, Predictions
from streamiter.networks.losses.softmax_loss import SoftmaxLoss

__all__ = ["LOSSES", "Loss", "Predictions"]

_ALL: Final[tuple[type[Loss], ...]] = (
    L2Loss,
    LogLoss,
    HingeLoss,
    CrossEntropyLoss,
    SoftmaxLoss,
    HuberLoss,
    KMeansLoss,
)

LOSSES: Final[Mapping[str, type[Loss]]] = MappingProxyType({known.type_name: known for known in _ALL})
"""By their names in files, in lower case."""
