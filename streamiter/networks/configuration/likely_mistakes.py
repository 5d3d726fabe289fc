"""What a file may say, and most likely does not mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from streamiter.networks.configuration.settings import LayerConfiguration
from streamiter.networks.configuration.where import Where

__all__ = ["likely_mistakes"]

_PROBABILITIES: Final = ("sigmoid", "sigmoidwithdropout", "softmax")


def likely_mistakes(layers: Sequence[LayerConfiguration], file: Where) -> list[str]:
    """A warning for a cross entropy of what need not lie between 0 and 1: its loss falls below 0, without end."""
    by_name = {layer.name: layer for layer in layers}
    return [
        f"{file.layer(layer.declared).key('inputlayer')}: expected probabilities for {layer.loss.type}, given "
        f"{source.name!r}, which ends with {source.transfer_function.type}; end it with Sigmoid, or take LogLoss"
        for layer in layers
        if layer.loss is not None and layer.loss.key == "crossentropyloss"
        for source in map(by_name.__getitem__, layer.inputs)
        if source.transfer_function is not None and source.transfer_function.key not in _PROBABILITIES
    ]
