"""Transfer functions, one a file; all of them are in ``TRANSFER_FUNCTIONS``, by their names in files."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from streamiter.networks.transfer_functions.dropout import Dropout
from streamiter.networks.transfer_functions.identity import Identity
from streamiter.networks.transfer_functions.relu import Relu
from streamiter.networks.transfer_functions.sigmoid import Sigmoid
from streamiter.networks.transfer_functions.sigmoid_with_dropout import SigmoidWithDropout
from streamiter.networks.transfer_functions.softmax import Softmax
from streamiter.networks.transfer_functions.tanh import Tanh
from streamiter.networks.transfer_functions.tanh_with_dropout import TanhWithDropout
from streamiter.networks.transfer_functions.transfer_function import TransferFunction

__all__ = ["TRANSFER_FUNCTIONS", "TransferFunction"]

_ALL: Final[tuple[type[TransferFunction], ...]] = (
    Identity,
    Sigmoid,
    Relu,
    Tanh,
    Softmax,
    Dropout,
    SigmoidWithDropout,
    TanhWithDropout,
)

TRANSFER_FUNCTIONS: Final[Mapping[str, type[TransferFunction]]] = MappingProxyType(
    {known.type_name: known for known in _ALL}
)
"""By their names in files, in lower case."""
