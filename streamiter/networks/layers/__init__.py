"""The layers of networks, in ``LAYER_TYPES`` by their names in configuration files.

==========  ==========================================================================================
``layer``   ``Layer``, the base of all layers with its state machine; parameters, settings; the loss layer
``inputs``  layers that compute with the features of a mini-batch, such as an embedding
``hidden``  layers after others: fully connected, pooling, concatenation, crosses of vectors
==========  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from streamiter.networks.layers.hidden import (
    BiInnerCross,
    BiInnerSumCross,
    BiInteractionCross,
    BiInteractionCrossTiled,
    BiOuterCross,
    ConcatLayer,
    CrossLayer,
    DotPooling,
    FCLayer,
    MulPooling,
    ParamSharedFC,
    SumPooling,
    WeightedSumLayer,
)
from streamiter.networks.layers.inputs import Embedding, KMeansInputLayer, SimpleInputLayer
from streamiter.networks.layers.layer import Layer, LossLayer, StatusError

__all__ = ["LAYER_TYPES", "Layer", "LossLayer", "StatusError"]

LAYER_TYPES: Final[Mapping[str, type[Layer]]] = MappingProxyType(
    {
        "simpleinputlayer": SimpleInputLayer,
        "embedding": Embedding,
        "kmeansinputlayer": KMeansInputLayer,
        "fclayer": FCLayer,
        "paramsharedfc": ParamSharedFC,
        "biinnersumcross": BiInnerSumCross,
        "biinnercross": BiInnerCross,
        "biinteractioncross": BiInteractionCross,
        "biinteractioncrosstiled": BiInteractionCrossTiled,
        "bioutercross": BiOuterCross,
        "concatlayer": ConcatLayer,
        "sumpooling": SumPooling,
        "mulpooling": MulPooling,
        "dotpooling": DotPooling,
        "crosslayer": CrossLayer,
        "weightedsumlayer": WeightedSumLayer,
        "simplelosslayer": LossLayer,
        "losslayer": LossLayer,
        # Files spell the outer cross in two ways.
        "biouttercross": BiOuterCross,
    }
)
"""The layers by their names in configuration files, in lower case."""
