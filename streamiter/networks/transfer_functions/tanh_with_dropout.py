"""The hyperbolic tangent, then dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from streamiter.networks.transfer_functions.tanh import Tanh
from streamiter.networks.transfer_functions.transfer_function import TransferFunction
from streamiter.networks.transfer_functions.with_dropout import WithDropout

__all__ = ["TanhWithDropout"]


@dataclass(frozen=True)
class TanhWithDropout(WithDropout):
    """dropout(tanh(x)); in prediction tanh(x).

    >>> import numpy as np
    >>> TanhWithDropout(0.5).forward(np.zeros((1, 2)), None).output.tolist()
    [[0.0, 0.0]]
    """

    type_name: ClassVar[str] = "tanhwithdropout"
    inner: ClassVar[TransferFunction] = Tanh()
