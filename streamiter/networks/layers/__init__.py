"""Layers, one a file; all of them are in ``LAYER_TYPES``, by their names in files.

===========================  ==================================================================
``layer``                    what all have in common: inputs, consumers, the state machine
``checks``                   settings that do not fit the inputs
``settings``                 what a layer is built from
``input_layer``              what layers that compute with the features have in common
``joining``                  what layers that join several inputs have in common
``crossing``, ``pairs``      what layers that cross vectors have in common
``sparse_products``          sparse mini-batches times matrices
``products``                 of several inputs
===========================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from streamiter.networks.layers.crossing import (
    BiInnerCross,
    BiInnerSumCross,
    BiInteractionCross,
    BiInteractionCrossTiled,
    BiOuterCross,
)
from streamiter.networks.layers.hidden import (
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
from streamiter.networks.layers.layer import Layer, LossLayer, SimpleLossLayer, StatusError

__all__ = ["LAYER_TYPES", "Layer", "LossLayer", "StatusError"]

_LAYERS: Final[tuple[type[Layer], ...]] = (
    SimpleInputLayer,
    Embedding,
    KMeansInputLayer,
    FCLayer,
    ParamSharedFC,
    BiInnerSumCross,
    BiInnerCross,
    BiInteractionCross,
    BiInteractionCrossTiled,
    BiOuterCross,
    ConcatLayer,
    SumPooling,
    MulPooling,
    DotPooling,
    CrossLayer,
    WeightedSumLayer,
    SimpleLossLayer,
    LossLayer,
)

LAYER_TYPES: Final[Mapping[str, type[Layer]]] = MappingProxyType(
    # Files spell the outer cross in two ways.
    {known.type_name: known for known in _LAYERS} | {"biouttercross": BiOuterCross}
)
"""By their names in files, in lower case."""
