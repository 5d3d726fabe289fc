"""The logistic function, then dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from streamiter.networks.transfer_functions.sigmoid import Sigmoid
from streamiter.networks.transfer_functions.transfer_function import TransferFunction
from streamiter.networks.transfer_functions.with_dropout import WithDropout

__all__ = ["SigmoidWithDropout"]


@dataclass(frozen=True)
class SigmoidWithDropout(WithDropout):
    """dropout(sigmoid(x)); in prediction sigmoid(x).

    >>> import numpy as np
    >>> SigmoidWithDropout(0.5).forward(np.zeros((1, 2)), None).output.tolist()
    [[0.5, 0.5]]
    """

    type_name: ClassVar[str] = "sigmoidwithdropout"
    inner: ClassVar[TransferFunction] = Sigmoid()
