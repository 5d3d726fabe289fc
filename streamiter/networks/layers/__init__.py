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

from streamiter.networks.layers.bi_inner_cross import BiInnerCross
from streamiter.networks.layers.bi_inner_sum_cross import BiInnerSumCross
from streamiter.networks.layers.bi_interaction_cross import BiInteractionCross
from streamiter.networks.layers.bi_interaction_cross_tiled import BiInteractionCrossTiled
from streamiter.networks.layers.bi_outer_cross import BiOuterCross
from streamiter.networks.layers.concat_layer import ConcatLayer
from streamiter.networks.layers.cross_layer import CrossLayer
from streamiter.networks.layers.dot_pooling import DotPooling
from streamiter.networks.layers.embedding import Embedding
from streamiter.networks.layers.fc_layer import FCLayer
from streamiter.networks.layers.k_means_input_layer import KMeansInputLayer
from streamiter.networks.layers.layer import Layer, StatusError
from streamiter.networks.layers.loss_layer import LossLayer, SimpleLossLayer
from streamiter.networks.layers.mul_pooling import MulPooling
from streamiter.networks.layers.param_shared_fc import ParamSharedFC
from streamiter.networks.layers.simple_input_layer import SimpleInputLayer
from streamiter.networks.layers.sum_pooling import SumPooling
from streamiter.networks.layers.weighted_sum_layer import WeightedSumLayer

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
