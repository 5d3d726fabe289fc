"""The layers of networks.

==========  ==========================================================================================
``layer``   ``Layer``, the base of all layers with its state machine; parameters; the loss layer
``inputs``  layers that compute with the features of a mini-batch, such as an embedding
``hidden``  layers after others: fully connected, pooling, concatenation, crosses of vectors
==========  ==========================================================================================
"""

from streamiter.networks.layers.layer import Layer, LossLayer, StatusError

__all__ = ["Layer", "LossLayer", "StatusError"]
